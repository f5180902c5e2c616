"""Where forward computes the gradients of a row region: the programs are rows of the tables."""

from __future__ import annotations

import re

import pytest
import torch

from fxpass import testing
from tests.programs.catalog import of
from tests.programs.row import Row
from tests.programs.rows.known import KNOWN, METRICS_BEFORE, UNKNOWN

ROWS = {row.name: row for row in of("known")}
TOTALS = {row.name: ["1"] for row in KNOWN} | {row.name: ["0"] for row in UNKNOWN}
# One call has the metrics and the loss, or each has its own.
OF_METRICS = (["1"], ["0", "1"])


def rewritten(row: Row, frozen: str = "") -> str:
    named = zip(row.names, row.tensors(), strict=True)
    return testing.rewritten(row.program(), *(t.detach() if n == frozen else t for n, t in named))


@pytest.mark.parametrize("name", TOTALS)
def test_forward_computes_the_gradients_of_a_total(name):
    found = re.findall(r"row_region heads=.*? total=(\d)", rewritten(ROWS[name]))
    assert found == TOTALS[name]


def test_metrics_that_are_read_before_the_loss():
    text = rewritten(ROWS[METRICS_BEFORE.name])
    assert re.findall(r"row_region heads=.*? total=(\d)", text) in OF_METRICS


@pytest.mark.parametrize("name", ["mean", "squared"])
def test_without_gradients_there_is_no_total(name):
    with torch.no_grad():
        text = rewritten(ROWS[name])
    assert "row_region heads=2 rows=0 shared=0 trained= outputs=1 tangents= total=0" in text


def test_a_frozen_weight_has_no_gradient():
    text = rewritten(ROWS["a weighted sum"], frozen="weight")
    assert "trained=0 outputs=1 tangents=0 total=1" in text
