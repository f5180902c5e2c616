"""Which row functions have a normal form, and which one.

Their values are those of eager, as all programs' are: the tests of ``tests/compile``, the catalogue
and the fuzzer say so. Here each program is captured, and its row function read.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxpass.lower.normal import Normal
from fxpass.lower.records import Unknown
from fxpass.rewrite import fuse
from fxpass.spec.expression import text
from tests.support.programs import report_of

N, D, V = 8, 6, 50
LABELS = torch.arange(N)
VECTOR, MASK = torch.linspace(-1, 1, V), torch.arange(V) > 40
ROWS = torch.linspace(0.5, 2, N)[:, None]
SOFT = torch.linspace(0, 1, N * V).view(N, V).softmax(-1)


def ce(z: Any, **options: Any) -> Any:
    return F.cross_entropy(z, LABELS, **options)


def pick(z: Any) -> Any:
    return z.log_softmax(-1).gather(-1, LABELS[:, None])


def entropy(z: Any) -> Any:
    return -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)


# of logits [N, V] -> the outputs of its call, and the transform
NORMAL = {
    "cross-entropy": (lambda z: ce(z), "pick", "z"),
    "with weights of classes": (lambda z: ce(z, weight=VECTOR + 2), "pick", "z"),
    "with label smoothing": (lambda z: ce(z, label_smoothing=0.1), "moment(0,1);pick", "z"),
    "both": (
        lambda z: ce(z, weight=VECTOR + 2, label_smoothing=0.1), "moment(0,1,0);pick", "z"),
    "soft targets": (lambda z: F.cross_entropy(z, SOFT), "moment(0,1,0)", "z"),
    "soft targets, negative": (lambda z: (-SOFT * z.log_softmax(1)).sum(1), "moment(0,1,0)", "z"),
    "a log-probability": (lambda z: pick(z), "pick", "z"),
    "a probability": (lambda z: z.softmax(1).gather(1, LABELS[:, None]), "pick", "z"),
    "a logit": (lambda z: z[torch.arange(N), LABELS], "at", "z"),
    "a logit less the log-sum-exp": (
        lambda z: z.gather(1, LABELS[:, None])[:, 0] - z.logsumexp(1), "at;lse", "z"),
    "by hand": (lambda z: (z - z.logsumexp(1, True))[torch.arange(N), LABELS], "pick", "z"),
    "three classes": (
        lambda z: z.log_softmax(1).gather(1, LABELS[:, None].expand(N, 3)), "pick", "z"),
    "z-loss": (lambda z: ce(z) + z.logsumexp(1).square().mean(), "lse;pick", "z"),
    "entropy": (entropy, "moment(1,1)", "z"),
    "entropy of torch.distributions": (
        lambda z: torch.distributions.Categorical(logits=z).entropy(), "moment(1,1)", "z"),
    "of squares": (lambda z: z.softmax(1).square().sum(1), "moment(2,0)", "z"),
    "expectation": (lambda z: (z.softmax(1) * VECTOR).sum(1), "moment(1,0,0)", "z"),
    "accuracy": (lambda z: (z.argmax(1) == LABELS).float() + pick(z)[:, 0], "pick;argmax", "z"),
    "max": (lambda z: z.max(1).values + pick(z)[:, 0], "max;pick", "z"),
    "soft-cap": (lambda z: ce(30 * torch.tanh(z / 30)), "pick", "30*tanh(z/30)"),
    "temperature": (lambda z: ce(z / 0.5), "pick", "2*z"),
    "a temperature of rows": (lambda z: ce(z * ROWS), "pick", "z"),
    "a bias": (lambda z: ce(z + VECTOR), "pick", "z"),
    "a bias in a function": (lambda z: ce(torch.tanh(z + VECTOR)), "pick", "tanh(z)"),
    "a mask of classes": (
        lambda z: ce(z.masked_fill(MASK, -math.inf)), "pick", "where(given0>0,-inf,z)"),
    "some of the classes": (lambda z: ce(z[:, :40]), "pick", "z"),
    "chosen classes": (lambda z: pick(z[:, [*range(V)][::-1]]), "pick", "z"),
    "a shift of the largest": (
        lambda z: pick(z - z.detach().amax(1, keepdim=True)), "pick", "z"),
}  # fmt: skip

# of logits -> why their row function is not lowered
UNKNOWN = {
    "top-k": (lambda z: z.topk(3).values.sum(1), "topk of logits is not known"),
    "sort": (lambda z: z.sort(1).values[:, 0], "sort of logits is not known"),
    "a mean logit": (lambda z: (z.softmax(1) * z).sum(1), "loses the digits of small logits"),
    "terms that cancel": (lambda z: (z.softmax(1) - VECTOR).square().sum(1), "may cancel"),
    "a gradient that is shared": (lambda z: z.amax(1), "equal classes have a share each"),
    "two softmaxes": (lambda z: pick(z) + pick(z / 2), "the logits of 2 softmaxes"),
    "targets made of labels": (
        lambda z: (F.one_hot(LABELS, V) * z.log_softmax(1)).sum(1), "which is made of others"),
    "logits and detached logits": (
        lambda z: (z.softmax(1).detach() * z.log_softmax(1)).sum(1), "detached logits"),
    "detached logits and trained values": (
        lambda z: (z.detach() - z.logsumexp(1, True)).square().sum(1), "detached logits"),
    "logits that cancel": (lambda z: z.log_softmax(1).logsumexp(1), "they cancel"),
    "an index that logits make": (
        lambda z: z.log_softmax(1).gather(1, z.argmax(1, True)), "is computed from logits"),
    "a scale that logits make": (
        lambda z: ce(z / z.logsumexp(1, True)), "no function of one logit"),
    "a rounded quotient": (lambda z: z.div(2, rounding_mode="floor").logsumexp(1), "rounding_mode"),
}  # fmt: skip


def read(program: Any, monkeypatch: pytest.MonkeyPatch) -> list[Normal | str]:
    """What is read of the row functions of a program."""
    found: list[Normal | str] = []
    lower = fuse.lower

    def noted(*arguments: Any) -> Normal:
        try:
            found.append(normal := lower(*arguments))
        except Unknown as no:
            found.append(str(no))
            raise
        return normal

    monkeypatch.setattr(fuse, "lower", noted)
    x, weight = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    report_of(lambda x, weight: program(x @ weight.t()), x, weight)
    assert found
    return found


@pytest.mark.parametrize("case", NORMAL)
def test_a_normal_form(case, monkeypatch):
    program, outputs, transform = NORMAL[case]
    (normal,) = read(program, monkeypatch)
    assert isinstance(normal, Normal), normal
    assert ";".join(map(str, normal.outputs)) == outputs
    assert text(normal.transform) == transform


@pytest.mark.parametrize("case", UNKNOWN)
def test_no_normal_form(case, monkeypatch):
    program, reason = UNKNOWN[case]
    found = read(program, monkeypatch)
    assert any(isinstance(one, str) and reason in one for one in found), found


def test_gradients_end_where_the_program_ends_them(monkeypatch):
    def program(z):
        with torch.no_grad():
            metric = entropy(z)
        return pick(z)[:, 0] + metric + z.detach().logsumexp(1)

    (normal,) = read(program, monkeypatch)
    assert isinstance(normal, Normal)
    assert [*map(str, normal.outputs)] == ["lse", "moment(1,1)", "pick"]
    assert [*map(str, normal.trained)] == ["pick"]
