"""The product of a gradient that forward saved and the loss's incoming gradient.

In: a saved gradient and a scalar. Out: the gradient that autograd returns::

    >>> torch.ops.fxpass.scaled(torch.ones(2, 3), torch.tensor(0.5))[0]
    tensor([0.5000, 0.5000, 0.5000])

A saved 0 stays 0, whatever the factor is: an ignored row has no gradient, also of a loss that is
divided by a count of 0.

The weight's gradient is the largest tensor of a fused loss: a second tensor of its size would raise
the peak, and a pass over it costs 2 % of a step. The factor is nearly always 1. So two operators
compute the product of tensors of one dtype: ``fxpass::scaled`` in a new tensor, and
``fxpass::scale_`` in place, which reads the factor where it lies, without a wait of the host, and
ends at once where it is 1. In a compiled backward graph,
:mod:`fxpass.rewrite.in_place` puts the second in the place of the first where the saved gradient is
read by nobody else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpass.plan.devices import implementation_for, on_device

# Elements that a CPU multiplies and then rounds: few enough to stay in its caches.
_ROUNDED_AT_A_TIME = 1 << 16
# Elements of a gradient that is worth an operator of its own in a compiled graph, beside fewer
# launches: Inductor fuses a smaller one with what reads it.
_LARGE = 1 << 20


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    out = torch.empty_like(gradient)
    _multiply(gradient, factor, out)
    return out


def _scale(gradient: Tensor, factor: Tensor) -> None:
    if gradient.device.type == "cpu":
        if factor != 1:
            _multiply(gradient, factor, gradient)
        return
    runs, _ = implementation_for(gradient.device, gradient.dtype)
    if runs != "triton" or not gradient.is_contiguous():
        _multiply(gradient, factor, gradient)
        return
    from fxpass.kernels.scale import scale_  # imports triton, which not every platform has

    with on_device(gradient.device):
        scale_(gradient, factor)


def _multiply(gradient: Tensor, factor: Tensor, out: Tensor) -> None:
    """Writes the product to ``out``, which may be the gradient."""
    if not gradient.dim():
        gradient = gradient.view(1)
        out = out.view(1)
    on_cpu = gradient.device.type == "cpu"
    rows = len(gradient) if on_cpu else len(gradient) // 8 + 1  # a mask of some rows at a time
    if on_cpu and out.dtype != factor.dtype:
        # a CPU materialises the up-cast gradient and the unrounded product; a GPU's kernel does not
        rows = max(1, _ROUNDED_AT_A_TIME // max(1, gradient[:1].numel()))
    # one dimension: a factor without dimensions would be rounded to the gradient's dtype first
    factor, finite = factor.view(1), on_cpu and bool(factor.isfinite())
    for some, rounded in zip(gradient.split(rows), out.split(rows), strict=True):
        none = None if finite else some == 0
        torch.mul(some, factor, out=rounded)
        if none is not None:
            rounded.masked_fill_(none, 0)
            none = None  # one at a time


_LIBRARY = torch.library.Library("fxpass", "FRAGMENT")
for _name, _schema, _function, _fake in (
    ("scaled", "(Tensor gradient, Tensor factor) -> Tensor", _scaled, lambda g, _: g.clone()),
    ("scale_", "(Tensor(a!) gradient, Tensor factor) -> ()", _scale, lambda *_: None),
):
    _LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxpass::{_name}", _fake, lib=_LIBRARY)
