"""The inputs of a deferred computation, and proof that they are still what they were.

In: tensors that a computation will read later. Out: the same values then, or an error::

    held = Held(weight, is_row=False)
    weight.data.mul_(2)  # bumps no version counter
    held.take("logits = self.lm_head(x)")  # StaleLogitsError
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD = 8  # bytes that one addition of a fingerprint covers
BLOCK = 256  # words that are summed to one number


class StaleLogitsError(RuntimeError):
    """Deferred logits cannot be computed any more: one of their inputs changed or is gone."""

    def __init__(self, source: str, tensor: Tensor, what: str) -> None:
        super().__init__(
            f"the logits of `{source}` were deferred, and one of their inputs, a "
            f"{str(tensor.dtype).removeprefix('torch.')} tensor of shape {list(tensor.shape)}, "
            f"{what} before they were used. Use the logits earlier (with FSDP, which frees "
            "gathered weights: before backward()), keep a copy of them earlier (logits.clone()), "
            "or have them computed with the loss (FUSEDCE_LOGITS=keep)"
        )


class Held:
    """An input of one deferred computation.

    It holds the values by an alias, so that ``weight.data = other`` does not reach them, and
    remembers the version counter and a fingerprint of the bits.

    Args:
        tensor: a plain dense tensor of any dtype and strides.
        is_row: its leading dimensions are those of the logits.
    """

    def __init__(self, tensor: Tensor, is_row: bool) -> None:
        self.tensor = tensor.detach()
        self.private = False  # nobody else can change it
        self._version = None if tensor.is_inference() else tensor._version
        self._mark = None if _freed(tensor) else fingerprint(self.tensor)
        owner = tensor if tensor._base is None else tensor._base
        # What an optimizer may step on: parameters and whatever they are copied to. Hidden states
        # are not, unless somebody optimizes them.
        self.stepped = owner.is_leaf and (not is_row or owner.requires_grad)

    def take(self, source: str) -> Tensor:
        """The tensor, detached.

        Raises:
            StaleLogitsError: it was changed in place, or its memory was freed.
        """
        if _freed(self.tensor):
            raise StaleLogitsError(source, self.tensor, "was freed")
        if not self._same_version():
            raise StaleLogitsError(source, self.tensor, "was changed in place")
        if self._mark is not None:
            with quiet():
                same = torch.equal(self._mark, fingerprint(self.tensor))  # waits for the device
            if not same:
                raise StaleLogitsError(source, self.tensor, "was changed in place (through .data)")
            if self.private:
                self._mark = None
        return self.tensor

    @property
    def key(self) -> tuple[object, ...] | None:
        """Equal for inputs that one clone can stand for; None if a clone would not help."""
        t = self.tensor
        if self.private or not self.stepped or _freed(t) or not self._same_version():
            return None
        return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, self._version

    def freeze(self, clone: Tensor) -> None:
        """From now on the values are those of ``clone``; the next ``take`` compares its bits."""
        self.tensor, self.private = clone, True

    def _same_version(self) -> bool:
        return self.private or self._version is None or self._version == self.tensor._version


def fingerprint(t: Tensor) -> Tensor:
    """A digest of the bits of ``t``: a small tensor on its device, equal if the bits are.

    Sums of 64-bit words over blocks of 2 KiB, exact modulo 2⁶⁴, one pass over the memory and no
    synchronisation. A change goes unseen if it permutes the words of a block, or by a chance of
    2⁻⁶⁴. Vectors are copied: their digest is exact.
    """
    if t.is_complex():
        t = torch.view_as_real(t)
    bits = t.detach().view(torch.uint8 if t.dtype is torch.bool else INTEGERS[t.element_size()])
    if bits.dim() <= 1:
        return bits.clone()
    bits = bits.permute(sorted(range(bits.dim()), key=bits.stride, reverse=True))
    size = bits.element_size()
    if not bits.is_contiguous() or bits.storage_offset() * size % WORD:
        return bits.sum(-1, dtype=torch.int64)  # [..., size of the densest dimension] → [...]
    flat = bits.view(-1)
    in_block = BLOCK * WORD // size
    whole = flat.numel() // in_block * in_block
    sums = flat[:whole].view(torch.int64).view(-1, BLOCK).sum(-1)  # packed: 4 bfloat16 a word
    return torch.cat([sums, flat[whole:].long()])


@contextmanager
def quiet() -> Iterator[None]:
    """Compute plain values, whatever the caller has switched on: no autocast (the dtypes are
    explicit), no autograd, no inference tensors, which could not be written or saved later, and
    no tracing."""
    with (
        torch._C._DisableAutocast(),
        torch.inference_mode(False),
        torch.no_grad(),
        _disable_current_modes(),
    ):
        yield


def _freed(t: Tensor) -> bool:
    return t.numel() > 0 and t.untyped_storage().size() == 0
