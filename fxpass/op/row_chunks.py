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
    >>> run(prepared(text, torch.device("cpu")), tensors, {"n": 4})
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

from fxpass.aten.gemm import multiplied, part_of, slices
from fxpass.aten.products import Scratch, add_products, logits
from fxpass.formula.dtypes import compute_dtype
from fxpass.formula.operands import Operands
from fxpass.op.formula import FormulaRun, Formulas, formulas_of
from fxpass.op.ignored import WORTH_A_WAIT, WORTH_COPIES, index_of
from fxpass.plan.devices import on_device
from fxpass.plan.regions import HeadSizes, RegionPlan, plan
from fxpass.region.compile import CLASSES, RowFunction
from fxpass.region.live import row_bytes
from fxpass.region.loop import Loop
from fxpass.region.run import Interpreter, apart
from fxpass.region.split import Group, HeadOperands, Split, narrowable, narrowed, split
from fxpass.region.zeros import zeros

log = logging.getLogger(__name__)
# What a loop with collectives is taken to keep of each class of a row, on each rank.
VALUES_OF_A_CLASS = 8
_DENSE = torch.contiguous_format
_known: dict[tuple[Any, ...], Prepared] = {}


def prepared(text: str, device: torch.device) -> Prepared:
    """A loop on a device; the same for the same text.

    Raises:
        ValueError: the text is none of a loop.
    """
    # Inductor makes other kernels where results must be the same in every run
    key = text, device, torch.are_deterministic_algorithms_enabled()
    return _known.get(key) or _known.setdefault(key, Prepared(text, device))


class Prepared:
    """The state of a loop on a device, for any sizes.

    Attributes:
        pairs: heads and groups of last products that have the same classes.
    """

    def __init__(self, text: str, device: torch.device) -> None:
        self.loop = Loop.parse(text)
        self.device = device
        self.split: Split = split(self.loop)
        self.before = Interpreter(self.split.before, device)
        self.operands = Interpreter(self.split.operands, device)
        self.pairs = _pairs(self.split)
        self.zeros = zeros(self.loop)
        self.formula = formulas_of(self.loop, self.split)
        if self.formula is not None and not apart(lambda: _fits(self)):
            self.formula = None
        self._functions: dict[tuple[int, ...], tuple[RowFunction, int]] = {}

    def function(self, narrow: tuple[int, ...] = ()) -> tuple[RowFunction, int]:
        """The function of rows, and the bytes of a row at its worst moment, where the inputs
        ``narrow`` have one value a row."""
        if narrow not in self._functions:
            graph = narrowed(self.split.function, narrow) if narrow else self.split.function
            made = RowFunction(graph, self.device, self.loop.compiled)
            count = len(self.split.heads)
            self._functions[narrow] = made, row_bytes(graph, count, made.compiles)
        return self._functions[narrow]


def _fits(of: Prepared) -> bool:
    """Whether the results of a formula are those of the loop, as far as shapes tell."""
    loop = of.loop
    sizes = {"n": 6}
    for shape in (given.shape for given in loop.inputs):
        sizes |= {s: 11 + len(sizes) for s in shape if isinstance(s, str) and s not in sizes}
    shapes = [[sizes.get(s, s) for s in given.shape] for given in loop.inputs]  # pyright: ignore
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            made = zip(shapes, loop.inputs, strict=True)
            tensors = [torch.empty(s, dtype=i.dtype, device=of.device) for s, i in made]
            found = _LoopRun(of, tensors, sizes).results(runs=False)
    except Exception:
        log.warning("a formula is not used, please report this", exc_info=True)
        return False
    wanted = ([sizes.get(s, s) for s in result.shape] for result in loop.results)  # pyright: ignore
    return all([*one.shape] == shape for one, shape in zip(found, wanted, strict=True))


def _pairs(parts: Split) -> list[tuple[HeadOperands | None, Group | None]]:
    left = list(parts.groups)
    found = list[tuple[HeadOperands | None, Group | None]]()
    for head in parts.heads:
        group = next((g for g in left if g.gradient == head.logits), None)
        left = [g for g in left if g is not group]
        found.append((head, group))
    return [*found, *((None, group) for group in left)]


