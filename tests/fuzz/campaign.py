"""Many cases: draws them, judges them, reduces the failures and reports each kind once.

In: what to draw, a seed, a number. Out: a :class:`Tally`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch._dynamo import guards
from torch._dynamo.utils import counters

from . import deferrals, generate, heads, outside, rowwise, sharded, specs
from .case import Case
from .minimise import minimise
from .oracle import Verdict, clean_state, judge
from .traced import TRACERS

# Compiled code is dropped after so many cases: Dynamo's own tables grow.
RESET_AFTER = 200
# So many failures of a kind are reduced; the others are printed as they were drawn.
REDUCED = 10


@dataclass
class Tally:
    """What a campaign found.

    Attributes:
        outcomes: how many cases ended how; ``none`` where the dice found no program.
        fused: how many losses were fused while they ran.
        rejected: how many were declined.
        seconds: how long that took.
        failures: printed failures.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    fused: int = 0
    rejected: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def valid(self) -> int:
        return sum(n for kind, n in self.outcomes.items() if kind not in ("none", "invalid"))

    def add(self, other: Tally) -> None:
        self.outcomes += other.outcomes
        self.fused += other.fused
        self.rejected += other.rejected
        self.seconds = max(self.seconds, other.seconds)
        self.failures += other.failures

    def __str__(self) -> str:
        failed = {k: n for k, n in self.outcomes.items() if k not in ("ok", "none", "invalid")}
        return (
            f"{self.valid} valid programs in {self.seconds:.0f} s ({self.fused} losses fused, "
            f"{self.rejected} declined), {self.outcomes['invalid']} invalid; failures: "
            f"{failed or 'none'}"
        )


def traced(seed: str) -> Case | None:
    """A program that is run as a graph of torch.export or make_fx."""
    case = generate.program(seed)
    return case and replace(case, tracer=random.Random(seed).choice([*TRACERS]))


KINDS: dict[str, Callable[[str], Case | None]] = {
    "programs": generate.program,
    "traced": traced,
    "heads": heads.head,
    "rowwise": rowwise.rowwise,
    "specs": specs.spec,
    "deferred": deferrals.deferral,
    "outside": outside.outside,
    "sharded": sharded.sharded,
}


def draw(kind: str, seed: int, number: int) -> Case | None:
    """A case, which is run while it is drawn."""
    with clean_state():
        return KINDS[kind](f"{kind}:{seed}:{number}")


def campaign(
    kind: str,
    seed: int,
    programs: int,
    *,
    first: int = 0,
    step: int = 1,
    seconds: float = float("inf"),
    reduce: bool = True,
    report: Callable[[str], None] = print,
) -> Tally:
    """Judges ``programs`` valid cases, those with the numbers ``first``, ``first + step``, ...

    Args:
        kind: a key of :data:`KINDS`.
        seconds: no new case is begun after so many.
        reduce: whether failures are minimised.
        report: is given each failure, as text.
    """
    tally, started, known = Tally(), time.monotonic(), Counter()
    with quiet_compiler():
        for number in _numbers(first, step):
            tally.seconds = time.monotonic() - started
            if tally.valid >= programs or tally.seconds >= seconds:
                break
            before = counters["fusedce"].copy()
            case = draw(kind, seed, number)
            verdict = None if case is None else judge(case)
            tally.outcomes["none" if verdict is None else verdict.kind] += 1
            tally.fused += counters["fusedce"]["matched"] - before["matched"]
            tally.rejected += counters["fusedce"]["rejected"] - before["rejected"]
            if case is not None and verdict is not None and verdict.failed:
                like = _like(verdict)
                known[like] += 1
                if reduce and known[like] <= REDUCED:
                    case = minimise(case, lambda c: _like(judge(c)))
                text = f"# --kind {kind} --seed {seed} --first {number} --programs 1\n"
                text += f"# {verdict.kind}: {verdict.what}\n{case.stand_alone()}"
                tally.failures.append(text)
                report(text)
            if number // step % RESET_AFTER == 0:
                torch._dynamo.reset()
    return tally


def printed_campaign(kind: str, seed: int, programs: int, **options: Any) -> Tally:
    """A :func:`campaign` on one thread that prints its failures; a process may start with it."""
    torch.set_num_threads(1)
    report = functools.partial(print, end="\n\n", flush=True)
    return campaign(kind, seed, programs, report=report, **options)


def _like(verdict: Verdict) -> str:
    """Failures that are alike: the same error, or the same kind of difference."""
    what = verdict.what
    if verdict.kind not in ("raises", "stale"):
        what = what.split(":")[0]  # which value
    return f"{verdict.kind} {re.sub(r'[0-9]+', '', what)[:60]}"


def _numbers(first: int, step: int) -> Iterator[int]:
    number = first
    while True:
        yield number
        number += step


@contextlib.contextmanager
def quiet_compiler() -> Iterator[None]:
    """Dynamo without its logs, and without what only a profile needs."""
    loggers = [logging.getLogger(name) for name in ("torch", "fxpass")]
    levels = [logger.level for logger in loggers]
    profile: Any = contextlib.nullcontext()
    if hasattr(guards, "profile_guard_manager"):
        # a third of the time that a small program takes to compile is spent on emptying caches,
        # to measure how long its guards take
        profile = mock.patch.object(guards, "profile_guard_manager", return_value=0.0)
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with profile:
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
