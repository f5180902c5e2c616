"""Finds row regions: heads, and the calls that compute what a program makes of their rows.

In: a region of a Dynamo graph, and its linears that may be heads. Out: a :class:`Captured` for each
group of heads whose logits meet, or why there is none. The graph does not change::

    %z = linear(%h, %w);  %t = linear(%g, %u)        one region of two heads: %z, %t
    %kl = kl_div(log_softmax(%z), softmax(%t))       one call, its output ``[N]`` is summed outside
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node
from torch.utils import _pytree as pytree

from fxpass.capture.function import leaves_of
from fxpass.capture.sharding import check_results
from fxpass.capture.slice import Scope, Slice, slice_of
from fxpass.capture.values import (
    PRODUCTS,
    Leaf,
    Size,
    Stop,
    Value,
    letter_of,
    nodes_behind,
    numel,
    same,
)
from fxpass.graph.calls import storage, written
from fxpass.graph.functions import LOSSES, function_of
from fxpass.graph.moving import movable
from fxpass.graph.nodes import NoMatch, is_tensor
from fxpass.graph.region import CHECKPOINTS, Region
from fxpass.graph.source import call_name, source_line


@dataclass(frozen=True)
class RowCall:
    """One call of the operator.

    Attributes:
        outputs: the tensors of the slice that it computes.
        leaves: its inputs: logits, rows, shared operands.
        place: the node before which it stands.
        moved: operands that are moved to it, in the graph's order.
    """

    outputs: tuple[Value, ...]
    leaves: tuple[Leaf, ...]
    place: Node
    moved: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Captured:
    """A row region.

    Attributes:
        slice: what its nodes compute.
        heads: the nodes that make logits.
        calls: the operator calls.
        results: the nodes whose results they compute.
        kept: whether the logits exist, and the calls read them.
    """

    slice: Slice
    heads: tuple[Node, ...]
    calls: tuple[RowCall, ...]
    results: tuple[Node, ...]
    kept: bool = False

    @property
    def source(self) -> str:
        """The user's line where the first call's outputs are read, or that of the head."""
        places = [call.place for call in self.calls[:1]]
        return source_line(next((p for p in places if p.meta.get("stack_trace")), self.heads[0]))

    @property
    def trained(self) -> bool:
        """Whether a result has a gradient."""
        return any(value.trained for call in self.calls for value in call.outputs)

    @property
    def operations(self) -> tuple[str, ...]:
        """The names of the ATen calls on tensors with classes, each once."""
        steps = (s for s in self.slice.steps if s.run and any(v.of_classes for v in s.values))
        return tuple(dict.fromkeys(s.op.overloadpacket.__name__ for s in steps))


def capture_kept(region: Region, node: Node, scope: Scope) -> Captured:
    """The losses with a name, of logits that exist anyway: other results, which the program may
    compare with the logits bit by bit, are computed from them.

    Raises:
        NoMatch: there is none, or the logits are written to.
    """
    found = slice_of(region, {node: False}, {}, scope, kept=True)
    results = tuple(n for n in sorted(found.boundary()) if function_of(n) in LOSSES)
    stop = next((no for n, no in found.stops.items() if n.target in CHECKPOINTS), None)
    if stop is not None:
        raise stop
    if writer := next((n for n in found.ran if written(n)), None):
        raise NoMatch.at(writer, "writes to logits that exist anyway")
    if not results:
        raise NoMatch(node, "its logits exist, and no loss of them has a name")
    if not (tag := found.values(node).tag or "").endswith("c") or tag[:-1].strip("r"):
        raise NoMatch(node, "its logits exist, and their classes are not last")
    return _made(found, (node,), results, kept=True)


def capture(region: Region, node: Node, candidates: Collection[Node], scope: Scope) -> Captured:
    """The row region of a head.

    Args:
        region: a plain region.
        node: a linear.
        candidates: the linears that may be heads of the region, too.
        scope: what is known of the whole graph.

    Raises:
        NoMatch: what stops it.
    """
    heads = {node}
    while True:
        captured = _oriented(region, heads, {}, scope)
        sources = {n: letters for m in _operands(captured) for n, letters in made_of(*m)}
        more = {n for n in sources if n in candidates} - heads
        if not more:
            break
        heads |= more
    given = {n: tag for n, tag in sources.items() if function_of(n) not in PRODUCTS}
    try:
        return _oriented(region, heads, given, scope) if given else captured
    except NoMatch:
        return captured  # what is made of given logits is made outside


def _oriented(
    region: Region, heads: set[Node], given: Mapping[Node, str], scope: Scope
) -> Captured:
    """A region in which the classes are the columns of products, or else their rows."""
    try:
        return _captured(region, dict.fromkeys(heads, False), given, scope)
    except NoMatch as no:
        turned = {n: function_of(n) in ("matmul", "mm", "einsum", "addmm") for n in heads}
        if not any(turned.values()):
            raise
        try:
            return _captured(region, turned, given, scope)
        except NoMatch:
            raise no from None


def _captured(
    region: Region, seeds: dict[Node, bool], given: Mapping[Node, str], scope: Scope
) -> Captured:
    found = slice_of(region, seeds, given, scope)
    return _made(found, tuple(sorted(seeds)), tuple(sorted(found.boundary())))


def _made(
    found: Slice, heads: tuple[Node, ...], results: tuple[Node, ...], kept: bool = False
) -> Captured:
    if not found.recorder.heads:
        raise NoMatch.at(min(heads), "is no product of rows with classes")
    calls = tuple(_calls(found, results))
    if not calls:
        raise NoMatch(min(heads), "nothing is computed from its logits")
    if found.sharding is not None:
        check_results(found.sharding, results)
    return Captured(found, heads, calls, results, kept)


# ---------------------------------------------------------------- outputs


def outputs_of(found: Slice, node: Node) -> list[Value]:
    """The row outputs that a node's results, read outside of the slice, are computed from.

    Raises:
        NoMatch: a result has classes.
    """
    wanted: dict[int, Value] = {}

    def collect(value: Value) -> None:
        if value.of_classes:
            raise NoMatch.at(node, "leaves the region with its classes")
        if value.tag is not None:
            wanted[id(value)] = value
        elif value.late and value.step is not None:
            for argument in value.step.values:
                collect(argument)

    for leaf in pytree.tree_leaves(found.values(node)):
        if isinstance(leaf, Value):
            collect(leaf)
    return list(wanted.values())


def _calls(found: Slice, results: Sequence[Node]) -> Iterator[RowCall]:
    """Calls for all results: one for those of the same rows, before the first node that reads any
    of them, if what it reads is there."""
    writers = found.scope.writers
    groups: list[tuple[set[str], list[Value], Node]] = []
    for node in results:
        for value in outputs_of(found, node):
            if any(value is known for _, values, _ in groups for known in values):
                continue
            leaves = _leaves(node, [value])
            rows = {leaf.key for leaf in leaves if leaf.kind == "logits"}
            for group in groups:
                of_group, values, place = group
                before = _before(found, place, value.trained)
                read = leaves if before is place else [*leaves, *_leaves(node, values)]
                fits = rows & of_group and _fits(found, read, before, values, value)
                if fits and not _written(found, leaves, before, node):
                    of_group |= rows
                    values.append(value)
                    groups[groups.index(group)] = of_group, values, before
                    break
            else:
                groups.append((rows, [value], _place(found, node, leaves, value)))
    for _, values, place in groups:
        leaves = _leaves(place, values)
        for leaf in leaves:
            _check_writes(found, leaf, place, writers)
        moved = movable((n for leaf in leaves for n in nodes_of(leaf)), place, found.ran) or ()
        yield RowCall(tuple(values), tuple(leaves), place, tuple(moved))


def _leaves(node: Node, values: Sequence[Value]) -> list[Leaf]:
    try:
        leaves = leaves_of(values, values[0].fake.device)
    except Stop as stop:
        raise NoMatch.at(node, f"{stop}") from None
    if not any(leaf.kind == "logits" for leaf in leaves):
        raise NoMatch.at(node, "reads no values of the logits")
    return leaves


def _fits(found: Slice, leaves: list[Leaf], place: Node, values: list[Value], new: Value) -> bool:
    """Whether a call at a place can have one output more."""
    first = values[0]
    rows = new.rows, first.rows
    if numel(rows[0]) != numel(rows[1]):
        return False
    operands = (node for leaf in leaves for node in nodes_of(leaf))
    grads = _enabled(found, place) or not new.trained
    return grads and movable(operands, place, found.ran) is not None


def _before(found: Slice, place: Node, trained: bool) -> Node:
    """A place where gradients are enabled, if a call has some: before the node that switches them
    off, as a metric under no_grad may be the first that reads logits."""
    last, grads = place, found.scope.grads
    while trained and last in grads and not grads[last]:
        last = last.prev
    return place if last is place or last not in grads else last.next


def _enabled(found: Slice, place: Node) -> bool:
    """Whether gradients are enabled before a node, which may be the one that switches them off."""
    grads = found.scope.grads
    return grads[place] or grads.get(place.prev, False)


def _written(found: Slice, leaves: list[Leaf], place: Node, node: Node) -> bool:
    """Whether what a node reads is written to after an earlier place."""
    for operand in (n for leaf in leaves for n in nodes_of(leaf)):
        for memory in {storage(operand), None}:
            writers = found.scope.writers.get(memory, ())
            if any(place <= w < node and w not in found.ran for w in writers):
                return True
    return False


def _place(found: Slice, node: Node, leaves: list[Leaf], value: Value) -> Node:
    """The node before which a call stands: where gradients are enabled, if it has some."""
    place = _before(found, node, value.trained)
    if value.trained and not _enabled(found, place):
        raise NoMatch.at(node, "has a gradient where gradients are off")
    if any(operand >= place for leaf in leaves for operand in nodes_of(leaf)):
        raise NoMatch.at(node, "reads an operand that is made where gradients are off")
    return place


def nodes_of(leaf: Leaf) -> list[Node]:
    """The Dynamo nodes that an input is made of."""
    values: list[Value | None] = [leaf.value]
    if leaf.head is not None:
        values = [leaf.head.x, leaf.head.weight, leaf.head.bias]
    values += [v for op in leaf.chain for v in pytree.tree_leaves(op.args) if isinstance(v, Value)]
    return nodes_behind(v for v in values if v is not None)


def _check_writes(found: Slice, leaf: Leaf, place: Node, writers: Mapping[Any, list[Node]]) -> None:
    """Raises if a node outside of the slice writes to an operand before the call reads it."""
    for operand in nodes_of(leaf):
        # an operand of which no node that ran is a user is read by what spreads it
        first = min((user for user in operand.users if user in found.ran), default=operand)
        for memory in {storage(operand), None}:
            for writer in writers.get(memory, ()):
                if first < writer < place and writer not in found.ran:
                    what = f"%{writer.name} ({call_name(writer)}) may change %{operand.name}"
                    raise NoMatch(writer, f"{what} in place between the linear and the loss")


# ---------------------------------------------------------------- several heads


def _operands(captured: Captured) -> Iterator[tuple[Node, str]]:
    """The operands of rows that are about as large as logits, and their tags."""
    classes = captured.slice.recorder.classes
    for call in captured.calls:
        for leaf in call.leaves:
            if leaf.kind != "row" or leaf.value is None:
                continue
            sizes = zip(leaf.letters, leaf.value.shape, strict=True)
            tag = "".join(c if c == "r" else letter_of(s, classes) for c, s in sizes)
            if "c" in tag:
                yield from ((n, tag) for n in _sources(leaf.value))


def _sources(value: Value) -> Iterator[Node]:
    """The nodes of an operand that are as large."""
    if value.node is not None:
        yield value.node
    for argument in value.step.values if value.step is not None and value.node is None else ():
        if numel(argument.shape) * 2 >= numel(value.shape):
            yield from _sources(argument)


def made_of(node: Node, tag: str) -> Iterator[tuple[Node, str]]:
    """What makes an operand, by nodes that are as large: products, given logits; and their tags."""
    shape, seen = node.meta["example_value"].shape, {node}
    todo: list[tuple[Node, Node | None]] = [(node, None)]
    while todo:
        source, last = todo.pop()
        if function_of(source) in PRODUCTS:
            yield source, tag
            continue
        sources = [n for n in source.all_input_nodes if _is_as_large(n, numel(shape))]
        if is_tensor(source) and _same_shape(source.meta["example_value"].shape, shape):
            last = source
        # given logits, or a view of them that has the rows of the head
        if not sources and last not in (None, node) and storage(last) == storage(source):
            yield last, tag
        todo += [(n, last) for n in sources if n not in seen]
        seen.update(sources)


def _same_shape(one: Sequence[Size], other: Sequence[Size]) -> bool:
    return len(one) == len(other) and all(map(same, one, other))  # without a guard


def _is_as_large(node: Node, size: int) -> bool:
    """Several tensors, such as those of a sort, have no one size."""
    example = node.meta.get("example_value")
    if isinstance(example, tuple | list):
        return True
    return is_tensor(node) and numel(node.meta["example_value"].shape) * 2 >= size
