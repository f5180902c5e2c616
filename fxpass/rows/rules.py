"""Tags of the nodes of a functional ATen graph, and how each node runs on a chunk of rows.

In: a graph with tagged heads. Out: for a node a :class:`NodePlan`: its tag, its operands, and how
it runs on a chunk. A rule, one for each class of ATen op, serves in both directions: it joins the
tags of the arguments, or is told the tag that is wanted (``want``) of a node which makes an operand
as large as logits, and pulls that node into the region::

    z + q[:, :-1]    q is an operand of each row    z + F.one_hot(labels)    one_hot is pulled in
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fxpass.formula.dtypes import held
from fxpass.rows.sizes import is_one, is_tensor, numel, packet, same, shape, value
from fxpass.rows.tags import Stop, Tag, View, letter_of, others

A: Any = torch.ops.aten
P: Any = torch.ops.prims


@dataclass(frozen=True)
class Ref:
    """An operand of a plan.

    Attributes:
        kind: ``node`` of the region; ``row``, an operand with rows; ``shared``, the same for all
            rows; ``fill``, one number.
        letters: of the dimensions.
        places: of an operand with rows, its dimension for each dimension of rows of the view;
            None: it is the same there.
        view: of the rows.
        sizes: of a node whose dimensions of one element are read as others, the canonical ones.
    """

    kind: str
    node: Node
    letters: str
    places: tuple[int | None, ...] = ()
    view: View | None = None
    sizes: tuple[Any, ...] | None = None


class Env(Protocol):
    """The surroundings of a plan that runs: one chunk of rows."""

    n: Any
    device: torch.device
    values: dict[Node, Any]

    def get(self, ref: Ref) -> Any:
        """The tensor ``[n, ...]``, or ``[1, ...]`` if it is the same for all rows."""

    def full(self, ref: Ref) -> Tensor:
        """The tensor ``[n, ...]``."""
        ...

    def shared(self, ref: Ref) -> Tensor:
        """An operand that is the same for all rows, in its own dimensions."""
        ...

    def size(self, size: Any) -> Any:
        """A size, or the value of a node of a number."""

    def inside(self, view: View) -> Tensor | None:
        """Which rows of the chunk a view has, ``[n]``; None if all."""


Run = Callable[[Env], Any]


@dataclass
class NodePlan:
    """How a node runs on a chunk.

    Attributes:
        tag: of its result; a list for several results; None for a sum over rows.
        refs: what it reads.
        run: the canonical result.
        views: whose rows ``run`` asks for, with :meth:`Env.inside`.
        per: of a mean over rows, the sizes whose product divides the sum.
    """

    tag: Tag | list[Tag | None] | None
    refs: Sequence[Ref]
    run: Run
    views: tuple[View, ...] = ()
    per: tuple[Any, ...] = ()


Rule = Callable[["Rules", Node, Any], NodePlan]
RULES: dict[Any, Rule] = {}


def rule(*names: str, ns: Any = A) -> Callable[[Rule], Rule]:
    """Enters a rule for the packets of these names."""

    def enter(function: Rule) -> Rule:
        for name in names:
            if hasattr(ns, name):  # not every PyTorch has all
                RULES[getattr(ns, name)] = function
        return function

    return enter


# What makes a tensor of one number, and where the number is.
FILLS = {A.scalar_tensor: 0, A.full: 1, A.full_like: 1, A.new_full: 2}
ZEROS = {A.zeros, A.zeros_like, A.new_zeros, A.empty, A.empty_like, A.new_empty}
ZEROS |= {A.new_empty_strided, A.empty_strided}
ONES = {A.ones, A.ones_like, A.new_ones}
# What computes nothing.
VIEWS = {A.view, A._unsafe_view, A.reshape, A.permute, A.expand, A.alias, A.unsqueeze, A.squeeze}
VIEWS |= {A.t, A.transpose, A.slice, A.select, A.detach}
_SAME = {A.expand, A.clone, A.view, A.alias, A.permute, A._to_copy, P.convert_element_type}


@dataclass
class Rules:
    """The plans of the nodes of a graph.

    Args:
        graph: the graph.
        classes: of the widest head.
        large: of so many elements, an operand is as large as logits.
        weights: of the heads, without views.
        hidden: the hidden states of the heads, without views: they are operands.
        alike: whether the heads have the same sizes on all ranks.
    """

    graph: Graph
    classes: int
    large: int
    weights: set[Node]
    hidden: set[Node]
    alike: bool = False
    plans: dict[Node, NodePlan] = field(default_factory=dict)
    reasons: dict[Node, Stop] = field(default_factory=dict)
    _pulling: set[Node] = field(default_factory=set)
    _large: dict[Node, bool] = field(default_factory=dict)

    def tag(self, node: Any) -> Any:
        """The tag of a node, a list of tags, or None."""
        plan = self.plans.get(node)
        return None if plan is None else plan.tag

    def tag_of(self, node: Any) -> Tag | None:
        """The tag of a node of one tensor."""
        found = self.tag(node)
        return found if isinstance(found, Tag) else None

    def has_classes(self, node: Any) -> bool:
        """Whether a result of a node has classes."""
        found = self.tag(node)
        tags = found if isinstance(found, list) else [found]
        return any(t is not None and t.has_classes for t in tags)

    def has_many(self, node: Any) -> bool:
        """Whether a result of a node has classes, and not a few of them alone, as of ``topk``."""
        few = is_tensor(node) and 2 * numel(shape(node)) < self.large
        return self.has_classes(node) and not few

    def is_sum(self, node: Any) -> bool:
        """Whether a node is summed over rows."""
        return node in self.plans and self.plans[node].tag is None

    def is_weight(self, node: Any) -> bool:
        """Whether a node is the weight of a head, or a view of one."""
        return base_of(node) in self.weights

    # ------------------------------------------------------------ arguments

    def fill(self, node: Node) -> Any:
        """The number of a tensor of one number; None if it is no such tensor."""
        return fill(node, self.plans)

    def ref(self, node: Node, tag: Tag) -> Ref:
        """The operand for a node whose dimensions are those of a tag.

        Raises:
            Stop: the node has other rows.
        """
        of_classes = node.op == "call_function" and any(map(self.has_classes, node.all_input_nodes))
        if node not in self.plans and self.fill(node) is None and of_classes:
            try:
                self.apply(node)  # of rows, and made of classes
            except Stop as stop:
                self.reasons.setdefault(node, stop)
        have = self.tag_of(node)
        if have is not None:
            found = self._as_rows(node, have, tag)
            if found is not None:
                return found
            same = have.letters.replace("c", "k") == tag.letters.replace("c", "k")
            if have.rows and not (same and have.view == tag.view):
                raise Stop("combines rows with other rows")
            return Ref("node", node, have.letters)
        number = self.fill(node)
        if number is not None and not isinstance(number, Node):
            return Ref("fill", node, tag.letters)
        if not tag.rows:
            return Ref("shared", node, tag.letters)
        if self.is_pulled(node):
            try:
                self.pull(node, tag)
                return Ref("node", node, tag.letters)
            except Stop as stop:
                self.reasons.setdefault(node, stop)
        return Ref("row", node, tag.letters, tag.rows, tag.view)

    def _as_rows(self, node: Node, have: Tag, tag: Tag) -> Ref | None:
        """A tensor whose dimensions of one element are counted as rows, or are not, as wanted."""
        if len(have.letters) != len(tag.letters) or have.view.root != tag.view.root:
            return None
        sizes = shape(node)
        pairs = zip(have.letters, tag.letters, sizes, strict=True)
        if have.rows == tag.rows or any(
            (a == "r") != (b == "r") and not is_one(s) for a, b, s in pairs
        ):
            return None
        if have.view.reshape([sizes[i] for i in tag.rows]) != tag.view:
            return None
        return Ref("node", node, tag.letters, sizes=others(sizes, tag.letters))

    def spread(self, node: Node, tag: Tag, sizes: Sequence[Any]) -> Ref:
        """The operand for an argument that is broadcast to a tagged result of these sizes."""
        own = shape(node)
        start = len(sizes) - len(own)
        alone = is_one(tag.view.root)  # what is the same for all rows is of the row
        pairs = zip(tag.letters[start:], own, strict=True)
        real = any(letter == "r" and (alone or not is_one(size)) for letter, size in pairs)
        letters = "".join(
            ("r" if real else "k") if letter == "r" else letter for letter in tag.letters[start:]
        )
        want = tag.like(letters)
        have = self.tag_of(node)
        if have is not None and have.rows and len(have.rows) < len(tag.rows):
            raise Stop("combines rows with other rows")
        full = all(i >= start and same(own[i - start], sizes[i]) for i in tag.rows)
        if (have is not None and have.rows) or full or not want.rows:
            return self.ref(node, want)
        if self.fill(node) is not None:
            return Ref("fill", node, want.letters)
        places = tuple(i - start if i >= start else None for i in tag.rows)
        return Ref("row", node, want.letters, places, tag.view)

    def is_pulled(self, node: Node, depth: int = 0) -> bool:
        """Whether a node computes something as large as logits, or what is read for it does."""
        if node.op != "call_function" or depth > 12 or base_of(node) in self.hidden:
            return False
        if node in self._large:
            return self._large[node]
        self._large[node] = False
        found = is_tensor(node) and numel(shape(node)) >= self.large
        found = found and (packet(node) not in VIEWS or self._repeats(node))
        if not found:
            found = any(
                self.has_classes(a) if a in self.plans else self.is_pulled(a, depth + 1)
                for a in node.all_input_nodes
            )
        self._large[node] = found
        if not depth:
            self._large.clear()
        return found

    def _repeats(self, node: Node) -> bool:
        """Whether a node has the elements of a smaller tensor several times."""
        source: Any = node.args[0]
        return packet(node) is A.expand and numel(shape(source)) < self.large

    def pull(self, node: Node, tag: Any) -> None:
        """Plans a node whose result is to have a tag, and what it reads."""
        if node in self._pulling:
            raise Stop("reads itself")
        self._pulling.add(node)
        try:
            self.apply(node, tag)
        finally:
            self._pulling.discard(node)

    def apply(self, node: Node, want: Any = None) -> None:
        """Plans a node.

        Raises:
            Stop: there is no rule, or the rule says no.
        """
        found = RULES.get(node.target) or RULES.get(packet(node))
        drawn = torch.Tag.nondeterministic_seeded in (tags := getattr(node.target, "tags", ()))
        found = found or (RULES[A.clone] if torch.Tag.pointwise in tags and not drawn else None)
        try:
            if found is None:
                raise Stop("draws random numbers" if drawn else "has no rule for rows")
            self.plans[node] = found(self, node, want)
        except Stop as stop:
            stop.node = stop.node or node
            raise

    def joined(self, nodes: Iterable[Node], sizes: Sequence[Any]) -> Tag:
        """The tag of what tagged arguments are broadcast to."""
        tags = [t for t in map(self.tag_of, nodes) if t is not None]
        if not tags:
            raise Stop("has no operand with rows")
        letters = ["k"] * len(sizes)
        for tag in tags:
            for i, letter in enumerate(tag.letters, len(sizes) - len(tag.letters)):
                letters[i] = "r" if letter == "r" else letters[i]
        for i, size in enumerate(sizes):
            letters[i] = letters[i] if letters[i] == "r" else letter_of(size, self.classes)
        first = max(tags, key=lambda tag: len(tag.rows))
        return first.like("".join(letters))


def fill(node: Node, tagged: Container[Node] = ()) -> Any:
    """The number of a tensor of one number that is not of tagged ones; None if it is none."""
    found = packet(node)
    if found in FILLS:
        return node.args[FILLS[found]]
    if found in ZEROS:
        return 0
    if found in ONES:
        return 1
    source: Any = node.args[0] if node.args else None
    if found in _SAME and is_tensor(source) and source not in tagged:
        number = fill(source, tagged)
        dtype = value(source).dtype
        return number if value(node).dtype == dtype else held(number, dtype)
    return None


def base_of(node: Any) -> Any:
    """The source of a view, a copy or a cast."""
    same = VIEWS | _SAME
    while isinstance(node, Node) and node.op == "call_function" and packet(node) in same:
        node = node.args[0]
    return node


def _schema(node: Node) -> Any:
    target: Any = node.target
    return target._schema.arguments


def bound(node: Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults too."""
    schema = _schema(node)
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    return given | dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs


