"""Rewrites the reductions of a head: operator calls replace the linear and all that reads it.

In: a region and a :class:`fxpass.match.heads.Head`. Out: the inserted calls. Each node that reduces
the logits is replaced by arithmetic on outputs of a call::

    %logits = linear(%h, %w)                        %out = class_reductions(%h, %w, ..., %c, [],
    %lp = log_softmax(%logits, -1)            ->        'r3 outputs=pick')
    %log_probs = gather(%lp, -1, %labels)           %log_probs = unsqueeze(getitem(%out, 0)[0], 1)
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from sympy import Symbol
from torch.fx import Graph, Node

import fxpass.op.kept
import fxpass.op.reductions  # noqa: F401, registers the operators
from fxpass.casts.casts import Cast
from fxpass.graph.functions import function_of
from fxpass.graph.nodes import value
from fxpass.graph.region import Region
from fxpass.match.classes import Picked, Reduced, Weighted
from fxpass.match.heads import Head
from fxpass.match.join import Call
from fxpass.match.losses import Loss
from fxpass.match.totals import Total, coefficients_of
from fxpass.op.row_losses import cross_entropy_of
from fxpass.rewrite.arithmetic import Arithmetic
from fxpass.rewrite.totals import Coefficients
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.reductions import OF_PICKS

TOTAL_AT = 5  # among the operator's results


def rewrite_head(region: Region, head: Head) -> list[Cast]:
    """Replaces the reductions of a head in the graph of ``region``; erases what nobody reads.

    Returns:
        the casts in place of autocast's.
    """
    edit = _Edit(region.module.graph, head)
    for call in head.calls:
        edit.insert(call)
    for reduced in head.flow.reductions:
        edit.replace(reduced)
    for call in head.calls:
        edit.replace_total(call)
    edit.erase()
    return edit.casts


_OF_SHAPES = ("zeros_like", "ones_like", "full_like", "size", "dim", "numel")


def _is_read_for_its_shape(node: Node) -> bool:
    """Whether the readers of a tensor read its shape, dtype and device alone."""
    read = bool(node.users) and all(function_of(user) in _OF_SHAPES for user in node.users)
    return read and value(node).is_contiguous()  # a tensor like it has its strides


class _Edit(Arithmetic):
    def __init__(self, graph: Graph, head: Head) -> None:
        super().__init__(graph, head.flow.reductions[0].node, head.flow)
        self.head = head
        self.totals: dict[Node, Node] = {}

    # ------------------------------------------------------------ the operator's call

    def insert(self, call: Call) -> None:
        """Inserts a call after its operands."""
        after = call.after
        for node in call.moved:
            after.append(node)
            after = node
        with self.graph.inserting_before(after.next):
            x = self._rows(self._viewed(self._operand(self.linear.x), call.base.steps), call)
            weight = self._operand(self.linear.weight)
            if self.linear.transposed:
                weight = self.method("t", weight)
            bias = None if self.linear.bias is None else self._operand(self.linear.bias)
            gradients = call.spec.gradients
            if call.detached:
                x, weight = self.method("detach", x), self.method("detach", weight)
                bias = bias and self.method("detach", bias)
            elif gradients:
                # as autograd of the linear, which saves x for the weight and the weight for x
                keep = torch.ops.fxpass.kept.default
                bias = bias and self.function(keep, bias)
                x = x if "weight" in gradients else self.function(keep, x)
                weight = weight if "x" in gradients else self.function(keep, weight)
            scale = self._scale(call, x)
            picks = [self._index(pick, weight) for pick in call.picks]
            counts = [value(p).shape[1] if value(p).dim() == 2 else 1 for p in picks]
            given = [self._given(i, call) for i in range(len(call.given))]
            index = picks[0] if picks else None
            if len(picks) > 1:
                whole = [
                    p if value(p).dim() == 2 else self.method("unsqueeze", p, 1) for p in picks
                ]
                index = self.function(torch.cat, whole, 1)
            coef = None
            if call.total is not None:
                of_picks = dict(zip(call.picks, counts, strict=True))
                coef = self._coefficients(call, call.total, x, of_picks)
            out = self.function(
                torch.ops.fxpass.class_reductions.default,
                *(x, weight, bias, scale, index, given, coef, None, call.spec.text()),
            )
            self._unpack(call, out, counts)

    def _coefficients(self, call: Call, total: Total, x: Node, counts: dict[Picked, int]) -> Node:
        """The coefficients of the total's outputs ``[T, N]``, in the order of the spec; ``counts``
        are those of picks of a row."""
        zeros = self.method("new_zeros", x, self.size(x, 0), dtype=compute_dtype(self.dtype))
        coefficients = Coefficients(total, self._classes(), self._batch)
        like = [
            constant if reduced.loss or reduced.then else self._shaped(constant, reduced)
            for reduced in total.reductions
            for constant in (self._constant(rows, zeros) for rows in reduced.values)
        ]
        out = self.function(coefficients, *like, *coefficients.others)
        each = iter([self.function(operator.getitem, out, i) for i in range(len(like) + 1)])
        found: dict[Symbol, Node] = {}
        for reduced in total.reductions:
            for rows in reduced.values:
                coef = self.method("flatten", next(each))
                for symbol, factor in coefficients_of(self.flow, rows)[0].items():
                    part = self.method("mul", coef, self._arithmetic(factor))
                    found[symbol] = (
                        self.method("add", found[symbol], part) if symbol in found else part
                    )
        self.totals[total.node] = next(each)  # the constant
        lines: list[Node] = []
        symbols = {self.flow.outputs[s][1]: s for s in found}
        for output in call.spec.total:
            if output not in OF_PICKS:
                lines.append(found[symbols[self._weighted(call, output)]])
                continue
            for pick in call.picks:
                symbol = self.flow.output(call.base, replace(pick, logit=output == "at"))
                # several picks of a row are beside the total
                lines += [found.get(symbol, zeros)] * counts[pick]
        return self.function(torch.stack, lines)

    def _constant(self, rows: Any, zeros: Node) -> Node:
        """The part of rows that is no output."""
        constant = coefficients_of(self.flow, rows)[1]
        return zeros if constant == 0 else self.method("add", zeros, self._arithmetic(constant))

    def _batch(self, reduced: Reduced) -> int | Node:
        return self.size(self._viewed(self.linear.x, reduced.like.steps), 0)

    def _weighted(self, call: Call, output: Any) -> Any:
        """An output as the flow names it."""
        weight = getattr(output, "weight", None)
        if weight is None:
            return output
        return Weighted(replace(output, weight=None), call.given[weight])

    def _unpack(self, call: Call, out: Node, counts: list[int]) -> None:
        rows = self.function(operator.getitem, out, 0)
        indices = self.function(operator.getitem, out, 1)
        at, symbols = 0, iter(call.outputs)
        for output in call.spec.rows:
            if output not in OF_PICKS:
                self.known[next(symbols)] = self.method("select", rows, 0, at)
                at += 1
                continue
            for pick, count in zip(call.picks, counts, strict=True):
                symbol = self.flow.output(call.base, replace(pick, logit=output == "at"))
                if count == 1:
                    self.known[symbol] = self.method("select", rows, 0, at)
                else:
                    self.known[symbol] = self.method("t", self.method("narrow", rows, 0, at, count))
                at += count
        for i, _ in enumerate(call.spec.indices):
            self.known[next(symbols)] = self.method("select", indices, 0, i)
        if call.total is not None:
            total = self.function(operator.getitem, out, TOTAL_AT)
            constant = self.totals[call.total.node]
            self.totals[call.total.node] = self.method("add", total, constant)

    def _operand(self, node: Node) -> Node:
        return self.cast(node, self.dtype, self.linear.node)

    def _rows(self, tensor: Node, call: Call) -> Node:
        """``[..., D, ...]`` as ``[N, D]``."""
        dim = call.base.steps[-1].dim if call.base.steps else self.linear.dim
        return self._flat(tensor, dim)

    def _scale(self, call: Call, x: Node) -> Node | None:
        if call.base.scale == 1:
            return None
        scale = self._arithmetic(call.base.scale)
        scale = self.method("to", scale, compute_dtype(self.dtype))
        if value(scale).dim() == 0:
            scale = self.method("expand", scale, self.size(x, 0))
        return self.method("detach", scale) if call.detached else scale

    def _index(self, pick: Picked, weight: Node) -> Node:
        if pick.pieces:
            pieces = [self._index(piece, weight) for piece in pick.pieces]
            if pick.pieces[0].count == 1:
                pieces = [self.method("flatten", piece) for piece in pieces]
            return self.function(torch.cat, pieces, 0)
        index = pick.index
        if value(index).dtype != torch.int64:
            index = self.method("long", index)
        if pick.ignored is not None:
            index = self.method("masked_fill", index, self.method("eq", index, pick.ignored), 0)
        if pick.wraps == "all":
            index = self.method("remainder", index, self.size(weight, 0))
        elif pick.wraps:
            negative = self.method("lt", index, 0)
            added = self.method("add", index, self.size(weight, 0))
            index = self.function(torch.where, negative, added, index)
        if pick.dim is None:
            return self.method("flatten", index)
        return self._flat(index, pick.dim)

    def _given(self, i: int, call: Call) -> Node:
        """Weights of a moment as ``[V]`` or ``[N, V]``."""
        node = self._values(call.given[i])
        if not value(node).is_floating_point():
            node = self.method("to", node, compute_dtype(self.dtype))
        return node if f"given{i}" in call.spec.gradients else self.method("detach", node)

    # ------------------------------------------------------------ what reads it

    def replace(self, reduced: Reduced) -> None:
        """Replaces a node by arithmetic on outputs, unless only a total reads it."""
        if any(reduced in call.unread for call in self.head.calls):
            return
        old, self.site = reduced.node, reduced.node
        with self.graph.inserting_before(old):
            new = self._arithmetic(reduced.value)
            if reduced.loss is not None:
                new = self._loss(new, reduced, reduced.loss)
            if reduced.then != "index" and not value(old).requires_grad:
                new = self.method("detach", new)  # it is under no_grad, or reads detached logits
            if reduced.then in ("sum", "mean"):
                new = self.method(reduced.then, new)
            elif reduced.then == "batchmean":
                new = self.method("div", self.method("sum", new), self._batch(reduced))
            elif reduced.loss is None:
                new = self._shaped(new, reduced)
            if value(new).dtype != value(old).dtype:
                new = self.method("to", new, value(old).dtype)
        new.meta["example_value"] = old.meta["example_value"]
        old.replace_all_uses_with(new)
        self.replaced[old] = new

    def replace_total(self, call: Call) -> None:
        """Replaces the scalar whose gradients forward computes."""
        if call.total is None:
            return
        old = self.site = call.total.node
        with self.graph.inserting_before(old):
            new = self.method("to", self.totals[old], value(old).dtype)
        new.meta["example_value"] = old.meta["example_value"]
        old.replace_all_uses_with(new)

    def _shaped(self, new: Node, reduced: Reduced) -> Node:
        """Flat rows in the shape of the old node."""
        like = reduced.like
        # hidden states in the same shape: the sizes may be symbolic
        rows = self._viewed(self.linear.x, like.steps)
        rows = self.method("select", rows, like.dim, 0)
        if value(new).dim() == 2:  # K picks
            sizes = [self.size(rows, i) for i in range(value(rows).dim())]
            new = self.method("reshape", new, *sizes, value(new).shape[1])
            # a view of the result works where its memory is as in the program
            return self.method("contiguous", self.method("movedim", new, -1, like.dim))
        if value(new).dim() == 0:
            sizes = (self.size(rows, i) for i in range(value(rows).dim()))
            new = self.method("contiguous", self.method("expand", new, *sizes))
        else:
            new = self.method("view_as", new, rows) if value(rows).dim() != 1 else new
        return self.method("unsqueeze", new, like.dim) if reduced.keepdim else new

    def _loss(self, picked: Node, reduced: Reduced, loss: Loss) -> Node:
        smooth = None if reduced.mean_log is None else self._arithmetic(reduced.mean_log)
        share = loss.label_smoothing, self._classes()
        options = loss.reduction, loss.ignore_index, *share
        assert loss.target is not None
        target = self.replaced.get(loss.target, loss.target)
        return self.function(cross_entropy_of, picked, smooth, target, loss.class_weight, *options)

    def _classes(self) -> int | Node:
        return self.size(self.linear.weight, int(self.linear.transposed))

    def erase(self) -> None:
        """Erases the nodes that nobody reads."""
        dead = {r.node for r in self.flow.reductions} | set(self.flow.classes)
        dead |= {n for call in self.head.calls if call.total for n in call.total.tail}
        for node, same in self.flow.same.items():
            node.replace_all_uses_with(same)
        dead |= {*self.flow.pairs, *self.flow.unread, *self.flow.repeated, *self.flow.same}
        for node in sorted(dead, reverse=True):
            if node in self.flow.classes and _is_read_for_its_shape(node):
                self._stand_in(node)
            if not node.users:
                self.graph.erase_node(node)

    def _stand_in(self, node: Node) -> None:
        """Replaces logits by a tensor of their shape and dtype that takes no memory."""
        like, linear, dtype = self.flow.classes[node], self.linear, value(node).dtype
        with self.graph.inserting_before(node):
            x = self._viewed(linear.x, like.steps)
            sizes = [self.size(x, i) for i in range(value(x).dim())]
            sizes[like.dim] = self.size(linear.weight, int(linear.transposed))
            new = self.method("new_empty", x, (), dtype=dtype)
            new = self.method("expand", new, *sizes)
        node.replace_all_uses_with(new)
