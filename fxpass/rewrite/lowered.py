"""Inserts calls of ``fxpass::class_reductions`` for row functions that have a normal form.

In: a :class:`fxpass.capture.capture.RowCall` and its :class:`fxpass.lower.normal.Normal`. Out: the
operator's call, and nodes that compute the row function's results of its outputs::

    %log = _log_softmax(%z, 1)              %out = class_reductions(%x, %w, ..., 'r6 outputs=pick')
    %a = gather(%log, 1, %c)          ->    %rows = select(getitem(%out, 0), 0, 0)
    %b = exp(%a - %old)                     %b = exp(%rows - %old)
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from sympy import Symbol
from torch.fx import Node

import fxpass.op.reductions  # noqa: F401, registers the operator
from fxpass.capture.capture import RowCall
from fxpass.capture.function import trained
from fxpass.capture.values import Leaf
from fxpass.graph.nodes import hint, value
from fxpass.lower.normal import Normal
from fxpass.lower.records import ClassOperand, Picked, RowOperand, Summed
from fxpass.op.kept import saved_logits
from fxpass.plan.choice import Choice, choose
from fxpass.rewrite.known import rows_of
from fxpass.rewrite.row_nodes import RowNodes
from fxpass.settings import Settings
from fxpass.spec.dtypes import LOW_PRECISION, compute_dtype
from fxpass.spec.outputs import IN_TOTAL, OF_PICKS, PRODUCTS, Moment, Output
from fxpass.spec.reductions import Reductions

A: Any = torch.ops.aten


@dataclass(frozen=True)
class Lowered:
    """A call that is to be inserted.

    Attributes:
        call: what it computes.
        normal: its normal form.
        settings: the user's.
        others: the rows of other calls that make a gradient of the same weight.
    """

    call: RowCall
    normal: Normal
    settings: Settings
    others: tuple[Any, ...] = ()

    @property
    def gradients(self) -> tuple[str, ...]:
        """The operands that get a gradient, as in a spec."""
        normal, head = self.normal, self.call.leaves[0].head
        if head is None or not normal.trained:
            return ()
        attached = {s for s, n in normal.tables.nodes.items() if normal.is_attached(n)}
        read = {o.weight for _, o in normal.tables.outputs.values() if isinstance(o, Summed)}
        of_operands = {
            "x": head.grad and head.x.trained,
            "weight": head.grad and head.weight.trained,
            "bias": (head.grad and head.bias is not None and head.bias.trained)
            or any(s in attached for s, _ in normal.biases),
            "scale": bool(normal.base.scale.free_symbols & attached),
        }
        of_transform = normal.base.transform.free_symbols
        for i, symbol in enumerate(normal.given):
            of_operands[f"given{i}"] = symbol in attached and symbol in read | of_transform
        return tuple(name for name, needs in of_operands.items() if needs)


def trained_operands(leaf: Leaf) -> list[bool]:
    """Whether each of the operator's tensors for an input needs a gradient."""
    if leaf.head is None:
        return [trained(leaf)]
    head = leaf.head
    operands = (head.x, head.weight, head.bias)
    return [head.grad and t.trained for t in operands if t is not None]


