"""Results of functions of deferred logits that are as large as logits: deferred, too.

In: a tensor that calls make. Out: what computes it, in the place of a run of a model::

    Later(Made(log_softmax, 0), like, device, trained=True).logits()    the recipe, then log_softmax
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxpass.deferred.inputs import quiet
from fxpass.deferred.layouts import Like
from fxpass.deferred.records import Leaf, Made, calls_of, evaluated, leaves_of
from fxpass.deferred.run import Run


class Later:
    """Computes what calls make of logits.

    Attributes:
        made: the tensor.
        recipe: that of the first logits, for messages.
        inputs: all that must not change until it is computed.
        given: the tensors behind them, as autograd knows them.
        like, device: its layout, as of a :class:`Run`.
        seen, lock: as of a :class:`Run`.
    """

    def __init__(self, made: Made, layout: Like) -> None:
        self.made = made
        self.like = layout.like
        self.device = layout.device
        self.leaves = leaves_of(calls_of([made]))
        self.roots = [leaf for leaf in self.leaves if isinstance(leaf, Run)]
        self.recipe = replace(self.roots[0].recipe, rows=(), requires_grad=layout.trained)
        self.seen = any(root.seen for root in self.roots)
        self.lock = threading.RLock()
        self.inputs: list[Any] | None = []
        self.given: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, Run):
                self.inputs += leaf.inputs or ()
                self.given += (
                    a if needs else None for a, needs in zip(leaf.given, leaf.trained, strict=True)
                )
            else:
                self.inputs.append(leaf.input)
                self.given.append(leaf.tensor if leaf.tensor.requires_grad else None)

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """All values."""
        with quiet():
            known = {leaf: self._value(leaf) for leaf in self.leaves}
            return _computed(self.made, known)

    def gradients(self, needed: Sequence[bool], grad: Tensor) -> list[Tensor | None]:
        """The gradients of what is ``given``, of those that are ``needed``."""
        leaves: list[Tensor | None] = []
        known: dict[Leaf, Tensor] = {}
        with quiet():
            todo = iter(needed)
            for leaf in self.leaves:
                given = leaf.checked() if isinstance(leaf, Run) else [self._value(leaf)]
                for i in range(len(given)):
                    if next(todo):
                        given[i] = given[i].detach().requires_grad_()
                        leaves.append(given[i])
                    else:
                        leaves.append(None)
                with torch.enable_grad():
                    known[leaf] = leaf.recipe(*given) if isinstance(leaf, Run) else given[0]
            with torch.enable_grad():
                made = _computed(self.made, known)
            wanted = [leaf for leaf in leaves if leaf is not None]
            grads = torch.autograd.grad(made, wanted, grad.view_as(made), allow_unused=True)
            found = iter(grads)
            return [None if leaf is None else next(found) for leaf in leaves]

    def _value(self, leaf: Leaf) -> Tensor:
        return leaf.logits() if isinstance(leaf, Run) else leaf.value(self.recipe.source)


def _computed(made: Made, known: Mapping[Leaf, Tensor]) -> Tensor:
    """A tensor, by the calls that make it."""
    run = lambda call, args, kwargs: call.applied()(*args, **kwargs)  # noqa: E731
    return evaluated([made], known, run, torch.clone)[0]
