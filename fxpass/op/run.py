"""Runs the reductions of a head and their gradients, on tensors with data.

In: operands and a spec. Out: the outputs of every row, and the gradients of the operands. The
implementation of the device computes them, with the rows and classes of the plan at a time.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from fxpass.aten import reductions as aten
from fxpass.formula.dtypes import compute_dtype, gradient_dtype
from fxpass.formula.operands import Operands, Outputs, empty_outputs
from fxpass.formula.outputs import line_count
from fxpass.formula.reductions import Reductions
from fxpass.op.checks import check, check_picks
from fxpass.plan.plan import Plan, plan_head


def reduce_head(operands: Operands, spec: Reductions) -> tuple[Outputs, dict[str, Tensor]]:
    """The outputs of every row, and the gradients of the total, if there is one, in the dtypes of
    :func:`fxpass.formula.dtypes.gradient_dtype`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        IndexError: a pick is no class (on CPU; on GPUs a device-side assertion fails).
    """
    check(operands, spec)
    check_picks(operands)
    if not operands.weight.shape[0]:
        return _reduce_no_classes(operands, spec)
    plan = _plan(operands, spec, gradients=bool(spec.total))
    out, grads = _implementation(plan).forward(operands, spec, plan)
    wanted = trained(operands, spec) if spec.total else {}
    dtypes = {k: gradient_dtype(t.dtype, k in spec.unrounded) for k, t in wanted.items()}
    return out, {k: grads[k].to(dtype) for k, dtype in dtypes.items()}


def head_gradients(
    operands: Operands, spec: Reductions, out: Outputs, incoming: Tensor
) -> dict[str, Tensor]:
    """The gradients that a spec without a total names.

    Args:
        operands: as of :func:`reduce_head`.
        spec: names gradients, and has no total.
        out: as :func:`reduce_head` returned them.
        incoming: the gradients ``[R, N]`` of the rows that are not detached.
    """
    if not operands.weight.shape[0]:
        return {k: t.new_zeros(t.shape) for k, t in trained(operands, spec).items()}
    if spec.of_backward.reads_softmax:
        # a row of zeros adds nothing, if its lse is finite; so is this one times log2(e)
        counts = incoming.any(0) | out.lse.isfinite()
        out = out._replace(lse=torch.where(counts, out.lse, torch.finfo(out.lse.dtype).max / 2))
    plan = _plan(operands, spec, gradients=True)
    incoming = incoming.to(compute_dtype(operands.x.dtype))
    return _implementation(plan).backward(operands, spec.of_backward, plan, out, incoming)


def _reduce_no_classes(operands: Operands, spec: Reductions) -> tuple[Outputs, dict[str, Tensor]]:
    """The outputs of a head without classes."""
    out = empty_outputs(operands, spec)
    for tensor in out:
        tensor.zero_()
    lines = out.rows.split([line_count(output, operands.pick_count) for output in spec.rows])
    for output, values in zip(spec.rows, lines, strict=True):
        values.fill_(-float("inf") if output in ("lse", "max") else 0)
    zeros = {k: t.new_zeros(t.shape) for k, t in trained(operands, spec).items()}
    return out, zeros if spec.total else {}


def _implementation(plan: Plan) -> ModuleType:
    """The module whose ``forward`` and ``backward`` run a call."""
    if plan.implementation == "aten":
        return aten
    from fxpass.kernels import reductions as triton  # imports triton, which not every platform has

    return triton


def trained(operands: Operands, spec: Reductions) -> dict[str, Tensor]:
    """The operands whose gradients the spec names, in its order."""
    return {name: getattr(operands, name) for name in spec.gradients}


def _plan(operands: Operands, spec: Reductions, gradients: bool) -> Plan:
    x = operands.x
    n, d = x.shape
    v = len(operands.weight)
    return plan_head(n, d, v, x.dtype, x.device, spec, operands.scale is not None, gradients)
