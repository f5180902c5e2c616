"""The worker process of ``python -m benchmarks.parity``: one program with or without fxpass.

In: a :class:`Job` as JSON in the first argument, then commands (:func:`benchmarks.process.serve`).
``check`` compiles the program and compares a step with eager; ``measure`` returns the bytes that a
step adds to the memory in use, and ``time`` its seconds.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.parity.cases import PROGRAMS, Sizes
from benchmarks.process import serve
from fxpass.cli.memory import Memory


@dataclass(frozen=True)
class Job:
    """A key of ``PROGRAMS``, its sizes, the inner backend, and whether fxpass is switched on."""

    program: str
    n: int
    d: int
    v: int
    inner: str
    enabled: bool


class Session:
    """The program and its compiled function."""

    def __init__(self, job: Job) -> None:
        os.environ["FUSEDCE"] = str(int(job.enabled))
        self.program = PROGRAMS[job.program](Sizes(job.n, job.d, job.v))
        options: Any = {"fusedce.inner": job.inner}
        self.function = torch.compile(self.program.function, backend="fusedce", options=options)
        self.memory = Memory(torch.device("cpu"))

    def check(self) -> dict[str, Any]:
        """The largest distance of an output or gradient from eager's, relative to its norm."""
        eager = self.program.step(self.program.function)
        distances = []
        for _ in range(2):  # the second step runs with the state that the first step left
            got = self.program.step(self.function)
            pairs = zip(got, eager, strict=True)
            distances += [float((a - b).norm() / b.norm().clamp_min(1e-6)) for a, b in pairs]
        finite = all(t.isfinite().all() for t in eager)
        found = counters["fusedce"]
        return {
            "distance": max(distances) if finite else float("inf"),
            "matched": found["matched"],
            "rejected": found["rejected"],
        }

    def measure(self) -> dict[str, Any]:
        """The memory of one step."""
        self._clear()
        self.memory.start()
        self._step()
        return {"bytes": self.memory.added()}

    def time(self) -> dict[str, Any]:
        """The time of one step."""
        self._clear()
        begin = time.perf_counter()
        self._step()
        return {"seconds": time.perf_counter() - begin}

    def _clear(self) -> None:
        for tensor in self.program.tensors:
            tensor.grad = None

    def _step(self) -> None:
        outputs = self.function(*self.program.tensors)
        outputs[0].backward()


if __name__ == "__main__":
    serve(lambda fields: Session(Job(**fields)))
