"""Random programs whose loss is outside of the compiled function.

In: a seed. Out: a :class:`Case`, or None where the dice found no program that eager runs. The
compiled function returns logits, seldom beside a loss; eager statements make rows and losses of
them. All of these are statements that :class:`tests.fuzz.rowwise_body.Body` writes, of which those
up to a *cut* are compiled. Between the others are reads, hooks, writes and optimizers' steps. Some
programs compile what is behind the cut, too: as a function of its own, or as the rest of the same
function behind a graph break::

    python -m tests.fuzz --kind outside --seed 1 --programs 300
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

from . import afterwards, grammar
from .case import Case, Statement, lines
from .generate import afterwards_of, autocast, environment, optimizer_step
from .heads import OPTIONS
from .rowwise import INNER, first, inputs_of, written
from .rowwise_body import Body
from .scope import Scope

MODES = ((),) * 14 + (("torch.no_grad()",), ("torch.no_grad()",), ("torch.inference_mode()",))
# What is behind the cut: eager, behind a graph break, a compiled function.
WAYS = ("eager",) * 10 + ("break", "function")
# What is between the statements.
BETWEEN = (
    *("seen({o}.argmax(-1))", "seen({o}.detach().logsumexp(-1))", "seen({o}.requires_grad)"),
    *("seen({o}[0].float().softmax(-1))", "h = {o}.detach()", "del {o}"),
)
# What sees gradients of logits.
HOOKS = (
    *("{o}.register_hook(lambda g: g * 0.5)", "{o}.register_hook(lambda g: seen(g))"),
    "{o}.retain_grad()",
)
# Operands may be read later, and what reads them is stale then.
OPERANDS = (
    *("g.mul_(0.5)", "c.neg_()", "cw.add_(0.5)", "s.mul_(2)", "tem.add_(1)", "b.add_(1)"),
    *("t.zero_()", "t.add_(1).remainder_(7)", "m.logical_not_()", "order.copy_(order.flip(0))"),
)
# Before backward.
GRADS = (
    "seen(torch.autograd.grad(loss, {o}, retain_graph=True)[0])",
    "seen(torch.autograd.grad(loss, [{o}, {o}], retain_graph=True)[1].sum())",
    "seen(torch.autograd.grad(loss, {o}, retain_graph=True)[0].norm())",
)
# A write makes the history of the logits anew, which has no gradient then. What is written may be an
# operand of others, which are stale then.
_WRITES = re.compile(r"\w_\(|\] \S?= ")
# Equal to the last bit in a compiled function alone: of two functions, each computes its logits.
# Floats that differ from step to step, where a name takes their place.
_FLOATS = re.compile(r"(?<![\w.])(0\.5|1\.25|2\.0|0\.75)(?![\w.])")
_COMPARES = re.compile(r"\b(\w+) >=? \1\.(gather|amax)\(")


def outside(seed: str) -> Case | None:
    """One program with its session."""
    return first(seed, _drawn)


def _drawn(rng: random.Random) -> Case | None:
    inputs = inputs_of(rng)
    dynamic = rng.choice((None,) * 8 + (True,))
    options: dict[str, Any] = {"fusedce.inner": rng.choice(INNER), "fusedce.min_logits_mb": 0}
    options |= {name: rng.choice(values) for name, values in OPTIONS.items()}
    if dynamic:
        options["fusedce.inner"] = "aot_eager"
    case = Case(inputs, (), (), (), (), options, dynamic, rng.randrange(1000))
    case = replace(case, zeros=True, small=True)  # else a dozen classes are no vocabulary
    mode, (inside, around) = rng.choice(MODES), autocast(rng)
    body = Body(rng, environment(case), (*around, *mode), inside, bool(dynamic))
    cuts = written(lambda: _written(rng, body))
    if cuts is None:
        return None
    heads, cut = cuts
    losses = [s.text.split()[0] for s in body.statements if s.text.startswith("loss")]
    behind = " ".join(s.text for s in body.statements[cut:])
    made = dict.fromkeys(s.text.split()[0] for s in body.statements[:cut] if " = " in s.text)
    shown = [n for n in made if n in losses or re.search(rf"\b{n}\b", behind)]
    kept = [*losses, *(n for n in body.rows if n not in made and rng.random() < 0.3)]
    way = rng.choice(WAYS)
    if way == "break":
        stop = Statement("torch._dynamo.graph_break()")
        body.statements.insert(cut, stop)
        shown, cut = [*kept, *(n for n in shown if n not in kept)], len(body.statements)
    case = replace(case, body=tuple(body.statements[:cut]), returned=tuple(shown))
    call = Statement(f"{', '.join(shown)}, = program({case.arguments})", (*around, *mode))
    rest = [replace(s, within=s.within[len(inside) :]) for s in body.statements[cut:]]
    scheduled = way == "eager" and rng.random() < 0.3
    if scheduled:
        rest = [replace(s, text=_FLOATS.sub("tau", s.text)) for s in rest]
    if way == "function":
        rest = _function(case, rest, shown, kept)
    # the logits may be made in other contexts than those in which they are reduced
    within = rng.choice(((*around, *inside),) * 6 + ((rng.choice(grammar.AUTOCAST),), mode))
    rest = [replace(s, within=(*within, *s.within)) for s in rest]
    kept += [n for n in shown if n not in kept and rng.random() < 0.3]
    rest = [replace(s, stale=_WRITES.search(s.text) is not None) for s in rest]
    session = _session(rng, case, call, rest, losses, alone=cut == heads, scheduled=scheduled)
    if session is None:
        return None
    return replace(case, session=tuple(session), kept=tuple(kept)).trimmed()


def _written(rng: random.Random, body: Body) -> tuple[int, int] | None:
    """Writes the statements; how many are heads, and how many are before the cut."""
    if not body.heads():
        return None
    heads = len(body.statements)
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        body.step()
    if rng.random() < 0.3:
        body.reduction()
        _ = body.rows and body.loss("loss0")
    cut = len(body.statements)
    if not body.rest():
        return None
    if rng.random() < 0.3:
        body.reduction()
        body.loss("loss1")
    if any(_COMPARES.search(statement.text) for statement in body.statements[cut:]):
        return None
    return heads, cut


def _function(
    case: Case, rest: list[Statement], shown: list[str], kept: list[str]
) -> list[Statement]:
    """The statements behind the cut as a compiled function."""
    arguments, out = ", ".join((*shown, case.arguments)), ", ".join(kept)
    block = [f"def rest({arguments}):", *lines(rest), f"return {out},"]
    call = f'{out}, = torch.compile(rest, backend="aot_eager")({arguments})'
    return [Statement("\n    ".join(block)), Statement(call)]


def _session(
    rng: random.Random,
    case: Case,
    call: Statement,
    rest: list[Statement],
    losses: list[str],
    alone: bool,
    scheduled: bool,
) -> list[Statement] | None:
    """One step of training, or a few, with other things between the statements; None if it raises.

    Args:
        alone: whether the function returns products, and nothing that it makes of them. For those,
            AOTAutograd's graph has no gradients of the products, and fxpass reads what eager does
            not: nothing is written to, and nobody asks for such gradients.
        scheduled: whether a number, ``tau``, differs from step to step.
    """
    env: dict[str, Any] = {}
    exec(case.source(), env)
    logits = [n for n in case.returned if n.startswith("z")] or [*case.returned]
    scope = Scope(rng, env | {"seen": lambda value: None, "returned": logits})
    session = [Statement(f"{case.arguments} = inputs()")]
    scope.run(session[0])
    busy = rng.choice((0.0, 0.0, 0.1, 0.3))
    for step in range(4 if scheduled else rng.choice((1, 1, 1, 2))):
        if scheduled:
            session.append(Statement(f"tau = {0.5 + 0.25 * step}"))
            scope.run(session[-1])
        if step and rng.random() < 0.3:
            session.append(Statement(f"{case.arguments} = inputs(3)"))
            scope.run(session[-1])
        for statement in (call, *rest):
            if not scope.run(statement):
                return None
            session.append(statement)
            if rng.random() < busy:
                session += _between(rng, scope, alone)
        asks = alone and not any(_WRITES.search(statement.text) for statement in rest)
        if asks and rng.random() < 0.2 and (found := _attempt(scope, rng.choice(GRADS))):
            session.append(found)
        passes = [Statement(text) for text in afterwards.passes(rng, losses)]
        for one in passes:
            if not scope.run(one):
                return None
            session += [one, *(_between(rng, scope, alone) if rng.random() < busy else ())]
        if rng.random() < 0.3:
            session += optimizer_step(scope, rng)
    return session


def _between(rng: random.Random, scope: Scope, alone: bool) -> list[Statement]:
    """Something that is not on the way from the logits to the loss."""
    kind = rng.choices(("between", "operands", "afterwards", "step"), (40, 20, 25, 15))[0]
    found: list[Statement | None] = []
    if kind == "between" or not alone:
        found = [_attempt(scope, rng.choice((*BETWEEN, *HOOKS) if alone else BETWEEN))]
    elif kind == "operands":
        found = [scope.attempt(rng.choice(OPERANDS), "", ("torch.no_grad()",), stale=True)]
    elif kind == "afterwards":
        return afterwards_of(scope, rng, ["x", "w", "b"])
    else:
        found = [scope.attempt("w.grad = torch.ones_like(w)"), *optimizer_step(scope, rng)]
    return [s for s in found if s is not None]


def _attempt(scope: Scope, template: str) -> Statement | None:
    scope.chosen = {}
    found = scope.attempt(template)
    scope.chosen = None
    return found
