"""ATen operations of deferred logits: without their values, or on them.

In: an ATen call with deferred logits among its arguments. Out: its result. Views and casts are
deferred; operations that read only the layout get a stand-in; all others get plain tensors, and
their writes change the deferred logits::

    dispatched(aten.select.int, (logits, 0, 3), {}, DeferredLogits)    deferred logits of one row
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree

from fxpass import messages
from fxpass.deferred.values import BufferView, Deferred, memory_of

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
MULTIPLE_VIEWS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
# Operations that read only shape, dtype and device.
LAYOUT_ONLY = {
    *(op.default for op in (aten.empty_like, aten.full_like, aten.ones_like, aten.zeros_like)),
    *(op.default for op in (aten.new_empty, aten.new_full, aten.new_ones, aten.new_zeros)),
    *(op.default for op in (aten.rand_like, aten.randn_like)),
}


def dispatched(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], make: Callable[[BufferView], Deferred]
) -> Any:
    """The result of an ATen operation; ``make`` makes deferred logits."""
    result = NotImplemented
    if args and isinstance(args[0], Deferred):
        result = _without_values(func, args[0], args[1:], kwargs, make)
    return _on_values(func, args, kwargs) if result is NotImplemented else result


def _without_values(
    func: Any,
    t: Deferred,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    make: Callable[[BufferView], Deferred],
) -> Any:
    """The result, if it needs no values; else NotImplemented."""
    part = t._part
    if func in VIEWS or func in MULTIPLE_VIEWS:
        views = part.views(lambda like: func(like, *args, **kwargs))
        # a view of a normal tensor is a normal tensor, in inference mode too
        with torch.inference_mode(torch.is_inference_mode_enabled() and t.is_inference()):
            made = [make(view) for view in views]
        return made if func in MULTIPLE_VIEWS else made[0]
    if part.run is None:
        return NotImplemented
    if func is aten._to_copy.default and _only_dtype(t, kwargs):
        cast = part.cast(kwargs["dtype"], kwargs.get("memory_format"))
        return NotImplemented if cast is None else make(cast)
    if func in LAYOUT_ONLY and part.like.is_contiguous():
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


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs ``func`` on the values. Writes change the values; aliases share their memory."""
    if func is aten.detach_.default:
        return args[0]  # only in inference mode, where there is no autograd history
    if torch.Tag.inplace_view in func.tags and isinstance(args[0], Deferred):
        raise RuntimeError(messages.SHAPE_CHANGED.format(function=func))
    schema = func._schema
    # writes to its arguments, or keeps an alias of them, without declaring it
    silent = func.namespace == "c10d" or func.overloadpacket is aten.set_
    by_name = {argument.name: argument for argument in schema.arguments}
    written: dict[int, Deferred] = {}  # by the identity of the plain tensor
    read: dict[int, BufferView] = {}  # by the memory of the plain tensor

    def unwrap(argument: Any, value: Any) -> Any:
        alias = argument.alias_info

        def plain_of(t: Deferred) -> Tensor:
            part = t._part
            if not (silent or alias):
                plain = part.read_values()
                read[memory_of(plain)] = part
                return plain
            plain = part.materialise()
            if silent or alias.is_write:
                written[id(plain)] = t
                if not silent and isinstance(value, (list, tuple)) and not t.is_inference():
                    increment_version(t)  # autograd does not do this for tensors in lists
            return plain

        return pytree.tree_map_only(Deferred, plain_of, value)

    plain_args = [unwrap(a, v) for a, v in zip(schema.arguments, args, strict=False)]
    plain_kwargs = {k: unwrap(by_name[k], v) for k, v in kwargs.items()}
    result = func(*plain_args, **plain_kwargs)
    for t in written.values():
        if t._part.materialise().shape != t.shape:
            raise RuntimeError(messages.SHAPE_CHANGED.format(function=func))

    def rewrap(t: Tensor) -> Tensor:
        if id(t) in written:
            return written[id(t)]
        if not torch._C._has_storage(t):  # sparse and oneDNN tensors are copies without storage
            return t
        part = read.get(memory_of(t))
        return t if part is None else part.hand_out(t)  # an undeclared alias

    return pytree.tree_map_only(Tensor, rewrap, result)
