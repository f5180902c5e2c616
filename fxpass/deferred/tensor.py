"""A tensor subclass for logits that are computed on first use.

In: a recipe (a graph that computes logits) and its inputs. Out: a tensor whose values are not
computed yet::

    logits = defer(Recipe(graph, rows=(0,), source="logits = self.lm_head(x)"), (x, weight))
    logits.float()[:, -1].argmax(-1)  # one row of each sequence is computed

NOTE: deferred logits. The tensor has the values and gradients of the time of its creation, or
raises. What is not deferred or answered (:mod:`fxpass.deferred.functions`) computes the values,
once. Before an optimizer step, :mod:`fxpass.deferred.optimizers` clones the parameters.
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
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree
from torch.utils import dlpack
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxpass.deferred import history, values
from fxpass.deferred.dynamo import opaque, plain_in_graphs
from fxpass.deferred.functions import ROOT, answered, is_of_fsdp, of_leaf, see_gradients
from fxpass.deferred.history import attach, attach_cast, plain_view
from fxpass.deferred.inputs import StaleLogitsError, freed_by_fsdp, quiet
from fxpass.deferred.optimizers import watch_optimizers
from fxpass.deferred.run import Recipe
from fxpass.deferred.values import BufferView, Deferred, memory_of
from fxpass.deferred.watch import because
from fxpass.formula.dtypes import short
from fxpass.rows.tags import Stop

__all__ = ["DeferredLogits", "Recipe", "StaleLogitsError", "defer"]

aten = torch.ops.aten
VIEWS = {
    aten.select.int,
    aten.slice.Tensor,
    *(aten.squeeze.dim, aten.squeeze.dims),
    aten.transpose.int,
    *(op.default for op in (aten.alias, aten.detach, aten.permute, aten.squeeze, aten.t)),
    *(aten.unsqueeze.default, aten.view.default),
}
# Views that are several tensors.
PARTS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
# Operations that read shape, dtype and device only.
LIKE = {
    *(op.default for op in (aten.empty_like, aten.full_like, aten.ones_like, aten.zeros_like)),
    *(op.default for op in (aten.new_empty, aten.new_full, aten.new_ones, aten.new_zeros)),
    *(op.default for op in (aten.rand_like, aten.randn_like)),
}

ASSIGNED = "deferred logits do not take `.data = other`; write with .copy_(other)"
RESHAPED = "{} changes the shape of deferred logits in place; work on logits.detach().clone()"


def defer(recipe: Recipe, inputs: Sequence[Any], *, drop: bool = False) -> Tensor:
    """The logits of ``recipe(*inputs)``, with the current values of the inputs, on first use.

    Args:
        recipe: computes the logits.
        inputs: its inputs, of any dtype: tensors and numbers.
        drop: whether any use of values or gradients raises RuntimeError; then the inputs are not
            referenced, and a DTensor counts with its global shape.

    Returns:
        A :class:`DeferredLogits` with the shape, dtype, strides and device of the logits, linked to
        the inputs by autograd. The logits, computed now, unless they are dropped, if an input is
        another tensor subclass (a DTensor), or FSDP frees it before the program reads the logits.

    Raises:
        StaleLogitsError: later, when values or gradients are used, if an input was freed or changed
            in place other than by an optimizer's step.
    """
    tensors = [a for a in inputs if isinstance(a, Tensor)]
    early = recipe.alone and any(map(freed_by_fsdp, tensors))
    if not drop and (early or any(map(is_traceable_wrapper_subclass, tensors))):
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
        logits = DeferredLogits(values.computed(value))
        logits.requires_grad_(trains)
        logits._view = value.requires_grad_(trains)
        return logits
    watch_optimizers()
    part = values.returned(recipe, inputs, drop)
    part.record = ROOT if recipe.programs and not drop else None
    part.trained = trains
    return _made(part, inputs if trains else ())


def _by_leaf(name: str) -> Any:
    """The method ``name`` of a plain leaf with the memory of all views; it may write to it."""

    def method(self: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        leaf = self._leaf()
        plain = (a._leaf() if isinstance(a, DeferredLogits) else a for a in args)
        result = getattr(leaf, name)(*plain, **kwargs)
        return self if result is leaf else result

    return method


def _by_copy(name: str) -> Any:
    """The method ``name`` of a plain leaf, which returns no alias of its memory."""
    return lambda self, *args: getattr(self._leaf(alias=False), name)(*args)


def _cast(name: str) -> Any:
    """The cast ``name``. As all deferred logits with gradients, its result has a plain base."""

    def method(self: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        result = getattr(super(DeferredLogits, self), name)(*args, **kwargs)
        if type(result) is not DeferredLogits or not result.requires_grad or result._is_view():
            return result
        return _root(attach_cast(result._part, result), result._part)

    return method


# Methods that read or write memory without going through the dispatcher, and casts.
METHODS = {
    _by_leaf: (
        *("numpy", "data_ptr", "storage", "_typed_storage", "__array__", "__dlpack__"),
        *("apply_", "map_", "map2_"),
    ),
    _by_copy: ("tolist", "__reduce_ex__"),
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
                return answered(func, args, kwargs or {}, _made)
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
        if args and isinstance(args[0], DeferredLogits):
            result = _stay_lazy(func, args[0], args[1:], kwargs)
        return _compute(func, args, kwargs) if result is NotImplemented else result

    @property
    def _part(self) -> BufferView:
        part = self._computes
        view = self._view
        if len({memory_of(t) for t in (view, part.value) if t is not None}) == 2:
            raise _refused(ASSIGNED)  # in compiled code
        return part

    @property
    def plain(self) -> Tensor:
        """A plain view, for autograd too, for the next graph of torch.compile: it shares values,
        gradients, hooks and version counter. Always the same object. Computes the values."""
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
        # the history of a view that was written to is made anew here; it would be while torch
        # registers the hook, which ends the process
        _ = self.grad_fn
        if is_of_fsdp(hook):
            for root in getattr(self._part.run, "roots", ()):
                root.hooks.append(hook)
        else:
            see_gradients([self], "a hook is registered on deferred logits")
        return super().register_hook(hook)

    def retain_grad(self) -> None:
        see_gradients([self], "retain_grad() of deferred logits")
        super().retain_grad()

    def detach_(self) -> Tensor:
        if not self._is_root:
            return super().detach_()
        torch._C._swap_tensor_impl(self, self.detach())  # autograd detaches no view in place
        self._view = None
        return self

    def become(self, other: DeferredLogits) -> None:
        torch._C._swap_tensor_impl(self, other)
        self._computes = other._computes
        self._view = None
        self._is_root = other._is_root

    def _leaf(self, alias: bool = True) -> Tensor:
        """A plain leaf with these values; with ``alias`` it shares the memory of all views."""
        value = self._part.materialise() if alias else self._part.read()
        return value.detach().requires_grad_(self.requires_grad)

    @property
    def __cuda_array_interface__(self) -> Any:
        return self._leaf().__cuda_array_interface__

    def untyped_storage(self) -> torch.UntypedStorage:
        if TracingContext.try_get():  # the compiler asks for metadata and must not get the values
            return super().untyped_storage()
        return self._leaf().untyped_storage()

    def __copy__(self) -> Tensor:
        return copy.copy(self._leaf())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # raises, as for any tensor with a history
        memo[id(self)] = result = copy.deepcopy(self._leaf(), memo)
        return result

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return self._part.read().item().__format__(spec)
        return object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        part = self._part
        run = part.run
        if run is not None:
            return (
                f"DeferredLogits({short(self.dtype)}{list(self.shape)} on {self.device}, of "
                f"`{run.recipe.source}`; not computed, .detach().clone() computes the values)"
            )
        try:
            name = type(self.grad_fn).__name__ if self.grad_fn else None
        except RuntimeError:  # a view that was written to in another grad mode
            name = "Invalid"
        leaf = self._leaf(alias=False)
        return repr(leaf.detach())[:-1] + f", grad_fn=<{name}>)" if name else repr(leaf)

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        raise _refused(ASSIGNED)


def _made(part: BufferView, inputs: Sequence[Tensor]) -> DeferredLogits:
    """Deferred logits that autograd links to some inputs, if there are any."""
    return _root(attach(part, inputs), part) if inputs else DeferredLogits(part)


def _root(base: Tensor, part: BufferView) -> DeferredLogits:
    """Deferred logits with the history of ``base``, which are no view in eager."""
    logits = DeferredLogits(part)
    logits._is_root = True
    return history.recorded(aten.alias.default, base, logits)


torch.to_dlpack = dlpack.to_dlpack = of_leaf(dlpack.to_dlpack)  # type: ignore[attr-defined]
for _make, _names in METHODS.items():
    for _name in _names:
        setattr(DeferredLogits, _name, _make(_name))
plain_in_graphs(opaque(DeferredLogits))


def _stay_lazy(func: Any, t: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result without computing values, or NotImplemented."""
    part = t._part
    if func in VIEWS or func in PARTS:
        views = part.views(lambda like: func(like, *args, **kwargs))
        # a view of a normal tensor is a normal tensor, in inference mode too
        with torch.inference_mode(torch.is_inference_mode_enabled() and t.is_inference()):
            made = [DeferredLogits(view) for view in views]
        return made if func in PARTS else made[0]
    if part.run is None:
        return NotImplemented
    if func is aten._to_copy.default and _only_dtype(t, kwargs):
        cast = part.cast(kwargs["dtype"], kwargs.get("memory_format"))
        return NotImplemented if cast is None else DeferredLogits(cast)
    if func in LIKE and part.like.is_contiguous():
        stand_in = torch.empty((), dtype=t.dtype, device=t.device).expand(t.shape)
        return func(stand_in, *args, **kwargs)
    return NotImplemented


