"""Runs a loop whose function of rows has a formula, by kernels that are written for formulas.

In: the parts of a loop. Out: a :class:`LoopFormula`, or None; a :class:`FormulaRun` returns the
results of the loop. The operands of the formula that have rows, and results that are computed from
its outputs, are computed for all rows at once::

    %a = gather(_log_softmax(%z, 1), 1, %c);  return where(%mask, %a, 0), ...
    ->  pick of the head x, weight at %c;  where(%mask, pick, 0)

Incoming gradients that do not depend on the outputs are weights of a total, whose gradients forward
computes. Others need the outputs: then the logits are computed twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fxpass.formula.dtypes import compute_dtype
from fxpass.formula.operands import Operands, Outputs, empty_outputs
from fxpass.formula.outputs import OF_PICKS, PRODUCTS, Output, line_count
from fxpass.formula.reductions import Reductions
from fxpass.lower.formula import Formula, formula_of
from fxpass.lower.records import Unknown
from fxpass.op.checks import check
from fxpass.op.formula_values import FormulaValues
from fxpass.op.run import head_gradients, reduce_head, trained
from fxpass.plan.choice import Choice
from fxpass.region.loop import Loop
from fxpass.region.split import Split

log = logging.getLogger(__name__)


def loop_formula(loop: Loop, split: Split) -> LoopFormula | None:
    """The formula of a loop; None if it has none."""
    try:
        return LoopFormula(loop, split)
    except Unknown as no:
        log.debug("no formula: %s", no)
        return None


class LoopFormula:
    """A loop that has a formula.

    Attributes:
        formula: of its function of rows.
        spec: of forward, with all gradients that the loop returns.
    """

    def __init__(self, loop: Loop, split: Split) -> None:
        self.loop = loop
        self.split = split
        if len(split.heads) != 1 or len(split.groups) > 1:
            raise Unknown("has several heads")
        if loop.merges:
            raise Unknown("reduces the rows of each class")
        (self.head,) = split.heads
        self.formula: Formula = formula_of(split.function)
        self.products = self._products()
        self.spec = self._spec()

    def _products(self) -> dict[str, int]:
        """The results of the loop that are gradients of the head's operands, by name."""
        formula = self.formula
        split = self.split
        found = dict[str, int]()
        for group in split.groups:
            if group.output != formula.gradient:
                raise Unknown("multiplies another gradient")
            for tail in group.tails:
                name = "x" if tail.weight is not None else "weight"
                ours = tail.operand == self.head.x
                if tail.weight is not None:
                    ours = _is_transpose(split.before, self.head.weight, tail.weight)
                if not ours or name in found:
                    raise Unknown("multiplies a gradient by another tensor")
                found[name] = tail.result
        if formula.gradient is not None and not found:
            raise Unknown("returns the gradient of logits")
        of_function = [n for n, i in enumerate(split.results) if n in formula.columns]
        if len(of_function) != len(formula.columns) or len(of_function) > 1:
            raise Unknown("returns several sums of a gradient")
        if of_function:
            found["bias"] = split.results[of_function[0]]
        return {name: found[name] for name in PRODUCTS if name in found}

    def _spec(self) -> Reductions:
        formula = self.formula
        loop = self.loop
        narrow = self.head.logits.dtype.itemsize < 4
        sum_dtype = compute_dtype(self.head.logits.dtype)
        unrounded = tuple(
            name
            for name, i in self.products.items()
            if name != "bias" and narrow and loop.dtype(i) == sum_dtype
        )
        incoming = tuple(formula.incoming)
        outputs = tuple(formula.outputs)
        total = incoming if formula.gradients_in_forward and self.products else ()
        if not total:
            outputs = (*outputs, *(o for o in incoming if o not in outputs))
        outputs = tuple(sorted(outputs, key=_order))
        backward = self.products and not total
        detached = (o for o in outputs if backward and o != "argmax" and o not in incoming)
        return Reductions(
            outputs,
            formula.transform,
            tuple(self.products),
            total,
            memory_mb=loop.memory_mb,
            unrounded=unrounded,
            accumulate=loop.accumulate,
            detached=tuple(detached),
        )

    def choice(self, n: int, d: int, v: int, device: torch.device) -> Choice:
        """The strategy of a run, and its reason."""
        reason = "the gradients are computed with the outputs"
        if not self.products:
            reason = "there are no gradients"
        elif not self.spec.total:
            reason = "the rows' incoming gradients are made of the outputs"
        return Choice(reason, n, d, v, self.head.logits.dtype, device, self.spec)


def _order(output: Output) -> tuple[bool, str]:
    return output == "argmax", str(output)


def _is_transpose(before: Graph, one: int, other: int) -> bool:
    """Tells if an invariant is the transpose of another one."""
    results: Any = before.output_node().args[0]
    matrix, transposed = _without_transposes(results[one])
    other_matrix, other_transposed = _without_transposes(results[other])
    return matrix is other_matrix and transposed != other_transposed


_PERMUTE = torch.ops.aten.permute.default
_TRANSPOSES = (torch.ops.aten.t.default, _PERMUTE, torch.ops.aten.transpose.int)


def _without_transposes(node: Node) -> tuple[Node, bool]:
    """The matrix of which a node is a view, and whether the view is its transpose."""
    transposed = False
    while node.target in _TRANSPOSES:
        dims: Any = node.args[1] if node.target is _PERMUTE else [1, 0]
        transposed ^= [d % 2 for d in dims] == [1, 0]
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    return node, transposed


