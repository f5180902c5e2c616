"""Whole heads: which nodes belong to one, how many calls it becomes, their gradients and sizes, and
heads that stay because they are small, or nested.

Which row functions have a normal form is in ``tests/unit/lower``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import fxpass
from tests.support.numerics import assert_as_accurate
from tests.support.programs import (
    CLASS_REDUCTIONS,
    DECLINED,
    ROW_FUNCTION,
    B,
    D,
    S,
    V,
    check,
    compiled,
    fused_as,
    head_of,
    inputs,
    last,
    report_of,
    same,
    spec_of,
)

PACKAGE = str(Path(fxpass.__file__).parent)
VALUES = torch.linspace(-1, 2, B * S * V).view(B, S, V)
TEACHER = torch.randn(V, D)
BOTH = f"{ROW_FUNCTION} and {CLASS_REDUCTIONS}"


def loss_of(z, labels):
    return F.cross_entropy(last(z), labels.view(-1))


def picked(z, t):
    return z.log_softmax(-1).gather(-1, t[..., None]).squeeze(-1)


def under_no_grad(program):
    with torch.no_grad():
        return program()


def entropy(z):
    return -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)


def copied(row):
    made = torch.zeros(row.shape)
    made.copy_(row)
    return made


def filled(made, at, z):
    """After a node that reads the logits."""
    made[at] = 3
    made.add_(z.shape[-1] / 20)
    return made


def one_hot_loss(z, t):
    log = z.log_softmax(-1)
    target = torch.zeros_like(log).scatter(-1, t[..., None], 1)
    return -(target * log).sum(-1) / log.shape[0]


# logits [B, S, V] and labels [B, S] -> rows, or a number
PROGRAMS = {
    "a class that is computed later": (
        lambda z, t: z.logsumexp(-1) * z.gather(-1, (t % 7)[..., None])[..., 0], CLASS_REDUCTIONS),
    "labels that are changed in place": (
        lambda z, t: z.softmax(-1).gather(-1, t.clone().sub_(t // 2)[..., None]), CLASS_REDUCTIONS),
    "two targets": (
        lambda z, t: z.log_softmax(-1).gather(-1, torch.stack([t, t // 2], -1)), ROW_FUNCTION),
    "a sequence's last token": (
        lambda z, t: z[torch.arange(B), t[:, 0] % S].logsumexp(-1), CLASS_REDUCTIONS),
    "log-probabilities of some rows": (
        lambda z, t: z.log_softmax(-1)[:, :-1].gather(-1, t[:, 1:, None].repeat(1, 1, 2)),
        ROW_FUNCTION),
    "rows that are copied into a tensor": (
        lambda z, t: copied(z.logsumexp(-1)) * entropy(z.detach()), CLASS_REDUCTIONS),
    "a metric beside a log-probability": (
        lambda z, t: under_no_grad(lambda: entropy(z.view(B * S, V))) * picked(z, t).view(-1),
        CLASS_REDUCTIONS),
    "a class vector that is filled in place": (
        lambda z, t: (filled(torch.zeros(V), 2, z) * z.softmax(-1)).sum(-1), CLASS_REDUCTIONS),
    "values that are filled in place": (
        lambda z, t: (filled(torch.zeros(B, S, V), 1, z) * z.log_softmax(-1)).sum(-1),
        CLASS_REDUCTIONS),
    "a temperature that is filled in place": (
        lambda z, t: (z * filled(torch.ones(1), 0, z)).softmax(-1).square().sum(-1),
        CLASS_REDUCTIONS),
    "a view whose index comes first": (
        lambda z, t: entropy(torch.index_select(index=t[0] * 0 + 1, input=z, dim=1)),
        CLASS_REDUCTIONS),
    "several picks of shifted logits": (
        lambda z, t: ((z - z.detach().amax(-1, keepdim=True)).gather(
            -1, torch.stack([t, t // 2], -1)).square().sum() + z.logsumexp(-1).sum()),
        ROW_FUNCTION),
    "several picks beside a total": (
        lambda z, t: (picked(z, t).mean()
            + (z.detach().gather(-1, torch.stack([t, t // 2], -1)) > 0).sum()), BOTH),
    "a z-loss that the labels depend on": (
        lambda z, t: (lambda lse: F.cross_entropy(
            last(z), (t.view(-1) + lse.detach().long()) % V) + lse.mean())(
            last(z).logsumexp(-1).square()), ROW_FUNCTION),
    "two losses of one head": (
        lambda z, t: F.cross_entropy(z[:, :-1].reshape(-1, V), t[:, 1:].reshape(-1))
        + 0.3 * loss_of(z.float(), t // 2), CLASS_REDUCTIONS),
    "a classification without logits": (one_hot_loss, ROW_FUNCTION),
    "a router's z-loss": (
        lambda z, t: z.logsumexp(-1).square().mean()
        + z.topk(2, -1).values.softmax(-1).square().sum(), ROW_FUNCTION),
    "z.data": (lambda z, t: z.data.max(-1)[1] + z.logsumexp(-1), CLASS_REDUCTIONS),
    "padded classes": (
        lambda z, t: loss_of(F.pad(z, (0, 5), value=-9.0), t), ROW_FUNCTION),
    "a lerp with a tensor": (
        lambda z, t: torch.lerp(z, z.detach().flip(-1), z.new_tensor(0.3)).logsumexp(-1),
        ROW_FUNCTION),
    "packed bits of classes": (
        lambda z, t: z.masked_fill(
            (t[..., None] >> (torch.arange(V) % 3)) & 1 > 0, -9.0).logsumexp(-1),
        CLASS_REDUCTIONS),
    "rows by a tensor, batch first": (
        lambda z, t: F.cross_entropy(z[:, t[0] % S - 2].mT, t), CLASS_REDUCTIONS),
}  # fmt: skip


@pytest.mark.parametrize("case", PROGRAMS)
def test_one_head(case):
    def program(x, weight, labels):
        return PROGRAMS[case][0](F.linear(x, weight), labels).square().sum()

    x, weight, labels = inputs()
    assert fused_as(program, x, weight, labels) == PROGRAMS[case][1]
    check(program, labels, x, weight)


def soft_targets(student, teacher, labels):
    q = (teacher / 2).softmax(-1)
    return -(q * (student / 2).log_softmax(-1)).sum(-1).mean()


TWO_HEADS = {
    "soft targets": soft_targets,
    "a loss and soft targets": lambda student, teacher, labels: (
        loss_of(student, labels) + soft_targets(student, teacher, labels)),
    "soft targets and the teacher's accuracy": lambda student, teacher, labels: (
        soft_targets(student, teacher, labels) + (teacher.argmax(-1) == labels).sum()),
    "a sum of logits": lambda student, teacher, labels: loss_of(student + teacher, labels),
    "the teacher's share": lambda student, teacher, labels: (
        ((teacher - teacher.logsumexp(-1, keepdim=True)).exp() * student.sigmoid())
        .sum(-1).square().sum()),
}  # fmt: skip


@pytest.mark.parametrize("first", ["student", "teacher"])
@pytest.mark.parametrize("trained", ["student", "both", "neither"])
@pytest.mark.parametrize("name", TWO_HEADS)
def test_two_heads(name, trained, first):
    def program(x, weight, other, labels):
        if first == "teacher":
            teacher = F.linear(x if trained == "both" else x.detach(), other)
        student = F.linear(x, weight)
        if first == "student":
            teacher = F.linear(x if trained == "both" else x.detach(), other)
        return TWO_HEADS[name](student, teacher, labels)

    x, weight, labels = inputs()
    other = TEACHER.clone().requires_grad_(trained == "both")
    if trained == "neither":
        x, weight = x.detach(), weight.detach()
    args = x, weight, other, labels
    assert ROW_FUNCTION in fused_as(program, *args)
    same(program, *args) if trained == "neither" else check(program, labels, *args[:3])


# ---------------------------------------------------------------- gradients, sizes, dtypes


def test_only_gradients_that_somebody_needs():
    x, weight, labels = inputs()
    bias = torch.zeros(V, requires_grad=True)

    def program(x, weight, bias):
        return loss_of(F.linear(x, weight, bias), labels)

    assert spec_of(program, x, weight, bias).gradients == ("x", "weight", "bias")
    assert spec_of(program, x, weight.detach(), bias.detach()).gradients == ("x",)
    assert spec_of(program, x.detach(), weight, bias.detach()).gradients == ("weight",)
    with torch.no_grad():
        assert spec_of(program, x, weight, bias).gradients == ()


@pytest.mark.parametrize("operand", ["target", "class weights"])
def test_operands_of_the_loss_that_need_a_gradient(operand):
    def program(x, weight, operand_, labels):
        soft = F.one_hot(labels.view(-1), V).to(x.dtype)
        given = (operand_, None) if operand == "target" else (soft, operand_)
        return F.cross_entropy(last(F.linear(x, weight)), *given)

    x, weight, labels = inputs()
    given = torch.rand(B * S, V) if operand == "target" else torch.rand(V)
    check(program, labels, x, weight, given.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_float_that_varies_is_data(inner, dtype):
    """An annealed temperature: the second value compiles the graph that takes all later ones."""
    x, weight, labels = (t.detach() for t in inputs())
    tensors = [t.to(dtype) for t in (x, weight, torch.randn(V))]

    def program(x, weight, bias, temperature):
        return loss_of(F.linear(x, weight, bias) / temperature, labels)

    fused = compiled(program, inner=inner)
    for temperature in (1.1, 0.7, 1.3, 2.5):
        ours, eager = (lambda *t, f=f, s=temperature: f(*t, s) for f in (fused, program))
        assert_as_accurate(ours, eager, tensors, dtype)
    assert (counters["fusedce"]["matched"], counters["stats"]["unique_graphs"]) == (2, 2)


def test_label_smoothing_that_varies_is_a_constant_of_each_graph():
    """As in torch's own: each value compiles anew, and each is fused."""
    x, weight, labels = inputs()

    def program(x, weight, smoothing):
        z = last(F.linear(x, weight))
        return F.cross_entropy(z, labels.view(-1), label_smoothing=smoothing)

    fused = compiled(program)
    for smoothing in (0.1, 0.2, 0.3):
        got, expected = fused(x, weight, smoothing), program(x, weight, smoothing)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    assert counters["fusedce"]["matched"] == 3


