"""The model of the demo: a small GPT in plain PyTorch, with its loss in ``forward``.

In: tokens and targets. Out: the mean loss. Nothing here knows which backend compiles it.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [batch, seq, width]."""
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, seq, width / heads]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small decoder whose head shares the weight of its embedding, like GPT-2's."""

    def __init__(self, classes: int, seq: int, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.position = nn.Embedding(seq, width)
        self.blocks = nn.Sequential(*(Block(width, width // 32) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of predicting ``targets`` from ``tokens``, both int64 [batch, seq]."""
        x = self.embedding(tokens) + self.position.weight
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
