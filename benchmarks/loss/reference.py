"""The error of a step against float64, computed a tile of classes at a time.

In: the inputs and outputs of a step. Out: the relative error of the loss and of each gradient. The
exact gradients are never materialised as a whole: for a head of 256,000 classes and 2,304 hidden
units, the weight's gradient alone would take 4.7 GB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

TILE = 8192  # classes of a tile
BLOCK = 8192  # rows of dx that are compared at a time


def errors(
    got: Sequence[Tensor], x: Tensor, weight: Tensor, target: Tensor, distinct: int, softcap: float
) -> dict[str, float]:
    """``|got - exact| / |exact|`` of "loss", "dx" and "dw", norms in float64.

    Args:
        got: the mean loss, dx ``[N, D]``, dw ``[V, D]``; or the loss alone.
        x, weight, target: ``[N, D]``, ``[V, D]``, ``[N]``; the first ``distinct`` rows repeat.
        softcap: of the logits; 0 is none.
    """
    n, rows = len(x), min(distinct, len(x))
    # the weight of each distinct row in the mean, [rows, 1]
    share = torch.bincount(torch.arange(n, device=x.device) % rows, minlength=rows).double() / n
    share = share.unsqueeze(1)
    x64, picked = x.detach()[:rows].double(), target[:rows].unsqueeze(1)
    z = x64.new_empty(rows, len(weight))
    for tile, w64 in _tiles(weight):
        torch.mm(x64, w64.t(), out=z[:, tile])
    if softcap:
        z.div_(softcap).tanh_().mul_(softcap)
    lse = z.logsumexp(1, keepdim=True)
    loss = ((lse - z.gather(1, picked)) * share).sum()
    found = {"loss": _error([_norms(got[0], loss)])}
    if len(got) == 1:
        return found
    dx, dw = got[1:]
    dx64, norms = torch.zeros_like(x64), []
    for tile, w64 in _tiles(weight):
        g = z[:, tile].sub(lse).exp_()
        g -= (picked == torch.arange(tile.start, tile.stop, device=x.device)).double()
        if softcap:
            g *= 1 - (z[:, tile] / softcap).square_()  # the derivative of the cap
        g *= share
        dx64.addmm_(g, w64)
        exact = g.t() @ x64
        norms.append(_norms(dw[tile], exact))
    found["dw"] = _error(norms)
    dx64 /= share * n  # the gradient of one of the equal rows
    order = torch.arange(n, device=x.device) % rows
    blocks = (slice(start, start + BLOCK) for start in range(0, n, BLOCK))
    found["dx"] = _error([_norms(dx[block], dx64[order[block]]) for block in blocks])
    return found


def _tiles(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The classes of each tile, and their rows of the weight in float64."""
    for start in range(0, len(weight), TILE):
        tile = slice(start, min(start + TILE, len(weight)))
        yield tile, weight.detach()[tile].double()


def _norms(got: Tensor, exact: Tensor) -> tuple[float, float]:
    """The norm of the error of a part of a tensor, and the norm of its exact values."""
    return float((got.double() - exact).norm()), float(exact.norm())


def _error(norms: Sequence[tuple[float, float]]) -> float:
    """The relative error of a tensor, from the norms of its parts."""
    wrong, right = (math.hypot(*column) for column in zip(*norms, strict=True))
    return wrong / right
