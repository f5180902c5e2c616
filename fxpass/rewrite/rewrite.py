"""Rewrites a match: one operator call replaces the linear, its loss and the nodes between them.

In: a region and a :class:`fxpass.match.match.Match`. Out: the casts that were made. The graph
changes in place: views of rows are replayed on the hidden states, biases and factors are folded
into the linear's operands, and :func:`erase` erases nodes without users::

    %logits = linear(%h, %w)                     %x = reshape(%h, -1, 64)
    %flat = view(%logits, -1, 32000)      ->     %out = linear_cross_entropy(%x, %w, ..., 'v7 ...')
    %loss = cross_entropy(%flat, %labels)        %loss = getitem(%out, 0)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

import fxpass.op.kept
import fxpass.op.losses  # noqa: F401, registers the operators
from fxpass.casts.casts import Cast, cast
from fxpass.graph.functions import reads_values
from fxpass.graph.nodes import is_tensor, value
from fxpass.graph.placements import Placing, is_dtensor, placements_of
from fxpass.graph.region import Region
from fxpass.match.folds import Affine, Bias, RowView, Scale, Stack, ToLocal
from fxpass.match.losses import Loss
from fxpass.match.match import Match
from fxpass.match.sharding import as_dtensor
from fxpass.match.views import View
from fxpass.rewrite.builder import Builder
from fxpass.spec.dtypes import compute_dtype


def rewrite(region: Region, match: Match) -> list[Cast]:
    """Replaces the match in the graph of ``region``; returns the casts in place of autocast's."""
    with region.module.graph.inserting_before(match.loss.node):
        edit = _Edit(region.module.graph, match)
        edit.cast_operands()
        edit.fold()
        edit.replace()
        return edit.casts


def erase(matches: Iterable[Match]) -> None:
    """Erases the nodes of rewritten matches that have no users."""
    for match in matches:
        loss = match.loss
        lse = () if match.lse is None else (match.lse.node,)
        for node in (loss.node, *lse, *loss.inner, *reversed(match.chain.nodes)):
            for user in list(node.users):  # of which only the sizes or the dtype were read
                if not user.users and not reads_values(user, node):
                    user.graph.erase_node(user)
            if not node.users and not node._erased:
                node.graph.erase_node(node)


