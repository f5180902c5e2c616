"""Real PEFT adapters on attention and on the head: eager's losses and gradients.

The adapters are f32 whatever the base model is: autocast or PEFT's own casts stand between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.libraries.test_liger import NON_LEAF, batch, patched
from tests.support import tiny
from tests.support.numerics import assert_close
from tests.support.training import exact, loss_and_gradients, trained

pytestmark = [
    # peft's own, and that of the name which most training scripts still call, on this transformers
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning"),
]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
STEPS = 5

ATTENTION: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
SAVED_HEAD: dict[str, Any] = {**ATTENTION, "modules_to_save": ["lm_head"]}
LOW_RANK_HEAD: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "lm_head"]}

FUSED = {"matched": 1, "rejected": 0}


def adapted(
    targets: dict[str, Any], dtype: torch.dtype = F32, dropout: float = 0.0
) -> peft.PeftModel:
    """A Llama of ``dtype`` with adapters whose B is not zero, as after some steps."""
    base = tiny.llama()
    if dtype == BF16:
        base.bfloat16()
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=8,
        lora_dropout=dropout,
        init_lora_weights=False,
        **targets,
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(base, config)
    assert isinstance(model, peft.PeftModel)
    return model.train()


def whole(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="fusedce", options={"fusedce.inner": "eager"})


def step(model: nn.Module) -> Callable[..., Any]:
    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=input_ids, labels=labels).loss

    return torch.compile(step, backend="fusedce", options={"fusedce.inner": "eager"})


def base_in_place(model: peft.PeftModel) -> nn.Module:
    model.get_base_model().compile(backend="fusedce", options={"fusedce.inner": "eager"})
    return model


both_forms = pytest.mark.parametrize("form", [whole, step])


def check(model: nn.Module, form: Callable, autocast: torch.dtype | None) -> None:
    """The compiled model against eager; gradients in the dtype of their parameters."""
    inputs = batch()

    def run(compute: Callable[..., list[Tensor]], *args: Any) -> list[Tensor]:
        torch.manual_seed(2)  # the same numbers are dropped
        return compute(model, inputs, *args)

    true, eager = run(exact), run(loss_and_gradients, autocast)
    fused = run(loss_and_gradients, autocast, form(model))
    assert [g.dtype for g in fused] == [F32, *(p.dtype for p in trained(model).values())]
    assert_close(fused, eager, true, autocast or BF16)
    assert not counters["fusedce"]["casts"]  # those of autocast are left to it


def outcome() -> dict[str, int]:
    return {name: counters["fusedce"][name] for name in ("matched", "rejected")}


# ---------------------------------------------------------------- f32 under bf16 autocast


@both_forms
def test_adapters_of_attention(form):
    model = adapted(ATTENTION)
    assert not [name for name in trained(model) if "lm_head" in name]
    check(model, form, BF16)
    assert outcome() == FUSED


def test_a_trained_copy_of_the_head():
    model = adapted(SAVED_HEAD)
    assert len([name for name in trained(model) if "lm_head.modules_to_save" in name]) == 1
    check(model, whole, BF16)
    assert outcome() == FUSED


@pytest.mark.parametrize("dropout", [0.3, 0.0])
def test_a_low_rank_head_is_a_row_region(dropout, caplog):
    """base(x) + scale·B(A(dropout(x))): the logits of two linears."""
    caplog.set_level(logging.INFO, logger="fxpass")
    model = adapted(LOW_RANK_HEAD, dropout=dropout)
    assert len([name for name in trained(model) if "lm_head.lora" in name]) == 2
    check(model, step, BF16)
    assert outcome() == FUSED
    assert "region of 2 heads" in caplog.text


def test_the_logits_of_a_low_rank_head_leave(caplog):
    """A model that returns them defers them."""
    caplog.set_level(logging.INFO, logger="fxpass")
    check(adapted(LOW_RANK_HEAD, dropout=0.3), whole, BF16)
    assert outcome() == FUSED
    assert "(logits deferred" in caplog.text


def test_ligers_patch_leaves_out_the_adapters_of_the_head(device):
    """Why a low-rank head is not to be patched: it reads ``lm_head.weight``, which is the base's."""
    with device:
        model = adapted(LOW_RANK_HEAD)
    base = model.get_base_model()
    assert isinstance(base, LlamaForCausalLM)
    patched(base)
    with pytest.raises(AssertionError, match=r"no gradient for \[.*lm_head\.lora_A"):
        loss_and_gradients(model, batch(device), BF16)


# ---------------------------------------------------------------- checkpoints


def checkpointed(use_reentrant: bool, **targets: Any) -> peft.PeftModel:
    model = adapted({**ATTENTION, **targets})
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
    )
    (layer,) = [m for m in model.modules() if isinstance(m, LlamaDecoderLayer)]
    assert layer.gradient_checkpointing
    return model


@both_forms
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant, form):
    # what goes into a layer has to need a gradient for the one kind: that of new words does
    model = checkpointed(use_reentrant, modules_to_save=["embed_tokens"])
    model.disable_input_require_grads()
    check(model, form, BF16)
    assert outcome() == FUSED
    assert counters["stats"]["unique_graphs"] == 1


@NON_LEAF
def test_gradient_checkpointing_of_frozen_embeddings():
    """A hook makes them need one, as transformers makes them: Dynamo breaks the graph there."""
    model = checkpointed(use_reentrant=True)
    model.enable_input_require_grads()
    check(model, base_in_place, BF16)
    assert outcome() == FUSED
    assert counters["stats"]["unique_graphs"] > 1


# ---------------------------------------------------------------- a 16-bit base without autocast


@pytest.mark.parametrize(
    "targets", [SAVED_HEAD, LOW_RANK_HEAD], ids=["saved head", "low-rank head"]
)
def test_f32_adapters_on_a_bf16_base(targets):
    """PEFT casts what goes into its adapters and what comes out: nothing is left to cast."""
    model = adapted(targets, BF16)
    dtypes = {name: p.dtype for name, p in trained(model).items()}
    assert {dtype for name, dtype in dtypes.items() if "lora" in name} == {F32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {BF16}
    check(model, whole, None)
    assert outcome() == FUSED


# ---------------------------------------------------------------- fp16 and a GradScaler


def train(model: nn.Module, call: Callable[..., Any] | None) -> list[float]:
    """The losses of some steps, none of which the scaler skips."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    optimizer = torch.optim.SGD(trained(model).values(), lr=1.0)
    torch.manual_seed(0)
    inputs, losses = batch(), []
    for _ in range(STEPS):
        loss, *gradients = loss_and_gradients(model, inputs, F16, call, scaler)
        assert {gradient.dtype for gradient in gradients} == {F32}
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert scaler.get_scale() == 2.0 ** (12 + STEPS // 2)
    return losses


def test_fp16_with_a_gradscaler():
    model = adapted(SAVED_HEAD)
    losses = train(model, whole(model))
    assert counters["fusedce"] == {**FUSED, "casts": 0}
    expected = train(adapted(SAVED_HEAD), None)
    # a rounding of a logit is 2**-11 of it; eager also rounds the gradient of the head
    assert losses == pytest.approx(expected, rel=2**-10)
    assert expected[-1] < expected[0] - 0.1
    model, inputs = adapted(SAVED_HEAD), batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    fused = loss_and_gradients(model, inputs, F16, whole(model), scaler)
    eager = loss_and_gradients(model, inputs, F16, None, scaler)
    assert_close(fused, eager, exact(model, inputs), F16)
