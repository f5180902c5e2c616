"""The inputs of a deferred computation, and the check that they are unchanged.

In: tensors that a computation will read later. Out: their unchanged values, or an error::

    given = Input(weight, is_row=False)
    weight.data.mul_(2)  # bumps no version counter
    given.checked("logits = self.lm_head(x)")  # StaleLogitsError
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD = 8  # bytes of a word of the fingerprint
BLOCK = 256  # words that are summed to one number
# Words whose products are materialised at a time: they fit into a CPU core's cache, or fill a GPU.
# PyTorch runs PER_CORE words on one core. Up to FEW_CORES cores are no faster than one: they would
# synchronise hundreds of times, which is slow if another process is busy.
PER_CORE, PER_GPU = 2**15 - BLOCK, 2**21
FEW_CORES = 4


class StaleLogitsError(RuntimeError):
    """Deferred logits can no longer be computed, because an input was changed or freed."""

    def __init__(self, source: str, tensor: Tensor, what: str) -> None:
        super().__init__(
            f"the logits of `{source}` were deferred, and one of their inputs, a "
            f"{str(tensor.dtype).removeprefix('torch.')} tensor of shape {list(tensor.shape)}, "
            f"{what} before they were used. Use the logits earlier (with FSDP, which frees "
            "gathered weights: before backward()), keep a copy of them earlier (logits.clone()), "
            "or have them computed with the loss (FUSEDCE_LOGITS=keep)"
        )


class Input:
    """A tensor that a deferred computation will read.

    It holds an alias of the memory, so that ``weight.data = other`` has no effect on it, the
    version counter, and a fingerprint of the bits.

    Args:
        tensor: a plain dense tensor of any dtype and strides.
        is_row: whether its leading dimensions are those of the logits.
    """

    def __init__(self, tensor: Tensor, is_row: bool) -> None:
        self.tensor = tensor.detach()
        self._is_clone = False  # a clone has no other references that could change it
        self._version = None if tensor.is_inference() else tensor._version
        self._fingerprint = None if _freed(tensor) else fingerprint(self.tensor)
        owner = tensor if tensor._base is None else tensor._base
        # An optimizer may change leaves: parameters and copies of them. It changes hidden states
        # only if they require a gradient as leaves.
        self._is_parameter = owner.is_leaf and (not is_row or owner.requires_grad)

    def checked(self, source: str) -> Tensor:
        """The tensor, detached.

        Raises:
            StaleLogitsError: the tensor was changed in place, or its memory was freed.
        """
        if _freed(self.tensor):
            raise StaleLogitsError(source, self.tensor, "was freed")
        if not self._same_version():
            raise StaleLogitsError(source, self.tensor, "was changed in place")
        if self._fingerprint is not None:
            with quiet():  # equal() waits for the device
                same = torch.equal(self._fingerprint, fingerprint(self.tensor))
            if not same:
                raise StaleLogitsError(source, self.tensor, "was changed in place (through .data)")
            if self._is_clone:
                self._fingerprint = None
        return self.tensor

    @property
    def key(self) -> tuple[object, ...] | None:
        """Inputs with equal keys can share a clone; None if a clone would not help."""
        t = self.tensor
        if self._is_clone or not self._is_parameter or _freed(t) or not self._same_version():
            return None
        return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, self._version

    def replace(self, clone: Tensor) -> None:
        """Reads ``clone`` from now on; the next check compares its bits."""
        self.tensor, self._is_clone = clone, True

    def _same_version(self) -> bool:
        return self._is_clone or self._version is None or self._version == self.tensor._version


def fingerprint(t: Tensor) -> Tensor:
    """A digest of the bits of ``t``: a small tensor on its device; equal bits give equal digests.

    For each block of 2 KiB, both halves of every 64-bit word are multiplied by different random odd
    factors and summed modulo 2⁶⁴ (multilinear hashing). It takes one pass over the memory and
    temporaries of a few MiB, without synchronisation. It always detects a change of one half. For
    each block with several changed halves, the chance of a miss is 2⁻⁶⁴ if the lowest bits of a
    half change, and 2⁻³² if only highest bits change. Short vectors are copied: their digest is
    exact.
    """
    if t.is_complex():
        t = torch.view_as_real(t)
    bits = t.detach().view(torch.uint8 if t.dtype is torch.bool else INTEGERS[t.element_size()])
    if bits.dim() <= 1 and bits.numel() <= BLOCK:
        return bits.clone()
    bits = bits.permute(sorted(range(bits.dim()), key=bits.stride, reverse=True))
    size = bits.element_size()
    if not bits.is_contiguous() or bits.storage_offset() * size % WORD:
        return _sums(bits)
    flat = bits.reshape(-1)
    in_block = BLOCK * WORD // size
    whole = flat.numel() // in_block * in_block
    return torch.cat([_sums(flat[:whole].view(torch.int64).view(-1, BLOCK)), flat[whole:].long()])


def _sums(bits: Tensor) -> Tensor:
    """Weighted sums of integers over their last dimension, flat."""
    cores = torch.get_num_threads()
    most = PER_CORE * (cores if cores > FEW_CORES else 1) if bits.is_cpu else PER_GPU
    if bits.numel() > most and len(bits) > 1:
        step = max(1, len(bits) * most // bits.numel())
        return torch.cat([_sums(part) for part in bits.split(step)])
    if bits.numel() > most and bits.dim() > 1:
        return _sums(bits[0])
    words = bits.long()
    low, high = _factors(bits.shape[-1], bits.device)
    # a factor for the high half: the product with the whole word shifts its bits out of the sum
    products = words >> 32
    products *= high
    products.addcmul_(words, low)
    return products.sum(-1).view(-1)


@functools.lru_cache(64)
def _factors(count: int, device: torch.device) -> Tensor:
    """Two rows of random odd 64-bit integers from a fixed seed."""
    with quiet():
        generator = torch.Generator().manual_seed(0)
        random = torch.randint(-(2**63), 2**63 - 1, (2, count), generator=generator)
        return (random | 1).to(device)


@contextmanager
def quiet() -> Iterator[None]:
    """Computes plain values, regardless of the caller's modes: without autocast (the dtypes are
    explicit), autograd, tracing, and inference mode (whose tensors cannot be written or saved
    later)."""
    with (
        torch._C._DisableAutocast(),
        torch.inference_mode(False),
        torch.no_grad(),
        _disable_current_modes(),
    ):
        yield


def _freed(t: Tensor) -> bool:
    return t.numel() > 0 and t.untyped_storage().size() == 0
