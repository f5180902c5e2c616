"""Liger and transformers.Trainer: bf16 autocast over f32 parameters, in Llama's and Qwen2's classes.

What was ``mat1 and mat2 must have the same dtype, but got BFloat16 and Float`` in Liger's fused loss:
an operator that is not on autocast's list meets bf16 hidden states (or gradients) and an f32 weight.
Liger 0.8.5 casts by hand where it is called under autocast; without autocast it still raises, and so
does PyTorch's own chunked loss either way.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import liger_kernel.transformers.functional
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)
from transformers.integrations.liger import apply_liger_kernel

from tests.libraries.test_trainers import Recorder, logged, trainer
from tests.support import numerics, tiny
from tests.support.numerics import assert_close
from tests.support.training import exact, loss_and_gradients, trained

F32, BF16 = torch.float32, torch.bfloat16
STEPS, BATCH, ACCUMULATE, LENGTH = 10, 4, 2, 12
ODD = tiny.V + 11

# torch's own words, on the CPU and on CUDA
MISMATCH = re.escape("to have the same dtype, but got: c10::BFloat16 != float")


def llama() -> LlamaForCausalLM:
    return tiny.llama()


def qwen2() -> Qwen2ForCausalLM:
    """Of the Llama's sizes; its attention has biases."""
    like = tiny.llama().config
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
    heads = ("num_attention_heads", "num_key_value_heads")
    tokens = ("pad_token_id", "bos_token_id", "eos_token_id")
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(**{key: getattr(like, key) for key in (*sizes, *heads, *tokens)})
    )


def compiled(model: PreTrainedModel, inner: str = "eager") -> PreTrainedModel:
    model.compile(backend="fusedce", options={"fusedce.inner": inner})
    return model


def batch(device: torch.device | None = None) -> dict[str, Tensor]:
    """Ids [2, 9] and labels, of which a prompt is ignored."""
    ids = torch.randint(len(tiny.SPECIAL), tiny.V, (2, 9), device=device)
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


# ---------------------------------------------------------------- the Trainer


def frozen(model: PreTrainedModel) -> None:
    model.lm_head.weight.data *= 3  # a trained one is larger than a new one: there is more to learn
    model.lm_head.requires_grad_(False)


def trained_and_resized(model: PreTrainedModel) -> None:
    """An odd number of classes, some of them new."""
    model.resize_token_embeddings(ODD)
    assert model.lm_head.weight.shape[0] == ODD


def tied_and_resized(model: PreTrainedModel) -> None:
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.resize_token_embeddings(ODD)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.lm_head.weight.shape[0] == ODD


def tied_and_resized_without_layers(model: PreTrainedModel) -> None:
    """Embeddings, norm and head, which are quickly compiled."""
    tied_and_resized(model)
    del model.model.layers[:]


class Gradients(TrainerCallback):
    """Those of the first step, as the optimizer finds them."""

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if not self.first:
            named = kwargs["model"].named_parameters()
            self.first = {n: p.grad.clone() for n, p in named if p.grad is not None}


def train(
    model: PreTrainedModel, folder: Path, dtype: torch.dtype = BF16, steps: int = STEPS
) -> tuple[Recorder, dict[str, Tensor]]:
    """Texts of one length, so one static graph; every step has the same at every call."""
    made, gradients = trainer(model, folder, dtype), Gradients()
    made.args.max_steps, made.args.save_strategy = steps, "no"
    made.args.learning_rate = 0.7  # from 1 on, one rounding grows tenfold in a few steps
    split = tiny.tokenizer()
    texts = tiny.texts(STEPS * BATCH * ACCUMULATE, seed=1, shortest=LENGTH, longest=LENGTH)
    made.train_dataset = Dataset.from_dict({"input_ids": split(texts)["input_ids"]})
    made.add_callback(gradients)
    made.train()
    return made, gradients.first


