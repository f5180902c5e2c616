"""An f32 bias beside 16-bit operands is added to the up-cast logits: log priors keep their bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpass.spec import expression
from tests.support.losses import Spec, linear_cross_entropy
from tests.support.numerics import assert_close, error

N, D, V = 9, 8, 35
ALL = ("x", "weight", "bias")


def operands(device, dtype):
    """A bias of large numbers whose low bits matter, as 8 mantissa bits would lose them."""
    x, weight = torch.randn(N, D, device=device), torch.randn(V, D, device=device)
    bias = 40 + 0.3 * torch.randn(V, device=device)
    target = torch.randint(0, V, (N,)).to(device)
    target[3] = -100
    return x.to(dtype), weight.to(dtype), bias, target


def answers(program, x, weight, bias, target):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    loss = program(*leaves, target)
    loss.sum().backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
@pytest.mark.parametrize("logits", ["z", "30*tanh(z/30)"])
def test_nothing_of_it_is_rounded(implementation, device, dtype, reduction, strategy, logits):
    spec = Spec(reduction, gradients=ALL, strategy=strategy, transform=expression.parse(logits))

    def eager(x, weight, bias, target):
        z = F.linear(x, weight).to(bias.dtype) + bias
        z = 30 * torch.tanh(z / 30) if logits != "z" else z
        return F.cross_entropy(z, target, reduction=reduction)

    def fused(x, weight, bias, target):
        return linear_cross_entropy(x, weight, bias, target, spec=spec)

    *tensors, target = operands(device if implementation == "triton" else "cpu", dtype)
    ours, theirs = (answers(program, *tensors, target) for program in (fused, eager))
    exact = answers(eager, *(t.double() for t in tensors), target)
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    assert_close(ours, theirs, exact, dtype)
    x, weight, bias = tensors
    rounded = answers(eager, x, weight, bias.to(dtype).float(), target)
    if reduction == "none":  # in a mean, errors of rows may cancel
        assert error(ours[0], exact[0]) < 0.3 * error(rounded[0], exact[0])


def test_other_dtypes_are_refused():
    x, weight, bias, target = operands("cpu", torch.bfloat16)
    for wrong in (bias.half(), bias.double()):
        with pytest.raises(ValueError, match="needs a bias of "):
            linear_cross_entropy(x, weight, wrong, target, spec=Spec())
