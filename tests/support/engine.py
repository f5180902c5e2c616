"""The engine of formulas with a history of autograd, as tests call it.

In: operands and a spec. Out: the results by name; the rows, or the sum of a total, have gradients::

    found = reduced(Operands(x, weight, None, None, picks, ()), "outputs=pick gradients=x")
    found["rows"].sum().backward()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxpass.formula.operands import Operands, Outputs
from fxpass.formula.outputs import Output, line_count
from fxpass.formula.reductions import Reductions
from fxpass.op import run
from tests.support.specs import spec_of


class _Engine(torch.autograd.Function):
    """``run.reduce_head`` and ``run.head_gradients``, of what the spec trains."""

    @staticmethod
    def forward(
        ctx: Any, operands: Operands, spec: Reductions, *trained: Tensor
    ) -> tuple[Tensor, ...]:
        out, ctx.grads = run.reduce_head(operands, spec)
        ctx.operands, ctx.spec, ctx.out = operands, spec, out
        ctx.dtypes = [t.dtype for t in trained]
        found = out._asdict() | {"total": _total(operands, spec, out)}
        with_history = "total" if spec.total else "rows"
        ctx.mark_non_differentiable(*(t for name, t in found.items() if name != with_history))
        return tuple(found.values())

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:  # pyright: ignore
        spec: Reductions = ctx.spec
        if spec.total:
            found = {name: t * incoming[-1] for name, t in ctx.grads.items()}
        else:
            found = run.head_gradients(ctx.operands, spec, ctx.out, trained_lines(ctx, incoming[0]))
        grads = zip(spec.gradients, ctx.dtypes, strict=True)
        return None, None, *(found[name].to(dtype) for name, dtype in grads)


def _lines(operands: Operands, outputs: Sequence[Output]) -> list[int]:
    return [line_count(output, operands.pick_count) for output in outputs]


def trained_lines(ctx: Any, rows: Tensor) -> Tensor:
    """The gradients of the outputs that are not detached."""
    outputs = ctx.spec.rows
    lines = rows.split(_lines(ctx.operands, outputs))
    pairs = zip(outputs, lines, strict=True)
    return torch.cat([line for output, line in pairs if output not in ctx.spec.detached])


def _total(operands: Operands, spec: Reductions, out: Outputs) -> Tensor:
    """The sum of a total, as programs add it up: of those of its outputs that the call returns. A
    row without a coefficient adds 0."""
    if operands.coef is None:
        return out.rows.new_zeros(())
    lines = dict(zip(spec.rows, out.rows.split(_lines(operands, spec.rows)), strict=True))
    coefs = operands.coef.split(_lines(operands, spec.total))
    pairs = zip(spec.total, coefs, strict=True)
    terms = [(coef, lines[output]) for output, coef in pairs if output in lines]
    return sum(
        ((c * line).masked_fill_(c == 0, 0).sum() for c, line in terms), out.rows.new_zeros(())
    )


def reduced(operands: Operands, spec: Reductions | str) -> dict[str, Tensor]:
    """The results by name: those of :class:`Outputs`, and ``total``, the sum of a total.

    Args:
        operands: of the engine.
        spec: a record, or its text.
    """
    if isinstance(spec, str):
        spec = spec_of(spec)
    trained = run.trained(operands, spec)
    found = _Engine.apply(operands, spec, *trained.values())
    return dict(zip((*Outputs._fields, "total"), found, strict=True))
