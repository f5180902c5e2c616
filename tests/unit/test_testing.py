"""What users' own tests call. What the texts of graphs look like: README, by test_readme.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpass import testing
from fxpass.report import Report, explain

INPUTS = (torch.ones(2, 3, 4), torch.ones(6, 4, requires_grad=True), torch.zeros(4).long())


def shifted(h, w, labels):
    logits = F.linear(h, w).float()
    return F.cross_entropy(30 * torch.tanh(logits[:, :-1].reshape(-1, 6) / 30), labels)


def two(h, w, labels):
    return shifted(h, w, labels) + shifted(h, w, labels)


def with_cumsum(h, w, labels):
    return F.cross_entropy(F.linear(h, w).cumsum(0)[:, 1:].flatten(0, 1), labels)


def in_two_graphs(h, w, labels):
    h = h + 1
    torch._dynamo.graph_break()
    return shifted(h, w, labels)


@pytest.mark.parametrize(("fn", "losses"), [(shifted, 1), (two, 2), (with_cumsum, 0)])
def test_assert_fused_returns_the_report(fn, losses):
    report = testing.assert_fused(fn, *INPUTS, losses=losses)
    assert isinstance(report, Report)
    assert len(report.matches) == losses


@pytest.mark.parametrize(("fn", "losses"), [(with_cumsum, 1), (two, 1), (shifted, 2), (shifted, 0)])
def test_assert_fused_fails_with_the_report(fn, losses):
    report = explain(fn, *INPUTS)
    with pytest.raises(AssertionError) as caught:
        testing.assert_fused(fn, *INPUTS, losses=losses)
    first, rest = str(caught.value).split("\n", 1)
    named = {0: "0 fused losses", 1: "1 fused loss", 2: "2 fused losses"}
    assert first == f"expected {named[losses]}, found {len(report.matches)}"
    assert rest == str(report)


def test_a_miss_says_why():
    with pytest.raises(AssertionError, match=r"aten.cumsum at \S+ works along rows"):
        testing.assert_fused(with_cumsum, *INPUTS)


def test_one_loss_is_expected_where_nothing_is_said():
    with pytest.raises(AssertionError, match="expected 1 fused loss, found 2"):
        testing.assert_fused(two, *INPUTS)


def test_keywords_reach_the_function():
    h, w, labels = INPUTS
    testing.assert_fused(shifted, h, labels=labels, w=w)
    assert testing.rewritten(shifted, h, labels=labels, w=w)


def test_the_texts_of_two_graphs_are_apart():
    first, second = testing.original(in_two_graphs, *INPUTS).split("\n\n")
    assert ("cross_entropy" in first, "cross_entropy" in second) == (False, True)
    assert testing.rewritten(in_two_graphs, *INPUTS).split("\n\n")[0] == first
