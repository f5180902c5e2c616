"""What :mod:`benchmarks.training` and :mod:`benchmarks.trainers` train.

In: sizes, and where the loss of the model is computed, or a program. Out: a :class:`Job`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpass.cli import demo_worker

LOSSES = {
    "model": "logits returned",
    "outside": "loss outside of the compiled model",
    "copied": "loss outside, of a copy of the logits",
}


@dataclass(frozen=True)
class Job(demo_worker.Job):
    """A Llama of this size, trained with AdamW; or a program that trains others of this size.

    Attributes:
        loss: a name of :data:`LOSSES`: of the ``model``, which returns logits, too; ``outside`` of
            the compiled model; or of logits that are ``copied`` first, which nobody can fuse.
        program: a name of :data:`benchmarks.trainers.programs.PROGRAMS`; empty: the Llama alone.
        steps: of a program.
    """

    loss: str = "model"
    program: str = ""
    steps: int = 20

    @property
    def what(self) -> str:
        """What is trained."""
        return self.program or f"Llama of {self}, {LOSSES[self.loss]}"
