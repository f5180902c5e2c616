"""``fxpass::class_reductions``: reductions of a head's logits over the classes, without the logits.

In: hidden states, the head's weight, what its reductions read, and the text of
:class:`fxpass.spec.reductions.Reductions`. Out: the outputs of every row; backward computes the
logits again, a chunk of rows at a time::

    >>> x, w, c = torch.randn(4, 8), torch.randn(10, 8), torch.tensor([1, 2, 3, 4])
    >>> spec = "r6 outputs=pick;moment(1,1)"
    >>> found = class_reductions(x, w, None, None, c, [], None, None, spec)
    >>> log_probs, minus_entropy = found["rows"]  # [4] each

NOTE: gradients in forward. Where a program adds up outputs with coefficients that it knows before
(a mean, a mask), the operator returns this total, and forward computes its gradients with it: the
logits are computed once. Backward multiplies the saved gradients by the total's incoming gradient::

    >>> of_mean = torch.full((1, 4), -1 / 4)
    >>> spec = "r6 outputs=argmax gradients=x total=pick"
    >>> _ = x.requires_grad_()
    >>> found = class_reductions(x, w, None, None, c, [], of_mean, None, spec)
    >>> torch.allclose(found["total"], torch.nn.functional.cross_entropy(x @ w.T, c))
    True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fxpass.op.kept  # noqa: F401, stored code that imports this module may call it too
from fxpass.op import run
from fxpass.op.batched import register_batches
from fxpass.op.checks import (
    check,
    check_first_derivative,
    check_gradients,
    check_no_tangents,
    check_wide,
)
from fxpass.op.run import returned, trained
from fxpass.op.saved import scaled
from fxpass.spec.dtypes import gradient_dtype
from fxpass.spec.operands import Operands, empty
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
) -> dict[str, Tensor]:
    """Reductions of ``x @ weight.T + bias`` over the classes.

    Args:
        x: ``[N, D]`` floating point.
        weight: ``[V, D]``, dtype of x. Without classes, as in an empty vocabulary shard, lse and
            max are -inf, and all other outputs and gradients are 0.
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
        wide_x, wide_weight: what x and weight were cast from, in the dtype of the outputs, where
            ``spec`` returns their gradients unrounded. Autograd gives these tensors the gradients,
            and x and weight none; nothing reads their values.

    Returns:
        the results of the operator by name, those of ``spec.results``:

        rows: ``[R, N]`` f32 (f64 for f64 operands), in the order of the spec's outputs; K rows for
            picks ``[N, K]``.
        indices: ``[I, N]`` int64, the outputs that are class indices.
        lse, rest, saved: what backward reads; not with a total.
        total: a scalar, the sum of ``coef * output``.
        x, weight, bias: the gradients of the total, in the dtypes of their operands, but f32 for
            fp16, and in the dtype of the outputs if unrounded.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        IndexError: a pick is no class (on CPU; on GPUs a device-side assertion fails).
    """
    results = _FORWARD(
        x, weight, bias, scale, picks, given, coef, logits, spec, wide_x, wide_weight
    )
    return Reductions.parse(spec).named(results)


# ---------------------------------------------------------------- the compiler and autograd


def _fake(
    x, weight, bias, scale, picks, given, coef, logits, spec: str, wide_x=None, wide_weight=None
) -> list[Tensor]:
    s = Reductions.parse(spec)
    operands = Operands(x, weight, bias, scale, picks, tuple(given), coef, logits)
    check(operands, s)
    found = empty(operands, s)._asdict()
    if s.total:
        found["total"] = found["total"].new_empty(())
        found |= {
            name: t.new_empty(t.shape, dtype=gradient_dtype(t.dtype, name in s.unrounded))
            for name, t in trained(operands, s).items()
        }
    return [found[name] for name in s.results]


def _fake_backward(
    grad, lse, rest, saved, x, weight, bias, scale, picks, given, logits, spec: str
) -> list[Tensor]:
    return run.places(Operands(x, weight, bias, scale, picks, tuple(given)), Reductions.parse(spec))


class _Differentiable(torch.autograd.Function):
    """The operator, whose results have a history."""

    @staticmethod
    def forward(ctx: Any, keys: Any, text: str, *tensors: Any) -> tuple[Tensor, ...]:
        picks, coef, logits, wide_x, wide_weight, x, weight, bias, scale, *given = tensors
        spec = Reductions.parse(text)
        operands = Operands(x, weight, bias, scale, picks, tuple(given), coef, logits)
        check_gradients(operands, spec)
        check_wide(operands, spec, {"x": wide_x, "weight": wide_weight})
        # without the wide tensors, which the compiler then need not compute
        arguments = x, weight, bias, scale, picks, given, coef, logits, text
        with torch._C._AutoDispatchBelowAutograd():
            results = spec.named(_FORWARD.redispatch(keys, *arguments))
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.text, ctx.count = spec, text, len(given)
        differentiable = "total" if spec.total else "rows"
        ctx.mark_non_differentiable(*(t for k, t in results.items() if k != differentiable))
        if spec.total:
            ctx.dtypes = returned(operands, spec)
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
        wide = {f"wide_{name}": found.pop(name, None) for name in spec.unrounded}
        of_operands = ("x", "weight", "bias", "scale", *(f"given{i}" for i in range(ctx.count)))
        named = "wide_x", "wide_weight", *of_operands
        return *(None,) * 5, *map((found | wide).get, named)


def _by_autograd(keys: Any, *arguments: Any) -> list[Tensor]:
    """The operator's kernel of autograd, which also runs where nothing has a gradient."""
    after = keys & torch._C._after_autograd_keyset
    arguments, wide = arguments[:9], (*arguments[9:], None, None)
    x, weight, bias, scale, picks, given, coef, logits, text = arguments
    check_no_tangents((x, weight, bias, scale, *given))
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments, *wide[:2]):
        tensors = picks, coef, logits, *wide[:2], x, weight, bias, scale, *given
        return list(_Differentiable.apply(after, text, *tensors))
    if after.highestPriorityTypeId() in _PLAIN:
        return run.class_reductions(*arguments)  # a second dispatch takes the host 10 us
    with torch._C._AutoDispatchBelowAutograd():
        return _FORWARD.redispatch(after, *arguments)


# The keys of tensors that no mode or subclass takes.
_PLAIN = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
_LIBRARY = torch.library.Library("fxpass", "FRAGMENT")
for _name, _function, _of_shapes in (
    ("class_reductions", run.class_reductions, _fake),
    ("class_reductions_backward", run.class_reductions_backward, _fake_backward),
):
    # not torch.library.custom_op, whose checks of aliases take 20 us of each call on the host
    _schema = torch.library.infer_schema(_function, mutates_args=())
    _LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxpass::{_name}", _of_shapes, lib=_LIBRARY)
_LIBRARY.impl("class_reductions", _by_autograd, "Autograd", with_keyset=True)
_FORWARD = torch.ops.fxpass.class_reductions.default
_BACKWARD = torch.ops.fxpass.class_reductions_backward.default
register_batches(_LIBRARY, "class_reductions_backward", _BACKWARD)
