"""Decomposed softmaxes as single operations again.

In: a graph. Out: the graph, changed in place. Formulas are read from softmaxes, and round as these
do. Those outside of regions are decomposed once more, as Inductor needs::

    d = z - amax(z);  d - log(sum(exp(d)))    _log_softmax(z)
    d = z - amax(z);  exp(d) / sum(exp(d))    _softmax(z)
    m = where(abs(amax(z)) == inf, 0, amax(z));  log(sum(exp(z - m))) + m    logsumexp(z)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from fxpass.rows.aten_calls import A
from fxpass.rows.sizes import example, packet, shape

_SQUEEZES = (A.squeeze, A.view, A.reshape)


def restore_softmaxes(graph: Graph) -> None:
    """Replaces decomposed ``softmax``, ``log_softmax`` and ``logsumexp`` by these operations."""
    for node in graph.nodes:
        if node.target not in _RESTORED:
            continue
        operation, arguments = _RESTORED[node.target]
        if (args := arguments(node)) is None:
            continue
        with graph.inserting_before(node):
            made = graph.call_function(operation, args)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
    graph.eliminate_dead_code()


def decomposed_softmax(call: Callable[..., Node], node: Node) -> Node | None:
    """The decomposition of a node of :func:`restore_softmaxes`; None for another node.

    Args:
        call: makes a node of a target and its arguments.
    """
    if node.target not in (A._log_softmax.default, A._softmax.default, A.logsumexp.default):
        return None
    z, dim, keep = node.args
    dims = dim if node.target is A.logsumexp.default else [dim]
    largest = call(A.amax.default, z, dims, True)
    if node.target is A.logsumexp.default:
        infinite = call(A.eq.Scalar, call(A.abs.default, largest), math.inf)
        like = {"dtype": example(node).dtype, "device": example(node).device}
        zero = call(A.scalar_tensor.default, 0, **like)
        finite = call(A.where.self, infinite, zero, largest)
        total = call(
            A.sum.dim_IntList, call(A.exp.default, call(A.sub.Tensor, z, finite)), dims, keep
        )
        finite = finite if keep else call(A.squeeze.dims, finite, dims)
        return call(A.add.Tensor, call(A.log.default, total), finite)
    shifted = call(A.sub.Tensor, z, largest)
    terms = call(A.exp.default, shifted)
    total = call(A.sum.dim_IntList, terms, dims, True)
    if node.target is A._softmax.default:
        return call(A.div.Tensor, terms, total)
    return call(A.sub.Tensor, shifted, call(A.log.default, total))


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target


def _shifted(node: Any) -> tuple[Node, int] | None:
    """The logits and the dimension of ``z - amax(z, [dim], True)``."""
    if not _is(node, A.sub.Tensor) or node.kwargs:
        return None
    z, largest = node.args
    if not _is(largest, A.amax.default) or largest.args[0] is not z or largest.args[2:] != (True,):
        return None
    dims = largest.args[1]
    return (z, dims[0] % len(shape(z))) if len(dims) == 1 else None


def _is_sum(node: Any, terms: Any, dim: int, keeps: bool) -> bool:
    """Is true if a node is the sum of the terms over a dimension."""
    if not _is(node, A.sum.dim_IntList) or node.args[0] is not terms or node.kwargs:
        return False
    dims, *keep = node.args[1:]
    return [d % len(shape(terms)) for d in dims] == [dim] and bool(keep and keep[0]) == keeps


def _log_softmax_args(node: Node) -> tuple[Node, int, bool] | None:
    args: Any = node.args
    shifted, log = args
    if (found := _shifted(shifted)) is None or not _is(log, A.log.default):
        return None
    z, dim = found
    total: Any = log.args[0]
    terms: Any = total.args[0] if _is(total, A.sum.dim_IntList) else None
    if not _is(terms, A.exp.default) or terms.args[0] is not shifted:
        return None
    return (z, dim, False) if _is_sum(total, terms, dim, True) else None


def _softmax_args(node: Node) -> tuple[Node, int, bool] | None:
    args: Any = node.args
    terms, total = args
    if not _is(terms, A.exp.default) or node.kwargs:
        return None
    if (found := _shifted(terms.args[0])) is None:
        return None
    z, dim = found
    return (z, dim, False) if _is_sum(total, terms, dim, True) else None


def _logsumexp_args(node: Node) -> tuple[Node, list[int], bool] | None:
    args: Any = node.args
    log, largest = args
    if not _is(log, A.log.default) or node.kwargs:
        return None
    total: Any = log.args[0]
    terms: Any = total.args[0] if _is(total, A.sum.dim_IntList) else None
    shifted: Any = terms.args[0] if _is(terms, A.exp.default) else None
    if not _is(shifted, A.sub.Tensor):
        return None
    z, finite = shifted.args
    squeezed = (
        isinstance(largest, Node) and packet(largest) in _SQUEEZES and largest.args[0] is finite
    )
    dim = _finite_max_dim(finite, z)
    if dim is None or not (squeezed or largest is finite):
        return None
    if not _is_sum(total, terms, dim, not squeezed):
        return None
    if example(node).dim() + squeezed != example(z).dim():
        return None
    return z, [dim], not squeezed


def _finite_max_dim(node: Any, z: Node) -> int | None:
    """The dimension of ``where(abs(amax(z)) == inf, 0, amax(z))``."""
    if not _is(node, A.where.self):
        return None
    infinite, zero, largest = node.args
    if not _is(infinite, A.eq.Scalar) or infinite.args[1] != math.inf:
        return None
    magnitude = infinite.args[0]
    if not _is(magnitude, A.abs.default) or magnitude.args[0] is not largest:
        return None
    if not _is(zero, A.scalar_tensor.default) or zero.args[0] != 0:
        return None
    if not _is(largest, A.amax.default) or largest.args[0] is not z:
        return None
    if largest.args[2:] != (True,) or len(largest.args[1]) != 1:
        return None
    return largest.args[1][0] % len(shape(z))


# For the last operation of a decomposition: the operation, and the function of its arguments.
_RESTORED: dict[Any, tuple[Any, Callable[[Node], tuple[Any, ...] | None]]] = {
    A.sub.Tensor: (A._log_softmax.default, _log_softmax_args),
    A.div.Tensor: (A._softmax.default, _softmax_args),
    A.add.Tensor: (A.logsumexp.default, _logsumexp_args),
}
