"""``fxpass::linear_cross_entropy``: the one operator that a rewritten graph calls.

In: the tensors of :class:`fxpass.aten.Inputs` and a spec's text. Out: ``(loss, scale, x_grad,
weight_grad, bias_grad)``, of which the graph uses the first. For ``mean`` and ``sum`` the gradients
are computed in forward, one chunk of logits at a time, and kept *unnormalised* in f32; backward
multiplies them by ``scale`` times the incoming gradient. Dividing by the number of rows before
anything is rounded would push most of an fp16 gradient below its smallest number. For ``none``
forward computes the losses only, and backward the gradients, from chunks computed again::

    >>> x, w, t = torch.randn(4, 8), torch.randn(10, 8), torch.arange(4)
    >>> loss, *_ = linear_cross_entropy(x, w, None, t, None, None, "v1 reduction=mean")
"""

from __future__ import annotations

import dataclasses

import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch._C._autograd import (  # type: ignore[reportMissingImports]
    _get_current_graph_task_keep_graph as _keep_graph,
)

from fxpass import aten, schedule
from fxpass.aten import Inputs, Outputs
from fxpass.schedule import compute_dtype
from fxpass.spec import Spec

NAME = "fxpass::linear_cross_entropy"

_Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_Three = tuple[Tensor, Tensor, Tensor]

INDEX_DTYPES = (torch.int64, torch.uint8)  # what F.cross_entropy takes as class indices


