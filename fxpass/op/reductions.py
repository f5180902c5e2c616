"""``fxpass::class_reductions``: reductions of a head's logits over the classes, without the logits.

In: hidden states, the head's weight, what its reductions read, and the text of
:class:`fxpass.spec.reductions.Reductions`. Out: the outputs of every row; backward computes the
logits again, a chunk of rows at a time::

    >>> x, w, c = torch.randn(4, 8), torch.randn(10, 8), torch.tensor([1, 2, 3, 4])
    >>> spec = "r5 outputs=pick;moment(1,1)"
    >>> found = class_reductions(x, w, None, None, c, [], None, None, spec)
    >>> log_probs, minus_entropy = found["rows"]  # [4] each

NOTE: gradients in forward. Where a program adds up outputs with coefficients that it knows before
(a mean, a mask), the operator returns this total, and forward computes its gradients with it: the
logits are computed once. Backward multiplies the saved gradients by the total's incoming gradient::

    >>> of_mean = torch.full((1, 4), -1 / 4)
    >>> spec = "r5 outputs=argmax gradients=x total=pick"
    >>> _ = x.requires_grad_()
    >>> found = class_reductions(x, w, None, None, c, [], of_mean, None, spec)
    >>> torch.allclose(found["total"], torch.nn.functional.cross_entropy(x @ w.T, c))
    True
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowADInplaceOrView, _DisableAutocast

import fxpass.op.kept  # noqa: F401, stored code that imports this module may call it too
from fxpass.aten import reductions as aten
from fxpass.aten.row_sums import is_dense
from fxpass.op.checks import (
    check,
    check_first_derivative,
    check_gradients,
    check_no_tangents,
    check_picks,
    operand,
)
from fxpass.op.ignored import (
    WORTH_A_PRODUCT,
    WORTH_COPIES,
    of_all_rows,
    rows_of,
    selected,
)
from fxpass.op.saved import scaled
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
) -> dict[str, Tensor]:
    """Reductions of ``x @ weight.T + bias`` over the classes.

    Args:
        x: ``[N, D]`` floating point.
        weight: ``[V, D]``, dtype of x. Without classes, as in an empty vocabulary shard, lse, max
            and amax are -inf, and all other outputs and gradients are 0.
        bias: ``[V]`` in the dtype of x or of the outputs, or None. A wider bias is added to the
            up-cast logits.
        scale: ``[N]`` in the dtype of the outputs, a factor of each row's transformed logits.
        picks: class indices ``[N]`` or ``[N, K]`` int64, for the outputs ``pick`` and ``at``; else
            None.
        given: the weights of moments, ``[V]`` or ``[N, V]`` floating point, and operands of the
            transform, which may be masks too.
        coef: ``[T, N]`` in the dtype of the outputs, the weights of the outputs that ``spec.total``
            names, in its order, K rows for picks ``[N, K]``; None without a total. It has no
            gradient. A row of zeros adds nothing to the total and its gradients.
        logits: ``[N, V]``, the linear's output with its bias, if the graph needs it anyway; it has
            no gradient, and those of the operands are computed from it.
        spec: the text of a :class:`fxpass.spec.reductions.Reductions`.

    Returns:
        the results of the operator by name, those of ``spec.results``:

        rows: ``[R, N]`` f32 (f64 for f64 operands), in the order of the spec's outputs; K rows for
            picks ``[N, K]``.
        indices: ``[I, N]`` int64, the outputs that are class indices.
        lse, rest, saved: what backward reads; not with a total.
        total: a scalar, the sum of ``coef * output``.
        x, weight, bias: the gradients of the total, in the dtypes of their operands, but f32 for
            fp16.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        IndexError: a pick is no class (on CPU; on GPUs a device-side assertion fails).
    """
    results = _FORWARD(x, weight, bias, scale, picks, given, coef, logits, spec)
    return Reductions.parse(spec).named(results)


def _class_reductions(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    picks: Tensor | None,
    given: Sequence[Tensor],
    coef: Tensor | None,
    logits: Tensor | None,
    spec: str,
) -> list[Tensor]:
    """The results of :func:`class_reductions` in the order of ``spec.results``."""
    s = Reductions.parse(spec)
    operands = Operands(x, weight, bias, scale, picks, tuple(given), coef, logits, s.shard)
    check(operands, s)
    # without an ambient autocast, since the graph's casts are explicit, and without autograd,
    # version counters and views, a fifth of the host's time
    with on_device(x.device), _AutoDispatchBelowADInplaceOrView(), _DisableAutocast():
        check_picks(operands)
        out, found = _forward(operands, s)
        if s.total:
            found = {k: _saved(found[k], t.dtype) for k, t in _trained(operands, s).items()}
            found["total"] = out.total.sum()
        if "saved" in s.results and not s.saved:  # the place of one that is not there
            found["saved"] = x.new_empty((0, 0), dtype=compute_dtype(x.dtype))
        return [found[name] if name in found else getattr(out, name) for name in s.results]


def _saved(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of an operand of ``dtype``, as forward returns it."""
    dtype = gradient_dtype(dtype)
    return gradient if gradient.dtype == dtype else gradient.to(dtype)


