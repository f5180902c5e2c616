"""Runs the parts of a loop over rows, a chunk of rows at a time.

In: a prepared loop and its tensors. Out: its results. A chunk takes, in this order: the products of
heads, into one buffer for each; the function of rows; the products with its results::

    >>> text = '''rows rows=0 sums=0 wide= memory_mb=0 compiled=0
    ... %0 = input float32[n, 2]
    ... %1 = input float32[2, 3]
    ... %2 = aten.mm.default(%0, %1)
    ... %3 = aten.t.default(%2)
    ... %4 = aten.mm.default(%3, %0)
    ... return %4'''
    >>> tensors = [torch.ones(4, 2), torch.ones(2, 3)]
    >>> run_loop(prepared(text, torch.device("cpu")), tensors, {"n": 4})
    [tensor([[8., 8.],
            [8., 8.],
            [8., 8.]])]

Sums are added up in f32 (f64 for f64), in the order of the chunks, and rounded once at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowADInplaceOrView, _DisableAutocast
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from fxpass.aten.gemm import product_dtype_of, slice_of, slices
from fxpass.aten.products import Scratch, add_products, write_logits
from fxpass.formula.dtypes import compute_dtype
from fxpass.formula.operands import Operands
from fxpass.op.formula import FormulaRun, LoopFormula
from fxpass.op.ignored import WORTH_A_WAIT, WORTH_COPIES, contributing_index
from fxpass.op.prepared_loop import PreparedLoop
from fxpass.plan.devices import on_device
from fxpass.plan.regions import RegionPlan
from fxpass.region.broadcast import broadcastable, first_values, is_broadcast
from fxpass.region.merging import MERGES, merged_dtype
from fxpass.region.run import in_own_thread
from fxpass.region.split import Group, HeadOperands

log = logging.getLogger(__name__)
_prepared: dict[tuple[Any, ...], PreparedLoop] = {}


def prepared(text: str, device: torch.device) -> PreparedLoop:
    """A loop on a device; the same for the same text.

    Raises:
        ValueError: the text is none of a loop.
    """
    # Inductor makes other kernels where results must be the same in every run
    key = text, device, torch.are_deterministic_algorithms_enabled()
    if key not in _prepared:
        loop = PreparedLoop(text, device)
        if loop.formula is not None and not in_own_thread(lambda: _fits(loop)):
            loop.formula = None
        _prepared.setdefault(key, loop)
    return _prepared[key]


def _fits(prepared: PreparedLoop) -> bool:
    """Tells if the results of a formula have the shapes of the loop's results."""
    loop = prepared.loop
    sizes = {"n": 6}
    for given in loop.inputs:
        sizes |= {s: 11 + len(sizes) for s in given.shape if isinstance(s, str) and s not in sizes}
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            tensors = [
                torch.empty(given.actual_shape(sizes), dtype=given.dtype, device=prepared.device)
                for given in loop.inputs
            ]
            results = _LoopRun(prepared, tensors, sizes).results(runs=False)
    except Exception:
        log.warning("a formula is not used, please report this", exc_info=True)
        return False
    wanted = [result.actual_shape(sizes) for result in loop.results]
    return [list(result.shape) for result in results] == wanted


def run_loop(
    prepared: PreparedLoop, tensors: Sequence[Tensor], sizes: Mapping[str, int]
) -> list[Tensor]:
    """The results of a loop, on tensors with data.

    Args:
        prepared: the loop.
        tensors: its inputs, which fit it.
        sizes: by name.
    """
    below = _AutoDispatchBelowADInplaceOrView()
    with on_device(prepared.device), below, _DisableAutocast(), torch.no_grad():
        index = _contributing_rows(prepared, tensors, sizes)
        return _LoopRun(prepared, tensors, sizes, index).results()