def test_shapes_that_are_not_numbers():
    def program(x, weight, labels):
        z = F.linear(x, weight)
        z = z.view(z.size(0) * z.size(1), z.size(-1))
        return F.cross_entropy(z, labels.view(-1)) * x.size(0)

    x, weight, labels = inputs()
    for tensor in (x, labels):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    assert fused_as(program, x, weight, labels) == CLASS_REDUCTIONS
    check(program, labels, x, weight)


BY_A_MASK = {
    "rows": lambda z, t, m: F.cross_entropy(z[m], t[m]),
    "of a sum": lambda z, t, m: F.cross_entropy(z[m], t[m], reduction="sum") / m.sum().clamp(min=1),
    "rows and classes": lambda z, t, m: F.cross_entropy(z[m, 2:], t[m].clamp(min=2) - 2),
    "log-probabilities": lambda z, t, m: -z[m].log_softmax(-1).gather(1, t[m][:, None]).mean(),
    "flat": lambda z, t, m: F.cross_entropy(last(z)[m.flatten()], t.flatten()[m.flatten()]),
    "positions": lambda z, t, m: (
        lambda some: F.cross_entropy(z[:, some].flatten(0, 1), t[:, some].flatten()))(m[0]),
}  # fmt: skip


@pytest.mark.parametrize("case", BY_A_MASK)
def test_rows_by_a_mask(case):
    """Dynamo breaks the graph there, unless it is told to capture dynamic shapes."""

    def program(x, weight, labels):
        mask = labels > 2  # one mask: of two, torch 2.11 does not know that they count the same
        return BY_A_MASK[case](F.linear(x, weight), labels, mask)

    x, weight, labels = inputs()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert fused_as(program, x, weight, labels) == CLASS_REDUCTIONS
        for some in (labels, labels * 0):  # no row
            check(program, some, x, weight)


