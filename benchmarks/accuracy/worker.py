"""The worker process of ``python -m benchmarks --suite accuracy``: one provider in one setting.

In: a :class:`Case` as JSON in the first argument, then the command ``check``
(:func:`benchmarks.process.serve`). Out: errors against float64, and shares of zeros.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.accuracy.cases import Problem, Setting, compare, rounded, step
from benchmarks.accuracy.schemes import ROUNDED, SCHEMES
from benchmarks.loss.case import Case
from benchmarks.process import serve


class Session:
    """A provider with its operands."""

    def __init__(self, case: Case) -> None:
        self.case, dtype = case, getattr(torch, case.dtype)
        self.setting = Setting(dtype, case.autocast, case.scaled)

    def check(self) -> dict[str, Any]:
        """The first step: errors of loss and gradients, and the gradients' zeros."""
        problem = Problem(self.case.n, self.case.d, self.case.v, self.setting.dtype)
        begin = time.perf_counter()
        if self.case.provider == ROUNDED:
            row = rounded(self.setting, problem)
        else:
            loss_of = SCHEMES[self.case.provider].make()
            row = compare(step(loss_of, self.setting, problem), problem.exact)
        seconds = time.perf_counter() - begin
        return {"errors": row.errors, "zeros": row.zeros, "seconds": seconds}


if __name__ == "__main__":
    serve(lambda fields: Session(Case(**fields)))
