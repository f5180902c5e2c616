"""Modes between linear and loss: gradients on and off, inference mode, autocast, torch.func, dtypes.

What counts is whether anything on the way loses its gradient, not who switches between.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.programs import (
    CLASS_REDUCTIONS,
    DECLINED,
    ROW_FUNCTION,
    B,
    S,
    V,
    check,
    compiled,
    fused_as,
    inputs,
    last,
    same,
)

WEIGHTS = torch.linspace(0.5, 2, V)


def loss_of(z, labels):
    return F.cross_entropy(last(z), labels.view(-1))


def linear_under_no_grad(x, weight, labels):
    with torch.no_grad():
        logits = F.linear(x, weight)
    return loss_of(logits, labels) + x.sum() + weight.sum()


def loss_under_no_grad(x, weight, labels):
    logits = F.linear(x, weight)
    with torch.no_grad():
        loss = loss_of(logits, labels)
    return loss + x.sum() + weight.sum()


def teacher_in_between(x, weight, labels):
    logits = F.linear(x, weight)
    with torch.no_grad():
        teacher = F.linear(x.detach().flip(0), weight).cumsum(-1).mean()
    return loss_of(logits, labels) * teacher


def both_under_no_grad(x, weight, labels):
    with torch.no_grad():
        loss = loss_of(F.linear(x, weight), labels)
    return loss * x.sum() * weight.sum()


def off_on_the_way(x, weight, labels):
    with torch.no_grad():
        logits = F.linear(x, weight)
    return loss_of(logits + weight.mean(-1), labels)


def view_under_no_grad(x, weight, labels):
    """It says that it needs a gradient, and passes none on."""
    logits = F.linear(x, weight)
    with torch.no_grad():
        logits = logits.flatten(0, -2)
    return F.cross_entropy(logits, labels.view(-1))


def metric_under_no_grad(x, weight, labels):
    z = F.linear(x, weight)
    with torch.no_grad():
        log = z.view(-1, V).log_softmax(-1)
        entropy = -(log.exp() * log).sum(-1)
    return (entropy * last(z).log_softmax(-1).gather(1, labels.view(-1, 1)).squeeze(1)).sum()


def reference_in_inference_mode(x, weight, labels):
    with torch.inference_mode():
        z, flat = last(F.linear(x, weight)), labels.view(-1)
        picked = z.log_softmax(-1).gather(-1, flat[:, None]).squeeze(-1)
    return loss_of(F.linear(x, weight), labels), picked


def frozen_logits(x, weight, labels):
    with torch.inference_mode():
        z = F.linear(x, weight)
    return loss_of(z, labels)


def metric_in_inference_mode(x, weight, labels):
    z = F.linear(x, weight)
    with torch.inference_mode():
        return last(z).logsumexp(-1) + x[:, :, 0].reshape(-1)


def gradients_in_inference_mode(x, weight, labels):
    with torch.inference_mode():
        z = F.linear(x, weight)
        with torch.enable_grad():
            z = z + weight.sum()
        at = labels.view(-1)
    with torch.no_grad(), torch.inference_mode():
        z = last(z)
    return F.cross_entropy(z, at)


def inference_mode_off(x, weight, labels):
    """Which switches gradients on, whatever they were."""
    logits = F.linear(x, weight)
    with torch.inference_mode(False):
        return loss_of(logits, labels)


def head_in_inference_mode_off(x, weight, labels):
    with torch.inference_mode(False):
        logits = F.linear(x, weight)
        return loss_of(logits, labels), logits


def constants(x, weight, labels):
    z = last(F.linear(x, weight))
    loss = F.nll_loss(3 - z, labels.view(-1), ignore_index=3)
    return loss + F.nll_loss(z.sigmoid() - 2, labels.view(-1))


def per_example(x, weight, labels):
    return torch.func.vmap(lambda x, t: F.cross_entropy(F.linear(x, weight), t))(x, labels)


def functional_gradient(x, weight, labels):
    return torch.func.grad(lambda weight: loss_of(F.linear(x, weight), labels))(weight)


def transforms_before_the_head(x, weight, labels):
    """As transformers make attention masks: what wraps tensors writes to none."""
    mask = torch.vmap(torch.vmap(lambda label: label < 5))(labels)
    h = torch.vmap(torch.func.grad(lambda row: row.square().sum()))(x)
    return loss_of(F.linear(h * mask.unsqueeze(-1), weight), labels)


def labels_of_a_transform(x, weight, labels):
    """The call stands after the transform, in which no tensor may require gradients."""
    z = last(F.linear(x, weight))
    classes = torch.vmap(lambda label: label // 2)(labels.view(-1))
    return z[torch.arange(len(z)), classes].mean()


def reduction_in_a_transform(x, weight, labels):
    z = last(F.linear(x, weight))
    return torch.vmap(lambda label: z.logsumexp(-1) * label)(labels.view(-1))


# a program, and what it is fused as
PROGRAMS = {
    linear_under_no_grad: CLASS_REDUCTIONS,
    loss_under_no_grad: CLASS_REDUCTIONS,
    teacher_in_between: f"{ROW_FUNCTION} and {CLASS_REDUCTIONS}",
    both_under_no_grad: CLASS_REDUCTIONS,
    off_on_the_way: CLASS_REDUCTIONS,
    view_under_no_grad: DECLINED,
    metric_under_no_grad: CLASS_REDUCTIONS,
    reference_in_inference_mode: CLASS_REDUCTIONS,
    frozen_logits: CLASS_REDUCTIONS,
    metric_in_inference_mode: CLASS_REDUCTIONS,
    gradients_in_inference_mode: DECLINED,
    inference_mode_off: CLASS_REDUCTIONS,
    head_in_inference_mode_off: CLASS_REDUCTIONS,
    constants: ROW_FUNCTION,
    per_example: DECLINED,
    functional_gradient: DECLINED,
    transforms_before_the_head: CLASS_REDUCTIONS,
    labels_of_a_transform: DECLINED,
    reduction_in_a_transform: DECLINED,
}
IDS = [program.__name__ for program in PROGRAMS]
FUNCTIONAL = (per_example, functional_gradient)


@pytest.mark.parametrize("program", PROGRAMS, ids=IDS)
def test_what_is_fused(program):
    x, weight, labels = inputs()
    if program in FUNCTIONAL:
        x, weight = x.detach(), weight.detach()
    assert fused_as(program, x, weight, labels) == PROGRAMS[program]


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", PROGRAMS, ids=IDS)
def test_values_and_gradients(program, inner):
    x, weight, labels = inputs()
    for trains in (True, False):
        args = *(t.detach().requires_grad_(trains) for t in (x, weight)), labels
        same(program, *args, inner=inner, rtol=5e-6, atol=1e-5)  # sums in another order
    with torch.no_grad():
        same(program, x, weight, labels, inner=inner)
    with torch.inference_mode():  # of which AOTAutograd's tensors are none
        torch.testing.assert_close(
            compiled(program, inner="eager")(x, weight, labels), program(x, weight, labels)
        )


def test_other_graphs_of_the_process_compile_after_a_block_of_inference_mode():
    """AOTAutograd raises for views there, and then for every other graph."""
    args = inputs()
    compiled(reference_in_inference_mode, inner="aot_eager")(*args)
    torch.compile(torch.sin, backend="aot_eager")(args[0])


def test_a_row_that_is_written_and_not_read():
    """Its atoms have no gradient in eager, which is not one of zeros."""

    def program(x, weight, atoms, labels):
        z, labels = last(F.linear(x, weight)), labels.view(-1)
        row = (z.softmax(-1) * atoms).sum(-1)
        row[0] = 0
        return F.cross_entropy(z, labels)

    x, weight, labels = inputs()
    atoms = torch.ones(V, requires_grad=True)
    for inner in ("eager", "aot_eager"):
        same(program, x, weight, atoms, labels, inner=inner)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("head", ["F.linear", "@", "addmm", "einsum"])
def test_autocast(head, inside):
    """The casts are those that autocast would have made inside of the call."""

    def program(x, weight, labels):
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=inside or torch.is_autocast_enabled("cpu")
        ):
            logits = {
                "F.linear": lambda: F.linear(x, weight),
                "@": lambda: x @ weight.T,
                "addmm": lambda: torch.addmm(torch.ones(V), last(x), weight.t()),
                "einsum": lambda: torch.einsum("bsd,vd->bsv", x, weight),
            }[head]()
            return F.cross_entropy(last(logits), labels.view(-1), WEIGHTS)

    args = inputs()
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        assert fused_as(program, *args) == CLASS_REDUCTIONS
        same(program, *args, rtol=2e-2, atol=2e-2)


OTHERS = {
    torch.float32: (torch.float64, torch.bfloat16, torch.int64, torch.bool),
    torch.bfloat16: (torch.float64, torch.float32, torch.float16),
    torch.float64: (torch.float32, torch.int64),
}
PAIRS = [(dtype, other) for dtype, some in OTHERS.items() for other in some]


@pytest.mark.parametrize(("dtype", "other"), PAIRS)
@pytest.mark.parametrize("autocast", [False, True])
def test_class_weights_of_another_dtype(dtype, other, autocast):
    """PyTorch raises, so the fused program does; autocast makes some of them f32."""

    def program(x, weight, labels, balance):
        return F.cross_entropy(last(F.linear(x, weight)), labels.view(-1), balance)

    def nll(x, weight, labels, balance):
        return F.nll_loss(last(F.linear(x, weight)).log_softmax(-1), labels.view(-1), balance)

    args = *inputs(dtype), WEIGHTS.to(other)
    for each in (program, nll):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            same(each, *args, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("other", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64])
@pytest.mark.parametrize("operand", ["target", "class weights", "weight", "x", "integers"])
def test_operands_of_dtypes_that_have_no_gradient(operand, other):
    """PyTorch raises, makes the loss complex, or multiplies them in its own way."""

    def program(x, weight, soft, balance):
        if operand == "weight":
            x, weight = x.to(torch.float8_e4m3fn), weight.to(other)
        if operand == "integers":
            x, weight = x.long(), weight.long()
        x = x.to(other) if operand == "x" else x
        soft = soft.to(other) if operand == "target" else soft
        balance = balance.to(other) if operand == "class weights" else balance
        logits = last(F.linear(x, weight))
        return F.cross_entropy(logits if logits.is_complex() else logits.float(), soft, balance)

    x, weight, labels = (t.detach() for t in inputs())
    soft = F.one_hot(labels.view(-1), V) * 0.5
    same(program, x, weight, soft, WEIGHTS)


def test_a_narrowing_cast_is_not_repeated():
    """Logits cast to bf16 lose digits in eager; the fused loss is nearer to the exact one."""

    def program(x, weight, narrow=torch.bfloat16):
        return F.cross_entropy(last(F.linear(x, weight)).to(narrow).float(), labels.view(-1))

    x, weight, labels = inputs()
    exact = program(x.double(), weight.double(), torch.float64)
    assert abs(compiled(program)(x, weight) - exact) < abs(program(x, weight) - exact)


def wide(z):
    """f32, or f64 where all is computed in f64."""
    return z.to(torch.promote_types(z.dtype, torch.float32))


# in 16 bits: z [B, S, V], vectors [V] in f32 and in 16 bits, numbers and one per row [B, S, 1] in f32
NARROW = {
    "a constant": lambda z, b, h, s, r: wide(z) * 200,
    "a constant before a function": lambda z, b, h, s, r: torch.tanh(wide(z) / 3) * 3,
    "a constant after a bias": lambda z, b, h, s, r: (wide(z) + b) * 200,
    "a bias taken away": lambda z, b, h, s, r: b - wide(z),
    "a small constant before a bias": lambda z, b, h, s, r: wide(z) * 1e-6 + b,
    "a constant before a bias, both in 16 bits": lambda z, b, h, s, r: z * 0.7 + h,
    "a shift before a bias": lambda z, b, h, s, r: (wide(z) + 3) + b,
    "a factor in f32": lambda z, b, h, s, r: wide(z) * s.exp(),
    "a factor per row in f32": lambda z, b, h, s, r: wide(z) * r,
    "a factor in 16 bits": lambda z, b, h, s, r: z * s,
    "a factor per row in 16 bits": lambda z, b, h, s, r: z * r.to(z.dtype),
    "a temperature after a bias": lambda z, b, h, s, r: (wide(z) + b) / s,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", NARROW)
def test_16_bit_operands(case, dtype):
    """Hidden states of a few hundred: times 200, fp16 cannot hold them."""

    def program(x, weight, vector, narrow, number, rows, labels):
        return loss_of(NARROW[case](F.linear(x, weight), vector, narrow, number, rows), labels)

    x, weight, labels = (t.detach() for t in inputs())
    vector, rows = torch.randn(V), torch.rand(B, S, 1) + 0.5
    tensors = (x * 300).to(dtype), (weight / 300).to(dtype), vector + 20, vector.to(dtype)
    tensors = [t.requires_grad_() for t in (*tensors, torch.tensor(0.7), rows)]
    assert fused_as(program, *tensors, labels) == CLASS_REDUCTIONS
    check(program, labels, *tensors)
