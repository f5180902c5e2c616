"""The graph before and after, one whole example of each kind of rewrite."""

from __future__ import annotations

import expecttest
import torch
import torch.nn.functional as F

from fxpass import testing

V = 10


def shifted(x, weight, labels):
    logits = F.linear(x, weight).float()
    logits = 30 * torch.tanh(logits / 30)
    return F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, V), labels[..., 1:].contiguous().view(-1)
    )


def with_logits(x, weight, labels):
    logits = F.linear(x, weight)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def with_largest(x, weight, labels):
    logits = F.linear(x, weight)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits.cumsum(-1)


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

    def test_logits_deferred(self):
        """The output leaves the graph; what it can be computed from are inputs already."""
        self.assertExpectedInline(
            testing.rewritten(with_logits, *inputs()),
            """\
%l_x_: f32[2, 4, 6] = input
%l_weight_: f32[10, 6] = input
%l_labels_: i64[2, 4] = input
%flatten_1: i64[8] = flatten(%l_labels_)
%view_default: f32[8, 6] = aten.view(%l_x_, (8, 6))
%ne_scalar: b8[8] = aten.ne(%flatten_1, -100)
%ne_scalar_1: b8[8] = aten.ne(%flatten_1, -100)
%where_scalar_other: i64[8] = aten.where(%ne_scalar_1, %flatten_1, 0)
%unsqueeze_default: i64[8, 1] = aten.unsqueeze(%where_scalar_other, 1)
%full_default: f32[] = aten.full((), 0, dtype=torch.float32, device=device(type='cpu'))
%squeeze_dim: i64[8] = aten.squeeze(%unsqueeze_default, 1)
%ne_scalar_2: b8[8] = aten.ne(%flatten_1, -100)
%sum_default_1: i64[] = aten.sum(%ne_scalar_2)
%to_device: f32[] = aten.to(%sum_default_1, device(type='cpu'), torch.float32)
%new_zeros_default: f32[8] = aten.new_zeros(%view_default, (8,), dtype=torch.float32)
%mul_tensor: f32[8] = aten.mul(%new_zeros_default, -1)
%where_self_1: f32[8] = aten.where(%ne_scalar, %mul_tensor, %full_default)
%sum_default_2: f32[] = aten.sum(%where_self_1)
%div_tensor_1: f32[] = aten.div(%sum_default_2, %to_device)
%ones_like_default: f32[] = aten.ones_like(%div_tensor_1, memory_format=torch.preserve_format)
%div_tensor_2: f32[] = aten.div(%ones_like_default, %to_device)
%expand_default: f32[8] = aten.expand(%div_tensor_2, (8,))
%scalar_tensor_default: f32[] = aten.scalar_tensor(0, dtype=torch.float32, device=device(type='cpu'))
%where_self_2: f32[8] = aten.where(%ne_scalar, %expand_default, %scalar_tensor_default)
%mul_tensor_1: f32[8] = aten.mul(%where_self_2, -1)
%unsqueeze_default_1: f32[1, 8] = aten.unsqueeze(%mul_tensor_1, 0)
%class_reductions_default_1 = fxpass.class_reductions(x=%view_default, weight=%l_weight_, picks=%squeeze_dim, given=(), coef=%unsqueeze_default_1, spec='r6 gradients=x,weight total=pick')
%getitem_1: f32[] = operator.getitem(%class_reductions_default_1, 0)
%add: f32[] = add(%getitem_1, %div_tensor_1)
return (%add,)""",
        )

    def test_logits_kept(self):
        """The linear stays for its other reader, and the loss is taken from its logits."""
        self.assertExpectedInline(
            testing.rewritten(with_largest, *inputs()),
            """\
%l_x_: f32[2, 4, 6] = input
%l_weight_: f32[10, 6] = input
%l_labels_: i64[2, 4] = input
%logits: f32[2, 4, 10] = linear(%l_x_, %l_weight_)
%flatten_1: i64[8] = flatten(%l_labels_)
%view_default: f32[8, 6] = aten.view(%l_x_, (8, 6))
%ne_scalar: b8[8] = aten.ne(%flatten_1, -100)
%ne_scalar_1: b8[8] = aten.ne(%flatten_1, -100)
%where_scalar_other: i64[8] = aten.where(%ne_scalar_1, %flatten_1, 0)
%unsqueeze_default: i64[8, 1] = aten.unsqueeze(%where_scalar_other, 1)
%detach: f32[2, 4, 10] = detach(%logits)
%flatten_2: f32[8, 10] = flatten(%detach, 0, 1)
%full_default: f32[] = aten.full((), 0, dtype=torch.float32, device=device(type='cpu'))
%squeeze_dim: i64[8] = aten.squeeze(%unsqueeze_default, 1)
%ne_scalar_2: b8[8] = aten.ne(%flatten_1, -100)
%sum_default_1: i64[] = aten.sum(%ne_scalar_2)
%to_device: f32[] = aten.to(%sum_default_1, device(type='cpu'), torch.float32)
%new_zeros_default: f32[8] = aten.new_zeros(%view_default, (8,), dtype=torch.float32)
%mul_tensor: f32[8] = aten.mul(%new_zeros_default, -1)
%where_self_1: f32[8] = aten.where(%ne_scalar, %mul_tensor, %full_default)
%sum_default_2: f32[] = aten.sum(%where_self_1)
%div_tensor_1: f32[] = aten.div(%sum_default_2, %to_device)
%ones_like_default: f32[] = aten.ones_like(%div_tensor_1, memory_format=torch.preserve_format)
%div_tensor_2: f32[] = aten.div(%ones_like_default, %to_device)
%expand_default: f32[8] = aten.expand(%div_tensor_2, (8,))
%scalar_tensor_default: f32[] = aten.scalar_tensor(0, dtype=torch.float32, device=device(type='cpu'))
%where_self_2: f32[8] = aten.where(%ne_scalar, %expand_default, %scalar_tensor_default)
%mul_tensor_1: f32[8] = aten.mul(%where_self_2, -1)
%unsqueeze_default_1: f32[1, 8] = aten.unsqueeze(%mul_tensor_1, 0)
%class_reductions_default_1 = fxpass.class_reductions(x=%view_default, weight=%l_weight_, picks=%squeeze_dim, given=(), coef=%unsqueeze_default_1, logits=%flatten_2, spec='r6 gradients=x,weight total=pick')
%getitem_1: f32[] = operator.getitem(%class_reductions_default_1, 0)
%add: f32[] = add(%getitem_1, %div_tensor_1)
%cumsum: f32[2, 4, 10] = cumsum(%logits, -1)
return (%add, %cumsum)""",
        )

    def test_a_loss_in_low_precision_keeps_its_dtype(self):
        x, weight, labels = inputs()

        def program(x, weight):
            return F.cross_entropy(F.linear(x, weight).view(-1, V), labels.view(-1))

        after = testing.rewritten(program, x.detach().bfloat16(), weight.detach().bfloat16())
        self.assertExpectedInline(
            after,
            """\
%l_x_: bf16[2, 4, 6] = input
%l_weight_: bf16[10, 6] = input
%l_labels_: i64[2, 4] = input
%view_1: i64[8] = view(%l_labels_, -1)
%view_default: bf16[8, 6] = aten.view(%l_x_, (8, 6))
%ne_scalar: b8[8] = aten.ne(%view_1, -100)
%ne_scalar_1: b8[8] = aten.ne(%view_1, -100)
%where_scalar_other: i64[8] = aten.where(%ne_scalar_1, %view_1, 0)
%unsqueeze_default: i64[8, 1] = aten.unsqueeze(%where_scalar_other, 1)
%full_default: bf16[] = aten.full((), 0, dtype=torch.bfloat16, device=device(type='cpu'))
%squeeze_dim: i64[8] = aten.squeeze(%unsqueeze_default, 1)
%detach: bf16[8, 6] = detach(%view_default)
%detach_1: bf16[10, 6] = detach(%l_weight_)
%ne_scalar_2: b8[8] = aten.ne(%view_1, -100)
%sum_default_1: i64[] = aten.sum(%ne_scalar_2)
%to_device: bf16[] = aten.to(%sum_default_1, device(type='cpu'), torch.bfloat16)
%new_zeros_default: f32[8] = aten.new_zeros(%view_default, (8,), dtype=torch.float32)
%mul_tensor: f32[8] = aten.mul(%new_zeros_default, -1)
%where_self_1: f32[8] = aten.where(%ne_scalar, %mul_tensor, %full_default)
%sum_default_2: f32[] = aten.sum(%where_self_1)
%div_tensor_1: f32[] = aten.div(%sum_default_2, %to_device)
%ones_like_default: f32[] = aten.ones_like(%div_tensor_1, memory_format=torch.preserve_format)
%div_tensor_2: f32[] = aten.div(%ones_like_default, %to_device)
%expand_default: f32[8] = aten.expand(%div_tensor_2, (8,))
%scalar_tensor_default: f32[] = aten.scalar_tensor(0, dtype=torch.float32, device=device(type='cpu'))
%where_self_2: f32[8] = aten.where(%ne_scalar, %expand_default, %scalar_tensor_default)
%mul_tensor_1: f32[8] = aten.mul(%where_self_2, -1)
%unsqueeze_default_1: f32[1, 8] = aten.unsqueeze(%mul_tensor_1, 0)
%class_reductions_default_1 = fxpass.class_reductions(x=%detach, weight=%detach_1, picks=%squeeze_dim, given=(), coef=%unsqueeze_default_1, spec='r6 total=pick')
%getitem_1: f32[] = operator.getitem(%class_reductions_default_1, 0)
%add: f32[] = add(%getitem_1, %div_tensor_1)
%_to_copy_default_1: bf16[] = aten._to_copy(%add, dtype=torch.bfloat16)
return (%_to_copy_default_1,)""",
        )

    def test_nothing_to_match_leaves_the_graph_alone(self):
        def program(x, weight, labels):
            return F.linear(x, weight).cumsum(0).sum() + F.nll_loss(
                x.view(8, 6), labels.view(-1) % 6
            )

        args = inputs()
        before = testing.original(program, *args)
        torch._dynamo.reset()
        self.assertEqual(before, testing.rewritten(program, *args))


def test_new_nodes_carry_the_users_line():
    graphs = []
    from fxpass.rewrite.transform import transform
    from fxpass.settings import Settings

    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(shifted, backend=lambda gm, _: graphs.append(gm) or gm)(*inputs())
        old = {node.name for node in graphs[0].graph.nodes}
        transform(graphs[0], Settings(min_logits_mb=0))
    new = [node for node in graphs[0].graph.nodes if node.name not in old]
    assert len(new) > 4
    assert all("test_rewrite.py" in n.meta["stack_trace"] for n in new)
    assert all("example_value" in n.meta for n in new)


def test_an_unused_loss_beside_it_is_untouched():
    """Only the chain of the match is erased."""

    def program(x, weight, labels):
        logits = F.linear(x, weight)
        other = F.linear(x, weight * 2)
        return F.cross_entropy(logits.view(-1, V), labels.view(-1)) + other.cumsum(0).mean()

    after = testing.rewritten(program, *inputs())
    assert after.count("= linear(") == 1
    assert after.count("= fxpass.class_reductions(") == 1
