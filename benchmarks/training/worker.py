"""A whole model's training steps in a process of its own, driven line by line.

In: a :class:`Job` as JSON in the first argument, then commands
(:func:`benchmarks.loss.worker.serve`).
Every command is one step of training, the next one: ``step`` gives its seconds, its loss and the
norm of its gradients, ``measure`` also what it adds to the memory in use. The steps see the same
tokens for every provider.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.loss.case import SEED
from benchmarks.loss.worker import serve
from fxpass.cli.memory import memory_of


@dataclass(frozen=True)
class Job:
    """A Llama of this size, trained with AdamW; a step has ``batch * seq`` tokens.

    Attributes:
        provider: "eager" or the name of a torch.compile backend.
        dtype: of autocast; parameters are float32.
    """

    provider: str
    device: str
    dtype: str
    layers: int
    width: int
    classes: int
    batch: int
    seq: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.seq

    def __str__(self) -> str:
        return (
            f"Llama of {self.layers} layers x {self.width} x {self.classes} classes, {self.batch} "
            f"x {self.seq} tokens, {self.dtype}, AdamW, logits returned"
        )


class Session:
    """The model and its optimizer."""

    def __init__(self, job: Job) -> None:
        self.job, self.device, self.steps = job, torch.device(job.device), 0
        torch.manual_seed(SEED)
        self.model = llama(job).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.run = self.model
        if job.provider != "eager":
            self.run = torch.compile(self.model, backend=job.provider)
        self.memory = memory_of(self.device)

    def step(self) -> dict[str, Any]:
        """One step: forward, backward, clipping, AdamW."""
        tokens = self._tokens()
        begin = time.perf_counter()
        with torch.autocast(
            self.device.type, getattr(torch, self.job.dtype), enabled=self.job.dtype != "float32"
        ):
            out = self.run(input_ids=tokens, labels=tokens)
        out.loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()  # while the logits are alive, as in any training loop
        self.optimizer.zero_grad()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "loss": out.loss.item(), "norm": norm.item()}

    def measure(self) -> dict[str, Any]:
        """One step, its peak of memory, and what of that it added; None where it is unknown."""
        self.memory.start()
        answer = self.step()
        peak, rest = self.memory.peak(), self.memory.rest
        extra = None if peak is None or rest is None else peak - rest
        return {**answer, "peak_bytes": peak, "extra_bytes": extra}

    def _tokens(self) -> Tensor:
        """int64 ``[batch, seq]``, other ones for every step: a few of the classes, so it learns."""
        generator = torch.Generator().manual_seed(SEED + self.steps)
        self.steps += 1
        size = (self.job.batch, self.job.seq)
        return torch.randint(self.job.classes // 8, size, generator=generator).to(self.device)


def llama(job: Job) -> nn.Module:
    """transformers' own model; it returns logits beside the loss."""
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


if __name__ == "__main__":
    serve(lambda fields: Session(Job(**fields)))
