"""The worker process of ``fxpass demo``: trains a small GPT in plain PyTorch.

In: a :class:`TextJob` as JSON in the first argument, then a line on standard input for each step.
Out: for each, a line of JSON on standard output, from :class:`fxpass.cli.training.Session`. The
model does not depend on the backend.
"""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from fxpass.cli.training import WARM_UP_STEPS, Job, Session

HEAD_WIDTH = 32


@dataclass(frozen=True)
class TextJob(Job):
    """A GPT that trains on a text for some steps."""

    steps: int


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


def read_corpus(classes: int, root: Path | None = None) -> Tensor:
    """A text that every machine has, int32 ``[tokens]``: Python sources of ``root`` (the standard
    library), until there are as many words as classes.

    The classes are the most frequent words and signs, and 0 for all others. A trimmed Python may
    have fewer words; the last classes do not occur then.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    words: list[str] = []
    counts: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        # installed packages differ between machines
        if not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts):
            found = re.findall(r"\w+|[^\w\s]", path.read_text("utf-8", errors="replace"))
            words += found
            counts.update(found)
        if len(counts) >= classes:
            break
    index = {word: i for i, (word, _) in enumerate(counts.most_common(classes - 1), start=1)}
    numbers = [index.get(word, 0) for word in words]
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")


def session(job: TextJob, corpus: Tensor) -> Session:
    """Trains on windows of a text, class indices ``[tokens]`` int64, at random places."""

    def batch(generator: Generator) -> dict[str, Tensor]:
        last = len(corpus) - job.seq
        starts = torch.randint(last, (job.batch, 1), generator=generator, device="cpu")
        windows = corpus[starts + torch.arange(job.seq + 1, device="cpu")]
        return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}

    return Session(job, lambda: GPT(job), batch)


def main() -> None:
    """Trains with the provider of the job."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other prints must not look like answers
    job = TextJob(**json.loads(sys.argv[1]))
    trained = session(job, read_corpus(job.classes).long())
    for step, _ in enumerate(sys.stdin):
        answer = trained.measure() if step == WARM_UP_STEPS else trained.step()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
