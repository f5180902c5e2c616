"""The values behind deferred logits: what computes them, who shares them, and when.

In: a recipe with its inputs, and the views and casts that the user took of the result. Out: plain
tensors, computed on first use::

    whole = root(recipe, inputs, like)  # a Part
    last = whole.view(Step.of(torch.ops.aten.select.int, (1, -1), {}, whole.like))
    last.read()  # runs the recipe on hidden[:, -1]

A `Buffer` is the memory that eager would have allocated: the logits, or a cast of them. A `Part` is
what one tensor shows of it. Rows may be computed apart from the rest, as long as nobody can write
to them or hold an alias: `Part.own` first makes the whole buffer and puts such rows into it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxpass.deferred.inputs import Held, quiet

aten = torch.ops.aten
CUTS = 8  # so many times rows are computed apart; after that the whole is cheaper


@dataclass(frozen=True, eq=False)
class Recipe:
    """How logits are computed.

    Attributes:
        graph: called as ``graph(*inputs)``; plain torch operations with explicit dtypes, returns
            the logits.
        rows: positions of the inputs that carry rows: their leading dimensions are those of the
            logits, their last one is replaced by the classes, and every row is computed from that
            row alone. Empty if that is not known.
        source: the user's source line, for messages.
    """

    graph: GraphModule
    rows: tuple[int, ...]
    source: str


class Origin:
    """One run of a compiled graph: the recipe and the inputs it had then."""

    def __init__(self, recipe: Recipe, inputs: Sequence[Any], dropped: bool) -> None:
        self.recipe = recipe
        self.lock = threading.RLock()  # of everything that comes from this origin
        self.dropped = dropped
        self.inputs = [
            Held(a, i in recipe.rows) if isinstance(a, Tensor) else a
            for i, a in enumerate(() if dropped else inputs)
        ]

    @property
    def held(self) -> list[Held]:
        return [a for a in self.inputs if isinstance(a, Held)]

    def run(self, steps: Sequence[Step]) -> Tensor:
        """The logits after ``steps``; row steps are taken on the inputs."""
        with quiet():
            lead, rest = split(steps) if self.recipe.rows else ([], steps)
            inputs = self.take()
            for i in self.recipe.rows:
                for step in lead:
                    inputs[i] = step.rows(inputs[i])
            return replay(self.recipe.graph(*inputs), rest)

    def gradients(self, needed: Sequence[bool], grad: Tensor) -> list[Tensor | None]:
        """For each input that is needed the gradient, in its dtype, given that of the logits."""
        with quiet():
            inputs = self.take()
            wanted = []
            for i, need in enumerate(needed):
                if need:
                    inputs[i] = inputs[i].detach().requires_grad_()
                    wanted.append(inputs[i])
            with torch.enable_grad():
                logits = self.recipe.graph(*inputs)
            found = iter(torch.autograd.grad(logits, wanted, grad, allow_unused=True))
        return [next(found) if need else None for need in needed]

    def take(self) -> list[Any]:
        """The inputs, checked; raises RuntimeError if they changed or were dropped."""
        if self.dropped:
            raise RuntimeError(
                f"the logits of `{self.recipe.source}` were never computed, because FUSEDCE_LOGITS="
                "drop; with FUSEDCE_LOGITS=defer they are computed when they are used"
            )
        with self.lock:
            source = self.recipe.source
            return [a.take(source) if isinstance(a, Held) else a for a in self.inputs]


@dataclass(frozen=True, eq=False)
class Step:
    """A view or a cast of logits.

    Attributes:
        on_rows: the same step on a tensor of rows; None if it is more than a step on rows.
        cuts: it leaves rows out.
    """

    func: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    on_rows: Callable[[Tensor], Tensor] | None = None
    is_copy: bool = False
    cuts: bool = False

    def __call__(self, t: Tensor) -> Tensor:
        return self.func(t, *self.args, **self.kwargs)

    def rows(self, t: Tensor) -> Tensor:
        assert self.on_rows
        return self.on_rows(t)

    @staticmethod
    def of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: Tensor) -> Step:
        """The view ``func(before, *args, **kwargs)``; ``before`` is on the meta device."""
        on_rows, cuts, ndim = None, False, before.dim()
        if func in (aten.alias.default, aten.detach.default):
            on_rows = _same
        elif func in (aten.slice.Tensor, aten.select.int) and ndim:
            dim = (args[0] if args else 0) % ndim
            if dim < ndim - 1:  # the last dimension is the classes'
                on_rows, cuts = partial(_call, func, (dim, *args[1:]), kwargs), True
        elif func is aten.unsqueeze.default and args[0] % (ndim + 1) < ndim:
            on_rows = partial(_call, func, (args[0] % (ndim + 1),), {})
        elif func is aten.view.default and ndim:
            lead = func(before, *args).shape
            if lead and lead[-1] == before.shape[-1]:
                on_rows = partial(_reshape_rows, lead[:-1])
        return Step(func, args, kwargs, on_rows, cuts=cuts)


def split(steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """Those that can be taken on the rows of the inputs, and the rest. Casts commute with rows."""
    lead, rest, classes_last = [], [], True
    for step in steps:
        classes_last &= step.is_copy or step.on_rows is not None
        (lead if classes_last and not step.is_copy else rest).append(step)
    return lead, rest


def replay(value: Tensor, steps: Sequence[Step]) -> Tensor:
    for step in steps:
        value = step(value)
    return value


class Buffer:
    """The memory that eager would have allocated.

    Attributes:
        steps: from the recipe's result to the whole of it.
        like: its shape, dtype and strides, on the meta device.
        value: the whole, once it is computed.
        shared: somebody outside may hold an alias of ``value`` or have written to it.
        source: what it is a cast of: worth a look before computing from the inputs.
    """

    def __init__(
        self, lock: Any, steps: tuple[Step, ...], like: Tensor, source: Buffer | None = None
    ) -> None:
        self.lock = lock
        self.steps = steps
        self.like = like
        self.value: Tensor | None = None
        self.shared = False
        self.source = None if source is None else weakref.ref(source)
        self.parts: weakref.WeakSet[Part] = weakref.WeakSet()
        self.cuts = 0

    def compute(self, origin: Origin, path: tuple[Step, ...] = ()) -> Tensor:
        """The values of a part, in memory of their own."""
        source = self.source and self.source()
        if source and source.value is not None and not source.shared:
            with quiet():
                lead, rest = split((*self.steps, *path)[len(source.steps) :])
                return replay(replay(source.value, lead), rest)
        return origin.run((*self.steps, *path))

    def fill(self, origin: Origin) -> Tensor:
        """Computes the whole, puts the rows that were computed apart into it, forgets the rest."""
        self.value = value = self._laid_out(self.compute(origin), origin)
        for part in list(self.parts):
            if part.value is not None:  # what was seen once must stay, to the bit
                with quiet():
                    part.value = replay(value, part.path).copy_(part.value)
            part.settle()
        return value

    def _laid_out(self, value: Tensor, origin: Origin) -> Tensor:
        """``value`` with the strides that were promised, in memory that is nobody else's."""
        like = self.like
        taken = {h.tensor.untyped_storage().data_ptr() for h in origin.held}
        good = value.stride() == like.stride() and value.storage_offset() == 0
        if good and value.untyped_storage().data_ptr() not in taken:
            return value
        with quiet():
            own = torch.empty_strided(
                like.shape, like.stride(), dtype=value.dtype, device=value.device
            )
            return own.copy_(value)


