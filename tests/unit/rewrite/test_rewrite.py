"""The graph of a loss with a formula, whole: views of rows, casts, the soft-cap, a total."""

from __future__ import annotations

import expecttest
import torch
import torch.nn.functional as F

from fxpass import testing
from fxpass.rewrite.transform import transform
from fxpass.settings import Settings

V = 10


def shifted(x, weight, labels):
    logits = F.linear(x, weight).float()
    logits = 30 * torch.tanh(logits / 30)
    return F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, V), labels[..., 1:].contiguous().view(-1)
    )


def inputs():
    x = torch.randn(2, 4, 6, requires_grad=True)
    return x, torch.randn(V, 6, requires_grad=True), torch.randint(V, (2, 4))


class TestGraphs(expecttest.TestCase):
    maxDiff = None

    def test_shift_softcap_and_autocast(self):
        """Views of rows go to the hidden states, casts are visible, the chain is gone."""
        with torch.autocast("cpu", torch.bfloat16):
            after = testing.rewritten(shifted, *inputs())
        self.assertExpectedInline(
            after,
            """\
%l_x_: f32[2, 4, 6] = input
%l_weight_: f32[10, 6] = input
%l_labels_: i64[2, 4] = input
%getitem_1: i64[2, 3] = operator.getitem(%l_labels_, (..., 1:))
%contiguous_1: i64[2, 3] = contiguous(%getitem_1)
%view_1: i64[6] = view(%contiguous_1, -1)
%to: bf16[2, 4, 6] = to(%l_x_, torch.bfloat16)
%to_1: bf16[10, 6] = to(%l_weight_, torch.bfloat16)
%slice_tensor: bf16[2, 3, 6] = aten.slice(%to, 1, 0, -1, 1)
%flatten: bf16[6, 6] = flatten(%slice_tensor, 0, 1)
%ne_scalar: b8[6] = aten.ne(%view_1, -100)
%ne_scalar_1: b8[6] = aten.ne(%view_1, -100)
%where_scalar_other: i64[6] = aten.where(%ne_scalar_1, %view_1, 0)
%unsqueeze_default: i64[6, 1] = aten.unsqueeze(%where_scalar_other, 1)
%full_default: f32[] = aten.full((), 0, dtype=torch.float32, device=device(type='cpu'))
%view_default_1: f32[8, 6] = aten.view(%l_x_, (8, 6))
%reshape: f32[2, 4, 6] = reshape(%view_default_1, (2, 4, 6))
%slice_tensor_1: f32[2, 3, 6] = aten.slice(%reshape, 1, 0, -1, 1)
%flatten_1: f32[6, 6] = flatten(%slice_tensor_1, 0, 1)
%squeeze_dim: i64[6] = aten.squeeze(%unsqueeze_default, 1)
%ne_scalar_2: b8[6] = aten.ne(%view_1, -100)
%sum_default_1: i64[] = aten.sum(%ne_scalar_2)
%to_device: f32[] = aten.to(%sum_default_1, device(type='cpu'), torch.float32)
%new_zeros_default: f32[6] = aten.new_zeros(%flatten, (6,), dtype=torch.float32)
%mul_tensor: f32[6] = aten.mul(%new_zeros_default, -1)
%where_self_1: f32[6] = aten.where(%ne_scalar, %mul_tensor, %full_default)
%sum_default_2: f32[] = aten.sum(%where_self_1)
%div_tensor_1: f32[] = aten.div(%sum_default_2, %to_device)
%ones_like_default: f32[] = aten.ones_like(%div_tensor_1, memory_format=torch.preserve_format)
%div_tensor_2: f32[] = aten.div(%ones_like_default, %to_device)
%expand_default: f32[6] = aten.expand(%div_tensor_2, (6,))
%scalar_tensor_default: f32[] = aten.scalar_tensor(0, dtype=torch.float32, device=device(type='cpu'))
%where_self_2: f32[6] = aten.where(%ne_scalar, %expand_default, %scalar_tensor_default)
%mul_tensor_1: f32[6] = aten.mul(%where_self_2, -1)
%unsqueeze_default_1: f32[1, 6] = aten.unsqueeze(%mul_tensor_1, 0)
%class_reductions_default_1 = fxpass.class_reductions(x=%flatten, weight=%to_1, picks=%squeeze_dim, given=(), coef=%unsqueeze_default_1, spec='r6 transform=30*tanh(z/30) gradients=x,weight total=pick unrounded=x,weight', wide_x=%flatten_1, wide_weight=%l_weight_)
%getitem_3: f32[] = operator.getitem(%class_reductions_default_1, 0)
%add: f32[] = add(%getitem_3, %div_tensor_1)
return (%add,)""",
        )


def test_new_nodes_carry_the_users_line():
    graphs = []
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(shifted, backend=lambda gm, _: graphs.append(gm) or gm)(*inputs())
        old = {node.name for node in graphs[0].graph.nodes}
        transform(graphs[0], Settings(min_logits_mb=0))
    new = [node for node in graphs[0].graph.nodes if node.name not in old]
    assert len(new) > 4
    assert all("test_rewrite.py" in n.meta["stack_trace"] for n in new)
    assert all("example_value" in n.meta for n in new)
