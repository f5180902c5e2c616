"""Tags of the nodes of a functional ATen graph, and how each node runs on a chunk of rows.

In: a graph with tagged heads. Out: for a node a :class:`NodePlan`: its tag, its operands, and how
it runs on a chunk. Each class of ATen op has a rule, a function ``rule(rules, node, want)``. It
derives the result's tag from the tags of the arguments (``want`` is None), or takes the tag that
a reader wants. The latter pulls nodes that make operands as large as logits into the region::

    z + q[:, :-1]    q is an operand of each row    z + F.one_hot(labels)    one_hot is pulled in
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fxpass import messages
from fxpass.rows.aten_calls import VIEWS, A, fill_value, origin_of
from fxpass.rows.sizes import example, is_one, is_tensor_node, numel, packet, same_size, shape
from fxpass.rows.tags import Stop, Tag, View, inner_sizes, letter_of


@dataclass(frozen=True)
class Ref:
    """A tensor that a plan reads.

    Attributes:
        kind: ``node`` of the region; ``row``, an operand with rows; ``shared``, an operand that all
            rows share; ``fill``, a tensor of one number.
        letters: of the dimensions.
        places: for each dimension of the view's rows, the dimension of the operand that has these
            rows; None where the operand is broadcast.
        view: of the rows.
        sizes: canonical sizes, if a dimension of one element changes from rows to others or back.
    """

    kind: str
    node: Node
    letters: str
    places: tuple[int | None, ...] = ()
    view: View | None = None
    sizes: tuple[Any, ...] | None = None


class Env(Protocol):
    """A chunk of rows, on which plans run."""

    n: Any
    device: torch.device
    values: dict[Node, Any]

    def get(self, ref: Ref) -> Any:
        """The tensor ``[n, ...]``, or ``[1, ...]`` if all rows share it."""

    def full(self, ref: Ref) -> Tensor:
        """The tensor ``[n, ...]``."""
        ...

    def shared(self, ref: Ref) -> Tensor:
        """An operand that all rows share, in its own dimensions."""
        ...

    def size(self, size: Any) -> Any:
        """The value of a size, or of a node that computes a number."""

    def inside(self, view: View) -> Tensor | None:
        """A mask of the chunk's rows that are in a view, ``[n]``; None if all are."""


Run = Callable[[Env], Any]


@dataclass
class NodePlan:
    """How a node runs on a chunk.

    Attributes:
        tag: of the result; a list of tags if there are several results; None for a sum over rows.
        refs: the tensors that the node reads.
        run: computes the canonical result.
        views: the views that ``run`` passes to :meth:`Env.inside`.
        per: of a mean over rows, the sizes whose product divides the sum.
        merge: of another reduction over rows, how chunks are merged: :mod:`fxpass.region.merging`.
    """

    tag: Tag | list[Tag | None] | None
    refs: Sequence[Ref]
    run: Run
    views: tuple[View, ...] = ()
    per: tuple[Any, ...] = ()
    merge: str = ""


Rule = Callable[["Rules", Node, Any], NodePlan]
RULES: dict[Any, Rule] = {}