def _forward(operands: Operands, spec: Reductions) -> tuple[Outputs, dict[str, Tensor]]:
    """The outputs and gradients, without the rows that add nothing to the total."""
    coef = operands.coef
    if not operands.weight.shape[0]:
        return _of_no_classes(operands, spec)
    index = None
    if coef is not None and not spec.outputs and operands.logits is None:
        index = None if is_dense(coef) else selected(coef, WORTH_COPIES, operands)
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
        some.fill_(-float("inf") if output in ("lse", "max", "amax") else 0)
    trained = _trained(operands, spec) if spec.total else {}
    return out, {k: t.new_zeros(t.shape) for k, t in trained.items()}


def _run_forward(operands: Operands, spec: Reductions) -> tuple[Outputs, dict[str, Tensor]]:
    plan = _plan(operands, spec, gradients=bool(spec.total))
    return _implementation(plan).forward(operands, spec, plan)


def _implementation(plan: Plan) -> ModuleType:
    """The module whose ``forward`` and ``backward`` run a call."""
    if plan.implementation == "aten":
        return aten
    from fxpass.kernels import reductions as triton  # imports triton, which not every platform has

    return triton


def _class_reductions_backward(
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
    """The gradients that a spec without a total names, in the dtypes of their operands, for the
    gradient ``[R, N]`` of the rows that are not detached. The other arguments are those and the
    results of :func:`class_reductions`, or what ``Operands.read_by(spec.of_backward)`` leaves. An
    empty tensor is the last, for the same reason as in ``spec.results``."""
    s = Reductions.parse(spec)
    operands = Operands(x, weight, bias, scale, picks, tuple(given), None, logits, s.shard)
    if not weight.shape[0]:
        return [*(t.new_zeros(t.shape) for t in _trained(operands, s).values()), x.new_empty(0)]
    with on_device(x.device), _AutoDispatchBelowADInplaceOrView(), _DisableAutocast():
        none = grad.new_empty((0, 0))
        lse, rest, saved = (none if t is None else t for t in (lse, rest, saved))
        found = _backward_of_rows(operands, s, Outputs(grad, none, lse, rest, saved, none))
    grads = (found[name].to(t.dtype) for name, t in _trained(operands, s).items())
    return [*grads, x.new_empty(0)]


def _backward_of_rows(operands: Operands, spec: Reductions, out: Outputs) -> dict[str, Tensor]:
    """The gradients, without the rows that have no incoming gradient in ``out.rows``."""
    least = WORTH_A_PRODUCT if _again(spec) else WORTH_COPIES
    index = selected(out.rows, least, operands) if operands.logits is None else None
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


def _trained(operands: Operands, spec: Reductions) -> dict[str, Tensor]:
    """The operands whose gradients the spec names, in its order."""
    return {name: operand(operands, name) for name in spec.gradients}


def _plan(operands: Operands, spec: Reductions, gradients: bool) -> Plan:
    x, weight = operands.x, operands.weight
    n, d, v = *x.shape, weight.shape[0]
    scaled, exist = operands.scale is not None, operands.logits is not None
    return plan(n, d, v, x.dtype, x.device, spec, scaled, gradients, exist)


# ---------------------------------------------------------------- the compiler and autograd


def _fake(x, weight, bias, scale, picks, given, coef, logits, spec: str) -> list[Tensor]:
    s = Reductions.parse(spec)
    operands = Operands(x, weight, bias, scale, picks, tuple(given), coef, logits)
    check(operands, s)
    found = empty(operands, s)._asdict()
    if s.total:
        found["total"] = found["total"].new_empty(())
        found |= {
            name: t.new_empty(t.shape, dtype=gradient_dtype(t.dtype))
            for name, t in _trained(operands, s).items()
        }
    return [found[name] for name in s.results]


def _fake_backward(
    grad, lse, rest, saved, x, weight, bias, scale, picks, given, logits, spec: str
) -> list[Tensor]:
    operands = Operands(x, weight, bias, scale, picks, tuple(given))
    trained = _trained(operands, Reductions.parse(spec))
    return [*(t.new_empty(t.shape) for t in trained.values()), x.new_empty(0)]


class _Differentiable(torch.autograd.Function):
    """The operator, whose results have a history."""

    @staticmethod
    def forward(ctx: Any, keys: Any, text: str, *tensors: Any) -> tuple[Tensor, ...]:
        picks, coef, logits, x, weight, bias, scale, *given = tensors
        spec = Reductions.parse(text)
        operands = Operands(x, weight, bias, scale, picks, tuple(given), coef, logits)
        check_gradients(operands, spec)
        arguments = x, weight, bias, scale, picks, given, coef, logits, text
        with torch._C._AutoDispatchBelowAutograd():
            results = spec.named(_FORWARD.redispatch(keys, *arguments))
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.text, ctx.count = spec, text, len(given)
        differentiable = "total" if spec.total else "rows"
        ctx.mark_non_differentiable(*(t for k, t in results.items() if k != differentiable))
        if spec.total:
            ctx.dtypes = {name: t.dtype for name, t in _trained(operands, spec).items()}
            ctx.save_for_backward(*(results[name] for name in spec.gradients))
        else:
            saved = (results.get(name) for name in ("lse", "rest", "saved"))
            ctx.lines = [lines_of(output, operands.many) for output in spec.rows]
            read = operands.read_by(spec.of_backward)
            ctx.save_for_backward(*saved, logits, *read[:5], *read.given)
        return tuple(results.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore
        check_first_derivative()
        spec: Reductions = ctx.spec
        incoming, found = spec.named(grads), {}
        if spec.total and incoming["total"] is not None:
            saved = zip(ctx.dtypes.items(), ctx.saved_tensors, strict=True)
            found = {k: scaled(t, incoming["total"], dtype) for (k, dtype), t in saved}
        elif incoming.get("rows") is not None:
            lse, rest, saved, logits, *operands = ctx.saved_tensors
            read = lse, rest, saved, *operands[:5], operands[5:], logits
            grad = incoming["rows"]
            if spec.detached:
                lines = zip(spec.rows, grad.split(ctx.lines), strict=True)
                grad = torch.cat([line for output, line in lines if output not in spec.detached])
            gradients = _BACKWARD(grad, *read, ctx.text)
            found = dict(zip(spec.gradients, gradients, strict=False))
        of_operands = ("x", "weight", "bias", "scale", *(f"given{i}" for i in range(ctx.count)))
        return None, None, None, None, None, *map(found.get, of_operands)


def _by_autograd(keys: Any, *arguments: Any) -> list[Tensor]:
    """The operator's kernel of autograd, which also runs where nothing has a gradient."""
    after = keys & torch._C._after_autograd_keyset
    x, weight, bias, scale, _, given, *_ = arguments
    check_no_tangents((x, weight, bias, scale, *given))
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
        *operands, given, coef, logits, text = arguments
        tensors = operands.pop(), coef, logits, *operands, *given
        return list(_Differentiable.apply(after, text, *tensors))
    if after.highestPriorityTypeId() in _PLAIN:
        return _class_reductions(*arguments)  # a second dispatch takes the host 10 us
    with torch._C._AutoDispatchBelowAutograd():
        return _FORWARD.redispatch(after, *arguments)


# The keys of tensors that no mode or subclass takes.
_PLAIN = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
_LIBRARY = torch.library.Library("fxpass", "FRAGMENT")
for _name, _function, _of_shapes in (
    ("class_reductions", _class_reductions, _fake),
    ("class_reductions_backward", _class_reductions_backward, _fake_backward),
):
    # not torch.library.custom_op, whose checks of aliases take 20 us of each call on the host
    _schema = torch.library.infer_schema(_function, mutates_args=())
    _LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxpass::{_name}", _of_shapes, lib=_LIBRARY)
_LIBRARY.impl("class_reductions", _by_autograd, "Autograd", with_keyset=True)
_FORWARD = torch.ops.fxpass.class_reductions.default
_BACKWARD = torch.ops.fxpass.class_reductions_backward.default
