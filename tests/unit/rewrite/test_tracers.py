"""Graphs of make_fx are fused as Dynamo's are."""

from __future__ import annotations

import pytest

from tests.programs.catalog import of
from tests.programs.row import BOTH, FORMULA, REGION
from tests.support.oracle import outcome

ROWS = {row.name: row for row in of("traced")}
MADE = (
    *("cross_entropy", "one loss for each row", "operands cast, logits in float32", "shifted"),
    *("soft-cap with a bias", "a temperature that is computed", "in place", "rows by a tensor"),
    *("sequences permuted", "nll_loss", "gather", "classes in the middle", "z-loss beside it"),
    *("label smoothing", "einsum as the head", "rows that were written", "under autocast"),
    "logits that are returned",
)
BEFORE_AUTOGRAD = (
    *("label smoothing", "probabilities", "logsumexp", "einsum as the head"),
    *("rows that were written", "under autocast", "under no_grad"),
)


@pytest.mark.parametrize(
    ("name", "way"),
    [(n, "made") for n in MADE] + [(n, "made before autograd") for n in BEFORE_AUTOGRAD],
)
def test_graphs_of_make_fx(name, way):
    found = outcome(ROWS[name], way)
    assert not found.wrong
    assert found.becomes in (FORMULA, REGION, BOTH)  # what is decomposed is read in another way
    assert not found.left
