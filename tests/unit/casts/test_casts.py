"""Casts: where they are put, what is left alone, and who is told."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.fx import Graph, Node
from torch.utils.checkpoint import checkpoint

from fxpass import messages
from fxpass.casts.casts import DYNAMO, Cast, MixedDtypeError, cast_lines, cast_region
from fxpass.graph.region import Region
from fxpass.report import explain
from tests.support.mixed_dtypes import BF16, F16, F32, F64, SAID, captured, compiled, tensor
from tests.support.numerics import assert_close, error

# ---------------------------------------------------------------- one cast


def operand_and_site(dtype: torch.dtype) -> tuple[Graph, Node, Node]:
    graph = Graph()
    operand, site = graph.placeholder("weight"), graph.placeholder("site")
    operand.meta["example_value"] = torch.ones(3, 2, dtype=dtype)
    site.meta["stack_trace"] = '  File "train.py", line 7, in step\n    loss = model(x)\n'
    return graph, operand, site


@pytest.mark.parametrize(("old", "new"), [(F32, BF16), (BF16, F32), (F16, F64)])
def test_a_cast_is_visible(old, new):
    graph, operand, site = operand_and_site(old)
    node, record = DYNAMO.insert_cast(graph, operand, new, site)
    assert (node.op, node.target, node.args) == ("call_method", "to", (operand, new))
    assert node.meta["example_value"].dtype == new
    assert node.meta["example_value"].shape == (3, 2)
    assert node.meta["stack_trace"] == site.meta["stack_trace"]
    assert record == Cast("weight", old, new, "train.py:7 loss = model(x)")


def test_casts_in_words_are_a_line_for_each_place():
    here, there = "train.py:7 loss = model(x)", "train.py:8 y = x @ w"
    made = [Cast(name, F32, BF16, here) for name in "abcde"]
    made += [Cast("x", F32, BF16, there), Cast("w", F16, F32, there), Cast("v", F32, BF16, there)]
    assert cast_lines(made) == [
        f"cast: %a, %b, %c and 2 more float32 -> bfloat16: {here}",
        f"cast: %x, %v float32 -> bfloat16: {there}",
        f"cast: %w float16 -> float32: {there}",
    ]


# ---------------------------------------------------------------- left alone


def same_dtypes(x, w):
    return F.linear(x, w).addmm_(x, w.t()).sum()


def under_autocast(x, w):
    with torch.autocast("cpu", BF16):
        return torch.mm(F.linear(x.bfloat16(), w), w).sum()


def with_float64(x, w):
    return F.linear(x.double(), w).sum()


def promoting(x, w):
    return (x.bfloat16() + w).sum() + F.layer_norm(x.bfloat16(), (8,), w[0], w[1]).sum()


@pytest.mark.parametrize("program", [same_dtypes, under_autocast, with_float64, promoting])
def test_a_graph_without_a_mismatch_is_left_byte_for_byte_alone(program):
    gm = captured(program, torch.randn(8, 8), tensor(8, 8))
    nodes, code = list(gm.graph.nodes), gm.code
    metas = [dict(node.meta) for node in nodes]
    assert cast_region(Region(gm), "error") == []
    assert list(gm.graph.nodes) == nodes
    assert [dict(node.meta) for node in nodes] == metas
    assert gm.code == code


def test_float64_beside_float32_raises_as_in_eager():
    args = torch.randn(8, 8), tensor(8, 8)
    for fn in (with_float64, compiled(with_float64)):
        with pytest.raises(RuntimeError, match="to have the same dtype"):
            fn(*args)


# ---------------------------------------------------------------- who is told what


def mixed(x, w):
    return F.linear(x, w).float().sum()


MIXED = ("l_w_", F32, BF16), __file__, mixed.__code__.co_firstlineno + 1


def test_a_cast_is_visible_and_carries_the_users_line():
    gm = captured(mixed, torch.randn(4, 8).bfloat16(), tensor(6, 8))
    (made,) = cast_region(Region(gm), "cast")
    (name, old, new), _, line = MIXED
    assert (made.operand, made.old, made.new) == (name, old, new)
    assert (
        made.source == f"tests/unit/casts/test_casts.py:{line} return F.linear(x, w).float().sum()"
    )
    (linear,) = gm.graph.find_nodes(op="call_function", target=torch._C._nn.linear)
    to = linear.args[1]
    assert (to.target, to.args[1]) == ("to", BF16)
    assert to.meta["stack_trace"] == linear.meta["stack_trace"]
    assert to.meta["example_value"].dtype == BF16


def test_counted_each_time_and_logged_once(caplog):
    caplog.set_level(logging.INFO)
    args = torch.randn(4, 8).bfloat16(), tensor(6, 8)
    for times in (1, 2):
        torch._dynamo.reset()
        compiled(mixed)(*args)
        assert torch._dynamo.utils.counters["fusedce"]["casts"] == times
    (line,) = [r.getMessage() for r in caplog.records if r.name == "fxpass.casts.casts"]
    assert line.startswith("cast: %l_w_ float32 -> bfloat16: ")
    assert "test_casts.py" in line


def test_the_report_has_it():
    report = explain(mixed, torch.randn(4, 8).bfloat16(), tensor(6, 8))
    assert "1 cast\n" in str(report)
    assert "  cast: %l_w_ float32 -> bfloat16: " in str(report)


def test_float16_with_bfloat16_warns_with_the_line(caplog):
    compiled(mixed)(torch.randn(4, 8).half(), tensor(6, 8, dtype=BF16))
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    line = MIXED[2]
    assert f"in linear, at tests/unit/casts/test_casts.py:{line} return" in record.getMessage()


# ---------------------------------------------------------------- the setting


def loss(x, w, target):
    return F.cross_entropy(F.linear(x, w), target)


def loss_under_autocast(x, w, target):
    with torch.autocast("cpu", BF16):
        return F.cross_entropy(F.linear(x, w), target)


def loss_in_a_checkpoint(x, w, target):
    with torch.autocast("cpu", BF16):
        return checkpoint(loss, x, w, target, use_reentrant=False)


def inputs(x: torch.dtype = F32, weight: torch.dtype = F32):
    return torch.randn(4, 8).to(x), tensor(10, 8, dtype=weight), torch.arange(4)


@pytest.mark.parametrize(("x", "weight"), [(BF16, F32), (F32, F16), (F16, BF16)])
def test_mixed_dtypes_can_be_an_error(x, weight):
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(loss, mixed_dtypes="error")(*inputs(x, weight))
    found = caught.value.inner_exception
    assert isinstance(found, MixedDtypeError)
    names = " and ".join(sorted(str(d).removeprefix("torch.") for d in (x, weight)))
    number = loss.__code__.co_firstlineno + 1
    line = f"test_casts.py:{number} return F.cross_entropy(F.linear(x, w), target)"
    assert (
        f"operands of {names} meet outside autocast in linear, at tests/unit/casts/{line}"
        in str(found)
    )
    assert messages.fixed(messages.MIXED_DTYPES) in str(found)


@pytest.mark.parametrize("fn", [loss_under_autocast, loss_in_a_checkpoint])
def test_mixed_dtypes_under_autocast_are_no_error(fn):
    args = inputs(BF16, F32)
    torch.testing.assert_close(
        compiled(fn, mixed_dtypes="error")(*args), fn(*args), rtol=2e-2, atol=0
    )


def test_mixed_dtypes_under_an_autocast_around_the_call_are_no_error():
    args = inputs(BF16, F32)
    with torch.autocast("cpu", BF16):
        got = compiled(loss, mixed_dtypes="error")(*args)
        torch.testing.assert_close(got, loss(*args), rtol=2e-2, atol=0)


@pytest.mark.parametrize(
    ("x", "weight", "new"), [(BF16, F32, {"l_w_": BF16}), (F16, BF16, {"l_x_": F32, "l_w_": F32})]
)
def test_a_loss_of_mixed_dtypes_is_cast_and_fused(x, weight, new):
    args = inputs(x, weight)
    report = explain(loss, *args)
    assert {made.operand: made.new for made in report.casts} == new
    assert len(report.matches) == 1
    got = compiled(loss)(*args)
    got.backward()
    same = next(iter(new.values()))
    alike = [a.detach().to(same).requires_grad_() for a in args[:2]]
    exact = [a.detach().double().requires_grad_() for a in args[:2]]
    expected, true = loss(*alike, args[2]), loss(*exact, args[2])
    expected.backward()
    true.backward()
    assert args[1].grad.dtype == weight
    theirs, trues = [expected, alike[1].grad], [true, exact[1].grad]
    assert_close([got, args[1].grad], theirs, trues, weight if weight != F32 else same)


# ---------------------------------------------------------------- nested graphs


class Lora(torch.autograd.Function):
    """Undecorated: its backward runs outside autocast, with what autocast left in forward."""

    @staticmethod
    def forward(ctx, x, w, a, b):
        ctx.save_for_backward(x, w, a, b)
        y = x @ w.t()
        return y.addmm_(x @ a.t(), b.t(), alpha=0.5)

    @staticmethod
    def backward(ctx, g):
        x, w, a, b = ctx.saved_tensors
        h = g @ b
        da = torch.zeros_like(a).addmm_(h.t(), x, alpha=0.5)
        db = torch.zeros_like(b).addmm_(g.t(), x @ a.t(), alpha=0.5)
        dx = torch.matmul(g, w, out=torch.empty_like(x))
        return dx.addmm_(h, a, alpha=0.5), None, da, db


def lora(x, w, a, b):
    return Lora.apply(x, w, a, b).float().square().mean()


def lora_tensors():
    return torch.randn(12, 16).bfloat16(), torch.randn(8, 16), tensor(2, 16), tensor(8, 2)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointed", [None, True, False], ids=["plain", "reentrant", "not"])
def test_both_bodies_of_an_autograd_function(inner, autocast, checkpointed):
    x, w, a, b = lora_tensors()
    x.requires_grad_()

    def program(x, a, b):
        with torch.autocast("cpu", BF16, enabled=autocast):
            if checkpointed is None:
                return lora(x, w, a, b)
            return checkpoint(lora, x, w, a, b, use_reentrant=checkpointed)

    with pytest.raises(RuntimeError, match=SAID):
        program(x, a, b).backward()
    for leaf in (x, a, b):
        leaf.grad = None
    compiled(program, inner=inner)(x, a, b).backward()
    exact = [t.detach().double().requires_grad_() for t in (x, a, b)]
    y = exact[0] @ w.double().t() + 0.5 * (exact[0] @ exact[1].t()) @ exact[2].t()
    y.square().mean().backward()
    for got, true in zip((x, a, b), exact, strict=True):
        assert got.grad.dtype == got.dtype
        assert error(got.grad, true.grad) < 2**-6  # a few roundings to bfloat16


def test_the_graph_of_an_autograd_function():
    x, w, a, b = lora_tensors()
    after = explain(lora, x.requires_grad_(), w, a, b).after[0]
    backward = after[after.index("%bwd_body_0 =") : after.index("%autograd_function_apply")]
    casts_there = [line.split("= ")[1] for line in backward.splitlines() if "= to(" in line]
    assert casts_there == [
        "to(%l_b_, torch.bfloat16)",  # g @ b
        "to(%t, torch.float32)",  # into da, an accumulator
        "to(%l_x_, torch.float32)",
        "to(%t_2, torch.bfloat16)",  # x @ a.t()
        "to(%t_1, torch.float32)",  # into db
        "to(%matmul_1, torch.float32)",
        "to(%l_w_, torch.bfloat16)",  # g @ w
        "to(%l_a_, torch.bfloat16)",  # h, a
    ]


def test_the_branches_of_a_cond():
    def program(x, w):
        return torch.cond(x.sum() > 0, lambda x, w: x @ w, lambda x, w: x @ (w + 1), (x, w))

    x, w = torch.ones(4, 8).bfloat16(), torch.randn(8, 6)
    for sign in (1, -1):
        got = compiled(program)(x * sign, w)
        expected = (x * sign) @ (w if sign > 0 else w + 1).bfloat16()
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert len(explain(program, x, w).casts) == 2


@pytest.mark.parametrize("call", ["linear", "addmm"])
def test_a_bias_in_low_precision_beside_a_product_in_f32(call):
    """Eager runs it for hidden states that are not contiguous, in f32."""

    def program(h, weight, bias):
        if call == "linear":
            return F.linear(h.transpose(0, 1), weight, bias)
        return torch.addmm(bias, h[0], weight.t())

    h, weight, bias = tensor(4, 8, 3), tensor(6, 3), tensor(6, dtype=BF16)
    exact = program(h, weight, bias.float())
    torch.testing.assert_close(compiled(program)(h, weight, bias), exact, rtol=1e-5, atol=1e-5)


def test_a_loss_that_is_too_small_to_fuse_is_cast_all_the_same():
    """Casts do not depend on what is fused: the linear alone would raise."""

    def program(x, weight, target):
        return F.cross_entropy(F.linear(x, weight), target)

    x, weight = tensor(8, 16, dtype=BF16), tensor(300, 16)
    target = torch.arange(8)
    with pytest.raises(RuntimeError, match="same dtype"):
        program(x, weight, target)
    loss = compiled(program, min_logits_mb=64)(x, weight, target)
    assert counters["fusedce"] == {"matched": 0, "rejected": 1, "casts": 1}
    exact = program(x.double(), weight.double(), target)
    eager = program(x, weight.to(BF16), target)
    assert_close([loss], [eager], [exact], BF16)


class Quantized(torch.Tensor):
    """A weight of 8 bits with a factor for each row, which is multiplied with inputs of any dtype
    and implements nothing but this product."""

    @staticmethod
    def __new__(cls, q, s):
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=torch.float32)

    def __init__(self, q, s):
        self.q, self.s = q, s

    def __repr__(self):
        return "Quantized"

    def __tensor_flatten__(self):
        return ["q", "s"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["q"], inner["s"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        first = args[0]
        if func is torch.ops.aten.detach.default:
            return cls(first.q.detach(), first.s.detach())
        if func is torch.ops.aten.t.default:
            return cls(first.q.t(), first.s.t())
        assert func is torch.ops.aten.mm.default, func
        return first @ (args[1].q.float() * args[1].s).to(first.dtype)


def test_a_quantized_weight_takes_inputs_of_any_dtype():
    weight = Quantized(torch.randint(-128, 127, (6, 8), dtype=torch.int8), torch.rand(6, 1))
    x = tensor(4, 8, dtype=BF16)
    got = compiled(lambda x, w: F.linear(x, w) * 2)(x, weight)
    torch.testing.assert_close(got, F.linear(x, weight) * 2, rtol=0, atol=0)


def test_a_quantized_parameter_of_a_head_is_fused_in_the_joint_graph(caplog):
    data = torch.randint(-128, 127, (6, 8), dtype=torch.int8), torch.rand(6, 1)
    weight = torch.nn.Parameter(Quantized(*data), requires_grad=False)
    x, target = tensor(4, 8), torch.arange(4)

    def program(x, target):
        return F.cross_entropy(F.linear(x, weight), target)

    report = explain(program, x, target)
    assert [match.shapes for match in report.matches] == [((4, 6),)]
    assert not report.rejections
    assert "the rewrite failed" not in caplog.text
    torch.testing.assert_close(compiled(program)(x, target), program(x, target))
