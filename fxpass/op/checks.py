"""Refusals of operands of a head's reductions.

In: operands and :class:`fxpass.formula.reductions.Reductions`. Raises if they do not fit together,
with the shapes and dtypes that would fit. Each check runs at every call, on the host: what it needs
of the spec alone is computed once for a spec.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpass.formula.dtypes import compute_dtype
from fxpass.formula.operands import Operands
from fxpass.formula.outputs import PRODUCTS, line_count
from fxpass.formula.reductions import Reductions

NAME = "a head's reductions"


def check(operands: Operands, spec: Reductions) -> None:
    """``ValueError`` for shapes, dtypes or devices that do not fit together."""
    x, weight, bias, scale, picks, given, coef = operands
    tensors = (weight, bias, scale, picks, *given, coef)
    device = x.device
    if any(t is not None and t.device != device for t in tensors):
        every = {name: getattr(operands, name) for name in (*PRODUCTS, "scale", "picks")}
        every |= {f"given{i}": t for i, t in enumerate(given)} | {"coef": coef}
        places = (f"{name} on {t.device}" for name, t in every.items() if t is not None)
        raise ValueError(f"{NAME} needs tensors of one device, got {', '.join(places)}")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{NAME} needs x [N, D] and weight [V, D], got {list(x.shape)} and {list(weight.shape)}"
        )
    if not x.is_floating_point() or x.dtype != weight.dtype:
        raise ValueError(
            f"{NAME} needs x and weight of one floating-point dtype, got {x.dtype} and "
            f"{weight.dtype}: cast one of them"
        )
    n = x.shape[0]
    v = weight.shape[0]
    dtype = compute_dtype(x.dtype)
    _check_shape("bias", bias, (v,))
    _check_shape("scale", scale, (n,))
    for i, tensor in enumerate(given):
        _check_shape(f"given{i}", tensor, (v,), (n, v))
    if bias is not None and bias.dtype not in (x.dtype, dtype):
        raise ValueError(f"{NAME} needs a bias of {x.dtype} or {dtype}, got {bias.dtype}")
    if scale is not None and scale.dtype != dtype:
        raise ValueError(f"{NAME} needs a scale of {dtype}, got {scale.dtype}")
    if (picks is None) == spec.reads_picks:
        raise ValueError(f"{NAME} needs picks where outputs read them, and only there")
    if picks is not None and (
        picks.dtype != torch.int64 or picks.dim() not in (1, 2) or picks.shape[:1] != x.shape[:1]
    ):
        raise ValueError(
            f"{NAME} needs picks [{n}] or [{n}, K] int64, got {list(picks.shape)} {picks.dtype}"
        )
    many = operands.pick_count
    if (coef is None) != (not spec.total):
        raise ValueError(f"{NAME} needs coef for a total, and only for it")
    if coef is not None:
        lines = sum(line_count(o, many) for o in spec.total)
        if coef.shape != (lines, n) or coef.dtype != dtype:
            raise ValueError(
                f"{NAME} needs coef [{lines}, {n}] {dtype}, got {list(coef.shape)} {coef.dtype}"
            )
    if len(given) < (least := max(spec.given_positions, default=-1) + 1):
        raise ValueError(f"{NAME} needs {least} given values, got {len(given)}")
    for i, tensor in enumerate(given):
        mask = tensor.dtype == torch.bool and i not in spec.weight_positions
        if not (tensor.is_floating_point() or mask):
            raise ValueError(f"{NAME} needs a floating-point given{i}, got {tensor.dtype}")
    if absent := [name for name in spec.gradients if getattr(operands, name) is None]:
        raise ValueError(f"{NAME} cannot compute gradients of {', '.join(absent)}: absent")


def _check_shape(name: str, tensor: Tensor | None, *allowed: tuple[int, ...]) -> None:
    if tensor is not None and tensor.shape not in allowed:
        wanted = " or ".join(str(list(shape)) for shape in allowed)
        raise ValueError(f"{NAME} needs {name} {wanted}, got {list(tensor.shape)}")


def check_picks(operands: Operands) -> None:
    """``IndexError`` for a pick that is no class; a device-side assertion on GPUs."""
    picks = operands.picks
    v = operands.weight.shape[0]
    if picks is None or not v or not picks.numel():
        return
    if picks.device.type != "cpu":  # one launch, whose indices the device checks
        operands.weight.new_empty(1).expand(v).gather(0, picks.reshape(-1))
        return
    for index in map(int, picks.aminmax()):
        if not 0 <= index < v:
            raise IndexError(f"class {index} is out of bounds: there are {v} classes")
