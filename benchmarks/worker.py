"""One provider in a process of its own, driven line by line from standard input.

In: a :class:`Case` as JSON in the first argument, then one line per command. Out: one JSON line per
answer: ``check`` gives the errors against float64, ``measure`` the peak memory of one step,
``step`` the seconds of one step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.providers import PROVIDERS, Loss, plain
from fxpass.memory import memory_of


@dataclass(frozen=True)
class Case:
    """What is measured: x ``[n, d]`` and weight ``[v, d]`` of one dtype on one device."""

    provider: str
    n: int
    d: int
    v: int
    dtype: str
    device: str
    backward: bool

    def tensors(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """x ``[rows, d]``, weight ``[v, d]``, target ``[rows]``; the same for every provider."""
        generator = torch.Generator().manual_seed(0)
        dtype = getattr(torch, self.dtype)
        x = torch.randn(rows, self.d, generator=generator).to(self.device, dtype)
        weight = torch.randn(self.v, self.d, generator=generator) * self.d**-0.5
        target = torch.randint(self.v, (rows,), generator=generator).to(self.device)
        weight = weight.to(self.device, dtype).requires_grad_(self.backward)
        return x.requires_grad_(self.backward), weight, target


# Rows on which a provider's numbers are compared with float64's.
CHECKED_ROWS = 256
# What rounding may add where eager happens to be exact, by mantissa bits: a few units in the last
# place of the dtype that the gradients are returned in.
FLOOR = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}


def run_step(loss_of: Loss, case: Case, tensors: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Loss, then the gradients of x and weight where the case has a backward."""
    x, weight, target = tensors
    if not case.backward:
        with torch.no_grad():
            return [loss_of(x, weight, target)]
    x.grad = weight.grad = None
    loss = loss_of(x, weight, target)
    loss.backward()
    return [loss.detach(), *(t.grad for t in (x, weight) if t.grad is not None)]


def errors(loss_of: Loss, case: Case) -> dict[str, float]:
    """Relative errors of loss, dx and dw against float64, and of eager at the same dtype."""
    x, weight, target = case.tensors(min(case.n, CHECKED_ROWS))
    wide = [t.detach().double().requires_grad_(case.backward) for t in (x, weight)]
    exact = run_step(plain_double, case, (wide[0], wide[1], target))
    out = {}
    for who, function in (("", loss_of), ("eager ", plain)):
        got = run_step(function, case, (x, weight, target))
        for name, a, b in zip(("loss", "dx", "dw"), got, exact, strict=False):
            out[who + name] = float((a.double() - b).norm() / b.norm())
    return out


def plain_double(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The program of :func:`benchmarks.providers.plain` without its cast to f32."""
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight), target)


def main() -> None:
    """Answers commands until standard input ends."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is not an answer
    case = Case(**json.loads(sys.argv[1]))
    loss_of = PROVIDERS[case.provider]()
    memory = memory_of(torch.device(case.device))
    tensors = None
    for line in sys.stdin:
        command = line.strip()
        if command == "check":
            answer = errors(loss_of, case)
        else:
            if tensors is None:
                tensors = case.tensors(case.n)
                run_step(loss_of, case, tensors)  # compiles
                tensors[0].grad = tensors[1].grad = None
            if command == "measure":
                memory.start()
            begin = time.perf_counter()
            run_step(loss_of, case, tensors)
            if case.device != "cpu":
                torch.accelerator.synchronize()
            answer = {"seconds": time.perf_counter() - begin}
            if command == "measure":
                peak, rest = memory.peak(), memory.rest
                answer = {"bytes": None if peak is None or rest is None else peak - rest}
            tensors[0].grad = tensors[1].grad = None
        print(json.dumps(answer), file=results, flush=True)


def job(case: Case) -> str:
    """The first argument of a worker's process."""
    return json.dumps(dataclasses.asdict(case))


if __name__ == "__main__":
    main()
