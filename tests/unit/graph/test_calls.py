"""Sizes that are symbols: one graph for several, and numbers that vary."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from tests.programs.catalog import catalog
from tests.programs.operands import Sizes
from tests.programs.row import Row
from tests.support.numerics import assert_close

ROWS = [row for row in catalog(kinds=["calls"], libraries=False) if "dynamic" in row.ways]
SIZES = tuple(Sizes(1, *sizes) for sizes in ((8, 6, 10), (7, 5, 9), (12, 3, 31), (5, 4, 17)))


def compile_with(program, **how):
    counters.clear()
    return torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"}, **how)


def loss_and_gradients(program, row, *others, wide=False):
    tensors = row.tensors(wide=wide)
    loss = program(*tensors, *others)
    loss.backward()
    return [loss.detach(), *(t.grad for t in tensors if t.grad is not None)]


def is_right(fused, program, row, *others):
    exact = loss_and_gradients(program, row, *others, wide=True)
    eager = loss_and_gradients(program, row, *others)
    assert_close(loss_and_gradients(fused, row, *others), eager, exact, row.dtype)


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_hidden_size_and_classes_may_all_vary(row, dynamic):
    """A functional weight makes V and D symbols: one graph, fused, for all of them."""
    fused = compile_with(row.program(), dynamic=dynamic)
    for sizes in SIZES:
        is_right(fused, row.program(wide=False), replace(row, sizes=sizes))
    assert counters["fusedce"]["rejected"] == 0
    if dynamic:
        assert counters["frames"]["total"] == 1


def test_a_class_slice_of_varying_length():
    """Two graphs: the first length as a number, all later ones as a symbol."""
    row = Row("slice", "lambda k: F.cross_entropy(z[:, :k], labels % k)")
    slice_of = row.program()

    def program(x, weight, labels, k):
        return slice_of(x, weight, labels)(k)

    fused = compile_with(program)
    for k in (5, 6, 7, 8):
        is_right(fused, program, row, k)
    assert counters["fusedce"]["matched"] == counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_head_by_a_number_that_varies(dynamic):
    row = Row(
        "stack",
        "y = torch.stack([z, F.linear(x, second_weight)]); "
        "lambda head: F.cross_entropy(y[head], labels)",
    )
    stack_of = row.program()

    def program(x, weight, second_weight, labels, head):
        return stack_of(x, weight, second_weight, labels)(head)

    fused = compile_with(program, dynamic=dynamic)
    for head in (0, 1, 0, -1):
        is_right(fused, program, row, head)
