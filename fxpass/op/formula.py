"""Runs a loop whose function of rows has a formula, by kernels that are written for formulas.

In: the parts of a loop. Out: a :class:`Formulas`, or None; a :class:`FormulaRun` returns the
results of the loop. What the formula reads of rows, and what results are made of its outputs, is
computed beside, for all rows at once::

    %a = gather(_log_softmax(%z, 1), 1, %c);  return where(%mask, %a, 0), ...
    ->  pick of the head x, weight at %c;  where(%mask, pick, 0)

Incoming gradients that are known before the outputs are weights of a total, whose gradients forward
computes. Others wait for the outputs: then the logits are computed twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fxpass.formula.dtypes import compute_dtype
from fxpass.formula.operands import Operands, Outputs, empty
from fxpass.formula.outputs import OF_PICKS, PRODUCTS, Output, lines_of
from fxpass.formula.reductions import Reductions
from fxpass.lower.formula import Formula, formula_of
from fxpass.lower.records import Unknown
from fxpass.op import run as of_head
from fxpass.op.checks import check
from fxpass.op.known import KnownValues
from fxpass.plan.choice import Choice
from fxpass.region.loop import Loop
from fxpass.region.split import Split

log = logging.getLogger(__name__)


def formulas_of(loop: Loop, split: Split) -> Formulas | None:
    """The formula of a loop; None if it has none."""
    try:
        return Formulas(loop, split)
    except Unknown as no:
        log.debug("no formula: %s", no)
        return None


class Formulas:
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
            if group.made != formula.gradient:
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
        wide = compute_dtype(self.head.logits.dtype)
        unrounded = tuple(
            name
            for name, i in self.products.items()
            if name != "bias" and narrow and loop.dtype(i) == wide
        )
        incoming = tuple(formula.incoming)
        outputs = tuple(formula.outputs)
        total = incoming if formula.known and self.products else ()
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
        """How a run goes."""
        reason = "the gradients are computed with the outputs"
        if not self.products:
            reason = "there are no gradients"
        elif not self.spec.total:
            reason = "the rows' incoming gradients are made of the outputs"
        return Choice(reason, n, d, v, self.head.logits.dtype, device, self.spec)


def _order(output: Output) -> tuple[bool, str]:
    return output == "argmax", str(output)


def _is_transpose(before: Graph, one: int, other: int) -> bool:
    """Whether an invariant is the transpose of another one."""
    results: Any = before.output_node().args[0]
    (a, flips), (b, stays) = (_upright(results[i]) for i in (one, other))
    return a is b and flips != stays


_TURNS = (torch.ops.aten.t.default, torch.ops.aten.permute.default, torch.ops.aten.transpose.int)


def _upright(node: Node) -> tuple[Node, bool]:
    turned = False
    while node.target in _TURNS:
        dims: Any = node.args[1] if node.target is _TURNS[1] else [1, 0]
        turned ^= [d % 2 for d in dims] == [1, 0]
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    return node, turned


class FormulaRun:
    """One run, of all rows.

    Args:
        of: the loop.
        x, weight, bias: of the head: ``[N, D]``, ``[V, D]`` and ``[V]``.
        inputs: of the function of rows, but for the logits.

    Attributes:
        operands: what the kernels read.
    """

    def __init__(
        self,
        of: Formulas,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: Sequence[Tensor],
    ) -> None:
        self.of = of
        self.formula = of.formula
        self.spec = of.spec
        self.dtype = compute_dtype(x.dtype)
        self.values = KnownValues(self.formula.found, inputs, x.shape[0], self.dtype, x.device)
        picks = [self.values.index(node) for node in self.formula.picks]
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
        made = self.values.given(self.formula.given[i], weight.shape[0])
        return made.to(self.dtype) if i in self.spec.weights else made  # else it may be a mask

    def _bias(self, bias: Tensor | None, weight: Tensor) -> Tensor | None:
        """The bias with what the program adds, in the dtype of sums."""
        for symbol, factor in self.formula.biases:
            more = self.values.given(symbol, weight.shape[0]).to(self.dtype)
            more = more * float(factor) if factor != 1 else more
            bias = more if bias is None else bias.to(self.dtype) + more
        if bias is None and "bias" in self.of.products:
            bias = weight.new_zeros(weight.shape[0], dtype=self.dtype)
        if bias is not None and bias.dtype not in (weight.dtype, self.dtype):
            bias = bias.to(self.dtype)
        return bias

    def _scale(self, x: Tensor) -> Tensor | None:
        if self.formula.base.scale == 1:
            return None
        return self.values.expr(self.formula.base.scale).reshape(-1).expand(x.shape[0]).contiguous()

    def results(self, runs: bool = True) -> dict[int, Tensor]:
        """The results of the loop, by number; uninitialised where no kernel ``runs``."""
        forward, backward = (of_head.forward, of_head.backward) if runs else (_empty, _none)
        spec = self.spec
        operands = self.operands
        if spec.total:
            operands = operands._replace(coef=self._incoming(spec.total))
        out, grads = forward(operands, spec)
        self._tell(out)
        if spec.gradients and not spec.total:
            trained = spec.of_backward.rows
            grads = backward(operands, spec, out, self._incoming(trained))
        found = {i: grads.pop(name) for name, i in self.of.products.items()}
        kept = self.of.split.results
        for number, node in zip(kept, self.formula.results, strict=False):
            if number not in found:
                made = self.values.node(node)
                of_several = made.untyped_storage().nbytes() > made.nbytes  # lines of outputs
                found[number] = made.clone() if of_several else made
        return found

    def _tell(self, out: Any) -> None:
        """Gives the values the outputs."""
        columns = dict(_columns(self.spec.rows, out.rows, sum(self.counts)))
        columns |= _columns(self.spec.indices, out.indices, 0)
        for output, symbol in self.formula.outputs.items():
            if symbol is not None:
                self.values.outputs[symbol] = columns[output]
        for symbol, index, output in self.formula.picked:
            if output not in columns:  # read on the way, and cancelled
                continue
            at = self.formula.picks.index(index)
            first = sum(self.counts[:at])
            self.values.outputs[symbol] = columns[output][:, first : first + self.counts[at]]

    def _incoming(self, outputs: Sequence[Output]) -> Tensor:
        """The incoming gradients of outputs, ``[lines, N]``."""
        n = self.operands.x.shape[0]
        lines = list[Tensor]()
        for output in outputs:
            exprs = self.formula.incoming[output]
            if output not in OF_PICKS:
                lines.append(self.values.expr(exprs[None]).expand(n, 1))
                continue
            for index, count in zip(self.formula.picks, self.counts, strict=True):
                made = self.values.expr(exprs[index]) if index in exprs else None
                if made is None:
                    made = torch.zeros((), dtype=self.dtype, device=self.operands.x.device)
                lines.append(made.expand(n, count))
        found = torch.cat(lines, 1) if len(lines) > 1 else lines[0]
        return found.t().contiguous()


def _empty(operands: Operands, spec: Reductions) -> tuple[Outputs, dict[str, Tensor]]:
    check(operands, spec)
    return empty(operands, spec), _none(operands, spec) if spec.total else {}


def _none(operands: Operands, spec: Reductions, *_: Any) -> dict[str, Tensor]:
    return {k: t.new_empty(t.shape) for k, t in of_head.trained(operands, spec).items()}


def _columns(
    outputs: Sequence[Output], lines: Tensor, picks: int
) -> Iterator[tuple[Output, Tensor]]:
    """The columns ``[N, lines]`` of each output."""
    first = 0
    for output in outputs:
        count = lines_of(output, picks)
        yield output, lines[first : first + count].t()
        first += count
