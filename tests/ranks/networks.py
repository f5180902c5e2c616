"""What :mod:`tests.ranks.training` trains: networks, their losses, and batches that differ by rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, BATCH, LENGTH = 3, 4, 12
WORDS, V = 196, 201  # V does not divide by the number of ranks


class Body(nn.Module):
    """Ids [B, S] to hidden states [B, S, width]."""

    def __init__(self, v: int, width: int, inner: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(v, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(blocks))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    """[B, S, width] to the same."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Network(nn.Module):
    """Ids [B, S] to the loss of the next id and the logits, as models of transformers are built:
    blocks in a module of their own, head and loss in the outermost ``forward``.

    Args:
        loss: of logits and labels: a loss, and what is returned beside it.
        more: in and out of further linears, which some losses read.
    """

    def __init__(
        self,
        v: int = V,
        width: int = 32,
        inner: int = 64,
        blocks: int = 2,
        tied: bool = False,
        loss: Callable[..., Any] | None = None,
        **more: tuple[int, int],
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss = loss
        self.body = Body(v, width, inner, blocks)
        self.lm_head = nn.Linear(width, v, bias=False)
        if tied:
            self.lm_head.weight = nn.init.normal_(self.body.embed.weight, std=0.3)
        for name, sizes in more.items():
            self.add_module(name, nn.Linear(*sizes, bias=False))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.body(input_ids)
        logits = self.lm_head(x)
        if self.loss is None:
            return next_id_loss(logits, labels), logits
        return self.loss(self, x, logits, labels)


class HeadAndLoss(nn.Linear):
    """Hidden states [B, S, D] to loss and logits."""

    def forward(self, hidden: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        logits = F.linear(hidden, self.weight)
        return next_id_loss(logits, labels), logits


class WithHeadAndLoss(Network):
    """The loss is computed by the module that holds the head."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = HeadAndLoss(32, V, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.lm_head(self.body(input_ids), labels)


class OneFrame(Network):
    """Loop over the blocks, head and loss in one function."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.body.embed(input_ids)
        for block in self.body.blocks:
            x = block(x)
        logits = self.lm_head(x)
        return next_id_loss(logits, labels), logits


def next_id_loss(logits: Tensor, labels: Tensor) -> Tensor:
    rows = upcast(logits[:, :-1]).reshape(-1, logits.shape[-1])
    return F.cross_entropy(rows, labels[:, 1:].reshape(-1))


def upcast(t: Tensor) -> Tensor:
    """As models do, but for float64."""
    return t if t.dtype == torch.float64 else t.float()


def sorted_loss(_: Any, x: Tensor, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The same loss by no known formula, and of each row the entropy of its likeliest classes: a
    row region."""
    rows, picks = upcast(logits[:, :-1]), labels[:, 1:, None]
    lse = rows.sort(-1).values.logsumexp(-1)
    likely = rows.topk(5).values.log_softmax(-1)
    loss = (lse - rows.gather(-1, picks).squeeze(-1)).mean()
    return loss, -(likely.exp() * likely).sum(-1)


def batches(ranks: range, longer: int = 0) -> list[Tensor]:
    """``STEPS`` times ids [B, S] that count upward, of all these ranks one after another.

    ``longer``: by how much S grows at each step.
    """
    randoms = (torch.Generator().manual_seed(rank) for rank in ranks)
    starts = [torch.randint(WORDS, (STEPS, BATCH, 1), generator=random) for random in randoms]
    each = enumerate(torch.cat(starts, 1))
    return [(start + torch.arange(LENGTH + longer * k)) % WORDS for k, start in each]


def squared_lse(logits: Tensor) -> Tensor:
    return 0.01 * upcast(logits).logsumexp(-1).square().mean()


def large(**more: Any) -> Network:
    """Each large weight has more than the 1 MiB of the smallest buckets."""
    return Network(1100, 256, 1024, **{"blocks": 1, **more})


class UnusedParameter(Network):
    def __init__(self) -> None:
        super().__init__(1100, 256, 1024, 1)
        self.unused = nn.Parameter(torch.zeros(3))


def of_two_heads(model: Any, x: Tensor, logits: Tensor, labels: Tensor) -> Any:
    """Both heads before both losses."""
    others = model.second(x)
    return next_id_loss(logits, labels) + next_id_loss(others, labels), logits


def in_the_next_part(model: Any, x: Tensor, logits: Tensor, labels: Tensor) -> Any:
    """A large weight is applied to the logits, after the loss."""
    loss = next_id_loss(logits, labels)
    return loss + model.after(logits.tanh()).square().mean(), logits
