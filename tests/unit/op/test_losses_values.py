"""The fused loss in ATen: loss and every gradient against float64."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass.op import run
from fxpass.plan.plan import Plan
from fxpass.spec import expression
from tests.support.losses import Spec, linear_cross_entropy
from tests.support.numerics import (
    ORDERS,
    assert_as_accurate,
    assert_close,
    in_other_orders,
    loss_and_gradients,
)

STRATEGY = "chunked"
SOFTCAP = expression.parse("30*tanh(z/30)")
TRANSFORMS = {
    expression.Z: lambda z: z,
    SOFTCAP: lambda z: 30 * torch.tanh(z / 30),
    expression.parse("z/4"): lambda z: z / 4,
}


@pytest.fixture(params=["chunked", "tiled"], autouse=True)
def strategy(request, monkeypatch) -> str:
    """What :func:`programs` runs: chunks of 3 rows, or tiles of 3 rows and 4 classes."""
    plan = Plan("aten", request.param, 3, 4, "a test", block=2)
    monkeypatch.setattr(run, "plan", lambda *_: plan)
    monkeypatch.setitem(globals(), "STRATEGY", request.param)
    return request.param


def programs(
    spec: Spec, target: Tensor, class_weight: Tensor | None, keep: bool = False
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The fused loss and the program it stands for, both of (x, weight[, bias])."""
    spec = dataclasses.replace(spec, strategy=STRATEGY)

    def fused(x, weight, bias=None):
        logits = F.linear(x, weight, bias).detach() if keep else None
        return linear_cross_entropy(x, weight, bias, target, class_weight, logits, spec=spec)

    def plain(x, weight, bias=None):
        z = TRANSFORMS[spec.transform](F.linear(x, weight, bias))
        soft = spec.target == "probabilities"
        return F.cross_entropy(
            z,
            target.to(z.dtype) if soft else target,
            None if class_weight is None else class_weight.to(z.dtype),
            reduction=spec.reduction,
            ignore_index=-100 if spec.ignore_index is None else spec.ignore_index,
            label_smoothing=spec.label_smoothing,
        )

    return fused, plain


def check(
    spec: Spec,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, int, int] = (17, 5, 11),
    bias: bool = False,
    weighted: bool = False,
    scale: float = 1.0,
    target: Tensor | None = None,
    keep: bool = False,
) -> None:
    n, d, v = shape
    tensors = [(torch.randn(n, d) * scale).to(dtype), torch.randn(v, d).to(dtype)]
    tensors += [torch.randn(v).to(dtype)] if bias else []
    if spec.target == "probabilities":
        target = torch.randn(n, v).softmax(1)
    elif spec.target == "indices" and target is None:
        target = torch.randint(v, (n,))
        if spec.ignore_index is not None:
            target[1::20] = spec.ignore_index  # too few to be left out beforehand
    class_weight = torch.rand(v) if weighted else None
    upstream = torch.arange(1.0, n + 1) if spec.reduction == "none" else None
    fused, plain = programs(spec, target, class_weight, keep)
    wide = torch.float32 if dtype == torch.float16 else dtype  # eager has no fp16 loss on CPUs
    assert_as_accurate(fused, plain, tensors, dtype, upstream, wide)


def gradients(bias: bool) -> tuple[str, ...]:
    return ("x", "weight", "bias") if bias else ("x", "weight")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("target", ["indices", "probabilities"])
def test_every_combination_of_features(target, reduction, dtype):
    for smoothing, weighted, bias, logits in itertools.product(
        (0.0, 0.1), (False, True), (False, True), TRANSFORMS
    ):
        spec = Spec(reduction, target, -100, smoothing, logits, gradients(bias))
        check(spec, dtype, bias=bias, weighted=weighted)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_no_row_is_ignored_without_an_ignore_index(reduction, weighted):
    spec = Spec(reduction, ignore_index=None, gradients=gradients(True))
    check(spec, bias=True, weighted=weighted)


NEW = [Spec(label_smoothing=0.1), Spec(target="probabilities"), Spec(ignore_index=None)]