def run(of: Prepared, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> list[Tensor]:
    """The results of a loop, on tensors with data.

    Args:
        of: the loop.
        tensors: its inputs, which fit it.
        sizes: by name.
    """
    below = _AutoDispatchBelowADInplaceOrView()
    with on_device(of.device), below, _DisableAutocast(), torch.no_grad():
        return _LoopRun(of, tensors, sizes, _counted(of, tensors, sizes)).results()


def planned_for(of: Prepared, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> RegionPlan:
    """How a loop runs; ``tensors`` need no data."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return _LoopRun(of, list(map(_without_data, tensors)), sizes).plan


def operands_of(of: Prepared, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> Operands:
    """The operands of a loop that has a formula, without data, as ``tensors`` may be."""
    assert of.formula is not None
    with FakeTensorMode(allow_non_fake_inputs=True):
        run = _LoopRun(of, list(map(_without_data, tensors)), sizes)
        found = run.formula_run(of.formula).operands
    return tree_map_only(Tensor, lambda t: _without_data(t, "meta"), found)


def _without_data(tensor: Tensor, device: str | None = None) -> Tensor:
    layout = tensor.shape, tensor.stride()
    return torch.empty_strided(*layout, dtype=tensor.dtype, device=device or tensor.device)


def _counted(of: Prepared, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> Tensor | None:
    """The indices of the rows that change a result, if it is worth to leave the others out."""
    if of.zeros is None or not sizes["n"]:
        return None
    operations = _operations(of, sizes)
    if of.device.type == "cuda" and operations < WORTH_A_WAIT:
        return None  # nothing is launched
    counted = of.zeros.counted(tensors)
    if counted is None:
        return None
    return index_of(counted, WORTH_COPIES, operations, (of.loop.text(), of.device))


def _operations(of: Prepared, sizes: Mapping[str, int]) -> float:
    """The operations of all products, as if each had the largest hidden size."""
    of_size = lambda size: sizes[size] if isinstance(size, str) else size  # noqa: E731
    classes = 0
    for head, group in of.pairs:
        described = head.logits if head is not None else group.gradient  # pyright: ignore
        tails = len(group.tails) if group is not None else 0
        classes += of_size(described.shape[1]) * (tails + (head is not None))
    hidden = max((of_size(head.hidden) for head in of.split.heads), default=1)
    return 2.0 * sizes["n"] * hidden * classes


class _Sum(NamedTuple):
    """Where a sum is added up."""

    total: Tensor
    dtype: torch.dtype  # in which it leaves
    turned: bool = False  # whether the total is its transpose


class _LoopRun:
    """One run of a loop, on all rows or on those of an index; other rows of results are 0."""

    def __init__(
        self,
        of: Prepared,
        tensors: Sequence[Tensor],
        sizes: Mapping[str, int],
        index: Tensor | None = None,
    ) -> None:
        self.of = of
        self.sizes = sizes
        self.index = index
        loop = of.loop
        parts = of.split
        self.n = sizes["n"] if index is None else len(index)
        self.rows = [tensors[i] for i in loop.rows]
        self.invariants = of.before([t for i, t in enumerate(tensors) if i not in loop.rows])
        self.shared = [self.invariants[i].contiguous() for i in parts.shared]
        self.read = [self.rows[i] for i in parts.rows]
        self.sums: dict[int, _Sum] = {}
        self.places: dict[int, Tensor] = {}
        self.turned = {t.result: t.turned for group in parts.groups for t in group.tails}
        if of.formula is not None:
            return
        first = len(parts.heads)
        narrow = tuple(first + i for i, t in enumerate(self.read) if _is_narrow(t))
        narrow = narrowable(parts.function, narrow) if narrow else ()
        self.read = [_narrow(t) if first + i in narrow else t for i, t in enumerate(self.read)]
        self.function, of_row = of.function(narrow)
        self.plan = self._planned(of_row)
        self.classes = dict(zip(of.pairs, self.plan.classes, strict=True))
        self.scratch = Scratch(tensors[0])
        several = self.plan.rows < self.n
        for i in range(len(loop.results)):
            self._place(i, several)

    # ------------------------------------------------------------ before the chunks

    def _planned(self, of_row: int) -> RegionPlan:
        loop = self.of.loop
        heads = []
        counted = 0
        actual = 0
        for head, group in self.of.pairs:
            described = head.logits if head is not None else group.gradient  # pyright: ignore
            v = self._size(described.shape[1])
            dtype = described.dtype
            at = multiplied(self._like(dtype))
            sums = [t for t in group.tails if t.weight is None] if group is not None else []
            wide = all(loop.dtype(t.result) == compute_dtype(dtype) for t in sums)
            of_sums = (min(map(self._size, loop.results[t.result].shape)) for t in sums)
            d = 1 if head is None else self.invariants[head.weight].shape[0]
            heads.append(HeadSizes(max(d, sum(of_sums)), v, dtype, at, bool(sums), wide))
            known = described.shape[1]
            counted += (CLASSES if isinstance(known, str) else known) * dtype.itemsize
            actual += v * dtype.itemsize
        of_row = of_row * actual // counted if counted else of_row
        options = self.of.device, loop.memory_mb, loop.accumulate
        found = plan(self.n, tuple(heads), of_row, *options)
        if not loop.on_ranks:
            return found
        # As on all ranks: they have the same heads, but numbers in their texts, such as the first
        # class, decide what is shared and kept; and processors may multiply in other dtypes.
        of_row = sum(h.v * max(h.dtype.itemsize, 4) for h in heads) * VALUES_OF_A_CLASS
        alike = tuple(head._replace(multiplied=head.dtype) for head in heads)
        rows, *_, sums, rounded = plan(self.n, alike, of_row, *options)
        scratch = found.scratch // found.rows * rows
        return found._replace(rows=rows, scratch=scratch, sums=sums, rounded=rounded)

    def _like(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(0, dtype=dtype, device=self.of.device)

    def _size(self, size: int | str) -> int:
        return self.sizes[size] if isinstance(size, str) else size

    def _place(self, i: int, several: bool) -> None:
        """Memory for a result."""
        loop = self.of.loop
        shape = [self._size(s) for s in loop.results[i].shape]
        dtype = loop.dtype(i)
        whole = self.index is None or i in loop.sums
        new = torch.zeros if self.n == 0 or not whole else torch.empty
        if i not in loop.sums:
            self.places[i] = new(shape, dtype=dtype, device=self.of.device)
            return
        if several and i in self.turned:  # a product, each of which rounds once
            several = not self.plan.rounded
        wide = compute_dtype(dtype) if several and dtype.is_floating_point else dtype
        made = new(shape, dtype=wide, device=self.of.device)
        turned = self.turned.get(i, False)
        self.sums[i] = _Sum(made.t() if turned else made, dtype, turned)

    # ------------------------------------------------------------ the chunks

    def results(self, runs: bool = True) -> list[Tensor]:
        """The results; uninitialised where no kernel of a formula ``runs``."""
        if self.of.formula is not None:
            return self._of_formula(self.of.formula, runs)
        for part in slices(0, self.n, min(self.plan.rows, max(1, self.n))):
            self._chunk(part)
        self.scratch = Scratch(self._like(torch.float32))
        return [self._finished(i) for i in range(len(self.of.loop.results))]

    def formula_run(self, formula: Formulas) -> FormulaRun:
        """The run of all rows at once."""
        every = slice(0, self.n)
        (head,) = self.of.split.heads
        operands = self.of.operands(self._some(self.rows, every))
        weight = self.invariants[head.weight].t()
        bias = None if head.bias is None else self.invariants[head.bias]
        inputs = [*self._some(self.read, every), *self.shared]
        return FormulaRun(formula, operands[head.x], weight, bias, inputs)

    def _of_formula(self, formula: Formulas, runs: bool = True) -> list[Tensor]:
        loop = self.of.loop
        found = self.formula_run(formula).results(runs)
        seen = {t.untyped_storage()._cdata for t in (*self.rows, *self.invariants)}
        for i, made in found.items():
            if i in loop.sums or self.index is None:
                turned = self.turned.get(i, False)
                made = (made.t() if turned else made).to(loop.dtype(i))
                place = made.untyped_storage()._cdata  # a result has memory of its own
                found[i] = made.clone(memory_format=_DENSE) if place in seen else made
                seen.add(place)
            else:
                self._place(i, several=False)
                self._write(i, made, slice(0, self.n))
                found[i] = self.places.pop(i)
        return [found[i] for i in range(len(loop.results))]

    def _finished(self, i: int) -> Tensor:
        if i in self.places:
            return self.places.pop(i)
        total, dtype, turned = self.sums.pop(i)
        made = total.t() if turned else total
        return made if made.dtype == dtype else made.to(dtype)

    def _chunk(self, part: slice) -> None:
        parts = self.of.split
        operands = self.of.operands(self._some(self.rows, part))
        wide = [
            self.scratch.cast(
                f"operand {i}", x, multiplied(x) if x.is_floating_point() else x.dtype
            )
            for i, x in enumerate(operands)
        ]
        given = [self._logits(pair, wide, part) for pair in self.of.pairs if pair[0] is not None]
        given += self._some(self.read, part)
        found: list[Any] = list(self.function([*given, *self.shared]))
        given.clear()
        for i, number in enumerate(parts.results):
            self._write(number, found[i], part)
            found[i] = None
        for group in parts.groups:
            self._add(group, found, wide, part)

    def _some(self, tensors: Sequence[Tensor], part: slice) -> list[Tensor]:
        """Some rows of tensors."""
        if self.index is None:
            return [part_of(t, part) for t in tensors]
        return [t.index_select(0, part_of(self.index, part)) for t in tensors]

    def _logits(self, pair: Any, operands: list[Tensor], part: slice) -> Tensor:
        head: HeadOperands = pair[0]
        weight = self.invariants[head.weight].t()
        bias = None if head.bias is None else self.invariants[head.bias]
        shape = part.stop - part.start, weight.shape[0]
        out = self.scratch(f"logits {self.of.pairs.index(pair)}", shape, head.logits.dtype)
        return logits(operands[head.x], weight, bias, out, self.classes[pair], self.scratch)

    def _write(self, i: int, found: Tensor, part: slice) -> None:
        """A result of the function."""
        if i in self.places and self.index is not None:
            whole = self.places[i]
            whole.index_copy_(0, part_of(self.index, part), found.to(whole.dtype))
        elif i in self.places:
            part_of(self.places[i], part).copy_(found)
        else:
            total = self.sums[i].total
            (total.add_ if part.start else total.copy_)(found)

    def _add(self, group: Group, found: list[Any], operands: list[Tensor], part: slice) -> None:
        """The products with a gradient, which is freed."""
        gradient = found[group.made]
        at = multiplied(gradient)
        rows = []
        sums = []
        copied = []
        for tail in group.tails:
            if tail.weight is not None:
                out = self.places[tail.result]
                if self.index is None:
                    out = part_of(out, part)
                else:
                    out = out.new_empty(part.stop - part.start, *out.shape[1:])
                    copied.append((tail.result, out))
                rows.append((out, self.invariants[tail.weight]))
                continue
            if tail.operand is not None:
                other = operands[tail.operand]
            else:
                made = tail.made or 0
                other = self.scratch.cast(f"made {made}", found[made], at)
            sums.append((self.sums[tail.result].total, other))
        classes = next(self.classes[pair] for pair in self.of.pairs if pair[1] is group)
        add_products(gradient, rows, sums, at, classes, part.start > 0, self.scratch)
        for number, out in copied:
            self._write(number, out, part)
        later = self.of.split.groups[self.of.split.groups.index(group) + 1 :]
        if not any(group.made in (t.made, g.made) for g in later for t in g.tails):
            found[group.made] = None


def _is_narrow(tensor: Tensor) -> bool:
    """Whether all values of a row are one in memory."""
    inner = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)][1:]
    return any(size > 1 for size, _ in inner) and all(size == 1 or not s for size, s in inner)


def _narrow(tensor: Tensor) -> Tensor:
    """One value a row, ``[n, 1]``."""
    return tensor[(slice(None), *[slice(1)] * (tensor.dim() - 1))]