class Part:
    """What one tensor shows of a buffer.

    Attributes:
        origin: None once there is nothing left to compute.
        path: views, from the buffer's whole to this.
        like: shape, dtype, strides and offset, on the meta device.
        value: None as long as it is not computed.
    """

    def __init__(
        self,
        origin: Origin | None,
        buffer: Buffer,
        path: tuple[Step, ...],
        like: Tensor,
        value: Tensor | None = None,
    ) -> None:
        self.origin = origin
        self.buffer = buffer
        self.path = path
        self.like = like
        self.value = value
        self._inner: Tensor | None = None
        with buffer.lock:
            buffer.parts.add(self)
        if self.pending:
            with _pending_lock:
                _pending.add(self)

    @property
    def pending(self) -> bool:
        return self.value is None and self.buffer.value is None

    def view(self, step: Step) -> Part:
        """A view of the same memory, not computed."""
        with self.buffer.lock:
            if self.value is None or self.origin:  # not computed, or rows apart from the rest
                return Part(self.origin, self.buffer, (*self.path, step), step(self.like))
            return Part(None, self.buffer, (*self.path, step), step(self.like), step(self.value))

    def cast(self, dtype: torch.dtype, memory_format: torch.memory_format) -> Part:
        """A copy in another dtype, not computed; ``self`` must be pending."""
        step = Step(
            aten._to_copy.default,
            (),
            {"dtype": dtype, "memory_format": memory_format},
            is_copy=True,
        )
        like = step(self.like)
        steps = (*self.buffer.steps, *self.path, step)
        return Part(self.origin, Buffer(self.buffer.lock, steps, like, self.buffer), (), like)

    def read(self) -> Tensor:
        """The values. Whoever gets them must neither write to them nor hand out an alias."""
        buffer = self.buffer
        with buffer.lock:
            if self.value is None:
                if buffer.value is None and self._apart():
                    assert self.origin
                    self.value = buffer.compute(self.origin, self.path)
                    buffer.cuts += 1
                    with _pending_lock:
                        _pending.discard(self)
                else:
                    self._whole()
            assert self.value is not None
            return self.value

    def own(self) -> Tensor:
        """The values in the buffer's memory: an alias of what every other part of it shows."""
        with self.buffer.lock:
            self.buffer.shared = True
            self._whole()
            assert self.value is not None
            return self.value

    def inner(self) -> Tensor:
        """The same as :meth:`own`, as a tensor that autograd does not know for a view."""
        if self._inner is None:
            value = self.own()
            with quiet():
                self._inner = value.data
        return self._inner

    def settle(self) -> None:
        """The buffer is computed: the inputs are not needed any more."""
        self.origin = None
        with _pending_lock:
            _pending.discard(self)

    def _whole(self) -> None:
        whole = self.buffer.value
        if whole is None:
            assert self.origin
            whole = self.buffer.fill(self.origin)
        if self.value is None:
            with quiet():
                self.value = replay(whole, self.path)

    def _apart(self) -> bool:
        assert self.origin
        if not self.origin.recipe.rows or self.buffer.cuts >= CUTS:
            return False
        lead, _ = split((*self.buffer.steps, *self.path))
        return any(step.cuts and step in lead for step in self.path)


