"""A real model at default settings: which losses are fused, and what is left alone, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

import fxpass
from fxpass.deferred.tensor import DeferredLogits
from fxpass.settings import Settings
from tests.support.numerics import assert_close

LARGE = 33_000  # classes; 512 rows of them in f32 are the default's 64 MiB and a little more
AOT = {"fusedce.inner": "aot_eager"}  # what Inductor needs half a minute to compile


def llama(classes: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=classes,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def tokens(classes: int, sequences: int = 2) -> torch.Tensor:
    return torch.randint(classes, (sequences, 256))


def trained(model, call, ids, autocast: bool = False) -> list[torch.Tensor]:
    """The loss and every parameter's gradient of the whole model's call."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = call(input_ids=ids, labels=ids)
    out.loss.backward()
    return [out.loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_nothing_is_set():
    assert Settings.read() == Settings()


def test_training_with_inductor():
    """The whole model, as a trainer calls it; its logits are those of before the step."""
    model, ids = llama(LARGE), tokens(LARGE)
    eager, logits = trained(model, model, ids), model(input_ids=ids).logits.detach()
    compiled = torch.compile(model, backend="fusedce")
    fused = trained(model, compiled, ids)
    assert counters["fusedce"] == {"matched": 1, "rejected": 0, "casts": 0}
    out = compiled(input_ids=ids, labels=ids)
    assert isinstance(out.logits, DeferredLogits)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    torch.testing.assert_close(out.logits.detach(), logits)
    model = llama(LARGE).double()
    assert_close(fused, eager, trained(model, model, ids), torch.float32)


def test_training_under_autocast():
    """bf16 logits take half the bytes, so twice the rows are as large."""
    model = llama(LARGE)
    compiled = torch.compile(model, backend="fusedce", options=AOT)
    for sequences, fused in ((2, False), (4, True)):
        counters.clear()
        torch._dynamo.reset()
        ids = tokens(LARGE, sequences)
        got = trained(model, compiled, ids, autocast=True)
        assert counters["fusedce"]["matched"] == fused
        eager = trained(model, model, ids, autocast=True)
        exact = llama(LARGE).double()
        assert_close(got, eager, trained(exact, exact, ids), torch.bfloat16)


def test_evaluation():
    """Without gradients the logits are returned, and the loss is computed from them."""
    model, ids = llama(LARGE).eval(), tokens(LARGE)
    compiled = torch.compile(model, backend="fusedce", options=AOT)
    with torch.no_grad():
        eager, out = model(input_ids=ids, labels=ids), compiled(input_ids=ids, labels=ids)
    assert not counters["fusedce"]["matched"]
    assert type(out.logits) is torch.Tensor
    torch.testing.assert_close(out.loss, eager.loss)
    torch.testing.assert_close(out.logits, eager.logits)


def test_a_small_model_is_the_inner_backends():
    """Not a bit and not a node is another one; explain says why."""
    model, ids = llama(1000), tokens(1000)
    fused = trained(model, torch.compile(model, backend="fusedce", options=AOT), ids)
    assert counters["fusedce"]["matched"] == 0
    torch._dynamo.reset()
    inner = trained(model, torch.compile(model, backend="aot_eager"), ids)
    assert all(map(torch.equal, fused, inner))
    report = fxpass.explain(model, input_ids=ids, labels=ids)
    assert report.before == report.after
    (rejection,) = report.rejections
    assert "FUSEDCE_MIN_LOGITS_MB=0 fuses all" in rejection.reason


@pytest.mark.parametrize("where", ["in the graph", "behind the call"])
def test_accuracy_beside_the_loss(where):
    """In the graph one call computes both; behind the call, a program computes the accuracy."""
    model, ids = llama(LARGE), tokens(LARGE)

    def step(ids):
        out = model(input_ids=ids, labels=ids)
        return out.loss, out.logits.argmax(-1).eq(ids).float().mean()

    def whole(ids):
        out = compiled(input_ids=ids, labels=ids)
        return out.loss, out.logits.argmax(-1).eq(ids).float().mean()

    inside = where == "in the graph"
    compiled = torch.compile(step if inside else model, backend="fusedce", options=AOT)
    got = compiled(ids) if inside else whole(ids)
    assert counters["fusedce"]["matched"] == (1 if inside else 2)
    torch.testing.assert_close(got, step(ids))
