"""The worker process of ``fxpass demo``: trains a small GPT in plain PyTorch.

In: a :class:`TextJob` as JSON in the first argument, then commands
(:class:`fxpass.cli.training.Session`). The model does not depend on the backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fxpass.cli.process import serve
from fxpass.cli.training import Job, Session

HEAD_WIDTH = 32


@dataclass(frozen=True)
class TextJob(Job):
    """A GPT trained on the text in a file: class indices, int32 ``[tokens]``."""

    corpus: str


class GPT(nn.Module):
    """A small decoder whose head and embedding share their weight, as in GPT-2."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embedding = nn.Embedding(job.classes, job.width)
        self.position = nn.Embedding(job.seq, job.width)
        heads, wide = job.width // HEAD_WIDTH, 4 * job.width
        how = {"activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(job.width, heads, wide, dropout=0.0, **how)
            for _ in range(job.layers)
        )
        self.norm = nn.LayerNorm(job.width)
        self.head = nn.Linear(job.width, job.classes, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Mean loss of predicting ``targets`` from ``tokens``, both int64 ``[batch, seq]``."""
        x = self.embedding(tokens) + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten())}


def session(job: TextJob) -> Session:
    """Trains on windows of the text at random places."""
    corpus = torch.load(job.corpus).long()

    def batch(generator: Generator) -> dict[str, Tensor]:
        last = len(corpus) - job.seq
        starts = torch.randint(last, (job.batch, 1), generator=generator, device="cpu")
        windows = corpus[starts + torch.arange(job.seq + 1, device="cpu")]
        return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}

    return Session(job, lambda: GPT(job), batch)


if __name__ == "__main__":
    serve(lambda fields: session(TextJob(**fields)))