class FormulaRun:
    """One run, of all rows.

    Args:
        loop: that is run.
        x, weight, bias: of the head: ``[N, D]``, ``[V, D]`` and ``[V]``.
        inputs: of the function of rows, but for the logits.

    Attributes:
        operands: of the kernels.
    """

    def __init__(
        self,
        loop: LoopFormula,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: Sequence[Tensor],
    ) -> None:
        self.loop = loop
        self.formula = loop.formula
        self.spec = loop.spec
        self.dtype = compute_dtype(x.dtype)
        self.values = FormulaValues(self.formula.reading, inputs, x.shape[0], self.dtype, x.device)
        picks = [self.values.index_value(node) for node in self.formula.picks]
        self.counts = [p.shape[1] for p in picks]
        index = torch.cat(picks, 1) if len(picks) > 1 else picks[0] if picks else None
        if index is not None and index.shape[1] == 1:
            index = index.squeeze(1)
        reads = any(o in OF_PICKS for o in (*self.spec.outputs, *self.spec.total))
        self.operands = Operands(
            x,
            weight,
            self._bias(bias, weight),
            self._scale(x),
            index if reads else None,
            tuple(self._given(i, weight) for i in range(len(self.formula.given))),
        )

    def _given(self, i: int, weight: Tensor) -> Tensor:
        value = self.values.given_value(self.formula.given[i], weight.shape[0])
        weighs = i in self.spec.weight_positions  # else the value may be a mask
        return value.to(self.dtype) if weighs else value

    def _bias(self, bias: Tensor | None, weight: Tensor) -> Tensor | None:
        """The bias with the terms that the program adds, in the dtype of sums."""
        for symbol, factor in self.formula.biases:
            term = self.values.given_value(symbol, weight.shape[0]).to(self.dtype)
            term = term * float(factor) if factor != 1 else term
            bias = term if bias is None else bias.to(self.dtype) + term
        if bias is None and "bias" in self.loop.products:
            bias = weight.new_zeros(weight.shape[0], dtype=self.dtype)
        if bias is not None and bias.dtype not in (weight.dtype, self.dtype):
            bias = bias.to(self.dtype)
        return bias

    def _scale(self, x: Tensor) -> Tensor | None:
        if self.formula.base.scale == 1:
            return None
        scale = self.values.expression_value(self.formula.base.scale)
        return scale.reshape(-1).expand(x.shape[0]).contiguous()

    def results(self, runs: bool = True) -> dict[int, Tensor]:
        """The results of the loop, by number; uninitialised where no kernel ``runs``."""
        outputs_of = reduce_head if runs else _uninitialised
        gradients_of = head_gradients if runs else _uninitialised_gradients
        spec = self.spec
        operands = self.operands
        if spec.total:
            operands = operands._replace(coef=self._incoming(spec.total))
        out, grads = outputs_of(operands, spec)
        self._set_outputs(out)
        if spec.gradients and not spec.total:
            incoming = self._incoming(spec.of_backward.rows)
            grads = gradients_of(operands, spec, out, incoming)
        results = {i: grads.pop(name) for name, i in self.loop.products.items()}
        numbers = self.loop.split.results
        for number, node in zip(numbers, self.formula.results, strict=False):
            if number not in results:
                value = self.values.node_value(node)
                is_part = value.untyped_storage().nbytes() > value.nbytes  # a line of outputs
                results[number] = value.clone() if is_part else value
        return results

    def _set_outputs(self, out: Outputs) -> None:
        """Sets the symbols of outputs."""
        columns = dict(_columns(self.spec.rows, out.rows, sum(self.counts)))
        columns |= _columns(self.spec.indices, out.indices, 0)
        for output, symbol in self.formula.outputs.items():
            if symbol is not None:
                self.values.outputs[symbol] = columns[output]
        for symbol, pick in self.formula.picked_outputs.items():
            if pick.name not in columns:  # its terms have cancelled
                continue
            at = self.formula.picks.index(pick.index)
            first = sum(self.counts[:at])
            picked = columns[pick.name][:, first : first + self.counts[at]]
            self.values.outputs[symbol] = picked

    def _incoming(self, outputs: Sequence[Output]) -> Tensor:
        """The incoming gradients of outputs, ``[lines, N]``."""
        n = self.operands.x.shape[0]
        lines = list[Tensor]()
        for output in outputs:
            exprs = self.formula.incoming[output]
            if output not in OF_PICKS:
                lines.append(self.values.expression_value(exprs[None]).expand(n, 1))
                continue
            for index, count in zip(self.formula.picks, self.counts, strict=True):
                if index in exprs:
                    line = self.values.expression_value(exprs[index])
                else:
                    line = torch.zeros((), dtype=self.dtype, device=self.operands.x.device)
                lines.append(line.expand(n, count))
        return (torch.cat(lines, 1) if len(lines) > 1 else lines[0]).t().contiguous()


def _uninitialised(operands: Operands, spec: Reductions) -> tuple[Outputs, dict[str, Tensor]]:
    check(operands, spec)
    return empty_outputs(operands, spec), _uninitialised_gradients(
        operands, spec
    ) if spec.total else {}


def _uninitialised_gradients(operands: Operands, spec: Reductions, *_: Any) -> dict[str, Tensor]:
    return {k: t.new_empty(t.shape) for k, t in trained(operands, spec).items()}


def _columns(
    outputs: Sequence[Output], lines: Tensor, picks: int
) -> Iterator[tuple[Output, Tensor]]:
    """The columns ``[N, lines]`` of each output."""
    first = 0
    for output in outputs:
        count = line_count(output, picks)
        yield output, lines[first : first + count].t()
        first += count
