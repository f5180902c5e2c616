"""``python -m benchmarks.host``: the host's time of one call, where the tensors are tiny.

Compiled functions run alternately in one process, on one thread, forward and then backward. A row
has the shortest of many calls, in microseconds, so that other processes hardly count::

    python -m benchmarks.host
    python -m benchmarks.host --device cuda --calls 5000

On a GPU a call returns when its kernels are queued; the time is what the host takes to stay ahead.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.about import about, heading

N, D, V = 8, 16, 32


def loss_alone(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return (F.cross_entropy(F.linear(x, weight), target),)


def loss_and_logits(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(x, weight)
    return F.cross_entropy(logits, target), logits


def row_losses(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return (F.cross_entropy(F.linear(x, weight), target, reduction="none").sum(),)


PROGRAMS = (loss_alone, loss_and_logits, row_losses)


def measure(program: Callable[..., Any], device: str, calls: int) -> dict[str, tuple[float, float]]:
    """Microseconds of forward and of backward, the shortest of ``calls``, by backend."""
    torch._dynamo.reset()
    every: dict[str, Any] = {"fusedce.min_logits_mb": 0}
    compiled: dict[str, Any] = {
        "inductor": torch.compile(program, backend="inductor"),
        "fusedce": torch.compile(program, backend="fusedce", options=every),
    }
    x, weight = (torch.randn(n, D, device=device, requires_grad=True) for n in (N, V))
    target = torch.randint(V, (N,), device=device)
    never = float("inf")
    best: dict[str, tuple[float, float]] = dict.fromkeys(compiled, (never, never))
    for _ in range(calls):
        for name, fn in compiled.items():
            x.grad = weight.grad = None
            start = time.perf_counter()
            loss, *logits = fn(x, weight, target)
            middle = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            del loss, logits
            if device == "cuda":
                torch.cuda.synchronize()
            times = (middle - start) * 1e6, (end - middle) * 1e6
            best[name] = min(best[name][0], times[0]), min(best[name][1], times[1])
    return best


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The host's time of one call of tiny tensors.")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--calls", type=int, default=2000)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    gc.disable()
    print(heading(about(given.device)))
    print(f"\n| N={N}, D={D}, V={V} | inductor, µs | fusedce, µs | more, µs |\n|---|---|---|---|")
    for program in PROGRAMS:
        found = measure(program, given.device, given.calls)
        for i, direction in enumerate(("forward", "backward")):
            theirs, ours = found["inductor"][i], found["fusedce"][i]
            name = program.__name__.replace("_", " ")
            print(f"| {name}, {direction} | {theirs:.0f} | {ours:.0f} | {ours - theirs:+.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
