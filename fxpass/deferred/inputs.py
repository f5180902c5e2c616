"""The inputs of a deferred computation, and the check that they are unchanged.

In: tensors that a computation will read later. Out: their unchanged values, or an error::

    with quiet():
        given = RecordedInput(weight, is_row=False)
    weight.data.mul_(2)  # bumps no version counter
    given.checked("logits = self.lm_head(x)")  # StaleLogitsError
"""

from __future__ import annotations

import functools
import gc
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from fxpass import messages
from fxpass.op.fingerprint import ReadOrder, fingerprint
from fxpass.releases.torch_2_11 import parameter_groups


class StaleLogitsError(RuntimeError):
    """Deferred logits can no longer be computed, because an input was changed or freed."""

    def __init__(self, source: str, tensor: Tensor, what: str, before: str) -> None:
        super().__init__(
            messages.STALE.format(
                source=source,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=list(tensor.shape),
                what=what,
                before=before,
            )
        )


class RecordedInput:
    """A tensor that a deferred computation will read, of any dtype and strides.

    It has an alias of the memory, so that ``weight.data = other`` has no effect on it, the version
    counter, and a fingerprint of the bits. Made under :func:`quiet`.

    Args:
        tensor: the tensor.
        is_row: whether its leading dimensions are those of the logits, as of hidden states.

    Attributes:
        tensor: the alias, or a clone that replaces it.
        is_parameter: whether an optimizer may change it.
    """

    def __init__(self, tensor: Tensor, is_row: bool) -> None:
        # the recipe would ignore the sign of a negative view; a copy cannot change
        self.tensor = tensor.detach().resolve_neg()
        self._is_clone = False  # a clone has no other references that could change it
        self._version = None if tensor.is_inference() else self.tensor._version
        self._fingerprint = None
        if not _freed(self.tensor):
            self._layout = ReadOrder.of(self.tensor)  # a clone may have other strides
            self._fingerprint = fingerprint(self.tensor, self._layout)
        owner = tensor if tensor._base is None else tensor._base
        # An optimizer may change leaves: parameters and copies of them. It changes hidden states
        # only if they require a gradient as leaves.
        self.is_parameter = owner.is_leaf and (not is_row or owner.requires_grad)

    def checked(self, source: str, read: bool = True, bits: bool = True) -> Tensor:
        """The tensor, detached; raises StaleLogitsError if it was freed, or, with ``read``, changed
        in place. Without ``bits``, only version counters are compared, as in eager."""
        if _freed(self.tensor):
            before = "backward(): FSDP frees gathered weights" if _sharding() else "this"
            raise StaleLogitsError(source, self.tensor, messages.FREED, before)
        if not read:
            return self.tensor
        if not self._same_version():
            raise StaleLogitsError(source, self.tensor, messages.CHANGED, self._changes())
        if self._fingerprint is not None and bits:
            with quiet():  # equal() waits for the device
                now = fingerprint(self.tensor, self._layout)
                same = torch.equal(self._fingerprint, now)
            if not same:
                before = self._changes() + (", with FSDP before backward()" if _sharding() else "")
                what = messages.CHANGED_DATA
                raise StaleLogitsError(source, self.tensor, what, before)
            if self._is_clone:
                self._fingerprint = None
        return self.tensor

    @property
    def key(self) -> tuple[object, ...] | None:
        """Equal for inputs that can share a clone; None if a clone would not help."""
        t = self.tensor
        if self._is_clone or not self.is_parameter or _freed(t) or not self._same_version():
            return None
        return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, self._version

    def replace(self, clone: Tensor) -> None:
        """Reads ``clone`` from now on; the next check compares its bits."""
        self._is_clone = True  # first: another thread may check it
        self.tensor = clone

    def _changes(self) -> str:
        """The possible causes of a change."""
        if not self.is_parameter:
            return "the program writes to this tensor"
        return (
            "load_state_dict(), an update by hand or the step of an optimizer that is no "
            "torch.optim.Optimizer"
        )

    def _same_version(self) -> bool:
        return self._is_clone or self._version is None or self._version == self.tensor._version


class quiet:  # noqa: N801, used as a function
    """Computes plain values, regardless of the caller's modes: without autocast (the dtypes are
    explicit), autograd, tracing, and inference mode (whose tensors cannot be written or saved
    later). A class, since a generator takes the host twice as long."""

    def __enter__(self) -> None:
        modes = _len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch()
        self._modes = _disable_current_modes() if modes else nullcontext()
        self._autocast = torch._C._DisableAutocast()
        self._autograd = torch._C._InferenceMode(False)
        self._autocast.__enter__()
        self._autograd.__enter__()  # its end restores the grad mode too
        torch._C._set_grad_enabled(False)
        self._modes.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._modes.__exit__(*error)
        self._autograd.__exit__(*error)
        self._autocast.__exit__(*error)


def _freed(t: Tensor) -> bool:
    return t.numel() > 0 and t.untyped_storage().size() == 0


def freed_by_fsdp(tensor: Tensor) -> bool:
    """Is true for a gathered parameter that FSDP frees when the forward of its module ends."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FullyShardedDataParallel

    memory = tensor.untyped_storage()._cdata
    for state in [ref() for ref in list(_module_state_mapping.values())]:
        for group in parameter_groups(state):
            if group.post_forward_mesh_info is None:
                continue
            gathered = [getattr(param, "_unsharded_param", None) for param in group.fsdp_params]
            if any(t is not None and t.untyped_storage()._cdata == memory for t in gathered):
                return True
    return FullyShardedDataParallel in _sharding_once()


def _sharding() -> set[type]:
    """The kinds of FSDP that shard a module of this process."""
    if not torch.distributed.is_available():
        return set()
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = FSDPModule, FullyShardedDataParallel
    return {k for thing in gc.get_objects() for k in kinds if issubclass(type(thing), k)}


_sharding_once = functools.cache(_sharding)  # a look at all objects is slow
