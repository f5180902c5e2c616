"""Rules of collectives, which are row-wise: ranks exchange a chunk of rows at a time.

In: a graph in which heads are sharded over ranks. Out: plans; and one spelling of gathers along
another dimension than the first::

    all_reduce(z.amax(-1), "max", group)                of a chunk's rows
    cat(split(all_gather(z [N, V], 2, group), N), 1)    w = all_gather(z [1, N, V], 2, group)
                                                        cat([w[0], w[1]], 1)

All ranks have to compute the same rows at a time, in the same order. So the rules hold only where
the heads have the same sizes on all ranks (:mod:`fxpass.rows.alike`). Elsewhere a collective ends
the region, and stays as in the program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxpass import messages
from fxpass.rows.aten_calls import A
from fxpass.rows.rules import Env, NodePlan, Rules, rule
from fxpass.rows.sizes import example, is_one, packet, same_size, shape
from fxpass.rows.tags import Stop, Tag, relettered
from fxpass.rows.views import source_operand, tagged

C: Any = torch.ops._c10d_functional
_SCATTERED = C.reduce_scatter_tensor
_GATHERED = C.all_gather_into_tensor


def _check(rules: Rules, node: Node) -> None:
    """Raises Stop unless all ranks run the call for the same rows, and a text can spell it."""
    if not rules.alike:
        raise Stop(messages.COLLECTIVE_SIZES)
    words = [a for a in node.args if not isinstance(a, Node)]
    if not all(isinstance(a, int) or re.fullmatch(r"\w+", str(a)) for a in words):
        raise Stop(messages.COLLECTIVE_GROUP)


@rule("all_reduce", "wait_tensor", ns=C)
def row_by_row(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """Reduces each element over the ranks."""
    _check(rules, node)
    source = source_operand(node)
    tag = want or tagged(rules, source)
    ref = rules.ref(source, tag)
    call: Any = node.target
    return NodePlan(tag, [ref], lambda env: call(env.full(ref).contiguous(), *node.args[1:]))


@rule("all_gather_into_tensor", "reduce_scatter_tensor", ns=C)
def along_ranks(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """Gathers an entry of each rank along the first dimension, or reduces and scatters these."""
    _check(rules, node)
    source = source_operand(node)
    entries = source if packet(node) is _GATHERED else node
    if not is_one(shape(entries)[0]) or len(shape(entries)) < 2:
        raise Stop(messages.COLLECTIVE_ENTRIES)
    tag = want or tagged(rules, source)
    if tag.letters[0] == "r":
        raise Stop(messages.COLLECTIVE_ROWS)
    result = tag.with_letters(relettered(tag.letters, shape(node), rules.classes))
    ref = rules.ref(source, tag.with_letters(relettered(tag.letters, shape(source), rules.classes)))
    call: Any = node.target

    def run(env: Env) -> Tensor:
        made = call(env.full(ref).movedim(1, 0).contiguous(), *node.args[1:])
        return C.wait_tensor.default(made).movedim(0, 1)

    return NodePlan(result, [ref], run)


def spell_gathers(graph: Graph, products: Iterable[Node]) -> None:
    """Gives gathers of values that depend on some products, and scatters of their gradients, a
    dimension for the ranks."""
    reached = set(products)
    collectives = list[Node]()
    for node in graph.nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            if packet(node) in (_GATHERED, _SCATTERED):
                collectives.append(node)
    for node in collectives:
        (_spell_gather if packet(node) is _GATHERED else _spell_scatter)(graph, node)


def _spell_gather(graph: Graph, node: Node) -> None:
    source, count, group = node.args
    parts = _parts_of(node, count)
    if parts is None:
        return
    with graph.inserting_before(node):
        entry = _call(graph, A.unsqueeze.default, source, 0)
        made = _call(graph, C.all_gather_into_tensor.default, entry, count, group)
        waited = _call(graph, C.wait_tensor.default, made)
        new = [_call(graph, A.select.int, waited, 0, i) for i in range(len(parts))]
    for part, entry in zip(parts, new, strict=True):
        if part is not None:
            entry.meta = part.meta | {"val": example(entry)}
            part.replace_all_uses_with(entry)
    _erase(graph, node)


def _parts_of(node: Node, count: Any) -> list[Node | None] | None:
    """The ranks' parts; None if the gathered tensor has another reader."""
    wait, *more = node.users
    size = shape(node.args[0])[:1]  # pyright: ignore[reportArgumentType]
    if more or packet(wait) is not C.wait_tensor or len(wait.users) != 1 or not size:
        return None
    (split,) = wait.users
    along = split.args[2] if len(split.args) > 2 else 0
    if packet(split) is not A.split or along != 0:
        return None
    if len(example(split)) != count or not all(
        same_size(t.shape[0], size[0]) for t in example(split)
    ):
        return None
    parts: list[Node | None] = [None] * len(example(split))
    for part in split.users:
        parts[part.args[1]] = part  # type: ignore[index]
    return parts


def _spell_scatter(graph: Graph, node: Node) -> None:
    joined, op, count, group = node.args
    along = joined.args[1] if packet(joined) is A.cat and len(joined.args) > 1 else 0  # type: ignore[union-attr]
    wait, *more = node.users
    if packet(joined) is not A.cat or along or more or packet(wait) is not C.wait_tensor:  # type: ignore[arg-type]
        return
    parts: Any = joined.args[0]  # type: ignore[union-attr]
    if len(parts) != count or not all(same_size(shape(p)[0], shape(parts[0])[0]) for p in parts):
        return
    with graph.inserting_before(node):
        unsqueezed = [_call(graph, A.unsqueeze.default, part, 0) for part in parts]
        entries = _call(graph, A.cat.default, unsqueezed, 0)
        made = _call(graph, C.reduce_scatter_tensor.default, entries, op, count, group)
        waited = _call(graph, C.wait_tensor.default, made)
        entry = _call(graph, A.squeeze.dim, waited, 0)
    entry.meta = wait.meta | {"val": example(entry)}
    wait.replace_all_uses_with(entry)
    _erase(graph, node)


def _erase(graph: Graph, node: Node) -> None:
    """Erases a collective without readers, and its wait, which FX takes for a side effect."""
    waits = set(node.users)
    graph.eliminate_dead_code(lambda other: other not in waits and other.is_impure())


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    """Adds a call, with its example value."""
    node = graph.call_function(target, args)
    given = map_arg(args, example)
    modes = [example(a).fake_mode for a in node.all_input_nodes if hasattr(example(a), "fake_mode")]
    with modes[0]:
        node.meta["val"] = target(*given)
    return node
