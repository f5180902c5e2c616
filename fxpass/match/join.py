"""The operator calls for one head: which reductions one call computes, and where it stands.

In: a :class:`fxpass.match.flow.Flow`. Out: a :class:`Call` for each base, after all of its operands
and before the first node that it replaces. Where there is no such place, there are two calls: an
operand may be computed from an earlier reduction::

    %lp = log_softmax(%z, -1);  %a = gather(%lp, -1, %labels);  %c = argmax(%lp, -1)
    ->  one call after %labels, with the outputs pick and argmax
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from sympy import Expr, Symbol
from torch.fx import Node

from fxpass.graph import hazards
from fxpass.graph.calls import storage, written
from fxpass.graph.moving import movable
from fxpass.graph.nodes import NoMatch, hint, needs_gradient, value
from fxpass.graph.placements import is_dtensor
from fxpass.match.classes import Flow, Reduced, rest_of
from fxpass.match.edits import symbols_of, taken
from fxpass.match.linears import shape_of
from fxpass.match.modes import Mode
from fxpass.match.names import named, names_of
from fxpass.match.operands import check_plain
from fxpass.match.outputs import Base, Picked, given_of
from fxpass.match.place import place
from fxpass.match.sharding import sharding_of
from fxpass.match.totals import (
    Total,
    coefficients_of,
    is_linear,
    tensors_of,
    total_of,
)
from fxpass.plan.choice import Choice, choose
from fxpass.settings import Settings
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.expression import Z
from fxpass.spec.outputs import PRODUCTS
from fxpass.spec.reductions import Reductions


@dataclass(frozen=True)
class Call:
    """One call of the operator.

    Attributes:
        base: the logits that it reduces.
        reductions: those that read its outputs, or those of the calls before of the same base.
        after: the last of its operands that are not moved.
        moved: operands that are moved to it, in the graph's order.
        outputs: the symbols of its outputs, in the order of the spec; those of picks are left out.
        picks: the index tensors of the outputs ``pick`` and ``at``.
        given: the symbols of the values that expressions and moments read.
        spec: what it computes.
        detached: whether no gradient flows through it.
        choice: whether forward or backward computes the gradients, and why.
        total: the scalar whose gradients forward computes; None if backward computes them.
        added: the symbols of the total's outputs, as ``outputs``.
        logits: a node whose logits the operator reads; None if it computes them.
    """

    base: Base
    reductions: tuple[Reduced, ...]
    after: Node
    moved: tuple[Node, ...]
    outputs: tuple[Symbol, ...]
    picks: tuple[Picked, ...]
    given: tuple[Symbol, ...]
    spec: Reductions
    detached: bool
    choice: Choice
    total: Total | None = None
    added: tuple[Symbol, ...] = ()
    logits: Node | None = None

    @property
    def unread(self) -> tuple[Reduced, ...]:
        """The reductions whose rows nothing but the total reads."""
        if self.total is None:
            return ()
        return tuple(r for r in self.total.reductions if r not in self.total.read)


@dataclass(frozen=True)
class Options:
    """What decides about the calls of a head, beside the flow.

    Attributes:
        modes: those of the graph's nodes.
        settings: the user's.
        kept: whether the graph computes the logits anyway.
        others: the rows of calls of other heads that make a gradient of the same weight.
    """

    modes: dict[Node, Mode]
    settings: Settings
    kept: bool = False
    others: tuple[int | torch.SymInt, ...] = ()


def calls_of(flow: Flow, options: Options) -> tuple[Call, ...]:
    """The calls of a head.

    Raises:
        NoMatch: an operand cannot be read, or is changed, or the modes of autograd differ.
    """
    linear = flow.linear
    for operand in (linear.x, linear.weight, linear.bias):
        if operand is not None:
            check_plain(operand)
    flow.sharding = sharding_of(flow)
    for reduced in flow.reductions:
        if not any(s in flow.outputs for s in reduced.symbols):
            raise NoMatch.at(reduced.node, f"is the number {reduced.value}")
        if reduced.like.detached and value(reduced.node).requires_grad:
            reason = f"%{reduced.node.name} has a gradient that its logits do not have"
            raise NoMatch(reduced.node, reason)
    calls = tuple(call for base in flow.bases for call in _calls(flow, base, options))
    _check_hazards(flow, calls)
    return calls


def _calls(flow: Flow, base: Base, options: Options) -> list[Call]:
    calls: list[Call] = []
    left = [r for r in flow.reductions if _symbols(flow, base, [r])]
    known: dict[Symbol, tuple[Node, bool]] = {}  # where its call stands, and whether it is trained
    while left:
        first = left[0].node
        ready = [r for r in left if _ready(flow, base, r, first)] or left[:1]
        trained = _trained(flow, base, ready, options.modes)
        symbols = [
            s
            for s in _symbols(flow, base, ready)
            if s not in known
            or (s in trained and not known[s][1])
            or flow.writes(flow.operands(base, [s]), known[s][0], ready[-1].node)
        ]
        if symbols:
            call = _call(flow, base, ready, symbols, options)
            rows = _symbols(flow, base, [r for r in ready if r not in call.unread])
            known |= {s: (first, s in trained) for s in symbols if s in rows}
            calls.append(call)
        else:  # the calls before have all
            calls[-1] = replace(calls[-1], reductions=(*calls[-1].reductions, *ready))
        left = [r for r in left if r not in ready]
    return calls


def _trained(
    flow: Flow, base: Base, reductions: list[Reduced], modes: dict[Node, Mode]
) -> list[Symbol]:
    """The symbols of a base that a gradient reaches from these reductions."""
    some = [r for r in reductions if _differentiable(flow, r, modes) and not r.like.detached]
    return _symbols(flow, base, some)


def _ready(flow: Flow, base: Base, reduced: Reduced, first: Node) -> bool:
    """Whether all operands of a reduction exist before ``first``, or can be moved there."""
    operands = flow.operands(base, _symbols(flow, base, [reduced]))
    if flow.writes(operands, first.prev, reduced.node):
        return False
    return all(movable([n], first, flow.replaced) is not None for n in operands)


def _symbols(flow: Flow, base: Base, reductions: list[Reduced]) -> list[Symbol]:
    read = {s for r in reductions for s in r.symbols if s in flow.outputs}
    return sorted((s for s in read if flow.outputs[s][0] == base), key=lambda s: s.name)


def _call(
    flow: Flow, base: Base, reductions: list[Reduced], symbols: list[Symbol], options: Options
) -> Call:
    first, modes = reductions[0].node, options.modes
    differentiable = [r for r in reductions if _differentiable(flow, r, modes)]
    detached = all(r.like.detached or r not in differentiable for r in reductions)
    names = names_of(flow, base, symbols)
    trained = _trained(flow, base, reductions, modes)
    gradients = () if detached else _gradients(flow, base, trained, names.given)
    transform: Expr = base.transform.xreplace(names.of)  # type: ignore[assignment]
    every, of_trained = (named(flow, some, names) for some in (symbols, trained))
    memory, accumulate = options.settings.memory_mb, options.settings.accumulate
    unrounded = _unrounded(flow, gradients)
    waiting = Reductions(
        *(tuple(every), transform, gradients),
        memory_mb=memory,
        accumulate=accumulate,
        unrounded=unrounded,
    )
    if gradients and flow.sharding is None:
        untrained = tuple(o for o in waiting.rows if o not in of_trained)
        waiting = replace(waiting, detached=untrained)
    total, of_total, left, added = None, None, symbols, {}
    # the ranks of a sharded head exchange what its gradients need after forward
    if set(gradients) <= set(PRODUCTS) and flow.sharding is None:
        trains = differentiable if gradients else reductions
        total = _total(flow, base, symbols, trains, modes)
    if total is not None and all(
        movable([n], first, flow.replaced) is not None for n in total.operands
    ):
        read = [r for r in reductions if r not in total.reductions or r in total.read]
        left = _symbols(flow, base, read)
        added = named(flow, _symbols(flow, base, list(total.reductions)), names)
        of_total = replace(
            waiting, outputs=tuple(named(flow, left, names)), total=tuple(added), detached=()
        )
    choice = _choice(flow, base, of_total, waiting, options)
    if not choice.spec.total:
        total, left, added = None, symbols, {}
    operands, logits = flow.operands(base, symbols), None
    operands += [] if total is None else total.operands
    if options.kept:
        logits = existing_logits(flow, base)
        waits = bool(gradients) and total is None
        # the user may write to logits that are an output too, before backward reads them
        logits = None if waits and hazards.leaves(logits) else logits
        operands += [] if logits is None else [logits]
    after, moved = _placed(flow, operands, reductions, detached, modes)
    outputs, in_total = (
        tuple(s for s in each.values() if s is not None)
        for each in (named(flow, left, names), added)
    )
    return Call(
        *(
            base,
            tuple(reductions),
            after,
            moved,
            outputs,
            names.picks,
            names.given,
            choice.spec,
            detached,
            choice,
        ),
        *(total, in_total, logits),
    )


def _placed(
    flow: Flow,
    operands: Sequence[Node],
    reductions: Sequence[Reduced],
    detached: bool,
    modes: dict[Node, Mode],
) -> tuple[Node, tuple[Node, ...]]:
    """The node after which a call stands, in the modes of the linear, and the operands that are
    moved to it."""
    linear, first = flow.linear.node, reductions[0].node
    after, moved = place(flow, operands, first)
    while modes[after].transforms > modes[linear].transforms:
        after = after.next  # an operand is what a transform returns
    if any(modes[r.node].transforms != modes[linear].transforms for r in reductions):
        raise NoMatch.at(first, "is inside a torch.func transform (vmap, grad, ...)")
    if not detached and modes[after].grad != modes[linear].grad:
        if modes[first].grad != modes[linear].grad:
            reason = f"gradients are switched on or off between %{after.name} and the head"
            raise NoMatch(after, reason)
        after = first.prev
    if not detached and not modes[linear].grad:
        raise NoMatch.at(first, "has a gradient, and its linear is under no_grad")
    if any(modes[r.node].inference != modes[linear].inference for r in reductions):
        raise NoMatch(first, "its linear and its reduction are not in the same inference mode")
    return after, moved


def _choice(
    flow: Flow, base: Base, total: Reductions | None, waiting: Reductions, options: Options
) -> Choice:
    logits, d = value(flow.linear.node), value(flow.linear.x).shape[-1]
    n, v = shape_of(flow.linear)
    for edit in base.edits:
        v = taken(edit, v)
    if any(isinstance(size, int) and not size for size in (v, d)):
        raise NoMatch(flow.linear.node, "its logits have no classes, or its rows no hidden values")
    if flow.sharding is not None:  # the sizes of this rank's call
        n, v = n // flow.sharding.rows, flow.sharding.count
    setting = options.settings.strategy
    # the other calls of this head make a gradient of its weight too
    calls = sum(bool(_symbols(flow, one, flow.reductions)) for one in flow.bases)
    others = options.others + (n,) * (calls - 1) * ("weight" in waiting.gradients)
    return choose(
        *(n, hint(d), max(1, hint(v)), logits.dtype, logits.device),
        *(total, waiting, setting, options.kept, others),
        sharded=flow.sharding is not None and flow.sharding.group is not None,
    )


def existing_logits(flow: Flow, base: Base) -> Node:
    """The node of the logits before a base's transform, which no node writes to.

    Raises:
        NoMatch: there is none.
    """
    last = {storage(tensor): n for n in sorted(flow.classes) for tensor in written(n)}
    for node, like in flow.classes.items():
        if last.get(storage(node), node) is not node:
            continue
        if like.expr == Z and like.edits == base.edits and rest_of(base, like) is not None:
            if flow.sharding is None:
                return node
            if flow.sharding.rows > 1:
                raise NoMatch(node, "its logits exist anyway, and their rows are sharded")
            if flow.sharding.weight is None or is_dtensor(value(node)):
                return node
    reason = "its logits exist anyway, and a node writes to them"
    if flow.sharding is not None:
        reason += " after they were gathered from all ranks"
    raise NoMatch(flow.linear.node, reason)


def _total(
    flow: Flow,
    base: Base,
    symbols: list[Symbol],
    reductions: list[Reduced],
    modes: dict[Node, Mode],
) -> Total | None:
    """The total of the reductions of one call, if no other reduction reads its outputs with
    gradients, and it reads no other's; without gradients, of one loss, whose ignored rows are left
    out then."""
    if not any(_differentiable(flow, r, modes) for r in reductions):
        (first, *more) = reductions
        alone = first.loss is not None and first.is_scalar and not more
        alone = alone and set(_symbols(flow, base, [first])) <= {*symbols}
        # in inference mode, autograd could not find the coefficients beside a constant
        alone = alone and is_linear(flow, first)
        alone = alone and all(coefficients_of(flow, rows)[1] == 0 for rows in first.values)
        tensors = tuple(tensors_of(flow, first))
        return Total(first.node, (first,), (), (), (), tensors) if alone else None
    for reduced in flow.reductions:
        inside = reduced in reductions
        alien = [s for s in reduced.symbols & flow.outputs.keys() if (s in symbols) != inside]
        if alien and _differentiable(flow, reduced, modes):
            return None
    return total_of(flow, reductions)


def _differentiable(flow: Flow, reduced: Reduced, modes: dict[Node, Mode]) -> bool:
    """Whether a gradient reaches a reduction: of a metric that is detached later, none does."""
    return modes[reduced.node].grad and reduced.node in flow.trained


def _gradients(
    flow: Flow, base: Base, trained: Iterable[Symbol], given: Sequence[Symbol]
) -> tuple[str, ...]:
    """The operands that get a gradient from the outputs ``trained``."""
    linear = flow.linear
    weights = {one for s in trained for one in given_of(flow.outputs[s][1])}
    scale = [flow.tensors[s] for s in symbols_of(base.scale)]
    biases = [linear.bias, *(flow.tensors[s] for s in base.biases)]
    operands: dict[str, Sequence[Node | None]] = {
        "x": [linear.x],
        "weight": [linear.weight],
        "bias": biases,
        "scale": scale,
    }
    read = weights.union(base.given)
    of_given = [[flow.tensors[s]] if s in read else [] for s in given]
    operands |= {f"given{i}": nodes for i, nodes in enumerate(of_given)}
    return tuple(name for name, nodes in operands.items() if any(map(needs_gradient, nodes)))


def _unrounded(flow: Flow, gradients: Sequence[str]) -> tuple[str, ...]:
    """Those of x and weight that the call casts to 16 bits, from the dtype of its sums: their
    gradients need not be rounded, and cast back. The ranks of a sharded head exchange casts."""
    linear = flow.linear
    dtype, operands = value(linear.node).dtype, {"x": linear.x, "weight": linear.weight}
    sums = compute_dtype(dtype)
    if sums == dtype or flow.sharding is not None:
        return ()
    return tuple(k for k, t in operands.items() if k in gradients and value(t).dtype == sums)


def _check_hazards(flow: Flow, calls: Sequence[Call]) -> None:
    last = max(r.node for r in flow.reductions)
    pattern = [n for n in flow.classes if n < last]
    replaced = [*(r.node for r in flow.reductions), *flow.unread]
    if found := hazards.hazard(pattern, last, replaced):
        raise NoMatch(*found)
    if any(call.spec.gradients and call.total is None for call in calls):
        end = flow.linear.node.graph.output_node()
        if found := hazards.hazard(pattern, end, replaced):
            node, reason = found
            raise NoMatch(node, f"{reason}, and backward computes the gradients from it")
