"""The product of a gradient that forward saved and the loss's incoming gradient.

In: a saved gradient and a scalar. Out: the gradient that autograd returns::

    >>> scaled(torch.ones(2, 3), torch.tensor(0.5), torch.bfloat16)[0]
    tensor([0.5000, 0.5000, 0.5000], dtype=torch.bfloat16)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._autograd import (  # type: ignore[reportMissingImports]
    _get_current_graph_task_keep_graph as _keep_graph,
)

from fxpass.plan.devices import on_device

# Elements that a CPU multiplies and then rounds: few enough to stay in its caches.
_ROUNDED_AT_A_TIME = 1 << 16


def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient * factor`` in ``dtype``, for a gradient that forward saved; 0 where that is 0: an
    ignored row has no gradient, also of a loss that is divided by a count of 0.

    The weight's gradient is the largest tensor of a fused loss, and a second tensor of its size
    would raise the peak. In a traced graph this function is plain arithmetic: the compiler knows
    every user of the saved gradient (two equal losses share one) and reuses its memory if possible.
    In eager only this operator refers to the saved gradient, so it is overwritten in place, unless
    the autograd graph is retained for another backward. While a CUDA graph is captured it is not
    overwritten, because a replay may run with a retained graph.
    """
    if type(gradient) is not Tensor or torch._C._len_torch_dispatch_stack():
        product = (gradient.to(factor.dtype) * factor).to(dtype)
        return product.masked_fill(gradient == 0, 0)
    on_cpu = gradient.device.type == "cpu"
    with on_device(gradient.device):
        capturing = gradient.is_cuda and torch.cuda.is_current_stream_capturing()
    last = gradient.dtype == dtype and not capturing and not _keep_graph()
    if last and on_cpu and factor == 1:  # a GPU would have to synchronise for this comparison
        return gradient.detach()
    out = gradient.detach() if last else torch.empty_like(gradient, dtype=dtype)
    rows = len(gradient) if on_cpu else len(gradient) // 8 + 1  # a mask of some rows at a time
    if on_cpu and dtype != factor.dtype:
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
    return out
