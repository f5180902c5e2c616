"""Fused losses as the implementations get them, and what PyTorch's autograd makes of the same inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fxpass.spec import expression
from fxpass.spec.operands import Inputs
from tests.support.numerics import assert_close, in_other_orders

GRADIENTS = ("x", "weight", "bias")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

TRANSFORMS = {
    "z": lambda z: z,
    "0.0625*z": lambda z: 0.0625 * z,
    "30*tanh(z/30)": lambda z: 30 * torch.tanh(z / 30),
    "2*tanh(z)": lambda z: 2 * torch.tanh(z),
    "-0.0625*z**2+0.25*z": lambda z: z / 4 - z * z / 16,
}


def problem(
    device,
    dtype=torch.float32,
    n=7,
    d=5,
    v=37,
    bias=True,
    target="indices",
    weighted=False,
    row_scaled=False,
    lse_scaled=False,
    size=1.0,
):
    """Inputs of a fused loss; logits are of the given size."""
    generator = torch.Generator().manual_seed(n * d + v)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    indices = torch.randint(0, v, (n,), generator=generator)
    targets = {
        "indices": lambda: indices,
        "probabilities": lambda: randn(n, v).softmax(1),
        "none": lambda: None,
    }
    inputs = Inputs(
        x=(size * randn(n, d)).to(dtype),
        weight=randn(v, d).to(dtype),
        bias=randn(v).to(dtype) if bias else None,
        target=targets[target](),
        class_weight=randn(v).exp() if weighted else None,
        row_scale=randn(n) if row_scaled else None,
        lse_scale=randn(n) if lse_scaled else None,
    )
    return Inputs(*(None if t is None else t.to(device) for t in inputs))


def centred(n, v):
    """Targets ``[n, v]`` whose rows sum to exactly 0."""
    target = torch.zeros(n, v)
    target[:, 1], target[:, -2] = 0.5, -0.5
    return target


def autograd(inputs, spec, dtype):
    """Row losses, lse and gradients by PyTorch in ``dtype``; the loss itself at least in f32."""
    operands = [
        None if t is None else t.detach().to(dtype).requires_grad_()
        for t in (inputs.x, inputs.weight, inputs.bias)
    ]
    at_least_f32 = torch.promote_types(dtype, torch.float32)
    z = TRANSFORMS[expression.text(spec.transform)](F.linear(*operands).to(at_least_f32))
    lse = z.logsumexp(1)
    loss = lse
    if spec.shard_of and inputs.target is not None:
        loss = _in_shard(z, lse, inputs, spec)
    elif inputs.target is not None:
        loss = F.cross_entropy(
            z,
            inputs.target.to(at_least_f32) if spec.target == "probabilities" else inputs.target,
            None if inputs.class_weight is None else inputs.class_weight.to(at_least_f32),
            ignore_index=-1 if spec.ignore_index is None else spec.ignore_index,
            label_smoothing=spec.label_smoothing,
            reduction="none",
        )
    total = loss.sum() if inputs.row_scale is None else loss @ inputs.row_scale.to(at_least_f32)
    if inputs.lse_scale is not None:
        total = total + lse @ inputs.lse_scale.to(at_least_f32)
    total.backward()
    return loss.detach(), lse.detach(), *(None if t is None else t.grad for t in operands)


def assert_as_autograd(out, inputs, spec, wanted=range(5)):
    """Those of row losses, lse and gradients are as accurate as autograd's."""
    dtype = inputs.x.dtype

    def some(answer):
        return [answer[i] for i in wanted if answer[i] is not None]

    def run(x, weight):
        return some(autograd(inputs._replace(x=x, weight=weight), spec, dtype))

    assert_close(
        some(out),
        run(inputs.x, inputs.weight),
        some(autograd(inputs, spec, torch.float64)),
        dtype,
        lambda: in_other_orders(run, inputs.x, inputs.weight),
    )


def _in_shard(z, lse, inputs, spec):
    """Row losses where the classes are some of ``spec.shard_of``: Q * lse - sum(q * z), Q = sum(q),
    with a distribution q that has its peak in another shard where the target is -1."""
    s, target = spec.label_smoothing, inputs.target
    w = 1 if inputs.class_weight is None else inputs.class_weight.to(z.dtype)
    if spec.target == "probabilities":
        peak, counts = target.to(z.dtype), True
    else:
        peak = target.unsqueeze(1) == torch.arange(z.shape[1], device=z.device)
        ignored = -100 if spec.ignore_index is None else spec.ignore_index
        counts = (target != ignored).unsqueeze(1)
    q = w * ((1 - s) * peak + s / spec.shard_of) * counts
    # where() and not a product: a class may be impossible, and 0 * -inf is nan
    return q.sum(1) * lse - torch.where(q == 0, 0, q * z).sum(1)
