"""Torch functions of deferred logits, outside of the compiled function that returns them.

They return what eager returns, with its gradients, and the logits are never computed: the rows of
tests/programs/rows/answers.py. Here are models whose graph ends elsewhere, numbers that differ from
step to step, and what lives how long.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from fxpass.deferred.drawing import Drawing
from fxpass.deferred.programs import Programs
from tests.support import numerics
from tests.support.deferred_models import (
    LABELS,
    TARGETS,
    B,
    D,
    Model,
    V,
    agree,
    deferring,
    no_logits,
    of_labels,
)

# Dynamo itself looks at the .grad of logits that enter a graph
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def as_accurate(
    models: Sequence[Model], loss_of: Callable[[Model], Tensor], dtype: torch.dtype
) -> None:
    """A loss and its gradients of the first model are as accurate as those of the second one, by the
    last one, which is exact. In bf16: under autocast."""
    found = []
    for model in models:
        autocast = dtype is torch.bfloat16 and model is not models[-1]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
        model.zero_grad()
    numerics.assert_close(*found, dtype, floor=5e-5)  # a divergence cancels


def picked(z: Tensor) -> Tensor:
    return z.log_softmax(-1).gather(-1, LABELS[..., None])


# ---------------------------------------------------------------- numbers that differ


SCHEDULED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "temperature": lambda z, t: of_labels(z / t),
    "label smoothing": lambda z, t: F.cross_entropy(
        z.flatten(0, 1), LABELS.flatten(), label_smoothing=t / 9
    ),
    "sum of smoothed": lambda z, t: F.cross_entropy(
        z.transpose(1, 2), LABELS, reduction="sum", label_smoothing=t / 9
    ),
    "growing beta": lambda z, t: (picked(z * t) * t).mean(),
    "distillation": lambda z, t: (
        F.kl_div((z / t).log_softmax(-1), TARGETS, reduction="batchmean") * t * t
    ),
    "two temperatures": lambda z, t: F.kl_div(
        (z / t).log_softmax(-1), (z.detach() / (t + 1)).softmax(-1), reduction="batchmean"
    ),
    "three, of which two are equal": lambda z, t: F.kl_div(
        (z / t).log_softmax(-1) + (z / t).softmax(-1),
        (z.detach() / (t + 1)).softmax(-1),
        reduction="batchmean",
    ),
    "clamp": lambda z, t: z.clamp(-t, t).logsumexp(-1).mean(),
    "power": lambda z, t: z.softmax(-1).pow(1 + t).sum(-1).log().mean(),
    "mask": lambda z, t: z.masked_fill(TARGETS > 0.01, -t).logsumexp(-1).mean(),
    "in place": lambda z, t: z.clone().div_(t).logsumexp(-1).mean(),
    "of classes": lambda z, t: (z.argmax(-1) * t).mean() + z.mean(),
    "margin": lambda z, t: (t - z.gather(-1, LABELS[..., None]) + z).relu().mean(),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in SCHEDULED]
    + [(name, torch.bfloat16) for name in ("temperature", "label smoothing", "growing beta")],
)
def test_a_number_that_differs_compiles_nothing(name, dtype):
    """From the fourth step on: one program is for the first number, and one for all others; where a
    function takes no tensor, there are four, and the logits after that."""
    models = deferring(Model()), Model(), Model().double()
    for step in range(7):
        counters.clear()
        number = 1.0 - 0.07 * step
        as_accurate(models, lambda model, number=number: SCHEDULED[name](model(), number), dtype)
        assert step < 4 or not counters["fusedce"]["matched"]


# ---------------------------------------------------------------- where the graph ends


class Shifted(Model):
    """Its graph ends behind a shift."""

    def forward(self) -> Tensor:
        logits = self.head(self.hidden())
        logits, labels = logits[:, :-1], LABELS[:, 1:]
        torch._dynamo.graph_break()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Views(Model):
    """Its graph returns two views of scaled logits, which share memory."""

    def forward(self) -> Tensor:
        logits = self.head(self.hidden()) * 0.5
        first, later = logits[:, :-1].float(), logits.transpose(1, 2)
        torch._dynamo.graph_break()
        picked = F.cross_entropy(first.reshape(-1, V), LABELS[:, 1:].flatten())
        return picked + F.cross_entropy(later, LABELS)


class Measured(Model):
    """Its graph ends at an accuracy that is printed, before the loss."""

    def forward(self) -> Tensor:
        logits = self.head(self.hidden())
        correct = (logits.argmax(-1) == LABELS).float().mean().item()
        return of_labels(logits) + correct


class WithLoss(Model):
    def forward(self) -> tuple[Tensor, Tensor]:
        logits = self.head(self.hidden())
        return logits, of_labels(logits)


class WithLora(Model):
    """A head of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(D, 4), torch.nn.Linear(4, V)

    def forward(self) -> Tensor:
        x = self.hidden()
        return self.head(x) + self.b(self.a(x)) * 2


