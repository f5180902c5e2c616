"""Random row-wise programs: one to three heads, then whatever leaves the rows of logits apart.

In: a seed. Out: a :class:`Case`, or None where the dice found no program that eager runs. Such a
program is a directed graph of tensors with classes (``z0``, ``z1``, ...), each of which has one
dimension of classes and rows that were moved as its row operands are; of reductions to rows (``r0``,
``r1``, ...); and of a loss of these rows, whose gradients are known before or depend on them. The
statements are those of :mod:`tests.fuzz.rowwise_grammar`::

    python -m tests.fuzz --kind rowwise --seed 1 --programs 300
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from . import afterwards
from . import rowwise_grammar as grammar
from .case import Case, Statement
from .generate import autocast, environment
from .heads import OPTIONS
from .oracle import run
from .rowwise_body import Body

DTYPES = ("",) * 6 + (".bfloat16()", ".bfloat16()", ".half()", ".double()")
INNER = ("aot_eager",) * 150 + ("eager",) * 48 + ("inductor",) * 2
PROGRAMS = 4  # for each seed, until eager runs one
STEEPEST = 1e4  # of a gradient


def rowwise(seed: str) -> Case | None:
    """One program with its session."""
    return first(seed, _drawn)


def first(seed: str, draw: Callable[[random.Random], Case | None]) -> Case | None:
    """The first of a few programs that eager runs."""
    for again in range(PROGRAMS):
        case = draw(random.Random(f"{seed}:{again}"))
        if case is not None and runs(case):
            return case
    return None


def _drawn(rng: random.Random) -> Case | None:
    inputs = inputs_of(rng)
    dynamic = rng.choice((None,) * 8 + (True,))
    inner = "aot_eager" if dynamic else rng.choice(INNER)
    options: dict[str, Any] = {"fusedce.inner": inner, "fusedce.min_logits_mb": 0}
    options |= {name: rng.choice(values) for name, values in OPTIONS.items()}
    case = Case(inputs, (), (), (), (), options, dynamic, rng.randrange(1000))
    mode = rng.choice(((),) * 14 + (("torch.no_grad()",),) * 2 + (("torch.inference_mode()",),))
    inside, outside = autocast(rng)
    body = Body(rng, environment(case), (*outside, *mode), inside, bool(dynamic))
    if not written(body.write):
        return None
    returned = body.returned()
    call = Statement(f"{', '.join(returned)}, = program({case.arguments})", (*outside, *mode))
    session = [Statement(f"{case.arguments} = inputs()"), call]
    some = ["loss", *(n for n in returned[1:] if rng.random() < 0.5)]
    again = rng.random()
    if not mode:
        passes = [Statement(text) for text in afterwards.passes(rng, some)]
        session += [*[call] * (again < 0.08), *passes]  # a second call accumulates gradients
    if again > 0.9:
        session += [Statement(f"{case.arguments} = inputs(3)"), call]
        session += [Statement(f"backward({', '.join(some)})")] * (not mode)
    return Case(
        *(inputs, tuple(body.statements), returned, tuple(session), returned),
        *(options, dynamic, case.seed),
        zeros=True,
        small=rng.random() < 0.5,
        tags=True,
    ).trimmed()


def written(write: Callable[[], Any]) -> Any:
    """What a writer returns; None if one of several views is gone once another was written to."""
    try:
        return write()
    except RuntimeError as error:
        if "Such functions do not allow the output views" not in str(error):
            raise
        return None


def inputs_of(rng: random.Random) -> tuple[tuple[str, str], ...]:
    """The arguments of a program: of one dtype, but for some operands; some of them trained."""
    dtype = rng.choice(DTYPES)
    frozen = rng.choice((0.0, 0.2, 0.2, 0.5, 1.0))
    out = []
    for name, expression in grammar.INPUTS.items():
        # a teacher's hidden states and weight, noise and scales are seldom trained
        given = name in ("y", "w2", "g", "s", "c", "cw", "sc") and rng.random() < 0.5
        grad = "" if given or rng.random() < frozen else ".requires_grad_()"
        other = rng.choice((dtype,) * 8 + ("",)) if name in ("s", "c", "cw", "g", "tem") else dtype
        for hole, text in (("dtype", dtype), ("other", other), ("grad", grad)):
            expression = expression.replace(f"{{{hole}}}", text)
        out.append((name, expression))
    return tuple(out)


def runs(case: Case) -> bool:
    """Whether eager runs a program, and all it gives can be compared."""
    eager = run(case)
    values = [record.value for record in eager.records if record.value.is_floating_point()]
    most = [float(t.double().abs().max()) for t in values if t.numel()]
    return eager.error is None and all(number < STEEPEST for number in most)
