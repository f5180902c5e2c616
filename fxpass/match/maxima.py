"""max, amax and argmax over the classes, of what grows with the logits.

In: a node that reads logits. Out: a :class:`fxpass.match.classes.Reduced` in the flow.
"""

from __future__ import annotations

from typing import Any

from sympy import Expr
from torch.fx import Node

from fxpass.graph.calls import arguments
from fxpass.graph.functions import function_of
from fxpass.graph.nodes import REQUIRED, NoMatch
from fxpass.match.bases import in_one_log
from fxpass.match.classes import Classes, Flow
from fxpass.match.operands import check_dim, operand_of
from fxpass.match.outputs import Base
from fxpass.match.sums import at_class


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
    if node in flow.trained:
        raise NoMatch.at(node, "gives equal classes a share of the gradient each")
    flow.reduce(node, like, _highest(flow, node, like), bool(given["keepdim"]))


def _of_maximum(node: Node) -> dict[str, Any]:
    """The arguments; ``max`` has another overload, with another tensor in the place of ``dim``."""
    wanted = {"input": REQUIRED, "dim": None, "other": None, "keepdim": False}
    given = arguments(node, wanted)
    return given if given["other"] is None else given | {"dim": given["other"]}


def of_pair(flow: Flow, node: Node) -> None:
    """The values or the indices of ``max``."""
    if function_of(node) != "getitem" or node.args[1] not in (0, 1):
        raise NoMatch.at(node, "reads values and indices")
    pair = node.args[0]
    like = flow.pairs[pair]  # type: ignore[index]
    keepdim = bool(_of_maximum(pair)["keepdim"])  # type: ignore[arg-type]
    if node.args[1] == 0:
        flow.reduce(node, like, _highest(flow, node, like), keepdim)
    else:
        base, _ = _grows(flow, node, like)
        flow.reduce(node, like, flow.output(base, "argmax"), keepdim, "index")


def _grows(flow: Flow, node: Node, like: Classes) -> tuple[Base, Expr]:
    """The base with whose logits an expression grows, and the expression in its log-softmax."""
    found = in_one_log(flow, node, like, like.expr, grows=True)
    if found is None:
        raise NoMatch.at(node, f"takes the maximum of `{like.expr}`, which is not known")
    return found


def _highest(flow: Flow, node: Node, like: Classes) -> Expr:
    base, expr = _grows(flow, node, like)

    def log() -> Expr:
        raise NoMatch.at(node, f"takes the maximum of `{like.expr}`, whose digits max - lse loses")

    return at_class(base, like.expr, expr, lambda: flow.output(base, "max"), log)
