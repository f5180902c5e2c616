"""Totals: sums over the rows whose coefficients are known before the logits are.

In: the reductions of one call of the operator, and the nodes after them. Out: a :class:`Total` if
every gradient reaches them through one scalar that is linear in them. Forward then computes the
gradients with the outputs; a mean, a mask, or the advantages of a policy's loss are coefficients::

    %lp = gather(%log_probs, -1, %labels);  %masked = mul(%lp, %mask);  %loss = sum(%masked)
    ->  the total %loss, which reads %mask, of the rows %lp
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import sympy
from sympy import Symbol
from torch.fx import Node

from fxpass.graph.calls import is_cut, others_of
from fxpass.graph.functions import CASTS, REFLECTED, function_of, reads_values
from fxpass.graph.nodes import is_tensor, needs_gradient, value
from fxpass.match.classes import Flow, Reduced
from fxpass.match.edits import symbols_of
from fxpass.match.outputs import Picked, given_of
from fxpass.spec.outputs import IN_TOTAL


@dataclass(frozen=True)
class Total:
    """A scalar that is linear in reductions, but for a constant.

    Attributes:
        node: the scalar.
        reductions: what it adds up.
        tail: the nodes from the reductions to the scalar, in the graph's order.
        others: what else these nodes read.
        read: those of the reductions whose rows are read elsewhere too.
        tensors: the tensors in the rows of the reductions that are no outputs.
    """

    node: Node
    reductions: tuple[Reduced, ...]
    tail: tuple[Node, ...]
    others: tuple[Node, ...]
    read: tuple[Reduced, ...]
    tensors: tuple[Node, ...]

    @property
    def operands(self) -> set[Node]:
        """The nodes that its coefficients are computed from."""
        losses = [r.loss for r in self.reductions if r.loss is not None]
        read = {n for loss in losses for n in loss.indices if n is not None}
        steps = [step for r in self.reductions for step in r.like.steps]
        sizes = (n for s in steps for n in others_of(s.node))
        return {*self.others, *self.tensors, *read, *sizes}


def total_of(flow: Flow, reductions: Collection[Reduced]) -> Total | None:
    """The total of these reductions, which have gradients; None if there is none, or if something
    that it reads may change between its first reduction and the scalar."""
    if not all(is_linear(flow, reduced) for reduced in reductions):
        return None
    starts = {reduced.node: reduced for reduced in reductions}
    linear: dict[Node, set[Node]] = {}  # nodes linear in reductions -> these reductions
    node, end = min(starts), flow.linear.node.graph.output_node()
    while node is not end:
        read = {n for n in node.all_input_nodes if n in linear and reads_values(node, n)}
        if node in starts:
            linear[node] = {node}
        elif read and node in flow.trained:
            if is_cut(node) or not _keeps_linear(node, read):
                return None
            linear[node] = set().union(*(linear[n] for n in read))
        whole = node in linear and value(node).dim() == 0 and starts.keys() <= linear.keys()
        if whole and _all_gradients_pass(flow, node, linear):
            found = _total(flow, node, starts, linear)
            read = {*linear, *found.operands}
            return None if flow.writes(read, min(starts).prev, node) else found
        node = node.next
    return None


def _total(
    flow: Flow, node: Node, starts: dict[Node, Reduced], linear: dict[Node, set[Node]]
) -> Total:
    tail = tuple(n for n in linear if n not in starts)
    inputs = {n for one in tail for n in one.all_input_nodes if n not in linear}
    read: set[Node] = set()
    for one, origins in linear.items():
        if one is not node and any(_reads(u, one) for u in one.users if u not in linear):
            read |= origins
    return Total(
        node,
        tuple(starts.values()),
        tail,
        tuple(sorted(inputs)),
        tuple(starts[n] for n in starts if n in read),
        tuple({n for reduced in starts.values() for n in tensors_of(flow, reduced)}),
    )


def is_linear(flow: Flow, reduced: Reduced) -> bool:
    """Whether a reduction is linear in outputs that can be part of a total, but for a constant."""
    if any(map(needs_gradient, tensors_of(flow, reduced))):
        return False
    for symbol in reduced.symbols & flow.outputs.keys():
        output = flow.outputs[symbol][1]
        if isinstance(output, str) and output not in IN_TOTAL:
            return False
        if isinstance(output, Picked) and output.count != 1:
            return False
        if any(needs_gradient(flow.tensors[symbol]) for symbol in given_of(output)):
            return False
    for rows in reduced.values:
        factors, constant = coefficients_of(flow, rows)
        if any(symbols_of(e) & flow.outputs.keys() for e in (*factors.values(), constant)):
            return False
    return True


def coefficients_of(flow: Flow, rows: Any) -> tuple[dict[Symbol, Any], Any]:
    """The factor of each output in an expression that is linear in them, and the constant."""
    outputs = sorted(rows.free_symbols & flow.outputs.keys(), key=str)
    factors = {symbol: rows.diff(symbol) for symbol in outputs}
    return factors, sympy.expand(rows - sum(s * factor for s, factor in factors.items()))


def tensors_of(flow: Flow, reduced: Reduced) -> set[Node]:
    """The tensors in the rows of a reduction that are no outputs."""
    symbols = reduced.symbols - flow.outputs.keys()
    return {flow.tensors[symbol] for symbol in symbols & flow.tensors.keys()}


# ---------------------------------------------------------------- the nodes after the reductions


def _reads(user: Node, node: Node) -> bool:
    return user.op == "output" or reads_values(user, node)


def _all_gradients_pass(flow: Flow, total: Node, linear: dict[Node, set[Node]]) -> bool:
    """Whether every other linear node has gradients through ``total`` only."""
    others = [n for n in linear if n is not total and value(n).requires_grad]
    users = ((user, n) for n in others for user in n.users if user not in linear)
    return not any(user in flow.trained and reads_values(user, n) for user, n in users)


def _keeps_linear(node: Node, read: Collection[Node]) -> bool:
    """Whether a node is linear in ``read``, but for a constant, and in nothing else that has a
    gradient."""
    rule = None if node.target in REFLECTED else _LINEAR.get(function_of(node))
    if "rounding_mode" in node.kwargs:  # of div
        return False
    others = [n for n in node.all_input_nodes if n not in read]
    if rule is None or not is_tensor(node) or not value(node).is_floating_point():
        return False
    return rule(node, read) and not any(map(needs_gradient, others))


def _in_first(node: Node, read: Collection[Node]) -> bool:
    return bool(node.args) and node.args[0] in read and _in_one(node, read)


def _in_one(node: Node, read: Collection[Node]) -> bool:
    given = (*node.args, *node.kwargs.values())
    return sum(isinstance(a, Node) and a in read for a in given) == 1


def _in_branches(node: Node, read: Collection[Node]) -> bool:
    return bool(node.args) and node.args[0] not in read


def _in_any(node: Node, read: Collection[Node]) -> bool:
    del node, read
    return True


_LINEAR: dict[str, Callable[[Node, Collection[Node]], bool]] = {
    **dict.fromkeys(CASTS, _in_first),
    **dict.fromkeys(("neg", "sum", "mean", "div", "masked_fill", "contiguous", "clone"), _in_first),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "view_as", "select"), _in_first),
    **dict.fromkeys(("squeeze", "unsqueeze", "transpose", "permute", "slice"), _in_first),
    "getitem": _in_first,
    "mul": _in_one,
    "where": _in_branches,
    **dict.fromkeys(("add", "sub", "rsub", "stack", "cat"), _in_any),
}
