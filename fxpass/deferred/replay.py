"""Results of functions of deferred logits that are as large as logits: deferred, too.

In: a result of a call. Out: a :class:`Replay`, which computes it, as a run of a model does::

    Replay(CallResult(log_softmax, 0), layout).logits()    runs the recipe, then log_softmax
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxpass.deferred.inputs import quiet
from fxpass.deferred.layouts import TensorLayout
from fxpass.deferred.records import CallResult, Origin, calls_of, evaluated, origins_of
from fxpass.deferred.run import Run


class Replay:
    """Computes a result of a call, by a replay of recipes and calls.

    Attributes:
        result: the result.
        recipe: the recipe of the first logits, for messages.
        inputs: all tensors that must not change until the result is computed.
        given: these tensors with their autograd history; None without gradient.
        like, device: its layout, as of a :class:`Run`.
        gradient_used, lock: as of a :class:`Run`.
    """

    def __init__(self, result: CallResult, layout: TensorLayout) -> None:
        self.result = result
        self.like = layout.meta
        self.device = layout.device
        self.origins = origins_of(calls_of([result]))
        self.roots = [origin for origin in self.origins if isinstance(origin, Run)]
        self.recipe = replace(self.roots[0].recipe, rows=(), requires_grad=layout.trained)
        self.gradient_used = any(root.gradient_used for root in self.roots)
        self.lock = threading.RLock()
        self.inputs: list[Any] | None = []
        self.given: list[Any] = []
        for origin in self.origins:
            if isinstance(origin, Run):
                self.inputs += origin.inputs or ()
                pairs = zip(origin.given, origin.trained, strict=True)
                self.given += (a if trained else None for a, trained in pairs)
            else:
                self.inputs.append(origin.input)
                self.given.append(origin.tensor if origin.tensor.requires_grad else None)

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """All values."""
        with quiet():
            values = {origin: self._value(origin) for origin in self.origins}
            return _replayed(self.result, values)

    def gradients(self, needed: Sequence[bool], grad: Tensor) -> list[Tensor | None]:
        """The gradients of the ``needed`` tensors of ``given`` (None for others), for the result's
        ``grad``."""
        leaves: list[Tensor | None] = []  # of autograd
        values: dict[Origin, Tensor] = {}
        with quiet():
            todo = iter(needed)
            for origin in self.origins:
                given = origin.checked() if isinstance(origin, Run) else [self._value(origin)]
                for i in range(len(given)):
                    if next(todo):
                        given[i] = given[i].detach().requires_grad_()
                        leaves.append(given[i])
                    else:
                        leaves.append(None)
                with torch.enable_grad():
                    values[origin] = origin.recipe(*given) if isinstance(origin, Run) else given[0]
            with torch.enable_grad():
                result = _replayed(self.result, values)
            wanted = [leaf for leaf in leaves if leaf is not None]
            grads = torch.autograd.grad(result, wanted, grad.view_as(result), allow_unused=True)
            found = iter(grads)
            return [None if leaf is None else next(found) for leaf in leaves]

    def _value(self, origin: Origin) -> Tensor:
        return origin.logits() if isinstance(origin, Run) else origin.value(self.recipe.source)


def _replayed(result: CallResult, values: Mapping[Origin, Tensor]) -> Tensor:
    """A result of calls, from the values that they read."""
    apply = lambda call, args, kwargs: call.function_in_modes()(*args, **kwargs)  # noqa: E731
    return evaluated([result], values, apply, torch.clone)[0]
