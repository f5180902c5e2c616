"""Rows that are left out of all products."""

from __future__ import annotations

import torch

from fxpass.op.ignored import rows_of
from fxpass.spec.operands import Operands


def test_a_value_of_each_row_stays_one_value():
    """And takes no memory for the classes; other values do."""
    of_row, of_class = torch.randn(6, 1), torch.randn(6, 9)
    operands = Operands(
        *(torch.randn(6, 4), torch.randn(9, 4), None, None, None),
        (of_row.expand(6, 9), of_class, torch.randn(9)),
    )
    index = torch.tensor([1, 4, 5])
    one, many, vector = rows_of(operands, index).given
    assert one.untyped_storage().nbytes() == 3 * 4
    assert torch.equal(one, of_row[index].expand(3, 9))
    assert torch.equal(many, of_class[index])
    assert vector is operands.given[2]
