"""Trainers and loops whose loss is outside of the compiled model: eager's losses, and no logits.

The programs are those of ``python -m benchmarks.trainers``, which measures their memory.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.trainers.programs import PROGRAMS
from benchmarks.trainers.task import Sizes, Task
from tests.support.pages import EXTENDING, code_under

pytestmark = [
    # transformers' own, of an argument that TRL gives it
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
    # lightning's own, on this torch
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    # torch's own, when Dynamo traces a cached function of transformers
    pytest.mark.filterwarnings("ignore:.*Dynamo detected a call to a `functools.lru_cache`"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

SIZES = Sizes(classes=1000, hidden=32, layers=1, sequences=4, tokens=32, steps=20)
# A score is a sum of hundreds of log-probabilities; twenty steps carry rounding on.
RTOL = 1e-5
ELSEWHERE = {
    "FSDP2 on two ranks, compiled loss",  # needs processes, minutes
    "Trainer, own `compute_loss`",  # as that with a token accuracy
    "TRL's CPOTrainer",  # as ORPOTrainer
}
# Without gradients a loss in the graph is computed from logits, which are returned.
PLAIN = {"Trainer, the model's loss, evaluation with argmax"}
CASES = [name for name in PROGRAMS if name not in ELSEWHERE]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """TRL says that its trainers are experimental, lightning how many threads there are."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    logging.getLogger("lightning").setLevel(logging.ERROR)


def trained(name: str, backend: str) -> Task:
    torch.manual_seed(0)
    task = Task(SIZES, backend, {"fusedce.inner": "eager"} if backend != "eager" else None)
    with task.watch:
        PROGRAMS[name].load()(task)
    return task


def test_the_trainer_of_the_page(monkeypatch):
    scope: dict[str, Any] = {}
    exec(code_under(EXTENDING, "A trainer in the table")[0], scope)
    program = SimpleNamespace(load=lambda: scope["focal"])
    monkeypatch.setitem(PROGRAMS, "focal loss", program)
    test_a_loss_outside_of_the_model("focal loss")


@pytest.mark.parametrize("name", CASES)
def test_a_loss_outside_of_the_model(name):
    fused, eager = trained(name, "fusedce"), trained(name, "eager")
    assert len(eager.losses) >= SIZES.steps
    assert len(set(eager.losses)) >= SIZES.steps, "nothing was learned, so nothing was compared"
    assert fused.losses == pytest.approx(eager.losses, rel=RTOL)
    assert fused.watch.forwards >= SIZES.steps
    if name in PLAIN:
        assert fused.watch.plain == SIZES.steps // 2  # its evaluations
        assert not fused.watch.counts
    else:
        assert fused.watch.fused, fused.watch.why