def trained(model: Model) -> Tensor:
    loss = model()
    loss.backward()
    return loss


def read_beside_its_loss(model: Model) -> list[Tensor]:
    z, loss = model()
    masked = F.cross_entropy(z[LABELS > 100], LABELS[LABELS > 100])
    entropy = -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)
    made = [of_labels(z), entropy, masked, z.logsumexp(-1).mean()]
    sum((one.square().sum() for one in made), loss).backward()
    return [*made, z.argmax(-1)]


def inferred(model: Model) -> list[Any]:
    with torch.inference_mode():
        logits = model()
        found = picked(logits), logits.argmax(-1)
    return [*found, [one.is_inference() for one in found]]


USES = {
    "shifted": (Shifted, trained),
    "views": (Views, trained),
    "measured": (Measured, trained),
    "with its loss": (WithLoss, read_beside_its_loss),
    "low-rank": (WithLora, lambda model: trained(lambda: of_labels(model()))),
    "inference mode": (Model, inferred),
}


@pytest.mark.parametrize("name", USES)
def test_a_model_is_answered(name):
    model, use = USES[name]
    agree(use, model, answered=True)


@pytest.mark.parametrize("model", [Shifted, Views, Measured])
def test_a_break_under_autocast_is_answered(model):
    with no_logits():
        models = deferring(model()), model(), model().double()
        as_accurate(models, lambda one: one(), torch.bfloat16)


def test_in_one_graph_it_gets_values():
    with torch.no_grad():
        want = Model()().logsumexp(-1)
    logits = deferring(Model())()
    for options in ({"backend": "fusedce", "fullgraph": True}, {"backend": "aot_eager"}):
        function = torch.compile(lambda z: z.logsumexp(-1), **options)
        torch.testing.assert_close(function(logits), want)


@pytest.mark.parametrize(
    "read",
    [
        lambda z: z[:, -1].softmax(-1).cumsum(0),
        lambda z: torch.tensor(z[:, -1].log_softmax(-1).tolist()),
        lambda z: (z[0, 3] / 2).softmax(-1).clone(),
    ],
)
def test_a_few_rows_are_computed_alone(read, monkeypatch):
    """As in sampling."""
    with torch.no_grad():
        want = read(Model()())
        logits = deferring(Model())()
        run, of_rows = logits._part.run, []
        forward = run.recipe.graph.forward
        monkeypatch.setattr(
            run.recipe.graph, "forward", lambda x, *a: of_rows.append(x.shape) or forward(x, *a)
        )
        torch.testing.assert_close(read(logits), want)
    assert [shape[:-1].numel() for shape in of_rows] in ([B], [1])


# ---------------------------------------------------------------- programs, lifetimes, threads


def test_a_program_that_cannot_be_made_computes_the_logits(monkeypatch):
    """No program is known that fails now: padding did."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("unforeseen")

    def padded(model: Model) -> Tensor:
        loss = F.pad(model(), (0, 21), value=-1e4).logsumexp(-1).sum()
        loss.backward()
        return loss

    monkeypatch.setattr(Drawing, "drawn", fails)
    agree(padded)


def test_a_program_is_made_once(monkeypatch):
    """For the next step; and from the second one on for any number of rows, but for that of
    sequences."""
    made, once = [], Programs._new_program
    monkeypatch.setattr(Programs, "_new_program", lambda *a: made.append(a) or once(*a))
    model = deferring(Model())
    for rows, programs in ((6, 1), (6, 1), (5, 2), (4, 2), (len(LABELS), 3), (5, 3)):
        logits = model()[:, :rows]
        F.cross_entropy(logits.flatten(0, 1), LABELS[:, :rows].flatten()).backward()
        assert len(made) == programs


@pytest.mark.parametrize("loss_of", [of_labels, lambda z: of_labels(z.log_softmax(-1) * 2)])
def test_hidden_states_are_released_after_backward(loss_of):
    """Also where the loss is alive."""
    model = deferring(Model())
    with no_logits():
        logits = model()
        run = weakref.ref(logits._part.run)
        loss = loss_of(logits)
        del logits
        loss.backward()
    gc.collect()
    assert run() is None
    assert loss.isfinite()


def test_logits_that_are_computed_are_released():
    """What is known of a function that is not answered refers to no tensor."""
    logits = deferring(Model())()
    part = weakref.ref(logits._part)
    logits.cumsum(0)
    del logits
    gc.collect()
    assert part() is None


def test_threads():
    model, found, errors = deferring(Model()), {}, []
    model()  # compiled once
    want = of_labels(Model()()).item()

    def work(number: int) -> None:
        try:
            loss = of_labels(model())
            loss.backward()
            found[number] = loss.item()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [*found.values()] == pytest.approx([want] * 4, rel=1e-6)
