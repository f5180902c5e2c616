"""The table of programs: training loops whose loss is outside of the compiled model.

A module of this package has the function of a program; it imports libraries that may be missing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.trainers.task import Task


@dataclass(frozen=True)
class Program:
    """Where a program is.

    Attributes:
        module: of this package.
        function: the program; it gets a :class:`Task`.
        needs: packages.
    """

    module: str
    function: str
    needs: tuple[str, ...] = ()

    def load(self) -> Callable[[Task], None]:
        """The function."""
        module = importlib.import_module(f"benchmarks.trainers.{self.module}")
        return getattr(module, self.function)

    @property
    def missing(self) -> list[str]:
        """What is not installed of ``transformers`` and of what it needs."""
        needs = ("transformers", *self.needs)
        return [name for name in needs if importlib.util.find_spec(name) is None]


HF = ("accelerate",)
TRL = ("accelerate", "datasets", "trl")

PROGRAMS = {
    "Trainer, `label_smoothing_factor`": Program("hugging_face", "smoothing", HF),
    "Trainer, `compute_loss_func`": Program("hugging_face", "given_loss", HF),
    "Trainer, own `compute_loss`": Program("hugging_face", "own_loss", HF),
    "Trainer, own `compute_loss` with token accuracy": Program(
        "hugging_face", "token_accuracy", HF
    ),
    "Trainer, own `compute_loss`, evaluation with argmax": Program("hugging_face", "metrics", HF),
    "Trainer, the model's loss, evaluation with argmax": Program(
        "hugging_face", "metrics_of_model_loss", HF
    ),
    "TRL's ORPOTrainer": Program("preferences", "orpo", TRL),
    "TRL's CPOTrainer": Program("preferences", "cpo", TRL),
    "TRL's GKDTrainer, Jensen-Shannon": Program("preferences", "gkd", TRL),
    "TRL's GKDTrainer, Kullback-Leibler": Program("preferences", "gkd_forward", TRL),
    "DPO, by TRL's functions": Program("policies", "dpo", TRL),
    "GRPO, by TRL's functions": Program("policies", "grpo", TRL),
    "policy gradient with entropy bonus, by TRL's functions": Program(
        "policies", "entropy_bonus", TRL
    ),
    "distillation, `kl_div` and cross-entropy": Program("loops", "distillation"),
    "Lightning with torchmetrics' accuracy": Program(
        "with_lightning", "accuracy", ("lightning", "torchmetrics")
    ),
    "scoring as lm-evaluation-harness": Program("loops", "scoring"),
    "FSDP2 on two ranks, compiled loss": Program("titan", "sharded"),
}
