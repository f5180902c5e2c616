"""An f32 bias beside 16-bit operands is added to the up-cast logits: log priors keep their bits."""

from __future__ import annotations

import torch

from tests.support.numerics import error
from tests.support.pairs import in_pairs
from tests.support.reduction_cases import case


@in_pairs(
    dtype=[torch.bfloat16, torch.float16],
    outputs=[["pick"], ["lse"]],
    transform=["z", "0.5-0.5*z"],
)
def test_nothing_of_it_is_rounded(implementation, dtype, outputs, transform):
    found = case(outputs, dtype, transform, torch.float32)
    # large numbers whose low bits matter, as 8 mantissa bits would lose them
    bias = 40 + 0.3 * found.tensors["bias"]
    found.tensors["bias"] = bias
    wide = {name: tensor.double() for name, tensor in found.tensors.items()}
    exact = found.eager(*wide.values())
    rounded = found.eager(*(wide | {"bias": bias.to(dtype).double()}).values())
    assert error(found.fused(*found.all), exact) < 0.3 * error(rounded, exact)
