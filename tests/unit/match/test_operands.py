"""Other tensors between linear and loss: what becomes part of the linear's operands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sympy import Rational
from torch._dynamo.utils import counters

from fxpass.match.edits import Added, Taken
from fxpass.spec.expression import text
from tests.support.numerics import assert_as_accurate
from tests.support.programs import (
    B,
    D,
    S,
    V,
    check,
    head_of,
    inputs,
    last,
    reason_of,
    report_of,
    spec_of,
)

# z [B, S, V], a vector [V], one number as a tensor, a number per row [B, S, 1] -> logits
ACCEPTED = {
    "a bias": (lambda z, b, s, r: z + b, "z"),
    "a bias from the left": (lambda z, b, s, r: b + z, "z"),
    "a bias of more dimensions": (lambda z, b, s, r: z + b[None, None], "z"),
    "a bias taken away": (lambda z, b, s, r: z - b, "z"),
    "taken away from a bias": (lambda z, b, s, r: b - z, "-z"),
    "a bias in place": (lambda z, b, s, r: z.add_(b), "z"),
    "two biases": (lambda z, b, s, r: z + b - b * 3, "z"),
    "a bias after a scale": (lambda z, b, s, r: z / 0.5 + b, "2*z"),
    "a bias after a shift": (lambda z, b, s, r: (1 - z) + b, "-z"),
    "a bias before a function": (lambda z, b, s, r: torch.tanh(z + b) * 2, "2*tanh(z)"),
    "a bias after a transposition": (
        lambda z, b, s, r: (z.transpose(1, 2) + b[:, None]).transpose(1, 2), "z"),
    "a temperature": (lambda z, b, s, r: z / s, "z"),
    "its exponential": (lambda z, b, s, r: s.exp() * z, "z"),
    "a temperature with a shape": (lambda z, b, s, r: z * s.view(1, 1, 1), "z"),
    "a temperature and a bias": (lambda z, b, s, r: (z + b) * s, "z"),
    "a shift and a temperature": (lambda z, b, s, r: (z + 1) * s, "z+1"),
    "a number per row": (lambda z, b, s, r: z * r, "z"),
    "divided by a number per row": (lambda z, b, s, r: z / r, "z"),
    "a bias, then a number per row": (lambda z, b, s, r: (z + b) * r, "z"),
    "a multiple of a bias": (lambda z, b, s, r: torch.add(z, b, alpha=2), "z"),
}  # fmt: skip


def tensors(dtype=torch.float32):
    x, weight, labels = inputs(dtype)
    vector = torch.randn(V, dtype=dtype, requires_grad=True)
    number = torch.tensor(0.7, dtype=dtype, requires_grad=True)
    rows = torch.rand(B, S, 1, dtype=dtype).add_(0.5).requires_grad_()
    return labels, x, weight, vector, number, rows


def program_of(case):
    def program(x, weight, vector, number, rows, labels):
        logits = ACCEPTED[case][0](F.linear(x, weight), vector, number, rows)
        return F.cross_entropy(last(logits), labels.view(-1))

    return program


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case):
    labels, *rest = tensors()
    assert text(spec_of(program_of(case), *rest, labels).transform) == ACCEPTED[case][1]
    check(program_of(case), labels, *rest)


def test_the_edits_are_in_the_order_of_the_data():
    """The vector is divided by the factor before it; the factor after it is one of the softmax."""

    def program(x, weight, bias, number, labels):
        logits = F.linear(x, weight)[..., 1:8]
        return F.cross_entropy(last((logits * 2 + bias[1:8]) * number), labels.view(-1) % 7)

    labels, x, weight, bias, number, _ = tensors()
    (call,) = head_of(program, x, weight, bias, number, labels).calls
    first, second = call.base.edits
    assert first == Taken((1, 8, None))
    assert isinstance(second, Added)
    assert second.factor == Rational(1, 2)
    assert text(call.spec.transform) == "2*z"
    assert call.base.scale.free_symbols
    check(program, labels, x, weight, bias, number)


def test_a_bias_beside_the_linears_own():
    def program(x, weight, bias, labels):
        return F.cross_entropy(last(F.linear(x, weight, bias * 2) + bias), labels.view(-1))

    labels, x, weight, bias, *_ = tensors()
    check(program, labels, x, weight, bias)


def test_a_bias_that_needs_no_gradient():
    def program(x, weight, labels):
        return F.cross_entropy(last(F.linear(x, weight) + torch.ones(V)), labels.view(-1))

    x, weight, labels = inputs()
    assert spec_of(program, x, weight, labels).gradients == ("x", "weight")


# in 16 bits: z [B, S, V], vectors [V] in f32 and in 16 bits, numbers in both, one per row [B, S, 1]
NARROW = {
    "a constant": (lambda z, b, h, s, r: wide(z) * 200, "200*z"),
    "a constant before a function": (lambda z, b, h, s, r: torch.tanh(wide(z) / 3) * 3, "3*tanh(z/3)"),
    "a constant after a bias": (lambda z, b, h, s, r: (wide(z) + b) * 200, "200*z"),
    "a bias taken away": (lambda z, b, h, s, r: b - wide(z), "-z"),
    "a constant before a bias": (lambda z, b, h, s, r: wide(z) * 200 + b, "200*z"),
    "a small constant before a bias": (lambda z, b, h, s, r: wide(z) * 1e-6 + b, "1e-06*z"),
    "a constant before a bias, both in 16 bits": (lambda z, b, h, s, r: z * 0.7 + h, "0.7*z"),
    "a shift before a bias": (lambda z, b, h, s, r: (wide(z) + 3) + b, "z"),
}  # fmt: skip
# operands of the reductions, in f32
WIDE_FACTORS = {
    "a factor in f32": lambda z, b, h, s, r: wide(z) * s,
    "its exponential": lambda z, b, h, s, r: wide(z) * s.exp(),
    "a factor per row in f32": lambda z, b, h, s, r: wide(z) * r,
    "a factor in 16 bits": lambda z, b, h, s, r: z * s,
    "a factor per row in 16 bits": lambda z, b, h, s, r: z * r.to(z.dtype),
    "a temperature after a bias": lambda z, b, h, s, r: (wide(z) + b) / s,
}


def wide(z):
    """f32, or f64 where all is computed in f64."""
    return z.to(torch.promote_types(z.dtype, torch.float32))


def narrow_program(between):
    def program(x, weight, vector, narrow, number, rows, labels):
        logits = between(F.linear(x, weight), vector, narrow, number, rows)
        return F.cross_entropy(last(logits), labels.view(-1))

    return program


def narrow_tensors(dtype):
    """Hidden states of a few hundred: times 200, fp16 cannot hold them."""
    labels, x, weight, vector, number, rows = (t.detach() for t in tensors())
    tensors_ = (x * 300).to(dtype), (weight / 300).to(dtype), vector + 20, vector.to(dtype), number
    return labels, *(t.requires_grad_() for t in (*tensors_, rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", NARROW)
def test_what_16_bit_operands_take(case, dtype):
    between, expected = NARROW[case]
    labels, *rest = narrow_tensors(dtype)
    assert text(spec_of(narrow_program(between), *rest, labels).transform) == expected
    check(narrow_program(between), labels, *rest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", WIDE_FACTORS)
def test_factors_of_the_reductions(case, dtype):
    program = narrow_program(WIDE_FACTORS[case])
    labels, *rest = narrow_tensors(dtype)
    (call,) = head_of(program, *rest, labels).calls
    assert [name for name in call.spec.gradients if name != "bias"] == ["x", "weight", "scale"]
    check(program, labels, *rest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_factor_in_place_of_kept_16_bit_logits(dtype):
    """The linear's output does not exist any more."""

    def program(x, weight, labels):
        logits = F.linear(x, weight).mul_(200)
        return F.cross_entropy(last(logits), labels.view(-1)), logits.cumsum(-1)

    labels, x, weight, *_ = narrow_tensors(dtype)
    for trained in (x, x.detach()):
        assert "a node writes to them" in reason_of(program, trained, weight.detach(), labels)


