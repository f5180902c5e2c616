"""Softmaxes that decompositions have taken apart, put together again.

In: a graph. Out: the graph, changed in place. A formula is read of these, and rounds as they do.
Those that no region has are taken apart again: Inductor takes no other::

    d = z - amax(z);  d - log(sum(exp(d)))    _log_softmax(z)
    d = z - amax(z);  exp(d) / sum(exp(d))    _softmax(z)
    m = where(abs(amax(z)) == inf, 0, amax(z));  log(sum(exp(z - m))) + m    logsumexp(z)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from fxpass.rows.rules import A
from fxpass.rows.sizes import packet, shape, value

_SQUEEZES = (A.squeeze, A.view, A.reshape)


def softmaxes(graph: Graph) -> None:
    """Replaces what is a softmax, its logarithm, or the logarithm of its sum."""
    for node in graph.nodes:
        found = None
        if node.target is A.sub.Tensor:
            found = _log_softmax(node)
        elif node.target is A.div.Tensor:
            found = _softmax(node)
        elif node.target is A.add.Tensor:
            found = _logsumexp(node)
        if found is None:
            continue
        target, args = found
        with graph.inserting_before(node):
            made = graph.call_function(target, args)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
    graph.eliminate_dead_code()


def taken_apart(call: Callable[..., Node], node: Node) -> Node | None:
    """The operations that a node of :func:`softmaxes` was put together of; None for
    another node.

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
        like = {"dtype": value(node).dtype, "device": value(node).device}
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


def _summed(node: Any, terms: Any, dim: int, keeps: bool) -> bool:
    """Whether a node is the sum of some terms over a dimension."""
    if not _is(node, A.sum.dim_IntList) or node.args[0] is not terms or node.kwargs:
        return False
    dims, *keep = node.args[1:]
    return [d % len(shape(terms)) for d in dims] == [dim] and bool(keep and keep[0]) == keeps


def _log_softmax(node: Node) -> tuple[Any, tuple[Any, ...]] | None:
    args: Any = node.args
    shifted, log = args
    if (of := _shifted(shifted)) is None or not _is(log, A.log.default):
        return None
    total: Any = log.args[0]
    terms: Any = total.args[0] if _is(total, A.sum.dim_IntList) else None
    if not _is(terms, A.exp.default) or terms.args[0] is not shifted:
        return None
    return (A._log_softmax.default, (*of, False)) if _summed(total, terms, of[1], True) else None


def _softmax(node: Node) -> tuple[Any, tuple[Any, ...]] | None:
    args: Any = node.args
    terms, total = args
    if not _is(terms, A.exp.default) or node.kwargs:
        return None
    of = _shifted(terms.args[0])
    if of is None or not _summed(total, terms, of[1], True):
        return None
    return A._softmax.default, (*of, False)


def _logsumexp(node: Node) -> tuple[Any, tuple[Any, ...]] | None:
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
    same = isinstance(largest, Node) and packet(largest) in _SQUEEZES and largest.args[0] is finite
    dim = _finite(finite, z)
    if dim is None or not (same or largest is finite):
        return None
    if not _summed(total, terms, dim, not same) or value(node).dim() + same != value(z).dim():
        return None
    return A.logsumexp.default, (z, [dim], not same)


def _finite(node: Any, z: Node) -> int | None:
    """The dimension of ``where(abs(amax(z)) == inf, 0, amax(z))``."""
    if not _is(node, A.where.self):
        return None
    infinite, zero, largest = node.args
    if not _is(infinite, A.eq.Scalar) or infinite.args[1] != math.inf:
        return None
    size = infinite.args[0]
    of = size.args[0] if _is(size, A.abs.default) else None
    is_zero = _is(zero, A.scalar_tensor.default) and zero.args[0] == 0
    known = of is largest and is_zero and _is(largest, A.amax.default) and largest.args[0] is z
    if not known or largest.args[2:] != (True,) or len(largest.args[1]) != 1:
        return None
    return largest.args[1][0] % len(shape(z))
