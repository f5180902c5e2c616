"""Reductions that read the logits of two heads: one of them is fused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.programs import D, V, check, inputs, report_of

TEACHER = torch.randn(V, D)


def divergence(student, teacher, labels):
    q = (teacher / 2).softmax(-1)
    return -(q * (student / 2).log_softmax(-1)).sum(-1).mean()


PROGRAMS = {
    "soft targets": divergence,
    "a loss and soft targets": lambda student, teacher, labels: (
        F.cross_entropy(student.view(-1, V), labels.view(-1)) + divergence(student, teacher, labels)
    ),
    "soft targets and the teacher's accuracy": lambda student, teacher, labels: (
        divergence(student, teacher, labels) + (teacher.argmax(-1) == labels).sum()
    ),
    "a sum of logits": lambda student, teacher, labels: F.cross_entropy(
        (student + teacher).view(-1, V), labels.view(-1)
    ),
    "the teacher's share": lambda student, teacher, labels: (
        (teacher - teacher.logsumexp(-1, keepdim=True)).exp() * student.sigmoid()
    ).sum(-1).square().sum(),
}  # fmt: skip


@pytest.mark.parametrize("first", ["student", "teacher"])
@pytest.mark.parametrize("trained", ["student", "both", "neither"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_head_is_fused(name, trained, first, caplog):
    def program(x, weight, other, labels):
        if first == "teacher":
            teacher = F.linear(x if trained == "both" else x.detach(), other)
        student = F.linear(x, weight)
        if first == "student":
            teacher = F.linear(x if trained == "both" else x.detach(), other)
        return PROGRAMS[name](student, teacher, labels)

    x, weight, labels = inputs()
    other = TEACHER.clone().requires_grad_(trained == "both")
    if trained == "neither":
        x, weight = x.detach(), weight.detach()
    report = report_of(program, x, weight, other, labels)
    fused = [r.node for head in report.matches for r in head.flow.reductions]
    assert len(set(fused)) == len(fused)
    if trained == "student":
        assert report.matches
    if trained != "neither":
        check(program, labels, x, weight, other)
    else:
        made = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
        theirs = program(x, weight, other, labels)
        torch.testing.assert_close(made(x, weight, other, labels), theirs)
    assert "failed" not in caplog.text
