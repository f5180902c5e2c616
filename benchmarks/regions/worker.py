"""The worker process of ``python -m benchmarks.regions``: runs one program with one provider.

In: a :class:`Case` as JSON in the first argument, then one command per line of standard input. Out:
one JSON line when it is ready, then one per command: ``first`` returns the seconds that the
first step compiles, ``check`` the errors against float64, ``measure`` the peak memory of a step,
``step`` the seconds of a step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Inductor compiles two programs to try the vector units with: no part of a model's compilation.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import torch
from torch import Tensor

from benchmarks.process import serve
from benchmarks.regions.programs import Case
from fxpass.cli.memory import Memory

# A turn runs as many steps as fit into this time: see benchmarks.loss.worker.
TURN_SECONDS, MOST_STEPS = 0.25, 100


def compiled(function: Callable[..., Tensor], provider: str) -> Callable[..., Tensor]:
    """What the provider makes of a function; shapes are static."""
    if provider == "eager":
        return function
    options: dict[str, Any] = {"fusedce.min_logits_mb": 0} if provider == "fusedce" else {}
    return torch.compile(function, backend=provider, dynamic=False, options=options)


class Session:
    """A program with its tensors: what the commands do."""

    def __init__(self, case: Case) -> None:
        self.case = case
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = case.cache
        self.memory = Memory(torch.device(case.device))
        self.tensors, stack = case.tensors(), case.stack()
        self.leaves = [*self.tensors.values(), *stack.parameters()]
        # what all programs share is imported, and built in a new cache, before one is timed
        small = torch.ones(8, 8, device=case.device, requires_grad=True)
        compiled(lambda t: (t.sin() * 2).sum(), case.provider)(small).backward()
        self.loss = compiled(case.program(stack), case.provider)

    def first(self) -> dict[str, Any]:
        """Seconds that the first step takes longer than the second: those of compilation."""
        first = self._timed()
        return {"seconds": max(first - self._timed(), 0.0)}

    def check(self) -> dict[str, Any]:
        """Relative errors of the loss and of each operand's gradient, in the norm."""
        file = Path(self.case.exact)
        exact = torch.load(file) if file.is_file() else self.case.answer()
        if not file.is_file():
            torch.save(exact, file)
        got = self._run()
        errors = {
            name: float((got[name].double() - true).norm() / true.norm())
            for name, true in exact.items()
        }
        self._forget()
        return {"errors": errors}

    def measure(self) -> dict[str, Any]:
        """The bytes that one step adds to the memory in use, at its peak, gradients included."""
        self.memory.start()
        self._run()
        added = self.memory.added()
        self._forget()
        return {"bytes": added}

    def step(self) -> dict[str, Any]:
        """Seconds of one step: the mean of a turn's steps, after one that warms up."""
        seconds = self._timed()
        count = min(MOST_STEPS, int(TURN_SECONDS / max(seconds, 1e-6)))
        return {"seconds": self._timed(count) if count else seconds}

    def _run(self) -> dict[str, Tensor]:
        for tensor in self.leaves:
            tensor.grad = None
        loss = self.loss(*self.tensors.values())
        loss.backward()
        gradients = {f"d{name}": t.grad for name, t in self.tensors.items() if t.grad is not None}
        return {"loss": loss.detach(), **gradients}

    def _timed(self, steps: int = 1) -> float:
        self._wait()
        begin = time.perf_counter()
        for _ in range(steps):
            self._run()
        self._wait()
        seconds = (time.perf_counter() - begin) / steps
        self._forget()
        return seconds

    def _wait(self) -> None:
        if self.case.device != "cpu":
            torch.accelerator.synchronize()

    def _forget(self) -> None:
        """Drops the gradients; gives a GPU's memory back, which the others share."""
        for tensor in self.leaves:
            tensor.grad = None
        if self.case.device != "cpu":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    serve(lambda fields: Session(Case(**fields)))
