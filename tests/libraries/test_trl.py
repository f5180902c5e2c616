"""TRL's SFTTrainer on a model that was compiled in place: eager's losses and token metrics.

Since 1.15 SFTTrainer computes the loss itself, from the hidden states, in an autograd function of its
own: nothing is left to fuse, and what is compiled has to stay right. A subclass that takes the loss
from the model (Hugging Face's) is fused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch._dynamo.utils import counters
from transformers import Trainer
from trl import SFTConfig, SFTTrainer
from trl.trainer import utils

from benchmarks.trainers.hugging_face import ARGUMENTS
from tests.libraries.test_trainers import logged
from tests.support import tiny

pytestmark = [
    # torch's own, when Dynamo traces TRL's autograd function
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

STEPS = 20
OWN_LOSS = hasattr(utils, "add_fused_lm_head")  # TRL 1.15 and newer


class ModelLoss(SFTTrainer):
    """The model's own loss; entropy and accuracy from its logits, as TRL had them before 1.15."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs["use_cache"] = False
        labels = inputs["labels"][:, 1:]
        loss, outputs = Trainer.compute_loss(self, model, inputs, True, num_items_in_batch)
        with torch.no_grad():
            logits = outputs.logits[..., :-1, :]
            mask = labels != -100
            hits = (logits.argmax(dim=-1) == labels) & mask
            metrics = self._metrics["train" if self.model.training else "eval"]
            entropy = (utils.entropy_from_logits(logits) * mask).sum() / mask.sum()
            metrics["entropy"].append(entropy.item())
            metrics["mean_token_accuracy"].append((hits.sum() / mask.sum()).item())
        return (loss, outputs) if return_outputs else loss


def conversations(count: int, seed: int) -> Dataset:
    """A prompt of three words and a completion that goes on counting."""
    split = [text.split() for text in tiny.texts(count, seed, shortest=6)]
    return Dataset.from_list(
        [{"prompt": " ".join(t[:3]), "completion": " " + " ".join(t[3:])} for t in split]
    )


def train(kind: type[SFTTrainer], folder: Path, dtype: torch.dtype, compiled: bool) -> SFTTrainer:
    model = tiny.llama()
    if compiled:
        model.compile(backend="fusedce", options={"fusedce.inner": "eager"}, dynamic=True)
    trainer = kind(
        model,
        SFTConfig(
            **ARGUMENTS
            | {
                "output_dir": str(folder),
                "bf16": dtype == torch.bfloat16,
                "loss_type": "nll",
                "activation_checkpointing": False,
                "max_steps": STEPS,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "learning_rate": 0.5,
            }
        ),
        train_dataset=conversations(78, seed=1),
        eval_dataset=conversations(11, seed=2),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    return trainer


def assert_same(fused: SFTTrainer, eager: SFTTrainer, prefix: str, dtype: torch.dtype) -> None:
    """Entropy and accuracy of tokens that two trainers have logged."""
    ours, theirs = (logged(t, f"{prefix}entropy") for t in (fused, eager))
    assert len(theirs) == (1 if prefix else STEPS)
    assert ours == pytest.approx(theirs, rel=4 * tiny.RTOL[dtype])
    ours, theirs = (logged(t, f"{prefix}mean_token_accuracy") for t in (fused, eager))
    assert len(theirs) == (1 if prefix else STEPS)
    assert ours == pytest.approx(theirs, rel=1e-6, abs=tiny.TIES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_the_models_loss_is_fused(dtype, tmp_path):
    fused, eager = (train(ModelLoss, tmp_path, dtype, compiled) for compiled in (True, False))
    tiny.assert_same_course(logged(fused, "loss"), logged(eager, "loss"), dtype)
    assert_same(fused, eager, "", dtype)
    for trainer in (fused, eager):
        trainer.evaluate()
    ours, theirs = (logged(t, "eval_loss") for t in (fused, eager))
    assert ours == pytest.approx(theirs, rel=tiny.RTOL[dtype])
    assert_same(fused, eager, "eval_", dtype)
    # the graphs of training, and TRL's metrics of the logits where it asks for them; in evaluation,
    # logits are returned, and the loss is computed of them
    assert counters["fusedce"]["matched"] >= 1


def test_trls_own_loss_stays_right(tmp_path):
    dtype = torch.bfloat16  # TRL's default
    fused, eager = (train(SFTTrainer, tmp_path, dtype, compiled) for compiled in (True, False))
    graphs = counters["stats"]["unique_graphs"]
    assert graphs >= 1
    assert counters["fusedce"]["matched"] == (0 if OWN_LOSS else graphs)
    tiny.assert_same_course(logged(fused, "loss"), logged(eager, "loss"), dtype)
    assert_same(fused, eager, "", dtype)
