"""The graph of a loss with a formula, whole: views of rows, casts, the soft-cap, a total."""

from __future__ import annotations

import expecttest
import torch
import torch.nn.functional as F

from fxpass import testing
from fxpass.rows.backend import RowsPass

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
        """Dynamo's graph stays. In the joint graph casts and the loop are visible: it has a chunk of
        rows of the logits, and those that are shifted away add nothing."""
        with torch.autocast("cpu", torch.bfloat16):
            dynamo, joint = testing.rewritten(shifted, *inputs()).split("\n\n")
            assert dynamo == testing.original(shifted, *inputs())
        self.assertExpectedInline(
            joint,
            """\
%primals_1: f32[2, 4, 6] = input
%primals_2: f32[10, 6] = input
%primals_3: i64[2, 4] = input
%tangents_1: f32[] = input
%convert_element_type: bf16[10, 6] = prims.convert_element_type(a=%primals_2, dtype=torch.bfloat16)
%convert_element_type_1: bf16[2, 4, 6] = prims.convert_element_type(a=%primals_1, dtype=torch.bfloat16)
%view: bf16[8, 6] = aten.view(%convert_element_type_1, (8, 6))
%slice_2: i64[2, 3] = aten.slice(%primals_3, 1, 1, 9223372036854775807)
%clone_1: i64[2, 3] = aten.clone(%slice_2, memory_format=torch.contiguous_format)
%view_3: i64[6] = aten.view(%clone_1, (-1,))
%ne: b8[6] = aten.ne(%view_3, -100)
%scalar_tensor: i64[] = aten.scalar_tensor(0, dtype=torch.int64, layout=torch.strided, device=device(type='cpu'))
%where: i64[6] = aten.where(%ne, %view_3, %scalar_tensor)
%unsqueeze: i64[6, 1] = aten.unsqueeze(%where, 1)
%full_default: b8[8] = aten.full((8,), 0, dtype=torch.bool, device=device(type='cpu'))
%iota_default_1: i64[8] = prims.iota(length=8, start=0, step=1, dtype=torch.int64, device=device(type='cpu'), requires_grad=False)
%reshape_default_1: i64[2, 4] = aten.reshape(%iota_default_1, (2, 4))
%slice_tensor: i64[2, 3] = aten.slice(%reshape_default_1, 1, 0, 3, 1)
%reshape_default_2: i64[6] = aten.reshape(%slice_tensor, (6,))
%reshape_default_3: b8[6] = aten.reshape(%ne, (-1,))
%index_put_default: b8[8] = aten.index_put(%full_default, (%reshape_default_2,), %reshape_default_3)
%full_default_1: i64[8] = aten.full((8,), 0, dtype=torch.int64, device=device(type='cpu'))
%iota_default_2: i64[6] = prims.iota(length=6, start=0, step=1, dtype=torch.int64, device=device(type='cpu'), requires_grad=False)
%reshape_default_4: i64[6] = aten.reshape(%iota_default_2, (6,))
%reshape_default_5: i64[6] = aten.reshape(%reshape_default_4, (-1,))
%index_put_default_1: i64[8] = aten.index_put(%full_default_1, (%reshape_default_2,), %reshape_default_5)
%reshape_default_6: i64[6, 1] = aten.reshape(%unsqueeze, (-1, 1))
%full_default_2: i64[8] = aten.full((8,), 0, dtype=torch.int64, device=device(type='cpu'))
%reshape_default_7: i64[6] = aten.reshape(%iota_default_2, (6,))
%reshape_default_8: i64[6] = aten.reshape(%reshape_default_7, (-1,))
%index_put_default_2: i64[8] = aten.index_put(%full_default_2, (%reshape_default_2,), %reshape_default_8)
%ne_scalar: b8[6] = aten.ne(%view_3, -100)
%scalar_tensor_2: i64[] = aten.scalar_tensor(0, dtype=torch.int64, layout=torch.strided, device=device(type='cpu'))
%where_self: i64[6] = aten.where(%ne_scalar, %view_3, %scalar_tensor_2)
%unsqueeze_default_1: i64[6, 1] = aten.unsqueeze(%where_self, 1)
%reshape_default_9: i64[6, 1] = aten.reshape(%unsqueeze_default_1, (-1, 1))
%full_default_4: i64[8] = aten.full((8,), 0, dtype=torch.int64, device=device(type='cpu'))
%reshape_default_10: i64[6] = aten.reshape(%iota_default_2, (6,))
%reshape_default_11: i64[6] = aten.reshape(%reshape_default_10, (-1,))
%index_put_default_3: i64[8] = aten.index_put(%full_default_4, (%reshape_default_2,), %reshape_default_11)
%ne_scalar_1: b8[6] = aten.ne(%view_3, -100)
%full_default_3: f32[] = aten.full((), 1, dtype=torch.float32, device=device(type='cpu'))
%sum_2: i64[] = aten.sum(%ne)
%convert_element_type_5: f32[] = prims.convert_element_type(a=%sum_2, dtype=torch.float32)
%div_tensor: f32[] = aten.div(%full_default_3, %convert_element_type_5)
%scalar_tensor_3: f32[] = aten.scalar_tensor(0, dtype=torch.float32, layout=torch.strided, device=device(type='cpu'))
%where_self_2: f32[6] = aten.where(%ne_scalar_1, %div_tensor, %scalar_tensor_3)
%unsqueeze_default_4: f32[6, 1] = aten.unsqueeze(%where_self_2, 1)
%reshape_default_12: f32[6, 1] = aten.reshape(%unsqueeze_default_4, (-1, 1))
%full_default_5: b8[8] = aten.full((8,), False, dtype=torch.bool, device=device(type='cpu'))
%reshape_default_13: i64[6] = aten.reshape(%slice_tensor, (-1,))
%full_default_6: b8[] = aten.full((), True, dtype=torch.bool, device=device(type='cpu'))
%index_put_default_4: b8[8] = aten.index_put(%full_default_5, (%reshape_default_13,), %full_default_6)
%rows_default = fxpass.rows(tensors=(%index_put_default, %view, %convert_element_type, %index_put_default_1, %reshape_default_6, %index_put_default_2, %reshape_default_9, %index_put_default_3, %reshape_default_12, %index_put_default_4))
    rows rows=0,1,3,5,7,9 sums=1 wide=1 memory_mb=0 compiled=1
    %0 = input bool[n]
    %1 = input bfloat16[n, 6]
    %2 = input bfloat16[10, 6]
    %3 = input int64[n]
    %4 = input int64[6, 1]
    %5 = input int64[n]
    %6 = input int64[6, 1]
    %7 = input int64[n]
    %8 = input float32[6, 1]
    %9 = input bool[n]
    %10 = aten.permute.default(%2, [1, 0])
    %11 = aten.mm.default(%1, %10)
    %12 = aten.sym_size.int(%0, 0)
    %13 = aten.reshape.default(%11, [%12, 10])
    %14 = aten._to_copy.default(%13, dtype=float32)
    %15 = aten.div.Tensor(%14, 30)
    %16 = aten.tanh.default(%15)
    %17 = aten.mul.Tensor(%16, 30)
    %18 = aten.clone.default(%17)
    %19 = aten.reshape.default(%18, [%12, 10])
    %20 = aten._log_softmax.default(%19, 1, False)
    %21 = aten.index_select.default(%4, 0, %3)
    %22 = aten.gather.default(%20, 1, %21)
    %23 = aten.sym_numel.default(%3)
    %24 = aten.reshape.default(%22, [%23])
    %25 = aten.full.default([%12, 10], 0, dtype=float32)
    %26 = aten.index_select.default(%6, 0, %5)
    %27 = aten.scatter.value(%25, 1, %26, -1.0)
    %28 = aten.index_select.default(%8, 0, %7)
    %29 = aten.mul.Tensor(%27, %28)
    %30 = aten.exp.default(%20)
    %31 = aten.sum.dim_IntList(%29, [1], True)
    %32 = aten.mul.Tensor(%30, %31)
    %33 = aten.sub.Tensor(%29, %32)
    %34 = aten.reshape.default(%33, [%12, 10])
    %35 = aten.reshape.default(%9, [-1, 1])
    %36 = aten.where.self(%35, %34, %25)
    %37 = aten.mul.Tensor(%36, 30)
    %38 = aten.mul.Tensor(%16, %16)
    %39 = aten.sub.Tensor(1, %38)
    %40 = aten.mul.Tensor(%37, %39)
    %41 = aten.div.Tensor(%40, 30)
    %42 = aten._to_copy.default(%41, dtype=bfloat16)
    %43 = aten.sym_size.int(%35, 0)
    %44 = aten.reshape.default(%42, [%43, 10])
    %45 = aten.permute.default(%44, [0, 1])
    %46 = aten.t.default(%45)
    %47 = aten.mm.default(%46, %1)
    %48 = aten.mm.default(%44, %2)
    %49 = aten.reshape.default(%0, [-1])
    %50 = aten.reshape.default(%49, [-1])
    %51 = aten.zeros_like.default(%24)
    %52 = aten.where.self(%50, %24, %51)
    return %52, %47, %48
%getitem: f32[8] = operator.getitem(%rows_default, 0)
%index_tensor: f32[6] = aten.index(%getitem, (%reshape_default_2,))
%neg: f32[6] = aten.neg(%index_tensor)
%scalar_tensor_1: f32[] = aten.scalar_tensor(0, dtype=torch.float32, layout=torch.strided, device=device(type='cpu'))
%where_1: f32[6] = aten.where(%ne, %neg, %scalar_tensor_1)
%sum_3: f32[] = aten.sum(%where_1)
%div_1: f32[] = aten.div(%sum_3, %convert_element_type_5)
%getitem_2: bf16[8, 6] = operator.getitem(%rows_default, 2)
%mul_tensor_1: bf16[8, 6] = aten.mul(%getitem_2, %tangents_1)
%view_6: bf16[2, 4, 6] = aten.reshape(%mul_tensor_1, (2, 4, 6))
%convert_element_type_11: f32[2, 4, 6] = prims.convert_element_type(a=%view_6, dtype=torch.float32)
%getitem_1: f32[10, 6] = operator.getitem(%rows_default, 1)
%mul_tensor: f32[10, 6] = aten.mul(%getitem_1, %tangents_1)
%permute_default: f32[6, 10] = aten.permute(%mul_tensor, (1, 0))
%permute_default_1: f32[10, 6] = aten.permute(%permute_default, (1, 0))
return ((%div_1,), (%convert_element_type_11, %permute_default_1, None))""",
        )


def test_a_report_names_the_users_line():
    """Of a product, which the joint graph keeps."""
    with torch.autocast("cpu", torch.bfloat16):
        rows = RowsPass()
        torch.compile(shifted, backend=rows.backend())(*inputs())
    (made,) = rows.made
    (head,) = made.heads
    assert "test_rewrite.py" in head.line
    assert "logits = F.linear(x, weight).float()" in head.line
    assert all("val" in node.meta for node in made.graph.graph.nodes if node.op != "output")
