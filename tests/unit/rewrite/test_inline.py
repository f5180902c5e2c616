"""Logits that cross the border of a nested graph: of a checkpoint, or a context of torch.export."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fxpass import testing
from tests.support.programs import check, head_of, inputs, report_of
from tests.support.traced import exported


def entropy(z):
    return z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)


def checkpointed(function, *args):
    return checkpoint(function, *args, use_reentrant=False)


def policy(x, w, t):
    """As verl's with entropy_checkpointing."""
    z = F.linear(x, w)
    chosen = z.log_softmax(-1).gather(-1, t[..., None]).squeeze(-1)
    return (chosen.exp() - 0.1 * checkpointed(entropy, z)).mean()


def two_checkpoints(x, w, t):
    z = F.linear(x, w) / 2
    loss = checkpointed(F.cross_entropy, z[1:].flatten(0, 1), t[1:].flatten())
    return checkpointed(entropy, z[:1]).mean() + loss


def one_in_another(x, w, t):
    return checkpointed(policy, x, w, t)


@pytest.mark.parametrize("program", [policy, two_checkpoints, one_in_another])
def test_a_checkpoint_that_reads_logits(program):
    x, w, t = inputs()
    assert head_of(program, x, w, t).logits_mode == "never"
    check(program, t, x, w)


def kept(x, w, t):
    z = F.linear(x, w)
    return checkpointed(lambda z: z.cumsum(0).square().mean() + entropy(z).mean(), z)


def large(x, w, t):
    """Backward computes more again than the logits."""
    z = F.linear(x, w)
    return checkpointed(lambda z: entropy(z).mean() * (x[..., None] + w[0]).tanh().norm(), z)


@pytest.mark.parametrize("program", [kept, large])
def test_a_checkpoint_that_stays(program):
    x, w, t = inputs()
    before, after = testing.original(program, x, w, t), testing.rewritten(program, x, w, t)
    assert before == after
    check(program, t, x, w)


# ---------------------------------------------------------------- torch.export


def loss_of(z, t):
    return F.cross_entropy(z.flatten(0, 1), t.flatten())


def metric(x, w, t):
    z = F.linear(x, w)
    with torch.no_grad():
        accuracy = (z.argmax(-1) == t).float().mean()
        with torch.enable_grad():
            z_loss = z.logsumexp(-1).square().mean()
    return loss_of(z, t) * (1 + accuracy) + z_loss


def half_head(x, w, t):
    with torch.autocast("cpu", torch.bfloat16):
        z = F.linear(x, w)
    return loss_of(z.float(), t)


def loss_without_autocast(x, w, t):
    with torch.autocast("cpu", torch.bfloat16):
        z = F.linear(x, w)
        with torch.autocast("cpu", enabled=False):
            loss = loss_of(z.float() / 2, t)
        hidden = x @ w.mT  # in bf16
    return loss + hidden.sum().float()


def written_inside(x, w, t):
    """The logits are changed by a constant in a context, under another name, and read after it."""
    z = F.linear(x, w)
    with torch.no_grad():
        z.mul_(0.5)
        best = z.argmax(-1)
    return loss_of(z, t) * (1 + best.float().mean())


def same(program, *args):
    """The fused graph computes what the graph computes."""
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    results = []
    for run in (program, fused):
        loss = run(*args)
        results.append([loss, *torch.autograd.grad(loss, args[:2])])
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("program", [metric, half_head, loss_without_autocast])
def test_logits_through_a_context(program):
    x, w, t = inputs()
    graph = exported(program, x, w, t)
    assert "wrap_with" in testing.original(graph, x, w, t)
    after = testing.rewritten(graph, x, w, t)
    assert "wrap_with" not in after
    assert "= aten.linear" not in after  # no assertion about the logits keeps them
    assert {head.logits_mode for head in report_of(graph, x, w, t).matches} == {"never"}
    same(graph, x, w, t)


def test_logits_that_a_context_changes():
    x, w, t = inputs()
    same(exported(written_inside, x, w, t), x, w, t)


def test_a_graph_has_the_modes_that_it_left():
    """A context gives back the grad mode and autocast that were around it."""

    def program(x, w, t):
        with torch.no_grad():
            with torch.autocast("cpu", torch.bfloat16):
                nested = x @ w.mT
            after = x @ w.mT
        return loss_of(F.linear(x, w), t), nested, after, x @ w.mT

    x, w, t = inputs()
    graph = exported(program, x, w, t)
    fused = torch.compile(graph, backend="fusedce", options={"fusedce.inner": "eager"})
    bf16, f32 = torch.bfloat16, torch.float32
    for run in (program, graph, fused):
        _, *others = run(x, w, t)
        found = [(other.requires_grad, other.dtype) for other in others]
        assert found == [(False, bf16), (False, f32), (True, f32)]
