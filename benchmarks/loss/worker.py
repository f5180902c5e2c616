"""The worker process of ``python -m benchmarks``: runs one provider.

In: a :class:`Case` as JSON in the first argument, then one command per line of standard input. Out:
one JSON line when it is ready, then one per command: ``check`` returns the errors against float64,
``measure`` the peak memory of one step, ``step`` the seconds of one step. A failed command returns
``error``, the reason.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

# Inductor compiles two programs to try the vector units with: no part of a model's compilation.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.loss import exact
from benchmarks.loss.case import FLOOR, OF_ROWS, Case
from benchmarks.loss.programs import PROGRAMS, function_of
from benchmarks.loss.providers import BARE, PROVIDERS
from benchmarks.process import serve
from fxpass.cli.memory import Memory

__all__ = ["FLOOR", "Case", "Session"]

# A turn runs as many steps as fit into this time (MOST_STEPS at most): the first step after the
# other providers' turns finds cold caches and sleeping threads.
TURN_SECONDS, MOST_STEPS = 0.25, 100


class Bare:
    """The GEMMs of a step without a loss, with allocated outputs.

    The logits are used in place of their gradient, so the results have no meaning.
    """

    def __init__(self, case: Case, x: Tensor, w: Tensor) -> None:
        self.x, self.w = x, w
        self.logits = x.new_zeros(len(x), len(w))
        self.gradients = (torch.zeros_like(x), torch.zeros_like(w)) if case.backward else ()

    @torch.no_grad()
    def __call__(self) -> None:
        """Three GEMMs, or one without a backward."""
        torch.mm(self.x, self.w.t(), out=self.logits)
        if self.gradients:
            dx, dw = self.gradients
            torch.mm(self.logits, self.w, out=dx)
            torch.mm(self.logits.t(), self.x, out=dw)


class Session:
    """The provider of a case, compiled, with its operands: what the commands do."""

    def __init__(self, case: Case) -> None:
        self.case, self.device = case, torch.device(case.device)
        self.program, self.provider = PROGRAMS[case.program], PROVIDERS[case.provider]
        self.trained = self.program.trained if case.backward else ()
        self.memory = Memory(self.device)
        self.operands: dict[str, Tensor] = {}
        self.stack = case.stack().requires_grad_(case.backward)
        if case.cache:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = case.cache
            # what all programs share is imported, and built in a new cache, before one is timed
            small = torch.ones(8, 8, device=case.device, requires_grad=True)
            self.provider.make(lambda t: (t.sin() * 2).sum())(small).backward()
        self.function = self.provider.make(function_of(case, self.stack), case.softcap)
        if not self.provider.compiles and case.provider != BARE and not case.layers:
            # the first call imports and sets up libraries, which must not count as the first step
            few = dataclasses.replace(case, n=64, d=8, v=256).operands(self.program.names)
            exact.results(self.function, few, self.trained)

    def check(self) -> dict[str, Any]:
        """The first step, which compiles: errors against float64, seconds, bytes.

        ``rehearsed`` says whether this step compiled. If not, its time and memory count where
        another step would take too long.
        """
        if self.case.provider == BARE:
            return {"errors": {}, **self.step(), "bytes": None, "rehearsed": False}
        self.operands = self.case.operands(self.program.names, self.case.distinct)
        self.memory.start()
        seconds, got = self._timed(self._run)
        found = counters["fusedce"]
        told = {
            "seconds": seconds,
            "bytes": self.memory.added(),
            "rehearsed": self.provider.compiles,
            "matched": found["matched"],
            "rejected": found["rejected"],
        }
        errors = exact.errors(got, exact.answer(self.case))
        self._forget()
        # all rows are different from now on
        self.operands |= self.case.operands(k for k in self.program.names if k in OF_ROWS)
        return {"errors": errors, **told}

    def measure(self) -> dict[str, Any]:
        """The bytes that one step adds to the memory in use, at its peak; and its seconds."""
        if self.case.provider == BARE:
            return {"bytes": None, "seconds": None}
        self.memory.start()
        seconds, _ = self._timed(self._run)
        answer = {"bytes": self.memory.added(), "seconds": seconds}
        self._forget()
        return answer

    def step(self) -> dict[str, Any]:
        """Seconds of one step: the mean of a turn's steps, after one that warms up.

        A step longer than a turn is the whole turn.
        """
        self.operands = self.operands or self.case.operands(self.program.names)
        run: Callable[[], Any] = self._run
        if self.case.provider == BARE:
            run = Bare(self.case, self.operands["x"], self.operands["w"])
        seconds, _ = self._timed(run)
        count = min(MOST_STEPS, int(TURN_SECONDS / max(seconds, 1e-6)))
        if count:
            seconds, _ = self._timed(run, count)
        del run
        self._forget()
        return {"seconds": seconds}

    def _run(self) -> dict[str, Tensor]:
        self.stack.zero_grad()
        return exact.results(self.function, self.operands, self.trained)

    def _timed(self, run: Callable[[], Any], steps: int = 1) -> tuple[float, Any]:
        """Seconds of one step, the mean of ``steps``; and what the last step returned."""
        self._wait()
        begin = time.perf_counter()
        for _ in range(steps - 1):
            run()
        got = run()
        self._wait()
        return (time.perf_counter() - begin) / steps, got

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _forget(self) -> None:
        """Drops the gradients; gives a GPU's memory back, which the others share."""
        for tensor in (*self.operands.values(), *self.stack.parameters()):
            tensor.grad = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    serve(lambda fields: Session(Case(**fields)))
