"""Where the joint pass computes gradients in forward: the programs are rows of the tables."""

from __future__ import annotations

import pytest
import torch

from fxpass.rows.backend import Rewritten, RowsPass
from tests.programs.catalog import of
from tests.programs.rows.known import METRICS_BEFORE

ROWS = {row.name: row for row in of("known")}
# Gradients that are no number of one tangent times known values, and those of factors that forward
# knows when the call has run: of its own sums, or of random numbers that are drawn behind it.
TWO = {
    **{"scaled after the total": True, "dropped rows": True},
    **{"no scalar": False, "two scalars": False, "read elsewhere with a gradient": False},
}


def rewritten(name: str) -> Rewritten:
    row, rows = ROWS[name], RowsPass()
    torch.compile(row.program(), backend=rows.backend())(*row.tensors())
    [made] = rows.made
    assert made.regions is not None
    return made


@pytest.mark.parametrize("name", ROWS)
def test_one_call_where_forward_knows_the_gradients(name):
    """Also of metrics that are computed where gradients are off, before the loss."""
    assert METRICS_BEFORE.name in ROWS
    made = rewritten(name)
    assert (made.calls, made.regions.factor is not None) == (1 + (name in TWO), TWO.get(name, True))


def test_without_gradients_there_is_no_tangent():
    with torch.no_grad():
        made = rewritten("mean")
    assert (made.calls, made.regions.factor, len(made.regions.parts[0].results)) == (1, None, 1)


def test_a_frozen_weight_has_no_gradient():
    def products(**frozen: bool) -> int:
        row, rows = ROWS["a weighted sum"], RowsPass()
        pairs = zip(row.names, row.tensors(), strict=True)
        tensors = [t.detach() if frozen.get(name) else t for name, t in pairs]
        torch.compile(row.program(), backend=rows.backend())(*tensors)
        [call] = rows.made[0].graph.graph.find_nodes(
            op="call_function", target=torch.ops.fxpass.rows.default
        )
        return str(call.args[1]).count("aten.mm.default")

    assert (products(), products(weight=True)) == (3, 2)
