"""A tensor subclass for logits that are computed on first use.

In: a recipe (a graph that computes logits) and its inputs. Out: a tensor whose values are computed
on first use::

    logits = defer(Recipe(graph, rows=(0,), source="logits = self.lm_head(x)"), (x, weight))
    logits.float()[:, -1].argmax(-1)  # one row of each sequence is computed

NOTE: deferred logits. The tensor has the values and gradients of the time of its creation, or
raises. A function that is not answered (:mod:`fxpass.deferred.functions`) computes the values.
Before an optimizer step, :mod:`fxpass.deferred.optimizers` clones the parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import dlpack
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxpass import messages
from fxpass.deferred import history, values
from fxpass.deferred.dispatch import dispatched
from fxpass.deferred.dynamo import opaque, plain_in_graphs
from fxpass.deferred.functions import ROOT, answered, is_of_fsdp, mark_gradient_use, on_plain_tensor
from fxpass.deferred.history import attach, attach_cast, plain_view
from fxpass.deferred.inputs import StaleLogitsError, freed_by_fsdp, quiet
from fxpass.deferred.optimizers import watch_optimizers
from fxpass.deferred.run import Recipe
from fxpass.deferred.values import BufferView, Deferred, memory_of
from fxpass.deferred.watch import because
from fxpass.formula.dtypes import dtype_name
from fxpass.rows.tags import Stop

__all__ = ["DeferredLogits", "Recipe", "StaleLogitsError", "defer"]

aten = torch.ops.aten


def defer(recipe: Recipe, inputs: Sequence[Any], *, drop: bool = False) -> Tensor:
    """The logits of ``recipe(*inputs)``, with the current values of the inputs, on first use.

    Args:
        recipe: computes the logits.
        inputs: its inputs, of any dtype: tensors and numbers.
        drop: any use of values or gradients raises RuntimeError; the inputs are not referenced,
            and a DTensor has its global shape.

    Returns:
        A :class:`DeferredLogits` with the shape, dtype, strides and device of the logits, linked to
        the inputs by autograd. The logits, computed now, unless they are dropped, if an input is
        another tensor subclass (a DTensor), or FSDP frees it before the program reads the logits.

    Raises:
        StaleLogitsError: later, when values or gradients are used, if an input was freed or changed
            in place other than by an optimizer's step.
    """
    tensors = [a for a in inputs if isinstance(a, Tensor)]
    freed = recipe.alone and any(map(freed_by_fsdp, tensors))
    if not drop and (freed or any(map(is_traceable_wrapper_subclass, tensors))):
        with torch._C._DisableAutocast():
            return recipe(*inputs)
    trains = recipe.requires_grad and torch.is_grad_enabled()
    trains = trains and any(t.requires_grad for t in tensors)
    if any(isinstance(t, FakeTensor) for t in tensors):
        # DDP's graph splitting runs each part with fake tensors to find the input types of the next
        # part. The result has to be deferred logits, as at run time. Without Python's dispatcher, a
        # linear of torch 2.11 replaces symbolic sizes by numbers.
        with quiet(), enable_python_dispatcher():
            value = recipe(*inputs)
        logits = DeferredLogits(values.view_of_value(value))
        logits.requires_grad_(trains)
        logits._view = value.requires_grad_(trains)
        return logits
    watch_optimizers()
    part = values.view_of_recipe(recipe, inputs, drop)
    part.record = ROOT if recipe.programs and not drop else None
    part.trained = trains
    return _linked(part, inputs if trains else ())


def _on_alias(name: str) -> Any:
    """The method ``name`` of plain values in the memory of all views; it may write to them."""

    def method(self: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        detached = self._detached()
        plain = (a._detached() if isinstance(a, DeferredLogits) else a for a in args)
        result = getattr(detached, name)(*plain, **kwargs)
        return self if result is detached else result

    return method


def _on_values(name: str) -> Any:
    """The method ``name`` of plain values, which returns no alias of their memory."""
    return lambda self, *args: getattr(self._detached(alias=False), name)(*args)


def _cast(name: str) -> Any:
    """The cast ``name``; its result has a plain base, as all deferred logits with gradients."""

    def method(self: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        result = getattr(super(DeferredLogits, self), name)(*args, **kwargs)
        if type(result) is not DeferredLogits or not result.requires_grad or result._is_view():
            return result
        return _view_of_base(attach_cast(result._part, result), result._part)

    return method


# Methods that read or write memory without going through the dispatcher, and casts.
METHODS = {
    _on_alias: (
        *("numpy", "data_ptr", "storage", "_typed_storage", "__array__", "__dlpack__"),
        *("apply_", "map_", "map2_"),
    ),
    _on_values: ("tolist", "__reduce_ex__"),
    _cast: ("bfloat16", "double", "float", "half", "to", "type", "type_as"),
}


class DeferredLogits(Deferred):
    """A tensor whose values are computed on first use; made by :func:`defer`."""

    __slots__ = ("_is_root", "_view")
    _view: Tensor | None
    _is_root: bool

    @staticmethod
    def __new__(cls, part: BufferView) -> DeferredLogits:
        like = part.like
        self = Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=part.buffer.device,
        )
        torch._C._set_throw_on_mutable_data_ptr(self)  # C++ code gets an error, not a null pointer
        self._computes = part
        self._view = None
        self._is_root = False
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return answered(func, args, kwargs or {}, _linked)
            except Stop as stop:
                with because(func, stop):
                    return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # in inference mode, composite operations are not decomposed before this call
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        return dispatched(func, args, kwargs, DeferredLogits)

    @property
    def _part(self) -> BufferView:
        part = self._computes
        view = self._view
        if len({memory_of(t) for t in (view, part.value) if t is not None}) == 2:
            raise RuntimeError(messages.DATA_ASSIGNED)  # in compiled code
        return part

    @property
    def plain(self) -> Tensor:
        """The logits as a plain tensor, for the next graph of torch.compile, always the same
        object; a view for autograd too: values, gradients, hooks and version counter are shared.
        Computes the values."""
        value = self._part.materialise()
        plain = self._view
        base = super()._base
        if plain is None or plain.requires_grad != self.requires_grad:
            value = value.detach()
            if isinstance(base, DeferredLogits) and not self.requires_grad:
                plain = history.recorded(aten.alias.default, base.plain, value)
            elif base is None and not self.requires_grad:
                plain = history.recorded(aten.detach.default, self, value)
            else:
                plain = plain_view(self, value)
            self._view = plain
        vars(plain).update(vars(self))  # such as marks of dynamic dimensions
        return plain

    def as_subclass(self, cls: Any) -> Any:
        return self.plain.as_subclass(cls)

    def register_hook(self, hook: Any) -> Any:
        # replays the history of a view that was written to: torch would replay it while it
        # registers the hook, and end the process
        _ = self.grad_fn
        if is_of_fsdp(hook):
            for root in getattr(self._part.run, "roots", ()):
                root.hooks.append(hook)
        else:
            mark_gradient_use([self], "a hook is registered on deferred logits")
        return super().register_hook(hook)

    def retain_grad(self) -> None:
        mark_gradient_use([self], "retain_grad() of deferred logits")
        super().retain_grad()

    def detach_(self) -> Tensor:
        if not self._is_root:
            return super().detach_()
        torch._C._swap_tensor_impl(self, self.detach())  # autograd detaches no view in place
        self._view = None
        return self

    def become(self, other: DeferredLogits) -> None:
        """Turns this tensor into ``other``, in place."""
        torch._C._swap_tensor_impl(self, other)
        self._computes = other._computes
        self._view = None
        self._is_root = other._is_root

    def _detached(self, alias: bool = True) -> Tensor:
        """The values without history; with ``alias`` in the memory of all views."""
        value = self._part.materialise() if alias else self._part.read_values()
        return value.detach().requires_grad_(self.requires_grad)

    @property
    def __cuda_array_interface__(self) -> Any:
        return self._detached().__cuda_array_interface__

    def untyped_storage(self) -> torch.UntypedStorage:
        if TracingContext.try_get():  # the compiler asks for metadata and must not get the values
            return super().untyped_storage()
        return self._detached().untyped_storage()

    def __copy__(self) -> Tensor:
        return copy.copy(self._detached())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # raises, as for any tensor with a history
        memo[id(self)] = result = copy.deepcopy(self._detached(), memo)
        return result

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return self._part.read_values().item().__format__(spec)
        return object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        part = self._part
        run = part.run
        if run is not None:
            return (
                f"DeferredLogits({dtype_name(self.dtype)}{list(self.shape)} on {self.device}, of "
                f"`{run.recipe.source}`; not computed, .detach().clone() computes the values)"
            )
        try:
            name = type(self.grad_fn).__name__ if self.grad_fn else None
        except RuntimeError:  # a view that was written to in another grad mode
            name = "Invalid"
        plain = self._detached(alias=False)
        return repr(plain.detach())[:-1] + f", grad_fn=<{name}>)" if name else repr(plain)

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RuntimeError(messages.DATA_ASSIGNED)


def _linked(part: BufferView, inputs: Sequence[Tensor]) -> DeferredLogits:
    """Deferred logits that autograd links to some inputs, if there are any."""
    return _view_of_base(attach(part, inputs), part) if inputs else DeferredLogits(part)


def _view_of_base(base: Tensor, part: BufferView) -> DeferredLogits:
    """Deferred logits with the history of ``base``; eager's logits are no view."""
    logits = DeferredLogits(part)
    logits._is_root = True
    return history.recorded(aten.alias.default, base, logits)


torch.to_dlpack = dlpack.to_dlpack = on_plain_tensor(dlpack.to_dlpack)  # type: ignore[attr-defined]
for _make, _names in METHODS.items():
    for _name in _names:
        setattr(DeferredLogits, _name, _make(_name))
plain_in_graphs(opaque(DeferredLogits))
