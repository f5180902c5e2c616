"""Launch options of the kernels: sizes of blocks.

In: the number of classes, a dtype, a GPU, as compilers name it, and a spec. Out: options, the
default first, then other candidates for the tuner, those that spill no registers::

    >>> row_candidates(128256, torch.bfloat16, "sm_90", Reductions(("pick",)))[0]
    {'BLOCK_V': 8192, 'num_warps': 16}
"""

from __future__ import annotations

import torch

from fxpass.spec.expression import Z, operands
from fxpass.spec.reductions import Reductions

# Bytes of a block of a row, in the default configuration.
_BLOCK_BYTES = 1 << 14
# Other candidates, (bytes of a block, warps): more work per thread, or smaller programs.
_BLOCKS = ((_BLOCK_BYTES, 8), (_BLOCK_BYTES // 2, 8), (_BLOCK_BYTES // 4, 4))
# A slice may have a few hundred classes only.
_SLICE_BLOCKS = (*_BLOCKS[1:], (_BLOCK_BYTES // 16, 1))
# Elements of the largest row that fits, with its exponentials, into the registers of 1024 threads.
_LARGEST_ROW = 1 << 14


def row_options(v: int, dtype: torch.dtype) -> dict[str, int]:
    """The default launch options: blocks of up to 16 KiB of a row and 16 elements per thread, which
    has enough loads in flight and no register spills."""
    block = min(1 << (v - 1).bit_length(), _BLOCK_BYTES // dtype.itemsize)
    return {"BLOCK_V": block, "num_warps": max(1, min(16, block // 512))}


def row_candidates(
    v: int, dtype: torch.dtype, target: str, spec: Reductions, sliced: bool = False
) -> list[dict[str, int]]:
    """The default launch options and a few others; one block for the whole row, if it fits into
    registers. A thread has more than 16 logits only where each has few other values: no weights, no
    transform, no gradient of a scale. ``sliced``: a launch may have some of the classes."""
    sums = (o for o in (*spec.outputs, *spec.total) if not isinstance(o, str))
    weighted = any(o.weight is not None for o in sums)
    light = not weighted and spec.transform == Z and "scale" not in spec.gradients
    default = row_options(v, dtype)
    whole = 1 << (v - 1).bit_length()
    # 32 elements per thread spill 8 bytes on sm_120
    sizes = _SLICE_BLOCKS if sliced else _BLOCKS[1:] if target.startswith("sm_12") else _BLOCKS
    blocks = [(size // dtype.itemsize, warps) for size, warps in sizes]
    others = [(block, warps) for block, warps in blocks if block <= whole]
    largest = _LARGEST_ROW if light else default["BLOCK_V"]
    if default["BLOCK_V"] < whole <= largest:
        others.append((whole, 16 if target.startswith("gfx") else 32))
    if operands(spec.transform):
        others = []  # they spill on sm_80
    found = [default, *({"BLOCK_V": block, "num_warps": warps} for block, warps in others)]
    return [one for one in found if light or one["BLOCK_V"] <= 16 * 32 * one["num_warps"]]
