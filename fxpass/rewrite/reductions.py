"""Rewrites the reductions of a head: operator calls replace the linear and all that reads it.

In: a region and a :class:`fxpass.match.heads.Head`. Out: the inserted calls. Each node that reduces
the logits is replaced by arithmetic on outputs of a call::

    %logits = linear(%h, %w)                        %out = class_reductions(%h, %w, ..., %c, [],
    %lp = log_softmax(%logits, -1)            ->        'r6 outputs=pick')
    %log_probs = gather(%lp, -1, %labels)           %log_probs = unsqueeze(getitem(%out, 0)[0], 1)
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from sympy import Symbol
from torch.fx import Graph, Node

import fxpass.op.reductions  # noqa: F401, registers the operators
from fxpass.casts.casts import Cast
from fxpass.graph.calls import storage, written
from fxpass.graph.functions import function_of
from fxpass.graph.hazards import is_written, leaves
from fxpass.graph.nodes import is_tensor, needs_gradient, value
from fxpass.graph.region import Region
from fxpass.match.classes import Reduced
from fxpass.match.head import Head
from fxpass.match.join import Call
from fxpass.match.losses import Loss
from fxpass.match.totals import Total, coefficients_of
from fxpass.op.kept import saved_logits
from fxpass.rewrite.operands import Operands, Wide
from fxpass.rewrite.totals import coefficients_of_total
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.outputs import OF_PICKS


def rewrite_heads(region: Region, heads: Sequence[Head]) -> list[Cast]:
    """Replaces the reductions of heads in the graph of ``region``; erases what nobody reads.

    Returns:
        the casts in place of autocast's.
    """
    graph, replaced = region.module.graph, {}
    edits = [_Edit(graph, head, replaced) for head in heads]
    places = _places(heads)
    for edit in edits:
        for call in edit.head.calls:
            edit.insert(call, next(places))
        for reduced in edit.flow.reductions:
            edit.replace(reduced)
        for call in edit.head.calls:
            edit.replace_total(call)
    _erase(graph, edits)
    return [cast for edit in edits for cast in edit.casts]


def _places(heads: Sequence[Head]) -> Iterator[Node]:
    """The node before which each call stands, in the order of the heads: one that stays where it
    is, while other calls move their operands."""
    calls = [call for head in heads for call in head.calls]
    moved = {node for call in calls for node in call.moved}
    found = []
    for call in calls:
        place = call.after.next
        while place in moved:
            place = place.next
        found.append(place)
    return iter(found)


def _erase(graph: Graph, edits: Sequence[_Edit]) -> None:
    """Erases the nodes that nobody reads."""
    dead: dict[Node, _Edit] = {}
    for edit in edits:
        dead |= dict.fromkeys(edit.dead(), edit)
    for node in sorted(dead, reverse=True):
        if node in dead[node].flow.classes and _is_read_for_its_shape(node):
            dead[node].stand_in(node)
        if not node.users and not _is_seen_elsewhere(node):
            graph.erase_node(node)


def _is_seen_elsewhere(node: Node) -> bool:
    """Whether a node that stays reads what a node writes in place."""
    memory = {storage(operand) for operand in written(node)}
    if not memory:
        return False
    aliases = (n for n in node.graph.nodes if is_tensor(n) and storage(n) in memory)
    return any(user > node for alias in aliases for user in alias.users)


_OF_SHAPES = (
    *("zeros_like", "ones_like", "full_like", "size", "dim", "numel"),
    "_assert_tensor_metadata",
)


def _is_read_for_its_shape(node: Node) -> bool:
    """Whether the readers of logits read their shape, dtype and device alone."""
    read = bool(node.users) and all(function_of(user) in _OF_SHAPES for user in node.users)
    return read and value(node).is_contiguous()  # a tensor like it has its strides


class _Edit(Operands):
    def __init__(self, graph: Graph, head: Head, replaced: dict[Node, Node]) -> None:
        super().__init__(graph, head.flow.reductions[0].node, head.flow, replaced)
        self.head = head
        self.totals: dict[Node, Node] = {}
        self.outputs: list[tuple[Call, dict[Symbol, Node]]] = []  # after each call
        operands = self.linear.x, self.linear.weight, self.linear.bias, *self.flow.tensors.values()
        self.trained = any(map(needs_gradient, operands))

    # ------------------------------------------------------------ the operator's call

    def insert(self, call: Call, place: Node) -> None:
        """Inserts a call before a node, which comes after its operands or after what moves."""
        for node in call.moved:
            if place < node:  # else another call has moved it
                place.prepend(node)
        with self.graph.inserting_before(place):
            wide, bias, picks = self._edited(call)
            x = self._operand(wide.x, self.linear.x)
            weight = self._operand(wide.weight, self.linear.weight)
            gradients = call.spec.gradients
            if call.detached and self.trained:
                x, weight = self.method("detach", x), self.method("detach", weight)
                bias = bias and self.method("detach", bias)
            elif not call.choice.save_logits:
                # as autograd of the linear, which saves x for the weight and the weight for x
                bias = bias and self.kept(bias, call)
                x = x if "weight" in gradients else self.kept(x, call)
                weight = weight if "x" in gradients else self.kept(weight, call)
            scale = self._scale(call, x)
            counts = [value(p).shape[1] if value(p).dim() == 2 else 1 for p in picks]
            given = [self._given(i, call) for i in range(len(call.given))]
            index = picks[0] if picks else None
            if len(picks) > 1:
                index = self.function(torch.cat, list(map(self._column, picks)), 1)
            coef = None
            if call.total is not None:
                coef = self._coefficients(call, call.total, x, counts)
            operands = x, weight, bias, scale, index, given
            self._unpack(call, self._called(call, operands, coef, wide), counts)

    def _called(self, call: Call, operands: tuple[Any, ...], coef: Node | None, wide: Wide) -> Node:
        """The operator's call; for a vocabulary shard, over the classes of all ranks."""
        logits, sharding, text = self._logits(call), self.sharding, call.spec.text()
        if sharding is None or sharding.group is None:
            op, unrounded = torch.ops.fxpass.class_reductions.default, call.spec.unrounded
            named = {f"wide_{name}": getattr(wide, name) for name in unrounded}
            return self.call("call_function", op, *operands, coef, logits, text, **named)
        from fxpass.op import sharded  # not every PyTorch has torch.distributed

        if call.choice.save_logits:
            logits = self.function(saved_logits, *operands[:3])
        of_rank: dict[str, Any] = {"first": sharding.first, "classes": sharding.classes}
        of_rank["group"] = sharding.group
        function = sharded.class_reductions
        return self.call("call_function", function, *operands, logits, text, **of_rank)

    def _coefficients(self, call: Call, total: Total, x: Node, counts: list[int]) -> Node:
        """The coefficients of the total's outputs ``[T, N]``, in the order of the spec; ``counts``
        are those of picks of a row."""
        zeros = self.method("new_zeros", x, self.size(x, 0), dtype=compute_dtype(self.dtype))
        terms = [
            (reduced, *coefficients_of(self.flow, rows))
            for reduced in total.reductions
            for rows in reduced.values
        ]
        *derivatives, self.totals[total.node] = self._derivatives(call, total, terms, zeros)
        found: dict[Symbol, Node] = {}
        for coef, (_, factors, _) in zip(derivatives, terms, strict=True):
            coef = coef if value(coef).dim() == 1 else self.method("flatten", coef)
            for symbol, factor in factors.items():
                part = coef if factor == 1 else self.method("mul", coef, self._arithmetic(factor))
                found[symbol] = self.method("add", found[symbol], part) if symbol in found else part
        lines: list[Node] = []
        for symbol, width in self._lines(call, call.spec.total, iter(call.added), counts):
            lines += [found.get(symbol, zeros)] * (width or 1)  # several are beside the total
        return self.function(torch.stack, lines)

    def _derivatives(
        self, call: Call, total: Total, terms: Sequence[tuple[Reduced, Any, Any]], zeros: Node
    ) -> list[Node]:
        """The derivatives of a total by the rows that it adds up, and its constant. ``terms`` are
        the reduction, the factors of outputs and the constant of each row."""
        (reduced, *more), loss = total.reductions, total.reductions[0].loss
        constants = any(constant != 0 for _, _, constant in terms)
        if loss is not None and not (more or total.tail or constants):
            arguments = zeros, len(terms) == 2, *self._of_loss(reduced, loss)
            out = self.function(torch.ops.fxpass.loss_coefficients.default, *arguments)
        else:
            classes = self.count(call.base.edits)
            coefficients, others = coefficients_of_total(total, classes)
            like: list[Node] = []
            for reduced, _, constant in terms:
                rows = zeros
                if constant != 0:
                    rows = self.method("add", zeros, self._arithmetic(constant))
                like.append(rows if reduced.is_scalar else self._shaped(rows, reduced))
            out = self.function(coefficients, *like, *map(self.current, others))
        return [self.function(operator.getitem, out, i) for i in range(len(terms) + 1)]

    def _unpack(self, call: Call, out: Node, counts: list[int]) -> None:
        found = {s: n for c, known in self.outputs if c.base is call.base for s, n in known.items()}
        symbols = iter(call.outputs)
        results = call.spec.results
        of_shard = self.sharding is not None and self.sharding.group is not None
        order = ("rows", "indices") if of_shard else results
        tensors = {
            name: self.function(operator.getitem, out, order.index(name))
            for name in ("rows", "indices", "total")
            if name in results
        }
        for name, outputs in (("rows", call.spec.rows), ("indices", call.spec.indices)):
            at = 0
            for symbol, width in self._lines(call, outputs, symbols, counts):
                if width is None:
                    found[symbol] = self.method("select", tensors[name], 0, at)
                else:  # [N, K]
                    columns = self.method("narrow", tensors[name], 0, at, width)
                    found[symbol] = self.method("t", columns)
                at += width or 1
        self.outputs.append((call, found))
        self.known |= found
        if call.total is not None:
            constant = self.totals[call.total.node]
            self.totals[call.total.node] = self.method("add", tensors["total"], constant)

    def _lines(
        self, call: Call, outputs: Sequence[Any], symbols: Iterator[Symbol], counts: list[int]
    ) -> Iterator[tuple[Symbol, int | None]]:
        """The symbols of outputs of a spec, in order, and the number of their lines if there may be
        several; ``symbols`` are those of the outputs that are no picks."""
        for output in outputs:
            if output not in OF_PICKS:
                yield next(symbols), None
                continue
            for pick, count in zip(call.picks, counts, strict=True):
                symbol = self.flow.output(call.base, replace(pick, logit=output == "at"))
                yield symbol, None if count == 1 else count

    # ------------------------------------------------------------ what reads it

    def replace(self, reduced: Reduced) -> None:
        """Replaces a node by arithmetic on outputs, unless only a total reads it."""
        if any(reduced in call.unread for call in self.head.calls):
            return
        old, self.site = reduced.node, reduced.node
        for call, found in self.outputs:  # another call may have the same output, of other operands
            if reduced in call.reductions:
                self.known |= found
        with self.graph.inserting_before(old):
            new = self._arithmetic(reduced.value)
            if reduced.loss is not None:
                new = self._loss(new, reduced, reduced.loss)
            if self.trained and reduced.then != "index" and not value(old).requires_grad:
                new = self.method("detach", new)  # it is under no_grad, or reads detached logits
            if reduced.then in ("sum", "mean"):
                new = self.method(reduced.then, new)
            elif not reduced.is_scalar:
                new = self._shaped(new, reduced)
            same = value(new).dtype == value(old).dtype
            if same and self._shared(new) and (leaves(old) or is_written(old)):
                # each result has memory of its own; Inductor drops a clone, or a product with 1
                new = self.function(torch.ops.fxpass.kept.default, new)
            self._take_place(old, new)

    def _take_place(self, old: Node, new: Node) -> None:
        """Replaces a node, with its dtype and placements."""
        if value(new).dtype != value(old).dtype:
            new = self.method("to", new, value(old).dtype)
        new = self.result(new, old, self.weight)
        new.meta["example_value"] = old.meta["example_value"]
        old.replace_all_uses_with(new)
        self.replaced[old] = new

    def _shared(self, new: Node) -> bool:
        """Whether a result is a view of an operator's output, which has other results too, or of
        what autograd saves."""
        return storage(new) in {storage(n) for n in (*self.known.values(), *self.results)}

    def replace_total(self, call: Call) -> None:
        """Replaces the scalar whose gradients forward computes."""
        if call.total is None:
            return
        old = self.site = call.total.node
        with self.graph.inserting_before(old):
            self._take_place(old, self.totals[old])

    def _shaped(self, new: Node, reduced: Reduced) -> Node:
        """Flat rows in the shape of the old node."""
        like = reduced.like
        # hidden states in the same shape: the sizes may be symbolic
        rows = self._viewed(self.hidden, like.steps)
        rows = self.method("select", rows, like.dim, 0)
        if value(new).dim() == 2:  # K picks
            new = self.method("reshape", new, *self.sizes(rows), value(new).shape[1])
            # a view of the result works where its memory is as in the program
            return self.method("contiguous", self.method("movedim", new, -1, like.dim))
        if value(new).dim() == 0:
            new = self.method("contiguous", self.method("expand", new, *self.sizes(rows)))
        else:
            new = self.method("view_as", new, rows) if value(rows).dim() != 1 else new
        return self.method("unsqueeze", new, like.dim) if reduced.keepdim else new

    def _loss(self, picked: Node, reduced: Reduced, loss: Loss) -> Node:
        smooth = None if reduced.mean_log is None else self._arithmetic(reduced.mean_log)
        op = torch.ops.fxpass.cross_entropy_of.default
        return self.function(op, picked, smooth, *self._of_loss(reduced, loss))

    def _of_loss(self, reduced: Reduced, loss: Loss) -> tuple[Any, ...]:
        """The arguments of ``cross_entropy_of`` after the log-probabilities."""
        target, weight = (n and self.current(n) for n in loss.indices)
        if target is not None and value(target).dim() != 1:
            target = self.method("flatten", target)
        target = target and self.rows_here(target)
        weight = weight and self.whole(weight)
        share = loss.label_smoothing, self.count(reduced.like.edits)
        groups = () if self.sharding is None else self.sharding.row_groups
        return target, weight, loss.reduction, loss.ignore_index, *share, groups

    def dead(self) -> set[Node]:
        """The nodes that nobody reads if no other node reads them."""
        dead = {r.node for r in self.flow.reductions} | self.flow.inside
        return dead | {n for call in self.head.calls if call.total for n in call.total.tail}

    def stand_in(self, node: Node) -> None:
        """Replaces logits by a tensor of their shape and dtype that takes no memory."""
        like, dtype = self.flow.classes[node], value(node).dtype
        size = value(node).shape[like.dim]
        if not isinstance(size, int) and like.edits:
            return  # the number of classes that are taken is known only later
        with self.graph.inserting_before(node):
            x = self._viewed(self.hidden, like.steps)
            sizes = self.sizes(x)
            sizes[like.dim] = size if isinstance(size, int) else self.count(like.edits)
            new = self.method("new_empty", x, (), dtype=dtype)
            new = self.method("expand", new, *sizes)
        node.replace_all_uses_with(new)
