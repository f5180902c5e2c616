"""The text of a call: its plans run on fake tensors of a chunk, and are traced.

In: the plans of a call. Out: a :class:`fxpass.region.loop.Loop`, and its inputs::

    chunk = Chunk(rules, call, found.inside, masks)
    chunk.loop()          # rows rows=0 sums=1 ...
    list(chunk.inputs)    # [CallInput("row", x, "rk", ...), CallInput("shared", weight), ...]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fxpass import messages
from fxpass.region.loop import Loop
from fxpass.region.run import Fakes, in_own_thread
from fxpass.region.text import Input
from fxpass.region.trace import tidy, traced
from fxpass.rows.aten_calls import A
from fxpass.rows.call_inputs import CallInput, matrix_of
from fxpass.rows.indexing import is_range
from fxpass.rows.masks import Mask
from fxpass.rows.regions import RegionCall
from fxpass.rows.rules import Ref, Rules
from fxpass.rows.sizes import (
    all_backed,
    example,
    is_one,
    is_tensor_node,
    key,
    keys,
    numel,
    shape,
    size_hint,
)
from fxpass.rows.tags import Stop, View, inner_sizes, relettered


class _UnknownSize(Exception):  # noqa: N818
    """No input has a size: an input without elements is added that has the size."""

    def __init__(self, expr: Any) -> None:
        self.expr = expr


def _typed(made: Any, node: Node) -> Any:
    """A value in its node's dtype. A 0-dim tensor of the graph has rows in a chunk, so it promotes
    others."""
    wanted = example(node)
    if isinstance(made, Tensor) and isinstance(wanted, Tensor) and made.dtype != wanted.dtype:
        return made.to(wanted.dtype)
    return made


class Chunk:
    """Fake tensors of a chunk, on which the plans of a call run: a :class:`fxpass.rows.rules.Env`.

    Args:
        rules: the plans.
        call: the nodes that run.
        fused: the nodes of all calls.
        masks: of results, the masks of their readers.

    Attributes:
        inputs: of the call, in the order of the text.
        names: of the symbols in sizes.
    """

    def __init__(
        self,
        rules: Rules,
        call: RegionCall,
        fused: set[Node],
        masks: Mapping[Node, Sequence[Mask]],
    ) -> None:
        self.rules = rules
        self.call = call
        self.body = set(call.body)
        self.fused = fused
        self.masks = masks
        self.inputs: dict[CallInput, Input] = {}
        self.names: dict[Any, str] = {}
        self.hints: dict[str, int] = {"n": 256}
        self.values: dict[Node, Any] = {}
        self.given: dict[CallInput, Tensor] = {}
        self.fakes: Any = None
        self.n: Any = None
        self.device = torch.device("cpu")

    # ------------------------------------------------------------ inputs

    def _collect_inputs(self) -> None:
        for mask in (mask for some in self.masks.values() for mask in some):
            self._add_input(mask.ref)
        for node in self.call.body:
            for ref in self.rules.plans[node].refs:
                self._add_input(ref)
            for arg in node.all_input_nodes:
                if isinstance(example(arg), torch.SymFloat | torch.SymInt | torch.SymBool):
                    floating = isinstance(example(arg), torch.SymFloat)
                    dtype = torch.float64 if floating else torch.int64
                    self.inputs[CallInput("number", arg)] = Input(dtype, ())
            for view in self.rules.plans[node].views:
                if not view.is_whole:
                    self.inputs[CallInput("row_mask", view)] = Input(torch.bool, ("n",))

    def _input_of(self, ref: Ref) -> CallInput | None:
        """The input that a plan reads; None for a node of this call, and a tensor that the chunk
        makes itself."""
        if ref.kind == "node" and ref.node not in self.body:
            tag = self.rules.tag_of(ref.node)
            if tag is None or not tag.rows:
                return CallInput("shared", matrix_of(ref.node)[0])
            if ref.node in self.fused:
                return CallInput("handed", ref.node, tag.letters)
            ref = Ref("row", ref.node, tag.letters, tag.rows, tag.view)
        if ref.kind == "row":
            assert ref.view is not None
            moved = not ref.view.in_order or None in ref.places
            kind = "entries" if moved and self._is_large(ref) else "row"
            node = ref.node
            letters = ref.letters
            places = ref.places
            if sorted(letters) in (["c", "r"], ["k", "r"]) and len(places) == 1:
                # x, and its transpose in the product for the weight's gradient, are one input
                node, turned = matrix_of(node)
                letters = letters[::-1] if turned else letters
                places = tuple(1 - p if turned and p is not None else p for p in places)
            return CallInput(kind, node, letters, places, ref.view)
        if ref.kind != "shared" or self._made(ref.node) is not None:
            return None
        return CallInput("shared", matrix_of(ref.node)[0])

    def _is_large(self, ref: Ref) -> bool:
        """True if an operand is large, or would be with all rows of the head."""
        sizes = shape(ref.node)
        if not all_backed(sizes) or not numel(sizes):
            return False
        inner = inner_sizes(sizes, ref.letters)
        has_classes = "c" in relettered("k" * len(inner), inner, self.rules.classes)
        return has_classes or numel(sizes) >= self.rules.large

    def _made(self, node: Node) -> Tensor | None:
        """A tensor that a chunk makes itself: of one number, or a range; None for others."""
        if not is_tensor_node(node):
            return None
        dtype = example(node).dtype
        sizes = shape(node)
        number = self.rules.fill_value(node)
        count = self._range(node)
        own = [key(s) for s in sizes]
        if count is not None:
            made = torch.arange(count, dtype=dtype, device=self.device)
            return made.reshape([-1 if s == count else 1 for s in own])
        if isinstance(number, int | float) and all(s == 1 for s in own):
            return torch.full(own, number, dtype=dtype, device=self.device)
        return None

    def _range(self, node: Node) -> Any:
        """The length of a range from 0 along the only dimension of a tensor; None for others."""
        sizes = [s for s in shape(node) if not is_one(s)] if is_tensor_node(node) else []
        if len(sizes) != 1 or not isinstance(key(sizes[0]), int):
            return None
        rank = len(shape(node)) - next(i for i, s in enumerate(shape(node)) if not is_one(s))
        return key(sizes[0]) if is_range(node, sizes[0], rank) else None

    def _add_input(self, ref: Ref) -> None:
        found = self._input_of(ref)
        if found is None:
            return
        sizes = shape(found.source)
        dtype = example(ref.node).dtype
        if found.kind == "shared":
            self.inputs[found] = Input(dtype, tuple(map(self._named, sizes)))
            return
        inner = [self._named(size) for size in inner_sizes(sizes, found.letters)]
        rows: int | str = "n"
        if found.kind == "entries":  # too large to be moved: a chunk looks up its rows
            self.inputs[replace(found, kind="entry_indices")] = Input(torch.int64, ("n",))
            pairs = zip(sizes, found.letters, strict=True)
            rows = self._named(sympy.Mul(*(key(size) for size, letter in pairs if letter == "r")))
        self.inputs[found] = Input(dtype, (rows, *inner))

    def _named(self, size: Any) -> int | str:
        """A size, or the name of a symbol."""
        found = key(size)
        if isinstance(found, int) or found.is_Integer:
            return int(found)
        name = self.names.setdefault(found, f"s{len(self.names)}")
        self.hints[name] = max(2, size_hint(size))
        return name

    # ------------------------------------------------------------ Env

    def get(self, ref: Ref) -> Any:
        if ref.kind == "fill":
            sizes = [self.size(s) for s in inner_sizes(shape(ref.node), ref.letters)]
            number = self.rules.fill_value(ref.node)
            dtype = example(ref.node).dtype
            return torch.full((self.n, *sizes), number, dtype=dtype, device=self.device)
        found = self._input_of(ref)
        if ref.kind == "shared" or (found is not None and found.kind == "shared"):
            made = self.shared(ref)
            return made.unsqueeze(0) if made.dim() else made
        if found is None:
            made = self.values[ref.node]
            if ref.sizes is not None:
                made = made.reshape(made.shape[0], *map(self.size, ref.sizes))
            return made
        if found.kind == "entries":
            indices = self.given[replace(found, kind="entry_indices")]
            return self.given[found].index_select(0, indices)
        return self.given[found]

    def shared(self, ref: Ref) -> Tensor:
        made = self._made(ref.node)
        if made is not None:
            return made
        matrix, turned = matrix_of(ref.node)
        tensor = self.given[CallInput("shared", matrix)]
        return A.permute.default(tensor, [1, 0]) if turned else tensor

    def full(self, ref: Ref) -> Tensor:
        tensor = self.get(ref)
        has_rows = tensor.dim() and key(tensor.shape[0]) != 1
        return tensor if has_rows else tensor.expand(self.n, *tensor.shape[1:])

    def size(self, size: Any) -> Any:
        if isinstance(size, Node) and CallInput("number", size) in self.given:
            return self.given[CallInput("number", size)]  # of an elementwise call
        found = key(size)
        if isinstance(found, int | float | bool):
            return found
        symbols = sorted(found.free_symbols, key=str)
        if found not in self.names and not set(symbols) <= self.names.keys():
            raise _UnknownSize(found)
        if found in self.names:
            return self.fakes.sizes[self.names[found]]
        values = {s: self.fakes.sizes[self.names[s]] for s in symbols}
        return sympy_interp(PythonReferenceAnalysis, values, found)

    def inside(self, view: View) -> Tensor | None:
        return None if view.is_whole else self.given[CallInput("row_mask", view)]

    # ------------------------------------------------------------ the text

    def loop(self) -> Loop:
        """The text of the call, and its :attr:`inputs`.

        Raises:
            Stop: a call that no text has, or that holds for some numbers of rows alone.
        """
        self._collect_inputs()
        while True:
            try:
                return in_own_thread(self._loop)
            except _UnknownSize as unknown:
                for symbol in unknown.expr.free_symbols:
                    sizes = self._named(symbol), 0
                    self.inputs[CallInput("size", symbol)] = Input(torch.bool, sizes)
            except ValueError as error:
                raise Stop(str(error)) from error

    def _loop(self) -> Loop:
        inputs = list(self.inputs.values())
        self.fakes = Fakes(inputs, self.hints, self.device)
        if "n" not in self.fakes.sizes:
            raise Stop(messages.NO_ROWS)
        self.n = self.fakes.sizes["n"]
        rules = self.rules

        def chunk(*tensors: Tensor) -> list[Tensor]:
            self.given = dict(zip(self.inputs, tensors, strict=True))
            self.values = {}
            for node in self.call.body:
                made = rules.plans[node].run(self)
                # sums are rounded by the loop
                self.values[node] = made if rules.is_sum(node) else _typed(made, node)
            return [self._result(node) for node in self.call.results]

        graph = tidy(traced(chunk, self.fakes, {}))
        self.fakes.check()
        for node in graph.find_nodes(op="call_function", target=A.view.default):
            node.target = A.reshape.default  # operands have strides of their own
        for node, declared in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
            node.meta["input"] = declared
        rows = tuple(i for i, declared in enumerate(inputs) if declared.shape[:1] == ("n",))
        sums = tuple(i for i, node in enumerate(self.call.results) if rules.is_sum(node))
        merges = tuple((i, rules.plans[self.call.results[i]].merge) for i in sums)
        merges = tuple((i, merge) for i, merge in merges if merge)
        sums = tuple(i for i in sums if i not in dict(merges))
        return Loop.parse(Loop(rows, sums, graph, merges=merges).text())

    def _result(self, node: Node) -> Tensor:
        made = self._masked(node, self.values[node])
        if self.rules.is_sum(node):
            return made
        tag = self.rules.tag_of(node)
        assert tag is not None
        sizes = inner_sizes(shape(node), tag.letters)
        if keys(made.shape[1:]) == keys(sizes) and key(made.shape[0]) != 1:
            return made
        return made.expand(self.n, *map(self.size, sizes))

    def _masked(self, node: Node, made: Tensor) -> Tensor:
        """A result that is 0 in rows that all its readers replace by 0."""
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
