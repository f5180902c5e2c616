"""A call's results without their values: shapes, strides and dtypes.

In: a call, and the layouts of its operands. Out: a :class:`CallLayout`, from a run on fake tensors,
or from the cache, if a call of the same function had operands of the same layouts::

    Call(logsumexp, (run, -1)), run: f32[3, 7, 300]    one result, f32[3, 7], with a gradient
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpass import messages
from fxpass.deferred.inputs import quiet
from fxpass.deferred.records import Call, Operand, is_operand
from fxpass.deferred.run import stand_in
from fxpass.rows.tags import Stop

_MOST = 512  # cached layouts; dynamic shapes would add more without end
_CACHE: OrderedDict[Any, CallLayout | Stop] = OrderedDict()
_FAKE = FakeTensorMode(allow_non_fake_inputs=True)
LOCK = threading.RLock()  # guards the fake mode: its tensors have no device while an operation runs


@dataclass(frozen=True)
class TensorLayout:
    """The layout of one tensor.

    Attributes:
        meta: an empty tensor on the meta device.
        device: the tensor's own.
        trained: whether it has a gradient.
    """

    meta: Tensor
    device: torch.device
    trained: bool

    @property
    def key(self) -> Any:
        """Equal for equal layouts."""
        meta = self.meta
        return tuple(meta.shape), meta.stride(), meta.dtype, self.device, self.trained


@dataclass(frozen=True)
class CallLayout:
    """The layout of a call's results.

    Attributes:
        tree: the structure that the function returns, with numbers in the place of tensors.
        results: the layouts of its tensors.
        aliased: whether they are operands, or views of operands.
        cast: whether they are operands in another dtype.
        written: the layout of the operand that the call writes to, and its position among the
            call's operands; or None.
    """

    tree: Any
    results: Sequence[TensorLayout]
    aliased: bool
    cast: bool
    written: tuple[TensorLayout, int] | None

    def filled(self, tensors: Sequence[Any]) -> Any:
        """The function's results, with these tensors."""
        return pytree.tree_map(
            lambda leaf: tensors[leaf.at] if type(leaf) is _ResultAt else leaf, self.tree
        )


@dataclass(frozen=True)
class _ResultAt:
    at: int


def layout_of(call: Call, layouts: Mapping[Operand, TensorLayout]) -> CallLayout:
    """The layout of a call's results.

    Args:
        call: the call; its operands may be of any kind.
        layouts: the layouts of its operands.

    Raises:
        Stop: the layout depends on values, or the call draws random numbers, or fails.
    """
    operands = call.operands
    leaves = pytree.tree_leaves((call.args, call.kwargs), is_leaf=is_operand)
    places = {id(operand): i for i, operand in enumerate(operands)}
    given = tuple(places[id(x)] if is_operand(x) else (type(x), repr(x)) for x in leaves)
    spec = pytree.tree_structure((call.args, call.kwargs), is_leaf=is_operand)
    modes = call.grad, call.autocast, torch.get_default_dtype()
    key = (call.function, *modes, str(spec), given, *(layouts[x].key for x in operands))
    with LOCK:
        found = _CACHE.get(key)
        if found is None:
            try:
                found = _traced(call, [layouts[x] for x in operands])
            except Stop as stop:
                found = Stop(*stop.args)  # without its frames, which have tensors
            _CACHE[key] = found
            if len(_CACHE) > _MOST:
                _CACHE.popitem(last=False)
        _CACHE.move_to_end(key)
    if isinstance(found, Stop):
        raise Stop(*found.args)
    return found


def _traced(call: Call, layouts: Sequence[TensorLayout]) -> CallLayout:
    """The layout of a call's results, by a run on fake tensors."""
    names = _CallNames()
    try:
        with quiet(), _FAKE:
            fakes = [_fake(layout) for layout in layouts]
            by_id = {id(x): fake for x, fake in zip(call.operands, fakes, strict=True)}
            args, kwargs = pytree.tree_map(
                lambda x: by_id[id(x)] if is_operand(x) else x,
                (call.args, call.kwargs),
                is_leaf=is_operand,
            )
            before = [fake._version for fake in fakes]
            kind = fakes[0].device.type
            autocast = torch.autocast(kind, call.autocast, call.autocast is not None)
            with torch.set_grad_enabled(call.grad), autocast, names:
                made = call.function(*args, **kwargs)
    except (DynamicOutputShapeException, DataDependentOutputException):
        raise Stop(messages.SHAPE_OF_VALUES) from None
    except Stop:
        raise
    except Exception as error:
        raise Stop(messages.FAILS_ON_FAKES.format(error=type(error).__name__, text=error)) from None
    metas = [layout.meta for layout in layouts]
    changed = [
        i
        for i, (fake, meta) in enumerate(zip(fakes, metas, strict=True))
        if fake._version != before[i] or (fake.shape, fake.stride()) != (meta.shape, meta.stride())
    ]
    if len(changed) > 1:
        raise Stop(messages.WRITES)
    tensors = [t for t in pytree.tree_leaves(made) if isinstance(t, Tensor)]
    numbers = iter(range(len(tensors)))
    tree = pytree.tree_map(lambda x: _ResultAt(next(numbers)) if isinstance(x, Tensor) else x, made)
    memory = {fake.untyped_storage()._cdata for fake in fakes}
    aliased = any(t.untyped_storage()._cdata in memory for t in tensors)
    written = None
    if changed:
        (position,) = changed
        fake = fakes[position]
        meta = metas[position]
        if any(t is not fake for t in tensors):
            raise Stop(messages.WRITES_AND_RETURNS)
        if fake.numel() != meta.numel() or fake.dtype != meta.dtype:
            raise Stop(messages.WRITES)
        written = _tensor_layout(fake), position
    cast = bool(tensors) and names.packets <= _CASTS
    return CallLayout(tree, [*map(_tensor_layout, tensors)], aliased, cast, written)


def _fake(layout: TensorLayout) -> Tensor:
    meta = layout.meta
    shape = meta.shape
    strides = meta.stride()
    if not layout.trained:
        return torch.empty_strided(shape, strides, dtype=meta.dtype, device=layout.device)
    with (
        torch.enable_grad()
    ):  # no leaf of autograd, nor a view of a leaf: a function may write to it
        size = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        leaf = torch.empty(size if meta.numel() else 0, dtype=meta.dtype, device=layout.device)
        return leaf.requires_grad_().clone().as_strided(shape, strides)


def _tensor_layout(fake: Tensor) -> TensorLayout:
    with quiet():
        # torch says of a view without gradients, of a tensor with gradients: a leaf with a gradient
        trained = fake.requires_grad and not fake.is_leaf
        return TensorLayout(stand_in(fake, "meta"), fake.device, trained)


# ATen calls whose result has the values of the operand, perhaps in another dtype.
_CASTS = {"_to_copy", "alias", "detach", "lift_fresh"}


class _CallNames(TorchDispatchMode):
    """Records the names of the ATen calls that run; random numbers raise Stop."""

    def __init__(self) -> None:
        super().__init__()
        self.packets: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Stop(messages.RANDOM)
        self.packets.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
