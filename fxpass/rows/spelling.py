"""Gives computations that decompositions spell in several ways one spelling.

In: a graph. Out: the graph, changed in place::

    view(cat([a, b], 0), [2, *a.shape])    cat([unsqueeze(a, 0), unsqueeze(b, 0)], 0)
    bmm(a [1, N, D], b [1, D, V])          unsqueeze(mm(a [N, D], b [D, V]), 0)
    mm(full([N, V], 0), w [V, D])          full([N, D], 0)
    max(z), amax(z, [0, 1])                amax(amax(z, [-1]), [0])
    ne(unsqueeze(t, 1), -100)              unsqueeze(ne(t, -100), 1)
    eq(iota(N, uint16)[:, None], iota(N, uint16))          the same of int64
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxpass.rows.aten_calls import VIEWS, A, P, fill_value
from fxpass.rows.sizes import example, is_one, is_tensor_node, key, keys, packet, shape

# Reductions of several dimensions that may run one dimension after another.
_NESTED = {A.max.default: A.amax.default, A.min.default: A.amin.default}
_NESTED |= {op: op for op in (A.amax.default, A.amin.default, A.any.dims, A.all.dims)}
_NESTED |= {A.any.default: A.any.dims, A.all.default: A.all.dims}
_NESTED |= {A.sum.dim_IntList: A.sum.dim_IntList}
_VIEWS = (A.view, A._unsafe_view, A.reshape)


def spell(graph: Graph) -> None:
    """Gives stacks, batches of one product, reductions and functions of labels one spelling:
    forward and backward of a loss spell these differently. Merges equal labels and masks."""
    first_nodes: dict[Any, Node] = {}
    for node in list(graph.nodes):
        made = None
        if node.target is A._assert_tensor_metadata.default:
            graph.erase_node(node)  # torch.export adds these, and the trace has checked them
        elif packet(node) in _VIEWS:
            made = _spell_stack(graph, node)
        elif packet(node) is A.bmm and is_one(shape(node)[0]):
            made = _spell_product(graph, node)
        elif packet(node) is A.mm and any(
            fill_value(factor) == 0 for factor in node.all_input_nodes
        ):
            made = _spell_zeros(graph, node)
        elif node.target is P.iota.default:
            _widen_range(node)
        elif node.target in _NESTED:
            made = _spell_reduction(graph, node)
        elif torch.Tag.pointwise in getattr(node.target, "tags", ()):
            made = _spell_labels(graph, node)
        if made is not None:
            made.meta = node.meta | {"val": _without_view(example(node))}
            node.replace_all_uses_with(made)
        for new in (made, node) if made is not None else (node,):
            if (equal := _equal_node(new, first_nodes)) is not None:
                new.replace_all_uses_with(equal)
    graph.eliminate_dead_code()


def _equal_node(node: Node, first_nodes: dict[Any, Node]) -> Node | None:
    """An earlier node that computes the same labels or mask."""
    tags = getattr(node.target, "tags", ())
    pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    if not (pointwise or packet(node) in VIEWS) or not is_tensor_node(node):
        return None
    if example(node).is_floating_point() or example(node).is_complex():
        return None
    first = first_nodes.setdefault((node.target, str(node.args), str(node.kwargs)), node)
    return first if first is not node else None


def _spell_labels(graph: Graph, node: Node) -> Node | None:
    """Unsqueezes the result of a function instead of its arguments ``unsqueeze(x, 1)``."""
    tensors = [a for a in node.all_input_nodes if is_tensor_node(a) and shape(a)]
    column = is_tensor_node(node) and len(shape(node)) == 2
    if not column or not tensors or not all(map(_is_unsqueezed, tensors)):
        return None
    with graph.inserting_before(node):
        args, kwargs = map_arg((node.args, node.kwargs), lambda a: a.args[0] if a in tensors else a)
        inner = graph.call_function(node.target, args, kwargs)  # pyright: ignore
        made = graph.call_function(A.unsqueeze.default, (inner, 1))
    inner.meta = node.meta | {"val": _without_view(example(node)[:, 0])}
    return made


def _without_view(tensor: torch.Tensor) -> torch.Tensor:
    """An example value that is no view: torch cannot store a graph whose example values are."""
    return tensor.new_empty(tensor.shape)


def _is_unsqueezed(node: Node) -> bool:
    return packet(node) is A.unsqueeze and len(shape(node)) == 2 and node.args[1] in (1, -1)


def _spell_stack(graph: Graph, node: Node) -> Node | None:
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
        row.meta["val"] = _without_view(example(node)[:1])
    return made


def _widen_range(node: Node) -> None:
    """Gives a range of unsigned 16 or 32 bits that is only compared, as in ``eye``, 64 bits: a loop
    may be interpreted, and eager has no such range."""
    if example(node).dtype not in (torch.uint16, torch.uint32):
        return
    changed = [node]
    for source in changed:
        changed += [user for user in source.users if packet(user) in VIEWS]
    readers = {user for source in changed for user in source.users} - {*changed}
    if readers and all(packet(user) is A.eq for user in readers):
        node.kwargs = node.kwargs | {"dtype": torch.int64}
        for source in changed:
            source.meta["val"] = example(source).new_empty(shape(source), dtype=torch.int64)


def _spell_product(graph: Graph, node: Node) -> Node:
    a, b = node.args
    with graph.inserting_before(node):
        factors = [graph.call_function(A.squeeze.dim, (factor, 0)) for factor in (a, b)]
        product = graph.call_function(A.mm.default, tuple(factors))
        made = graph.call_function(A.unsqueeze.default, (product, 0))
    for factor, of in zip(factors, (a, b), strict=True):
        factor.meta["val"] = _without_view(example(of)[0])  # pyright: ignore[reportArgumentType]
    product.meta = node.meta | {"val": example(node)[0]}
    return made


def _spell_zeros(graph: Graph, node: Node) -> Node:
    """A product with zeros, such as the gradient of a sign, as zeros."""
    with graph.inserting_before(node):
        sizes = [
            size
            if isinstance(size, int)
            else graph.call_function(A.sym_size.int, (node.args[d], d))
            for d, size in enumerate(shape(node))
        ]
        options = {"dtype": example(node).dtype, "device": example(node).device}
        made = graph.call_function(A.full.default, (sizes, 0), options)
    for size, of in zip(sizes, shape(node), strict=True):
        if isinstance(size, Node):
            size.meta["val"] = of
    return made


def _spell_reduction(graph: Graph, node: Node) -> Node | None:
    """Reduces the last dimension first, and then the others."""
    source: Any = node.args[0]
    sizes = shape(source)
    keep = bool(node.args[2]) if len(node.args) > 2 else False
    dims = (node.args[1] if len(node.args) > 1 else None) or range(len(sizes))
    dims = sorted({d % len(sizes) for d in dims}) if sizes else []  # pyright: ignore
    if len(dims) < 2 or dims[-1] != len(sizes) - 1:
        return None
    if node.target is A.sum.dim_IntList and len(dims) == len(sizes):
        return None  # a loop adds up all rows
    reduced = _NESTED[node.target]
    kwargs = dict(node.kwargs)
    with graph.inserting_before(node):
        rows = graph.call_function(reduced, (source, [-1], keep), kwargs)
        made = graph.call_function(reduced, (rows, dims[:-1], keep), kwargs)
    last = example(source)[..., :1] if keep else example(source)[..., 0]
    rows.meta["val"] = last.new_empty(last.shape, dtype=example(node).dtype)
    return made