@torch.library.custom_op(NAME, mutates_args=())
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    logits: Tensor | None,
    spec: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cross-entropy of ``x @ weight.T + bias`` without the logits.

    Args:
        x: ``[N, D]`` floating point.
        weight: ``[V, D]``, dtype of x.
        bias: ``[V]``, dtype of x, or None.
        target: class indices ``[N]`` (int64 or uint8) or class probabilities ``[N, V]``.
        class_weight: ``[V]`` floating point, or None.
        logits: ``[N, V]``, the linear's output where the graph holds it anyway, else None; carries
            no gradient.
        spec: the text of a :class:`fxpass.spec.Spec`.

    Returns:
        loss: f32 (f64 for f64 operands), a scalar, or ``[N]`` for ``none``.
        scale: scalar by which the gradients that follow have to be multiplied.
        x_grad, weight_grad, bias_grad: unnormalised gradients in the dtype of the loss, shaped as
            their operands; of size 0 where ``spec.gradients`` does not name them, or for ``none``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
        IndexError: a class index outside ``[0, V)`` that is not ``ignore_index`` (on CPU; on GPUs
            a device-side assertion, as in PyTorch's own loss).
    """
    s = Spec.parse(spec)
    inputs = Inputs(x, weight, bias, target, class_weight, logits)
    _check(inputs, s)
    _check_range(inputs, s)
    if s.reduction == "none":
        out = _lower(inputs, dataclasses.replace(s, gradients=()))
        return out.loss, out.loss.new_ones(()), *_gradients(out, inputs)
    out = _lower(inputs, s)
    scale = _scale(inputs, s).to(out.loss.dtype)
    # A product and not a division: without valid rows mean is 0 * inf = nan, as in PyTorch.
    loss = out.loss.sum() * scale
    # ... while the gradients of no rows are zeros and stay so.
    return loss, torch.where(scale.isinf(), 0, scale), *_gradients(out, inputs)


@torch.library.custom_op(NAME + "_backward", mutates_args=())
def linear_cross_entropy_backward(
    row_scale: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    logits: Tensor | None,
    spec: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``sum(row_scale * row losses)``, for reduction ``none``.

    Args:
        row_scale: ``[N]``, the gradient that arrives at each row's loss.
        x, weight, bias, target, class_weight, logits, spec: as in :func:`linear_cross_entropy`.

    Returns:
        x_grad, weight_grad, bias_grad in the dtype of the loss; of size 0 where not asked for.
    """
    inputs = Inputs(x, weight, bias, target, class_weight, logits, row_scale)
    return _gradients(_lower(inputs, Spec.parse(spec)), inputs)


def _lower(inputs: Inputs, spec: Spec) -> Outputs:
    n, d, v = *inputs.x.shape, inputs.weight.shape[0]
    plan = schedule.plan(n, d, v, inputs.x.dtype, inputs.x.device, spec)
    # The graph's dtypes are final: an ambient autocast must not change them again in here.
    with torch.no_grad(), torch.amp.autocast(inputs.x.device.type, enabled=False):
        if plan.lowering == "triton":
            from fxpass import triton_chunked  # imports triton, which not every platform has

            return triton_chunked.run(inputs, spec, plan.rows)
        return aten.run(inputs, spec, plan.rows)


def _gradients(out: Outputs, inputs: Inputs) -> _Three:
    empty = inputs.x.new_empty
    dtype = out.loss.dtype
    x, weight, bias = (
        empty(0, dtype=dtype) if grad is None else grad for grad in (out.x, out.weight, out.bias)
    )
    return x, weight, bias


def _scale(inputs: Inputs, spec: Spec) -> Tensor:
    """What multiplies the sum of the row losses: 1, or one over the (weighted) number of rows."""
    if spec.reduction == "sum":
        return inputs.x.new_ones((), dtype=compute_dtype(inputs.x.dtype))
    if spec.target == "probabilities":
        rows = inputs.target.new_full((), inputs.target.shape[0])
    else:
        target = inputs.target.long()  # uint8 cannot hold -100
        valid = target != spec.ignore_index
        if inputs.class_weight is None:
            rows = valid.sum()
        else:
            picked = torch.where(valid, target, 0)
            row_weight = inputs.class_weight.to(compute_dtype(inputs.x.dtype))[picked]
            rows = torch.where(valid, row_weight, 0).sum()
    return rows.to(compute_dtype(inputs.x.dtype)).reciprocal()


# ---------------------------------------------------------------- the end of backward

_library = torch.library.Library("fxpass", "FRAGMENT")
_library.define("scale_gradient(Tensor gradient, Tensor factor, bool may_reuse) -> Tensor")


def _scale_gradient(gradient: Tensor, factor: Tensor, may_reuse: bool) -> Tensor:
    """``gradient * factor``, in the memory of ``gradient`` where nobody can read that again.

    A weight's gradient is the largest tensor left, and a second one of its size would be the peak.
    The operator that saved it is its only owner, so unless the user retains the graph for another
    backward, its memory ends here anyway. While a CUDA graph is recorded that cannot be known: the
    record may be replayed under another answer.
    """
    capturing = gradient.is_cuda and torch.cuda.is_current_stream_capturing()
    if may_reuse and not capturing and not _keep_graph():
        return gradient.mul_(factor).detach()
    return gradient * factor


_library.impl("scale_gradient", _scale_gradient, "CompositeExplicitAutograd")


@torch.library.register_fake("fxpass::scale_gradient", lib=_library)
def _(gradient: Tensor, factor: Tensor, may_reuse: bool) -> Tensor:
    return torch.empty_like(gradient)


# ---------------------------------------------------------------- bad input


def _check(inputs: Inputs, spec: Spec) -> None:
    """Shapes and dtypes; called with real and with fake tensors."""
    x, weight, target = inputs.x, inputs.weight, inputs.target
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"{NAME} needs x [N, D] and weight [V, D], got {_shapes(x, weight)}")
    if not x.is_floating_point() or x.dtype != weight.dtype:
        raise ValueError(
            f"{NAME} needs x and weight of one floating-point dtype, got {x.dtype} and "
            f"{weight.dtype}: cast one of them"
        )
    n, v = x.shape[0], weight.shape[0]
    for name, vector in (("bias", inputs.bias), ("class_weight", inputs.class_weight)):
        if vector is not None and (vector.dim() != 1 or vector.shape[0] != v):
            raise ValueError(f"{NAME} needs {name} [{v}], got {_shapes(vector)}")
    logits = inputs.logits
    if logits is not None and (logits.dim() != 2 or logits.shape[0] != n or logits.shape[1] != v):
        raise ValueError(f"{NAME} needs logits [{n}, {v}], got {_shapes(logits)}")
    if spec.target == "probabilities":
        if target.dim() != 2 or target.shape[0] != n or target.shape[1] != v:
            raise ValueError(f"{NAME} needs probabilities [{n}, {v}], got {_shapes(target)}")
        if not target.is_floating_point():
            raise ValueError(f"{NAME} needs floating-point probabilities, got {target.dtype}")
    else:
        if target.dim() != 1 or target.shape[0] != n:
            raise ValueError(f"{NAME} needs class indices [{n}], got {_shapes(target)}")
        if target.dtype not in INDEX_DTYPES:
            raise ValueError(f"{NAME} needs int64 class indices, got {target.dtype}")


