"""What users' own tests call."""

from __future__ import annotations

import expecttest
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
    with pytest.raises(AssertionError, match=r"%cumsum \(cumsum\) of the logits"):
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


class TestGraphs(expecttest.TestCase):
    def test_before(self):
        self.assertExpectedInline(
            testing.original(shifted, *INPUTS),
            """\
%l_h_: f32[2, 3, 4] = input
%l_w_: f32[6, 4] = input
%l_labels_: i64[4] = input
%linear: f32[2, 3, 6] = linear(%l_h_, %l_w_)
%logits: f32[2, 3, 6] = float(%linear)
%getitem: f32[2, 2, 6] = operator.getitem(%logits, (:, :-1))
%reshape: f32[4, 6] = reshape(%getitem, -1, 6)
%truediv: f32[4, 6] = operator.truediv(%reshape, 30)
%tanh: f32[4, 6] = tanh(%truediv)
%mul: f32[4, 6] = operator.mul(30, %tanh)
%cross_entropy: f32[] = cross_entropy(%mul, %l_labels_)
return (%cross_entropy,)""",
        )

    def test_after(self):
        self.assertExpectedInline(
            testing.rewritten(shifted, *INPUTS),
            """\
%l_h_: f32[2, 3, 4] = input
%l_w_: f32[6, 4] = input
%l_labels_: i64[4] = input
%getitem_1: f32[2, 2, 4] = operator.getitem(%l_h_, (:, :-1, :))
%flatten: f32[4, 4] = flatten(%getitem_1, 0, -2)
%eq: b8[4] = eq(%l_labels_, -100)
%masked_fill: i64[4] = masked_fill(%l_labels_, %eq, 0)
%new_zeros: f32[4] = new_zeros(%flatten, 4, dtype=torch.float32)
%loss_coefficients_default = fxpass.loss_coefficients(like=%new_zeros, smoothed=False, target=%l_labels_, reduction='mean', ignore_index=-100, smoothing=0.0, classes=6, row_groups=())
%getitem_2: f32[4] = operator.getitem(%loss_coefficients_default, 0)
%getitem_3: f32[] = operator.getitem(%loss_coefficients_default, 1)
%stack: f32[1, 4] = stack((%getitem_2,))
%class_reductions_default = fxpass.class_reductions(x=%flatten, weight=%l_w_, picks=%masked_fill, given=(), coef=%stack, spec='r6 transform=30*tanh(z/30) gradients=weight total=pick')
%getitem_4: f32[] = operator.getitem(%class_reductions_default, 0)
%add: f32[] = add(%getitem_4, %getitem_3)
return (%add,)""",
        )
