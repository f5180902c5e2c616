"""Launch options of the ``chunked`` kernel.

In: the number of classes, a dtype and a GPU, as compilers name it. Out: options, the default first,
then other candidates for the tuner::

    >>> row_candidates(128256, torch.bfloat16, "sm_90")[0]
    {'BLOCK_V': 8192, 'num_warps': 16}
"""

from __future__ import annotations

import torch

# Bytes of a block of a row, in the default configuration.
_BLOCK_BYTES = 1 << 14
# Other candidates, (bytes of a block, warps): more work per thread, or smaller programs.
_BLOCKS = ((_BLOCK_BYTES, 8), (_BLOCK_BYTES // 2, 8), (_BLOCK_BYTES // 4, 4))
# Bytes of the largest row that fits, with its exponentials, into the registers of 1024 threads.
_LARGEST_ROW = 1 << 16


def row_options(v: int, dtype: torch.dtype) -> dict[str, int]:
    """The default launch options: blocks of up to 16 KiB of a row and 16 elements per thread, which
    has enough loads in flight and no register spills."""
    block = min(1 << (v - 1).bit_length(), _BLOCK_BYTES // dtype.itemsize)
    return {"BLOCK_V": block, "num_warps": max(1, min(16, block // 512))}


def row_candidates(v: int, dtype: torch.dtype, target: str) -> list[dict[str, int]]:
    """The default launch options and a few others; one block for the whole row, if it fits into
    registers."""
    default = row_options(v, dtype)
    whole = 1 << (v - 1).bit_length()
    blocks = [(size // dtype.itemsize, warps) for size, warps in _BLOCKS]
    others = [(block, warps) for block, warps in blocks if block <= whole]
    if default["BLOCK_V"] < whole <= _LARGEST_ROW // dtype.itemsize:
        others.append((whole, 16 if target.startswith("gfx") else 32))
    return [default, *({"BLOCK_V": block, "num_warps": warps} for block, warps in others)]
