"""Logits that calls of one nested region (``nested_compile_region``) return, reduced outside."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxpass import testing

N, D, V = 12, 8, 67
nested: Any = torch.compiler.nested_compile_region
OPTIONS: dict[str, Any] = {"fusedce.min_logits_mb": 0, "fusedce.inner": "aot_eager"}


def operands(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Two hidden states [N, D], two weights [V, D]; labels [N]."""
    random = torch.Generator().manual_seed(0)
    shapes = (N, D), (N, D), (V, D), (V, D)
    made = [torch.randn(s, generator=random, dtype=dtype).requires_grad_() for s in shapes]
    return [*made, torch.randint(V, (N,), generator=random)]


def lines(program: Any, *tensors: Tensor) -> str:
    """The rewritten graph, without the region's text."""
    torch._dynamo.reset()
    text = testing.rewritten(program, *(tensors or operands()))
    return re.sub(r"region='.*?'", "region", text)


def is_fused(program: Any, *tensors: Tensor) -> bool:
    text = lines(program, *tensors)
    calls = len(re.findall(r"= fxpass\.row_region\(", text))
    assert calls in (0, 1)
    if calls:
        assert "invoke_subgraph" not in text
        assert "= linear(" not in text
        assert not re.search(rf"\[{N}, {V}\]", text)
    return calls == 1


def check(program: Any, tolerance: float = 1e-9, dynamic: bool | None = None) -> None:
    """Asserts that values and gradients are eager's."""
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="fusedce", options=OPTIONS, dynamic=dynamic)
    results = []
    for function in (program, compiled):
        *trained, labels = operands()
        made = function(*trained, labels)
        outputs = [made] if isinstance(made, Tensor) else list(made)
        if sums := [t.sum() for t in outputs if t.requires_grad]:
            outputs += torch.autograd.grad(sums, trained, materialize_grads=True)
        results.append(outputs)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def kl(one: Tensor, other: Tensor) -> Tensor:
    p, q = one.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


