"""Which functions of rows have a formula, and which one.

Their values are those of eager, as all programs' are: the tests of ``tests/compile``, the catalogue
and the fuzzer say so. Here each program is compiled, and the functions of its loops are read.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxpass.formula.expression import text
from fxpass.lower.formula import Formula, formula_of
from fxpass.lower.records import Unknown
from fxpass.region.loop import Loop
from fxpass.region.split import split_loop
from fxpass.rows.backend import RowsPass

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


# of logits [N, V] -> the outputs, those with an incoming gradient, and the transform
FORMULAS = {
    "cross-entropy": (lambda z: ce(z), "pick", "pick", "z"),
    "with weights of classes": (lambda z: ce(z, weight=VECTOR + 2), "pick", "pick", "z"),
    "with label smoothing": (
        lambda z: ce(z, label_smoothing=0.1), "moment(0,1);pick", "moment(0,1);pick", "z"),
    "both": (
        lambda z: ce(z, weight=VECTOR + 2, label_smoothing=0.1),
        "moment(0,1,0);pick", "moment(0,1,0);pick", "z"),
    "soft targets": (lambda z: F.cross_entropy(z, SOFT), "moment(0,1,0)", "moment(0,1,0)", "z"),
    "soft targets, negative": (
        lambda z: (-SOFT * z.log_softmax(1)).sum(1), "moment(0,1,0)", "moment(0,1,0)", "z"),
    "targets made of labels": (
        lambda z: (F.one_hot(LABELS, V) * z.log_softmax(1)).sum(1), "pick", "pick", "z"),
    "a log-probability": (lambda z: pick(z), "pick", "pick", "z"),
    "a probability": (lambda z: z.softmax(1).gather(1, LABELS[:, None]), "pick", "pick", "z"),
    "a logit less the log-sum-exp": (
        lambda z: z.gather(1, LABELS[:, None])[:, 0] - z.logsumexp(1), "at;lse", "at;lse", "z"),
    "by hand": (
        lambda z: (z - z.logsumexp(1, True))[torch.arange(N), LABELS], "pick", "pick", "z"),
    "three classes": (
        lambda z: z.log_softmax(1).gather(1, LABELS[:, None].expand(N, 3)), "pick", "pick", "z"),
    "z-loss": (lambda z: ce(z) + z.logsumexp(1).square().mean(), "lse;pick", "lse;pick", "z"),
    "entropy": (entropy, "moment(1,1)", "moment(1,1)", "z"),
    "entropy of torch.distributions": (
        lambda z: torch.distributions.Categorical(logits=z).entropy(),
        "moment(1,1)", "moment(1,1)", "z"),
    "of squares": (lambda z: z.softmax(1).square().sum(1), "moment(2,0)", "moment(2,0)", "z"),
    "expectation": (
        lambda z: (z.softmax(1) * VECTOR).sum(1), "moment(1,0,0)", "moment(1,0,0)", "z"),
    "accuracy": (
        lambda z: (z.argmax(1) == LABELS).float() + pick(z)[:, 0], "pick;argmax", "pick", "z"),
    "soft-cap": (lambda z: ce(30 * torch.tanh(z / 30)), "pick", "pick", "30*tanh(z/30)"),
    "temperature": (lambda z: ce(z / 0.5), "pick", "pick", "2*z"),
    "a temperature of rows": (lambda z: ce(z * ROWS), "pick", "pick", "z"),
    "a bias": (lambda z: ce(z + VECTOR), "pick", "pick", "z"),
    "a bias in a function": (lambda z: ce(torch.tanh(z + VECTOR)), "pick", "pick", "tanh(z)"),
    "a mask of classes": (
        lambda z: ce(z.masked_fill(MASK, -math.inf)), "pick", "pick", "where(given0>0,-inf,z)"),
    "a shift of the largest": (
        lambda z: pick(z - z.detach().amax(1, keepdim=True)), "pick", "pick", "z"),
}  # fmt: skip

# of logits -> why a function of rows has no formula
UNKNOWN = {
    "top-k": (lambda z: z.topk(3).values.sum(1), "topk of logits is not known"),
    "sort": (lambda z: z.sort(1).values[:, 0], "sort of logits is not known"),
    "a mean logit": (lambda z: (z.softmax(1) * z).sum(1), "loses the digits of small logits"),
    "terms that cancel": (lambda z: (z.softmax(1) - VECTOR).square().sum(1), "may cancel"),
    "a gradient that is shared": (lambda z: z.amax(1), "eq of logits is not known"),
    "the largest logit": (
        lambda z: z.max(1).values + pick(z)[:, 0], "an index that is computed from logits"),
    "some of the classes": (lambda z: ce(z[:, :40]), "slice of logits is not known"),
    "chosen classes": (lambda z: pick(z[:, [*range(V)][::-1]]), "index of logits is not known"),
    "a gradient of 0": (
        lambda z: (z.softmax(1).detach() * z.log_softmax(1)).sum(1), "has no gradient"),
    "two softmaxes": (lambda z: pick(z) + pick(z / 2), "the logits of 2 softmaxes"),
    "differences to trained values": (
        lambda z: (z.detach() - z.logsumexp(1, True)).square().sum(1), "may cancel"),
    "an index that logits make": (
        lambda z: z.log_softmax(1).gather(1, z.argmax(1, True)), "is computed from logits"),
    "a scale that logits make": (
        lambda z: ce(z / z.logsumexp(1, True)), "no function of one logit"),
    "a rounded quotient": (lambda z: z.div(2, rounding_mode="floor").logsumexp(1), "rounding_mode"),
}  # fmt: skip


def formulas_in(program: Any) -> list[Formula | str]:
    """The formulas of the functions of rows of a program, or why there are none."""
    rows = RowsPass()
    x, weight = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    torch.compile(lambda x, w: program(x @ w.t()), backend=rows.backend())(x, weight)
    loops = [Loop.parse(part.text) for made in rows.made for part in made.parts]
    assert loops, [str(why) for made in rows.made for why in made.declined]
    found: list[Formula | str] = []
    for function in (split_loop(loop).function for loop in loops):
        try:
            found.append(formula_of(function))
        except Unknown as no:
            found.append(str(no))
    return found


@pytest.mark.parametrize("case", FORMULAS)
def test_a_formula(case):
    """Of forward, with the gradient of its sum."""
    program, outputs, incoming, transform = FORMULAS[case]
    (formula,) = formulas_in(lambda z: sum(t.sum() for t in _tensors(program(z))))
    assert isinstance(formula, Formula), formula
    assert ";".join(map(str, formula.outputs)) == outputs
    assert ";".join(map(str, formula.incoming)) == incoming
    assert text(formula.transform) == transform


def _tensors(made: Any) -> Any:
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize("case", UNKNOWN)
def test_no_formula(case):
    program, reason = UNKNOWN[case]
    found = formulas_in(lambda z: program(z).sum())
    assert any(isinstance(one, str) and reason in one for one in found), found


def test_a_backward_that_is_no_derivative():
    """The gradient of a custom function is read as it is: here twice the derivative."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            log = z.log_softmax(1)
            ctx.save_for_backward(log)
            return log.gather(1, LABELS[:, None])

        @staticmethod
        def backward(ctx, grad):
            (log,) = ctx.saved_tensors
            return 2 * (torch.zeros_like(log).scatter(1, LABELS[:, None], grad) - log.exp() * grad)

    once, twice = (formulas_in(lambda z, f=f: f(z).mean())[0] for f in (pick, Doubled.apply))
    assert isinstance(once, Formula)
    assert isinstance(twice, Formula)
    ((_, of_once),) = once.incoming["pick"].items()
    ((_, of_twice),) = twice.incoming["pick"].items()
    assert once.incoming.keys() == twice.incoming.keys() == {"pick"}
    assert of_twice.as_coeff_Mul()[0] == 2 * of_once.as_coeff_Mul()[0]
