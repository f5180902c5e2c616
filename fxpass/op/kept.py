"""``fxpass::kept``: a copy of an operand that backward reads, and autograd of the linear would not.

In: a tensor. Out: a copy that a compiled graph saves for backward. A plain ``clone`` is not enough:
Inductor removes it, and its partitioner computes operands again in backward, from tensors that the
user may have changed since::

    >>> weight = torch.ones(2, requires_grad=True)
    >>> loss = kept(weight).square().sum()
    >>> _ = weight.data.zero_()  # an optimizer step, say
    >>> torch.autograd.grad(loss, weight)
    (tensor([2., 2.]),)
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("fxpass::kept", mutates_args=())
def kept(operand: Tensor) -> Tensor:
    """A copy of ``operand``; its gradient is the gradient of ``operand``."""
    return operand.clone()


@kept.register_fake
def _(operand: Tensor) -> Tensor:
    return operand.clone()


def _backward(_, grad: Tensor) -> Tensor:
    return grad


kept.register_autograd(_backward)


def saved_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits ``[N, V]`` that backward reads, too; autograd does not see them."""
    # the graph's casts are explicit: an ambient autocast must not cast again
    with torch.no_grad(), torch.amp.autocast(x.device.type, enabled=False):
        if bias is None or bias.dtype == x.dtype:
            return torch.nn.functional.linear(x, weight, bias)
        return torch.nn.functional.linear(x, weight).to(bias.dtype).add_(bias)