@nested
def head(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


@nested
def capped(x: Tensor, weight: Tensor) -> Tensor:
    """The result is a view of what the nested graph makes, and changes in place there."""
    z = F.linear(x, weight).unsqueeze(0)
    z.div_(30)
    z[..., 3] = -1.0
    return (30 * torch.tanh(z)).view(-1, V)


@nested
def with_hidden(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, weight), x.sin()


# ---------------------------------------------------------------- fused


def r_drop(x, y, weight, other, labels):
    one, two = head(x, weight), head(x * 0.5, weight)
    return kl(one, two) + kl(two, one)


def distilled(x, y, weight, other, labels):
    student, teacher = capped(x, weight), capped(y, other).detach()
    return kl(teacher / 2, student / 2)


def one_reads_another(x, y, weight, other, labels):
    one, hidden = with_hidden(x, weight)
    two, hidden = with_hidden(hidden, other)
    return kl(one, two) + hidden.sum()


def viewed_and_written(x, y, weight, other, labels):
    """Later views of a result are aliases of the node that takes its place."""
    one, two = head(x, weight) * 1, head(y, weight)
    part = two.detach()[:, :5]
    before = (two * 1).amax(-1)
    part.mul_(2)
    return (one - two).square().sort(-1).values[:, :9].sum() + before.sum()


def returned_as_well(x, y, weight, other, labels):
    one, two = head(x, weight), head(y, weight)
    return kl(one, two), one


def in_a_checkpoint(x, y, weight, other, labels):
    return checkpoint(r_drop, x, y, weight, other, labels, use_reentrant=False)


def beside_a_checkpoint(x, y, weight, other, labels):
    one, two = head(x, weight), head(y, weight)
    three = checkpoint(F.linear, y, other, use_reentrant=False)
    return kl(one, two) + kl(one, three)


@pytest.mark.parametrize(
    "program",
    [r_drop, distilled, one_reads_another, returned_as_well, in_a_checkpoint, beside_a_checkpoint],
    ids=lambda f: f.__name__,
)
def test_calls_of_one_nested_region_are_fused(program):
    assert "invoke_subgraph" in testing.original(program, *operands())
    assert is_fused(program)
    check(program)


def test_a_view_of_a_result_is_written():
    assert not is_fused(viewed_and_written)
    check(viewed_and_written)


def test_losses_with_a_formula():
    def program(x, y, weight, other, labels):
        one, two = (F.cross_entropy(head(t, weight), labels) for t in (x, y))
        return one + two

    text = lines(program)
    assert text.count("= fxpass.class_reductions(") == 2
    assert "invoke_subgraph" not in text
    check(program)


@torch.compiler.nested_compile_region
def loss(x, weight, labels):
    return F.cross_entropy(F.linear(x, weight), labels)


@torch.compiler.nested_compile_region
def spread(x, weight):
    return F.linear(x, weight).sort(-1).values[..., :40].logsumexp(-1)


def test_losses_inside():
    def program(x, y, weight, other, labels):
        return loss(x, weight, labels) + loss(y, weight, labels)

    text = lines(program)
    assert text.count("= fxpass.class_reductions(") == 2
    assert "invoke_subgraph" not in text
    check(program)


def test_row_regions_inside():
    def program(x, y, weight, other, labels):
        return (spread(x, weight) - spread(y, weight)).square().mean()

    text = lines(program)
    assert text.count("= fxpass.row_region(") == 2
    assert "invoke_subgraph" not in text
    check(program)


@pytest.mark.parametrize("dynamic", [True, None])
def test_symbolic_sizes(dynamic):
    check(r_drop, dynamic=dynamic)
    tensors = operands()
    for tensor in (tensors[0], tensors[1], tensors[4]):
        torch._dynamo.mark_dynamic(tensor, 0)
    assert is_fused(one_reads_another, *tensors)


def test_other_shapes():
    def program(x, y, weight, other, labels):
        one, two, three = head(x, weight), head(y[:5], weight), head(y[5:10], weight)
        return kl(one[:5], two) + kl(two, three)

    check(program)


def test_autocast():
    def program(x, y, weight, other, labels):
        with torch.autocast("cpu", torch.bfloat16):
            one, two = head(x, weight), head(y, weight)
        assert one.dtype == torch.bfloat16
        return kl(one.float(), two.float())

    tensors = operands(torch.float32)
    assert is_fused(program, *tensors)
    fused = torch.compile(program, backend="fusedce", options=OPTIONS)
    results = [
        [f(*tensors), *torch.autograd.grad(f(*tensors), tensors[:3])] for f in (program, fused)
    ]
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


# ---------------------------------------------------------------- what stays


def mixes_rows(x, y, weight, other, labels):
    one, two = head(x, weight), head(y, weight)
    return (one.cumsum(0) * two.cumsum(0)).square().mean()


@nested
def written(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.mul_(2), weight)


def writes_its_input(x, y, weight, other, labels):
    """Where nothing is trained: torch does not train such a nested region."""
    with torch.no_grad():
        x, y = x * 1, y * 1
        return kl(written(x, weight), written(y, weight)) + x.sum() + y.sum()


@nested
def switched(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.norm()
    return F.linear(x / scale, weight)


def switches_gradients(x, y, weight, other, labels):
    return kl(switched(x, weight), switched(y, weight))


@pytest.mark.parametrize(
    "program",
    [mixes_rows, writes_its_input, switches_gradients],
    ids=lambda f: f.__name__,
)
def test_what_stays_as_it_is(program):
    torch._dynamo.reset()
    before = testing.original(program, *operands())
    assert "invoke_subgraph" in before
    assert lines(program) == before
    check(program)


@nested
def dropped(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.dropout(x), weight)


def test_random_numbers_are_drawn_where_they_are(caplog):
    def program(x, y, weight, other, labels):
        return kl(dropped(x, weight), dropped(x, weight))

    with caplog.at_level(logging.DEBUG, "fxpass"):
        assert "= invoke_subgraph(" in lines(program)
    assert "the nested region stays: it draws random numbers" in caplog.text


@nested
def hidden_layer(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight).relu() @ weight


def test_only_the_regions_that_are_fused_are_inlined():
    def program(x, y, weight, other, labels):
        x, y = hidden_layer(x, other), hidden_layer(y, other)
        return kl(head(x, weight), head(y, weight))

    text = lines(program)
    assert text.count("= fxpass.row_region(") == 1
    assert text.count("= invoke_subgraph(") == 2
    check(program)


@nested
def with_loss(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    z = F.linear(x, weight)
    return F.cross_entropy(z, labels), z


def test_a_loss_inside_beside_logits_that_leave():
    def program(x, y, weight, other, labels):
        (loss, one), (more, two) = with_loss(x, weight, labels), with_loss(y, weight, labels)
        return loss + more + kl(one, two)

    text = lines(program)
    assert "= fxpass.row_region(" in text
    assert "= linear(" not in text
    assert "= invoke_subgraph(" not in text
    check(program)
