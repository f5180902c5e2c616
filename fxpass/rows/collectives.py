"""Rules of collectives, which are row-wise: a chunk of rows is exchanged at a time.

In: a graph in which heads are sharded over ranks. Out: plans; and one spelling of what is gathered
along another dimension than the first::

    all_reduce(z.amax(-1), "max", group)                of a chunk's rows
    cat(split(all_gather(z [N, V], 2, group), N), 1)    w = all_gather(z [1, N, V], 2, group)
                                                        cat([w[0], w[1]], 1)

All ranks have to take the same rows at a time, in the same order. So there are rules only where the
heads are known to have the same sizes on all ranks (:mod:`fxpass.rows.alike`); else a collective
ends the region, and is that of the program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxpass.rows.rules import A, Env, NodePlan, Rules, rule
from fxpass.rows.sizes import is_one, packet, same, shape, value
from fxpass.rows.tags import Stop, Tag, relettered
from fxpass.rows.views import source_of, tagged

C: Any = torch.ops._c10d_functional
_SCATTERED = C.reduce_scatter_tensor
_GATHERED = C.all_gather_into_tensor


def _check(rules: Rules, node: Node) -> None:
    """Raises Stop unless all ranks run the call for the same rows, and a text can have it."""
    if not rules.alike:
        raise Stop("is a collective, and sizes of the head may differ between ranks")
    words = [a for a in node.args if not isinstance(a, Node)]
    if not all(isinstance(a, int) or re.fullmatch(r"\w+", str(a)) for a in words):
        raise Stop("is a collective of a group with another kind of name")


@rule("all_reduce", "wait_tensor", ns=C)
def row_by_row(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """Each element with those of other ranks."""
    _check(rules, node)
    source = source_of(node)
    tag = want or tagged(rules, source)
    ref = rules.ref(source, tag)
    call: Any = node.target
    return NodePlan(tag, [ref], lambda env: call(env.full(ref).contiguous(), *node.args[1:]))


@rule("all_gather_into_tensor", "reduce_scatter_tensor", ns=C)
def along_ranks(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """One entry of the first dimension for each rank; one of them is this rank's."""
    _check(rules, node)
    source = source_of(node)
    entries = source if packet(node) is _GATHERED else node
    if not is_one(shape(entries)[0]) or len(shape(entries)) < 2:
        raise Stop("is a collective of entries along rows")
    tag = want or tagged(rules, source)
    if tag.letters[0] == "r":
        raise Stop("is a collective along rows")
    result = tag.like(relettered(tag.letters, shape(node), rules.classes))
    ref = rules.ref(source, tag.like(relettered(tag.letters, shape(source), rules.classes)))
    call: Any = node.target

    def run(env: Env) -> Tensor:
        made = call(env.full(ref).movedim(1, 0).contiguous(), *node.args[1:])
        return C.wait_tensor.default(made).movedim(0, 1)

    return NodePlan(result, [ref], run)


def gathers(graph: Graph, products: Iterable[Node]) -> None:
    """Spells gathers of what is computed of some products, and the scatters of their gradients,
    with a dimension for the ranks."""
    reached = set(products)
    found = list[Node]()
    for node in graph.nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            found += [node] * (packet(node) in (_GATHERED, _SCATTERED))
    for node in found:
        (_gathered if packet(node) is _GATHERED else _scattered)(graph, node)


def _gathered(graph: Graph, node: Node) -> None:
    source, count, group = node.args
    parts = _parts_of(node, count)
    if parts is None:
        return
    with graph.inserting_before(node):
        one = _call(graph, A.unsqueeze.default, source, 0)
        made = _call(graph, C.all_gather_into_tensor.default, one, count, group)
        waited = _call(graph, C.wait_tensor.default, made)
        new = [_call(graph, A.select.int, waited, 0, i) for i in range(len(parts))]
    for part, entry in zip(parts, new, strict=True):
        if part is not None:
            entry.meta = part.meta | {"val": value(entry)}
            part.replace_all_uses_with(entry)
    _erased(graph, node)


def _parts_of(node: Node, count: Any) -> list[Node | None] | None:
    """The ranks' parts, if nothing else is read of what is gathered."""
    wait, *more = node.users
    size = shape(node.args[0])[:1]  # pyright: ignore[reportArgumentType]
    if more or packet(wait) is not C.wait_tensor or len(wait.users) != 1 or not size:
        return None
    (split,) = wait.users
    along = split.args[2] if len(split.args) > 2 else 0
    if packet(split) is not A.split or along != 0:
        return None
    if len(value(split)) != count or not all(same(t.shape[0], size[0]) for t in value(split)):
        return None
    parts: list[Node | None] = [None] * len(value(split))
    for part in split.users:
        parts[part.args[1]] = part  # type: ignore[index]
    return parts


def _scattered(graph: Graph, node: Node) -> None:
    joined, op, count, group = node.args
    along = joined.args[1] if packet(joined) is A.cat and len(joined.args) > 1 else 0  # type: ignore[union-attr]
    wait, *more = node.users
    if packet(joined) is not A.cat or along or more or packet(wait) is not C.wait_tensor:  # type: ignore[arg-type]
        return
    parts: Any = joined.args[0]  # type: ignore[union-attr]
    if len(parts) != count or not all(same(shape(p)[0], shape(parts[0])[0]) for p in parts):
        return
    with graph.inserting_before(node):
        ones = [_call(graph, A.unsqueeze.default, part, 0) for part in parts]
        entries = _call(graph, A.cat.default, ones, 0)
        made = _call(graph, C.reduce_scatter_tensor.default, entries, op, count, group)
        waited = _call(graph, C.wait_tensor.default, made)
        one = _call(graph, A.squeeze.dim, waited, 0)
    one.meta = wait.meta | {"val": value(one)}
    wait.replace_all_uses_with(one)
    _erased(graph, node)


def _erased(graph: Graph, node: Node) -> None:
    """Erases a collective that nothing reads; FX calls its wait an effect."""
    waits = set(node.users)
    graph.eliminate_dead_code(lambda other: other not in waits and other.is_impure())


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    """A call, with its example value."""
    node = graph.call_function(target, args)
    given = map_arg(args, value)
    modes = [value(a).fake_mode for a in node.all_input_nodes if hasattr(value(a), "fake_mode")]
    with modes[0]:
        node.meta["val"] = target(*given)
    return node
