"""The worker process of ``python -m benchmarks.training``: trains a Llama, or runs a program.

In: a :class:`Job` as JSON in the first argument, then the command ``step``
(:func:`benchmarks.process.serve`). Out: for each, the answer of
:func:`fxpass.cli.demo_worker.train_steps`; of a program, all that it did.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from benchmarks.process import serve
from benchmarks.trainers.programs import PROGRAMS
from benchmarks.trainers.task import Sizes, Task
from benchmarks.training.job import Job
from fxpass.cli.demo_worker import train_steps


def llama(job: Job) -> nn.Module:
    """The model of transformers; it returns logits beside the loss."""
    transformers = importlib.import_module("transformers")
    heads = max(1, job.width // 64)
    config = transformers.LlamaConfig(
        vocab_size=job.classes,
        hidden_size=job.width,
        intermediate_size=4 * job.width,
        num_hidden_layers=job.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=job.seq,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


class LossOutside(nn.Module):
    """A model that is compiled alone; eager code computes its loss, of logits or of their copy."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        super().__init__()
        self.model, self.copied = model, job.loss == "copied"
        if job.provider != "eager":
            model.compile(backend=job.provider)

    @torch.compiler.disable(recursive=False)
    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The logits ``[batch, seq, classes]``, and their mean loss."""
        logits = self.model(input_ids=input_ids).logits
        if self.copied:  # of a plain tensor: fxpass computes the logits
            logits = logits.as_subclass(torch.Tensor).clone()
        shifted = logits[:, :-1].flatten(0, 1)
        return {"loss": F.cross_entropy(shifted.float(), labels[:, 1:].flatten()), "logits": logits}


def whole_model(job: Job) -> Iterator[dict[str, Any]]:
    """Trains on new random tokens in every step, from an eighth of the classes: the loss falls."""

    def batch(generator: Generator) -> dict[str, Tensor]:
        tokens = torch.randint(job.classes // 8, (job.batch, job.seq), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    def model() -> nn.Module:
        return llama(job) if job.loss == "model" else LossOutside(llama(job), job)

    return train_steps(job, model, batch)


def program(job: Job) -> Iterator[dict[str, Any]]:
    """Yields the losses of all steps, the bytes that a step after the first ones adds at most (None
    if unknown), and what computed logits (:class:`benchmarks.trainers.task.Watch`)."""
    sizes = Sizes(job.classes, job.width, job.layers, job.batch, job.seq, job.steps)
    task, run = Task(sizes, job.provider), PROGRAMS[job.program].load()
    with task.watch as watch:
        run(task)
    found = {"fused": watch.fused, "why": watch.why} if job.provider == "fusedce" else {}
    yield {"losses": task.losses, "extra_bytes": task.memory.added(), **found}


class Session:
    """Steps that are taken when they are asked for."""

    def __init__(self, job: Job) -> None:
        self.steps = program(job) if job.program else whole_model(job)

    def step(self) -> dict[str, Any]:
        """Runs a training step, or the whole program."""
        return next(self.steps)


if __name__ == "__main__":
    serve(lambda fields: Session(Job(**fields)))
