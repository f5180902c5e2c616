"""A digest of the bits of a tensor, by which a later change is noticed.

In: a tensor of any dtype, strides and device. Out: a few 64-bit integers on its device; equal bits
give equal digests::

    >>> weight = torch.ones(512, 64)  # 64 blocks
    >>> layout = ReadOrder.of(weight)
    >>> before = fingerprint(weight, layout)
    >>> bool((fingerprint(weight.mul_(2), layout) == before).all()), before.shape
    (False, torch.Size([64]))

For each block of 2 KiB, both halves of every 64-bit word are multiplied by different random odd
factors and summed modulo 2⁶⁴ (multilinear hashing). It takes one pass over the memory, without
synchronisation: one kernel on a GPU, elsewhere with temporaries of a few MiB. It always detects a
change of one half. For each block with several changed halves, the chance of a miss is 2⁻⁶⁴ if the
lowest bits of a half change, and 2⁻³² if only highest bits change. Tensors of up to 16 KiB and what
remains after the last block are copied: their digest is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fxpass.plan.devices import implementation_for, on_device

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COPIED = 2**14  # bytes of a tensor whose copy costs the host less than its sums
WORD = 8  # bytes of a word
BLOCK = 256  # words that are summed to one number
# Words whose products are materialised at a time: they fit into a CPU core's cache, or fill
# another device. PyTorch runs PER_CORE words on one core. Up to FEW_CORES cores are no faster than
# one: they would synchronise hundreds of times, which is slow if another process is busy.
PER_CORE = 2**15 - BLOCK
PER_DEVICE = 2**21
FEW_CORES = 4


class ReadOrder(NamedTuple):
    """How a digest reads a tensor. In one layout, a copy with other strides has the same digest.

    Attributes:
        order: the dimensions, in which the elements are read.
        packed: whether aligned words are read, and not single elements, which is slower.
    """

    order: tuple[int, ...]
    packed: bool

    @staticmethod
    def of(t: Tensor) -> ReadOrder:
        """The fastest layout of a tensor."""
        order = tuple(range(t.dim()))
        dense = t.is_contiguous()
        if not dense:
            order = tuple(sorted(order, key=t.stride, reverse=True))
            dense = t.permute(order).is_contiguous()
        return ReadOrder(order, dense and not t.data_ptr() % WORD)


def fingerprint(t: Tensor, layout: ReadOrder) -> Tensor:
    """The digest of a tensor: int64 with one dimension, unless it is a copy."""
    bits = t
    if t.is_complex():
        bits = torch.view_as_real(bits)
    bits = bits.view(torch.uint8 if t.dtype is torch.bool else INTEGERS[bits.element_size()])
    if bits.nbytes <= COPIED:
        return bits.clone()
    if layout.order != tuple(range(t.dim())):
        bits = bits.permute((*layout.order, *range(t.dim(), bits.dim())))
    in_block = BLOCK * WORD // bits.element_size()
    if not layout.packed:
        return _sums(bits, in_block)
    flat = bits.reshape(-1)
    whole = flat.numel() // in_block * in_block
    sums = _sums(flat[:whole].view(torch.int64).view(-1, BLOCK), BLOCK)
    return torch.cat([sums, flat[whole:].long()]) if whole < len(flat) else sums


def _sums(bits: Tensor, block: int) -> Tensor:
    """The weighted sum of every ``block`` integers of the last dimension, and of the fewer that
    remain, flat."""
    factors = _factors(block, bits.device)
    if bits.dim() <= 3 and implementation_for(bits.device, torch.float32)[0] == "triton":
        from fxpass.kernels.fingerprint import sums  # imports triton

        with on_device(bits.device):
            return sums(bits, factors)
    if bits.shape[-1] <= block:
        return _sums_of_rows(bits, factors).view(-1)
    whole = bits.shape[-1] // block * block
    sums = _sums_of_rows(bits[..., :whole].unflatten(-1, (-1, block)), factors)
    if whole < bits.shape[-1]:
        rest = _sums_of_rows(bits[..., whole:], factors)
        sums = torch.cat([sums, rest.unsqueeze(-1)], -1)
    return sums.view(-1)


def _sums_of_rows(bits: Tensor, factors: Tensor) -> Tensor:
    """Weighted sums of integers over their last dimension."""
    cores = torch.get_num_threads()
    most = PER_CORE * (cores if cores > FEW_CORES else 1) if bits.is_cpu else PER_DEVICE
    low, high = factors[:, : bits.shape[-1]]
    out = bits.new_empty(bits.shape[:-1], dtype=torch.int64)
    # new memory for each part would leave holes between the results, as large as the tensor in all
    place = out.new_empty(2, min(bits.numel(), most))
    words = products = place
    for part, sums in _parts(bits, out, most):
        if products.shape != part.shape:  # all parts but the last are equal
            words, products = (row[: part.numel()].view(part.shape) for row in place)
        words = part if part.dtype is torch.int64 else words.copy_(part)
        # a factor for the high half: the product with the whole word shifts its bits out of the sum
        torch.bitwise_right_shift(words, 32, out=products).mul_(high).addcmul_(words, low)
        torch.sum(products, -1, out=sums)
    return out


def _parts(bits: Tensor, sums: Tensor, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of at most ``most`` integers, and their parts of ``sums``. A row is one part."""
    if bits.numel() <= most or bits.dim() == 1:
        yield bits, sums
    elif len(bits) == 1:
        yield from _parts(bits[0], sums[0], most)
    else:
        step = max(1, len(bits) * most // bits.numel())
        for pair in zip(bits.split(step), sums.split(step), strict=True):
            yield from _parts(*pair, most)


@functools.lru_cache(64)
def _factors(count: int, device: torch.device) -> Tensor:
    """Two rows of random odd 64-bit integers from a fixed seed."""
    generator = torch.Generator("cpu").manual_seed(0)
    ends = -(2**63), 2**63 - 1
    random = torch.randint(*ends, (2, count), generator=generator, device="cpu")
    return (random | 1).to(device)
