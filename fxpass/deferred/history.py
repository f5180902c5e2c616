"""The autograd history of deferred logits.

In: deferred logits and what they are computed from. Out: the same logits as a view of a plain
tensor, the base, which has the history::

    base = attach(part, device, inputs)  # its backward recomputes the logits
    logits = view_of(base, DeferredLogits(part, device))

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

from fxpass.deferred.dynamo import opaque
from fxpass.deferred.values import Part

aten = torch.ops.aten


def attach(part: Part, device: torch.device, inputs: Sequence[Any]) -> Tensor:
    """A base for the logits of a run: autograd links it to the inputs of the recipe."""
    return _base(part, _Attach.apply(part, device, *inputs))


def attach_cast(part: Part, cast: Tensor) -> Tensor:
    """A base for deferred logits that autograd links to those before a cast."""
    return _base(part, _Shadow.apply(part, cast))


def view_of(base: Tensor, result: Tensor, view: Any = aten.alias.default) -> Any:
    """``result``, which autograd takes for ``view(base)``."""
    _ = base.grad_fn  # after a write, this replays the views that made ``base``
    with torch._C._InferenceMode(base.is_inference()), torch.enable_grad(), _Returns(result):
        return view(base)


def _base(part: Part, base: Any) -> Tensor:
    part.buffer.give_memory(base)
    return base


@opaque
class _Attach(torch.autograd.Function):
    """From the inputs of a recipe to the logits."""

    @staticmethod
    def forward(ctx: Any, part: Part, device: torch.device, *inputs: Any) -> Tensor:
        ctx.run = part.run
        ctx.set_materialize_grads(False)
        return _without_memory(part.like, device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Any:  # pyright: ignore
        needed = ctx.needs_input_grad[2:]
        if grad is None:
            return (None, None, *(None for _ in needed))
        return (None, None, *ctx.run.gradients(needed, grad))


@opaque
class _Shadow(torch.autograd.Function):
    """From deferred logits without a base to the same logits."""

    @staticmethod
    def forward(ctx: Any, part: Part, cast: Tensor) -> Tensor:
        return _without_memory(part.like, cast.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        return None, grad


def _without_memory(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(like.shape, (0,) * like.dim(), dtype=like.dtype, device=device)


class _Returns(TorchDispatchMode):
    """The next operation returns this tensor."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result = result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.result
