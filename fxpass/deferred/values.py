"""The values behind deferred logits, computed on first use and shared among views.

In: a recipe with its inputs, and views and casts of the result. Out: plain tensors::

    whole = view_of_recipe(recipe, inputs, dropped=False)  # a BufferView
    (last,) = whole.views(lambda t: t[:, -1])
    last.read_values()  # runs the recipe on the last row of the hidden states

A :class:`Buffer` stands for the memory that eager would have allocated: the logits, or a cast of
them. A :class:`BufferView`, a part of a buffer, has a shape, strides and an offset, which determine
its elements, and so the rows of the hidden states that it needs. Some rows may be computed
separately, as long as no user can write to them or has an alias: :meth:`BufferView.materialise`
first computes the whole buffer and copies such rows into it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import TensorWeakRef

from fxpass.deferred.inputs import StaleLogitsError, quiet
from fxpass.deferred.run import Recipe, Run, select_rows
from fxpass.deferred.watch import note_computed

MOST_SEPARATE = 8  # times that rows are computed separately; then the whole buffer is cheaper


@dataclass(eq=False)
class Buffer:
    """The memory that eager would have allocated."""

    run: Run | None  # None when the values are computed and the inputs no longer needed
    device: torch.device
    like: Tensor  # shape, dtype and strides of the whole buffer, on the meta device
    # For each row of V classes its row number in the logits, int64 [R]; None if rows cannot be
    # computed separately.
    rows: Tensor | None = None
    # The casts from the logits to this buffer, each the layouts of the cast part and of the
    # resulting buffer; and the buffer of the last cast part, whose values are cheap if computed.
    casts: tuple[tuple[Tensor, Tensor], ...] = ()
    source: weakref.ref[Buffer] | None = None
    value: Tensor | None = None  # the whole buffer, when it is computed
    # For autograd, the logits are a view of this plain tensor; it gets the memory of value.
    base: TensorWeakRef | None = None
    exposed: bool = False  # a user may have an alias of ``value`` or may have written to it
    # The parts that were computed separately, and how many there have been.
    separate: weakref.WeakSet[BufferView] = field(default_factory=weakref.WeakSet)
    separate_count: int = 0
    results: list[Any] = field(default_factory=list)  # of functions of it, as plain tensors

    def __post_init__(self) -> None:
        self.lock = threading.RLock() if self.run is None else self.run.lock

    def rows_of(self, like: Tensor) -> Tensor | None:
        """The row numbers of a part with this layout, as a tensor with one dimension for each
        dimension of the part whose stride is a multiple of V. None if a row number does not
        determine its elements, or there are no elements."""
        if self.rows is None or not like.numel():  # an empty part may begin behind the last row
            return None
        v = self.like.shape[-1]
        dims = list(zip(like.shape, like.stride(), strict=True))
        if like.storage_offset() % v + sum((n - 1) * step for n, step in dims if step % v) >= v:
            return None  # the other strides cross the border between two rows
        shape = [n for n, step in dims if step % v == 0]
        strides = [step // v for _, step in dims if step % v == 0]
        with quiet():
            numbers = _row_numbers(len(self.rows))
            return numbers.as_strided(shape, strides, like.storage_offset() // v)

    def compute(self, picked: Tensor | None = None) -> Tensor:
        """The whole buffer in new memory; or the rows with the numbers ``picked``, contiguous
        ``[*picked.shape, V]``."""
        with quiet():
            source = self.source and self.source()
            if source and source.value is not None and not source.exposed:
                part, like = self.casts[-1]
                before = _view_of(source.value, part)
                if picked is None:
                    return _copied(before, like)
                return select_rows(before, picked).to(like.dtype)
            run = self.run
            rows = self.rows
            assert run
            if rows is not None and picked is not None:
                rows = rows[picked]
            if rows is not None and rows.numel() < run.like.shape[:-1].numel():
                value = run.logits(rows)
                for _, like in self.casts:
                    value = value.to(like.dtype)
                value = value.contiguous()
                return value.view(self.like.shape) if picked is None else value
            value = run.logits()
            if value.stride() != run.like.stride() or value.storage_offset():
                value = _copied(value, run.like)
            for part, like in self.casts:
                value = _copied(_view_of(value, part), like)
            return value

    def give_memory(self, base: Tensor) -> None:
        """Makes ``base`` an alias of the whole buffer, when that is computed."""
        self.base = TensorWeakRef(base)
        if self.value is not None:
            base.data = self.value

    def whole_value(self) -> Tensor:
        """The whole buffer, computed once; with the rows that were computed separately."""
        if self.value is not None:
            return self.value
        try:
            value = self.compute()
        except StaleLogitsError:
            if any(part.buffer is self for part in pending()):
                raise
            with quiet():  # nobody can read the rows that were not computed in time
                value = _copied(torch.zeros((), device=self.device), self.like)
        self.value = value
        base = self.base and self.base()
        if base is not None:
            base.data = value
        for part in list(self.separate):
            assert part.value is not None
            with quiet():  # values that the user has seen must not change by a bit
                part.value = _view_of(value, part.like).copy_(part.value)
        self.run = None
        self.results = []
        return value


class BufferView:
    """A view of a buffer: its layout on the meta device, and its values when they are computed."""

    def __init__(self, buffer: Buffer, like: Tensor, value: Tensor | None = None) -> None:
        self.buffer = buffer
        self.like = like
        self.value = value
        self.record: Any = None  # the call of the program that it is a result of
        self.trained = False  # whether this result has a gradient
        if self.run is not None:
            with _parts_lock:
                _parts.add(self)

    @property
    def run(self) -> Run | None:
        """The run that computes it; None when its values are computed."""
        return self.buffer.run if self.value is None else None

    @property
    def is_alone(self) -> bool:
        """If it is the whole buffer, and there is no other part of the buffer."""
        like = self.like
        whole = self.buffer.like
        with _parts_lock:
            others = any(part.buffer is self.buffer and part is not self for part in list(_parts))
        return not others and (like.shape, like.stride()) == (whole.shape, whole.stride())

    @property
    def has_few_rows(self) -> bool:
        """If it has at most half of the rows of its buffer."""
        picked = self.buffer.rows_of(self.like)
        return picked is not None and 2 * picked.numel() <= self.buffer.like.shape[:-1].numel()

    def views(self, view: Callable[[Tensor], Any]) -> list[BufferView]:
        """The views of the same buffer that a function returns; computes nothing."""
        made = [BufferView(self.buffer, like) for like in pytree.tree_leaves(view(self.like))]
        with self.buffer.lock:
            if self.value is not None and self.buffer.value is None:
                # computed separately: the inputs may have changed since
                with quiet():
                    computed = [t.data for t in pytree.tree_leaves(view(self.value))]
                for part, value in zip(made, computed, strict=True):
                    part.value = value
                    self.buffer.separate.add(part)
        return made

    def cast(
        self, dtype: torch.dtype, memory_format: torch.memory_format | None
    ) -> BufferView | None:
        """A copy in another dtype; computes nothing. None if ``self`` is computed."""
        buffer = self.buffer
        part = self.like
        run = self.run
        like = torch.ops.aten._to_copy.default(part, dtype=dtype, memory_format=memory_format)
        rows = None
        picked = buffer.rows_of(part)
        all_classes = part.shape[-1:] == buffer.like.shape[-1:] and part.stride()[-1:] == (1,)
        if picked is not None and all_classes and like.is_contiguous():
            assert buffer.rows is not None
            with quiet():
                rows = buffer.rows[picked.flatten()]
        casts = (*buffer.casts, (part, like))
        made = BufferView(Buffer(run, buffer.device, like, rows, casts, weakref.ref(buffer)), like)
        # Checked at the end: another thread may compute ``self`` at any time. Until then an
        # optimizer's step clones the parameters; from here on, since ``made`` is pending.
        return made if self.run else None

    def read_values(self) -> Tensor:
        """The values, for the program. The caller must not write to them or return an alias."""
        with self.buffer.lock:
            if self.run is not None and not self.has_few_rows:
                note_computed(self.run)
            return self.compute()

    def compute(self) -> Tensor:
        """The values, as :meth:`read_values`, without a report."""
        buffer = self.buffer
        with buffer.lock:
            if self.run is not None and buffer.separate_count < MOST_SEPARATE:
                picked = buffer.rows_of(self.like)
                if picked is not None and picked.numel() < buffer.like.shape[:-1].numel():
                    self.value = _view_of_rows(buffer.compute(picked), self.like)
                    buffer.separate.add(self)
                    buffer.separate_count += 1
            return self._value_of_buffer()

    def hand_out(self, alias: Tensor) -> Tensor:
        """An alias of the values of :meth:`read_values`, for the user: in the memory of the buffer,
        or a copy, if rows were computed separately."""
        with self.buffer.lock:
            whole = self.buffer.value
            if whole is None or memory_of(whole) != memory_of(alias):
                return alias.clone()
            self.buffer.exposed = True
            return alias.detach()

    def materialise(self) -> Tensor:
        """The values, for the program, as an alias of the buffer's memory."""
        with self.buffer.lock:
            note_computed(self.run)
            self.buffer.exposed = True
            self.buffer.whole_value()  # moves rows that were computed separately
            return self._value_of_buffer()

    def _value_of_buffer(self) -> Tensor:
        if self.value is None:
            whole = self.buffer.whole_value()
            with quiet():
                self.value = _view_of(whole, self.like)
        return self.value