def _shapes(*tensors: Tensor) -> str:
    return " and ".join(str(list(t.shape)) for t in tensors)


def _check_range(inputs: Inputs, spec: Spec) -> None:
    """Class indices; on devices other than the CPU without waiting for the answer."""
    if spec.target == "probabilities":
        return
    target, v = inputs.target.long(), inputs.weight.shape[0]
    wrong = (target != spec.ignore_index) & ((target < 0) | (target >= v))
    if target.device.type != "cpu":
        torch.ops.aten._assert_async(~wrong.any())
    elif wrong.any():
        raise IndexError(
            f"Target {target[wrong][0].item()} is out of bounds: there are {v} classes and "
            f"ignore_index is {spec.ignore_index}"
        )


# ---------------------------------------------------------------- shapes for the compiler


def _fake_gradients(inputs: Inputs, wanted: tuple[str, ...]) -> _Three:
    dtype = compute_dtype(inputs.x.dtype)
    shapes = {
        "x": inputs.x.shape,
        "weight": inputs.weight.shape,
        "bias": inputs.weight.shape[:1],
    }
    x, weight, bias = (
        inputs.x.new_empty(shape if name in wanted else (0,), dtype=dtype)
        for name, shape in shapes.items()
    )
    return x, weight, bias


@linear_cross_entropy.register_fake
def _(x, weight, bias, target, class_weight, logits, spec: str) -> _Five:
    s = Spec.parse(spec)
    inputs = Inputs(x, weight, bias, target, class_weight, logits)
    _check(inputs, s)
    rowwise = s.reduction == "none"
    scalar = x.new_empty((), dtype=compute_dtype(x.dtype))
    loss = scalar.new_empty(x.shape[0]) if rowwise else scalar
    return loss, scalar.new_empty(()), *_fake_gradients(inputs, () if rowwise else s.gradients)


@linear_cross_entropy_backward.register_fake
def _(row_scale, x, weight, bias, target, class_weight, logits, spec: str) -> _Three:
    inputs = Inputs(x, weight, bias, target, class_weight, logits, row_scale)
    return _fake_gradients(inputs, Spec.parse(spec).gradients)


# ---------------------------------------------------------------- autograd

# position among the operator's arguments -> name in Spec.gradients
_DIFFERENTIABLE = {0: "x", 1: "weight", 2: "bias"}


def _setup_context(ctx, inputs, output) -> None:
    *tensors, text = inputs
    spec = Spec.parse(text)
    for position, needed in enumerate(ctx.needs_input_grad):
        name = _DIFFERENTIABLE.get(position)
        if needed and name not in spec.gradients:
            what = name or ("target", "class_weight", "logits")[position - 3]
            raise RuntimeError(
                f"{NAME}: {what} requires a gradient that the spec does not name ({text!r}); "
                f"add it to gradients= or detach {what}"
            )
    ctx.set_materialize_grads(False)  # else backward makes zeros as large as the weight
    ctx.spec = spec
    ctx.dtypes = [None if t is None else t.dtype for t in tensors[:3]]
    _, *saved = output
    ctx.mark_non_differentiable(*saved)
    if spec.reduction == "none":
        saved = tensors
    ctx.present = [t is not None for t in saved]
    ctx.save_for_backward(*(t for t in saved if t is not None))


def _backward(ctx, grad: Tensor | None, *_):
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{NAME} has no second derivative (create_graph=True): its gradients were computed in "
            "forward. Set FUSEDCE=0 for this model"
        )
    if grad is None:
        return (None,) * 7
    if ctx.spec.reduction == "none":
        tensors = iter(ctx.saved_tensors)
        operands = [next(tensors) if present else None for present in ctx.present]
        grads = linear_cross_entropy_backward(grad, *operands, ctx.spec.text())
    else:
        scale, *grads = ctx.saved_tensors
        factor = scale * grad
        # A compiler that donates buffers to itself may give this one away after its last use.
        may_reuse = not functorch_config.donated_buffer
        grads = [torch.ops.fxpass.scale_gradient(g, factor, may_reuse) for g in grads]
    named = zip(_DIFFERENTIABLE.values(), grads, ctx.dtypes, strict=True)
    wanted = [g.to(dtype) if name in ctx.spec.gradients else None for name, g, dtype in named]
    return *wanted, None, None, None, None


linear_cross_entropy.register_autograd(_backward, setup_context=_setup_context)
