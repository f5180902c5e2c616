"""The engine of formulas with a history of autograd, as tests call it.

In: operands and a spec. Out: the results by name; the rows, or the total, have gradients::

    found = reduced(Operands(x, weight, None, None, picks, ()), "outputs=pick gradients=x")
    found["rows"].sum().backward()
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpass.op import run
from fxpass.spec.operands import Operands, Outputs
from fxpass.spec.outputs import lines_of
from fxpass.spec.reductions import REVISION, Reductions


class _Engine(torch.autograd.Function):
    """``run.forward`` and ``run.backward``, of what the spec trains."""

    @staticmethod
    def forward(
        ctx: Any, operands: Operands, spec: Reductions, *trained: Tensor
    ) -> tuple[Tensor, ...]:
        out, ctx.grads = run.forward(operands, spec)
        ctx.operands, ctx.spec, ctx.out = operands, spec, out
        ctx.dtypes = [t.dtype for t in trained]
        found = out._replace(total=out.total.sum())
        ctx.mark_non_differentiable(
            *(t for name, t in found._asdict().items() if name != _with_history(spec))
        )
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:  # pyright: ignore
        spec: Reductions = ctx.spec
        given = Outputs(*incoming)
        if spec.total:
            found = {name: t * given.total for name, t in ctx.grads.items()}
        else:
            found = run.backward(ctx.operands, spec, ctx.out, trained_lines(ctx, given.rows))
        grads = zip(spec.gradients, ctx.dtypes, strict=True)
        return None, None, *(found[name].to(dtype) for name, dtype in grads)


def trained_lines(ctx: Any, rows: Tensor) -> Tensor:
    """The gradients of the outputs that are not detached."""
    outputs = ctx.spec.rows
    lines = rows.split([lines_of(output, ctx.operands.many) for output in outputs])
    pairs = zip(outputs, lines, strict=True)
    return torch.cat([line for output, line in pairs if output not in ctx.spec.detached])


def _with_history(spec: Reductions) -> str:
    return "total" if spec.total else "rows"


def reduced(operands: Operands, spec: Reductions | str) -> dict[str, Tensor]:
    """The results by name: those of :class:`Outputs`, of which ``total`` is the sum over the rows.

    Args:
        operands: of the engine.
        spec: a record, or its text without the revision.
    """
    if isinstance(spec, str):
        spec = Reductions.parse(f"{REVISION} {spec}")
    operands = operands._replace(shard=spec.shard)
    trained = run.trained(operands, spec)
    found = _Engine.apply(operands, spec, *trained.values())
    return dict(zip(Outputs._fields, found, strict=True))
