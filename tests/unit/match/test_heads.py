"""Heads whose logits are only reduced over the classes: what is fused, into which reductions, with
eager's numbers; and what is left as it was, with the reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Categorical

import fxpass
from fxpass.graph.region import regions
from fxpass.match.match import find
from fxpass.settings import Settings
from tests.support.mixed_dtypes import captured
from tests.support.programs import B, S, V, check, head_of, inputs, last, report_of

PACKAGE = str(Path(fxpass.__file__).parent)
U = torch.linspace(-1, 2, V)
VALUES = torch.linspace(-1, 2, B * S * V).view(B, S, V)


def under_no_grad(program):
    with torch.no_grad():
        return program()


def picked(z, t):
    return z.log_softmax(-1).gather(-1, t[..., None]).squeeze(-1)


def shifted(z):
    """log-softmax"""
    return z - z.logsumexp(-1, keepdim=True)


def copied(row):
    made = torch.zeros(row.shape)
    made.copy_(row)
    return made


def metric_of(log_probs):
    with torch.no_grad():
        return -(log_probs.exp() * log_probs).sum(-1)


def filled(made, at, z):
    """After a node that reads the logits."""
    made[at] = 3
    made.add_(z.shape[-1] / 20)
    return made


# logits [B, S, V] and labels [B, S] -> rows, or a number; the reductions of the operator's calls
ACCEPTED = {
    "entropy": (
        lambda z, t: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1), ["moment(1,1)"]),
    "entr": (lambda z, t: torch.special.entr(z.softmax(-1)).sum(-1), ["moment(1,1)"]),
    "sum of squares": (lambda z, t: z.softmax(-1).square().sum(-1), ["moment(2,0)"]),
    "expectation": (lambda z, t: (z.softmax(-1) * U).sum(-1), ["moment(1,0,0)"]),
    "a class that is computed later": (
        lambda z, t: z.logsumexp(-1) * z.gather(-1, (t % 7)[..., None])[..., 0], ["at;lse"]),
    "two targets": (
        lambda z, t: z.log_softmax(-1).gather(-1, torch.stack([t, t // 2], -1)), ["pick"]),
    "a range of rows": (
        lambda z, t: last(z).log_softmax(-1)[range(len(last(z))), t.flatten()], ["pick"]),
    "a list of rows": (
        lambda z, t: last(z)[[*range(len(last(z)))], t.flatten() - 3] - last(z).logsumexp(-1),
        ["at;lse"]),
    "max and log-probability": (
        lambda z, t: z.max(-1).values * z.log_softmax(-1).gather(-1, t[..., None]).squeeze(-1),
        ["max;pick"]),
    "rows that are copied into a tensor": (
        lambda z, t: copied(z.logsumexp(-1)) * metric_of(z.log_softmax(-1)),
        ["lse;moment(1,1) detached=moment(1,1)"]),
    "logits of a sequence's last token": (
        lambda z, t: z[torch.arange(B), t[:, 0] % S].logsumexp(-1), ["lse"]),
    "log-probabilities of some rows": (
        lambda z, t: z.log_softmax(-1)[:, :-1].gather(-1, t[:, 1:, None].repeat(1, 1, 2)), ["pick"]),
    "a softmax in another order": (
        lambda z, t: torch.special.entr(z.softmax(-1).transpose(0, 1)).sum(-1), ["moment(1,1)"]),
    "no gradients into a softmax": (
        lambda z, t: (under_no_grad(lambda: z.softmax(-1)) * U).sum(-1) + z.logsumexp(-1),
        ["lse;moment(1,0,0) detached=moment(1,0,0)"]),
    "entropy from the log-sum-exp and the logits": (
        lambda z, t: (z.softmax(-1) * (z.logsumexp(-1, True) - z)).sum(-1), ["moment(1,1)"]),
    "entropy of Categorical": (
        lambda z, t: Categorical(logits=z, validate_args=False).entropy(), ["moment(1,1)"]),
    "xlogy": (lambda z, t: torch.xlogy(z.softmax(-1), z.softmax(-1)).sum(-1), ["moment(1,1)"]),
    "detached entropy from the log-sum-exp, and a log-probability": (
        lambda z, t: Categorical(logits=z.detach(), validate_args=False).entropy() * picked(z, t),
        ["moment(1,1);pick detached=moment(1,1)"]),
    "entropy under no_grad of log-probabilities with gradients": (
        lambda z, t: metric_of(z.log_softmax(-1)) * picked(z, t),
        ["moment(1,1);pick detached=moment(1,1)"]),
    "metric under no_grad of a view": (
        lambda z, t: under_no_grad(lambda: metric_of(z.view(-1, V).log_softmax(-1))) * picked(z, t).view(-1),
        ["moment(1,1);pick detached=moment(1,1)"]),
    "a class vector that is filled in place": (
        lambda z, t: (filled(torch.zeros(V), 2, z) * z.softmax(-1)).sum(-1), ["moment(1,0,0)"]),
    "values that are filled in place": (
        lambda z, t: (filled(torch.zeros(B, S, V), 1, z) * z.log_softmax(-1)).sum(-1),
        ["moment(0,1,0)"]),
    "values of the logits' shape": (
        lambda z, t: (torch.full_like(z, 0.3) * z.log_softmax(-1)).sum(-1), ["moment(0,1,0)"]),
    "a temperature that is filled in place": (
        lambda z, t: (z * filled(torch.ones(1), 0, z)).softmax(-1).square().sum(-1),
        ["moment(2,0)"]),
    "labels that are changed in place": (
        lambda z, t: z.softmax(-1).gather(-1, t.clone().sub_(t // 2).unsqueeze(-1)), ["pick"]),
    "lse with a class vector, by hand": (
        lambda z, t: (z + U).exp().sum(-1).log(), ["lse"]),
    "the operand is a maximum of the same logits": (
        lambda z, t: (z - z.detach().amax(-1, keepdim=True)).logsumexp(-1),
        ["lse;max detached=max"]),
    "a function of a softmax at a class": (
        lambda z, t: (z.softmax(-1) + 1e-3).log().gather(-1, t[..., None]), ["pick"]),
    "a clamped softmax at two classes": (
        lambda z, t: z.softmax(-1).clamp(0.01, 0.9).sqrt().gather(-1, torch.stack([t, t // 2], -1)),
        ["pick"]),
    "a branch at a class": (
        lambda z, t: torch.where(z.log_softmax(-1) < -2.0, -2.0, z.log_softmax(-1).square())
        .gather(-1, t[..., None]), ["pick"]),
    "nll_loss of a function of the softmax": (
        lambda z, t: F.nll_loss((z.softmax(-1) + 1e-3).log().flatten(0, 1), t.flatten(),
                                torch.linspace(0.5, 1, V).to(z.dtype), ignore_index=1, reduction="none"),
        ["pick"]),
    "nll_loss of shifted logits": (
        lambda z, t: F.nll_loss((z - 5).flatten(0, 1), t.flatten(), reduction="none"), ["at"]),
    "z.data": (
        lambda z, t: z.data.max(-1)[1] + z.logsumexp(-1), ["lse;argmax"]),
}  # fmt: skip


@pytest.mark.parametrize("first", [True, False])
def test_an_index_that_is_read_in_two_ways(first):
    """An ignored label is class 0 of a loss, and a class counted from the end elsewhere."""
    label = -3

    def program(x, weight, labels):
        z = last(F.linear(x, weight))
        rows = torch.arange(z.shape[0])
        loss = F.cross_entropy(z, labels, ignore_index=label) if first else 0
        picked = z.log_softmax(-1)[rows, labels]
        if not first:
            loss = F.cross_entropy(z, labels, ignore_index=label)
        return loss + picked.square().sum()

    x, weight, labels = inputs()
    labels = labels.flatten()
    labels[2] = label
    assert len(head_of(program, x, weight, labels).calls) == 1
    check(program, labels, x, weight)


def test_a_copy_of_labels_that_were_written_to():
    """It is moved before the first reduction, but not before the write."""

    def program(x, weight, labels):
        z = F.linear(x, weight)[:, 1:].flatten(0, 1)
        lse = z.logsumexp(-1)
        labels.copy_((labels + 1) % V)
        other = (z + U).logsumexp(-1)
        picked = (z + U).log_softmax(-1).gather(-1, labels[:, 1:].flatten()[:, None])
        return (lse.square() + other.square() + picked.squeeze(1)).sum()

    x, weight, labels = inputs()
    wanted = program(x, weight, labels.clone())
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    got = fused(x, weight, labels)
    assert torch.allclose(got, wanted)


def specs_of(report):
    return [call.spec.text() for head in report.matches for call in head.calls]


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case):
    def program(x, weight, labels):
        return ACCEPTED[case][0](F.linear(x, weight), labels).square().sum()

    x, weight, labels = inputs()
    specs = specs_of(report_of(program, x, weight, labels))
    specs = [spec.replace(" gradients=x,weight", "") for spec in specs]
    assert specs == [f"r6 outputs={o}" for o in ACCEPTED[case][1]]
    check(program, labels, x, weight)


# Increasing functions of logits.
INCREASING = {
    "logits": lambda z: z,
    "a temperature": lambda z: z / 0.7,
    "a softcap": lambda z: 3 * (z / 3).tanh(),
    "logits and a row": lambda z: z / 2 + z.logsumexp(-1, keepdim=True),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("case", INCREASING)
def test_a_target_that_is_the_largest(case, trained):
    """Bit by bit, however both are computed."""

    def program(x, weight, labels):
        logits = F.linear(x, weight)
        z = INCREASING[case](logits)
        own = z.gather(-1, labels[:, None])
        largest = z.max(-1, keepdim=True).values if trained else z.amax(-1, keepdim=True)
        return largest == own, logits.logsumexp(-1)

    x, weight = torch.randn(64, 8), torch.randn(300, 8)
    labels = F.linear(x, weight).argmax(-1)
    args = *(t.requires_grad_(trained) for t in (x, weight)), labels
    assert head_of(program, *args).logits_mode == "never"
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    assert fused(*args)[0].all()


@pytest.mark.parametrize("largest", [100, 30000])
def test_large_logits_minus_their_largest(largest):
    """Their lse is too large for the exponential, and so is the largest of them."""

    def program(x, weight, labels):
        z = F.linear(x, weight) * largest
        m = z.max(-1, keepdim=True).values.detach()
        return ((z - m).exp().sum(-1).log() + m.squeeze(-1)).sum()

    x, weight, labels = inputs()
    (report,) = specs_of(report_of(program, x, weight, labels))
    assert "outputs=lse;max" in report
    check(program, labels, x, weight)


def test_several_picks_of_shifted_logits():
    def program(x, weight, labels):
        z = F.linear(x, weight)
        shifted = z - z.detach().amax(-1, keepdim=True)
        picks = shifted.gather(-1, torch.stack([labels, labels // 2], -1))
        return picks.square().sum() + z.logsumexp(-1).sum()

    x, weight, labels = inputs()
    assert specs_of(report_of(program, x, weight, labels)) == [
        "r6 outputs=max gradients=x,weight total=lse",
        "r6 outputs=at gradients=x,weight",
    ]
    check(program, labels, x, weight)


def test_a_view_whose_index_comes_first():
    """Among the keywords; it is computed after the linear."""

    def program(x, weight, labels):
        z = F.linear(x, weight)
        z = torch.index_select(index=labels[0] * 0 + 1, input=z, dim=1)
        log_probs = z.log_softmax(-1)
        return -(log_probs.exp() * log_probs).sum(-1).mean()

    x, weight, labels = inputs()
    assert specs_of(report_of(program, x, weight, labels))
    check(program, labels, x, weight)


def test_several_picks_beside_a_total():
    def program(x, weight, labels):
        z = F.linear(x, weight)
        both = z.detach().gather(-1, torch.stack([labels, labels // 2], -1))
        log_probs = z.log_softmax(-1).gather(-1, labels.unsqueeze(-1))
        return log_probs.mean() + (both > 0).sum()

    x, weight, labels = inputs()
    (spec,) = specs_of(report_of(program, x, weight, labels))
    assert spec == "r6 outputs=at gradients=x,weight total=pick"
    check(program, labels, x, weight)


def test_the_shape_of_the_logits_needs_no_logits():
    def program(x, weight, labels):
        log_probs = F.linear(x, weight).log_softmax(-1)
        target = torch.zeros_like(log_probs).scatter(-1, labels[..., None], 1)
        return -(target * log_probs).sum(-1).sum() / log_probs.shape[0]

    x, weight, labels = inputs()
    (graph,) = report_of(program, x, weight, labels).after
    assert "linear" not in graph
    check(program, labels, x, weight)


# ... -> what is left as it was, and why
REJECTED = {
    "rows in another order": (
        lambda z, t: last(z)[[*range(1, len(last(z))), 0], t.flatten()], "indexes some of the rows"),
    "a cast to 8 bits": (
        lambda z, t: z.to(torch.float8_e5m2).float().mean(-1), "torch.float8_e5m2"),
    "a cast to float64": (lambda z, t: z.double().mean(-1), "float64"),
    "rows in another order, shifted": (
        lambda z, t: (z - z.logsumexp(-1, True)).transpose(0, 1).gather(-1, t.T[..., None]),
        "rearranges `-lse_0 + z`"),
    "rows in another order, with values": (
        lambda z, t: (z * VALUES).transpose(0, 1).sum(-1) * t.T, "rearranges `given_"),
    "a view without gradients, and a softmax with": (
        lambda z, t: z.sum(-1)[:, 0] + under_no_grad(lambda: z[:, 0]).softmax(-1).square().sum(-1),
        "has a gradient that its operands do not have"),
    "a logarithm that is 0 times infinity": (
        lambda z, t: torch.xlogy(z.square(), z.softmax(-1)).sum(-1), "is not a softmax"),
    "a rounded quotient": (
        lambda z, t: z.softmax(-1).div(z.amax(-1, keepdim=True), rounding_mode="floor").sum(-1),
        "rounding_mode="),
    "a logarithm of logits": (
        lambda z, t: torch.special.entr(z.square()).softmax(-1).square().sum(-1),
        "a logarithm of logits"),
    "logits that cancel": (
        lambda z, t: (z - z).softmax(-1).square().sum(-1), "they cancel"),
    "the largest logits alone": (
        lambda z, t: z.masked_fill(z < z.detach().topk(3).values[..., -1:], -9).logsumexp(-1),
        "compares logits with %"),
    "a write without gradients": (
        lambda z, t: under_no_grad(lambda: z.mul_(2)).sum(-1), "writes without gradients"),
}  # fmt: skip


@pytest.mark.parametrize("case", REJECTED)
def test_rejected(case, stops):
    def program(x, weight, labels):
        return REJECTED[case][0](F.linear(x, weight), labels).square().sum()

    x, weight, labels = inputs()
    assert not report_of(program, x, weight, labels).matches
    assert any(REJECTED[case][1] in reason for reason in stops), stops
    check(program, labels, x, weight)


def test_no_classes():
    def program(x, weight, labels):
        z = F.linear(x, weight)
        return z.logsumexp(-1).sum() + z[..., V:].tanh().sum(), z[..., V:].mean(-1)

    def picked(x, weight, labels):
        return F.linear(x, weight)[..., V:].log_softmax(-1).gather(-1, labels[..., None])

    x, weight, labels = inputs()
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    assert fused(x, weight, labels)[1].isnan().all()
    fused = torch.compile(picked, backend="fusedce", options={"fusedce.inner": "eager"})
    with pytest.raises(RuntimeError, match="out of bounds"):
        fused(x, weight, labels)


def test_the_users_budget(monkeypatch):
    def program(x, weight, labels):
        return F.linear(x, weight).softmax(-1).square().sum()

    monkeypatch.setenv("FUSEDCE_MEMORY_MB", "3")
    (spec,) = specs_of(report_of(program, *inputs()))
    assert spec.endswith("memory_mb=3")
    check(program, inputs()[2], *inputs()[:2], memory_mb=1)


def doubled(t, times, function=torch.sin):
    """Each of these tensors is read twice, so that 2**times paths lead to the first."""
    for _ in range(times):
        t = t + function(t)
    return t


def of_layers(z, t, times):
    square, scale = torch.ones(V, V), torch.ones(V)
    for _ in range(times):
        z = z + F.linear(z, square).relu() * (scale * z)
    return F.linear(z, square)


# logits, labels and a number of times -> logits
PATHS = {
    "a transform": lambda z, t, times: doubled(z, times, torch.tanh),
    "a softmax": lambda z, t, times: doubled(z.softmax(-1), times, torch.square),
    "given": lambda z, t, times: z - doubled(VALUES, times),
    "labels": lambda z, t, times: (
        z.log_softmax(-1) * z.gather(-1, doubled(t, times, torch.neg)[..., None])
    ),
    "layers": of_layers,
}


@pytest.mark.parametrize("program", PATHS.values(), ids=PATHS)
def test_a_node_is_read_once_whatever_the_paths_to_it(program):
    """A model of 5,700 nodes took six minutes, and a transform of 12 steps an hour."""
    x, weight, labels = inputs()

    def model(x, labels, times):
        return program(F.linear(x, weight), labels, times).logsumexp(-1).sum()

    (region, *_) = regions(captured(model, x, labels, 24))
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)
        if calls > 200_000:
            pytest.fail("reading takes too long")

    old = sys.getprofile()
    sys.setprofile(count)
    try:
        find(region, Settings(min_logits_mb=0))
    finally:
        sys.setprofile(old)
    assert calls > 100


@pytest.mark.parametrize("index", ["max", "argmax", "a view"])
def test_the_labels_are_classes_of_the_same_logits(index):
    """Pseudo-labels: one call gives the labels of the other."""

    def program(x, weight, labels):
        z = last(F.linear(x, weight))
        largest, first = z.max(-1)
        pseudo = {
            "max": lambda: first,
            "argmax": lambda: z.softmax(-1).argmax(-1),
            "a view": lambda: first.view(2, -1).clamp(min=0).view(-1),
        }[index]()
        loss = F.cross_entropy(z, pseudo, reduction="none") * largest.ge(0.3)
        return loss.sum() + largest.sum()

    x, weight, labels = inputs()
    assert head_of(program, x, weight, labels).logits_mode == "never"
    check(program, labels, x, weight)