# ---------------------------------------------------------------- settings, cost, nested graphs


@pytest.mark.parametrize(("megabytes", "fused"), [("64", 0), ("1", 0), ("1e-4", 0), ("0", 1)])
def test_logits_too_small_to_matter(megabytes, fused, monkeypatch):
    """Also where another product is larger."""

    def program(x, weight, labels):
        scores = torch.einsum("bsd,btd->bst", x, x)
        return loss_of(F.linear(x, weight), labels) + scores.square().sum()

    monkeypatch.setenv("FUSEDCE_MIN_LOGITS_MB", megabytes)
    assert len(report_of(program, *inputs()).matches) == fused


def test_the_users_budget(monkeypatch):
    def program(x, weight, labels):
        return F.linear(x, weight).softmax(-1).square().sum()

    monkeypatch.setenv("FUSEDCE_MEMORY_MB", "3")
    x, weight, labels = inputs()
    assert spec_of(program, x, weight, labels).memory_mb == 3
    check(program, labels, x, weight, memory_mb=1)


class Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, labels):
        ctx.save_for_backward(x, weight)
        return loss_of(F.linear(x, weight), labels)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * x, grad * weight, None


def in_a_branch(x, weight, labels):
    def branch(x, weight, labels):
        return loss_of(F.linear(x, weight), labels)

    return torch.cond(x.sum() > 0, branch, branch, (x, weight, labels))


@pytest.mark.parametrize("program", [in_a_branch, Written.apply])
def test_a_loss_in_a_nested_graph(program):
    def call(x, weight, labels):
        return program(x, weight, labels)

    assert fused_as(call, *inputs()) == DECLINED
    same(call, *inputs(), inner="aot_eager")


def doubled(t, times, function=torch.sin):
    """Each of these tensors is read twice, so that 2**times paths lead to the first."""
    for _ in range(times):
        t = t + function(t)
    return t


# logits, labels and a number of times -> logits
PATHS = {
    "a transform": lambda z, t, times: doubled(z, times, torch.tanh),
    "a softmax": lambda z, t, times: doubled(z.softmax(-1), times, torch.square),
    "given": lambda z, t, times: z - doubled(VALUES, times),
    "labels": lambda z, t, times: (
        z.log_softmax(-1) * z.gather(-1, doubled(t, times, torch.neg)[..., None])),
}  # fmt: skip


@pytest.mark.parametrize("case", PATHS)
def test_a_node_is_read_once_whatever_the_paths_to_it(case):
    """A model of 5,700 nodes took six minutes, and a transform of 12 steps an hour."""
    x, weight, labels = inputs()
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)
        if calls > 400_000:
            pytest.fail("reading takes too long")

    old = sys.getprofile()
    sys.setprofile(count)
    try:
        head_of(lambda x: PATHS[case](F.linear(x, weight), labels, 24).logsumexp(-1).sum(), x)
    finally:
        sys.setprofile(old)
    assert calls > 100