def check_training(
    kind: Callable[[], PreTrainedModel],
    head: Callable[[PreTrainedModel], None],
    inner: str,
    folder: Path,
) -> None:
    model = kind()
    head(model)
    assert {p.dtype for p in model.parameters()} == {F32}
    fused, ours = train(compiled(copy.deepcopy(model), inner), folder)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["fusedce"] == {"matched": 1, "rejected": 0, "casts": 0}
    eager, theirs = train(copy.deepcopy(model), folder)
    tiny.assert_same_course(logged(fused, "loss"), logged(eager, "loss"), BF16)
    # f32 gradients for f32 parameters, and none for a frozen head
    assert ours.keys() == trained(model).keys()
    assert {gradient.dtype for gradient in ours.values()} == {F32}
    # the Trainer again, in float64: a step of accumulated micro-batches with autocast off
    _, true = train(copy.deepcopy(model).double(), folder, F32, steps=1)
    assert ours.keys() == theirs.keys() == true.keys()
    assert_close(list(ours.values()), list(theirs.values()), list(true.values()), BF16)


@pytest.mark.parametrize("head", [frozen, trained_and_resized, tied_and_resized])
@pytest.mark.parametrize("kind", [llama, qwen2])
def test_trainer(kind, head, tmp_path):
    check_training(kind, head, "eager", tmp_path)


def test_trainer_through_inductor(tmp_path):
    check_training(qwen2, tied_and_resized_without_layers, "inductor", tmp_path)


# ---------------------------------------------------------------- what raises without


def f32_head(device: torch.device) -> LlamaForCausalLM:
    """Half precision, and a head that was put back to f32 for its accuracy."""
    with device:
        model = tiny.llama().bfloat16()
    model.lm_head.float()
    return model


def shallow(device: torch.device) -> LlamaForCausalLM:
    """Embeddings, norm and head: what Liger's fused loss is about."""
    with device:
        model = tiny.llama()
    del model.model.layers[:]
    return model


def patched(model: PreTrainedModel) -> PreTrainedModel:
    """Liger's fused loss, put in by what the Trainer calls for ``use_liger_kernel=True``.

    The other kernels stay out: not all of them run in Triton's interpreter.
    """
    only = {"rope": False, "rms_norm": False, "swiglu": False}
    apply_liger_kernel(model, {**only, "fused_linear_cross_entropy": True})
    assert "forward" in vars(model)
    return model


def switched_off(model: PreTrainedModel) -> PreTrainedModel:
    options = {"fusedce.inner": "eager", "fusedce.enabled": False}
    model.compile(backend="fusedce", options=options)
    return model


def plain(model: PreTrainedModel) -> PreTrainedModel:
    return model


@pytest.mark.parametrize("without", [plain, patched, switched_off])
def test_an_f32_head_on_bf16_hidden_states_raises_without(without, device):
    model = without(f32_head(device))
    with pytest.raises(RuntimeError, match=MISMATCH):
        loss_and_gradients(model, batch(device))


def test_an_f32_head_on_bf16_hidden_states(device):
    model, inputs = f32_head(device), batch(device)
    # what autocast makes of it is what the casts are held to
    eager = loss_and_gradients(model, inputs, autocast=BF16)
    true = exact(model, inputs)
    fused = loss_and_gradients(compiled(model), inputs)
    assert counters["fusedce"] == {"matched": 1, "rejected": 0, "casts": 1}
    assert [g.dtype for g in fused] == [F32, *(p.dtype for p in trained(model).values())]
    assert_close(fused, eager, true, BF16)


CORES_LOSS = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="torch 2.11 has no F.linear_cross_entropy"
)
CORES_OPTIONS = pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch 2.11 has no options of it"
)


