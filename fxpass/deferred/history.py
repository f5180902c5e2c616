"""The autograd history of deferred logits.

In: deferred logits and the inputs of their recipe. Out: the same logits as a view of a plain
tensor, the base, which has the history::

    base = attach(part, inputs)  # its backward recomputes the logits
    logits = recorded(aten.alias.default, base, DeferredLogits(part))

As in eager, all views of the logits are views of one base, so that a write to a view changes the
history of all. The base is plain, so that compiled code can read it. It has one element of memory
until its buffer is computed; :meth:`fxpass.deferred.values.Buffer.give_memory` then gives it the
values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from fxpass import messages
from fxpass.deferred.dynamo import hidden
from fxpass.deferred.run import Run
from fxpass.deferred.values import BufferView

aten = torch.ops.aten


def attach(part: BufferView, inputs: Sequence[Any]) -> Tensor:
    """A base for the logits of a run: autograd links it to the inputs of the recipe."""
    return _base(part, _Attach.apply(part, *inputs))


def attach_cast(part: BufferView, cast: Tensor) -> Tensor:
    """A base that autograd links to ``cast``, deferred logits without a base."""
    return _base(part, recorded(aten.clone.default, cast, _without_memory(part)))


def recorded(function: Any, given: Tensor, result: Tensor) -> Any:
    """Returns ``result``; autograd records it as the output of ``function(given)``, a view or a
    copy."""
    _ = given.grad_fn  # after a write, this replays the views that made ``given``
    with torch._C._InferenceMode(given.is_inference()):  # its end restores the grad mode too
        torch._C._set_grad_enabled(True)
        # not entered, which takes the host longer: only this operation sees the mode
        torch._C._push_on_torch_dispatch_stack(_Returns(result))
        try:
            return function(given)
        finally:
            torch._C._pop_torch_dispatch_stack(None)


def plain_view(logits: Tensor, value: Tensor) -> Tensor:
    """Returns ``value``; autograd records it as a view of deferred logits. Unlike the record of
    aten.alias for a subclass, this one does not refer to the logits: ``t.plain`` would keep ``t``
    alive."""
    if not logits.requires_grad:
        return recorded(_primal, logits, value)
    view = recorded(_PlainView.apply, logits, value)
    # as of other views: an autograd.Function forbids writes to its own
    _AUTOGRAD._set_creation_meta(view, _AUTOGRAD.CreationMeta.DEFAULT)
    return view


def _primal(t: Tensor) -> Tensor:
    return aten._fw_primal.default(t, 0)


class _PlainView(torch.autograd.Function):
    """From logits to a view of them. Compiled autograd cannot read the node of aten._fw_primal."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return _primal(logits)

    @staticmethod
    @hidden
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        return grad


def _base(part: BufferView, base: Any) -> Tensor:
    part.buffer.give_memory(base)
    return base


class _Attach(torch.autograd.Function):
    """From the inputs of a recipe to the logits."""

    @staticmethod
    def forward(ctx: Any, part: BufferView, *inputs: Any) -> Tensor:
        ctx.run = part.run
        ctx.set_materialize_grads(False)
        return _without_memory(part)

    @staticmethod
    @hidden
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Any:  # pyright: ignore
        _, *needed = ctx.needs_input_grad
        run = _saved_run(ctx)
        if grad is None:
            return None, *[None] * len(needed)
        return None, *run.gradients(needed, grad)


def _saved_run(ctx: Any) -> Run:
    """The run that backward uses; released without ``retain_graph``, since a loss may live longer
    than its logits.

    Raises:
        RuntimeError: it was released before.
    """
    run = ctx.run
    if run is None:
        raise RuntimeError(messages.SECOND_BACKWARD)
    if not _AUTOGRAD._get_current_graph_task_keep_graph():
        ctx.run = None
    return run


_AUTOGRAD: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]


def _without_memory(part: BufferView) -> Tensor:
    like = part.like
    zeros = (0,) * like.dim()
    return torch.empty_strided(like.shape, zeros, dtype=like.dtype, device=part.buffer.device)


class _Returns(TorchDispatchMode):
    """Every operation returns this tensor."""

    def __init__(self, result: Tensor) -> None:
        self.result = result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its users are hidden from Dynamo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.result
