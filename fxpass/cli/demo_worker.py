"""The worker process of ``fxpass demo``: trains a small GPT in plain PyTorch.

In: a :class:`Job` as JSON in the first argument, then a line on standard input for each step. Out:
for each step, the measurements of :func:`train_steps`, as a line of JSON on standard output. The
model does not depend on the backend.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch._dynamo.utils import counters

from fxpass.cli.memory import Memory

HEAD_WIDTH = 32
# The first step compiles, the second still allocates AdamW's state; the third measures memory.
MEASURED_STEP = 2
UNTIMED_STEPS = MEASURED_STEP + 1


@dataclass(frozen=True)
class Job:
    """A model of this size, trained with AdamW."""

    provider: str  # "eager" or the name of a torch.compile backend
    device: str
    dtype: str  # of autocast; parameters are float32
    layers: int
    width: int
    classes: int
    batch: int  # sequences per step
    seq: int  # tokens per sequence

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.seq

    def __str__(self) -> str:
        return (
            f"{self.layers} layers x {self.width} x {self.classes} classes, {self.batch} x "
            f"{self.seq} tokens, {self.dtype}, AdamW"
        )


class GPT(nn.Module):
    """A small decoder whose head and embedding share their weight, as in GPT-2."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        width = job.width
        heads = job.width // HEAD_WIDTH
        self.embedding = nn.Embedding(job.classes, width)
        self.position = nn.Embedding(job.seq, width)
        gpt_2 = {"activation": "gelu", "batch_first": True, "norm_first": True}
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, **gpt_2)
        norm = nn.LayerNorm(width)
        self.blocks = nn.TransformerEncoder(block, job.layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, job.classes, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Mean loss of predicting ``targets`` from ``tokens``, both int64 ``[batch, seq]``."""
        x = self.embedding(tokens) + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device)
        logits = self.head(self.blocks(x, mask, is_causal=True))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten())}


def read_corpus(classes: int, root: Path | None = None) -> Tensor:
    """A text that every machine has, int64 ``[tokens]``: the Python files in ``root`` (the standard
    library's folder).

    The classes are the most frequent words and signs, and 0 for all others; the last classes do not
    occur if there are fewer words.
    """
    files = sorted((root or Path(sysconfig.get_path("stdlib"))).glob("*.py"))
    words = re.findall(r"\w+|[^\w\s]", "".join(f.read_text("utf-8", "replace") for f in files))
    index = {word: i for i, (word, _) in enumerate(Counter(words).most_common(classes - 1), 1)}
    return torch.tensor([index.get(word, 0) for word in words], device="cpu")


def train_gpt(job: Job, corpus: Tensor) -> Iterator[dict[str, Any]]:
    """Trains on random windows of a text, class indices ``[tokens]`` int64, as :func:`train_steps`
    does."""

    def batch(random: Generator) -> dict[str, Tensor]:
        last = len(corpus) - job.seq
        starts = torch.randint(last, (job.batch, 1), generator=random, device="cpu")
        windows = corpus[starts + torch.arange(job.seq + 1, device="cpu")]
        return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}

    return train_steps(job, lambda: GPT(job), batch)


def train_steps(
    job: Job, make: Callable[[], nn.Module], batch_of: Callable[[Generator], dict[str, Tensor]]
) -> Iterator[dict[str, Any]]:
    """Trains with the provider of the job, as ``benchmarks.training`` does too.

    Args:
        make: makes the model; called with a batch, the model returns a mapping with "loss".
        batch_of: makes the arguments of a step; the generator is the same for every provider.

    Yields:
        the seconds, loss and gradient norm of each step; at MEASURED_STEP also the memory that it
        added, in bytes, and the counters and log lines of fusedce.
    """
    notes = BufferingHandler(capacity=10_000)  # a line per match, rejection and cast
    logging.getLogger("fxpass").addHandler(notes)
    logging.getLogger("fxpass").setLevel(logging.INFO)
    device = torch.device(job.device)
    dtype = getattr(torch, job.dtype)
    torch.manual_seed(0)
    model = make().to(device)
    memory = Memory(device)
    compiled = model if job.provider == "eager" else torch.compile(model, backend=job.provider)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=job.dtype == "float16")
    for step in itertools.count():
        batch = batch_of(Generator().manual_seed(step))
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        if step == MEASURED_STEP:
            memory.start()
        begin = time.perf_counter()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            out = compiled(**batch)
        scaler.scale(out["loss"]).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)  # the logits are still alive, as in any training loop
        scaler.update()
        optimizer.zero_grad()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds = time.perf_counter() - begin
        answer = {"seconds": seconds, "loss": out["loss"].item(), "norm": norm.item()}
        del out, batch  # between steps only the model's and AdamW's state is in use
        if step == MEASURED_STEP:
            answer["extra_bytes"] = memory.added()
            answer["counters"] = counters["fusedce"]
            answer["notes"] = [record.getMessage() for record in notes.buffer]
        yield answer


def main() -> None:
    """Trains with the provider of the job."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other prints must not look like answers
    job = Job(**json.loads(sys.argv[1]))
    for _, answer in zip(sys.stdin, train_gpt(job, read_corpus(job.classes)), strict=False):
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