@CORES_LOSS
@pytest.mark.parametrize("weight", [F32, BF16])
def test_cores_loss_under_autocast(weight):
    """F.linear_cross_entropy: a linear and a cross-entropy, which autocast sees."""
    x, target = torch.randn(12, 16), torch.randint(37, (12,))
    w = torch.randn(37, 16).to(weight)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return F.linear_cross_entropy(x, w, target)

    def without(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w), target)

    program = torch.compile(loss, backend="fusedce", options={"fusedce.inner": "eager"})
    fused = numerics.loss_and_gradients(program, (x, w))
    eager = numerics.loss_and_gradients(loss, (x, w))
    assert counters["fusedce"]["matched"] == 1
    assert [g.dtype for g in fused] == [F32, F32, weight]
    assert_close(fused, eager, numerics.loss_and_gradients(without, (x, w), torch.float64), BF16)


@CORES_OPTIONS
@pytest.mark.parametrize(("x", "weight"), [(BF16, F32), (F32, BF16), (torch.float16, BF16)])
def test_cores_chunked_loss_is_not_on_autocasts_list(x, weight):
    """Why ``options=`` is to be left out: the operator behind it meets what autocast should cast."""
    options = nn.LinearCrossEntropyOptions(allow_retain_graph=True, acc_policy="compact")
    with torch.autocast("cpu", BF16), pytest.raises(RuntimeError, match="to have the same dtype"):
        F.linear_cross_entropy(
            torch.randn(12, 16, dtype=x),
            torch.randn(37, 16, dtype=weight),
            torch.randint(37, (12,)),
            options=options,
        )


# ---------------------------------------------------------------- Liger's patch and fusedce together

# torch's own, where Dynamo goes on after a graph break
NON_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def dynamo_steps_over_the_interpreter(monkeypatch, device):
    """Without a GPU Dynamo would trace through Triton's interpreter. On one it breaks the graph at
    the same call: Liger counts the labels with ``.item()``."""
    if device.type == "cpu":
        functional = liger_kernel.transformers.functional
        opaque = torch.compiler.disable(functional.liger_fused_linear_cross_entropy)
        monkeypatch.setattr(functional, "liger_fused_linear_cross_entropy", opaque)


def test_ligers_loss_agrees_under_autocast(device):
    """The failure is gone where Liger 0.8.5 is called under autocast."""
    x = torch.randn(12, 16, device=device)
    w = torch.randn(37, 16, device=device)
    target = torch.randint(37, (12,), device=device)

    def liger(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast(device.type, BF16):
            return LigerFusedLinearCrossEntropyLoss()(w, x, target)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast(device.type, BF16, enabled=x.dtype != torch.float64):
            return F.cross_entropy(F.linear(x, w), target)

    found = numerics.loss_and_gradients(liger, (x, w))
    eager = numerics.loss_and_gradients(plain, (x, w))
    assert [g.dtype for g in found] == [F32] * 3
    assert_close(found, eager, numerics.loss_and_gradients(plain, (x, w), torch.float64), BF16)


@NON_LEAF
@pytest.mark.usefixtures("dynamo_steps_over_the_interpreter")
def test_a_patched_model_that_is_compiled_stays_right(device):
    """Training: Liger's kernel, and nothing is left to fuse. Evaluation: the model's own loss."""
    model, inputs = shallow(device), batch(device)
    true = exact(model, inputs)
    eager = loss_and_gradients(model, inputs, autocast=BF16)
    compiled(patched(model))
    both = loss_and_gradients(model, inputs, autocast=BF16)
    assert_close(both, eager, true, BF16)
    assert counters["fusedce"] == {"matched": 0, "rejected": 0, "casts": 0}
    reasons = list(counters["graph_break"])  # torch 2.15 names two
    assert reasons
    assert all("liger_fused_linear" in reason or ".item()" in reason for reason in reasons)
    model.eval()
    with torch.no_grad(), torch.autocast(device.type, BF16):
        assert_close([model(**inputs).loss], eager[:1], true[:1], BF16)
    assert not counters["fusedce"]["matched"]  # its logits are returned
