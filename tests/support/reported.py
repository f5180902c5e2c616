"""Small programs and models of which tests ask for a report."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpass.report import Report

# Dynamo itself looks at the .grad of logits that enter a graph
NON_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def inputs(n: int = 4, dtype: torch.dtype = torch.float32):
    weight = torch.ones(10, 8, dtype=dtype, requires_grad=True)
    return torch.ones(n, 8, dtype=dtype), weight, torch.zeros(n).long()


def fused(x, w, target):
    return F.cross_entropy(F.linear(x, w), target)


def rejected(x, w, target):
    return F.cross_entropy(F.linear(x, w).cumsum(0), target)


def loss_less(x, w, target):
    return x.tanh().sum() + w.sum()


def broken(x, w, target):
    logits = F.linear(x, w)
    torch._dynamo.graph_break()
    return F.cross_entropy(logits, target)


def broken_before(x, w, target):
    x = x * 2
    torch._dynamo.graph_break()
    return F.cross_entropy(F.linear(x, w), target)


def kept(x, w, target):
    logits = F.linear(x, w)
    return F.cross_entropy(logits, target), logits


def several(x, w, target):
    logits = F.linear(x, w) * 2
    first = F.cross_entropy(F.linear(x, w), target)
    return (
        first + F.cross_entropy(logits, target) + F.cross_entropy(F.linear(x, w).cumsum(0), target)
    )


def under_autocast(x, w, target):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(F.linear(x, w), target)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 10)
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, x, target):
        return self.loss(self.head(x), target)


def counts(report: Report) -> tuple[int, int, int, int]:
    return (report.graphs, len(report.matches), len(report.rejections), len(report.casts))


def plain(model):
    return model


def wrapped(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")
    return model
