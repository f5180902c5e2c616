"""Runs a fused loss with the implementation and strategy of its plan.

In: :class:`fxpass.aten.common.Inputs` and a spec. Out: :class:`fxpass.aten.common.Results`.
"""

from __future__ import annotations

from collections.abc import Callable

from fxpass.aten import chunked, in_place, tiled
from fxpass.aten.common import Inputs, Results
from fxpass.plan import plan
from fxpass.plan.plan import Plan
from fxpass.spec.spec import Spec


def compute(inputs: Inputs, spec: Spec) -> Results:
    """Runs forward or backward of one fused loss."""
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


def _triton_chunked(inputs: Inputs, spec: Spec, plan: Plan) -> Results:
    from fxpass.kernels.chunked import run  # imports triton, which not every platform has

    return run(inputs, spec, plan.rows)


def _triton_tiled(inputs: Inputs, spec: Spec, plan: Plan) -> Results:
    from fxpass.kernels.tiled import run

    return run(inputs, spec, plan.classes)


IMPLEMENTATIONS: dict[tuple[str, str], Callable[[Inputs, Spec, Plan], Results]] = {
    ("aten", "chunked"): _aten_chunked,
    ("aten", "tiled"): _aten_tiled,
    ("triton", "chunked"): _triton_chunked,
    ("triton", "tiled"): _triton_tiled,
}
