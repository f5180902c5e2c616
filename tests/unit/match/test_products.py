"""Matrix products and divergences of logits: which sums they are, with eager's numbers; what is left
as it was, and why."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from fxpass.spec.reductions import REVISION, Reductions
from tests.support.programs import B, S, V, check, inputs, last, report_of

U = torch.linspace(-1, 2, V)
Q = torch.linspace(-1, 2, B * S * V).sin().view(B, S, V).softmax(-1)
LOG_Q = Q.log()
KL = torch.nn.KLDivLoss(reduction="batchmean", log_target=True)


def kl(z, q, **options):
    return F.kl_div(z.log_softmax(-1), q, **options)


# logits [B, S, V] and labels [B, S] -> rows or a number; the reductions of the operator's calls
CROSS = "moment(0,1,0)"
KL_OF_Q = "sum(given0*(-l+log(where(given0<0,given0,where(given0<=0,1,given0)))))"
KL_OF_LOG_Q = "sum((given0-l)*exp(given0))"
REVERSED = "sum((-given0+l)*exp(l))"
ACCEPTED = {
    "a vector": (lambda z, t: z.softmax(-1) @ U.to(z.dtype), ["moment(1,0,0)"]),
    "a column": (lambda z, t: torch.matmul(z.softmax(-1), U.to(z.dtype)[:, None]), ["moment(1,0,0)"]),
    "mv": (lambda z, t: torch.mv(last(z).softmax(-1), U.to(z.dtype)), ["moment(1,0,0)"]),
    "mm": (lambda z, t: last(z).softmax(-1).mm(U.to(z.dtype).unsqueeze(-1)), ["moment(1,0,0)"]),
    "einsum with a vector": (
        lambda z, t: torch.einsum("btv,v->bt", z.softmax(-1), U.to(z.dtype)), ["moment(1,0,0)"]),
    "einsum with leading dimensions": (
        lambda z, t: torch.einsum("...v,v->...", z.softmax(-1), U.to(z.dtype)), ["moment(1,0,0)"]),
    "einsum of one tensor": (
        lambda z, t: torch.einsum("bvt->bt", z.softmax(-1).square().mT), ["moment(2,0)"]),
    "einsum of two tensors of logits": (
        lambda z, t: torch.einsum("btv, btv -> bt", z.softmax(-1), z.log_softmax(-1)),
        ["moment(1,1)"]),
    "einsum with values": (
        lambda z, t: torch.einsum("btv,btv->bt", Q.to(z.dtype), z.log_softmax(-1)), [CROSS]),
    "einsum with one_hot": (
        lambda z, t: torch.einsum("btv,btv->bt", F.one_hot(t, V).to(z.dtype), z.log_softmax(-1)),
        ["pick"]),
    "einsum of three": (
        lambda z, t: torch.einsum("v,btv,btv->bt", U.to(z.dtype), z.softmax(-1), z.softmax(-1)),
        ["moment(2,0,0)"]),
    "batchmean": (lambda z, t: kl(z, Q, reduction="batchmean"), [KL_OF_Q]),
    "mean": (lambda z, t: kl(z, Q, reduction="mean"), [KL_OF_Q]),
    "sum": (lambda z, t: kl(last(z), last(Q), reduction="sum"), [KL_OF_Q]),
    "none": (lambda z, t: kl(z, Q, reduction="none").sum(-1), [KL_OF_Q]),
    "none, weighted": (lambda z, t: (kl(z, Q, reduction="none") * 3).mean(), [KL_OF_Q]),
    "with zeros": (lambda z, t: kl(z, Q * (Q > 0.1), reduction="sum"), [KL_OF_Q]),
    "logarithms": (lambda z, t: kl(z, LOG_Q, reduction="sum", log_target=True), [KL_OF_LOG_Q]),
    "a module": (lambda z, t: KL(last(z).log_softmax(-1), last(LOG_Q)), [KL_OF_LOG_Q]),
    "one-hot": (lambda z, t: kl(z, F.one_hot(t, V).float(), reduction="none").sum(-1), ["pick"]),
    "by hand": (lambda z, t: (Q * (Q.log() - z.log_softmax(-1))).sum(-1), ["sum(given0*(given1-l))"]),
    "reversed": (
        lambda z, t: F.kl_div(LOG_Q, z.softmax(-1), reduction="none").sum(-1),
        [REVERSED]),
    "reversed, logarithms": (
        lambda z, t: F.kl_div(LOG_Q, z.log_softmax(-1), reduction="none", log_target=True).sum(-1),
        [REVERSED]),
    "reversed, by hand": (
        lambda z, t: (z.softmax(-1) * (z.log_softmax(-1) - LOG_Q)).sum(-1),
        [REVERSED]),
    "at a temperature": (
        lambda z, t: kl(z / 2, Q, reduction="batchmean") * 4, [f"{KL_OF_Q} transform=0.5*z"]),
}  # fmt: skip


def specs_of(report):
    return [call.spec.text() for head in report.matches for call in head.calls]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case):
    def program(x, weight, labels):
        return ACCEPTED[case][0](F.linear(x, weight), labels).square().sum()

    x, weight, labels = inputs()
    specs = [Reductions.parse(s) for s in specs_of(report_of(program, x, weight, labels))]
    # what is a scalar already has its gradients in forward
    specs = [dataclasses.replace(s, outputs=s.outputs or s.total, total=()) for s in specs]
    texts = [f"{REVISION} outputs={o} gradients=x,weight" for o in ACCEPTED[case][1]]
    assert [spec.text() for spec in specs] == texts
    check(program, labels, x, weight)


@pytest.mark.parametrize("is_log", [False, True])
def test_a_target_with_gradients(is_log):
    """No function of values [N, V] with gradients is summed."""

    def program(x, weight, labels, teacher):
        target = teacher.log_softmax(-1) if is_log else teacher.softmax(-1)
        return kl(F.linear(x, weight), target, reduction="sum", log_target=is_log)

    teacher = torch.randn(B, S, V, requires_grad=True)
    assert not report_of(program, *inputs(), teacher).matches


def test_small_logits_beside_their_softmax():
    """p * z is not p * log + p * lse: the lse is that of the classes, however small the logits."""

    def program(x, weight, labels):
        z = F.linear(x, weight)
        return (z.softmax(-1) * z).sum(-1).square().sum()

    x, weight, labels = inputs()
    check(program, labels, (x / 100).detach().requires_grad_(), weight)


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_near_teacher(reverse, is_log):
    x, _, labels = inputs()
    weight = torch.randn(2000, x.shape[-1], requires_grad=True)
    near = F.linear(x, weight).detach() + 0.05 * torch.randn(B, S, 2000)

    def program(x, weight, labels):
        z, teacher = F.linear(x, weight), near.to(x.dtype)
        if not is_log and reverse:
            p, log = z.softmax(-1), z.log_softmax(-1)
            return (p * (log - teacher.log_softmax(-1))).sum()
        teacher = teacher.log_softmax(-1) if is_log or reverse else teacher.softmax(-1)
        one, other = (teacher, z.log_softmax(-1)) if reverse else (z.log_softmax(-1), teacher)
        return F.kl_div(one, other, reduction="sum", log_target=is_log or reverse)

    check(program, labels, x, weight)


def test_differences_from_trained_values():

    def program(x, weight, labels, target):
        return (F.linear(x, weight).softmax(-1) - target).square().sum()

    target = Q.clone().requires_grad_()
    assert not report_of(program, *inputs(), target).matches


def test_vectors_with_gradients():
    def program(x, weight, atoms, labels):
        return (F.linear(x, weight).softmax(-1) @ atoms).square().sum()

    x, weight, labels = inputs()
    check(program, labels, x, weight, torch.randn(V, requires_grad=True))
    check(program, labels, x, weight, torch.randn(V, 1, requires_grad=True))


@pytest.mark.parametrize("target", [Q, Q.bfloat16()])
def test_16_bits(target):
    def program(x, weight, labels):
        log_probs = F.linear(x, weight).float().log_softmax(-1)
        return F.kl_div(log_probs, target, reduction="none").sum(-1).square().sum()

    x, weight, labels = inputs(torch.bfloat16)
    assert specs_of(report_of(program, x, weight, labels))
    check(program, labels, x, weight)


REJECTED = {
    "several columns": (lambda z, t: z.softmax(-1) @ U.to(z.dtype).expand(3, V).T, "a matrix of shape [10, 3]"),
    "classes that are not the last dimension": (
        lambda z, t: z.softmax(-1).mT @ torch.ones(S, dtype=z.dtype), "a matrix of shape"),
    "logits on the right": (
        lambda z, t: torch.matmul(torch.ones(S, dtype=z.dtype), z.softmax(-1)), "not of logits and a vector"),
    "a sum over rows": (
        lambda z, t: torch.einsum("btv,v->b", z.softmax(-1), U.to(z.dtype)), "not a sum over the classes"),
    "an outer product": (
        lambda z, t: torch.einsum("btv,bsv->bts", z.softmax(-1), z.softmax(-1)),
        "not a sum over the classes"),
    "without an output": (
        lambda z, t: torch.einsum("btv,v", z.softmax(-1), U.to(z.dtype)), "not a sum over the classes"),
    "gradients of one of two": (
        lambda z, t: torch.einsum("btv,btv->bt", z.softmax(-1).detach(), z.log_softmax(-1)),
        "joins logits and detached logits"),
    "a target of one row": (lambda z, t: kl(z, Q[0], reduction="sum"), "repeats an operand"),
    "the old reductions": (
        lambda z, t: kl(z, Q, size_average=False), "size_average= or reduce="),
    "a divergence of logits": (
        lambda z, t: F.kl_div(LOG_Q, z.square(), reduction="sum"), "a logarithm of logits"),
    "squared": (lambda z, t: kl(z, Q, reduction="none").square().sum(-1), "may cancel"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:size_average and reduce", "ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("case", REJECTED)
def test_rejected(case, stops):
    def program(x, weight, labels):
        return REJECTED[case][0](F.linear(x, weight), labels).square().sum()

    x, weight, labels = inputs()
    assert not report_of(program, x, weight, labels).matches
    assert any(REJECTED[case][1] in reason for reason in stops), stops
    check(program, labels, x, weight)


def test_sums_of_given_values_under_autocast():
    """What the rewrite inserts keeps its dtype."""

    def program(x, weight, labels):
        log = F.linear(x, weight).log_softmax(-1)
        q = torch.full_like(log, 1 / 7).detach() + torch.linspace(0, 1, log.shape[-1])
        with torch.autocast("cpu", torch.bfloat16):
            return (q * (q.log() - log)).sum(-1).square().sum()

    x, weight, labels = inputs()
    assert report_of(program, x, weight, labels).matches
    check(program, labels, x, weight)