class _Edit(Builder):
    """Builds the operands of one operator call in the graph."""

    def __init__(self, graph: Graph, match: Match) -> None:
        super().__init__(graph, match.loss.node)
        self.match = match
        self.logits: Node | None = None

    def cast_operands(self) -> None:
        """Casts x, weight ``[V, D]`` and bias to the dtype in which the linear computes."""
        linear = self.match.chain.linear
        self.dtype = value(linear.node).dtype
        self.x = self._cast(linear.x)
        self.weight = self._cast(linear.weight)
        self.bias = None if linear.bias is None else self._cast(linear.bias)
        if linear.transposed:
            self.weight = self.method("t", self.weight)
        self.whole_weight = self.weight  # a DTensor where it is sharded
        sharding = self.match.sharding
        # the placements of DTensors with this rank's rows
        self.row_placements = () if sharding is None else sharding.rows_only(0)
        if sharding is not None and sharding.weight is not None:
            assert sharding.x is not None
            self.x = self._placed(self.x, sharding.x)
            if not sharding.rows_move:
                self._x_to_local()  # this rank has all rows: views work on the local tensor
            self.weight = self._to_local(self.weight, self._weight_gradient())
            self.bias = None if self.bias is None else self._classes_here(self.bias)

    def fold(self) -> None:
        """Folds the nodes between linear and loss into the operands; where the logits exist anyway,
        replays the views after ``base`` on the logits."""
        if self.match.logits_mode == "keep" and not self.match.recomputed:
            # no gradient through the logits: the operator has gradients of x and weight
            self.logits = self.method("detach", self.match.chain.base)
            if is_dtensor(value(self.logits)):
                assert self.match.sharding is not None
                placements = self.match.sharding.logits(value(self.logits).dim() - 1)
                self.logits = self.method("to_local", self._placed(self.logits, placements))
        at = self.match.chain.nodes.index(self.match.chain.base)
        before = set(self.match.chain.nodes[: at + 1])
        for fold in self.match.chain.folds:
            if isinstance(fold, RowView):
                self._view(fold, to_logits=fold.node not in before)
            elif isinstance(fold, Stack):
                self.x = self._repeated(fold, self.x)
                if self.logits is not None and fold.node not in before:
                    self.logits = self._repeated(fold, self.logits)
            elif isinstance(fold, ToLocal):
                self._x_to_local()
            elif isinstance(fold, Affine):
                self._affine(fold)
            elif isinstance(fold, Scale):
                self._scale("div" if fold.divide else "mul", fold.operand)
            else:
                self._add_bias(fold)
        self.shaped = self.x
        self.x = self._rows(self.x)
        if self.logits is not None:
            self.logits = self._rows(self.logits)

    def replace(self) -> None:
        """Inserts the operator call and passes its results to the users of the old nodes."""
        match, loss, sharding = self.match, self.match.loss, self.match.sharding
        target, class_weight = self._target(loss), loss.class_weight
        if match.detached:
            self.x, self.weight = (
                self.method("detach", self.x),
                self.method("detach", self.weight),
            )
            self.bias = None if self.bias is None else self.method("detach", self.bias)
        if sharding is None and match.spec.waits:
            self._keep_for_backward()
        function: Any = torch.ops.fxpass.linear_cross_entropy.default
        of_rank: dict[str, Any] = {}
        if sharding is not None:
            from fxpass.op import vocab_parallel  # not every PyTorch has torch.distributed

            function = vocab_parallel.linear_cross_entropy
            of_rank = {"first": sharding.first, "group": sharding.group}
            of_rank |= {"row_groups": sharding.row_groups} if sharding.row_groups else {}
            if match.choice is not None and match.choice.save_logits:
                of_rank["save_logits"] = True
            target, class_weight = self._with_rows(target), self._whole(class_weight)
            self._x_to_local()
        operands = {"x": self.x, "weight": self.weight, "bias": self.bias, "target": target}
        operands |= {"class_weight": class_weight, "logits": self.logits}
        present = {name: node for name, node in operands.items() if node is not None}
        named = {**present, "spec": match.spec.text(), **of_rank}
        out = self.graph.call_function(function, (), named, name="linear_cross_entropy")
        out.meta["stack_trace"] = loss.node.meta.get("stack_trace")
        self._hand_over(out, 0, loss, "fused_loss", scalar=match.spec.reduction != "none")
        if match.lse is not None:
            self._hand_over(out, 1, match.lse, "fused_lse", scalar=False)

    def _keep_for_backward(self) -> None:
        """Copies operands that backward reads and autograd of the linear would not save: the bias,
        x of a frozen weight, the weight of frozen hidden states. The user may write to them."""
        keep = torch.ops.fxpass.kept.default
        if self.bias is not None:
            self.bias = self.function(keep, self.bias)
        if "weight" not in self.match.spec.gradients:
            self.x = self.function(keep, self.x)
        if "x" not in self.match.spec.gradients:
            self.weight = self.function(keep, self.weight)

    # ------------------------------------------------------------ folds

    def _view(self, fold: RowView, to_logits: bool) -> None:
        classes = fold.view.classes
        if classes is not None:
            self.weight = self.function(operator.getitem, self.weight, classes)
            if self.bias is not None:
                self.bias = self.function(operator.getitem, self.bias, classes)
        self.x = self._viewed(fold.view, self.x, None)
        if to_logits and self.logits is not None:
            self.logits = self._viewed(fold.view, self.logits, classes)

    def _viewed(self, view: View, tensor: Node, classes: slice | None) -> Node:
        """Rearranges the rows of a tensor, and takes the slice ``classes`` of its class dimension.

        The logits may have this rank's classes only."""
        if not view.function:
            return tensor
        op, target, args = view.replayed(self.size(tensor, view.dim), classes)
        return self.call(op, target, tensor, *args)

    def _repeated(self, fold: Stack, node: Node) -> Node:
        node = self.method("unsqueeze", node, fold.dim)
        sizes = [-1] * value(node).dim()
        sizes[fold.dim] = fold.count
        return self.method("expand", node, *sizes)

    def _affine(self, fold: Affine) -> None:
        factor, shift = float(fold.factor), float(fold.shift)
        if factor != 1:
            self.x = self.method("mul", self.x, factor)
            if self.bias is not None:
                self.bias = self.method("mul", self.bias, factor)
        if shift:  # in f32, as exact as on the logits: a 16-bit bias would round the shift
            dtype = compute_dtype(self.dtype)
            if self.bias is None:
                v = self.size(self.weight, 0)
                self.bias = self.method("new_zeros", self.weight, v, dtype=dtype)
            self.bias = self.method("add", self.method("to", self.bias, dtype), shift)

    def _scale(self, name: str, factor: Node) -> None:
        # the factor is not cast first: its rounding would affect all logits alike
        self.x, _ = cast(self.graph, self.method(name, self.x, factor), self.dtype, self.site)
        if self.bias is not None:  # a match with a bias has one factor, not one per row
            one = self.method("reshape", factor, ()) if is_tensor(factor) else factor
            self.bias = self.method(name, self.bias, one)

    def _add_bias(self, fold: Bias) -> None:
        # a bias added to up-cast logits is not rounded to the linear's dtype
        wider = fold.dtype.itemsize > self.dtype.itemsize
        dtype = compute_dtype(self.dtype) if wider else self.dtype
        bias, made = cast(self.graph, fold.operand, dtype, self.site)
        self.casts += [made] if made else []
        bias = self._classes_here(bias)
        if self.bias is not None:
            self.bias = self.method("add" if fold.sign > 0 else "sub", self.bias, bias)
        else:
            self.bias = bias if fold.sign > 0 else self.method("neg", bias)

    # ------------------------------------------------------------ DTensors to local tensors

    def _x_to_local(self) -> None:
        """Makes x a local tensor if it is a DTensor. Its gradient is partial over the group of the
        vocabulary shards."""
        if is_dtensor(value(self.x)):
            assert self.match.sharding is not None
            placements = placements_of(value(self.x))
            gradient = self.match.sharding.partial_where("classes", placements)
            self.x = self._to_local(self.x, gradient)

    def _weight_gradient(self) -> Any:
        """Placements of the gradients of weight and bias: partial where the rows are sharded."""
        sharding = self.match.sharding
        assert sharding is not None
        assert sharding.weight is not None
        return sharding.partial_where("rows", sharding.weight)

    def _classes_here(self, bias: Node) -> Node:
        """This rank's classes of a bias with V elements, as ``[V_r]``."""
        sharding = self.match.sharding
        if value(bias).dim() != 1:
            bias = self.method("reshape", bias, -1)
        if sharding is None:
            return bias
        if is_dtensor(value(bias)):
            assert sharding.weight is not None
            return self._to_local(self._placed(bias, sharding.weight), self._weight_gradient())
        if int(value(bias).shape[0]) == sharding.count:
            return bias
        return self.method("narrow", bias, 0, sharding.first, sharding.count)

    def _with_rows(self, target: Node | None) -> Node | None:
        """This rank's rows of the target, with all classes. x and target get the same placements:
        the rows of a flattened batch of sharded sequences are strided, in both or in neither."""
        if is_dtensor(value(self.x)):
            self.row_placements = placements_of(value(self.x))
            if target is None or placements_of(value(target)) != self.row_placements:
                assert self.match.sharding is not None
                self.row_placements = self.match.sharding.rows_only(0)
                self.x = self._placed(self.x, self.row_placements)
        if target is None or not is_dtensor(value(target)):
            return target
        return self.method("to_local", self._placed(target, self.row_placements))

    def _whole(self, tensor: Node | None) -> Node | None:
        if tensor is None or not is_dtensor(value(tensor)):
            return tensor
        return self.method("full_tensor", tensor)

    def _placed(self, node: Node, placements: Any) -> Node:
        """A DTensor with other placements."""
        if placements_of(value(node)) == tuple(placements):
            return node
        redistribute: Any = type(value(node)).redistribute  # type: ignore[attr-defined]
        return self.function(Placing(redistribute, placements=tuple(placements)), node)

    def _to_local(self, node: Node, gradient: Any) -> Node:
        to_local: Any = type(value(node)).to_local  # type: ignore[attr-defined]
        return self.function(Placing(to_local, grad_placements=tuple(gradient)), node)

    # ------------------------------------------------------------ to rows and back

    def _rows(self, node: Node) -> Node:
        """``[..., D, ...]`` as ``[N, D]``."""
        dim, rank = self.match.loss.dim, value(node).dim()
        if rank == 1:
            return self.method("unsqueeze", node, 0)
        if dim != rank - 1:
            node = self.method("movedim", node, dim, -1)
        return node if rank == 2 else self.method("flatten", node, 0, -2)

    def _target(self, loss: Loss) -> Node | None:
        target = loss.target
        if target is None or loss.probabilities:
            return target and self._rows(target)
        if loss.wraps:
            sharding = self.match.sharding
            v = self.size(self.weight, 0) if sharding is None else sharding.classes
            if loss.wraps == "all":
                target = self.method("remainder", target, v)
            else:
                negative, added = self.method("lt", target, 0), self.method("add", target, v)
                target = self.function(torch.where, negative, added, target)
        return target if value(target).dim() == 1 else self.method("flatten", target)

    def _hand_over(self, out: Node, position: int, loss: Loss, name: str, scalar: bool) -> None:
        """Replaces a loss by one output of the operator, in the loss's shape and dtype."""
        old = loss.node
        new = self.graph.call_function(operator.getitem, (out, position), name=name)
        new.meta["stack_trace"] = old.meta.get("stack_trace")
        flat = value(self.x).new_empty(() if scalar else value(self.x).shape[:1])
        new.meta["example_value"] = flat.to(compute_dtype(self.dtype))
        if not scalar and value(self.shaped).dim() != 2:
            like = self.method("select", self.shaped, loss.dim, 0)
            new = self.method("view_as", new, like)
        if loss.keepdim:
            new = self.method("unsqueeze", new, loss.dim)
        if loss.negative:
            new = self.method("neg", new)
        new, _ = cast(self.graph, new, value(old).dtype, old)
        if is_dtensor(value(old)):
            new = self._as_dtensor(new, old, scalar)
        new.meta["example_value"] = old.meta["example_value"]
        old.replace_all_uses_with(new)

    def _as_dtensor(self, new: Node, old: Node, scalar: bool) -> Node:
        """The loss as a DTensor, with the placements of the old loss."""
        sharding = self.match.sharding
        assert sharding is not None
        placements = sharding.sums() if scalar else self.row_placements
        to_dtensor = Placing(as_dtensor, placements=tuple(placements))
        new = self.function(to_dtensor, new, self.whole_weight)
        return self._placed(new, sharding.loss_placements(placements_of(value(old))))

    def _cast(self, operand: Node) -> Node:
        return self.cast(operand, self.dtype, self.match.chain.linear.node)
