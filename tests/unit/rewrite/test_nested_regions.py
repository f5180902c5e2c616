"""Which calls of nested regions are inlined: those whose results a fused head reads."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from fxpass import testing
from tests.programs.rows import nested
from tests.support.oracle import check
from tests.support.programs import report_of

STAY = {row.name: replace(row, scope=vars(nested)) for row in nested.STAY}
ROWS = STAY | {row.name: replace(row, scope=vars(nested)) for row in nested.ROWS}


@pytest.mark.parametrize("name", STAY)
def test_where_nested_graphs_stay(name):
    check(STAY[name], "aot_eager")


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("R-Drop", 0),
        ("a loss inside, and logits that leave", 0),
        ("hidden layers that stay nested", 2),
    ],
)
def test_only_the_regions_that_are_fused_are_inlined(name, calls):
    row = ROWS[name]
    assert "= invoke_subgraph(" in testing.original(row.program(), *row.tensors())
    torch._dynamo.reset()
    report = report_of(row.program(), *row.tensors())
    assert len(report.matches[0].shapes) == 2
    text = report.after[0].split("\n\n")[0]  # Dynamo's graph, before the joint graphs
    assert text.count("= invoke_subgraph(") == calls


def test_random_numbers_are_drawn_where_they_are(caplog):
    row = ROWS["random numbers inside"]
    with caplog.at_level(logging.DEBUG, "fxpass"):
        assert "= invoke_subgraph(" in testing.rewritten(row.program(), *row.tensors())
    assert "the nested region stays: it draws random numbers" in caplog.text
