"""Results of functions of deferred logits, which other functions of these logits read.

In: a plain tensor among the arguments of a function. Out: its :class:`CallResult`, if it is a
result of the logits, or a view of a result::

    m = logits.amax(-1, True)    computed
    logits >= m                  the call reads amax(logits, -1, True) in the place of m

Each program recomputes the logits, and the last bits may differ: one program has to compute both
sides of a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fxpass.deferred.records import Call, CallResult, PlainOperand, calls_of, origins_of
from fxpass.deferred.values import Buffer

MOST = 16  # results of one buffer


class StridedLayout(NamedTuple):
    """Where a tensor has its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, t: Tensor) -> StridedLayout:
        """The layout of a tensor; a dimension of one element has stride 0."""
        strides = tuple(s * (n > 1) for n, s in zip(t.shape, t.stride(), strict=True))
        return cls(tuple(t.shape), strides, int(t.storage_offset()))

    @property
    def is_contiguous(self) -> bool:
        """If the values follow each other in the order of the indices."""
        return self.strides == StridedLayout.of(torch.empty(self.shape, device="meta")).strides


@dataclass(frozen=True, eq=False)
class RecordedResult:
    """A result that a program has.

    Attributes:
        result: the call that computes it.
        layout: its layout.
        trained: whether it has a gradient.
        storage: its memory.
        versions: of its values, and of the plain operands that it was computed from.
    """

    result: CallResult
    layout: StridedLayout
    trained: bool
    storage: StorageWeakRef
    versions: tuple[int, ...]

    def find(self, t: Tensor) -> CallResult | None:
        """The result that a tensor is, if it is this result or a view of it."""
        same = t.untyped_storage()._cdata == self.storage.cdata
        if not same or self.versions != _versions(t, self.result):
            return None
        result = self.result
        layout = StridedLayout.of(t)
        if layout != self.layout:
            if (view := _view_between(self.layout, layout)) is None:
                return None
            function, args = view
            result = _applied(function, result, *args)
        return _applied(torch.detach, result) if self.trained and not t.requires_grad else result


def record_results(
    buffers: Sequence[Buffer], results: Sequence[CallResult], tensors: Sequence[Tensor]
) -> None:
    """Records results, and the tensors that they are, at the buffers of their logits."""
    for result, t in zip(results, tensors, strict=True):
        inference = any(map(torch.is_inference, (t, *_plain_tensors(result))))
        if inference or not t.is_floating_point():
            continue
        record = RecordedResult(
            result=result,
            layout=StridedLayout.of(t),
            trained=t.requires_grad,
            storage=StorageWeakRef(t.untyped_storage()),
            versions=_versions(t, result),
        )
        for buffer in buffers:
            alive = [other for other in buffer.results if not other.storage.expired()]
            buffer.results = [*alive, record][-MOST:]


def find_result(buffers: Sequence[Buffer], t: Tensor) -> CallResult | None:
    """The recorded result that a tensor is, or is a view of; None if there is none."""
    if not t.is_floating_point() or torch.is_inference(t):
        return None
    found = (record.find(t) for buffer in buffers for record in buffer.results)
    return next((result for result in found if result is not None), None)


def _plain_tensors(result: CallResult) -> list[Tensor]:
    return [
        origin.tensor
        for origin in origins_of(calls_of([result]))
        if isinstance(origin, PlainOperand)
    ]


def _versions(t: Tensor, result: CallResult) -> tuple[int, ...]:
    return tuple(x._version for x in (t, *_plain_tensors(result)))


def _view_between(
    whole: StridedLayout, view: StridedLayout
) -> tuple[object, tuple[object, ...]] | None:
    """The function and arguments of a view, if it reshapes the whole, or narrows one dimension."""
    if math.prod(view.shape) == math.prod(whole.shape) and view.offset == whole.offset:
        contiguous = view.is_contiguous and whole.is_contiguous
        return (torch.reshape, (view.shape,)) if contiguous else None
    if len(view.shape) != len(whole.shape):
        return None
    dims = [d for d, size in enumerate(view.shape) if size != whole.shape[d]]
    strides = tuple(s * (n > 1) for n, s in zip(view.shape, whole.strides, strict=True))
    if len(dims) != 1 or view.strides != strides:
        return None
    (dim,) = dims
    start, left = divmod(view.offset - whole.offset, whole.strides[dim] or 1)
    fits = not left and 0 <= start <= whole.shape[dim] - view.shape[dim]
    return (torch.narrow, (dim, start, view.shape[dim])) if fits else None


def _applied(function: object, result: CallResult, *args: object) -> CallResult:
    """The result of a function of a result, in the modes of its call."""
    call = result.call
    return CallResult(Call(function, (result, *args), {}, call.grad, call.autocast), 0)
