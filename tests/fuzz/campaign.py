"""Many random programs: draws them, judges them, reduces the failures and prints each as a row.

In: a seed, a number of programs, and what is fixed of the way in which they run. Out: a
:class:`Tally`. A program counts as valid when eager runs it, backward included. It fails when the
oracle finds something wrong with it and nothing with the inner backend alone.
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
from dataclasses import dataclass, field, fields, replace
from typing import Any
from unittest import mock

import torch
from torch._dynamo import guards
from torch._dynamo.utils import counters

from fxpass import messages
from fxpass.plan import plan
from tests.fuzz.small import small
from tests.fuzz.writer import Writer
from tests.programs.operands import Sizes
from tests.programs.row import BF16, F16, F64, RAISES, Row
from tests.support.oracle import FINITE, WAYS, Way, outcome

SIZES = (
    *(Sizes(b=2, t=5, d=6, v=13),) * 6,
    # as many rows as classes, and as many hidden values as classes
    *(Sizes(b=2, t=4, d=8, v=8), Sizes(b=3, t=4, d=6, v=12)),
)
SPELLED = ("outside", "checkpointed", "exported", "made", "made before autograd")
RESET_AFTER = 200  # programs: Dynamo's own tables grow
REDUCED = 10  # failures of a kind that are reduced; the others are printed as they were drawn


@dataclass
class Tally:
    """What a campaign found.

    Attributes:
        outcomes: how many programs ended how; ``none`` where the dice found no program.
        fused: how many losses were fused while they ran.
        seconds: how long that took.
        failures: printed failures.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    fused: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    @property
    def valid(self) -> int:
        """Programs that eager runs."""
        return self.outcomes["ok"] + self.outcomes["failed"]

    def add(self, other: Tally) -> None:
        """Adds what another process found."""
        self.outcomes += other.outcomes
        self.fused += other.fused
        self.seconds = max(self.seconds, other.seconds)
        self.failures += other.failures

    def __str__(self) -> str:
        return (
            f"{self.valid} valid programs in {self.seconds:.0f} s ({self.fused} losses fused), "
            f"{self.outcomes['invalid']} invalid, {self.outcomes['failed']} failed"
        )


@dataclass(frozen=True)
class Drawn:
    """A program and the way in which it runs, with that by which it is printed."""

    row: Row
    way: Way
    spelling: str = ""


def draw(seed: int, number: int, only: str = "", ranks: bool = False) -> Drawn | None:
    """A program, which runs in eager while it is drawn.

    Args:
        only: one of ``SPELLED`` for all programs.
        ranks: whether the classes of its heads are dealt to ranks.
    """
    rng = random.Random(f"{seed}:{number}")
    spelling = only or rng.choice(("",) * 5 + SPELLED)
    way = _way(rng, spelling)
    if ranks:
        spelling, way = "", replace(way, inner="aot_eager", spell=None, patched=small)
    with torch.random.fork_rng(devices=[]), quiet():
        writer = Writer(rng, rng.choice(SIZES), way, spelling == "outside", ranks)
        try:
            row = writer.write(f"{seed}:{number}")
        except RuntimeError:  # one of several views is gone once another was written to
            return None
    return row and Drawn(row, way, spelling)


def _way(rng: random.Random, spelling: str) -> Way:
    dynamic = rng.choice((None,) * 8 + (True,)) if spelling in ("", "outside") else None
    autocast = rng.choice((None,) * 5 + (BF16,))
    around = rng.choice((contextlib.nullcontext,) * 12 + (torch.no_grad, torch.inference_mode))
    return Way(
        inner=rng.choices(("aot_eager", "eager", "inductor"), (75, 24, 0 if dynamic else 1))[0],
        dtype=rng.choice((None,) * 5 + (BF16, BF16, F16, F64)),
        around=(lambda: torch.autocast("cpu", BF16)) if autocast else around,
        autocasts=autocast is not None,
        dynamic=dynamic,
        patched=rng.choice((*(contextlib.nullcontext,) * 4, *(small,) * 5, interpreted)),
        spell=WAYS[spelling].spell if spelling else None,
        options={
            "fusedce.logits": rng.choice(("auto", "auto", "defer", "keep")),
            "fusedce.strategy": rng.choice(("auto", "chunked", "tiled")),
            "fusedce.memory_mb": rng.choice((0, 0, 1)),
            "fusedce.accumulate": rng.choice(("auto", "auto", "float32")),
        },
        spread=8,
    )


