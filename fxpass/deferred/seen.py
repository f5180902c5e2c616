"""Results of functions of deferred logits, which other functions of them read.

In: a plain tensor among the arguments of a function. Out: how it was made of the logits, if it is a
result of them, or a view of one::

    m = logits.amax(-1, True)    computed
    logits >= m                  the call reads amax(logits, -1, True) in the place of m

Each program computes the logits again, and the last bits may differ: what is compared has to be of
one program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fxpass.deferred.records import Call, Made, PlainOperand, calls_of, leaves_of
from fxpass.deferred.values import Buffer

MOST = 16  # results of one buffer
Layout: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], int]"


@dataclass(frozen=True, eq=False)
class Seen:
    """A result that a program has.

    Attributes:
        made: how it was made.
        layout: its shape, strides and the offset of its first value.
        trained: whether it has a gradient.
        storage: its memory.
        versions: of its values, and of the operands that it was made of.
    """

    made: Made
    layout: Layout
    trained: bool
    storage: StorageWeakRef
    versions: tuple[int, ...]

    def shown(self, t: Tensor) -> Made | None:
        """How a tensor was made, if it is this result or a view of it."""
        same = t.untyped_storage()._cdata == self.storage.cdata
        if not same or self.versions != _versions(t, self.made):
            return None
        made = self.made
        layout = _layout(t)
        if layout != self.layout:
            if (step := _step(layout, self.layout)) is None:
                return None
            function, args = step
            made = _called(function, made, *args)
        return _called(torch.detach, made) if self.trained and not t.requires_grad else made


def remember(buffers: Sequence[Buffer], made: Sequence[Made], results: Sequence[Tensor]) -> None:
    """Notes results of logits at the buffers of these."""
    for one, t in zip(made, results, strict=True):
        if not t.is_floating_point() or any(map(torch.is_inference, (t, *_operands(one)))):
            continue
        storage = StorageWeakRef(t.untyped_storage())
        seen = Seen(one, _layout(t), t.requires_grad, storage, _versions(t, one))
        for buffer in buffers:
            known = [other for other in buffer.seen if not other.storage.expired()]
            buffer.seen = [*known, seen][-MOST:]


def made_of(buffers: Sequence[Buffer], t: Tensor) -> Made | None:
    """How a tensor was made of the logits of some buffers; None if it is no result of them."""
    if not t.is_floating_point() or torch.is_inference(t):
        return None
    found = (seen.shown(t) for buffer in buffers for seen in buffer.seen)
    return next((made for made in found if made is not None), None)


def _operands(made: Made) -> list[Tensor]:
    return [leaf.tensor for leaf in leaves_of(calls_of([made])) if isinstance(leaf, PlainOperand)]


def _versions(t: Tensor, made: Made) -> tuple[int, ...]:
    return tuple(one._version for one in (t, *_operands(made)))


def _layout(t: Tensor) -> Layout:
    return tuple(t.shape), _strides(t), int(t.storage_offset())


def _strides(t: Tensor) -> tuple[int, ...]:
    """Those that matter: a dimension of one element has none."""
    return tuple(s * (n > 1) for n, s in zip(t.shape, t.stride(), strict=True))


def _step(layout: Layout, whole: Layout) -> tuple[object, tuple[object, ...]] | None:
    """The view that has a layout, of a tensor of another: its shape, or a part of a dimension."""
    shape, strides, first = layout
    sizes, steps, start = whole
    if math.prod(shape) == math.prod(sizes) and first == start:
        dense = (strides, steps) == (_dense(shape), _dense(sizes))
        return (torch.reshape, (shape,)) if dense else None
    dims = [d for d, sides in enumerate(zip(shape, sizes, strict=False)) if sides[0] != sides[1]]
    wanted = tuple(s * (n > 1) for n, s in zip(shape, steps, strict=False))
    if len(shape) != len(sizes) or len(dims) != 1 or strides != wanted:
        return None
    (dim,) = dims
    at, left = divmod(first - start, steps[dim] or 1)
    fits = not left and 0 <= at <= sizes[dim] - shape[dim]
    return (torch.narrow, (dim, at, shape[dim])) if fits else None


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return _strides(torch.empty(shape, device="meta"))


def _called(function: object, made: Made, *args: object) -> Made:
    grad = made.call.grad
    autocast = made.call.autocast
    return Made(Call(function, (made, *args), {}, grad, autocast), 0)
