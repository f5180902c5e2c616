"""Runs one call of ``fxpass::class_reductions``, or of its backward, on tensors with data.

In: the operands and the text of a spec. Out: the results in the order of ``spec.results``, or the
gradients. Rows that add nothing are left out, the plan says how many rows and classes are computed
at a time, and the implementation of the device computes them. :mod:`fxpass.op.reductions` registers
these functions as operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowADInplaceOrView, _DisableAutocast

from fxpass.aten import reductions as aten
from fxpass.aten.row_sums import is_dense
from fxpass.op.checks import check, check_picks, operand
from fxpass.op.ignored import (
    WORTH_A_PRODUCT,
    WORTH_COPIES,
    of_all_rows,
    rows_of,
    selected,
)
from fxpass.plan.devices import on_device
from fxpass.plan.plan import Plan, plan
from fxpass.spec.dtypes import compute_dtype, gradient_dtype
from fxpass.spec.operands import Operands, Outputs, empty
from fxpass.spec.outputs import lines_of
from fxpass.spec.reductions import Reductions


def class_reductions(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    picks: Tensor | None,
    given: Sequence[Tensor],
    coef: Tensor | None,
    logits: Tensor | None,
    spec: str,
    wide_x: Tensor | None = None,
    wide_weight: Tensor | None = None,
) -> list[Tensor]:
    """The results in the order of ``spec.results``; see
    :func:`fxpass.op.reductions.class_reductions`."""
    s = Reductions.parse(spec)
    operands = Operands(x, weight, bias, scale, picks, tuple(given), coef, logits, s.shard)
    check(operands, s)
    # without an ambient autocast, since the graph's casts are explicit, and without autograd,
    # version counters and views, a fifth of the host's time
    with on_device(x.device), _AutoDispatchBelowADInplaceOrView(), _DisableAutocast():
        check_picks(operands)
        out, found = _forward(operands, s)
        if s.total:
            found = {
                k: _saved(found[k], gradient_dtype(t.dtype, k in s.unrounded))
                for k, t in trained(operands, s).items()
            }
            found["total"] = out.total.sum()
        if "saved" in s.results and not s.saved:  # the place of one that is not there
            found["saved"] = x.new_empty((0, 0), dtype=compute_dtype(x.dtype))
        return [found[name] if name in found else getattr(out, name) for name in s.results]


def _saved(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    return gradient if gradient.dtype == dtype else gradient.to(dtype)


def _forward(operands: Operands, spec: Reductions) -> tuple[Outputs, dict[str, Tensor]]:
    """The outputs and gradients, without the rows that add nothing to the total."""
    coef = operands.coef
    if not operands.weight.shape[0]:
        return _of_no_classes(operands, spec)
    index = None
    if coef is not None and not spec.outputs and operands.logits is None:
        index = None if is_dense(coef) else selected(coef, WORTH_COPIES, operands, spec)
    if coef is None or index is None:
        return _run_forward(operands, spec)

    def of(rows: Tensor) -> Operands:
        return rows_of(operands, rows)._replace(coef=coef[:, rows])

    if operands.x.is_cuda and not len(index):
        # a CUDA graph that is captured next has all rows, and can load no kernel
        _run_forward(of(index.new_zeros(1)), spec)
    out, grads = _run_forward(of(index), spec)
    return out, of_all_rows(grads, operands, index)


def _of_no_classes(operands: Operands, spec: Reductions) -> tuple[Outputs, dict[str, Tensor]]:
    """The outputs of a vocabulary shard without classes."""
    out = empty(operands, spec)
    for tensor in out:
        tensor.zero_()
    lines = out.rows.split([lines_of(output, operands.many) for output in spec.rows])
    for output, some in zip(spec.rows, lines, strict=True):
        some.fill_(-float("inf") if output in ("lse", "max") else 0)
    zeros = {k: t.new_zeros(t.shape) for k, t in trained(operands, spec).items()}
    return out, zeros if spec.total else {}


def _run_forward(operands: Operands, spec: Reductions) -> tuple[Outputs, dict[str, Tensor]]:
    plan = _plan(operands, spec, gradients=bool(spec.total))
    return _implementation(plan).forward(operands, spec, plan)


def _implementation(plan: Plan) -> ModuleType:
    """The module whose ``forward`` and ``backward`` run a call."""
    if plan.implementation == "aten":
        return aten
    from fxpass.kernels import reductions as triton  # imports triton, which not every platform has

    return triton


def class_reductions_backward(
    grad: Tensor,
    lse: Tensor | None,
    rest: Tensor | None,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    picks: Tensor | None,
    given: Sequence[Tensor],
    logits: Tensor | None,
    spec: str,
) -> list[Tensor]:
    """The gradients that a spec without a total names, in the dtypes of :func:`returned`, for the
    gradient ``[R, N]`` of the rows that are not detached. The other arguments are those and the
    results of :func:`class_reductions`, or what ``Operands.read_by(spec.of_backward)`` leaves. An
    empty tensor is the last, for the same reason as in ``spec.results``."""
    s = Reductions.parse(spec)
    operands = Operands(x, weight, bias, scale, picks, tuple(given), None, logits, s.shard)
    if not weight.shape[0]:
        return [t.zero_() for t in places(operands, s)]
    with on_device(x.device), _AutoDispatchBelowADInplaceOrView(), _DisableAutocast():
        none = grad.new_empty((0, 0))
        lse, rest, saved = (none if t is None else t for t in (lse, rest, saved))
        found = _backward_of_rows(operands, s, Outputs(grad, none, lse, rest, saved, none))
    grads = (found[name].to(dtype) for name, dtype in returned(operands, s).items())
    return [*grads, x.new_empty(0)]


def _backward_of_rows(operands: Operands, spec: Reductions, out: Outputs) -> dict[str, Tensor]:
    """The gradients, without the rows that have no incoming gradient in ``out.rows``."""
    least = WORTH_A_PRODUCT if _again(spec) else WORTH_COPIES
    index = None
    if operands.logits is None:
        index = selected(out.rows, least, operands, spec)
    if index is None:
        return _backward_of_some(operands, spec, out, None)
    if operands.x.is_cuda and not len(index):
        _backward_of_some(operands, spec, out, index.new_zeros(1))  # as in forward
    return of_all_rows(_backward_of_some(operands, spec, out, index), operands, index)


def _again(spec: Reductions) -> bool:
    """Whether backward of some rows computes the lse again."""
    return spec.of_backward.softmax and not spec.shard


def _backward_of_some(
    operands: Operands, spec: Reductions, out: Outputs, index: Tensor | None
) -> dict[str, Tensor]:
    """The gradients of the rows with these indices; of all rows for None."""
    some, planned = operands, spec  # the logits are rounded as those of forward's outputs
    if index is not None:
        some, rows = rows_of(operands, index), out.rows[..., index]
        if _again(spec):
            # fewer rows are rounded in another way: exp(z - lse) needs the lse of this z
            planned = spec.of_backward
            out = _run_forward(some, planned)[0]
        else:  # the lse of a shard is of all ranks
            out = Outputs(*(t[..., index] if t.numel() else t for t in out))
        out = out._replace(rows=rows)
    elif spec.of_backward.softmax:
        # a row of zeros adds nothing, if its lse is finite; so is this one times log2(e)
        counts = out.rows.any(0) | out.lse.isfinite()
        out = out._replace(lse=torch.where(counts, out.lse, torch.finfo(out.lse.dtype).max / 2))
    plan = _plan(some, planned, gradients=True)
    incoming = out.rows.to(compute_dtype(operands.x.dtype))
    return _implementation(plan).backward(some, spec.of_backward, plan, out, incoming)


def trained(operands: Operands, spec: Reductions) -> dict[str, Tensor]:
    """The operands whose gradients the spec names, in its order."""
    return {name: operand(operands, name) for name in spec.gradients}


def returned(operands: Operands, spec: Reductions) -> dict[str, torch.dtype]:
    """The dtypes of the gradients that backward returns."""
    return {
        name: compute_dtype(t.dtype) if name in spec.unrounded else t.dtype
        for name, t in trained(operands, spec).items()
    }


def places(operands: Operands, spec: Reductions) -> list[Tensor]:
    """Uninitialised results of the backward operator."""
    dtypes = returned(operands, spec)
    new = (t.new_empty(t.shape, dtype=dtypes[k]) for k, t in trained(operands, spec).items())
    return [*new, operands.x.new_empty(0)]


def _plan(operands: Operands, spec: Reductions, gradients: bool) -> Plan:
    x, weight = operands.x, operands.weight
    n, d, v = *x.shape, weight.shape[0]
    scaled, exist = operands.scale is not None, operands.logits is not None
    return plan(n, d, v, x.dtype, x.device, spec, scaled, gradients, exist)
