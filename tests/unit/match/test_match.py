"""Each rule accepts what it should, with eager's numbers, and rejects the rest with a reason."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpass
from fxpass.rewrite.transform import transform
from fxpass.settings import Settings
from fxpass.spec.expression import text
from tests.support.programs import B, D, S, V, check, head_of, inputs, last, reason_of, spec_of

# what stands between linear and loss -> the logits whose softmax is taken: a shift cancels
CHAINS = {
    "view": (lambda z: z.view(-1, V), "z"),
    "view of a tuple": (lambda z: z.view((-1, V)), "z"),
    "view with the rows spelled out": (lambda z: z.view(B * S, -1), "z"),
    "reshape": (lambda z: z.reshape(-1, V), "z"),
    "torch.reshape": (lambda z: torch.reshape(z, (-1, V)), "z"),
    "flatten": (lambda z: z.flatten(0, 1), "z"),
    "flatten by keyword": (lambda z: z.flatten(start_dim=0, end_dim=-2), "z"),
    "torch.flatten": (lambda z: torch.flatten(z, 0, 1), "z"),
    "to three dimensions and back": (lambda z: last(last(z).view(S, B, V)), "z"),
    "float": (lambda z: last(z.float()), "z"),
    "float twice": (lambda z: last(z.float()).float(), "z"),
    "to its dtype": (lambda z: last(z.to(z.dtype)), "z"),
    "contiguous": (lambda z: last(z.contiguous()), "z"),
    "index of everything": (lambda z: last(z[:, :, :]), "z"),
    "slice of all rows": (lambda z: last(z[:, 0:]), "z"),
    "scale": (lambda z: last(z * 0.125), "0.125*z"),
    "scale from the left": (lambda z: last(0.125 * z), "0.125*z"),
    "temperature": (lambda z: last(z / 0.5), "2*z"),
    "shift": (lambda z: last(z - 1 + 3), "z"),
    "square": (lambda z: last(z * z), "z**2"),
    "negation": (lambda z: last(-z), "-z"),
    "subtraction from a number": (lambda z: last(1 - z), "-z"),
    "methods": (lambda z: last(z.mul(2).add(1).sub(3).div(4).neg()), "-0.5*z"),
    "torch functions": (
        lambda z: last(torch.neg(torch.div(torch.sub(torch.add(torch.mul(z, 2), 1), 3), 4))),
        "-0.5*z",
    ),
    "soft-cap": (lambda z: last(30 * torch.tanh(z / 30)), "30*tanh(z/30)"),
    "soft-cap by method": (lambda z: last((z / 30).tanh() * 30), "30*tanh(z/30)"),
    "sigmoid": (lambda z: last(torch.sigmoid(z)), "sigmoid(z)"),
    "sigmoid by method": (lambda z: last(z.sigmoid()), "sigmoid(z)"),
    "alpha": (lambda z: last(torch.add(z, 1, alpha=2)), "z"),
    "clamp": (lambda z: last(z.clamp(-1, 1)), "minimum(maximum(z,-1),1)"),
    "square root of a softplus": (
        lambda z: last(F.softplus(z).sqrt()),
        "sqrt(where(z>20,z,softplus(z)))",
    ),
    "in place": (lambda z: last(z.mul_(2).add_(1)), "2*z"),
    "in place by operator": (lambda z: last(operator.itruediv(z, 2)), "0.5*z"),
    "in place on a view": (lambda z: last(z).mul_(2), "2*z"),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_that_fuses(chain):
    between, expected = CHAINS[chain]

    def program(x, weight, labels):
        return F.cross_entropy(between(F.linear(x, weight)), labels.view(-1))

    x, weight, labels = inputs()
    assert text(spec_of(program, x, weight, labels).transform) == expected
    check(program, labels, x, weight)


def old_shift(x, weight, labels):
    logits = F.linear(x, weight)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, V), labels[..., 1:].contiguous().view(-1))


def old_shift_by_position(x, weight, labels):
    logits = F.linear(x, weight)[:, :-1]
    return F.cross_entropy(logits.reshape(-1, V), labels[:, 1:].reshape(-1))


def new_shift(x, weight, labels):
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(F.linear(x, weight).view(-1, V), shifted.view(-1), ignore_index=-100)


def sum_over_items(x, weight, labels):
    loss = F.cross_entropy(F.linear(x, weight).view(-1, V), labels.view(-1), reduction="sum")
    return loss / torch.tensor(5)


def module(x, weight, labels):
    return nn.CrossEntropyLoss(label_smoothing=0.1)(
        F.linear(x, weight).view(-1, V), labels.view(-1)
    )


def positional(x, weight, labels):
    return F.cross_entropy(
        last(F.linear(x, weight)), labels.view(-1), None, None, 3, None, "sum", 0.1
    )


def class_weights(x, weight, labels):
    return F.cross_entropy(
        last(F.linear(x, weight)), labels.view(-1), torch.linspace(0.5, 2, V).to(x.dtype)
    )


def probabilities(x, weight, labels):
    soft = F.one_hot(labels.view(-1), V).to(x.dtype) * 0.9 + 0.01
    return F.cross_entropy(last(F.linear(x, weight)), soft)


def rowwise(x, weight, labels):
    return (
        F.cross_entropy(last(F.linear(x, weight)), labels.view(-1), reduction="none").square().sum()
    )


def two_losses(x, weight, labels):
    first = F.cross_entropy(last(F.linear(x, weight)), labels.view(-1))
    return first + F.cross_entropy(last(F.linear(x * first, weight)), labels.view(-1))


PROGRAMS = [
    *(old_shift, old_shift_by_position, new_shift, sum_over_items, module, positional),
    *(class_weights, probabilities, rowwise, two_losses),
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_loss_that_fuses(program):
    x, weight, labels = inputs()
    report = fxpass.explain(program, x, weight, labels)
    assert report.matches, str(report)
    assert not report.rejections, str(report)
    check(program, labels, x, weight)


def test_a_bias():
    linear = nn.Linear(D, V)
    x, _, labels = inputs()

    def program(x):
        return F.cross_entropy(last(linear(x)), labels.view(-1))

    assert head_of(program, x).flow.linear.bias is not None
    assert spec_of(program, x).gradients == ("x", "weight", "bias")


def test_only_gradients_that_somebody_needs():
    x, weight, labels = inputs()

    def program(x, weight):
        return F.cross_entropy(last(F.linear(x, weight)), labels.view(-1))

    assert spec_of(program, x, weight.detach()).gradients == ("x",)
    assert spec_of(program, x.detach(), weight).gradients == ("weight",)
    with torch.no_grad():
        assert spec_of(program, x, weight).gradients == ()


def test_sizes_may_be_read():
    x, weight, labels = inputs()

    def program(x, weight, labels):
        logits = F.linear(x, weight)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1)) * logits.size(0)

    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(labels, 0)
    head_of(program, x, weight, labels)


# ---------------------------------------------------------------- rejections


def loss_of(between, labels=lambda t: t.view(-1), **options):
    """A program with ``between`` on the way from the linear to the loss."""

    def program(x, weight, target):
        return F.cross_entropy(between(F.linear(x, weight)), labels(target), **options)

    return program


REJECTED = {
    "unknown function": (loss_of(lambda z: last(torch.cumsum(z, -1))), "is not known"),
    "unknown method": (loss_of(lambda z: last(z.softmax(-1))), "is not known"),
    "dropout": (loss_of(lambda z: last(F.dropout(z, 0.1))), "is not known"),
    "rounding division": (loss_of(lambda z: last(z.div(2, rounding_mode="floor"))), "rounding"),
    "an infinite constant": (loss_of(lambda z: last(z * float("inf"))), "finite constants"),
    "constant logits": (loss_of(lambda z: last(z * 0)), "they cancel"),
    "random in place": (loss_of(lambda z: last(z.bernoulli_())), "is not known"),
    "float64": (loss_of(lambda z: last(z).double()), "float64"),
    "deprecated reduce": (loss_of(last, reduce=True), "deprecated"),
    "no linear": (
        lambda x, w, t: F.cross_entropy(last(F.embedding(t % S, x[0])), t.view(-1) % D),
        "is not known",
    ),
    "logits from outside": (
        lambda x, w, t: F.cross_entropy(x.view(-1, D), t.view(-1) % D), "graph break"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize("case", REJECTED)
def test_a_program_that_does_not_fuse(case):
    program, reason = REJECTED[case]
    said = reason_of(program, *inputs())
    assert reason in said
    assert "test_match.py" in said


def test_a_target_that_needs_a_gradient():
    x, weight, _ = inputs()
    soft = torch.rand(B * S, V, requires_grad=True)
    program = loss_of(last, lambda t: t)
    assert "needs a gradient; detach" in reason_of(program, x, weight, soft)


def test_class_weights_that_need_a_gradient():
    x, weight, labels = inputs()
    balance = torch.rand(V, requires_grad=True)

    def program(x, weight, balance):
        return F.cross_entropy(
            last(F.linear(x, weight)), F.one_hot(labels.view(-1), V).float(), balance
        )

    assert "class weights need a gradient" in reason_of(program, x, weight, balance)


def test_a_writer_of_the_logits():
    def program(x, weight, labels):
        logits = F.linear(x, weight)
        logits[0] = 0
        return F.cross_entropy(last(logits), labels.view(-1))

    assert "(setitem) may write to the logits" in reason_of(program, *inputs())


@pytest.mark.parametrize("operand", ["x", "weight", "a view of x"])
def test_an_operand_that_changes_before_the_loss(operand):
    """The linear would move down past the change and see other values."""

    def program(x, weight, labels):
        x, weight = x * 1, weight * 1
        logits = F.linear(x, weight)
        {"x": x, "weight": weight, "a view of x": x[0]}[operand].mul_(2)
        return F.cross_entropy(last(logits), labels.view(-1))

    x, weight, labels = inputs()
    assert "in place between the linear and the loss" in reason_of(
        program, x.detach(), weight.detach(), labels
    )


def test_a_change_of_another_tensor_is_no_hindrance():
    def program(x, weight, labels):
        logits = F.linear(x, weight)
        other = torch.zeros(3)
        other.add_(1)
        return F.cross_entropy(last(logits), labels.view(-1)) * other.sum()

    head_of(program, *inputs())


def test_a_write_to_what_cannot_be_compared():
    """Inside vmap a tensor shows no storage, so it counts as an alias."""

    def program(x, weight, labels, other):
        logits = F.linear(x, weight)
        doubled = torch.func.vmap(lambda row: row.clone().mul_(2))(other)
        return F.cross_entropy(last(logits), labels.view(-1)) * doubled.sum()

    assert "may change %clone in place" in reason_of(program, *inputs(), torch.ones(3, 3))


def test_integer_hidden_states():
    def program(x, weight, labels):
        return F.cross_entropy(last(F.linear(x, weight)).float(), labels.view(-1))

    _, weight, labels = inputs()
    integers = torch.ones(B, S, D, dtype=torch.int64)
    said = reason_of(program, integers, weight.detach().long(), labels)
    assert "torch.int64, not floating point" in said


def test_a_narrowing_cast_is_not_repeated():
    """Logits cast to bf16 lose digits in eager; the fused loss is nearer to the exact one."""

    def program(x, weight, narrow=torch.bfloat16):
        return F.cross_entropy(last(F.linear(x, weight)).to(narrow).float(), labels.view(-1))

    x, weight, labels = inputs()
    exact = program(x.double(), weight.double(), torch.float64)
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})(x, weight)
    assert abs(fused - exact) < abs(program(x, weight) - exact)


def test_logits_too_small_to_matter():
    x, weight, labels = inputs()
    graphs = []
    program = loss_of(last)
    torch.compile(program, backend=lambda gm, _: graphs.append(gm) or gm)(x, weight, labels)
    outcome = transform(graphs[0], Settings(min_logits_mb=1))
    assert "KiB, fewer than 1 MiB (FUSEDCE_MIN_LOGITS_MB=0" in outcome.rejections[0].reason
    outcome = transform(graphs[0], Settings(min_logits_mb=1e-4))
    assert "logits take hardly more memory" in outcome.rejections[0].reason
    assert len(transform(graphs[0], Settings(min_logits_mb=0)).heads) == 1


def test_a_product_that_is_no_linear_is_no_head(monkeypatch):
    """With the default threshold, linears that are not fused are examined for heads."""

    def program(x, weight, labels):
        scores = torch.einsum("bsd,btd->bst", x, x)
        return F.cross_entropy(last(F.linear(x, weight)), labels.view(-1)) + scores.sum()

    monkeypatch.setenv("FUSEDCE_MIN_LOGITS_MB", "64")
    assert "fewer than 64 MiB" in reason_of(program, *inputs())


class Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, labels):
        ctx.save_for_backward(x, weight)
        return loss_inside(x, weight, labels)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * x, grad * weight, None


def loss_inside(x, weight, labels):
    return F.cross_entropy(last(F.linear(x, weight)), labels.view(-1))


NESTED = {
    "cond": lambda *args: torch.cond(args[0].sum() > 0, loss_inside, loss_inside, args),
    "autograd_function_apply": Written.apply,
}


@pytest.mark.parametrize("call", NESTED)
def test_a_loss_in_a_nested_graph(call):
    """It has the line of the loss, and is compiled by the inner backend."""

    def program(x, weight, labels):
        return NESTED[call](x, weight, labels)

    args = inputs()
    report = fxpass.explain(program, *args)
    assert not report.matches
    assert len(report.rejections) == (2 if call == "cond" else 1)
    for rejection in report.rejections:
        assert f"inside %{call} ({call}); of nested graphs, only" in rejection.reason
        assert "return F.cross_entropy(last(F.linear(x, weight))" in rejection.source
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "aot_eager"})
    torch.testing.assert_close(fused(*args), program(*args))
