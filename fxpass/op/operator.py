"""``fxpass::linear_cross_entropy``: the one operator that a rewritten graph calls.

In: the tensors of :class:`fxpass.spec.operands.Inputs` and a spec's text. Out: ``(loss, lse, scale,
x_grad, weight_grad, bias_grad, lse_rest)``; the graph uses the first two.

NOTE: gradients in forward. For ``mean`` and ``sum``, forward computes the gradients with the loss,
one chunk of logits at a time, and saves them. Backward multiplies them by ``scale`` and the
incoming gradient. Saved gradients have the dtype of their operand and include the 1 / N of
``mean``, so ``scale`` is 1, and backward often has nothing to multiply. The gradients of fp16
operands are saved in f32 without 1 / N, which ``scale`` holds: with it, most of an fp16 gradient
would underflow.

Forward computes no gradients for ``none`` and for a loss with lse, because each row has its own
incoming gradient, nor for the strategy ``tiled``, which saves nothing of the weight's size. There
backward recomputes the logits and computes all gradients::

    >>> x, w, t = torch.randn(4, 8), torch.randn(10, 8), torch.arange(4)
    >>> spec = "v6 reduction=mean lse=true"
    >>> loss, lse, *_ = linear_cross_entropy(x, w, None, t, None, None, spec)
    >>> loss_with_z_loss = loss + 1e-4 * (lse**2).mean()
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import fxpass.op.kept
import fxpass.op.reductions  # noqa: F401, stored code that imports this module may call them too
from fxpass.op import runs
from fxpass.op.checks import NAME, check_class_indices, check_inputs
from fxpass.op.dispatch import compute
from fxpass.op.saved import scaled
from fxpass.spec.dtypes import compute_dtype, gradient_dtype
from fxpass.spec.operands import Inputs, Results, is_valid
from fxpass.spec.spec import GRADIENTS, Spec

_Seven = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_Three = tuple[Tensor, Tensor, Tensor]


@torch.library.custom_op(NAME, mutates_args=())
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    class_weight: Tensor | None,
    logits: Tensor | None,
    spec: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cross-entropy of ``x @ weight.T + bias`` without the logits.

    Args:
        x: ``[N, D]`` floating point.
        weight: ``[V, D]``, dtype of x.
        bias: ``[V]`` in the dtype of x or of the loss, or None. A bias wider than x is added to the
            up-cast logits and not rounded. It has no effect on given logits, which include it.
        target: class indices ``[N]`` (int64 or uint8) or class probabilities ``[N, V]``; None if
            the spec says ``target=none``: the row loss is then the log-sum-exp. In a vocabulary
            shard (``shard_of``), the index -1 stands for a class in another shard.
        class_weight: ``[V]`` floating point, or None; None without a target.
        logits: ``[N, V]``, the linear's output if the graph needs it anyway, else None; has no
            gradient.
        spec: the text of a :class:`fxpass.spec.spec.Spec`.

    Returns:
        loss: f32 (f64 for f64 operands), a scalar, or ``[N]`` for ``none``.
        lse: ``[N]`` in the dtype of the loss if the spec says ``lse=true``: the log-sum-exp of the
            transformed logits of every row, ignored rows included. For ``tiled`` also ``[N]``, else
            size 0. For ``tiled`` without ``lse=true`` and in a vocabulary shard, the values of
            ignored rows are unspecified.
        scale: a scalar; backward multiplies the incoming gradient of the loss by it.
        x_grad, weight_grad, bias_grad: gradients, before the product with ``scale`` and the
            incoming gradient, with the shapes and dtypes of their operands, but f32 for fp16. Size
            0 if ``spec.gradients`` does not name them or backward computes them
            (``spec.gradients_in_backward``).
        lse_rest: the rounding error of lse, ``[N]`` for ``tiled``, else size 0.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        IndexError: a class index is outside ``[0, V)`` and not ``ignore_index`` (on CPU; on GPUs a
            device-side assertion fails, as in PyTorch's loss).

    ``lse`` is for the z-loss of https://arxiv.org/abs/2204.02311, ``loss + c * (lse**2).mean()``.
    """
    s = Spec.parse(spec)
    inputs = Inputs(x, weight, bias, target, class_weight, logits)
    check_inputs(inputs, s)
    s = check_class_indices(inputs, s)
    now, scaled = runs.forward(s, x.dtype)
    one = x.new_ones((), dtype=compute_dtype(x.dtype))
    scale = left = one
    if s.reduction == "mean":
        scale, left = _of_mean(inputs, s, one)
        if scaled:
            inputs, left = inputs._replace(row_scale=left.expand(x.shape[0])), one
    out = compute(inputs, now)
    assert out.loss is not None
    lse, rest = (out.loss.new_empty(0) if t is None else t for t in (out.lse, out.lse_rest))
    grads = _gradients(out, inputs, _gradient_dtypes(inputs))
    if s.reduction == "none":
        return out.loss, lse, left, *grads, rest
    # a product, not a division: without valid rows the mean is 0 * inf = nan, as in PyTorch
    return out.loss.sum() * scale, lse, left, *grads, rest