def rule(*names: str, ns: Any = A) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of the ops of these names, for all their overloads."""

    def enter(function: Rule) -> Rule:
        for name in names:
            if hasattr(ns, name):  # not every PyTorch has all
                RULES[getattr(ns, name)] = function
        return function

    return enter


@dataclass
class Rules:
    """The plans of the nodes of a graph.

    Args:
        graph: the graph.
        classes: of the widest head.
        large: the number of elements from which an operand counts as large as logits.
        weights: of the heads, without views.
        hidden: the hidden states of the heads, without views; they are operands.
        alike: True if the heads have the same sizes on all ranks.
        columns: True if reductions over rows other than sums are of regions.
    """

    graph: Graph
    classes: int
    large: int
    weights: set[Node]
    hidden: set[Node]
    alike: bool = False
    columns: bool = False
    plans: dict[Node, NodePlan] = field(default_factory=dict)
    reasons: dict[Node, Stop] = field(default_factory=dict)
    _pulling: set[Node] = field(default_factory=set)
    _large: dict[Node, bool] = field(default_factory=dict)

    def tags_of(self, node: Any) -> Any:
        """:attr:`NodePlan.tag` of a node; None without a plan."""
        plan = self.plans.get(node)
        return None if plan is None else plan.tag

    def tag_of(self, node: Any) -> Tag | None:
        """The tag of a node with one result; None without."""
        tag = self.tags_of(node)
        return tag if isinstance(tag, Tag) else None

    def has_classes(self, node: Any) -> bool:
        """True if a result of the node has classes."""
        found = self.tags_of(node)
        tags = found if isinstance(found, list) else [found]
        return any(tag is not None and tag.has_classes for tag in tags)

    def has_many(self, node: Any) -> bool:
        """True if a result of the node has many classes: not only a few, as of ``topk``."""
        few = is_tensor_node(node) and 2 * numel(shape(node)) < self.large
        return self.has_classes(node) and not few

    def is_sum(self, node: Any) -> bool:
        """True if the node is a sum, or another reduction, over rows."""
        return node in self.plans and self.plans[node].tag is None

    def is_weight(self, node: Any) -> bool:
        """True if the node is the weight of a head, or a view of a weight."""
        return origin_of(node) in self.weights

    # ------------------------------------------------------------ arguments

    def fill_value(self, node: Node) -> Any:
        """The number of an untagged tensor of one number; None for other tensors."""
        return fill_value(node, self.plans)

    def ref(self, node: Node, tag: Tag) -> Ref:
        """A reference to a node whose dimensions and rows are those of a tag.

        Raises:
            Stop: the node has other rows.
        """
        of_classes = node.op == "call_function" and any(map(self.has_classes, node.all_input_nodes))
        if node not in self.plans and self.fill_value(node) is None and of_classes:
            try:
                self.plan_node(node)
            except Stop as stop:
                self.reasons.setdefault(node, stop)
        have = self.tag_of(node)
        if have is not None:
            found = self._as_rows(node, have, tag)
            if found is not None:
                return found
            same = have.letters.replace("c", "k") == tag.letters.replace("c", "k")
            if have.rows and not (same and have.view == tag.view):
                raise Stop(messages.OTHER_ROWS)
            return Ref("node", node, have.letters)
        number = self.fill_value(node)
        if number is not None and not isinstance(number, Node):
            return Ref("fill", node, tag.letters)
        if not tag.rows:
            return Ref("shared", node, tag.letters)
        if self.should_pull(node):
            try:
                self.pull(node, tag)
                return Ref("node", node, tag.letters)
            except Stop as stop:
                self.reasons.setdefault(node, stop)
        return Ref("row", node, tag.letters, tag.rows, tag.view)

    def _as_rows(self, node: Node, have: Tag, tag: Tag) -> Ref | None:
        """A node whose dimensions of one element change from rows to others or back, as the tag
        says; None if more differs."""
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
        return Ref("node", node, tag.letters, sizes=inner_sizes(sizes, tag.letters))

    def broadcast_ref(self, node: Node, tag: Tag, sizes: Sequence[Any]) -> Ref:
        """A reference to an argument that is broadcast to a tagged result of these sizes."""
        own = shape(node)
        start = len(sizes) - len(own)
        letters = tag.letters[start:]
        one_row = is_one(tag.view.root)
        pairs = zip(letters, own, strict=True)
        if not any(letter == "r" and (one_row or not is_one(size)) for letter, size in pairs):
            letters = letters.replace("r", "k")
        want = tag.with_letters(letters)
        have = self.tag_of(node)
        if have is not None and have.rows and len(have.rows) < len(tag.rows):
            raise Stop(messages.OTHER_ROWS)
        all_rows = all(i >= start and same_size(own[i - start], sizes[i]) for i in tag.rows)
        if (have is not None and have.rows) or all_rows or not want.rows:
            return self.ref(node, want)
        if self.fill_value(node) is not None:
            return Ref("fill", node, want.letters)
        places = tuple(i - start if i >= start else None for i in tag.rows)
        return Ref("row", node, want.letters, places, tag.view)

    def should_pull(self, node: Node, depth: int = 0) -> bool:
        """True if the node computes a tensor as large as logits, or reads a node that does."""
        if node.op != "call_function" or depth > 12 or origin_of(node) in self.hidden:
            return False
        if node in self._large:
            return self._large[node]
        self._large[node] = False
        large = is_tensor_node(node) and numel(shape(node)) >= self.large
        large = large and (packet(node) not in VIEWS or self._repeats(node))
        if not large:
            large = any(
                self.has_classes(a) if a in self.plans else self.should_pull(a, depth + 1)
                for a in node.all_input_nodes
            )
        self._large[node] = large
        if not depth:
            self._large.clear()
        return large

    def _repeats(self, node: Node) -> bool:
        """True if the node expands a smaller tensor."""
        source: Any = node.args[0]
        return packet(node) is A.expand and numel(shape(source)) < self.large

    def pull(self, node: Node, tag: Any) -> None:
        """Plans a node for the tag that a reader wants, and the nodes that it reads."""
        if node in self._pulling:
            raise Stop(messages.READS_ITSELF)
        self._pulling.add(node)
        try:
            self.plan_node(node, tag)
        finally:
            self._pulling.discard(node)

    def plan_node(self, node: Node, want: Any = None) -> None:
        """Plans a node.

        Raises:
            Stop: there is no rule, or the rule says no.
        """
        found = RULES.get(node.target) or RULES.get(packet(node))
        torch_tags = getattr(node.target, "tags", ())
        drawn = torch.Tag.nondeterministic_seeded in torch_tags
        if found is None and torch.Tag.pointwise in torch_tags and not drawn:
            found = RULES[A.clone]
        try:
            if found is None:
                raise Stop(messages.RANDOM if drawn else messages.NO_RULE)
            self.plans[node] = found(self, node, want)
        except Stop as stop:
            stop.node = stop.node or node
            raise

    def joined_tag(self, nodes: Iterable[Node], sizes: Sequence[Any]) -> Tag:
        """The tag of the result of these sizes to which tagged arguments are broadcast."""
        tags = [t for t in map(self.tag_of, nodes) if t is not None]
        if not tags:
            raise Stop(messages.NO_ROWS)
        letters = ["k"] * len(sizes)
        for tag in tags:
            for i, letter in enumerate(tag.letters, len(sizes) - len(tag.letters)):
                letters[i] = "r" if letter == "r" else letters[i]
        for i, size in enumerate(sizes):
            letters[i] = letters[i] if letters[i] == "r" else letter_of(size, self.classes)
        first = max(tags, key=lambda tag: len(tag.rows))
        return first.with_letters("".join(letters))


def getitem(rules: Rules, node: Node, want: Any) -> NodePlan:
    """One of several results."""
    source, i = node.args
    if want is not None and source not in rules.plans:
        rules.pull(source, [want] * len(example(source)))  # pyright: ignore[reportArgumentType]
    tags = rules.tags_of(source)
    if not isinstance(tags, list):
        raise Stop(messages.RESULT_WITHOUT_ROWS)
    ref = Ref("node", source, "")  # pyright: ignore[reportArgumentType]
    return NodePlan(tags[i], [ref], lambda env: env.values[source][i])  # pyright: ignore


RULES[operator.getitem] = getitem
