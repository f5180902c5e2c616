"""Replaces regions by calls of class reductions: the logits of their heads are never whole.

In: a :class:`fxpass.capture.capture.Captured`. Out: the inserted calls, and the calls on rows that
stood between the operator's outputs and the results of nodes::

    %z = linear(%h, %w)                  %out = class_reductions(%h_rows, %w, ..., '... pick')
    %p = log_softmax(%z, -1)       ->    %rows = getitem(%out, 0)
    %loss = -mean(%p[rows, %t])          %loss = neg(mean(%rows))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

import fxpass.op.kept  # noqa: F401, registers the operator
from fxpass.capture.capture import Captured, RowCall, nodes_of
from fxpass.capture.values import Leaf, Value
from fxpass.graph.calls import storage
from fxpass.graph.functions import function_of
from fxpass.graph.hazards import is_written, leaves
from fxpass.graph.nodes import hint, is_tensor, needs_gradient
from fxpass.rewrite.emitter import Emitter
from fxpass.rewrite.lowered import Inserted, Lowered, trained_operands

A = torch.ops.aten
# Functions of which autograd saves no operand, or a mask.
_UNSAVING = {"add", "sub", "rsub", "gt", "ge", "lt", "le", "where"}


def rewrite_region(
    graph: Graph, captured: Captured, calls: Sequence[Lowered]
) -> tuple[Calls, list[Inserted]]:
    """Inserts the calls of a region, replaces what its nodes give to others, erases them."""
    emitter = Calls(graph, captured)
    inserted = [emitter.insert(call) for call in calls]
    emitter.replace_results()
    erase(graph, captured)
    return emitter, inserted


def erase(graph: Graph, captured: Captured) -> None:
    """Erases the nodes of a region that nobody reads."""
    for node in sorted(captured.slice.ran, reverse=True):
        if not node.users:
            graph.erase_node(node)


class Calls(Emitter):
    """Inserts the operator calls of a region, and what takes the place of its nodes."""

    # ------------------------------------------------------------ the operator's call

    def insert(self, lowered: Lowered) -> Inserted:
        """Inserts a call that has a normal form, and what is computed of its outputs."""
        call, trains = lowered.call, any(output.trained for output in lowered.call.outputs)
        self.stand(call.place)
        self._move(call)
        self.made.clear()
        with self.graph.inserting_before(call.place):
            leaves: list[list[Node]] = []
            unsaved: list[Node] = []
            for leaf in call.leaves:
                sources = any(map(needs_gradient, nodes_of(leaf)))
                written = trains and self._written_later(leaf)
                nodes = self.leaf(leaf)
                if written:  # backward reads it as it is now
                    nodes = [self.call(A.clone.default, node) for node in nodes]
                needs = [trains and trained for trained in trained_operands(leaf)]
                if sources:
                    pairs = zip(nodes, needs, strict=True)
                    nodes = [n if needed else self.call(torch.detach, n) for n, needed in pairs]
                if leaf.head is None and not written and self._is_unsaved(leaf, leaves[0]):
                    unsaved += nodes
                leaves.append(nodes)
            logits = self.logits(call.leaves[0]) if self.captured.kept else None
            inserted = Inserted(self, lowered, leaves, unsaved, logits)
            self.shared |= {storage(node) for node in inserted.shared}
            for result, output in zip(inserted.made_rows, call.outputs, strict=True):
                example = result.meta["example_value"].detach()
                result.meta["example_value"] = example.requires_grad_(output.trained)
                self.rows[id(output)] = self.ranks.of_rows(result), output
        inserted.tidy()
        return inserted

    @staticmethod
    def _move(call: RowCall) -> None:
        """Moves operands to a call, where no other call has moved them before."""
        for node in call.moved:
            if call.place < node:
                call.place.prepend(node)

    def logits(self, leaf: Leaf) -> Node:
        """The logits ``[n, V]`` of a leaf, which exist; no gradient flows through them."""
        head = leaf.head
        assert head is not None
        node = self.ranks.logits(self.call(torch.detach, head.node))
        rows = node.meta["example_value"].dim() - 1
        return self.viewed(self.viewed(node, (), rows), leaf.chain, 1)

    def _is_unsaved(self, leaf: Leaf, tensors: Sequence[Node]) -> bool:
        """Whether autograd of the program may not save an operand that the user may write to: a
        small one, or one as large as logits that is only added to them, compared or chosen."""
        x, weight = (node.meta["example_value"] for node in tensors[:2])
        large = hint(x.shape[0]) * hint(weight.shape[0])

        def unsaved(node: Node) -> bool:
            small = hint(node.meta["example_value"].numel()) * 8 <= large
            return small or all(function_of(user) in _UNSAVING for user in node.users)

        return any(leaves(node) and unsaved(node) for node in nodes_of(leaf) if is_tensor(node))

    def _written_later(self, leaf: Leaf) -> bool:
        """Whether a node writes to an operand after the call."""
        memory = {storage(n) for n in nodes_of(leaf)}
        writers = (w for m in (*memory, None) for w in self.writers.get(m, ()))
        return any(writer > self.site for writer in writers)

    def replace_results(self) -> None:
        """Gives the users of nodes of the slice what they read."""
        for old in self.captured.results:
            value = self.slice.values(old)
            self.stand(old)
            if isinstance(value, Value):
                if value.tag is None and not value.late:
                    continue  # a constant stays
                with self.graph.inserting_before(old):
                    new = self.ranks.result(self.current(value), old)
                self._take_place(old, new)
            elif isinstance(value, torch.SymInt):
                with self.graph.inserting_before(old):
                    self._take_place(old, self.size(value))
            elif isinstance(value, int | float | bool):
                self._take_place(old, value)

    def _take_place(self, old: Node, new: Any) -> None:
        if isinstance(new, Node):
            example = old.meta["example_value"]
            shared = is_tensor(new) and storage(new) in self.shared
            if shared and (leaves(old) or is_written(old)):
                # each result has memory of its own; Inductor drops a clone
                with self.graph.inserting_before(old):
                    new = self.call(torch.ops.fxpass.kept.default, new)
            if new.meta["example_value"] is not example and is_tensor(old):
                new.meta["example_value"] = example
        for user in list(old.users):
            if user not in self.slice.ran or self.captured.kept:
                user.replace_input_with(old, new)