REJECTED = {
    "a number per row added": (lambda z, b, s, r: z + r, "which needs a gradient"),
    "a bias and a temperature": (lambda z, b, s, r: z * s + b, "which needs a gradient"),
    "a number per row, then a bias": (lambda z, b, s, r: z * r + b, "which needs a gradient"),
    "a temperature and a function": (lambda z, b, s, r: (z * s).tanh(), "which needs a gradient"),
    "a factor that cancels": (lambda z, b, s, r: z * s / s, "cancels %l_number_"),
    "a bias that cancels": (lambda z, b, s, r: (z + b).relu() - b + b, "cancels %l_vector_"),
    "a maximum with a tensor": (lambda z, b, s, r: torch.clamp(z, min=b), "min= is not a number"),
    "more dimensions": (lambda z, b, s, r: (z[0] + b[None, None])[0], "repeats the logits"),
}  # fmt: skip


@pytest.mark.parametrize("case", REJECTED)
def test_rejected(case):
    def program(x, weight, vector, number, rows, labels):
        logits = REJECTED[case][0](F.linear(x, weight), vector, number, rows)
        return F.cross_entropy(logits.reshape(-1, V), labels.view(-1)[: logits.numel() // V])

    labels, *rest = tensors()
    assert REJECTED[case][1] in reason_of(program, *rest, labels)


REDUCED = {
    "a number per row added": lambda z, b, s, r: z + r.detach(),
    "in the denominator": lambda z, b, s, r: s / (z.square() + 1),
    "a temperature after a function": lambda z, b, s, r: z.relu() * s,
    "a shift, then a number per row": lambda z, b, s, r: (z + 1) * r,
    "a temperature and a function": lambda z, b, s, r: torch.tanh(z * s.detach() / 3) * 3,
    "a number per row, then a bias": lambda z, b, s, r: z * r.detach() + b,
}


@pytest.mark.parametrize("case", REDUCED)
def test_factors_and_shifts_that_are_operands_of_the_reductions(case):
    def program(x, weight, vector, number, rows, labels):
        logits = REDUCED[case](F.linear(x, weight), vector, number, rows)
        return F.cross_entropy(last(logits), labels.view(-1))

    labels, *rest = tensors()
    assert head_of(program, *rest, labels)
    check(program, labels, *rest)


def test_a_factor_that_the_loss_depends_on_twice():
    """The second loss is computed from what the first one became: none is computed twice."""

    def program(x, weight, number, labels):
        first = F.cross_entropy(last(F.linear(x, weight) * number), labels.view(-1))
        return first + F.cross_entropy(last(F.linear(x, weight) * first), labels.view(-1))

    labels, x, weight, _, number, _ = tensors()
    check(program, labels, x, weight, number)
    (after,) = report_of(program, x, weight, number, labels).after
    assert " cross_entropy(" not in after
    assert D != V


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_float_that_varies_is_data(inner, dtype):
    """An annealed temperature: the second value compiles the graph that takes all later ones."""

    def program(x, weight, bias, temperature):
        return F.cross_entropy(last(F.linear(x, weight, bias) / temperature), labels.view(-1))

    labels, x, weight, bias, *_ = tensors()
    tensors_ = [t.detach().to(dtype) for t in (x, weight, bias)]
    options = {"fusedce.inner": inner}
    fused = torch.compile(program, backend="fusedce", options=options)
    for temperature in (1.1, 0.7, 1.3, 2.5):
        ours, eager = (lambda *t, f=f, s=temperature: f(*t, s) for f in (fused, program))
        assert_as_accurate(ours, eager, tensors_, dtype)
    assert counters["fusedce"] == {"matched": 2, "rejected": 0, "casts": 0}
    assert counters["stats"]["unique_graphs"] == 2


def test_label_smoothing_that_varies_is_a_constant_of_each_graph(caplog):
    """As in torch's own: each value compiles anew, and each is fused."""

    def program(x, weight, smoothing):
        logits = last(F.linear(x, weight))
        return F.cross_entropy(logits, labels.view(-1), label_smoothing=smoothing)

    labels, x, weight, *_ = tensors()
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    caplog.set_level("INFO", "fxpass")
    for smoothing in (0.1, 0.2, 0.3):
        torch.testing.assert_close(
            fused(x, weight, smoothing), program(x, weight, smoothing), rtol=1e-6, atol=0
        )
    assert counters["fusedce"]["matched"] == 3
    assert counters["fusedce"]["rejected"] == 0
    assert "label_smoothing varies from call to call: every value is compiled anew" in caplog.text
