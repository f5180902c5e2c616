"""The text of a part: its plans run on fake tensors of a chunk, and what they run is the text.

In: the plans of a part. Out: a :class:`fxpass.region.loop.Loop`, and what each of its inputs stands
for, as leaves::

    chunk = Chunk(rules, part.body, found.inside)
    chunk.loop(part)      # rows rows=0 sums=1 ...
    list(chunk.leaves)    # [("row", x, "rc", ...), ("shared", weight), ...]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from fxpass.region.loop import Loop
from fxpass.region.run import Fakes, apart
from fxpass.region.text import Input
from fxpass.region.trace import tidy, traced
from fxpass.rows.indexing import is_range
from fxpass.rows.masks import Mask
from fxpass.rows.regions import RegionCall
from fxpass.rows.rules import A, Ref, Rules
from fxpass.rows.sizes import (
    hint,
    is_known,
    is_one,
    is_tensor,
    key,
    keys,
    numel,
    packet,
    shape,
    value,
)
from fxpass.rows.tags import Stop, View, others, relettered

Leaf = tuple[Any, ...]  # of a chunk: what is read, and how


class _UnknownSize(Exception):  # noqa: N818
    """A size that no input has: an input without elements is to have it."""

    def __init__(self, expr: Any) -> None:
        self.expr = expr


def _typed(made: Any, node: Node) -> Any:
    """A value in the dtype of its node: a number of the graph is rows of a chunk, which promote."""
    wanted = value(node)
    if isinstance(made, Tensor) and isinstance(wanted, Tensor) and made.dtype != wanted.dtype:
        return made.to(wanted.dtype)
    return made


def _matrix(node: Node) -> tuple[Node, bool]:
    """The matrix of which one is a view, and whether it is its transpose: a weight and its
    transpose are one input, however a program turns them."""
    best = node
    turned = False
    swapped = False
    sizes = [key(s) for s in shape(node) if not is_one(s)] if is_tensor(node) else []
    if len(sizes) != 2 or len(shape(node)) != 2:
        return node, False
    while node.op == "call_function" and packet(node) in _VIEWS and isinstance(node.args[0], Node):
        source: Node = node.args[0]
        own = [key(s) for s in shape(source) if not is_one(s)]
        if packet(node) in _TURNS:
            swapped ^= _swaps(node, source)
        elif own != ([*reversed(sizes)] if swapped else sizes):
            break
        node = source
        if len(shape(node)) == 2:
            best = node
            turned = swapped
    return best, turned


_TURNS = {A.permute, A.t, A.transpose}
_VIEWS = {*_TURNS, A.view, A.reshape, A._unsafe_view, A.unsqueeze, A.squeeze, A.alias}


def _swaps(node: Node, source: Node) -> bool:
    """Whether a permutation swaps the two dimensions of more than one element."""
    rank = len(shape(source))
    order: Any = node.args[1] if packet(node) is A.permute else list(range(rank))
    if packet(node) is not A.permute:
        i, j = (0, 1) if packet(node) is A.t else (d % rank for d in node.args[1:3])  # pyright: ignore
        order[i], order[j] = order[j], order[i]
    wide = [d % rank for d in order if not is_one(shape(source)[d])]
    return len(wide) == 2 and wide[0] > wide[1]


class Chunk:
    """The environment in which the plans of a part run on fake tensors of a chunk.

    Args:
        rules: the plans.
        body: the nodes that run.
        inside: the nodes that run in any part.
        masks: of results, those of their readers.
    """

    def __init__(
        self,
        rules: Rules,
        body: Sequence[Node],
        inside: set[Node],
        masks: Mapping[Node, Sequence[Mask]] | None = None,
    ) -> None:
        self.rules = rules
        self.body = set(body)
        self.inside_of = inside
        self.masks = masks or {}
        self.leaves: dict[Leaf, Input] = {}
        self.names: dict[Any, str] = {}
        self.hints: dict[str, int] = {"n": 256}
        self.values: dict[Node, Any] = {}
        self.given: dict[Leaf, Tensor] = {}
        self.fakes: Any = None
        self.n: Any = None
        self.device = torch.device("cpu")

    # ------------------------------------------------------------ what a part reads

    def collect(self, body: Sequence[Node]) -> None:
        """Notes the leaves of the nodes."""
        for mask in (mask for some in self.masks.values() for mask in some):
            if (leaf := self.leaf(mask.ref)) is not None:
                self._note(leaf, mask.ref)
        for node in body:
            for ref in self.rules.plans[node].refs:
                if (leaf := self.leaf(ref)) is not None:
                    self._note(leaf, ref)
            for arg in node.all_input_nodes:
                if isinstance(value(arg), torch.SymFloat | torch.SymInt | torch.SymBool):
                    self.number(arg)
            for view in self.rules.plans[node].views:
                if not view.is_whole:
                    self.leaves["inside", view] = Input(torch.bool, ("n",))

    def leaf(self, ref: Ref) -> Leaf | None:
        """The input for an operand; None of a node of the part's own, and of one number."""
        if ref.kind == "node" and ref.node not in self.body:
            tag = self.rules.tag_of(ref.node)
            if tag is None or not tag.rows:
                return ("shared", _matrix(ref.node)[0])
            if ref.node in self.inside_of:
                return ("handed", ref.node)
            ref = Ref("row", ref.node, tag.letters, tag.rows, tag.view)
        if ref.kind == "row":
            assert ref.view is not None
            apart = not ref.view.in_order or None in ref.places
            kind = "entries" if apart and self._is_large(ref) else "row"
            node = ref.node
            letters = ref.letters
            places = ref.places
            if sorted(letters) in (["c", "r"], ["k", "r"]) and len(places) == 1:
                # x is one input, as is the transpose that a weight's gradient is a product of
                node, turned = _matrix(node)
                letters = letters[::-1] if turned else letters
                places = tuple(1 - p if turned and p is not None else p for p in places)
            return (kind, node, letters, places, ref.view)
        if ref.kind != "shared" or self._made(ref.node) is not None:
            return None
        return ("shared", _matrix(ref.node)[0])

    def _is_large(self, ref: Ref) -> bool:
        """Whether an operand is large, or would be with all rows of the head."""
        sizes = shape(ref.node)
        if not is_known(sizes) or not numel(sizes):
            return False
        inner = others(sizes, ref.letters)
        wide = "c" in relettered("k" * len(inner), inner, self.rules.classes)
        return wide or numel(sizes) >= self.rules.large

    def _made(self, node: Node) -> Tensor | None:
        """A tensor that a chunk makes itself: of one number, or one that counts."""
        if not is_tensor(node):
            return None
        dtype = value(node).dtype
        sizes = shape(node)
        number = self.rules.fill(node)
        count = self._range(node)
        known = [key(s) for s in sizes]
        if count is not None:
            made = torch.arange(count, dtype=dtype, device=self.device)
            return made.reshape([-1 if s == count else 1 for s in known])
        if isinstance(number, int | float) and all(s == 1 for s in known):
            return torch.full(known, number, dtype=dtype, device=self.device)
        return None

    def _range(self, node: Node) -> Any:
        """How far a tensor counts from 0 along its only dimension; None if it is no such tensor."""
        sizes = [s for s in shape(node) if not is_one(s)] if is_tensor(node) else []
        if len(sizes) != 1 or not isinstance(key(sizes[0]), int):
            return None
        rank = len(shape(node)) - next(i for i, s in enumerate(shape(node)) if not is_one(s))
        return key(sizes[0]) if is_range(node, sizes[0], rank) else None

    def _note(self, leaf: Leaf, ref: Ref) -> None:
        of = leaf[1]
        letters = ref.letters
        rows = ("n",)
        letters = leaf[2] if leaf[0] in ("row", "entries") else letters
        sizes = shape(of)
        if leaf[0] == "handed":
            tag = self.rules.tag_of(ref.node)
            assert tag is not None
            letters = tag.letters
        if leaf[0] == "shared":
            letters = "k" * len(sizes)
            rows = ()
        inner = [self.named(size) for size in others(sizes, letters)]
        if leaf[0] == "entries":  # too large to be moved: a chunk looks up its rows
            self.leaves[("place", *leaf[1:])] = Input(torch.int64, ("n",))
            own = [key(size) for size, letter in zip(sizes, letters, strict=True) if letter == "r"]
            rows = (self.named(sympy.Mul(*own)),)
        self.leaves[leaf] = Input(value(ref.node).dtype, (*rows, *inner))

    def named(self, size: Any) -> int | str:
        """A size, or the name of a symbol."""
        found = key(size)
        if isinstance(found, int) or found.is_Integer:
            return int(found)
        name = self.names.setdefault(found, f"s{len(self.names)}")
        self.hints[name] = max(2, hint(size))
        return name

    def number(self, node: Node) -> None:
        """A number that varies, as a tensor without dimensions."""
        floating = isinstance(value(node), torch.SymFloat)
        self.leaves[("number", node)] = Input(torch.float64 if floating else torch.int64, ())

    # ------------------------------------------------------------ Env

    def get(self, ref: Ref) -> Any:
        if ref.kind == "fill":
            sizes = [self.size(s) for s in others(shape(ref.node), ref.letters)]
            number = self.rules.fill(ref.node)
            dtype = value(ref.node).dtype
            device = self.device
            return torch.full((self.n, *sizes), number, dtype=dtype, device=device)
        leaf = self.leaf(ref)
        if ref.kind == "shared" or (leaf is not None and leaf[0] == "shared"):
            made = self.shared(ref)
            return made.unsqueeze(0) if made.dim() else made
        if leaf is None:
            made = self.values[ref.node]
            if ref.sizes is not None:
                made = made.reshape(made.shape[0], *map(self.size, ref.sizes))
            return made
        if leaf[0] == "entries":
            return self.given[leaf].index_select(0, self.given[("place", *leaf[1:])])
        return self.given[leaf]

    def shared(self, ref: Ref) -> Tensor:
        made = self._made(ref.node)
        return self._turned(ref.node) if made is None else made

    def _turned(self, node: Node) -> Tensor:
        source, turned = _matrix(node)
        made = self.given["shared", source]
        return A.permute.default(made, [1, 0]) if turned else made

    def full(self, ref: Ref) -> Tensor:
        made = self.get(ref)
        rows = made.dim() and key(made.shape[0]) != 1
        return made if rows else made.expand(self.n, *made.shape[1:])

    def size(self, size: Any) -> Any:
        if isinstance(size, Node) and ("number", size) in self.given:
            return self.given["number", size]  # of an elementwise call
        found = key(size)
        if isinstance(found, int | float | bool):
            return found
        symbols = sorted(found.free_symbols, key=str)
        if found not in self.names and not set(symbols) <= self.names.keys():
            raise _UnknownSize(found)
        if found in self.names:
            return self.fakes.sizes[self.names[found]]
        known = [self.fakes.sizes[self.names[s]] for s in symbols]
        return sympy.lambdify(symbols, found, modules=[{}, "math"])(*known)

    def inside(self, view: View) -> Tensor | None:
        return None if view.is_whole else self.given["inside", view]

    # ------------------------------------------------------------ the text

    def loop(self, part: RegionCall) -> Loop:
        """The text of a part; ``leaves`` are its inputs, in this order.

        Raises:
            Stop: a call that no text has, or that holds for some numbers of rows alone.
        """
        self.collect(part.body)
        while True:
            try:
                return apart(lambda: self._loop(part))
            except _UnknownSize as unknown:
                for symbol in unknown.expr.free_symbols:
                    self.leaves["size", symbol] = Input(torch.bool, (self.named(symbol), 0))
            except ValueError as error:
                raise Stop(str(error)) from error

    def _loop(self, part: RegionCall) -> Loop:
        inputs = list(self.leaves.values())
        self.fakes = Fakes(inputs, self.hints, self.device)
        self.n = self.fakes.sizes["n"]
        rules = self.rules

        def chunk(*tensors: Tensor) -> list[Tensor]:
            self.given = dict(zip(self.leaves, tensors, strict=True))
            self.values = {}
            for node in part.body:
                made = rules.plans[node].run(self)
                # sums are rounded by the loop
                self.values[node] = made if rules.is_sum(node) else _typed(made, node)
            return [self._result(node) for node in part.results]

        graph = tidy(traced(chunk, self.fakes, {}))
        self.fakes.check()
        for node in graph.find_nodes(op="call_function", target=A.view.default):
            node.target = A.reshape.default  # operands have strides of their own
        for node, of in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
            node.meta["input"] = of
        rows = tuple(i for i, of in enumerate(inputs) if of.shape[:1] == ("n",))
        sums = tuple(i for i, node in enumerate(part.results) if rules.is_sum(node))
        loop = Loop(rows, sums, graph)
        return Loop.parse(loop.text())

    def _result(self, node: Node) -> Tensor:
        made = self._masked(node, self.values[node])
        if self.rules.is_sum(node):
            return made
        tag = self.rules.tag_of(node)
        assert tag is not None
        sizes = others(shape(node), tag.letters)
        if keys(made.shape[1:]) == keys(sizes) and key(made.shape[0]) != 1:
            return made
        return made.expand(self.n, *map(self.size, sizes))

    def _masked(self, node: Node, made: Tensor) -> Tensor:
        """A result, which is 0 in rows that all its readers replace by 0."""
        read = None
        for mask in self.masks.get(node, ()):
            found = self.get(mask.ref)
            if any(key(size) != 1 for size in found.shape[1:]) or key(found.shape[0]) == 1:
                return made
            found = found if found.dtype == torch.bool else found != 0
            found = (~found if mask.negated else found).reshape(-1)
            read = found if read is None else read | found
        if read is None or key(made.shape[0]) == 1:
            return made
        read = read.reshape(-1, *[1] * (made.dim() - 1))
        return torch.where(read, made, torch.zeros_like(made))
