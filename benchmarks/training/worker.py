"""The worker process of ``python -m benchmarks.training``: trains a Llama of transformers.

In: a :class:`Job` as JSON in the first argument, then commands
(:class:`fxpass.cli.training.Session`).
"""

from __future__ import annotations

import importlib

import torch
from torch import Generator, Tensor, nn

from benchmarks.process import serve
from fxpass.cli.training import Job, Session


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


def session(job: Job) -> Session:
    """Trains on new random tokens in every step, from an eighth of the classes: the loss falls."""

    def batch(generator: Generator) -> dict[str, Tensor]:
        tokens = torch.randint(job.classes // 8, (job.batch, job.seq), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    return Session(job, lambda: llama(job), batch)


if __name__ == "__main__":
    serve(lambda fields: session(Job(**fields)))
