"""What the nodes of a slice read: operands, constants, and what spreads small tensors.

In: a node that no logits are read for. Out: a functional tensor for it. Of numbers, and of tensors
that are spread to the size of logits, the record has the calls, too: they are made a chunk at a
time::

    %rows = arange(12)                          recorded
    %mask = eq(unsqueeze(%labels, 1), %v)       recorded: %labels is an eighth of it, or less
    %labels                                     an operand
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fxpass.capture.sharding import class_dims_of, entry_of, global_of, of_entry
from fxpass.capture.values import PRODUCTS, numel
from fxpass.graph.calls import storage, written
from fxpass.graph.functions import function_of, out_of_place
from fxpass.graph.nodes import NoMatch, is_number, is_tensor, nested_graph, value
from fxpass.graph.placements import dtensors, is_dtensor

if TYPE_CHECKING:
    from fxpass.capture.slice import Slice

# Functions that make a tensor of numbers.
FACTORIES = (
    "arange",
    "zeros",
    "ones",
    "full",
    "empty",
    "eye",
    "linspace",
    "tensor",
    "scalar_tensor",
)
# A tensor without dimensions promotes as a number does.
_ARITHMETIC = ("add", "sub", "rsub", "mul", "div")
FACTORIES_LIKE = ("new_empty", "new_zeros", "new_ones", "new_full")


class Inputs(ABC):
    """The operands of the nodes of a slice.

    Attributes:
        found: the slice.
        recorder: its record.
        given: nodes that are logits, with their tags.
        writers: the nodes of the graph that write to each memory.
        operands: the functional tensors of operands.
        constants: for nodes that were asked for, whether they compute a tensor from numbers alone.
        local: nodes of a rank's classes, as plain tensors.
    """

    def __init__(self, found: Slice, given: Mapping[Node, str]) -> None:
        self.found, self.recorder, self.given = found, found.recorder, given
        self.writers = found.scope.writers
        self.operands: dict[Node, Any] = {}
        self.constants: dict[Node, bool] = {}
        self.spread: dict[Node, bool] = {}
        self.local: set[Node] = set()

    @abstractmethod
    def run(self, node: Node) -> Any:
        """Runs a node of the slice."""

    @abstractmethod
    def out(self, node: Node, args: Any, kwargs: Any) -> Any:
        """The results of a node."""

    def of(self, operand: Node, node: Node) -> Any:
        """What a node reads for an operand: for a number that varies, in arithmetic, a tensor."""
        arithmetic = out_of_place(function_of(node)) in _ARITHMETIC
        tensors = [n for n in (node, *node.all_input_nodes) if is_tensor(n)]
        if not (is_number(operand) and arithmetic and tensors):
            return self.argument(operand, node)
        if operand not in self.operands or isinstance(self.operands[operand], torch.SymFloat):
            like = global_of(value(tensors[0]))
            with torch.no_grad(), self.recorder.fake_mode(like):
                number = torch.empty((), dtype=torch.float64, device=like.device)
            self.operands[operand] = self.recorder.tensor(number, None, False, node=operand)
        return self.operands[operand]

    def argument(self, node: Node, reader: Node) -> Any:
        """What another node reads for a node."""
        if node in self.found.ran:
            return self.found.ran[node]
        if node in self.found.derived:
            return self.run(node)
        if node not in self.operands and node not in self.given and self.is_constant(node):
            writers = self._written_before(node, reader)
            if not writers or self._is_target(node, reader, writers):
                for one in sorted({node, *writers}):  # the node may write, too
                    self.run(one)
                return self.run(node)
        if node not in self.operands and self._is_spread(node):
            self._spread(node)
        if node not in self.operands:
            example = node.meta.get("example_value")
            if isinstance(example, tuple | list):
                self.operands[node] = pytree.tree_map_only(Tensor, self._no_part(node), example)
            elif isinstance(example, Tensor):
                self.operands[node] = self.recorder.operand(
                    node, global_of(example), self.given.get(node)
                )
            else:
                self.operands[node] = example
        return self.operands[node]

    def is_constant(self, node: Node) -> bool:
        """Whether a node computes a tensor from numbers alone: the record has its calls, too."""
        if node not in self.constants:
            tensors = [n for n in node.all_input_nodes if is_tensor(n)]
            function = function_of(node)
            known = function in FACTORIES or (bool(tensors) and function not in FACTORIES_LIKE)
            calls = is_tensor(node) and node.op in ("call_function", "call_method")
            known = known and calls and not any(nested_graph(a) for a in node.args)
            like = function in FACTORIES_LIKE
            known = (known and all(map(self.is_constant, tensors))) or (calls and like)
            self.constants[node] = known
        return self.constants[node]

    def _written_before(self, node: Node, reader: Node) -> list[Node]:
        """The nodes outside of the slice that write to a tensor before another node reads it. The
        program has made what is read: an operand like another."""
        writers = self.writers.get(storage(node), ()) if is_tensor(node) else ()
        return [w for w in sorted(writers) if w < reader and w not in self.found.ran]

    def _is_target(self, node: Node, reader: Node, writers: Sequence[Node]) -> bool:
        """Whether a tensor that is written is as large as logits, and nothing else reads it, as
        smoothed labels: its writers are recorded with it, so that it is made a chunk at a time."""
        large = numel(value(node).shape) * 8 > min(
            numel(value(n).shape) for n in self.recorder.seeds
        )
        return large and set(node.users) <= {*writers, reader}

    def _is_spread(self, node: Node) -> bool:
        """Whether a node spreads smaller tensors: one-hot labels, a mask of classes."""
        if node not in self.spread:
            tensors = [n for n in node.all_input_nodes if is_tensor(n)]
            calls = is_tensor(node) and node.op in ("call_function", "call_method")
            known = calls and function_of(node) not in PRODUCTS and not written(node)
            known = known and storage(node) not in self.writers
            known = known and bool(tensors) and not node.meta["example_value"].requires_grad
            size = numel(node.meta["example_value"].shape) if known else 0

            def is_small(n: Node) -> bool:
                small = numel(n.meta["example_value"].shape) * 8 <= size
                return small or self.is_constant(n) or self._is_spread(n)

            self.spread[node] = known and all(map(is_small, tensors))
        return self.spread[node]

    def _spread(self, node: Node) -> None:
        """Records how a node spreads tensors, if that can be told; else it is an operand."""
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: self.argument(n, node))
        count = len(self.recorder.steps)
        try:
            out = self.out(node, args, kwargs)
            self.recorder.value(out).node = node
            self.operands[node] = out
        except Exception:
            del self.recorder.steps[count:]

    def _no_part(self, node: Node) -> Any:
        def part(_: Tensor) -> Any:
            raise NoMatch.at(node, "returns several tensors")

        return part

    def enter(self, node: Node) -> None:
        """Gives a product of a rank's classes, of which a DTensor is made, those of all ranks."""
        plain = dtensors() is not None and not is_dtensor(value(node))
        entry = entry_of(node) if plain else None
        if entry is None:
            return
        if self.found.sharding is not None or len(self.recorder.seeds) > 1:
            raise NoMatch.at(node, "is one of several heads, whose classes are sharded")
        self.found.sharding = of_entry(node, entry)
        for operand, dim in class_dims_of(node).items():
            example = value(operand)
            sizes = list(example.shape)
            sizes[dim] = self.found.sharding.classes
            with torch.no_grad(), self.recorder.fake_mode(example):
                whole = torch.empty(sizes, dtype=example.dtype, device=example.device)
            trained = example.requires_grad
            self.operands[operand] = self.recorder.tensor(whole, None, trained, node=operand)
        self.local.add(node)
