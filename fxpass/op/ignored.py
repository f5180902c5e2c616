"""Rows that are ignored, left out before anything is multiplied.

In: the inputs of a fused loss. Out: the inputs of the rows that count, and afterwards outputs for
all rows again: losses and gradients of the others are 0. Padding and prompts are often more than
half of a batch, and each ignored row would cost as many operations as any other. What is nan or
infinite in an ignored row stays there, where eager multiplies it by 0 and gets nan gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpass.aten.common import Inputs, Results, is_valid
from fxpass.spec.spec import Spec

# Fewer ignored rows than this share of all are not worth the copies of x and of its gradient.
_WORTH_IT = 1 / 16

_LEFT_OUT = {"loss": 0.0, "lse": torch.finfo(torch.float32).max, "lse_rest": 0.0, "x": 0.0}


def counted_rows(inputs: Inputs, spec: Spec) -> Tensor | None:
    """The indices ``[M]`` int64 of the rows that count; None where all rows have to be looked at.

    On a GPU this waits for the target, so not while a CUDA graph is captured: what is captured
    must not depend on values. An lse that is an output exists for ignored rows too, but for a shard
    of the classes, where nobody reads it; logits that exist already would have to be copied.
    """
    if spec.target != "indices" or spec.ignore_index is None or inputs.target is None:
        return None
    lse_is_read = (spec.lse or inputs.lse_scale is not None) and not spec.shard_of
    if lse_is_read or inputs.logits is not None:
        return None
    if inputs.x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    index = is_valid(inputs.target.long(), spec).nonzero().squeeze(1)
    n = inputs.x.shape[0]
    return index if n - index.shape[0] > n * _WORTH_IT else None


def select(inputs: Inputs, index: Tensor) -> Inputs:
    """The inputs of the rows ``index``."""
    per_row = {
        name: tensor[index]
        for name in ("x", "target", "row_scale", "lse_scale", "lse", "lse_rest")
        if (tensor := getattr(inputs, name)) is not None
    }
    return inputs._replace(**per_row)


def restore(out: Results, index: Tensor, n: int) -> Results:
    """The outputs for all ``n`` rows: zeros where a row was left out, and the largest lse.

    That makes its softmax 0 in a backward which looks at all rows, as one that is captured in a
    CUDA graph does; it is finite, since shards subtract theirs from each other.
    """
    per_row = {
        name: tensor.new_full((n, *tensor.shape[1:]), left_out).index_copy_(0, index, tensor)
        for name, left_out in _LEFT_OUT.items()
        if (tensor := getattr(out, name)) is not None
    }
    return out._replace(**per_row)
