"""What the tests of fused heads share: small programs, and how they are judged."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils import _pytree as pytree

import fxpass
from fxpass.formula.reductions import Reductions
from fxpass.rewrite.matches import RegionMatch
from tests.support.numerics import assert_as_accurate

B, S, D, V = 2, 4, 6, 10


def inputs(dtype=torch.float32):
    """x [B, S, D] and weight [V, D] with gradients, labels [B, S]."""
    x = torch.randn(B, S, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    return x, weight, torch.randint(V, (B, S))


class _Failures(logging.Handler):
    """Collects what fxpass logs where an unforeseen program runs without the rewrite."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "failed" in record.getMessage():
            error = record.exc_info and record.exc_info[1]
            self.found.append(f"{record.getMessage()}: {error!r}")


@contextmanager
def without_failures() -> Iterator[None]:
    """Nothing fails inside of fxpass, which would log it, and leave the program as it is."""
    logger, handler = logging.getLogger("fxpass"), _Failures()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not handler.found, handler.found


def report_of(fn, *args) -> fxpass.Report:
    """What becomes of a program, whose graphs run in eager."""
    with mock.patch.dict(os.environ, FUSEDCE_INNER="eager"), without_failures():
        return fxpass.explain(fn, *args)


def head_of(fn, *args) -> RegionMatch:
    """The only match, beside which nothing is declined."""
    report = report_of(fn, *args)
    assert not report.rejections, str(report)
    (head,) = report.matches
    return head


def spec_of(fn, *args) -> Reductions:
    """That of the only call of the only match, which has a normal form."""
    (call,) = head_of(fn, *args).calls
    return call.spec


def reason_of(fn, *args) -> str:
    """The reason of the only loss, which must not be fused."""
    report = report_of(fn, *args)
    assert not report.matches, str(report)
    (rejection,) = report.rejections
    return str(rejection)


# What the operator's calls of a program are.
CLASS_REDUCTIONS, ROW_FUNCTION, DECLINED = "class reductions", "a row function", "nothing"


def fused_as(fn, *args) -> str:
    """What a program is fused as: one of the above, or several, joined by `` and ``."""
    choices = [choice for match in report_of(fn, *args).matches for choice in match.choices]
    kinds = {ROW_FUNCTION if isinstance(choice, str) else CLASS_REDUCTIONS for choice in choices}
    return " and ".join(sorted(kinds)) or DECLINED


def compiled(program, **options):
    """A program with fusedce, of which the inner backend runs the graph as it is by default."""
    chosen = {"fusedce.inner": "eager"} | {f"fusedce.{k}": v for k, v in options.items()}
    return torch.compile(program, backend="fusedce", options=chosen)


def check(program, labels, *tensors, **options) -> None:
    """The fused program computes what eager computes."""

    def run(*tensors):
        return program(*tensors, labels)

    torch._dynamo.reset()
    with without_failures():
        assert_as_accurate(compiled(run, **options), run, tensors, tensors[0].dtype)


def answer(program, args) -> list[Any]:
    """The outputs of a program, whether they have gradients, and the gradients of its inputs."""
    args = [t.detach().clone().requires_grad_(t.requires_grad) for t in args]
    outputs = pytree.tree_leaves(program(*args))
    tensors = [t for t in outputs if isinstance(t, torch.Tensor)]
    leaves = [t for t in args if t.requires_grad]
    total = sum(t.square().sum() for t in tensors if t.requires_grad)
    given = isinstance(total, torch.Tensor) and leaves
    grads = torch.autograd.grad(total, leaves, allow_unused=True) if given else ()
    none = torch.empty(0)  # what assert_close takes
    values = [t.detach() * 1 if isinstance(t, torch.Tensor) else t for t in outputs]
    return [values, [t.requires_grad for t in tensors], [none if g is None else g for g in grads]]


def same(program, *args, rtol=None, atol=None, **options) -> None:
    """The fused program returns what eager returns, with its gradients; or raises, as eager does."""
    torch._dynamo.reset()
    fused = compiled(program, **options)
    try:
        theirs = answer(program, args)
    except (RuntimeError, IndexError, ValueError):
        with pytest.raises((RuntimeError, IndexError, ValueError)):
            answer(fused, args)
        return
    with without_failures():
        ours = answer(fused, args)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)


def last(z):
    """[..., V] -> [N, V]"""
    return z.view(-1, z.shape[-1])
