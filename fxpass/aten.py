"""The fused loss in ATen, chunk by chunk: its meaning, the oracle of the kernels, the CPU path.

In: :class:`Inputs` and a spec. Out: :class:`Outputs`: the per-row losses and the gradients of
``sum(row_scale * row_loss + lse_scale * row_lse)``, unnormalised, in f32 (f64 for f64). At most
``rows`` rows of logits exist at any time.

With z the transformed logits, q the (weighted, smoothed) target distribution and Q = sum(q), one
row's loss and gradient are, for class indices and class probabilities alike,

    loss = Q * logsumexp(z) - sum(q * z)        d loss / dz = Q * softmax(z) - q
    lse  = logsumexp(z)                         d lse  / dz = softmax(z)

so that one pass adds up both gradients: (row_scale * Q + lse_scale) * softmax(z) - row_scale * q.
Without a target q is 0 and Q is 1: the loss is the lse. An ignored row has a loss and a row_scale
of 0, and its lse like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fxpass import expression
from fxpass.schedule import compute_dtype
from fxpass.spec import Spec

# Bytes of logits that are worked on at a time between two GEMMs, so that the copies which a logit
# transform or class probabilities need are small beside the chunk.
_CACHED_BYTES = 1 << 20

# Classes that are up-cast at a time where the weight is narrower than the compute dtype.
_CLASSES_PER_TILE = 8192


class Inputs(NamedTuple):
    """The tensors of one fused loss: x ``[N, D]``, weight ``[V, D]``, bias ``[V]`` or none, target
    ``[N]`` int64, ``[N, V]`` or none, class_weight ``[V]`` or none, logits ``[N, V]`` where they
    exist already, row_scale ``[N]`` or none (all ones), lse_scale ``[N]`` or none (all zeros)."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor | None
    class_weight: Tensor | None = None
    logits: Tensor | None = None
    row_scale: Tensor | None = None
    lse_scale: Tensor | None = None


class Outputs(NamedTuple):
    """loss ``[N]``, and what the spec asks for: lse ``[N]`` and gradients, shaped as their
    operands; all in the compute dtype."""

    loss: Tensor
    lse: Tensor | None
    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def run(inputs: Inputs, spec: Spec, rows: int) -> Outputs:
    """Losses and unnormalised gradients, ``rows`` rows at a time. Reads only, deterministic."""
    x, weight = inputs.x, inputs.weight
    dtype = compute_dtype(x.dtype)
    n, v = x.shape[0], weight.shape[0]
    loss = x.new_empty(n, dtype=dtype)
    lse = torch.empty_like(loss) if spec.lse else None
    shapes = {"x": x.shape, "weight": weight.shape, "bias": (v,)}
    grads = {name: x.new_zeros(shapes[name], dtype=dtype) for name in spec.gradients}
    buffer = x.new_empty((min(rows, n), v), dtype=dtype)
    for start in range(0, n, rows):
        part = slice(start, min(start + rows, n))
        x_rows = x[part].to(dtype)
        g = _logits(inputs, x_rows, part, buffer[: part.stop - start])
        for few in _blocks(part, v * dtype.itemsize):
            some = g[few.start - start : few.stop - start]
            loss[few], row_lse = _to_gradient(inputs, spec, few, some)
            if lse is not None:
                lse[few] = row_lse
        if "bias" in grads:
            grads["bias"] += g.sum(0)
        for classes, tile in _weight_tiles(weight, dtype):
            if "x" in grads:
                grads["x"][part].addmm_(g[:, classes], tile)
            if "weight" in grads:
                grads["weight"][classes].addmm_(g[:, classes].t(), x_rows)
    return Outputs(loss, lse, grads.get("x"), grads.get("weight"), grads.get("bias"))


