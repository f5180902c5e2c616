"""A call's results without their values: shapes, strides and dtypes.

In: a call, and the layouts of its arguments. Out: a :class:`Layout`, from a run on fake tensors;
one that was known before, where a call of the same function had such arguments::

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

from fxpass.deferred.inputs import quiet
from fxpass.deferred.records import Call, Source, is_source
from fxpass.deferred.run import stand_in
from fxpass.rows.tags import Stop

_MOST = 512  # layouts that are known; those of dynamic shapes would add more without end
_KNOWN: OrderedDict[Any, Layout | Stop] = OrderedDict()
_FAKE = FakeTensorMode(allow_non_fake_inputs=True)
LOCK = threading.RLock()  # of the fake mode, whose tensors have no device while one runs


@dataclass(frozen=True)
class Like:
    """The layout of one tensor.

    Attributes:
        like: an empty tensor on the meta device.
        device: the tensor's own.
        trained: whether it has a gradient.
    """

    like: Tensor
    device: torch.device
    trained: bool

    @property
    def key(self) -> Any:
        """Equal for equal layouts."""
        like = self.like
        return tuple(like.shape), like.stride(), like.dtype, self.device, self.trained


@dataclass(frozen=True)
class Layout:
    """The layout of a call's results.

    Attributes:
        tree: what the function returns, with numbers in the place of tensors.
        results: of its tensors.
        shown: whether they are views of arguments, or arguments.
        cast: whether they are arguments in another dtype.
        written: the layout of the argument that it writes to, and its position among the call's
            arguments; or None.
    """

    tree: Any
    results: Sequence[Like]
    shown: bool
    cast: bool
    written: tuple[Like, int] | None

    def filled(self, tensors: Sequence[Any]) -> Any:
        """The function's results, with these tensors."""
        return pytree.tree_map(
            lambda leaf: tensors[leaf.at] if type(leaf) is _ResultAt else leaf, self.tree
        )


@dataclass(frozen=True)
class _ResultAt:
    at: int


def layout_of(call: Call, likes: Mapping[Source, Like]) -> Layout:
    """The layout of a call's results.

    Args:
        call: its sources have no calls of their own here.
        likes: the layouts of its arguments.

    Raises:
        Stop: that depends on values, or the call draws random numbers, or fails.
    """
    sources = call.sources
    leaves = pytree.tree_leaves((call.args, call.kwargs), is_leaf=is_source)
    places = {id(source): i for i, source in enumerate(sources)}
    given = tuple(places[id(x)] if is_source(x) else (type(x), repr(x)) for x in leaves)
    spec = pytree.tree_structure((call.args, call.kwargs), is_leaf=is_source)
    modes = call.grad, call.autocast, torch.get_default_dtype()
    key = (call.function, *modes, str(spec), given, *(likes[s].key for s in sources))
    with LOCK:
        found = _KNOWN.get(key)
        if found is None:
            try:
                found = _run(call, sources, likes)
            except Stop as stop:
                found = Stop(*stop.args)  # without its frames, which have tensors
            _KNOWN[key] = found
            if len(_KNOWN) > _MOST:
                _KNOWN.popitem(last=False)
        _KNOWN.move_to_end(key)
    if isinstance(found, Stop):
        raise Stop(*found.args)
    return found


def _run(call: Call, sources: Sequence[Source], likes: Mapping[Source, Like]) -> Layout:
    watched = _Watched()
    try:
        with quiet(), _FAKE:
            fakes = {id(s): _fake(likes[s]) for s in sources}
            args, kwargs = pytree.tree_map(
                lambda s: fakes[id(s)] if is_source(s) else s,
                (call.args, call.kwargs),
                is_leaf=is_source,
            )
            before = [fake._version for fake in fakes.values()]
            kind = next(iter(fakes.values())).device.type
            autocast = torch.autocast(kind, call.autocast, call.autocast is not None)
            with torch.set_grad_enabled(call.grad), autocast, watched:
                made = call.function(*args, **kwargs)
    except (DynamicOutputShapeException, DataDependentOutputException):
        raise Stop("makes a tensor whose shape depends on values") from None
    except Stop:
        raise
    except Exception as error:
        raise Stop(f"fails on fake tensors ({type(error).__name__}: {error})") from None
    pairs = [(fake, likes[s].like) for s, fake in zip(sources, fakes.values(), strict=True)]
    changed = [
        i
        for i, (fake, like) in enumerate(pairs)
        if fake._version != before[i] or (fake.shape, fake.stride()) != (like.shape, like.stride())
    ]
    if len(changed) > 1:
        raise Stop("writes to its arguments")
    tensors = [t for t in pytree.tree_leaves(made) if isinstance(t, Tensor)]
    numbers = iter(range(len(tensors)))
    tree = pytree.tree_map(lambda x: _ResultAt(next(numbers)) if isinstance(x, Tensor) else x, made)
    memory = {fake.untyped_storage()._cdata for fake in fakes.values()}
    shown = [t.untyped_storage()._cdata in memory for t in tensors]
    written = None
    if changed:
        fake, like = pairs[changed[0]]
        if any(t is not fake for t in tensors):
            raise Stop("writes to its arguments, and returns others")
        if fake.numel() != like.numel() or fake.dtype != like.dtype:
            raise Stop("writes to its arguments")
        written = _like(fake), changed[0]
    cast = bool(tensors) and watched.packets <= _ALIKE
    return Layout(tree, [*map(_like, tensors)], any(shown), cast, written)


def _fake(like: Like) -> Tensor:
    of = like.like
    shape = of.shape
    strides = of.stride()
    if not like.trained:
        return torch.empty_strided(shape, strides, dtype=of.dtype, device=like.device)
    with torch.enable_grad():  # no leaf, nor a view of one: a function may write to it
        size = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        leaf = torch.empty(size if of.numel() else 0, dtype=of.dtype, device=like.device)
        return leaf.requires_grad_().clone().as_strided(shape, strides)


def _like(fake: Tensor) -> Like:
    with quiet():
        # a view without gradients, of a tensor with gradients, says that it is a leaf with some
        trained = fake.requires_grad and not fake.is_leaf
        return Like(stand_in(fake, "meta"), fake.device, trained)


# Calls that make the same values, perhaps in another dtype.
_ALIKE = {"_to_copy", "alias", "detach", "lift_fresh"}


class _Watched(TorchDispatchMode):
    """Notes which ATen calls run; random numbers raise Stop."""

    def __init__(self) -> None:
        super().__init__()
        self.packets: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise Stop("draws random numbers")
        self.packets.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
