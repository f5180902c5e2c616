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
    with pytest.raises(AssertionError, match=r"%cumsum \(cumsum\) \(aten.cumsum works along rows"):
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
%slice_tensor: f32[2, 2, 4] = aten.slice(%l_h_, 1, 0, -1, 1)
%flatten: f32[4, 4] = flatten(%slice_tensor, 0, 1)
%detach: f32[4, 4] = detach(%flatten)
%ne_scalar: b8[4] = aten.ne(%l_labels_, -100)
%ne_scalar_1: b8[4] = aten.ne(%l_labels_, -100)
%where_scalar_other: i64[4] = aten.where(%ne_scalar_1, %l_labels_, 0)
%unsqueeze_default: i64[4, 1] = aten.unsqueeze(%where_scalar_other, 1)
%full_default: f32[] = aten.full((), 0, dtype=torch.float32, device=device(type='cpu'))
%squeeze_dim: i64[4] = aten.squeeze(%unsqueeze_default, 1)
%ne_scalar_2: b8[4] = aten.ne(%l_labels_, -100)
%sum_default_1: i64[] = aten.sum(%ne_scalar_2)
%to_device: f32[] = aten.to(%sum_default_1, device(type='cpu'), torch.float32)
%new_zeros_default: f32[4] = aten.new_zeros(%detach, (4,), dtype=torch.float32)
%mul_tensor: f32[4] = aten.mul(%new_zeros_default, -1)
%where_self_1: f32[4] = aten.where(%ne_scalar, %mul_tensor, %full_default)
%sum_default_2: f32[] = aten.sum(%where_self_1)
%div_tensor_1: f32[] = aten.div(%sum_default_2, %to_device)
%ones_like_default: f32[] = aten.ones_like(%div_tensor_1, memory_format=torch.preserve_format)
%div_tensor_2: f32[] = aten.div(%ones_like_default, %to_device)
%expand_default: f32[4] = aten.expand(%div_tensor_2, (4,))
%scalar_tensor_default: f32[] = aten.scalar_tensor(0, dtype=torch.float32, device=device(type='cpu'))
%where_self_2: f32[4] = aten.where(%ne_scalar, %expand_default, %scalar_tensor_default)
%mul_tensor_1: f32[4] = aten.mul(%where_self_2, -1)
%unsqueeze_default_1: f32[1, 4] = aten.unsqueeze(%mul_tensor_1, 0)
%class_reductions_default_1 = fxpass.class_reductions(x=%detach, weight=%l_w_, picks=%squeeze_dim, given=(), coef=%unsqueeze_default_1, spec='r6 transform=30*tanh(z/30) gradients=weight total=pick')
%getitem_2: f32[] = operator.getitem(%class_reductions_default_1, 0)
%add: f32[] = add(%getitem_2, %div_tensor_1)
return (%add,)""",
        )
