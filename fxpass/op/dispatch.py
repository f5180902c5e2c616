"""Runs a fused loss without its ignored rows, with the implementation and strategy of its plan.

In: :class:`fxpass.spec.operands.Inputs` and a spec. Out: :class:`fxpass.spec.operands.Results`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxpass.aten import chunked, in_place, tiled
from fxpass.op import ignored
from fxpass.plan import plan
from fxpass.plan.devices import on_device
from fxpass.plan.plan import Plan
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.operands import Inputs, Results
from fxpass.spec.spec import Spec


def compute(inputs: Inputs, spec: Spec) -> Results:
    """Runs forward or backward of one fused loss, without the ignored rows."""
    # The graph's casts are explicit: an ambient autocast must not cast again here. No autograd, not
    # even version counters and views: a fifth of the host's time of small operations.
    plain = torch._C._AutoDispatchBelowADInplaceOrView()
    with on_device(inputs.x.device), plain, torch._C._DisableAutocast():
        if not inputs.weight.shape[0]:
            return _of_no_classes(inputs, spec)
        index = ignored.counted_rows(inputs, spec)
        if index is None:
            return _compute(inputs, spec)
        out = _compute(ignored.select(inputs, spec, index), spec)
        return ignored.restore(out, index, inputs.x.shape[0])


def _of_no_classes(inputs: Inputs, spec: Spec) -> Results:
    """The outputs of a vocabulary shard without classes: it contributes nothing to any row."""
    zeros = inputs.x.new_zeros(inputs.x.shape[0], dtype=compute_dtype(inputs.x.dtype))
    shapes = {"x": inputs.x.shape, "weight": inputs.weight.shape, "bias": (0,)}
    grads = {name: zeros.new_zeros(shapes[name]) for name in spec.gradients}
    lowest = torch.full_like(zeros, torch.finfo(zeros.dtype).min)
    # two outputs of an operator must not share memory
    rest = zeros.clone() if spec.strategy == "tiled" else None
    return Results(zeros, lowest if spec.returns_lse else None, **grads, lse_rest=rest)


def _compute(inputs: Inputs, spec: Spec) -> Results:
    n, d, v = *inputs.x.shape, inputs.weight.shape[0]
    logits_exist = inputs.logits is not None
    found = plan.plan(n, d, v, inputs.x.dtype, inputs.x.device, spec, logits_exist)
    return IMPLEMENTATIONS[found.implementation, found.strategy](inputs, spec, found)


def _aten_chunked(inputs: Inputs, spec: Spec, plan: Plan) -> Results:
    if plan.in_place:
        return in_place.run(inputs, spec, plan.classes)
    return chunked.run(inputs, spec, plan.rows, plan.classes, plan.block)


def _aten_tiled(inputs: Inputs, spec: Spec, plan: Plan) -> Results:
    return tiled.run(inputs, spec, plan.rows, plan.classes)


IMPLEMENTATIONS: dict[tuple[str, str], Callable[[Inputs, Spec, Plan], Results]] = {
    ("aten", "chunked"): _aten_chunked,
    ("aten", "tiled"): _aten_tiled,
}
