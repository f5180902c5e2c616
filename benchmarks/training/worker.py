"""The worker process of ``python -m benchmarks.training``: trains a Llama of transformers.

In: a :class:`Job` as JSON in the first argument, then the command ``step``
(:func:`benchmarks.process.serve`). Out: for each, what :func:`fxpass.cli.demo_worker.train` yields.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Generator, Tensor, nn

from benchmarks.process import serve
from fxpass.cli.demo_worker import Job, train


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


class Session:
    """Trains on new random tokens in every step, from an eighth of the classes: the loss falls."""

    def __init__(self, job: Job) -> None:
        def batch(generator: Generator) -> dict[str, Tensor]:
            tokens = torch.randint(job.classes // 8, (job.batch, job.seq), generator=generator)
            return {"input_ids": tokens, "labels": tokens}

        self.steps = train(job, lambda: llama(job), batch)

    def step(self) -> dict[str, Any]:
        """Runs a training step."""
        return next(self.steps)


if __name__ == "__main__":
    serve(lambda fields: Session(Job(**fields)))
