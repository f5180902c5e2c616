"""max, amax, argmax and topk over the classes, of what grows with the logits.

In: a node that reads logits. Out: a :class:`fxpass.match.classes.Reduced` in the flow.
"""

from __future__ import annotations

from typing import Any

import torch
from sympy import Expr
from torch.fx import Node

from fxpass.graph.calls import arguments
from fxpass.graph.functions import function_of
from fxpass.graph.nodes import REQUIRED, NoMatch, is_tensor, value
from fxpass.match.bases import in_one_log
from fxpass.match.classes import Classes, Flow, Reduced
from fxpass.match.operands import check_dim, operand_of
from fxpass.match.outputs import Base
from fxpass.match.sums import at_class
from fxpass.spec.functions import call, where
from fxpass.spec.outputs import Top


def maximum(flow: Flow, node: Node) -> None:
    """max, amax and argmax over the classes, of what grows with the logits."""
    function, like = function_of(node), operand_of(flow, node)
    given = _of_maximum(node)
    check_dim(node, like, given["dim"])
    if function == "max":
        flow.pairs[node] = like
        return
    if function == "argmax":
        base, _ = _grows(flow, node, like)
        symbol = flow.output(base, "argmax")
        flow.reduce(node, like, symbol, bool(given["keepdim"]), "index")
        return
    flow.reduce(node, like, _highest(flow, node, like, "amax"), bool(given["keepdim"]))


def _of_maximum(node: Node) -> dict[str, Any]:
    """The arguments; ``max`` has another overload, with another tensor in the place of ``dim``."""
    wanted = {"input": REQUIRED, "dim": None, "other": None, "keepdim": False}
    given = arguments(node, wanted)
    return given if given["other"] is None else given | {"dim": given["other"]}


_TOP = {
    **{"input": REQUIRED, "k": REQUIRED, "dim": -1, "largest": True, "sorted": True, "out": None},
}


def top_k(flow: Flow, node: Node) -> None:
    """topk over the classes, which gives values and indices."""
    like, given = operand_of(flow, node), arguments(node, _TOP)
    check_dim(node, like, given["dim"])
    k = given["k"]
    if not isinstance(k, int) or k < 1 or not given["largest"] or not given["sorted"]:
        raise NoMatch.at(node, f"has k={k}, or is not of the largest")
    flow.pairs[node] = like


def of_pair(flow: Flow, node: Node) -> None:
    """The values or the indices of ``max`` or ``topk``."""
    if function_of(node) != "getitem" or node.args[1] not in (0, 1):
        raise NoMatch.at(node, "reads values and indices")
    pair = node.args[0]
    like = flow.pairs[pair]  # type: ignore[index]
    if function_of(pair) == "topk":  # type: ignore[arg-type]
        k, index = arguments(pair, _TOP)["k"], bool(node.args[1])  # type: ignore[arg-type]
        if value(node).requires_grad:
            raise NoMatch.at(node, "needs a gradient")
        base, expr = _grows(flow, node, like)
        rows = top = flow.output(base, Top(k, index))
        if not index:
            rows = at_class(base, like.expr, expr, lambda: top, lambda: _log_of(flow, base, top))
        flow.reductions.append(Reduced(node, like, rows, True, "index" if index else ""))
        return
    keepdim = bool(_of_maximum(pair)["keepdim"])  # type: ignore[arg-type]
    if node.args[1] == 0:
        flow.reduce(node, like, _highest(flow, node, like, "max"), keepdim)
    else:
        base, _ = _grows(flow, node, like)
        flow.reduce(node, like, flow.output(base, "argmax"), keepdim, "index")


def _grows(flow: Flow, node: Node, like: Classes) -> tuple[Base, Expr]:
    """The base with whose logits an expression grows, and the expression in its log-softmax."""
    found = in_one_log(flow, node, like, like.expr, grows=True)
    if found is None:
        raise NoMatch.at(node, f"takes the maximum of `{like.expr}`, which is not known")
    return found


def _log_of(flow: Flow, base: Base, top: Expr) -> Expr:
    """The log-softmax of one of the largest logits, by the operations of a pick's: the minimum,
    which changes nothing, keeps them apart."""
    return call("minimum", top - flow.output(base, "max"), 0) + flow.output(base, "peak")


def _highest(flow: Flow, node: Node, like: Classes, output: str) -> Expr:
    base, expr = _grows(flow, node, like)

    def log() -> Expr:
        if output == "max" or node not in flow.trained:
            return flow.output(base, "peak")
        if any(value(user).dtype == torch.bool for user in node.users if is_tensor(user)):
            raise NoMatch.at(node, "is compared, and has a gradient: take max")
        # equal classes share the gradient of amax; the choice, which is always 0, keeps it apart
        nothing = flow.output(base, "amax") - flow.output(base, "max")
        return where(nothing, ">=", 0, nothing, 0) + flow.output(base, "peak")

    return at_class(base, like.expr, expr, lambda: flow.output(base, output), log)
