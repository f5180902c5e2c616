"""A GRPO loop with TRL's own functions on a tiny Llama: eager's losses, and no logits.

Each step is compiled whole: the model, its log-probabilities and entropies by TRL, the clipped ratio
to the log-probabilities of the policy that wrote the texts, a penalty to a reference, metrics.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from trl.trainer import utils

import fxpass
from tests.support import tiny

# torch's own, when Dynamo traces TRL's cached functions
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Dynamo detected a call to a `functools.lru_cache`"
)

STEPS, TEMPERATURE = 10, 0.9


def with_loop(logits: Tensor, completion: Tensor) -> Tensor:
    """TRL's, which loops over the sequences."""
    return utils.selective_log_softmax(logits, completion)


def by_gather(logits: Tensor, completion: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, completion.unsqueeze(-1)).squeeze(-1)


def step_of(log_probs: Callable[[Tensor, Tensor], Tensor], beta: float) -> Callable[..., tuple]:
    def step(model, ids, mask, advantages, old, reference):
        logits = model(input_ids=ids).logits[:, :-1] / TEMPERATURE
        chosen = log_probs(logits, ids[:, 1:])
        entropy = utils.entropy_from_logits(logits.detach())
        ratio = (chosen - old).exp()
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        gap = reference - chosen
        loss = loss + beta * (gap.exp() - gap - 1)
        loss = (loss * mask).sum() / mask.sum()
        return loss, (entropy * mask).sum() / mask.sum(), chosen.detach()

    return step


def losses(step: Callable[..., tuple], compiled: bool) -> tuple[list[float], list[float]]:
    """Losses and entropies; the texts that the advantages favour become likelier."""
    model = tiny.llama()
    torch.manual_seed(1)
    ids = torch.randint(4, tiny.V, (4, 12))
    mask = (torch.arange(11) < torch.tensor([[11], [7], [9], [4]])).float()
    advantages = torch.tensor([1.5, -0.5, 0.5, 1.0])
    with torch.no_grad():
        reference = by_gather(model(input_ids=ids).logits[:, :-1] / TEMPERATURE, ids[:, 1:])
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    torch._dynamo.reset()
    if compiled:
        step = torch.compile(step, backend="fusedce", options={"fusedce.min_logits_mb": 0})
    found, entropies, old = [], [], reference
    for _ in range(STEPS):
        loss, entropy, _ = step(model, ids, mask, advantages, old, reference)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        entropies.append(entropy.item())
    return found, entropies


def test_a_grpo_loop():
    step = step_of(with_loop, beta=0.04)
    counters.clear()
    fused, eager = losses(step, True), losses(step, False)
    assert counters["fusedce"]["matched"] >= 1
    for ours, theirs in zip(fused, eager, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=2e-6)
    assert eager[0][-1] < eager[0][0] - 0.05, "nothing was learned, so nothing was compared"


@pytest.mark.parametrize("log_probs", [with_loop, by_gather], ids=lambda f: f.__name__)
def test_no_logits_are_left(log_probs, monkeypatch):
    monkeypatch.setenv("FUSEDCE_MIN_LOGITS_MB", "0")
    monkeypatch.setenv("FUSEDCE_INNER", "eager")
    torch._dynamo.reset()
    ids, rows = torch.randint(4, tiny.V, (4, 12)), torch.zeros(4, 11)
    step = step_of(log_probs, beta=0.04)
    report = fxpass.explain(step, tiny.llama(), ids, rows + 1, rows[:, 0], rows, rows)
    assert report.matches
    assert all(match.logits_mode == "never" for match in report.matches)
    assert not report.rejections, str(report)
