"""Fused losses by name: eager's values and gradients, without logits; in compiled code, too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fxpass
import fxpass.functional
from fxpass import messages, testing
from tests.support.made import Made
from tests.support.numerics import assert_as_accurate
from tests.support.reported import NON_LEAF

N, D, V = 40, 16, 300
LOSSES = {
    "mean": {},
    "ignored": {"ignore_index": 3, "reduction": "sum"},
    "smoothed": {"label_smoothing": 0.1, "reduction": "none"},
    "weighted": {"weight": torch.linspace(0.5, 1.5, V)},
}


def operands(dtype=torch.float32, n=N):
    torch.manual_seed(0)
    x, weight = torch.randn(2, n // 2, D), torch.randn(V, D) * 0.3
    labels = torch.randint(V, (2, n // 2))
    labels[0, :5] = 3
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def eager(x, head, labels, **options):
    z = F.linear(x, head)
    z = z if z.dtype == torch.float64 else z.float()
    options |= {"weight": options["weight"].to(z.dtype)} if "weight" in options else {}
    return F.cross_entropy(z.flatten(0, -2), labels.flatten(), **options)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy(name, dtype):
    x, weight, labels = operands(dtype)
    options = LOSSES[name]

    def plain(x, weight):
        return eager(x, weight, labels, **options).sin().mean()

    def fused(x, weight):
        loss = fxpass.linear_cross_entropy(x, weight, labels, **options)
        assert loss.shape == (labels.shape if name == "smoothed" else ())
        return loss.sin().mean()

    assert_as_accurate(fused, plain, [x, weight], dtype)


def test_probabilities_and_a_bias():
    x, weight, _ = operands()
    bias, soft = torch.randn(V, requires_grad=True), torch.rand(2, N // 2, V)

    def plain(x, weight, bias):
        z = F.linear(x, weight, bias)
        return F.cross_entropy(z.flatten(0, 1), soft.flatten(0, 1).to(z.dtype))

    def fused(x, weight, bias):
        return fxpass.linear_cross_entropy(x, weight, soft, linear_bias=bias)

    assert_as_accurate(fused, plain, [x, weight, bias], torch.float32)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs(temperature):
    x, weight, labels = operands()

    def plain(x, weight):
        z = F.linear(x, weight) / temperature
        return z.log_softmax(-1).gather(-1, labels[..., None])[..., 0].sin().mean()

    def fused(x, weight):
        return fxpass.linear_log_probs(x, weight, labels, temperature=temperature).sin().mean()

    assert_as_accurate(fused, plain, [x, weight], torch.float32)
    with pytest.raises(ValueError, match=messages.fixed(messages.TEMPERATURE)):
        fxpass.linear_log_probs(x, weight, labels, temperature=0.0)


@NON_LEAF
def test_mixed_dtypes_under_autocast():
    x, weight, labels = operands()
    with torch.autocast("cpu", torch.bfloat16):
        loss = fxpass.linear_cross_entropy(x.bfloat16(), weight, labels)
    loss.backward()
    assert loss.dtype == torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    expected = F.cross_entropy(
        (x.bfloat16() @ weight.bfloat16().T).float().flatten(0, 1), labels.flatten()
    )
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)


@pytest.mark.parametrize("name", fxpass.functional.__all__)
def test_the_logits_never_exist(name):
    x, weight, labels = operands(n=400)
    run = getattr(fxpass, name)
    run(x, weight, labels).mean().backward()  # compiles it
    with Made() as made:
        run(x, weight, labels).mean().backward()
    assert made.names["fxpass::rows"] in (1, 2)
    assert not made.large(400 * V)


def test_any_number_of_rows():
    """More sizes than torch recompiles a function for."""
    for n in range(2, 2 * torch._dynamo.config.recompile_limit + 6, 2):
        x, weight, labels = operands(n=n)
        loss = fxpass.linear_cross_entropy(x, weight, labels)
        torch.testing.assert_close(loss, eager(x, weight, labels))


@NON_LEAF
def test_one_row():
    x, weight, labels = operands()
    one = x[0, 7], weight, labels[0, 7]
    torch.testing.assert_close(fxpass.linear_cross_entropy(*one), -fxpass.linear_log_probs(*one))


def test_in_a_compiled_function():
    def loss(x, weight, labels):
        probs = fxpass.linear_log_probs(x, weight, labels)
        return fxpass.linear_cross_entropy(x, weight, labels) + probs.exp().mean()

    given = operands()
    testing.assert_fused(loss, *given, losses=2)
    options = {"fusedce.inner": "aot_eager", "fusedce.min_logits_mb": 0}
    got = torch.compile(loss, backend="fusedce", options=options, fullgraph=True)(*given)
    torch.testing.assert_close(got, loss(*given))


def test_what_does_not_fit_raises():
    x, weight, labels = operands()
    with pytest.raises(Exception, match="out of bounds"):
        fxpass.linear_cross_entropy(x, weight, labels.masked_fill(labels == 3, V))
    with pytest.raises(Exception, match="reduction"):
        fxpass.linear_cross_entropy(x, weight, labels, reduction="avg")
    with pytest.raises(Exception, match=r"size|shape"):
        fxpass.linear_cross_entropy(x, weight, labels[:, 1:])