def interpreted() -> Any:
    """Triton's kernels run in its interpreter, but for float64."""
    known = plan.implementation_for

    def implementation_for(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
        return known(device, dtype) if dtype == torch.float64 else ("triton", "for the fuzzer")

    return mock.patch.object(plan, "implementation_for", implementation_for)


def judge(drawn: Drawn) -> tuple[str, str]:
    """``ok``, ``invalid`` or ``failed``, and why."""
    found = outcome(drawn.row, drawn.way)
    if found.becomes == RAISES:
        return "invalid", "eager raises"
    if "StaleLogitsError" in found.wrong and re.search(r"\w_\(|\] \S?= |step\(", drawn.row.text):
        return "ok", ""  # deferred logits say that what they read was written to
    if messages.fixed(messages.GRADIENT_LATE) in found.wrong:
        return "ok", ""  # and that gradients do not pass them
    if all(FINITE in one for one in found.wrong.split("; ")):
        return "ok", ""  # a formula has the limit of p log p where p is 0
    if found.wrong:
        options = {**drawn.way.options, "fusedce.enabled": False}
        for inner in _ALONE.get(drawn.way.inner, (drawn.way.inner,)):
            if outcome(drawn.row, replace(drawn.way, inner=inner, options=options)).wrong:
                return "invalid", f"the inner backend alone: {found.wrong}"
        return "failed", found.wrong
    return "ok", ""


# What the pass runs in: AOTAutograd, also within eager, and Inductor's decompositions.
_ALONE = dict.fromkeys(("eager", "aot_eager"), ("aot_eager", "aot_eager_decomp_partition"))


def campaign(
    seed: int,
    programs: int,
    *,
    first: int = 0,
    step: int = 1,
    seconds: float = float("inf"),
    only: str = "",
    ranks: bool = False,
    reduce: bool = True,
    judge: Callable[[Drawn], tuple[str, str]] = judge,
    report: Callable[[str], None] = print,
) -> Tally:
    """Judges ``programs`` valid programs, those with the numbers ``first``, ``first + step``, ...

    Args:
        seconds: no new program is begun after so many.
        only: as of :func:`draw`, like ``ranks``.
        reduce: whether failures are minimised.
        judge: says what becomes of a program.
        report: is given each failure, as text.
    """
    tally, started, known, number = Tally(), time.monotonic(), Counter[str](), first
    with quiet():
        while tally.valid < programs and tally.seconds < seconds:
            before = counters["fusedce"]["matched"]
            drawn = draw(seed, number, only, ranks)
            kind, why = judge(drawn) if drawn is not None else ("none", "")
            tally.outcomes[kind] += 1
            tally.fused += counters["fusedce"]["matched"] - before
            if drawn is not None and kind == "failed":
                known[like(why)] += 1
                if reduce and known[like(why)] <= REDUCED:
                    drawn = minimise(drawn, lambda one: like(judge(one)[1]))
                tally.failures.append(f"# --seed {seed} --first {number}: {why}\n{printed(drawn)}")
                report(tally.failures[-1])
            if number // step % RESET_AFTER == 0:
                torch._dynamo.reset()
            number += step
            tally.seconds = time.monotonic() - started
    return tally


def printed_campaign(seed: int, programs: int, **options: Any) -> Tally:
    """A :func:`campaign` on one thread that prints its failures; a process may start with it."""
    torch.set_num_threads(1)
    report = functools.partial(print, end="\n\n", flush=True)
    return campaign(seed, programs, report=report, **options)


def like(why: str) -> str:
    """The same for failures that are alike: which value it is, and how it differs, do not count."""
    return re.sub(r"[0-9.e-]+", "", re.sub(r"(output|gradient of) \w+.*", "value", why))[:60]


def minimise(drawn: Drawn, judge: Callable[[Drawn], str]) -> Drawn:
    """The smallest program and the plainest way that fail alike, as ``judge`` says."""
    wanted, plain = judge(drawn), Way(spread=drawn.way.spread)
    for _ in range(3):
        before = drawn
        for part in fields(Way):
            way = replace(drawn.way, **{part.name: getattr(plain, part.name)})
            if way != drawn.way and (part.name != "spell" or drawn.spelling != "outside"):
                drawn = _if(judge, wanted, drawn, replace(drawn, way=way))
        for at in reversed(range(len(_statements(drawn)) - 1)):
            parts = _statements(drawn)
            text = "\n".join([*parts[:at], *parts[at + 1 :]])
            drawn = _if(judge, wanted, drawn, replace(drawn, row=replace(drawn.row, text=text)))
        for text in _shorter(drawn.row.text):
            drawn = _if(judge, wanted, drawn, replace(drawn, row=replace(drawn.row, text=text)))
        if drawn == before:
            break
    return drawn


def _if(judge: Callable[[Drawn], str], wanted: str, drawn: Drawn, smaller: Drawn) -> Drawn:
    try:
        return smaller if judge(smaller) == wanted else drawn
    except Exception:  # no program any more
        return drawn


def _statements(drawn: Drawn) -> list[str]:
    return re.split(r"\n(?! )", drawn.row.text)


def _shorter(text: str) -> list[str]:
    """With one output, and without one of the terms of the loss."""
    head, _, last = text.rpartition("\n")
    outputs = [f"{head}\n({one},)" for one in last.strip("(),").split(", ")]
    line = next((one for one in text.splitlines() if one.startswith("loss = ")), "")
    terms = line.removeprefix("loss = ").split(" + ")
    return outputs + [text.replace(line, f"loss = {term}") for term in terms if len(terms) > 1]


def printed(drawn: Drawn) -> str:
    """A failure as a row, and what is not plain of its way."""
    row, plain = drawn.row, Way()
    way = {f.name: getattr(drawn.way, f.name) for f in fields(Way) if f.name != "spell"}
    odd = [f"{n}={getattr(v, '__name__', v)}" for n, v in way.items() if v != getattr(plain, n)]
    text = "\n".join(f"        {line + chr(10)!r}" for line in row.text.splitlines())
    return (
        f"    Row({row.name!r},\n{text},\n        trained={row.trained!r}, sizes={row.sizes!r}),\n"
        f"    # {drawn.spelling or 'as it is'}; {', '.join(odd)}"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Dynamo without its logs, and without what only a profile needs. The oracle reads those of
    fxpass, which are not printed."""
    torch_log, log = logging.getLogger("torch"), logging.getLogger("fxpass")
    level = torch_log.level
    profile: Any = contextlib.nullcontext()
    if hasattr(guards, "profile_guard_manager"):
        # a third of the time that a small program takes to compile is spent on emptying caches,
        # to measure how long its guards take
        profile = mock.patch.object(guards, "profile_guard_manager", return_value=0.0)
    try:
        torch_log.setLevel(logging.CRITICAL)
        log.propagate = False
        with profile:
            yield
    finally:
        torch_log.setLevel(level)
        log.propagate = True
