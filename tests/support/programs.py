"""What the tests of the matcher share: small programs, and how they are judged."""

from __future__ import annotations

import os
from unittest import mock

import torch

import fxpass
from fxpass.match.head import Head
from fxpass.spec.reductions import Reductions
from tests.support.numerics import assert_as_accurate

B, S, D, V = 2, 4, 6, 10


def inputs(dtype=torch.float32):
    """x [B, S, D] and weight [V, D] with gradients, labels [B, S]."""
    x = torch.randn(B, S, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    return x, weight, torch.randint(V, (B, S))


def report_of(fn, *args) -> fxpass.Report:
    """What the rewrite of Dynamo's graph does; with this inner backend there are no AOT graphs."""
    with mock.patch.dict(os.environ, FUSEDCE_INNER="eager"):
        return fxpass.explain(fn, *args)


def head_of(fn, *args) -> Head:
    """The only head, whose reductions must be fused."""
    report = report_of(fn, *args)
    assert not report.rejections, str(report)
    (head,) = report.matches
    return head


def spec_of(fn, *args) -> Reductions:
    """That of the only call of the only head."""
    (call,) = head_of(fn, *args).calls
    return call.spec


def reason_of(fn, *args) -> str:
    """The reason of the only loss, which must not be fused."""
    report = report_of(fn, *args)
    assert not report.matches, str(report)
    (rejection,) = report.rejections
    return str(rejection)


def check(program, labels, *tensors, **options) -> None:
    """The fused program computes what eager computes."""

    def run(*tensors):
        return program(*tensors, labels)

    torch._dynamo.reset()
    chosen = {f"fusedce.{k}": v for k, v in options.items()} | {"fusedce.inner": "eager"}
    fused = torch.compile(run, backend="fusedce", options=chosen)
    assert_as_accurate(fused, run, tensors, tensors[0].dtype)


def last(z):
    """[..., V] -> [N, V]"""
    return z.view(-1, z.shape[-1])
