"""Which Triton kernels one call of class reductions launches, in forward and in backward.

In: the call's spec and the operands without their data. Out: the launches::

    >>> x, weight = Operand((8192, 4096), torch.bfloat16), Operand((128256, 4096), torch.bfloat16)
    >>> spec = Reductions(("lse",), gradients=("x",))
    >>> [one.stage for one in launches(spec, OfReductions(x, weight), ASSUMED)]
    ['reductions', 'reductions_backward']
"""

from __future__ import annotations

import torch  # noqa: F401, for the example

from fxpass.kernels.call import (  # noqa: F401, Operand and ASSUMED for the example
    ASSUMED,
    Gpu,
    Launch,
    OfReductions,
    Operand,
    for_reductions,
)
from fxpass.spec.reductions import Reductions


def launches(spec: Reductions, operands: OfReductions, gpu: Gpu) -> tuple[Launch, ...]:
    """The kernels of one call, in order, where every output that is named has a gradient.

    Args:
        spec: of the call.
        operands: those of the call.
        gpu: the device, which need not exist.
    """
    found = for_reductions(spec, operands, gpu)
    if spec.gradients and not spec.total:
        found += for_reductions(spec, operands, gpu, forward=False)
    return found
