"""The worker process of ``python -m benchmarks``: runs one provider.

In: a :class:`Case` as JSON in the first argument, then one command per line of standard input. Out:
one JSON line when it is ready, then one per command: ``check`` returns the errors against float64,
``measure`` the peak memory of one step, ``step`` the seconds of one step. A failed command returns
``error``, the reason.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.loss import reference
from benchmarks.loss.case import CHECKED_ROWS, FLOOR, Case
from benchmarks.loss.providers import BARE, PROVIDERS, Loss
from benchmarks.process import serve
from fxpass.cli.memory import Memory

__all__ = ["FLOOR", "Case", "Session", "errors", "run_step"]

Tensors = tuple[Tensor, Tensor, Tensor]
# A turn runs as many steps as fit into this time (MOST_STEPS at most): the first step after the
# other providers' turns finds cold caches and sleeping threads.
TURN_SECONDS, MOST_STEPS = 0.25, 100


def run_step(loss_of: Loss, case: Case, tensors: Tensors) -> list[Tensor]:
    """The loss, then the gradients of x and weight if the case has a backward."""
    x, weight, target = tensors
    if not case.backward:
        with torch.no_grad():
            return [loss_of(x, weight, target)]
    x.grad = weight.grad = None
    loss = loss_of(x, weight, target)
    loss.backward()
    return [loss.detach(), *(t.grad for t in (x, weight) if t.grad is not None)]


def errors(loss_of: Loss, case: Case) -> dict[str, float]:
    """Relative errors of loss, dx and dw against float64, in a step of all the case's rows."""
    tensors = case.tensors(CHECKED_ROWS)
    got = run_step(loss_of, case, tensors)
    return reference.errors(got, *tensors, CHECKED_ROWS, case.softcap)


class Bare:
    """The GEMMs of a step without a loss, with allocated outputs.

    The logits are used in place of their gradient, so the results have no meaning.
    """

    def __init__(self, case: Case, x: Tensor, weight: Tensor) -> None:
        self.logits = x.new_zeros(len(x), len(weight))
        self.gradients = (torch.zeros_like(x), torch.zeros_like(weight)) if case.backward else ()

    @torch.no_grad()
    def __call__(self, tensors: Tensors) -> None:
        """Three GEMMs, or one without a backward."""
        x, weight, _ = tensors
        torch.mm(x, weight.t(), out=self.logits)
        if self.gradients:
            dx, dw = self.gradients
            torch.mm(self.logits, weight, out=dx)
            torch.mm(self.logits.t(), x, out=dw)


class Session:
    """The provider of a case, compiled, with its tensors: what the commands do."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.device = torch.device(case.device)
        self.provider = PROVIDERS[case.provider]
        self.loss_of = self.provider(case.softcap)
        self.memory = Memory(self.device)
        self.tensors: Tensors | None = None
        if not self.provider.compiles and case.provider != BARE:
            # the first call imports and sets up libraries, which must not count as the first step
            small = dataclasses.replace(case, n=64, d=8, v=256)
            run_step(self.loss_of, small, small.tensors())

    def check(self) -> dict[str, Any]:
        """The first step, which compiles: errors against float64, seconds, bytes.

        ``rehearsed`` says whether this step compiled. If not, its time and memory count where
        another step would take too long.
        """
        if self.case.provider == BARE:
            return {"errors": {}, **self.step(), "bytes": None, "rehearsed": False}
        self.tensors = self.case.tensors(CHECKED_ROWS)
        self.memory.start()
        seconds, got = self._timed(lambda t: run_step(self.loss_of, self.case, t))
        answer = {
            "seconds": seconds,
            "bytes": self.memory.added(),
            "rehearsed": self.provider.compiles,
        }
        found = reference.errors(got, *self.tensors, CHECKED_ROWS, self.case.softcap)
        self._forget()
        x, target = self.case.rows()  # all different from now on
        self.tensors = (x, self.tensors[1], target)
        return {"errors": found, **answer}

    def measure(self) -> dict[str, Any]:
        """The bytes that one step adds to the memory in use, at its peak; and its seconds."""
        if self.case.provider == BARE:
            return {"bytes": None, "seconds": None}
        self.memory.start()
        seconds, _ = self._timed(lambda t: run_step(self.loss_of, self.case, t))
        answer = {"bytes": self.memory.added(), "seconds": seconds}
        self._forget()
        return answer

    def step(self) -> dict[str, Any]:
        """Seconds of one step: the mean of a turn's steps, after one that warms up.

        A step longer than a turn is the whole turn.
        """
        if self.tensors is None:
            self.tensors = self.case.tensors()
        if self.case.provider == BARE:
            run: Callable[[Tensors], Any] = Bare(self.case, *self.tensors[:2])
        else:
            run = lambda t: run_step(self.loss_of, self.case, t)  # noqa: E731
        seconds, _ = self._timed(run)
        count = min(MOST_STEPS, int(TURN_SECONDS / max(seconds, 1e-6)))
        if count:
            seconds, _ = self._timed(run, count)
        del run
        self._forget()
        return {"seconds": seconds}

    def _timed(self, run: Callable[[Tensors], Any], steps: int = 1) -> tuple[float, Any]:
        """Seconds of one step, the mean of ``steps``; and what the last step returned."""
        assert self.tensors is not None
        self._wait()
        begin = time.perf_counter()
        for _ in range(steps - 1):
            run(self.tensors)
        got = run(self.tensors)
        self._wait()
        return (time.perf_counter() - begin) / steps, got

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def _forget(self) -> None:
        """Drops the gradients; gives a GPU's memory back, which the others share."""
        assert self.tensors is not None
        self.tensors[0].grad = self.tensors[1].grad = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    serve(lambda fields: Session(Case(**fields)))