@pytest.mark.parametrize("spec", NEW)
@pytest.mark.parametrize("shape", [(0, 5, 11), (1, 1, 1), (7, 1, 11), (7, 5, 1), (300, 3, 13)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_sizes_of_what_else_there_is(reduction, shape, spec):
    spec = dataclasses.replace(spec, reduction=reduction, gradients=gradients(True))
    check(spec, shape=shape, bias=True)


@pytest.mark.parametrize("spec", NEW)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_logits_of_what_else_there_is(dtype, reduction, spec):
    for logits in TRANSFORMS:
        spec = dataclasses.replace(
            spec, reduction=reduction, transform=logits, gradients=gradients(False)
        )
        check(spec, dtype, scale=1e4)


@pytest.mark.parametrize("shape", [(1, 5, 11), (1, 1, 2), (3, 7, 1), (300, 3, 13)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_sizes(shape, reduction):
    check(Spec(reduction, gradients=gradients(False)), shape=shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logits", list(TRANSFORMS), ids=str)
def test_huge_logits(dtype, logits):
    check(Spec(transform=logits, gradients=gradients(False)), dtype, scale=1e4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_every_row_ignored(reduction, weighted, smoothing):
    """Mean gives nan and zero gradients, as eager does; a z-loss does not ignore them."""
    spec = Spec(reduction, "indices", -1, smoothing, gradients=gradients(False))
    target = torch.full((7,), -1)
    for keep in (False, True):  # rows of given logits are never left out beforehand
        check(spec, shape=(7, 5, 11), weighted=weighted, target=target, keep=keep)


def test_a_padded_class_with_a_bias_of_minus_infinity():
    x, weight = torch.randn(4, 3), torch.randn(5, 3)
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, float("-inf")])
    target = torch.tensor([0, 1, 2, 3])
    fused, plain = programs(Spec(gradients=("x", "weight", "bias")), target, None)
    assert_as_accurate(fused, plain, [x, weight, bias], torch.float32)


def test_uint8_targets_do_not_wrap_around():
    """-100 is 156 modulo 256, and 156 is a class like any other."""
    x, weight = torch.randn(2, 5), torch.randn(200, 5)
    target = torch.tensor([156, 3], dtype=torch.uint8)
    fused, plain = programs(Spec(gradients=gradients(False)), target, None)
    torch.testing.assert_close(fused(x, weight), plain(x, weight))


def test_strided_inputs():
    x, weight = torch.randn(5, 14)[:, ::2].t(), torch.randn(5, 22)[:, ::2].t()  # [7, 5], [11, 5]
    target = torch.randint(11, (14,))[::2]
    fused, plain = programs(Spec(gradients=gradients(False)), target, None)
    assert_as_accurate(fused, plain, [x, weight], torch.float32)


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ignored_rows_are_not_multiplied(reduction, kept):
    """Nothing of what is in them arrives anywhere; their losses and gradients are zeros."""
    counted = torch.arange(7).sub(2).ge(0).logical_and(torch.arange(7) < 2 + kept)
    target = torch.where(counted, torch.arange(7), -100)
    x, weight, bias, class_weight = (torch.randn(s) for s in ((7, 5), (11, 5), 11, 11))
    spec, upstream = Spec(reduction, gradients=gradients(True)), torch.arange(1.0, 8)
    fused, _ = programs(spec, target, class_weight.exp())
    _, plain = programs(spec, target[counted], class_weight.exp())
    x[~counted] = torch.nan
    upstream = upstream if reduction == "none" else None
    got = loss_and_gradients(fused, [x, weight, bias], None, upstream)
    upstream = None if upstream is None else upstream[counted]
    want = loss_and_gradients(plain, [x[counted], weight, bias], None, upstream)
    if kept or reduction != "mean":  # of no rows it is nan
        assert not got[1][~counted].any()
        torch.testing.assert_close(got[1][counted], want[1])
    if reduction == "none":
        assert not got[0][~counted].any()
        got[0] = got[0][counted]
    torch.testing.assert_close(got[0], want[0], equal_nan=True)
    for ours, theirs in zip(got[2:], want[2:], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("target", ["indices", "probabilities"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_large_logits_that_differ_by_little(target, smoothing):
    """A log-sum-exp of 3e4 in f32 is off by up to 1e-3, and so is a softmax taken from it alone."""
    x, weight, bias = torch.randn(7, 5), torch.randn(11, 5), torch.randn(11) + 3e4
    given = torch.randn(7, 11).softmax(1) if target == "probabilities" else torch.arange(7)
    spec = Spec("mean", target, label_smoothing=smoothing, gradients=gradients(True))
    fused, plain = programs(spec, given, None)
    assert_as_accurate(fused, plain, [x, weight, bias], torch.float32)


@pytest.mark.parametrize("all_rows", ["forward", "backward"])
def test_ignored_rows_are_left_out_of_one_pass_only(monkeypatch, all_rows):
    """Backward may look at rows that forward did not, and the other way round: one of the two is
    captured in a CUDA graph."""
    x, weight = torch.randn(7, 5) * 40, torch.randn(11, 5)
    target = torch.tensor([3, -100, -100, 0, -100, 7, -100])
    spec = Spec("none", gradients=gradients(False))
    fused, plain = programs(spec, target, None)

    def gradients_of(program, *tensors):
        operands = [t.clone().requires_grad_() for t in tensors]
        with monkeypatch.context() as patch:
            if all_rows == "forward":
                patch.setattr(run, "selected", lambda *_: None)
            loss = program(*operands)
        with monkeypatch.context() as patch:
            if all_rows == "backward":
                patch.setattr(run, "selected", lambda *_: None)
            return torch.autograd.grad(loss.sum(), operands)

    got, eager = (gradients_of(program, x, weight) for program in (fused, plain))
    exact = gradients_of(plain, x.double(), weight.double())
    again = functools.partial(gradients_of, plain)
    orders = functools.partial(in_other_orders, again, x, weight, ORDERS)
    assert_close(got, eager, exact, torch.float32, orders)


@pytest.mark.parametrize("count", [1, 10])
def test_few_rows_with_a_gradient(count):
    """A confident row's gradient is 1 - p, which another rounding of the logits would change; the
    product of few rows has another one than that of all."""
    x, weight = torch.randn(30, 16) * 8, torch.randn(40, 16) * 4
    target = (x @ weight.t()).argmax(-1)
    upstream = (torch.arange(30) >= 30 - count).float()
    spec = Spec("none", gradients=gradients(False))
    fused, plain = programs(spec, target, None)
    assert_as_accurate(fused, plain, [x, weight], torch.float32, upstream)
