"""A step's results in float64, and how far others are from them.

In: a case, whose rows repeat. Out: the loss and metrics, and the gradient of each trained operand::

    >>> case = Case("eager", 8, 4, 16, "float32", "cpu")
    >>> exact = answer(case)
    >>> list(exact), exact["dx"].dtype
    (['loss', 'dx', 'dw'], torch.float64)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.loss.case import OF_ROWS, Case
from benchmarks.loss.programs import PROGRAMS, Function, function_of

BLOCK = 8192  # rows that are compared at a time


def answer(case: Case) -> dict[str, Tensor]:
    """The exact results; gradients of rows only for the rows that differ."""
    few = dataclasses.replace(case, n=case.distinct)
    program = PROGRAMS[case.program]
    operands = {k: _wide(t) for k, t in few.operands(program.names).items()}
    function = function_of(few, few.stack().double().requires_grad_(False))
    found = results(function, operands, program.trained if case.backward else ())
    # one of the equal rows has its part of their gradient
    return {k: t * (few.n / case.n) if k[1:] in OF_ROWS else t for k, t in found.items()}


def _wide(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


def results(
    function: Function, operands: dict[str, Tensor], trained: Sequence[str]
) -> dict[str, Tensor]:
    """Runs a step; without trained operands under ``no_grad``.

    Returns:
        "loss", then metrics by their number, then for each trained operand its gradient as "dx".
    """
    for name in trained:
        operands[name].requires_grad_().grad = None
    with torch.set_grad_enabled(bool(trained)):
        out: Any = function(*operands.values())
    loss, *metrics = out if isinstance(out, tuple) else (out,)
    if trained:
        loss.backward()
    found = {"loss": loss.detach()} | {f"metric {i}": t.detach() for i, t in enumerate(metrics)}
    gradients = {f"d{name}": operands[name].grad for name in trained}
    return found | {k: t for k, t in gradients.items() if t is not None}


def errors(got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """``|got - exact| / |exact|`` of each result, norms in float64; inf for one that is missing."""
    return {k: distance(got[k], t) if k in got else math.inf for k, t in exact.items()}


def distance(got: Tensor, exact: Tensor) -> float:
    """Of a tensor whose rows repeat those of ``exact``, a block at a time."""
    if not exact.dim():
        got, exact = got.reshape(1), exact.reshape(1)
    repeated = got.detach().unflatten(0, (-1, len(exact)))
    off, right = [], []
    for start in range(0, len(exact), BLOCK):
        part = slice(start, start + BLOCK)
        for block in repeated.split(max(1, BLOCK // len(exact))):
            off.append(float((block[:, part].double() - exact[part]).norm()))
            right.append(float(exact[part].norm()) * math.sqrt(len(block)))
    wrong, norm = math.hypot(*off), math.hypot(*right)
    return wrong / max(norm, 1e-30)
