"""Losses that cost more fused than they save are left to the inner backend, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass.rewrite.transform import transform
from fxpass.settings import Settings

N, D, V = 512, 8, 2048  # 4 MiB of logits


def reasons(program: Any, *tensors: Tensor, least: float = 1, budget: int = 0) -> list[str]:
    """Why each loss of a program is not fused; an empty list where all are."""
    graphs: list[Any] = []
    torch.compile(program, backend=lambda gm, _: graphs.append(gm) or gm)(*tensors)
    settings = Settings(min_logits_mb=least, memory_mb=budget)
    return [r.reason for r in transform(graphs[0], settings).rejections]


def head(d: int = D, v: int = V, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True)
    return x, weight, torch.randint(v, (n,))


def plain(x, weight, labels):
    return F.cross_entropy(F.linear(x, weight), labels)


def test_small_logits():
    assert not reasons(plain, *head())
    (reason,) = reasons(plain, *head(), least=5)
    assert reason == (
        "its logits take 4.0 MiB, fewer than 5 MiB (FUSEDCE_MIN_LOGITS_MB=0 fuses all)"
    )
    assert not reasons(plain, *head(), least=0)


def test_few_classes():
    few = head(v=255, n=8192)
    (reason,) = reasons(plain, *few)
    assert reason.startswith("rows of 255 logits take hardly more memory")
    assert not reasons(plain, *few, least=0)
    assert not reasons(plain, *head(v=256, n=8192))


def logged(x, weight, labels):
    logits = F.linear(x, weight)
    with torch.no_grad():
        largest = logits.sort(0, descending=True).values[:5].sum()
    return F.cross_entropy(logits, labels), largest


def returned(x, weight, labels):
    logits = F.linear(x, weight)
    return F.cross_entropy(logits, labels), logits


def test_logits_that_are_kept_for_something_else():
    (reason,) = reasons(logged, *head())
    assert reason.startswith("another node of the graph reads its logits")
    assert not reasons(logged, *head(), least=0)
    x, weight, labels = head()
    # without gradients nothing is kept for backward
    assert not reasons(logged, x.detach(), weight.detach(), labels)
    # logits that leave the graph cannot become their gradient, whoever computes the loss
    assert not reasons(returned, *head())


def test_hidden_states_wider_than_the_logits():
    assert not reasons(plain, *head(d=256, v=256, n=4096))
    (reason,) = reasons(plain, *head(d=257, v=256, n=4096))
    assert reason.startswith("rows of 256 logits take less memory than their 257 hidden values")
    assert not reasons(plain, *head(d=257, v=256, n=4096), least=0)


def test_rows_of_logits_that_exist():
    """Without gradients; in training they are deferred."""

    def shifted(x, weight, labels):
        logits = F.linear(x.view(4, -1, x.shape[-1]), weight)
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels.view(4, -1)[:, 1:].flatten()
        ), logits

    assert not reasons(shifted, *head())
    with torch.no_grad():
        (reason,) = reasons(shifted, *head())
        assert reason.startswith("the rows of its logits that are read would be copied")
        assert not reasons(returned, *head())
        assert not reasons(shifted, *head(), least=0)


def chunks(count: int) -> Any:
    def program(x, weight, labels):
        parts = zip(x.chunk(count), labels.chunk(count), strict=True)
        return sum(plain(part, weight, some) for part, some in parts)

    return program


@pytest.mark.parametrize(
    ("d", "count", "fused"), [(512, 4, True), (1024, 4, False), (1024, 1, True)]
)
def test_gradients_of_one_weight(d, count, fused):
    """Each loss makes a gradient of 8 KiB x d of the weight; the logits take 32 MiB."""
    x, weight, labels = head(d=d, n=4096)
    found = reasons(chunks(count), x, weight, labels, budget=1)
    if fused:
        assert not found
    else:
        assert len(found) == count - 1  # the last one is alone then
        assert "4 passes over one weight make a gradient of it each" in found[0]
        assert not reasons(chunks(count), x, weight, labels, least=0, budget=1)
        assert not reasons(chunks(count), x, weight.detach(), labels, budget=1)


def rows(x, weight, labels):
    return F.cross_entropy(F.linear(x, weight), labels, reduction="none").square().mean()


def test_the_weight_of_frozen_hidden_states():
    """Backward keeps a copy of it, of 8 KiB x d."""
    x, weight, labels = head(d=N)
    (reason,) = reasons(rows, x.detach(), weight, labels)
    assert reason.startswith("backward would need a copy of the weight, 4.0 MiB for 4.0 MiB of")
    assert not reasons(rows, x, weight, labels)
    assert not reasons(rows, x.detach(), weight, labels, least=0)
    x, weight, labels = head(d=N // 2)
    assert not reasons(rows, x.detach(), weight, labels)


def merged(x, weight, labels, up, down):
    return plain(x, weight + up @ down * 2, labels)


def normalized(x, weight, labels):
    return plain(x, F.normalize(weight, dim=1).t().contiguous().t(), labels)


def test_a_weight_that_the_graph_computes():
    """Its gradient takes 8 KiB x d."""
    x, weight, labels = head(d=N)
    up, down = torch.randn(V, 2, requires_grad=True), torch.randn(2, N)
    (reason,) = reasons(merged, x, weight.detach(), labels, up, down)
    assert reason.startswith("the graph computes its weight, whose gradient takes 4.0 MiB for 4.0")
    assert not reasons(merged, x, weight.detach(), labels, up, down, least=0)
    assert not reasons(merged, x, weight.detach(), labels, up.detach(), down)
    assert reasons(normalized, x, weight, labels)
    x, weight, labels = head(d=N // 2, n=4 * N)
    assert not reasons(merged, x, weight, labels, up, down[:, : N // 2], budget=8)
    assert not reasons(normalized, x, weight, labels, budget=8)


def test_views_and_casts_of_a_weight_are_not_computed():
    def sliced(x, weight, labels):
        return plain(x[:, 1:].bfloat16(), weight.t()[1:].bfloat16().t(), labels)

    assert not reasons(sliced, *head(d=N + 1))
