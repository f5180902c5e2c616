"""Leaves ignored rows out of all products.

In: the inputs of a fused loss. Out: the inputs without ignored rows, and afterwards outputs for all
rows; losses and gradients of ignored rows are 0. Padding and prompts are often more than half of a
batch, and an ignored row would cost as many operations as any other row. An ignored row that holds
nan or inf does not change the gradients; eager multiplies it by 0 and gets nan gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpass.spec.operands import Inputs, Results, is_valid
from fxpass.spec.spec import Spec

# The minimum share of ignored rows that is worth the copies of x and of its gradient.
_WORTH_IT = 1 / 16

_LEFT_OUT = {"loss": 0.0, "lse": torch.finfo(torch.float32).max, "lse_rest": 0.0, "x": 0.0}


def counted_rows(inputs: Inputs, spec: Spec) -> Tensor | None:
    """The indices ``[M]`` int64 of the rows that are not ignored; None if all rows are computed.

    On a GPU this synchronises with the target. While a CUDA graph is captured it returns None,
    because a captured graph must not depend on values. It also returns None if the lse is an
    output, which ignored rows have too (the lse of a vocabulary shard is not an output), and if the
    logits exist already, because they would have to be copied.
    """
    if spec.target != "indices" or spec.ignore_index is None or inputs.target is None:
        return None
    lse_is_read = (spec.lse or inputs.lse_scale is not None) and not spec.shard_of
    if lse_is_read or inputs.logits is not None:
        return None
    return selected(is_valid(inputs.target.long(), spec))


def selected(mask: Tensor) -> Tensor | None:
    """The indices of the True elements of a mask ``[N]``; None if almost all are, or while a CUDA
    graph is captured."""
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    index = mask.nonzero().squeeze(1)
    n = mask.shape[0]
    return index if n - index.shape[0] > n * _WORTH_IT else None


def select(inputs: Inputs, spec: Spec, index: Tensor) -> Inputs:
    """The inputs of the rows ``index``; on a GPU, an ignored row of zeros if there are none.

    It loads the kernels. A CUDA graph that is captured next has all rows, and can load nothing.
    """
    per_row = {
        name: tensor
        for name in ("x", "target", "row_scale", "lse_scale", "lse", "lse_rest")
        if (tensor := getattr(inputs, name)) is not None
    }
    if inputs.x.is_cuda and not len(index):
        zeros = {name: tensor.new_zeros(1, *tensor.shape[1:]) for name, tensor in per_row.items()}
        zeros["target"].fill_(spec.ignore_index)
        return inputs._replace(**zeros)
    return inputs._replace(**{name: tensor[index] for name, tensor in per_row.items()})


def restore(out: Results, index: Tensor, n: int) -> Results:
    """The outputs for all ``n`` rows: zeros for ignored rows, and the largest finite lse.

    With this lse, the softmax is 0 if backward computes all rows, as it does while a CUDA graph is
    captured. It is finite because shards subtract their lse from each other.
    """
    per_row = {
        name: tensor.new_full((n, *tensor.shape[1:]), left_out).index_copy_(
            0, index, tensor[: len(index)]
        )
        for name, left_out in _LEFT_OUT.items()
        if (tensor := getattr(out, name)) is not None
    }
    return out._replace(**per_row)
