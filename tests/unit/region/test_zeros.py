"""Which rows of a loop change none of its results."""

from __future__ import annotations

import pytest
import torch

from fxpass.op import row_chunks
from fxpass.region.loop import Loop
from fxpass.region.zeros import zero_rows_of
from tests.fuzz.small import small
from tests.programs.row import Row
from tests.support.joint import captured

N = 48  # rows of a program


@pytest.fixture
def chosen(monkeypatch):
    """The numbers of rows of all runs of loops."""
    found: list[int] = []
    keep = row_chunks._LoopRun.results

    def results(self, runs=True):
        found.extend([self.n] * runs)
        return keep(self, runs)

    monkeypatch.setattr(row_chunks._LoopRun, "results", results)
    return found


@pytest.mark.parametrize("way", ["eager", "dynamic", "bf16", "f16"])
@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("F.cross_entropy(z, ignored)", (39,)),
        ("z.log_softmax(-1).gather(-1, labels[:, None])[:, 0].mul(rows).sum()", (32,)),
        # forward gives all rows, and backward has a gradient of those that count
        ("z.log_softmax(-1).gather(-1, labels[:, None])[:, 0].mul(0.1).sin() * rows", (48, 32)),
        (
            "kl = (z.log_softmax(-1) - q.log_softmax(-1)).square(); "
            "(kl * rows[:, None]).sum() / rows.sum()",
            (32,),
        ),
    ],
)
def test_rows_of_programs(text, counts, way, chosen):
    with small():
        found = captured(Row("masked", text), way)
    assert not found.wrong
    assert tuple(chosen) == counts


TEXT = """rows rows=0,1,2 sums=1 wide= memory_mb=0 compiled=1
%0 = input float32[n, 9]
%1 = input float32[n, 1]
%2 = input bool[n]
%3 = aten.exp.default(%0)
%4 = aten.unsqueeze.default(%2, 1)
{lines}
return %7, %8"""


@pytest.mark.parametrize(
    ("lines", "counted"),
    [
        # a product, and a mask of its sum: other rows of each result
        (
            "%5 = aten.mul.Tensor(%3, %1)\n%6 = aten.full.default([], 0.0)\n"
            "%7 = aten.where.self(%4, %5, %6)\n%8 = aten.sum.dim_IntList(%5, [0])",
            [True, False, True, False],
        ),
        # a sum of both is 0 where both are
        (
            "%5 = aten.mul.Tensor(%3, %1)\n%6 = aten.mul.Tensor(%3, %4)\n"
            "%7 = aten.add.Tensor(%5, %6)\n%8 = aten.sum.dim_IntList(%7, [0])",
            [True, True, True, False],
        ),
        ("%5 = aten.masked_fill.Scalar(%3, %4, 0.0)\n%6 = aten.neg.default(%5)\n"
         "%7 = aten.amax.default(%3, [1])\n%8 = aten.sum.dim_IntList(%6, [0])", None),
        (
            "%5 = aten.masked_fill.Scalar(%3, %4, 0.0)\n%6 = aten.neg.default(%5)\n"
            "%7 = aten.cumsum.default(%6, 1)\n%8 = aten.sum.dim_IntList(%6, [0])",
            [True, False, False, True],
        ),
    ],
)  # fmt: skip
def test_rules(lines, counted):
    found = zero_rows_of(Loop.parse(TEXT.format(lines=lines)))
    if counted is None:
        assert found is None
        return
    weights, mask = (
        torch.tensor([[1.0], [0.0], [2.0], [0.0]]),
        torch.tensor([True, True, True, False]),
    )
    mask = torch.tensor([False, True, True, False]) if "masked_fill" in lines else mask
    assert found is not None
    got = found.contributing([torch.ones(4, 9), weights, mask])
    assert got is not None
    assert got.tolist() == counted