def _only_dtype(t: Tensor, kwargs: dict[str, Any]) -> bool:
    formats = (None, torch.preserve_format, torch.contiguous_format)
    return (
        kwargs.get("dtype") is not None
        and kwargs.get("device") in (None, t.device)
        and kwargs.get("layout") in (None, torch.strided)
        and not kwargs.get("pin_memory")
        and kwargs.get("memory_format") in formats
    )


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs ``func`` on the values. Writes change the values; aliases share their memory."""
    if func is aten.detach_.default:
        return args[0]  # only in inference mode, where there is no autograd history
    if torch.Tag.inplace_view in func.tags and isinstance(args[0], DeferredLogits):
        raise _refused(RESHAPED.format(func))
    schema = func._schema
    # writes to its arguments, or keeps an alias of them, without declaring it
    silent = func.namespace == "c10d" or func.overloadpacket is aten.set_
    by_name = {argument.name: argument for argument in schema.arguments}
    written: dict[int, DeferredLogits] = {}  # by the identity of the plain tensor
    read: dict[int, BufferView] = {}  # by the memory of the plain tensor

    def unwrap(argument: Any, value: Any) -> Any:
        alias = argument.alias_info

        def one(t: DeferredLogits) -> Tensor:
            part = t._part
            if not (silent or alias):
                plain = part.read()
                read[memory_of(plain)] = part
                return plain
            plain = part.materialise()
            if silent or alias.is_write:
                written[id(plain)] = t
                if not silent and isinstance(value, (list, tuple)) and not t.is_inference():
                    increment_version(t)  # autograd does not do this for tensors in lists
            return plain

        return pytree.tree_map_only(DeferredLogits, one, value)

    plain_args = [unwrap(a, v) for a, v in zip(schema.arguments, args, strict=False)]
    plain_kwargs = {k: unwrap(by_name[k], v) for k, v in kwargs.items()}
    result = func(*plain_args, **plain_kwargs)
    for t in written.values():
        if t._part.materialise().shape != t.shape:
            raise _refused(RESHAPED.format(func))

    def rewrap(t: Tensor) -> Tensor:
        if id(t) in written:
            return written[id(t)]
        if not torch._C._has_storage(t):  # sparse and oneDNN tensors are copies without storage
            return t
        part = read.get(memory_of(t))
        return t if part is None else part.hand_out(t)  # an undeclared alias

    return pytree.tree_map_only(Tensor, rewrap, result)


def _refused(what: str) -> RuntimeError:
    return RuntimeError(f"{what}, or have the logits computed with the loss (FUSEDCE_LOGITS=keep)")
