"""Pieces of a head's rows become one call, with eager's numbers; tuples of tensors are read; what is
left as it was, and why."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Categorical

from fxpass.spec.reductions import REVISION
from tests.support.numerics import assert_as_accurate
from tests.support.programs import B, S, V, check, head_of, inputs, last, report_of

VALUES = torch.linspace(-1, 2, B * S * V).view(-1, V)


def entropy(z):
    log_probs = z.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def chance(z, t):
    return z.softmax(-1).gather(-1, t[..., None]).squeeze(-1)


def under_no_grad(program):
    with torch.no_grad():
        return program()


def each(function, *tuples):
    return torch.cat([function(*parts) for parts in zip(*tuples, strict=True)])


def each_scaled(z, factor):
    return torch.cat([entropy(torch.tanh(piece * factor)) for piece in z.split(4)])


def broadcast(z, t):
    return torch.broadcast_tensors(t[..., None], z)


# logits [B, S, V] and labels [B, S] -> rows; the reductions of the operator's calls
ACCEPTED = {
    "split": (lambda z, t: each(entropy, last(z).split(3)), ["moment(1,1)"]),
    "split into one": (lambda z, t: each(entropy, last(z).split(99)), ["moment(1,1)"]),
    "split by sizes": (lambda z, t: each(entropy, last(z).split([1, 5, 2])), ["moment(1,1)"]),
    "chunk": (lambda z, t: each(entropy, last(z).chunk(3)), ["moment(1,1)"]),
    "unbind": (lambda z, t: torch.stack([entropy(one) for one in z.unbind()]), ["moment(1,1)"]),
    "a loop": (lambda z, t: torch.stack([entropy(one) for one in z]), ["moment(1,1)"]),
    "slices": (lambda z, t: each(entropy, (z[:1], z[1:])), ["moment(1,1)"]),
    "chunks of the batch": (lambda z, t: each(entropy, z.chunk(2)), ["moment(1,1)"]),
    "classes first": (
        lambda z, t: each(lambda p: p.softmax(0).square().sum(0), last(z).T.split(3, 1)),
        ["moment(2,0)"]),
    "other outputs of each": (
        lambda z, t: entropy(z[0]) * chance(z[0], t[0]) + z[1].logsumexp(-1) * chance(z[1], t[1]),
        ["lse;moment(1,1);pick"]),
    "labels in pieces": (
        lambda z, t: each(chance, last(z).split(3), t.view(-1).split(3)), ["pick"]),
    "labels in pieces, several": (
        lambda z, t: each(
            lambda p, i: p.softmax(-1).gather(-1, i).exp(),
            last(z).split(3), torch.stack([t, t // 2], -1).view(-1, 2).split(3)),
        ["pick"]),
    "pieces and all rows": (
        lambda z, t: each(entropy, last(z).split(3)) * chance(z, t).view(-1),
        ["moment(1,1);pick"]),
    "pieces of a temperature": (
        lambda z, t: each(entropy, last(z / t.sum().add(5)).split(3)), ["moment(1,1)"]),
    "rows' temperature of each piece": (
        lambda z, t: each_scaled(last(z), 1.0 + torch.arange(4.0).unsqueeze(1)),
        ["moment(1,1)", "moment(1,1)"]),
    "given values of each piece": (
        lambda z, t: each_scaled(last(z), VALUES[:4] * 0.5), ["moment(1,1)", "moment(1,1)"]),
    "labels of each piece": (
        lambda z, t: each_scaled(last(z), 1 + F.one_hot(t.view(-1)[:4], V)),
        ["moment(1,1)", "moment(1,1)"]),
    "a metric in pieces": (
        lambda z, t: under_no_grad(lambda: each(entropy, last(z).split(3))) * chance(z, t).view(-1),
        ["moment(1,1);pick detached=moment(1,1)"]),
    "broadcast, and the labels cut": (
        lambda z, t: chance(broadcast(z, t)[1], broadcast(z, t)[0][..., :1].squeeze(-1)), ["pick"]),
    "broadcast, the labels cut later": (
        lambda z, t: entropy(z) * chance(broadcast(z, t)[1], broadcast(z, t)[0][..., 0]),
        ["moment(1,1);pick"]),
    "broadcast, and the repeated labels": (
        lambda z, t: entropy(broadcast(z, t)[1]) + broadcast(z, t)[0].sum(-1), ["moment(1,1)"]),
    "broadcast, only the logits": (lambda z, t: entropy(broadcast(z, t)[1]), ["moment(1,1)"]),
    "broadcast under no_grad": (
        lambda z, t: entropy(under_no_grad(lambda: broadcast(z, t)[1]).detach()) * chance(z, t),
        ["moment(1,1);pick detached=moment(1,1)"]),
    "log-probabilities of Categorical": (
        lambda z, t: Categorical(logits=z, validate_args=False).log_prob(t), ["pick"]),
    "losses in pieces": (
        lambda z, t: each(
            lambda p, i: F.cross_entropy(p, i, reduction="none"),
            last(z).split(3), t.view(-1).split(3)),
        ["pick"]),
    # more calls than one
    "not all rows": (
        lambda z, t: entropy(last(z)[:3]) * entropy(last(z)[4:7]), ["moment(1,1)"] * 2),
    "rows twice": (lambda z, t: each(entropy, (z[:1], z)), ["moment(1,1)"] * 2),
    "pieces of the second dimension": (
        lambda z, t: each(entropy, z.split(2, 1)), ["moment(1,1)"] * 2),
    "labels of one piece": (
        lambda z, t: torch.cat([entropy(z[0]), chance(z[1], t[1])]), ["moment(1,1)", "pick"]),
}  # fmt: skip


def specs_of(report):
    return [call.spec.text() for head in report.matches for call in head.calls]


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case):
    def program(x, weight, labels):
        return ACCEPTED[case][0](F.linear(x, weight), labels).square().sum()

    x, weight, labels = inputs()
    specs = [
        spec.split(" transform")[0] for spec in specs_of(report_of(program, x, weight, labels))
    ]
    specs = [spec.replace(" gradients=x,weight", "") for spec in specs]
    assert specs == [f"{REVISION} outputs={o}" for o in ACCEPTED[case][1]]
    check(program, labels, x, weight)


def test_values_in_pieces_stay_pieces():
    def program(x, weight, labels):
        pieces = last(F.linear(x, weight)).split(3)
        soft = each(lambda p, q: (p.log_softmax(-1) * q).sum(-1), pieces, VALUES.split(3))
        return soft.square().sum()

    x, weight, labels = inputs()
    assert len(specs_of(report_of(program, x, weight, labels))) == 3
    check(program, labels, x, weight)


def test_pieces_of_16_bits():
    def program(x, weight, labels):
        return each(entropy, last(F.linear(x, weight)).float().split(3)).square().sum()

    x, weight, labels = inputs(torch.bfloat16)
    assert len(specs_of(report_of(program, x, weight, labels))) == 1
    check(program, labels, x, weight)


def test_a_number_of_rows_that_varies():
    def program(x, weight):
        z = F.linear(x, weight)
        return each(entropy, (z[:3], z[3:])).square().sum()

    x, weight = torch.randn(7, 6, requires_grad=True), torch.randn(V, 6, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0, min=7, max=9)
    (spec,) = specs_of(report_of(program, x, weight))
    assert spec == f"{REVISION} outputs=moment(1,1) gradients=x,weight"
    torch._dynamo.reset()
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    for n in (7, 8):
        rows = torch.randn(n, 6, requires_grad=True)
        torch._dynamo.mark_dynamic(rows, 0, min=7, max=9)
        assert_as_accurate(fused, program, (rows, weight), torch.float32)


REJECTED = {
    "pieces of the classes": (lambda z, t: each(entropy, z.split(5, -1)), "a part of the classes"),
    "a tuple that is an output": (lambda z, t: (z.logsumexp(-1), z.unbind()), "an output of the graph"),
    "repeated logits": (
        lambda z, t: entropy(torch.broadcast_tensors(z, torch.zeros(3, B, S, 1))[0]),
        "repeats the logits"),
    "a split without gradients, and a softmax with": (
        lambda z, t: z.sum(-1)[0] + under_no_grad(lambda: z.split(1))[0].softmax(-1).square().sum(-1),
        "has a gradient that its operands do not have"),
}  # fmt: skip


@pytest.mark.parametrize("case", REJECTED)
def test_rejected(case, stops):
    def program(x, weight, labels):
        out = REJECTED[case][0](F.linear(x, weight), labels)
        return out if isinstance(out, tuple) else out.square().sum()

    x, weight, labels = inputs()
    assert not report_of(program, x, weight, labels).matches
    assert any(REJECTED[case][1] in reason for reason in stops), stops


def test_classes_that_are_chosen_after_an_earlier_reduction():
    """The index exists at the call that reads it."""

    def program(x, weight, labels):
        z = F.linear(x, weight)
        first = z.softmax(-1).amax(-1)
        chosen = z.index_select(-1, torch.arange(V).flip(0))
        return first.sum() - chosen.log_softmax(-1).gather(-1, labels[..., None]).sum()

    x, weight, labels = inputs()
    assert head_of(program, x, weight, labels)
    check(program, labels, x, weight)


def test_the_loss_of_a_piece_alone_in_evaluation():
    """The labels are written to before it, so that it has a call of its own, of all rows."""

    def program(x, weight, labels):
        z = F.linear(x, weight)[:1]
        first = (VALUES[None, :S] * z.log_softmax(-1)).sum(-1)
        labels[1] = 2
        return first.sum() + F.nll_loss(F.log_softmax(z[0], -1), labels[0])

    x, weight, labels = inputs()
    with torch.no_grad():
        report = report_of(program, x, weight, labels.clone())
        assert len(report.matches[0].calls) == 2
        fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
        got, want = (fn(x, weight, labels.clone()) for fn in (fused, program))
        torch.testing.assert_close(got, want)