def root(recipe: Recipe, inputs: Sequence[Any], like: Tensor, dropped: bool) -> Part:
    """The whole result of a recipe, not computed. ``like``: its layout, on the meta device."""
    origin = Origin(recipe, inputs, dropped)
    return Part(origin, Buffer(origin.lock, (), like), (), like)


def computed(value: Tensor) -> Part:
    """A part that is the whole of ``value``."""
    buffer = Buffer(threading.RLock(), (), value)
    buffer.value, buffer.shared = value, True
    part = Part(None, buffer, (), value, value)
    part._inner = value
    return part


# Weak: what nobody can use any more is collected, hidden states included.
_pending: weakref.WeakSet[Part] = weakref.WeakSet()
_pending_lock = threading.RLock()  # re-entrant: collecting garbage may run finalizers anywhere


def pending() -> list[Part]:
    """Everything that is alive, not computed, and can be."""
    with _pending_lock:
        parts = list(_pending)
    return [part for part in parts if part.pending and part.origin and not part.origin.dropped]


def _same(t: Tensor) -> Tensor:
    return t


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], t: Tensor) -> Tensor:
    return func(t, *args, **kwargs)


def _reshape_rows(lead: Sequence[int], t: Tensor) -> Tensor:
    return t.reshape(*lead, t.shape[-1])