def _weight_tiles(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The weight in the compute dtype, some classes at a time; the whole where no copy is needed.

    CPUs without bf16 or fp16 matrix instructions multiply those dtypes two to a hundred times
    slower than f32, and an f32 product is the more accurate one.
    """
    step = weight.shape[0] if weight.dtype == dtype else _CLASSES_PER_TILE
    for start in range(0, weight.shape[0], max(1, step)):
        classes = slice(start, start + step)
        yield classes, weight[classes].to(dtype)


def _logits(inputs: Inputs, x_rows: Tensor, part: slice, out: Tensor) -> Tensor:
    """The linear's output for some rows, written to ``out`` ``[rows, V]``."""
    if inputs.logits is not None:
        return out.copy_(inputs.logits[part])
    for classes, tile in _weight_tiles(inputs.weight, out.dtype):
        torch.mm(x_rows, tile.t(), out=out[:, classes])
    return out if inputs.bias is None else out.add_(inputs.bias)


def _blocks(part: slice, row_bytes: int) -> Iterator[slice]:
    """The rows of ``part``, a few at a time."""
    step = max(1, _CACHED_BYTES // row_bytes)
    return (slice(i, min(i + step, part.stop)) for i in range(part.start, part.stop, step))


def _to_gradient(inputs: Inputs, spec: Spec, part: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns loss and lse ``[rows]``, and turns ``logits`` ``[rows, V]`` into their gradient.

    The maximum is subtracted before anything is added up, so that huge logits lose nothing:
    loss = Q * log(sum(exp(z - m))) - sum(q * (z - m)).
    """
    z = expression.evaluate(spec.logits, logits)
    # clamped: where every logit is -inf, subtracting that would make the lse nan
    highest = z.amax(1).clamp_(min=torch.finfo(z.dtype).min)
    z.sub_(highest.unsqueeze(1))
    target = _TARGETS[spec.target](inputs, spec, part, z)
    total = z.exp_().sum(1)
    log_total = total.log()
    lse = highest + log_total
    # where() and not a product: an ignored row may hold an infinite loss
    loss = torch.where(target.valid, target.mass * log_total - target.dot, 0)
    loss = lse if spec.target == "none" else loss
    if not spec.gradients:
        return loss, lse
    scale = target.valid.to(z.dtype)
    if inputs.row_scale is not None:
        scale = torch.where(target.valid, inputs.row_scale[part].to(z.dtype), 0)
    share = scale * target.mass
    if inputs.lse_scale is not None:
        share += inputs.lse_scale[part].to(z.dtype)
    g = z.mul_((share / total).unsqueeze(1))
    target.subtract_from(g, scale)
    slope = expression.derivative(spec.logits)
    if g is not logits:
        factor = float(slope) if slope.is_number else expression.evaluate(slope, logits)
        logits.copy_(g.mul_(factor))
    return loss, lse


def is_valid(target: Tensor, spec: Spec) -> Tensor:
    """Which class indices ``[rows]`` int64 count: a mask of the same shape."""
    if spec.ignore_index is None:
        return torch.ones_like(target, dtype=torch.bool)
    return target != spec.ignore_index


class _Target(NamedTuple):
    """The target distributions q of some rows, as the sums that loss and gradient need."""

    valid: Tensor  # [rows] bool
    mass: Tensor  # [rows]: Q = sum(q)
    dot: Tensor  # [rows]: sum(q * z)
    subtract_from: Callable[[Tensor, Tensor], object]  # (g, scale): g -= scale * q


def _indices(inputs: Inputs, spec: Spec, part: slice, z: Tensor) -> _Target:
    """q = (1 - s) * w[t] * onehot(t) + s / V * w, with smoothing s and class weights w."""
    assert inputs.target is not None
    target, w = inputs.target[part].long(), inputs.class_weight  # uint8 cannot hold -100
    valid = is_valid(target, spec)
    picked = torch.where(valid, target, 0)
    sharp = torch.full_like(z[:, 0], 1 - spec.label_smoothing)
    if w is not None:
        w = w.to(z.dtype)
        sharp.mul_(w[picked])
    columns = picked.unsqueeze(1)
    mass, dot = sharp, sharp * z.gather(1, columns).squeeze(1)
    smooth = spec.label_smoothing / z.shape[1]
    if smooth:
        mass = sharp + smooth * (z.shape[1] if w is None else w.sum())
        dot = dot + smooth * (z.sum(1) if w is None else z.mv(w))

    def subtract_from(g: Tensor, scale: Tensor) -> None:
        g.scatter_add_(1, columns, (-scale * sharp).unsqueeze(1))
        if smooth:
            g.sub_((smooth * scale).unsqueeze(1) * (1 if w is None else w))

    return _Target(valid, mass, dot, subtract_from)


def _probabilities(inputs: Inputs, spec: Spec, part: slice, z: Tensor) -> _Target:
    """q = w * ((1 - s) * p + s / V), with the given probabilities p."""
    assert inputs.target is not None
    q = inputs.target[part].to(z.dtype) * (1 - spec.label_smoothing)
    q += spec.label_smoothing / z.shape[1]
    if inputs.class_weight is not None:
        q *= inputs.class_weight.to(z.dtype)
    valid = torch.ones_like(z[:, 0], dtype=torch.bool)
    return _Target(
        valid,
        q.sum(1),
        (q * z).sum(1),
        lambda g, scale: g.addcmul_(q, scale.unsqueeze(1), value=-1),
    )


def _none(inputs: Inputs, spec: Spec, part: slice, z: Tensor) -> _Target:
    """q = 0, and Q = 1 all the same."""
    one = torch.ones_like(z[:, 0])
    return _Target(one.bool(), one, torch.zeros_like(one), lambda g, scale: None)


_TARGETS = {"indices": _indices, "probabilities": _probabilities, "none": _none}