def called(node: Node, given: Mapping[str, Any]) -> Any:
    """The call of a node with other arguments."""
    schema = _schema(node)
    args = [given[a.name] for a in schema if not a.kwarg_only]
    return node.target(*args, **{a.name: given[a.name] for a in schema if a.kwarg_only})  # pyright: ignore


def fit(tensor: Any, letters: str, result: str) -> Any:
    """A canonical tensor, with a dimension for each of a canonical result, for broadcasting."""
    if not isinstance(tensor, Tensor) or tensor.dim() == 0:
        return tensor
    start = len(result) - len(letters)
    index = [slice(None)]
    for i, letter in enumerate(result):
        own = letters[i - start] if i >= start else ""
        if letter != "r":
            index.append(slice(None) if own else None)  # pyright: ignore[reportArgumentType]
        elif own and own != "r":
            index.append(0)  # pyright: ignore[reportArgumentType]
    return tensor if set(map(str, index)) == {str(slice(None))} else tensor[tuple(index)]


def beside(mask: Tensor, tensor: Tensor) -> Tensor:
    """A mask of rows ``[n]`` with the dimensions of a tensor ``[n, ...]``."""
    return mask.reshape(-1, *[1] * (tensor.dim() - 1))


def put(env: Env, view: View, base: Ref, source: Ref) -> Tensor:
    """The source in the rows of a view, the base in others."""
    whole = env.full(base)
    some = env.full(source)
    inside = env.inside(view)
    return some if inside is None else torch.where(beside(inside, some), some, whole)


def getitem(rules: Rules, node: Node, want: Any) -> NodePlan:
    """One of several results."""
    source, i = node.args
    if want is not None and source not in rules.plans:
        rules.pull(source, [want] * len(value(source)))  # pyright: ignore[reportArgumentType]
    tags = rules.tag(source)
    if not isinstance(tags, list):
        raise Stop("is one of several results that are not of rows")
    ref = Ref("node", source, "")  # pyright: ignore[reportArgumentType]
    return NodePlan(tags[i], [ref], lambda env: env.values[source][i])  # pyright: ignore


RULES[operator.getitem] = getitem
