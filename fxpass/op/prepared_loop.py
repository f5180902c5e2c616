"""The state of a loop on a device, for any sizes.

In: the text of a loop, and a device. Out: a :class:`PreparedLoop`: the parts of the loop as
functions, its formula, and its plan for given sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from fxpass.aten.gemm import product_dtype_of
from fxpass.formula.dtypes import compute_dtype
from fxpass.op.formula import loop_formula
from fxpass.plan.regions import HeadSizes, RegionPlan, plan_region
from fxpass.region.broadcast import with_broadcasts
from fxpass.region.compile import CLASSES, RowFunction
from fxpass.region.live import row_bytes
from fxpass.region.loop import Loop
from fxpass.region.run import Interpreter
from fxpass.region.split import Group, HeadOperands, Split, Tail, split_loop
from fxpass.region.text import Input, actual_size
from fxpass.region.zeros import zero_rows_of

# Values of each class of a row that a loop with collectives is assumed to need, on each rank.
VALUES_OF_A_CLASS = 8


class HeadAndTails(NamedTuple):
    """A head and the tails of a gradient that has the same classes; either may be absent."""

    head: HeadOperands | None
    group: Group | None

    @property
    def logits(self) -> Input:
        """Dtype and shape ``[n, V]`` of the logits, as of their gradient."""
        return self.head.logits if self.head is not None else self.group.gradient  # pyright: ignore

    @property
    def tails(self) -> tuple[Tail, ...]:
        return self.group.tails if self.group is not None else ()


class PreparedLoop:
    """A loop on a device.

    Attributes:
        before, operands: run the parts of the split that have these names.
        pairs: all heads and all groups of tails.
        formula: of the function of rows; None if it has none.
    """

    def __init__(self, text: str, device: torch.device) -> None:
        self.loop = Loop.parse(text)
        self.device = device
        self.split = split_loop(self.loop)
        self.before = Interpreter(self.split.before, device)
        self.operands = Interpreter(self.split.operands, device)
        self.pairs = _pairs(self.split)
        self.zeros = zero_rows_of(self.loop)
        self.formula = loop_formula(self.loop, self.split)
        self._functions: dict[tuple[int, ...], tuple[RowFunction, int]] = {}

    def function(self, broadcasts: tuple[int, ...] = ()) -> tuple[RowFunction, int]:
        """The function of rows, and the bytes of a row at its worst moment, where the inputs
        ``broadcasts`` have one value a row."""
        if broadcasts not in self._functions:
            graph = self.split.function
            graph = with_broadcasts(graph, broadcasts) if broadcasts else graph
            function = RowFunction(graph, self.device, self.loop.compiled)
            bytes_of_row = row_bytes(graph, len(self.split.heads), function.compiles)
            self._functions[broadcasts] = function, bytes_of_row
        return self._functions[broadcasts]

    def plan(self, n: int, bytes_of_row: int, sizes: Mapping[str, int]) -> RegionPlan:
        """The plan of a run over ``n`` rows, of which the function needs ``bytes_of_row`` each."""
        loop = self.loop
        heads = []
        assumed = 0  # bytes of a row of all logits, as in ``bytes_of_row``
        actual = 0
        for pair in self.pairs:
            dtype = pair.logits.dtype
            classes = pair.logits.shape[1]
            v = actual_size(classes, sizes)
            sums = [t.result for t in pair.tails if t.weight is None]
            unrounded = all(loop.dtype(i) == compute_dtype(dtype) for i in sums)
            d = 1 if pair.head is None else actual_size(pair.head.hidden, sizes)
            d = max(d, sum(min(loop.results[i].actual_shape(sizes)) for i in sums))
            product_dtype = product_dtype_of(torch.empty(0, dtype=dtype, device=self.device))
            heads.append(HeadSizes(d, v, dtype, product_dtype, bool(sums), unrounded))
            assumed += (CLASSES if isinstance(classes, str) else classes) * dtype.itemsize
            actual += v * dtype.itemsize
        bytes_of_row = bytes_of_row * actual // assumed if assumed else bytes_of_row
        planned = partial(
            plan_region,
            n,
            device=self.device,
            memory_mb=loop.memory_mb,
            accumulate=loop.accumulate,
        )
        plan = planned(heads=tuple(heads), row_bytes=bytes_of_row)
        if not loop.on_ranks:
            return plan
        # As on all ranks: they have the same heads, but numbers in their texts, such as the first
        # class, decide which values are shared; and processors may multiply in other dtypes.
        bytes_of_row = sum(h.v * max(h.dtype.itemsize, 4) for h in heads) * VALUES_OF_A_CLASS
        alike = tuple(head._replace(product_dtype=head.dtype) for head in heads)
        on_ranks = planned(heads=alike, row_bytes=bytes_of_row)
        scratch = plan.scratch // plan.rows * on_ranks.rows
        return on_ranks._replace(classes=plan.classes, scratch=scratch)

    def operations(self, sizes: Mapping[str, int]) -> float:
        """The operations of all products, as if each had the largest hidden size."""
        products = 0
        for pair in self.pairs:
            v = actual_size(pair.logits.shape[1], sizes)
            products += v * (len(pair.tails) + (pair.head is not None))
        hidden = max((actual_size(h.hidden, sizes) for h in self.split.heads), default=1)
        return 2.0 * sizes["n"] * hidden * products


def _pairs(parts: Split) -> list[HeadAndTails]:
    groups = list(parts.groups)
    pairs = list[HeadAndTails]()
    for head in parts.heads:
        group = next((g for g in groups if g.gradient == head.logits), None)
        groups = [g for g in groups if g is not group]
        pairs.append(HeadAndTails(head, group))
    return [*pairs, *(HeadAndTails(None, group) for group in groups)]
