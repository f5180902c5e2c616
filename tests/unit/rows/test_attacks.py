"""Programs that a rule of rows might get wrong: sizes that vary or coincide, functions with a backward
of their own, transforms, and the reasons that a report prints."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpass import messages
from fxpass.rows.backend import RowsPass
from tests.fuzz.small import small
from tests.programs.operands import Sizes
from tests.programs.row import Row
from tests.support.joint import captured
from tests.support.numerics import FLOOR, error


@pytest.fixture(autouse=True)
def chunks():
    with small():
        yield


class Clip(torch.autograd.Function):
    """Not linear in the tangent."""

    @staticmethod
    def forward(ctx, z):
        return z.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.01, 0.01)


class OverTheNorm(torch.autograd.Function):
    """Its backward reads a norm of all rows."""

    @staticmethod
    def forward(ctx, z):
        return z.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm()


class LessTheMean(torch.autograd.Function):
    """Its backward mixes rows."""

    @staticmethod
    def forward(ctx, z):
        return z.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(0)


SCOPE = {"Clip": Clip, "OverTheNorm": OverTheNorm, "LessTheMean": LessTheMean}
LOSS = (
    "F.cross_entropy(z, labels, label_smoothing=0.1) + (z.softmax(-1) * z).sum(-1).square().mean()"
)
PROGRAMS = (
    *(f"F.cross_entropy({name}.apply(z), labels)" for name in SCOPE),
    "F.cross_entropy(z / z.detach().abs().max(), labels)",
    "loss = F.cross_entropy(z, labels, reduction='none'); (loss * (loss / loss.mean())).sum()",
    "loss = F.cross_entropy(z, labels); loss.exp() * F.cross_entropy(F.linear(x * loss, weight), labels)",
    "F.cross_entropy(z[:10], labels[:10]) + z.logsumexp(-1).square().mean()",
    "(z[:10].log_softmax(-1)[:, 3], z.logsumexp(-1), z[5:15].softmax(-1).amax(-1))",
    "z[torch.arange(N), labels - V].tanh() - z.flip(0).logsumexp(-1)",
    "torch.func.grad(lambda x: F.cross_entropy(F.linear(x, weight), labels))(x)",
    "torch.func.vmap(lambda x, y: F.cross_entropy(F.linear(x, weight), y))(x.view(B, T, D), tokens)",
    "checkpoint(lambda x: F.cross_entropy(F.linear(x, weight), labels), x.tanh(), use_reentrant=False)",
    "F.cross_entropy((weight @ x.t()).t(), labels) + z.std(-1).mean()",
)


@pytest.mark.parametrize("way", ["eager", "dynamic"])
@pytest.mark.parametrize("text", PROGRAMS)
def test_values(text, way):
    found = captured(Row("attack", text, scope=SCOPE), way)
    assert not found.wrong
    assert found.calls


def test_a_largest_of_all_rows_with_a_gradient_is_declined():
    """Logits of another pass may differ from it by a bit."""
    found = captured(Row("attack", "F.cross_entropy(z / z.abs().max(), labels)"), "eager")
    assert not found.wrong
    assert not found.calls
    assert messages.COMPARED in found.declined[0]


EQUAL = {
    "as many rows as classes": Sizes(2, 6, 5, 12),
    "as many rows as hidden values": Sizes(2, 4, 8, 33),
    "as many classes as hidden values": Sizes(2, 12, 9, 9),
    "a square": Sizes(3, 3, 9, 9),
    "sequences as long as the batch": Sizes(5, 5, 8, 33),
    "one row": Sizes(1, 1, 8, 33),
    "two classes": Sizes(2, 12, 5, 2),
}


# Each with the gradients of other operands.
TRAINED = (("x", "weight"), ("x",), ("weight",), ())


@pytest.mark.parametrize("i", range(len(EQUAL)), ids=list(EQUAL))
def test_sizes_and_gradients(i):
    sizes, trained = list(EQUAL.values())[i], TRAINED[i % len(TRAINED)]
    text = f"z = z.view(B, T, V).transpose(0, 1).transpose(0, 1).reshape(N, V); {LOSS}"
    found = captured(Row("sizes", text, sizes=sizes, trained=trained), "eager")
    assert not found.wrong
    assert found.calls


# Rows of one head that meet each other.
MEET = (
    "F.kl_div(z[:T].log_softmax(-1), z[T:].softmax(-1), reduction='batchmean')",
    "a, b = z.chunk(2); F.cross_entropy(z, labels) + F.mse_loss(a.softmax(-1), b.softmax(-1))",
    "F.cross_entropy(z - z[:1], labels)",
    "F.cross_entropy(z[1:] - z[:-1], labels[1:])",
    "(z.log_softmax(-1) * z.flip(0).softmax(-1)).sum(-1).mean()",
    "z.roll(1, 0).softmax(-1).square().sum(-1)",
    "(3 * torch.tanh(z / 3))[labels % 7].logsumexp(-1)",
    "z[labels % 7, labels].tanh().sum() + z.logsumexp(-1).mean()",
    "y = z.log_softmax(-1); (y[::2] - y[1::2]).square().sum(-1).mean()",
)


@pytest.mark.parametrize("i", range(len(MEET)))
def test_rows_that_meet(i):
    found = captured(Row("meet", MEET[i]), ("eager", "bf16")[i % 2])
    assert not found.wrong
    assert found.calls
    assert not found.declined


# Sizes that vary: ``x [B, T, D]``, ``y [B, T]``.
VARY = {
    "the last": lambda z, y: z[:, -1].log_softmax(-1).gather(1, y[:, -1:]),
    "from the end": lambda z, y: z[:, -3:-1].logsumexp(-1) * y[:, -3:-1],
    "shifted": lambda z, y: F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    "half": lambda z, y: z[:, : z.shape[1] // 2].logsumexp(-1),
    "every other": lambda z, y: z[:, 1::2].logsumexp(-1),
    "turned": lambda z, y: F.cross_entropy(z.transpose(0, 1).flatten(0, 1), y.t().flatten()),
    "flipped": lambda z, y: F.cross_entropy(z.flip(1).flatten(0, 1), y.flatten()),
    "mean": lambda z, y: z.logsumexp(-1).mean() + z.mean(),
    "index": lambda z, y: z.flatten(0, 1)[y.flatten() % 5].tanh().logsumexp(-1).sum(),
    "less the first": lambda z, y: F.cross_entropy(
        z.flatten(0, 1) - z.flatten(0, 1)[:1], y.flatten()
    ),
}


@pytest.mark.parametrize("rest", VARY.values(), ids=VARY)
def test_sizes_that_vary(rest):
    """A graph that is compiled for some sizes is right for others."""
    rows = RowsPass()
    program = lambda x, weight, y: rest(F.linear(x, weight), y)  # noqa: E731
    torch._dynamo.reset()
    compiled = torch.compile(program, backend=rows.backend(), dynamic=True)
    for b, t in ((4, 6), (6, 4), (2, 10), (8, 12)):
        x, weight = torch.randn(b, t, 8), torch.randn(41, 8)
        y = torch.randint(41, (b, t))
        answers = []
        for function, dtype in (compiled, torch.float32), (program, torch.float64):
            inputs = [v.to(dtype).requires_grad_() for v in (x.clone(), weight.clone())]
            out = function(*inputs, y)
            answers.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        for got, exact in zip(*answers, strict=True):
            assert error(got, exact) < 8 * FLOOR[torch.float32]
    assert rows.made[0].calls
    assert len(rows.made) <= 2


def _rewritten(program, *tensors):
    rows = RowsPass()
    torch._dynamo.reset()
    torch.compile(program, backend=rows.backend())(*tensors)
    [one] = rows.made
    return one


def test_backward_may_run_twice():
    x, weight = torch.randn(24, 8, requires_grad=True), torch.randn(41, 8, requires_grad=True)
    y = torch.randint(41, (24,))
    program = lambda x, w, y: F.cross_entropy(F.linear(x, w), y) ** 2  # noqa: E731
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        out = torch.compile(program, backend=RowsPass().backend())(x, weight, y)
        first = torch.autograd.grad(out, (x, weight), retain_graph=True)
        again = torch.autograd.grad(-3 * out, (x, weight))
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(-3 * a, b)


def test_a_reason_names_the_operation_and_the_lines():
    def program(x, weight):
        z = F.linear(x, weight)
        return torch.cdist(z, z).sum()

    one = _rewritten(program, torch.randn(24, 8), torch.randn(41, 8))
    line = program.__code__.co_firstlineno
    [reason] = one.declined
    assert reason.head.endswith(f"test_attacks.py:{line + 1} z = F.linear(x, weight)")
    assert reason.place.startswith("aten.")
    assert reason.place.endswith(f"test_attacks.py:{line + 2}")
    assert str(reason) == f"{reason.head}: {reason.place} {reason.reason}"


def test_heads_that_are_found():
    def program(x, weight, other, y):
        z = F.linear(x, weight)
        q = F.linear(x, other).softmax(-1)
        return (z.log_softmax(-1) * q).sum() + z[:, 3].sum()

    tensors = torch.randn(24, 8, requires_grad=True), torch.randn(41, 8), torch.randn(41, 8)
    one = _rewritten(program, *tensors, torch.randint(41, (24,)))
    line = program.__code__.co_firstlineno
    # where the region reduces its logits
    assert [head.line.split(":")[1].split()[0] for head in one.heads] == [str(line + 3)] * 2
    assert {(head.rows, head.classes, head.itemsize, head.region) for head in one.heads} == {
        (24, 41, 4, 0)
    }
    assert one.heads[0].ops == ("softmax", "log_softmax", "mul", "sum")
    assert not one.declined
