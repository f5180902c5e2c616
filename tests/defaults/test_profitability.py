"""Losses that cost more fused than they save are left to the inner backend, with the reason."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass import messages
from fxpass.report import explain_with
from fxpass.settings import Settings

N, D, V = 512, 8, 2048  # 4 MiB of logits


def reasons(program: Any, *tensors: Tensor, least: float = 1) -> list[str]:
    """Why each loss of a program is not fused; an empty list where all are."""
    settings = Settings(inner="eager", min_logits_mb=least)
    return [r.reason for r in explain_with(settings, program, *tensors).rejections]


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


def test_logits_that_are_kept_for_something_else():
    (reason,) = reasons(logged, *head())
    assert "aten.sort" in reason
    assert messages.ALONG_ROWS in reason


def test_hidden_states_wider_than_the_logits():
    assert not reasons(plain, *head(d=256, v=256, n=4096))
    (reason,) = reasons(plain, *head(d=257, v=256, n=4096))
    assert reason.startswith("rows of 256 logits take less memory than their 257 hidden values")
    assert not reasons(plain, *head(d=257, v=256, n=4096), least=0)
