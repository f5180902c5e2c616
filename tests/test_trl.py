"""TRL's SFTTrainer on a model that was compiled in place: eager's losses and token metrics.

Since 1.15 SFTTrainer computes the loss itself, from the hidden states, in an autograd function of its
own: nothing is left to fuse, and what is compiled has to stay right. A subclass that takes the loss
from the model (Hugging Face's) is fused.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import tiny
import torch
from datasets import Dataset
from torch._dynamo.utils import counters
from transformers import Trainer
from trl import SFTConfig, SFTTrainer
from trl.trainer import utils

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
            output_dir=str(folder),
            use_cpu=True,
            bf16=dtype == torch.bfloat16,
            loss_type="nll",
            activation_checkpointing=False,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            optim="sgd",
            learning_rate=0.5,
            lr_scheduler_type="constant",
            max_grad_norm=math.inf,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=conversations(78, seed=1),
        eval_dataset=conversations(11, seed=2),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    trainer.evaluate()
    return trainer


def logged(trainer: SFTTrainer, what: str) -> list[float]:
    return [entry[what] for entry in trainer.state.log_history if what in entry]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(ModelLoss, torch.float32), (ModelLoss, torch.bfloat16), (SFTTrainer, torch.bfloat16)],
    ids=["model-loss-f32", "model-loss-bf16", "trl-loss-bf16"],
)
def test_losses_and_token_metrics(kind, dtype, tmp_path):
    fused, eager = (train(kind, tmp_path, dtype, compiled) for compiled in (True, False))
    if kind is ModelLoss or not OWN_LOSS:
        assert counters["fusedce"]["matched"] == counters["stats"]["unique_graphs"] >= 2
        assert counters["fusedce"]["rejected"] == 0
    else:
        assert counters["fusedce"]["matched"] == 0
    losses = logged(eager, "loss")
    assert len(losses) == STEPS
    tiny.assert_same_course(logged(fused, "loss"), losses, dtype)
    assert logged(fused, "eval_loss") == pytest.approx(
        logged(eager, "eval_loss"), rel=tiny.RTOL[dtype]
    )
    for prefix, times in (("", STEPS), ("eval_", 1)):
        ours, theirs = logged(fused, prefix + "entropy"), logged(eager, prefix + "entropy")
        assert len(theirs) == times
        assert ours == pytest.approx(theirs, rel=4 * tiny.RTOL[dtype])
        name = prefix + "mean_token_accuracy"
        ours, theirs = logged(fused, name), logged(eager, name)
        assert len(theirs) == times
        assert ours == pytest.approx(theirs, rel=1e-6, abs=tiny.TIES[dtype])
