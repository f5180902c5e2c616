"""The operands of an operator call, as nodes of a graph.

In: a :class:`fxpass.match.join.Call`. Out: nodes of the hidden states ``[N, D]``, the weight
``[V, D]``, the bias, class indices, weights of moments and existing logits, after the views and
edits of the logits that the call reduces::

    getitem(%z, (..., slice(None, -1), slice(None)))    ->    getitem(%x, ...)
    getitem(%z, (..., %chosen))                         ->    getitem(%weight, %chosen)
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from fxpass.graph.functions import function_of
from fxpass.graph.hazards import leaves
from fxpass.graph.nodes import is_tensor, value
from fxpass.graph.placements import is_dtensor
from fxpass.match.classes import Flow, rest_of
from fxpass.match.edits import Edit, Taken
from fxpass.match.join import Call
from fxpass.match.outputs import Picked
from fxpass.rewrite.arithmetic import Arithmetic
from fxpass.spec.dtypes import compute_dtype


class Wide(NamedTuple):
    """Hidden states ``[N, D]`` and weight ``[V, D]`` of a call, before they are cast."""

    x: Node
    weight: Node


class Operands(Arithmetic):
    """Inserts the operands of calls.

    Attributes:
        counts: the number of classes that edits take, for nodes after the call.
        weight: the last call's weight before they are taken; a DTensor if it is sharded.
    """

    def __init__(self, graph: Graph, site: Node, flow: Flow, replaced: dict[Node, Node]) -> None:
        super().__init__(graph, site, flow, replaced)
        self.counts: dict[tuple[Edit, ...], int | Node] = {}
        self.weight = self.linear.weight

    def count(self, edits: tuple[Edit, ...]) -> int | Node:
        """The number of all classes after edits, for a node at the insertion point."""
        if any(isinstance(edit, Taken) for edit in edits):
            return self.counts[edits]
        if (
            self.sharding is not None
        ):  # of a linear of plain tensors, the weight has those of a rank
            return self.sharding.classes
        return self.size(self.linear.weight, int(self.linear.transposed))

    def _operand(self, node: Node, of: Node | None = None) -> Node:
        return self.cast(node, self.dtype, self.linear.node, of)

    def _edited(self, call: Call) -> tuple[Wide, Node | None, list[Node]]:
        """The hidden states ``[N, D]`` and weight ``[V, D]`` of the logits of a call, before they
        are cast, their bias, and its class indices."""
        linear, edits, dtype = self.linear, call.base.edits, compute_dtype(self.dtype)
        dim = call.base.steps[-1].dim if call.base.steps else linear.dim
        x = self._flat(self._viewed(self._early(self.hidden), call.base.steps), dim)
        weight = self._early(linear.weight)
        weight = self.weight = self.method("t", weight) if linear.transposed else weight
        for edit in edits:
            if isinstance(edit, Taken):
                weight = self.function(operator.getitem, weight, edit.entry)
        self.counts[edits] = self.size(weight, 0)
        picks = [self._index(pick, self.count(edits)) for pick in call.picks]
        x, picks = self.same_rows(x, picks)
        bias = None if linear.bias is None else self.classes_here(self._operand(linear.bias))
        for edit in edits:
            if isinstance(edit, Taken):
                bias = bias and self.function(operator.getitem, bias, edit.entry)
            else:  # in f32: the program may add it to up-cast logits
                more = self.method("to", self._values(edit.bias), dtype)
                if edit.factor != 1:
                    more = self.method("mul", more, self._arithmetic(edit.factor))
                if bias is not None:
                    more = self.method("add", self.method("to", bias, dtype), more)
                bias = more
        return Wide(x, self.weight_here(weight)), bias, picks

    def _early(self, operand: Node) -> Node:
        """An operand before its views: of a sharded head it is cast before ranks exchange it."""
        return operand if self.sharding is None else self._operand(operand)

    def _scale(self, call: Call, x: Node) -> Node | None:
        if call.base.scale == 1:
            return None
        scale = self.of_all_ranks(self._arithmetic(call.base.scale))
        scale = self.method("to", scale, compute_dtype(self.dtype))
        if value(scale).dim() == 0:
            scale = self.method("expand", scale, self.size(x, 0))
        return self.method("detach", scale) if call.detached else scale

    def _index(self, pick: Picked, classes: int | Node) -> Node:
        index = self.current(pick.index)
        if value(index).dtype != torch.int64:
            index = self.method("long", index)
        if pick.ignored is not None:
            index = self.method("masked_fill", index, self.method("eq", index, pick.ignored), 0)
        if pick.wraps == "all":
            index = self.method("remainder", index, classes)
        elif pick.wraps:
            negative = self.method("lt", index, 0)
            added = self.method("add", index, classes)
            index = self.function(torch.where, negative, added, index)
        if pick.dim is None:
            return index if value(index).dim() == 1 else self.method("flatten", index)
        return self._flat(index, pick.dim)

    def kept(self, node: Node, call: Call) -> Node:
        """An operand that backward reads, and autograd of the program may not: a copy."""
        if not call.spec.gradients or call.total is not None or is_dtensor(value(node)):
            return node
        return self.function(torch.ops.fxpass.kept.default, node)

    def _given(self, i: int, call: Call) -> Node:
        """Weights of a moment, or what an expression reads, as ``[V]`` or ``[N, V]``."""
        symbol = call.given[i]
        if symbol.name.startswith("row_"):
            node, sharding = self.kept(self._arithmetic(symbol), call), self.sharding
            classes = self.count(call.base.edits) if sharding is None else sharding.count
            sizes = (classes,) if value(node).dim() == 0 else (-1, classes)
            node = self.method("expand", self._column(node), *sizes)
        else:
            node = self._values(symbol)
        mask = value(node).dtype == torch.bool and i not in call.spec.weights
        if not (value(node).is_floating_point() or mask):
            node = self.method("to", node, compute_dtype(self.dtype))
        if value(node).dim() == 1 or self._not_saved(self.flow.tensors[symbol]):
            node = self.kept(node, call)
        return node if f"given{i}" in call.spec.gradients else self.method("detach", node)

    def _not_saved(self, node: Node) -> bool:
        """Whether autograd of the program does not save a tensor, which the user may write to: it
        is added to logits, compared with them, or chosen in their place."""
        functions = {"add", "sub", "rsub", "gt", "ge", "lt", "le"}
        if is_tensor(node) and value(node).dtype != torch.bool:  # no condition
            functions.add("where")
        unsaved = all(function_of(user) in functions for user in node.users)
        return is_tensor(node) and leaves(node) and unsaved

    def _logits(self, call: Call) -> Node | None:
        """The existing logits ``[N, V]``; the gradients are those of x and weight."""
        if call.logits is None:
            return None
        like = self.flow.classes[call.logits]
        logits = self.logits_here(self.method("detach", call.logits))
        rest = rest_of(call.base, like)
        assert rest is not None
        dim = rest[-1].dim if rest else like.dim
        return self._flat(self._viewed(logits, rest), dim)
