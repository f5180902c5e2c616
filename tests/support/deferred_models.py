"""Models that return logits, in eager and compiled by fusedce, which defers them.

In: what a program makes of a model. Out: that it makes the same of both::

    agree(lambda model: model().logsumexp(-1))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass.deferred.run import Run

B, T, D, V = 3, 7, 16, 300
torch.manual_seed(0)
IDS, LABELS = torch.randint(V, (B, T)), torch.randint(V, (B, T))
TARGETS = torch.rand(B, T, V).softmax(-1)
ROWS = torch.rand(B, T, 1) + 0.5


class Model(torch.nn.Module):
    """A language model of one layer."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(V, D)
        self.layer, self.head = torch.nn.Linear(D, D), torch.nn.Linear(D, V, bias=bias)

    def hidden(self) -> Tensor:
        return self.layer(self.embed(IDS)).tanh()

    def forward(self) -> Any:
        return self.head(self.hidden())


class Capped(Model):
    def forward(self) -> Tensor:
        return 3 * torch.tanh(self.head(self.hidden()).float() / 3)


def deferring(model: torch.nn.Module) -> Any:
    """The model, compiled."""
    torch._dynamo.reset()
    model.compile(backend="fusedce", options={"fusedce.inner": "aot_eager"})
    return model


def is_deferring(model: torch.nn.Module) -> bool:
    return model._compiled_call_impl is not None


@contextmanager
def no_logits() -> Iterator[None]:
    """Raises where logits or their gradients are computed."""

    def refuse(self: Run, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("logits are computed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "logits", refuse)
        patch.setattr(Run, "gradients", refuse)
        yield


def of_labels(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), LABELS.flatten())


def agree(
    use: Callable[[Any], Any], model: Callable[[], Model] = Model, answered: bool = False
) -> None:
    """What ``use`` returns and the parameters' gradients are those of eager; ``answered``: logits are
    never computed."""
    eager, ours = model(), deferring(model())
    want = use(eager)
    with no_logits() if answered else nullcontext():
        got = use(ours)
    torch.testing.assert_close(got, want)
    gradients = [[p.grad for p in one.parameters()] for one in (ours, eager)]
    torch.testing.assert_close(*gradients)