class Deferred(Tensor):
    """A tensor with the values of a part; its one subclass is in :mod:`fxpass.deferred.tensor`."""

    __slots__ = ("_computes",)
    _computes: BufferView

    @property
    def _part(self) -> BufferView:
        return self._computes

    @property
    def answers(self) -> bool:
        """If functions may reduce the logits without computing them."""
        part = self._part
        return part.run is not None and part.record is not None


def view_of_recipe(recipe: Recipe, inputs: Sequence[Any], dropped: bool) -> BufferView:
    """The uncomputed logits of a recipe; if ``dropped``, computing them raises RuntimeError."""
    with quiet():  # once: it costs the host as much as twenty operations
        run = Run(recipe, inputs, dropped)
    like = run.like
    rows = None
    if recipe.rows and like.dim() > 1 and like.numel() and like.is_contiguous():
        rows = _row_numbers(like.shape[:-1].numel())
    return BufferView(Buffer(run, run.device, like, rows), like)


@functools.lru_cache(16)
def _row_numbers(count: int) -> Tensor:
    """The numbers of ``count`` rows; nobody writes to them."""
    with quiet():
        return torch.arange(count, device="cpu")


def view_of_value(value: Tensor) -> BufferView:
    """The whole of a computed buffer."""
    return BufferView(Buffer(None, value.device, value, value=value, exposed=True), value, value)