def loop_plan(
    prepared: PreparedLoop, tensors: Sequence[Tensor], sizes: Mapping[str, int]
) -> RegionPlan:
    """The plan of a loop; ``tensors`` need no data."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return _LoopRun(prepared, list(map(_without_data, tensors)), sizes).plan


def formula_operands(
    prepared: PreparedLoop, tensors: Sequence[Tensor], sizes: Mapping[str, int]
) -> Operands:
    """The operands of a loop that has a formula, without data, as ``tensors`` may be."""
    assert prepared.formula is not None
    with FakeTensorMode(allow_non_fake_inputs=True):
        run = _LoopRun(prepared, list(map(_without_data, tensors)), sizes)
        operands = run.formula_run(prepared.formula).operands
    return tree_map_only(Tensor, lambda t: _without_data(t, "meta"), operands)


def _without_data(tensor: Tensor, device: str | None = None) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
    )


def _contributing_rows(
    prepared: PreparedLoop, tensors: Sequence[Tensor], sizes: Mapping[str, int]
) -> Tensor | None:
    """The indices of the rows that change a result; None if leaving out others is not worth it."""
    if prepared.zeros is None or not sizes["n"]:
        return None
    operations = prepared.operations(sizes)
    if prepared.device.type == "cuda" and operations < WORTH_A_WAIT:
        return None  # nothing is launched
    mask = prepared.zeros.contributing(tensors)
    if mask is None:
        return None
    key = prepared.loop.text(), prepared.device
    return contributing_index(mask, WORTH_COPIES, operations, key)


class _Sum(NamedTuple):
    """The memory in which a sum is added up."""

    total: Tensor
    dtype: torch.dtype  # of the result
    transposed: bool = False  # whether the total is the transpose of the result


class _LoopRun:
    """One run of a loop, on all rows or on those of an index; other rows of results are 0."""

    def __init__(
        self,
        prepared: PreparedLoop,
        tensors: Sequence[Tensor],
        sizes: Mapping[str, int],
        index: Tensor | None = None,
    ) -> None:
        self.prepared = prepared
        self.sizes = sizes
        self.index = index
        loop = prepared.loop
        parts = prepared.split
        self.n = sizes["n"] if index is None else len(index)
        self.rows = [tensors[i] for i in loop.rows]
        self.invariants = prepared.before([t for i, t in enumerate(tensors) if i not in loop.rows])
        self.shared = [self.invariants[i].contiguous() for i in parts.shared]
        self.row_inputs = [self.rows[i] for i in parts.rows]
        self.merges = dict(loop.merges)
        self.sums: dict[int, _Sum] = {}
        self.row_results: dict[int, Tensor] = {}
        self.transposed = {t.result: t.transposed for group in parts.groups for t in group.tails}
        if prepared.formula is not None:
            return
        first = len(parts.heads)
        broadcasts = tuple(first + i for i, t in enumerate(self.row_inputs) if is_broadcast(t))
        broadcasts = broadcastable(parts.function, broadcasts) if broadcasts else ()
        for number in broadcasts:
            self.row_inputs[number - first] = first_values(self.row_inputs[number - first])
        self.function, bytes_of_row = prepared.function(broadcasts)
        self.plan = prepared.plan(self.n, bytes_of_row, sizes)
        self.scratch = Scratch(tensors[0])
        several = self.plan.rows < self.n
        for i in range(len(loop.results)):
            self._allocate(i, several)

    def _allocate(self, i: int, several: bool) -> None:
        """Memory for a result."""
        loop = self.prepared.loop
        shape = loop.results[i].actual_shape(self.sizes)
        dtype = loop.dtype(i)
        of_rows = i not in loop.sums and i not in self.merges
        new = torch.zeros if self.n == 0 or (of_rows and self.index is not None) else torch.empty
        if of_rows:
            self.row_results[i] = new(shape, dtype=dtype, device=self.prepared.device)
            return
        if i in self.merges:
            total = new(
                shape, dtype=merged_dtype(self.merges[i], dtype), device=self.prepared.device
            )
            self.sums[i] = _Sum(total, dtype)
            return
        if several and i in self.transposed:  # a product, each of which rounds once
            several = not self.plan.rounded
        sum_dtype = compute_dtype(dtype) if several and dtype.is_floating_point else dtype
        total = new(shape, dtype=sum_dtype, device=self.prepared.device)
        transposed = self.transposed.get(i, False)
        self.sums[i] = _Sum(total.t() if transposed else total, dtype, transposed)

    def results(self, runs: bool = True) -> list[Tensor]:
        """The results; uninitialised where no kernel of a formula ``runs``."""
        if self.prepared.formula is not None:
            return self._formula_results(self.prepared.formula, runs)
        parts = list(slices(0, self.n, min(self.plan.rows, max(1, self.n))))
        if self.merges and not parts:
            parts = [slice(0, 0)]  # the reduction of no rows, or its error
        for part in parts:
            self._chunk(part)
        self.scratch = Scratch(self.rows[0])  # frees the memory
        return [self._finished(i) for i in range(len(self.prepared.loop.results))]

    # ------------------------------------------------------------ a formula

    def formula_run(self, formula: LoopFormula) -> FormulaRun:
        """The run of all rows at once."""
        every = slice(0, self.n)
        (head,) = self.prepared.split.heads
        operands = self.prepared.operands(self._part(self.rows, every))
        weight = self.invariants[head.weight].t()
        bias = None if head.bias is None else self.invariants[head.bias]
        inputs = [*self._part(self.row_inputs, every), *self.shared]
        return FormulaRun(formula, operands[head.x], weight, bias, inputs)

    def _formula_results(self, formula: LoopFormula, runs: bool) -> list[Tensor]:
        loop = self.prepared.loop
        results = self.formula_run(formula).results(runs)
        storages = {t.untyped_storage()._cdata for t in (*self.rows, *self.invariants)}
        for i, result in results.items():
            if i in loop.sums or self.index is None:
                result = result.t() if self.transposed.get(i, False) else result
                result = result.to(loop.dtype(i))
                if result.untyped_storage()._cdata in storages:  # each has memory of its own
                    result = result.clone(memory_format=torch.contiguous_format)
                storages.add(result.untyped_storage()._cdata)
                results[i] = result
            else:
                self._allocate(i, several=False)
                self._write(i, result, slice(0, self.n))
                results[i] = self.row_results.pop(i)
        return [results[i] for i in range(len(loop.results))]

    # ------------------------------------------------------------ chunks

    def _chunk(self, part: slice) -> None:
        parts = self.prepared.split
        operands = [
            self.scratch.cast(
                f"operand {i}", x, product_dtype_of(x) if x.is_floating_point() else x.dtype
            )
            for i, x in enumerate(self.prepared.operands(self._part(self.rows, part)))
        ]
        inputs = [
            self._logits(i, pair.head, operands, part)
            for i, pair in enumerate(self.prepared.pairs)
            if pair.head is not None
        ]
        inputs += [*self._part(self.row_inputs, part), *self.shared]
        outputs: list[Any] = list(self.function(inputs))
        inputs.clear()
        for i, number in enumerate(parts.results):
            self._write(number, outputs[i], part)
            outputs[i] = None
        for group in parts.groups:
            self._multiply(group, outputs, operands, part)

    def _part(self, tensors: Sequence[Tensor], part: slice) -> list[Tensor]:
        """Some rows of tensors."""
        if self.index is None:
            return [slice_of(t, part) for t in tensors]
        return [t.index_select(0, slice_of(self.index, part)) for t in tensors]

    def _logits(
        self, number: int, head: HeadOperands, operands: list[Tensor], part: slice
    ) -> Tensor:
        """The logits of a pair's head."""
        weight = self.invariants[head.weight].t()
        bias = None if head.bias is None else self.invariants[head.bias]
        shape = part.stop - part.start, weight.shape[0]
        out = self.scratch(f"logits {number}", shape, head.logits.dtype)
        classes = self.plan.classes[number]
        return write_logits(operands[head.x], weight, bias, out, classes, self.scratch)

    def _write(self, i: int, output: Tensor, part: slice) -> None:
        """Writes rows of a result, or adds to a sum."""
        if i in self.row_results and self.index is not None:
            whole = self.row_results[i]
            whole.index_copy_(0, slice_of(self.index, part), output.to(whole.dtype))
        elif i in self.row_results:
            slice_of(self.row_results[i], part).copy_(output)
        else:
            total = self.sums[i].total
            if part.start and i in self.merges:
                MERGES[self.merges[i]](total, output, part.start)
            else:
                (total.add_ if part.start else total.copy_)(output)

    def _multiply(
        self, group: Group, outputs: list[Any], operands: list[Tensor], part: slice
    ) -> None:
        """The products with a gradient, which is freed."""
        gradient = outputs[group.output]
        product_dtype = product_dtype_of(gradient)
        rows = []
        sums = []
        indexed = []  # products whose rows are copied to those of the index
        for tail in group.tails:
            if tail.weight is not None:
                out = self.row_results[tail.result]
                if self.index is None:
                    out = slice_of(out, part)
                else:
                    out = out.new_empty(part.stop - part.start, *out.shape[1:])
                    indexed.append((tail.result, out))
                rows.append((out, self.invariants[tail.weight]))
                continue
            if tail.operand is not None:
                other = operands[tail.operand]
            else:
                number = tail.output or 0
                other = self.scratch.cast(f"output {number}", outputs[number], product_dtype)
            sums.append((self.sums[tail.result].total, other))
        pairs = zip(self.prepared.pairs, self.plan.classes, strict=True)
        classes = next(classes for pair, classes in pairs if pair.group is group)
        add_products(gradient, rows, sums, product_dtype, classes, part.start > 0, self.scratch)
        for number, out in indexed:
            self._write(number, out, part)
        groups = self.prepared.split.groups
        later = groups[groups.index(group) + 1 :]
        if not any(group.output in (g.output, t.output) for g in later for t in g.tails):
            outputs[group.output] = None

    def _finished(self, i: int) -> Tensor:
        if i in self.row_results:
            return self.row_results.pop(i)
        total, dtype, transposed = self.sums.pop(i)
        return (total.t() if transposed else total).to(dtype)