@torch.library.custom_op(NAME + "_backward", mutates_args=())
def linear_cross_entropy_backward(
    row_scale: Tensor | None,
    lse_scale: Tensor | None,
    lse: Tensor | None,
    lse_rest: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    class_weight: Tensor | None,
    logits: Tensor | None,
    spec: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``sum(row_scale * row losses + lse_scale * lse)``, if forward computes none.

    Args:
        row_scale: ``[N]``, the incoming gradient of each row's loss; None for zeros.
        lse_scale: ``[N]``, the incoming gradient of each row's lse; None for zeros.
        lse, lse_rest: ``[N]``, from forward, for the strategy ``tiled``; else None.
        x, weight, bias, target, class_weight, logits, spec: as in :func:`linear_cross_entropy`.

    Returns:
        x_grad, weight_grad, bias_grad in the dtypes of their operands; size 0 if ``spec.gradients``
        does not name them.
    """
    s = runs.backward(Spec.parse(spec))
    inputs = Inputs(x, weight, bias, target, class_weight, logits, row_scale, lse_scale)
    inputs = inputs._replace(lse=lse, lse_rest=lse_rest)
    if row_scale is None:
        # Only the lse has an incoming gradient, and it is the loss of rows without a target. The
        # spec therefore drops the target, which would cost time.
        s = dataclasses.replace(s, **_NO_TARGET)
        inputs = inputs._replace(
            target=None, class_weight=None, row_scale=lse_scale, lse_scale=None
        )
    return _gradients(compute(inputs, s), inputs, _operand_dtypes(inputs))


_NO_TARGET = {
    "target": "none",
    "ignore_index": Spec.ignore_index,
    "label_smoothing": Spec.label_smoothing,
}


def _gradients(out: Results, inputs: Inputs, dtypes: tuple[torch.dtype, ...]) -> _Three:
    x, weight, bias = (
        inputs.x.new_empty(0, dtype=dtype) if grad is None else grad.to(dtype)
        for grad, dtype in zip((out.x, out.weight, out.bias), dtypes, strict=True)
    )
    return x, weight, bias


def _operand_dtypes(inputs: Inputs) -> tuple[torch.dtype, ...]:
    """The dtypes of x, weight and bias; the dtype of x for a missing bias."""
    operands = (inputs.x, inputs.weight, inputs.bias)
    return tuple(inputs.x.dtype if t is None else t.dtype for t in operands)


def _gradient_dtypes(inputs: Inputs) -> tuple[torch.dtype, ...]:
    """The dtypes of the gradients that forward returns."""
    return tuple(map(gradient_dtype, _operand_dtypes(inputs)))


def _of_mean(inputs: Inputs, spec: Spec, one: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of the mean's loss and of its gradients, for a ``one`` in the compute dtype."""
    n = inputs.x.shape[0]
    every_row = spec.target != "indices" or spec.ignore_index is None
    if n and every_row and (spec.target != "indices" or inputs.class_weight is None):
        return (scale := one / n), scale
    rows, weights = counted(inputs, spec)
    scale = weights.to(one.dtype).reciprocal()
    # without rows the gradients are zeros; class weights that sum to 0 give inf or nan
    return scale, torch.where(rows == 0, 0, scale)


def counted(inputs: Inputs, spec: Spec) -> tuple[Tensor, Tensor]:
    """The number of rows that are not ignored, and the divisor of ``mean``: this number, or the sum
    of the class weights of their targets."""
    if inputs.target is None or spec.target == "probabilities":
        rows = inputs.x.new_full((), inputs.x.shape[0], dtype=torch.int64)
        return rows, rows
    target = inputs.target.long()  # uint8 cannot hold -100
    valid = is_valid(target, spec)
    rows = valid.sum()
    if inputs.class_weight is None:
        return rows, rows
    weight = inputs.class_weight.to(compute_dtype(inputs.x.dtype))
    return rows, torch.where(valid, weight[torch.where(valid, target, 0)], 0).sum()


# ---------------------------------------------------------------- shapes for the compiler


def _fake_gradients(
    inputs: Inputs, wanted: tuple[str, ...], dtypes: tuple[torch.dtype, ...]
) -> _Three:
    shapes = (inputs.x.shape, inputs.weight.shape, inputs.weight.shape[:1])
    x, weight, bias = (
        inputs.x.new_empty(shape if name in wanted else (0,), dtype=dtype)
        for name, shape, dtype in zip(GRADIENTS, shapes, dtypes, strict=True)
    )
    return x, weight, bias


@linear_cross_entropy.register_fake
def _(x, weight, bias, target, class_weight, logits, spec: str) -> _Seven:
    s = Spec.parse(spec)
    inputs = Inputs(x, weight, bias, target, class_weight, logits)
    check_inputs(inputs, s)
    scalar = x.new_empty((), dtype=compute_dtype(x.dtype))
    loss = scalar.new_empty(x.shape[0]) if s.reduction == "none" else scalar
    lse = scalar.new_empty(x.shape[0] if s.returns_lse else 0)
    computed = () if s.gradients_in_backward else s.gradients
    grads = _fake_gradients(inputs, computed, _gradient_dtypes(inputs))
    rest = scalar.new_empty(x.shape[0] if s.strategy == "tiled" else 0)
    return loss, lse, scalar.new_empty(()), *grads, rest


@linear_cross_entropy_backward.register_fake
def _(
    row_scale, lse_scale, lse, lse_rest, x, weight, bias, target, class_weight, logits, spec: str
) -> _Three:
    inputs = Inputs(x, weight, bias, target, class_weight, logits, row_scale, lse_scale)
    return _fake_gradients(inputs, Spec.parse(spec).gradients, _operand_dtypes(inputs))


# ---------------------------------------------------------------- autograd

_TENSORS = (*GRADIENTS, "target", "class_weight", "logits")  # in the operator's order


def _setup_context(ctx, inputs, output) -> None:
    *tensors, text = inputs
    spec = Spec.parse(text)
    for name, needed in zip(_TENSORS, ctx.needs_input_grad, strict=False):  # the spec needs none
        if needed and name not in spec.gradients:
            raise RuntimeError(
                f"{NAME}: {name} requires a gradient that the spec does not name ({text!r}); "
                f"add it to gradients= or detach {name}"
            )
    ctx.set_materialize_grads(False)  # else autograd materialises zeros of the weight's size
    ctx.spec = spec
    ctx.dtypes = [None if t is None else t.dtype for t in tensors[:3]]
    _, lse, scale, *grads, rest = output
    ctx.mark_non_differentiable(scale, *grads, rest, *([] if spec.lse else [lse]))
    saved = grads
    if spec.gradients_in_backward:
        saved = [*((lse, rest) if spec.strategy == "tiled" else (None, None)), *tensors]
    ctx.present = [t is not None for t in saved]
    ctx.save_for_backward(scale, *(t for t in saved if t is not None))


def _backward(ctx, grad: Tensor | None, lse_grad: Tensor | None, *_):
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{NAME} has no second derivative (create_graph=True): its gradients are computed by "
            "operators that are not differentiable. Set FUSEDCE=0 for this model"
        )
    if grad is None and lse_grad is None:
        return (None,) * 7
    scale, *saved = ctx.saved_tensors
    factor = None if grad is None else grad * scale
    wanted = [name in ctx.spec.gradients for name in GRADIENTS]
    if ctx.spec.gradients_in_backward:
        tensors = iter(saved)
        operands: list[Any] = [next(tensors) if present else None for present in ctx.present]
        _, _, x, *_ = operands
        row_scale = None if factor is None else factor.expand(x.shape[:1])
        grads = linear_cross_entropy_backward(row_scale, lse_grad, *operands, ctx.spec.text())
        grads = [g if needed else None for g, needed in zip(grads, wanted, strict=True)]
    else:
        assert factor is not None  # a loss with lse computes its gradients in backward
        parts = zip(saved, ctx.dtypes, wanted, strict=True)
        grads = [scaled(g, factor, dtype) if needed else None for g, dtype, needed in parts]
    return *grads, None, None, None, None


linear_cross_entropy.register_autograd(_backward, setup_context=_setup_context)
