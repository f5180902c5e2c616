"""Expressions of logits on tiles: hits at single classes, given values, whole rows and parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpass.spec import expression
from fxpass.spec.operands import Operands

N, V = 6, 11
TEXTS = (
    "where(hit0>0,z-0.5,z)",
    "given0*z-hit0*given1+2*hit1",
    "hit0",
    "given0*(1-hit0)",
    "(exp(l)-hit0-hit1)**2",
    "where(z>0,hit0,hit1)",
)


@pytest.mark.parametrize("step", [V, 4, 1])
@pytest.mark.parametrize("text", TEXTS)
def test_tiles_of_classes_are_those_of_the_whole(text, step):
    """In a tile, the hits of other tiles are nowhere, and two hits may be one class."""
    z, log, given = torch.randn(N, V), torch.randn(N, V), (torch.rand(V), torch.rand(N, V))
    picks = torch.randint(V, (N, 2))
    picks[0] = picks[0, 0]
    picks[1] = torch.tensor([0, V - 1])
    operands = Operands(torch.randn(N, 2), torch.randn(V, 2), None, None, picks, given)
    expr = expression.parse(text)
    dense = {f"hit{i}": F.one_hot(picks[:, i], V).float() for i in range(2)}
    dense |= {f"given{i}": values for i, values in enumerate(given)} | {"l": log}
    before, tiles, rows = z.clone(), [], slice(0, N)
    for start in range(0, V, step):
        some = slice(start, min(start + step, V))
        tiles.append(operands.evaluate(expr, z[:, some], rows, some, {"l": log[:, some]}))
    torch.testing.assert_close(torch.cat(tiles, 1), expression.evaluate(expr, z, dense))
    assert torch.equal(z, before)
    assert all(torch.equal(one, dense[f"given{i}"]) for i, one in enumerate(given))
