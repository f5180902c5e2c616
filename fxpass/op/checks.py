"""Checks the operands and class indices of ``fxpass::linear_cross_entropy``.

In: the tensors of an :class:`fxpass.spec.operands.Inputs`, real or fake, and a spec. Out: nothing,
or an error that names the operand and its shape, dtype or value::

    >>> check_inputs(Inputs(torch.ones(4, 8), torch.ones(9, 7), None, None), Spec())
    Traceback (most recent call last):
    ValueError: fxpass::linear_cross_entropy needs x [N, D] and weight [V, D], got [4, 8] and [9, 7]
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from fxpass.plan import plan
from fxpass.spec.dtypes import INDEX_DTYPES, compute_dtype
from fxpass.spec.operands import Inputs, is_valid
from fxpass.spec.spec import ELSEWHERE, Spec

NAME = "fxpass::linear_cross_entropy"


def check_inputs(inputs: Inputs, spec: Spec) -> None:
    """Checks shapes, dtypes and devices of real or fake tensors.

    Raises:
        ValueError: operands do not fit together, or do not fit the spec.
    """
    given = {name: t for name, t in inputs._asdict().items() if isinstance(t, Tensor)}
    if any(t.device != inputs.x.device for t in given.values()):
        places = ", ".join(f"{name} on {t.device}" for name, t in given.items())
        raise ValueError(f"{NAME} needs tensors of one device, got {places}")
    x, weight, target = inputs.x, inputs.weight, inputs.target
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"{NAME} needs x [N, D] and weight [V, D], got {_shapes(x, weight)}")
    if not x.is_floating_point() or x.dtype != weight.dtype:
        raise ValueError(
            f"{NAME} needs x and weight of one floating-point dtype, got {x.dtype} and "
            f"{weight.dtype}: cast one of them"
        )
    bias = inputs.bias
    if bias is not None and bias.dtype not in (x.dtype, compute_dtype(x.dtype)):
        raise ValueError(
            f"{NAME} needs a bias of x's dtype {x.dtype} or of {compute_dtype(x.dtype)}, in which "
            f"it is added; got {bias.dtype}"
        )
    n, v = x.shape[0], weight.shape[0]
    for name, vector in (("bias", inputs.bias), ("class_weight", inputs.class_weight)):
        if vector is not None and (vector.dim() != 1 or vector.shape[0] != v):
            raise ValueError(f"{NAME} needs {name} [{v}], got {_shapes(vector)}")
    logits = inputs.logits
    if logits is not None and (logits.dim() != 2 or logits.shape[0] != n or logits.shape[1] != v):
        raise ValueError(f"{NAME} needs logits [{n}, {v}], got {_shapes(logits)}")
    if (target is None) != (spec.target == "none"):
        raise ValueError(
            f"{NAME} needs a target, and no target if its spec says target=none; got "
            f"{'None' if target is None else _shapes(target)} for target={spec.target}"
        )
    if target is None:
        if inputs.class_weight is not None:
            raise ValueError(f"{NAME} takes no class_weight without a target")
    elif spec.target == "probabilities":
        if target.dim() != 2 or target.shape[0] != n or target.shape[1] != v:
            raise ValueError(f"{NAME} needs probabilities [{n}, {v}], got {_shapes(target)}")
        if not target.is_floating_point():
            raise ValueError(f"{NAME} needs floating-point probabilities, got {target.dtype}")
    else:
        if target.dim() != 1 or target.shape[0] != n:
            raise ValueError(f"{NAME} needs class indices [{n}], got {_shapes(target)}")
        if target.dtype not in INDEX_DTYPES:
            raise ValueError(f"{NAME} needs int64 class indices, got {target.dtype}")


def check_class_indices(inputs: Inputs, spec: Spec) -> Spec:
    """Checks the values of class indices, without synchronisation with a GPU.

    Returns:
        The spec; in ATen on a CPU, without its ``ignore_index`` if no row has this index: what
        follows need not look for ignored rows.

    Raises:
        IndexError: an index is neither a class nor ``ignore_index``; on devices other than the CPU,
            a device-side assertion fails instead.
    """
    if inputs.target is None or spec.target == "probabilities":
        return spec
    v, ignored = inputs.weight.shape[0], spec.ignore_index
    lowest = ELSEWHERE if spec.shard_of else 0
    on_cpu = inputs.target.device.type == "cpu"
    if on_cpu and len(inputs.target) and _in_aten(inputs):
        low, high = (int(index) for index in inputs.target.aminmax())
        if lowest <= low and high < v and (ignored is None or not low <= ignored <= high):
            return _without_ignored(spec)
    target = inputs.target.long()
    wrong = is_valid(target, spec) & ((target < lowest) | (target >= v))
    if not on_cpu:
        torch.ops.aten._assert_async(~wrong.any())
    elif wrong.any():
        # the user does not know the indices of a shard
        which = "A target" if spec.shard_of else f"Target {target[wrong][0].item()}"
        raise IndexError(
            f"{which} is out of bounds: there are {spec.shard_of or v} classes and "
            f"ignore_index is {ignored}"
        )
    return spec


@functools.cache  # replace() costs the host as much as five operations
def _without_ignored(spec: Spec) -> Spec:
    return dataclasses.replace(spec, ignore_index=None)


def _in_aten(inputs: Inputs) -> bool:
    return plan.implementation_for(inputs.x.device, inputs.x.dtype)[0] == "aten"


def _shapes(*tensors: Tensor) -> str:
    return " and ".join(str(list(t.shape)) for t in tensors)
