"""From a plan to the code that runs it.

In: :class:`fxpass.aten.Inputs` and a spec. Out: :class:`fxpass.aten.Outputs`, from the lowering and
the strategy that the plan has for these sizes on this device.
"""

from __future__ import annotations

from collections.abc import Callable

from fxpass import aten_chunked, aten_in_place, aten_tiled, plan
from fxpass.aten import Inputs, Outputs
from fxpass.plan import Plan
from fxpass.spec import Spec


def lower(inputs: Inputs, spec: Spec) -> Outputs:
    """Runs one fused loss, or its backward."""
    n, d, v = *inputs.x.shape, inputs.weight.shape[0]
    kept = inputs.logits is not None
    found = plan.plan(n, d, v, inputs.x.dtype, inputs.x.device, spec, kept)
    return LOWERINGS[found.lowering, found.strategy](inputs, spec, found)


def _aten_chunked(inputs: Inputs, spec: Spec, plan: Plan) -> Outputs:
    if plan.in_place:
        return aten_in_place.run(inputs, spec, plan.classes)
    return aten_chunked.run(inputs, spec, plan.rows, plan.classes, plan.block)


def _aten_tiled(inputs: Inputs, spec: Spec, plan: Plan) -> Outputs:
    return aten_tiled.run(inputs, spec, plan.rows, plan.classes)


def _triton_chunked(inputs: Inputs, spec: Spec, plan: Plan) -> Outputs:
    from fxpass import triton_chunked  # imports triton, which not every platform has

    return triton_chunked.run(inputs, spec, plan.rows)


def _triton_tiled(inputs: Inputs, spec: Spec, plan: Plan) -> Outputs:
    from fxpass import triton_tiled

    return triton_tiled.run(inputs, spec, plan)


LOWERINGS: dict[tuple[str, str], Callable[[Inputs, Spec, Plan], Outputs]] = {
    ("aten", "chunked"): _aten_chunked,
    ("aten", "tiled"): _aten_tiled,
    ("triton", "chunked"): _triton_chunked,
    ("triton", "tiled"): _triton_tiled,
}
