"""Real transformers classes, made from tiny configurations: one match, eager's loss and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch._dynamo.utils import counters

from tests.support.numerics import assert_close

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {
    **{"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 97},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
MODELS = {
    "LlamaForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": {**LLAMA, "head_dim": 16},
    "GPT2LMHeadModel": GPT2,
    "Gemma2ForCausalLM": {**LLAMA, "head_dim": 16},
    "MistralForCausalLM": LLAMA,
    "Phi3ForCausalLM": LLAMA,
    "GraniteForCausalLM": {**LLAMA, "logits_scaling": 4.0},
}


TEXT = {
    **{
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    **{"vocab_size": 97, "max_position_embeddings": 16},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
TOWERS = {"text_config": TEXT, "vision_config": {**TEXT, "image_size": 8, "patch_size": 4}}
PAIRS = {
    "CLIPModel": {**TOWERS, "projection_dim": 24},
    "SiglipModel": {**TOWERS, "text_config": {**TEXT, "projection_size": 32}},
}


def build(name: str) -> torch.nn.Module:
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**(MODELS | PAIRS)[name]))
    for parameter, tensor in model.named_parameters():
        tensor.requires_grad_(not parameter.endswith("k_proj.bias"))  # whose gradient is 0
    return model


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 97, (2, 9))
    labels = ids.clone()
    labels[0, :3] = -100  # a prompt
    return {"input_ids": ids, "labels": labels}


def pairs(count: int = 41) -> dict[str, Any]:
    ids = torch.randint(3, 97, (count, 7))
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": torch.randn(count, 3, 8, 8), "return_loss": True}


def step_of(model):
    def step(**inputs):
        return model(**inputs).loss

    return step


def run(model, step, inputs, autocast: bool) -> list[torch.Tensor]:
    """The loss and every parameter's gradient."""
    model.zero_grad()
    with torch.autocast(inputs["input_ids"].device.type, torch.bfloat16, enabled=autocast):
        loss = step(**inputs)
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None for g in grads)
    return [loss.detach(), *(g.clone() for g in grads)]


def check(name: str, autocast: bool, **settings: str) -> None:
    model, inputs = build(name), batch()
    eager = run(model, step_of(model), inputs, autocast)
    options = {"fusedce.inner": "aot_eager", **settings}
    compiled = torch.compile(step_of(model), backend="fusedce", options=options, fullgraph=True)
    fused = run(model, compiled, inputs, autocast)
    assert counters["fusedce"] == {"matched": 1, "rejected": 0, "casts": 0}
    assert [g.dtype for g in fused] == [g.dtype for g in eager]
    model.double()
    exact = run(model, step_of(model), inputs, autocast=False)
    assert_close(fused, eager, exact, torch.bfloat16 if autocast else torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients(name):
    check(name, autocast=False)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GraniteForCausalLM", "GPT2LMHeadModel"])
def test_under_autocast(name):
    check(name, autocast=True)


@pytest.mark.parametrize("autocast", [False, True], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_texts_and_images(name, autocast, tmp_path):
    """The loss is of the logits of all pairs, which are computed when they are read."""
    model, inputs = build(name), pairs()
    eager = run(model, step_of(model), inputs, autocast)
    compiled, logits = copy.deepcopy(model), []
    options = {"fusedce.inner": "aot_eager", "fusedce.dump": str(tmp_path)}
    compiled.compile(backend="fusedce", options=options)
    compiled.register_forward_hook(lambda _, __, found: logits.append(found.logits_per_image))
    fused = run(compiled, step_of(compiled), inputs, autocast)
    losses = 2 if name == "CLIPModel" else 1
    assert counters["fusedce"] == {"matched": losses, "rejected": 0, "casts": 0}
    [after] = tmp_path.glob("*after*")
    joint = after.read_text().split("\n\n")[-1]
    assert "fxpass.rows" in joint
    assert "[41, 41]" not in joint
    model.double()
    wide = inputs | {"pixel_values": inputs["pixel_values"].double()}
    exact = run(model, step_of(model), wide, autocast=False)
    exact.append(model(**wide).logits_per_image)
    assert_close(
        [*fused, *logits], [*eager, exact[-1]], exact, torch.bfloat16 if autocast else torch.float32
    )


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
def test_with_each_implementation(strategy):
    """The prompt's rows are left out, and the logits are divided."""
    check("GraniteForCausalLM", autocast=False, **{"fusedce.strategy": strategy})


def test_the_whole_model_with_logits_returned():
    """torch.compile(model): the logits are an output, right, and computed once."""
    model, inputs = build("LlamaForCausalLM"), batch()
    eager = model(**inputs)
    compiled = torch.compile(model, backend="fusedce", options={"fusedce.inner": "aot_eager"})
    fused = compiled(**inputs)
    assert counters["fusedce"]["matched"] == 1
    torch.testing.assert_close(fused.logits, eager.logits)
    torch.testing.assert_close(fused.loss, eager.loss)
    grads = []
    for out in (eager, fused):
        model.zero_grad()
        (out.loss + out.logits.square().mean()).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_and_num_items_in_batch():
    model, inputs = build("LlamaForCausalLM"), batch()
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()

    def step(input_ids, labels):
        return model(input_ids=input_ids, labels=labels, num_items_in_batch=torch.tensor(29)).loss

    eager = run(model, step, inputs, autocast=False)
    options = {"fusedce.inner": "aot_eager"}
    fused = run(model, torch.compile(step, backend="fusedce", options=options), inputs, False)
    assert counters["fusedce"]["matched"] == 1
    model.double()
    assert_close(fused, eager, run(model, step, inputs, autocast=False), torch.float32)
