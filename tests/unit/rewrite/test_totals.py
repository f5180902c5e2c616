"""Which sums over the rows have known coefficients, and which outputs stay beside them."""

from __future__ import annotations

import pytest

from fxpass.spec.reductions import REVISION
from tests.programs.catalog import of
from tests.programs.rows import totals
from tests.support.programs import report_of

ROWS = {row.name: row for row in of("totals")}
ENTROPY, BOTH = "moment(1,1)", "moment(1,1);pick"
# what the call returns beside the total, and the total
KNOWN = {
    "several classes": ("argmax", "pick"),
    "masked mean": (ENTROPY, "pick"),
    "mean of means of sequences": ("", BOTH),
    "advantages, rows flattened": ("", BOTH),
    "where": ("", ENTROPY),
    "loss and accuracy": ("argmax", "pick"),
    "loss of weighted classes, sum, and accuracy": ("argmax", "pick"),
    "smoothed loss and accuracy": ("argmax", "moment(0,1);pick"),
    "rows of losses, and their log": ("max;pick", "pick"),
    "losses of two targets": (ENTROPY, "pick"),
    "an entropy that is detached later": (ENTROPY, "pick"),
    "stacked": ("", BOTH),
    "rows and a constant": ("", BOTH),
    "no row counts": ("argmax", "pick"),
    "a loss scaled, beside another": ("argmax", "pick"),
    "the square of a total": ("", BOTH),
    "metrics beside a total": ("pick;argmax", "pick"),
    "a number of rows that counts": ("", BOTH),
    "a temperature without a gradient": ("", BOTH),
}


def spec_of(name: str) -> str:
    row = ROWS[name]
    report = report_of(row.program(), *row.tensors())
    (text,) = [call.spec.text() for head in report.matches for call in head.calls]
    return text


@pytest.mark.parametrize("name", KNOWN)
def test_known(name):
    outputs, total = KNOWN[name]
    beside = f"outputs={outputs} " * bool(outputs)
    assert spec_of(name) == f"{REVISION} {beside}gradients=x,weight total={total}"


@pytest.mark.parametrize("name", [row.name for row in totals.UNKNOWN])
def test_unknown(name):
    assert "total=" not in spec_of(name)
