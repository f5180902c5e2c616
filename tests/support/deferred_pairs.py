"""What the tests of deferred logits share: the same logits twice, deferred and computed at once.

The operands are multiples of 1/16 and few are summed, so that the logits have the same bits
whichever kernel a library chooses for a shape: one row of a head has those of the whole. Gradients
are sums of other numbers, and are compared within their rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass.deferred.tensor import DeferredLogits, Recipe, defer

B, S, D, V = 2, 5, 8, 16


def head(x, weight, bias):
    logits = F.linear(x, weight, bias)
    return logits + logits.square() / 16


def exact(*shape: int) -> Tensor:
    """Random numbers whose products of ``D`` terms are exact in f32."""
    return torch.randn(shape).clamp(-4, 4).mul(16).round() / 16


def recipe_of(fn=head, rows=(0,)) -> tuple[Recipe, list[torch.Size]]:
    """A recipe and the shapes of the hidden states each time that it really ran."""
    graph, runs = torch.fx.symbolic_trace(fn), []
    forward = graph.forward

    def counted(*inputs):
        if not inputs[0].is_meta and type(inputs[0]) is Tensor:  # not to find the shape
            runs.append(inputs[0].shape)
        return forward(*inputs)

    graph.forward = counted
    return Recipe(graph, rows, "logits = self.lm_head(x)"), runs


@dataclass
class Pair:
    """The same logits twice: deferred and eager, each with leaves of its own."""

    logits: Any
    eager: Tensor
    runs: list[torch.Size]
    lazy_inputs: list[Tensor]
    eager_inputs: list[Tensor]

    @property
    def weight(self) -> Tensor:
        return self.lazy_inputs[1]


def pair(dtype=torch.float32, rows=(0,), seq=S) -> Pair:
    torch.manual_seed(0)
    values = [
        exact(B, seq, D).to(dtype),
        exact(V, D).to(dtype),
        exact(V).to(dtype),
    ]
    lazy = [torch.nn.Parameter(v.clone()) for v in values]
    eager = [torch.nn.Parameter(v.clone()) for v in values]
    recipe, runs = recipe_of(rows=rows)
    logits = defer(recipe, (lazy[0] * 1, *lazy[1:]))
    return Pair(logits, head(eager[0] * 1, *eager[1:]), runs, lazy, eager)


def same(a, b, bits=True):
    if bits:
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    else:
        torch.testing.assert_close(a, b)


def check(p: Pair, fn, bits=True):
    """``fn`` gives the same values, and the gradients of all inputs within their rounding."""
    got, want = fn(p.logits), fn(p.eager)
    assert type(got) in (Tensor, DeferredLogits)
    assert got.requires_grad == want.requires_grad
    same(got * 1, want * 1, bits)
    if want.requires_grad:
        got.float().pow(2).sum().backward()
        want.float().pow(2).sum().backward()
        for mine, theirs in zip(p.lazy_inputs, p.eager_inputs, strict=True):
            assert mine.grad.dtype == mine.dtype
            same(mine.grad, theirs.grad, bits=False)
