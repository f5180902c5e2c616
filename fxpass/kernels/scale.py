"""Multiplies a gradient in place by a number on the GPU, which is nearly always 1.

In: a contiguous gradient and a factor. The kernel reads the factor, and ends at once if it is 1:
the host does not wait, and nothing reads the gradient. An element that is 0 stays 0::

    >>> import torch
    >>> gradient = torch.ones(2, 3)  # on a GPU
    >>> scale_(gradient, torch.tensor(0.5))
    >>> gradient.sum()
    tensor(3.)
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

# Elements of a block, and blocks of a program: few programs start in vain if the factor is 1.
# (The interpreter of Triton 3.6 cannot loop to a number that the program computes.)
BLOCK = 4096
BLOCKS = 16


@triton.jit
def kernel(gradient, factor, count, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        first = tl.program_id(0).to(tl.int64) * BLOCK * BLOCKS
        for i in range(BLOCKS):
            place = first + i * BLOCK + tl.arange(0, BLOCK)
            inside = place < count
            old = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
            new = tl.where(old == 0.0, 0.0, old * by)
            tl.store(gradient + place, new.to(gradient.dtype.element_ty), mask=inside)


def scale_(gradient: Tensor, factor: Tensor) -> None:
    """``gradient *= factor`` for a contiguous gradient of 16 bits or f32, and a factor of one
    element on the same device, the current one."""
    count = gradient.numel()
    if count:
        launch: Any = kernel[(triton.cdiv(count, BLOCK * BLOCKS),)]
        launch(gradient, factor, count, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=8)
