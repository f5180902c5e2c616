"""The README's table of where a loss is, and what to compile: what is fused of each program."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import fxpass
from tests.support import tiny


@pytest.fixture(autouse=True)
def _every_size(monkeypatch):
    monkeypatch.setenv("FUSEDCE_MIN_LOGITS_MB", "0")
    monkeypatch.setenv("FUSEDCE_INNER", "eager")
    torch._dynamo.reset()
    counters.clear()


def log_probs(model, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def cross_entropy(model, _, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)


def dpo(policy, reference, ids: Tensor) -> Tensor:
    with torch.no_grad():
        before = log_probs(reference, ids).sum(-1)
    chosen, rejected = (log_probs(policy, ids).sum(-1) - before).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def grpo(policy, reference, ids: Tensor) -> Tensor:
    with torch.no_grad():
        before = log_probs(reference, ids)
    now = log_probs(policy, ids)
    gap = before - now
    return ((gap.exp() - gap - 1) * 0.04 - (now - now.detach()).exp()).mean()


def distillation(student, teacher, ids: Tensor) -> Tensor:
    with torch.no_grad():
        goal = (teacher(input_ids=ids).logits / 2).softmax(-1)
    found = (student(input_ids=ids).logits / 2).log_softmax(-1)
    return 4 * F.kl_div(found, goal, reduction="batchmean")


# regions that are fused: the losses of GRPO and of distillation read two heads at a time
PROGRAMS = {cross_entropy: 1, dpo: 2, grpo: 1, distillation: 1}


def models() -> tuple:
    return tiny.llama(), tiny.llama(), torch.randint(4, tiny.V, (4, 12))


@pytest.mark.parametrize(("program", "heads"), PROGRAMS.items())
def test_one_function_with_the_loss(program, heads):
    report = fxpass.explain(program, *models())
    assert (report.graphs, len(report.matches), report.rejections) == (1, heads, ())
    assert all(match.logits_mode == "never" for match in report.matches)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_function_over_models_that_were_compiled_alone(program):
    """They are part of its graph; without it, their graphs have no loss."""
    model, other, ids = models()
    model.compile(backend="fusedce")
    other.compile(backend="fusedce")
    assert not fxpass.explain(program, model, other, ids).matches
    torch.compile(program, backend="fusedce", fullgraph=True)(model, other, ids).backward()
    assert counters["fusedce"]["matched"] == PROGRAMS[program]


def test_a_line_keeps_generate_eager():
    model, plain, ids = models()
    model.compile(backend="fusedce")
    asked = {"max_new_tokens": 4, "do_sample": False}
    with torch.compiler.set_stance("force_eager"):
        made = model.generate(ids, **asked)
    assert not counters["stats"]
    assert torch.equal(made, plain.generate(ids, **asked))
    model.generate(ids, **asked)
    assert counters["stats"]["unique_graphs"]