# Weak references: unreachable parts are collected, with their hidden states.
_parts: weakref.WeakSet[BufferView] = weakref.WeakSet()
_parts_lock = threading.RLock()  # re-entrant: garbage collection may run a finalizer at any time


def pending() -> dict[BufferView, Run]:
    """The uncomputed parts that can still be computed, each with its run."""
    with _parts_lock:
        parts = list(_parts)
    runs = [(part, part.run) for part in parts]
    return {part: run for part, run in runs if run is not None and run.inputs is not None}


def memory_of(t: Tensor) -> int:
    """A number that two tensors have in common if they share their memory."""
    return t.untyped_storage()._cdata


def _copied(t: Tensor, like: Tensor) -> Tensor:
    """A copy of ``t`` with the dtype and the strides of ``like``."""
    out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=t.device)
    return out.copy_(t)


def _view_of(whole: Tensor, like: Tensor) -> Tensor:
    """The view of a buffer with this layout; autograd does not treat it as a view."""
    return whole.as_strided(like.shape, like.stride(), like.storage_offset()).data


def _view_of_rows(rows: Tensor, like: Tensor) -> Tensor:
    """The view of the rows of a part that :meth:`Buffer.rows_of` selects."""
    v = rows.shape[-1]
    lead = iter(rows.stride())
    strides = [next(lead) if step % v == 0 else step for step in like.stride()]
    with quiet():
        return rows.as_strided(like.shape, strides, like.storage_offset() % v)
