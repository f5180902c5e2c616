"""One spelling for what decompositions spell in several ways.

In: a graph. Out: the graph, changed in place::

    view(cat([a, b], 0), [2, *a.shape])    cat([unsqueeze(a, 0), unsqueeze(b, 0)], 0)
    bmm(a [1, N, D], b [1, D, V])          unsqueeze(mm(a [N, D], b [D, V]), 0)
    mm(full([N, V], 0), w [V, D])          full([N, D], 0)
    max(z), amax(z, [0, 1])                amax(amax(z, [-1]), [0])
    ne(unsqueeze(t, 1), -100)              unsqueeze(ne(t, -100), 1)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxpass.rows.rules import VIEWS, A, fill
from fxpass.rows.sizes import is_one, is_tensor, key, keys, packet, shape, value

# What is the same of rows as of all classes: reductions that may take one dimension after another.
_NESTED = {A.max.default: A.amax.default, A.min.default: A.amin.default}
_NESTED |= {op: op for op in (A.amax.default, A.amin.default, A.any.dims, A.all.dims)}
_NESTED |= {A.any.default: A.any.dims, A.all.default: A.all.dims}
_NESTED |= {A.sum.dim_IntList: A.sum.dim_IntList}
_VIEWS = (A.view, A._unsafe_view, A.reshape)


def spell(graph: Graph) -> None:
    """Spells stacks, batches of one product, extremes of everything and labels of rows, which
    forward and backward of one loss spell differently, in one way; equal labels are computed
    once."""
    known: dict[Any, Node] = {}
    for node in list(graph.nodes):
        made = None
        if (
            node.target is A._assert_tensor_metadata.default
        ):  # of torch.export; the trace has seen it
            graph.erase_node(node)
        elif packet(node) in _VIEWS:
            made = _stacked(graph, node)
        elif packet(node) is A.bmm and is_one(shape(node)[0]):
            made = _product(graph, node)
        elif packet(node) is A.mm and any(fill(factor) == 0 for factor in node.all_input_nodes):
            made = _zeros(graph, node)
        elif node.target in _NESTED:
            made = _of_rows_first(graph, node)
        elif torch.Tag.pointwise in getattr(node.target, "tags", ()):
            made = _of_labels(graph, node)
        if made is not None:
            made.meta = node.meta | {"val": _without_view(value(node))}
            node.replace_all_uses_with(made)
        for one in (made, node) if made is not None else (node,):
            if (same := _computed_before(one, known)) is not None:
                one.replace_all_uses_with(same)
    graph.eliminate_dead_code()


def _computed_before(node: Node, known: dict[Any, Node]) -> Node | None:
    """A node that computes the same labels or mask."""
    tags = getattr(node.target, "tags", ())
    pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    if not (pointwise or packet(node) in VIEWS) or not is_tensor(node):
        return None
    if value(node).is_floating_point() or value(node).is_complex():
        return None
    first = known.setdefault((node.target, str(node.args), str(node.kwargs)), node)
    return first if first is not node else None


def _of_labels(graph: Graph, node: Node) -> Node | None:
    """A function of ``unsqueeze(x, 1)`` as that of x, whose result is unsqueezed."""
    tensors = [a for a in node.all_input_nodes if is_tensor(a) and shape(a)]
    column = is_tensor(node) and len(shape(node)) == 2
    if not column or not tensors or not all(map(_is_unsqueezed, tensors)):
        return None
    with graph.inserting_before(node):
        args, kwargs = map_arg((node.args, node.kwargs), lambda a: a.args[0] if a in tensors else a)
        inner = graph.call_function(node.target, args, kwargs)  # pyright: ignore
        made = graph.call_function(A.unsqueeze.default, (inner, 1))
    inner.meta = node.meta | {"val": _without_view(value(node)[:, 0])}
    return made


def _without_view(tensor: torch.Tensor) -> torch.Tensor:
    """An example value that is no view of another: torch stores graphs, but no such values."""
    return tensor.new_empty(tensor.shape)


def _is_unsqueezed(node: Node) -> bool:
    return packet(node) is A.unsqueeze and len(shape(node)) == 2 and node.args[1] in (1, -1)


def _stacked(graph: Graph, node: Node) -> Node | None:
    joined: Any = node.args[0]
    if packet(joined) is not A.cat or (len(joined.args) > 1 and joined.args[1]):
        return None
    parts = joined.args[0]
    sizes = keys(shape(node)[1:])
    if len(parts) < 2 or not shape(parts[0]) or key(shape(node)[0]) != len(parts):
        return None
    if any(keys(shape(part)) != sizes for part in parts):
        return None
    with graph.inserting_before(node):
        rows = [graph.call_function(A.unsqueeze.default, (part, 0)) for part in parts]
        made = graph.call_function(A.cat.default, (rows, 0))
    for row in rows:
        row.meta["val"] = _without_view(value(node)[:1])
    return made


def _product(graph: Graph, node: Node) -> Node:
    a, b = node.args
    with graph.inserting_before(node):
        factors = [graph.call_function(A.squeeze.dim, (factor, 0)) for factor in (a, b)]
        product = graph.call_function(A.mm.default, tuple(factors))
        made = graph.call_function(A.unsqueeze.default, (product, 0))
    for factor, of in zip(factors, (a, b), strict=True):
        factor.meta["val"] = _without_view(value(of)[0])  # pyright: ignore[reportArgumentType]
    product.meta = node.meta | {"val": value(node)[0]}
    return made


def _zeros(graph: Graph, node: Node) -> Node:
    """The product of zeros, such as the gradient of a sign."""
    with graph.inserting_before(node):
        sizes = [
            size
            if isinstance(size, int)
            else graph.call_function(A.sym_size.int, (node.args[d], d))
            for d, size in enumerate(shape(node))
        ]
        options = {"dtype": value(node).dtype, "device": value(node).device}
        made = graph.call_function(A.full.default, (sizes, 0), options)
    for size, of in zip(sizes, shape(node), strict=True):
        if isinstance(size, Node):
            size.meta["val"] = of
    return made


def _of_rows_first(graph: Graph, node: Node) -> Node | None:
    """The extreme of the extremes, or the sum of the sums, of the last dimension."""
    source: Any = node.args[0]
    sizes = shape(source)
    keep = bool(node.args[2]) if len(node.args) > 2 else False
    dims = (node.args[1] if len(node.args) > 1 else None) or range(len(sizes))
    first = sorted({d % len(sizes) for d in dims}) if sizes else []  # pyright: ignore
    if len(first) < 2 or first[-1] != len(sizes) - 1:
        return None
    if node.target is A.sum.dim_IntList and len(first) == len(sizes):
        return None  # a loop adds up all rows
    reduced = _NESTED[node.target]
    kwargs = dict(node.kwargs)
    with graph.inserting_before(node):
        rows = graph.call_function(reduced, (source, [-1], keep), kwargs)
        made = graph.call_function(reduced, (rows, first[:-1], keep), kwargs)
    last = value(source)[..., :1] if keep else value(source)[..., 0]
    rows.meta["val"] = last.new_empty(last.shape, dtype=value(node).dtype)
    return made