class Inserted(RowNodes):
    """What one call becomes in a graph.

    Attributes:
        node: the operator's call.
        lines: for each output of the spec, a node ``[N]``, or ``[K, N]`` of picks.
        logits: the logits, if they exist; else None.
        unsaved: operands that backward reads, and autograd of the program may not save.
        made_rows: the results of the row function, ``[N, ...]``.
        choice: how it runs.
    """

    def __init__(
        self,
        emitter: Any,
        lowered: Lowered,
        leaves: list[list[Node]],
        unsaved: list[Node],
        logits: Node | None = None,
    ) -> None:
        super().__init__(emitter, lowered.normal, leaves)
        self.logits = logits
        self.lowered, self.trains, bias = lowered, bool(lowered.gradients), leaves[0][2:]
        self.bias = bias[0] if bias else None
        self.lines: dict[Output, Node] = {}
        self.operands_first()
        self.node = self._called()
        gradients = self.choice.spec.gradients if not self.choice.save_logits else ()
        # as autograd of the linear, which saves x for the weight and the weight for x
        self.unsaved = [*unsaved, *bias] if gradients else []
        self.unsaved += [self.x] if gradients and "weight" not in gradients else []
        self.unsaved += [self.weight] if gradients and "x" not in gradients else []
        self._unpack()
        self.made_rows = [self.result(node) for node in self.normal.results]
        self.made = list(emitter.made)

    # ------------------------------------------------------------ the operator's call

    def _called(self) -> Node:
        normal, call, head = self.normal, self.call, self.lowered.call.leaves[0].head
        assert head is not None
        gradients = self.lowered.gradients
        wide = self.emitter.wide(self.lowered.call.leaves[0], compute_dtype(self.dtype))
        wide = {k: t for k, t in wide.items() if k in gradients and self.dtype in LOW_PRECISION}
        bias = self.bias
        for node in normal.base.taken:
            self.weight = self._taken(self.weight, node)
            bias = bias and self._taken(bias, node)
            wide |= {k: self._taken(t, node) for k, t in wide.items() if k == "weight"}
        bias = self._bias(bias)
        scale = self._scale()
        picks = [self.index(index) for index in normal.picks]
        counts = [value(p).shape[1] for p in picks]
        index = None
        if picks:
            index = picks[0] if len(picks) == 1 else call(torch.cat, picks, 1)
            index = call(A.squeeze.dim, index, 1) if counts == [1] else index
        given = [self._given(i, symbol) for i, symbol in enumerate(normal.given)]
        x, weight, trains = self.x, self.weight, bool(gradients)
        if not trains:
            x, weight, bias, scale = (t and self.cut(t) for t in (x, weight, bias, scale))
            given = [self.cut(t) for t in given]
        self.choice = self._choice(gradients, tuple(wide))
        self.counts = counts
        operands, logits = (x, weight, bias, scale, index, given), self.logits
        if self.ranks.group is not None:
            return self._of_shard(operands)
        named = {f"wide_{name}": t for name, t in wide.items()}
        op = torch.ops.fxpass.class_reductions.default
        return call(op, *operands, None, logits, self.choice.spec.text(), **named)

    def _of_shard(self, operands: tuple[Any, ...]) -> Node:
        """The call of a vocabulary shard, over the classes of all ranks."""
        from fxpass.op import sharded  # not every PyTorch has torch.distributed

        sharding, logits = self.ranks.sharding, self.logits
        if self.choice.save_logits:
            logits = self.call(saved_logits, *operands[:3])
        of_rank = {"first": sharding.first, "classes": sharding.classes, "group": sharding.group}
        function, text = sharded.class_reductions, self.choice.spec.text()
        return self.call(function, *operands, logits, text, **of_rank)

    def _choice(self, gradients: tuple[str, ...], wide: tuple[str, ...]) -> Choice:
        normal, settings = self.normal, self.lowered.settings
        rows = [o for o in normal.outputs if o not in ("argmax",)]
        detached = tuple(o for o in rows if o not in normal.trained) if gradients else ()
        detached = () if self.ranks.sharding is not None else detached
        spec = Reductions(
            tuple(normal.outputs),
            normal.transform,
            gradients,
            memory_mb=settings.memory_mb,
            detached=detached,
            unrounded=wide,
            accumulate=settings.accumulate,
        )
        return self._chosen_for(spec)

    def _chosen_for(self, spec: Reductions) -> Choice:
        """The choice for a spec, with a total or without one."""
        (n, d), v = value(self.x).shape, value(self.weight).shape[0]
        sizes = n, hint(d), max(1, hint(v)), self.dtype, value(self.x).device
        waiting = replace(spec, outputs=spec.outputs or spec.total, total=())
        total = spec if spec.total else None
        others = self.lowered.others if "weight" in spec.gradients else ()
        exist, sharded = self.logits is not None, self.ranks.group is not None
        strategy = self.lowered.settings.strategy
        return choose(*sizes, total, waiting, strategy, exist, others, sharded)

    def _taken(self, operand: Node, node: Node) -> Node:
        """The classes of an operand ``[V, ...]`` that a node takes of logits ``[n, V]``."""
        packet, args = node.target.overloadpacket, node.args  # type: ignore[union-attr]
        if packet is A.index:
            index = next(i for i in args[1] if i is not None)  # type: ignore[union-attr]
            return self.call(A.index.Tensor, operand, [self.operand(index)])
        rest = [self.operand(a) if isinstance(a, Node) else a for a in args[2:]]
        return self.call(node.target, operand, 0, *rest)

    def _bias(self, bias: Node | None) -> Node | None:
        """The bias with what the program adds, in f32: it may add it to up-cast logits."""
        dtype = compute_dtype(self.dtype)
        for symbol, factor in self.normal.biases:
            more = self.wide(self.operand(self.normal.tables.nodes[symbol]))
            more = self.ranks.classes_here(self.call(torch.reshape, more, [-1]))
            if factor != 1:
                more = self.call(torch.mul, more, float(factor))
            bias = more if bias is None else self.call(torch.add, self.wide(bias), more)
        if bias is not None and value(bias).dtype not in (self.dtype, dtype):
            bias = self.call(A._to_copy.default, bias, dtype=dtype)
        return bias

    def _scale(self) -> Node | None:
        if self.normal.base.scale == 1:
            return None
        rows = self.ranks.of_all_ranks(self.arithmetic(self.normal.base.scale))
        scale = self.call(A._to_copy.default, rows, dtype=compute_dtype(self.dtype))
        return scale if value(scale).dim() else self.call(A.expand.default, scale, [self.rows()])

    def _given(self, i: int, symbol: Symbol) -> Node:
        """An operand of the transform or of a moment, as ``[V]`` or ``[N, V]``."""
        node = self.operand(self.normal.tables.nodes[symbol])
        if isinstance(symbol, RowOperand):
            classes = self.emitter.size(value(self.weight).shape[0])
            node = self.wide(node)
            node = self.call(torch.reshape, node, [-1, 1])
            node = self.call(A.expand.default, node, [self.rows(), classes])
        elif isinstance(symbol, ClassOperand):
            node = self.call(torch.reshape, node, [-1])
        elif value(node).dim() != 2:
            node = self.call(torch.reshape, node, [self.rows(), -1])
        node = self.ranks.classes_here(node)
        weights = {o.weight for o in self.normal.outputs if isinstance(o, Moment)}
        mask = value(node).dtype == torch.bool and i not in weights
        if not (value(node).is_floating_point() or mask):
            node = self.call(A._to_copy.default, node, dtype=compute_dtype(self.dtype))
        return node if f"given{i}" in self.lowered.gradients else self.cut(node)

    # ------------------------------------------------------------ its outputs

    def _lines(self) -> None:
        """A node for each line of the operator's outputs."""
        spec, call = self.choice.spec, self.call
        for name, outputs in (("rows", spec.rows), ("indices", spec.indices)):
            if not outputs:
                continue
            names = ("rows", "indices") if self.ranks.group is not None else spec.results
            tensor, at = call(operator.getitem, self.node, names.index(name)), 0
            for output in outputs:
                count = sum(map(hint, self.counts)) if output in OF_PICKS else 1
                if count == 1:
                    line = call(A.select.int, tensor, 0, at)
                else:
                    line = call(torch.narrow, tensor, 0, at, count)
                if output in self.normal.trained and not spec.total:
                    value(line).requires_grad_()
                self.lines[output] = line
                at += count
                self.shared.append(line)

    def _unpack(self) -> None:
        """A node for each symbol of an output."""
        self._lines()
        for output, symbol in self.normal.outputs.items():
            if symbol is not None:
                self.symbols[symbol] = self.lines[output]
        for symbol, (_, output) in self.normal.tables.outputs.items():
            name = ("at" if output.logit else "pick") if isinstance(output, Picked) else None
            if not isinstance(output, Picked) or name not in self.lines:
                continue
            if output.index in self.normal.picks:
                self.symbols[symbol] = self._pick(self.lines[name], output.index)

    def _pick(self, lines: Node, index: Node) -> Node:
        """The lines of one index tensor: ``[N]``, or ``[N, K]``."""
        if value(lines).dim() == 1:
            return lines
        at = self.normal.picks.index(index)
        first, count = sum(map(hint, self.counts[:at])), hint(self.counts[at])
        if count == 1:
            return self.call(A.select.int, lines, 0, first)
        some = lines if len(self.counts) == 1 else self.call(torch.narrow, lines, 0, first, count)
        return self.call(A.t.default, some)

    # ------------------------------------------------------------ gradients in forward

    @property
    def results(self) -> list[Node]:
        """The lines of all outputs."""
        return list(self.lines.values())

    @property
    def outputs(self) -> list[Node]:
        """The lines that may be part of a total: all that have a gradient, or none of them; without
        gradients, all floats."""
        spec = self.choice.spec
        if self.ranks.sharding is not None:
            return []  # the ranks exchange what gradients need after forward
        trained = [o for o in spec.rows if o not in spec.detached]
        fits = all(isinstance(o, Moment) or o in IN_TOTAL for o in trained)
        fits = fits and not spec.total and set(spec.gradients) <= set(PRODUCTS)
        return [self.lines[o] for o in trained] if fits else []

    def detach(self, results: Collection[Node]) -> None:
        """Backward does not read outputs that no gradient reaches."""
        spec = self.choice.spec
        lost = {o for o, line in self.lines.items() if line in results}
        if not spec.gradients or spec.total or lost.issuperset(spec.rows):
            return
        if self.ranks.sharding is not None:
            return
        detached = tuple(o for o in spec.rows if o in lost | {*spec.detached})
        args = list(self.node.args)
        self.choice = replace(self.choice, spec=replace(spec, detached=detached))
        args[8] = self.choice.spec.text()
        self.node.args = tuple(args)

    def zeros(self, make: Any, result: Node) -> Node:
        """Zeros for a line."""
        sizes = [*value(result).shape[:-1], rows_of(make, self.x)]
        return make(A.new_zeros.default, self.x, sizes, dtype=value(result).dtype)

    def again(
        self, make: Any, coefs: Sequence[Node], read: Collection[Node]
    ) -> tuple[dict[Node, Node], Node] | None:
        """The call with a total; see :class:`fxpass.rewrite.known.Totalled`."""
        self.emitter.made.clear()
        waiting = self.choice.spec
        total = tuple(o for o in waiting.rows if o not in waiting.detached)
        outputs = tuple(o for o in waiting.outputs if self.lines[o] in read)
        spec = replace(waiting, outputs=outputs, total=total, detached=())
        choice = self._chosen_for(spec)
        if not choice.spec.total:
            self.choice = replace(self.choice, reason=choice.reason)
            return None
        lines = [c if value(c).dim() == 2 else make(A.unsqueeze.default, c, 0) for c in coefs]
        coef = lines[0] if len(lines) == 1 else make(torch.cat, lines)
        old, args = self.lines, list(self.node.args)
        args[6], args[8] = coef, choice.spec.text()
        self.choice, self.lines = choice, {}
        self.node = make(self.node.target, *args, **self.node.kwargs)
        self._lines()
        self.made = list(self.emitter.made)
        place = choice.spec.results.index("total")
        return {old[o]: new for o, new in self.lines.items()}, make(
            operator.getitem, self.node, place
        )

    def tidy(self) -> None:
        """Erases what was inserted and is not read."""
        read = {self.node, *self.lines.values(), *self.made_rows}
        for node in sorted(self.made, reverse=True):
            if not node.users and node not in read:
                self.emitter.graph.erase_node(node)
        self.made = [node for node in self.made if not node._erased]

    def without_logits(self) -> None:
        """Computes logits again that the user may write to before backward reads them."""
        sharded = self.ranks.group is not None
        args = list(self.node.args)
        args[6 if sharded else 7] = None
        self.node.args, self.logits = tuple(args), None
        why = "the logits may be written to before backward"
        self.choice = replace(self.choice, logits_exist=False, reason=why)

    def keep(self) -> None:
        """Gives backward copies of operands that autograd of the program may not save: what the
        user writes to them before backward is not seen."""
        read, todo = {self.node}, [self.node]
        while todo:
            sources = [n for n in todo.pop().all_input_nodes if n in self.made and n not in read]
            read.update(sources)
            todo += sources
        for operand in dict.fromkeys(self.unsaved):
            users = sorted(user for user in operand.users if user in read)
            if not users:
                continue
            with self.emitter.graph.inserting_before(users[0]):
                copy = self.call(torch.ops.fxpass.kept.default, operand)
            for user in users:
                user.replace_input_with(operand, copy)
