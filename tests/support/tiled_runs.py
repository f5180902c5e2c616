"""What the tests of the tiled Triton implementation share: small tiles, and how a run of it is judged."""

from __future__ import annotations

import dataclasses
from collections import namedtuple

import torch

from fxpass.kernels import call, tile_config, tiled
from fxpass.kernels.tile_config import Config
from fxpass.spec import operands
from tests.support.implementations import GRADIENTS, assert_as_autograd

CLASSES = 20
SMALL = Config(BLOCK_N=16, BLOCK_V=16, BLOCK_D=16, GROUP_N=2, num_warps=4, num_stages=1)


def small_blocks(monkeypatch) -> None:
    """Several splits of several tiles, and more than one group of more than one block of rows."""
    interpreted = SMALL._replace(BLOCK_N=8, BLOCK_V=16, BLOCK_D=8)
    small = SMALL if torch.cuda.is_available() else interpreted
    monkeypatch.setattr(tile_config, "configs_for", lambda target, dtype, spec: (small,))
    gpu_of = call.gpu_of
    monkeypatch.setattr(call, "gpu_of", lambda device: gpu_of(device)._replace(processors=3))
    # several passes over what is rounded behind an f32 result
    monkeypatch.setattr(tiled, "_F32_BYTES", 4 * 5 * 12)


Results = namedtuple("Results", operands.Results._fields[:5])


def both(inputs, spec, classes=CLASSES):
    """Forward's outputs and then backward's gradients, as the operator asks for them."""
    spec = dataclasses.replace(spec, strategy="tiled")
    out = tiled.run(inputs, dataclasses.replace(spec, gradients=()), classes)
    assert out.loss.dtype == out.lse.dtype == torch.float32
    assert out[2:5] == (None, None, None)
    assert out.lse_rest.isfinite().all()
    if not spec.gradients:
        return Results(*out[:5])
    grads = tiled.run(inputs._replace(lse=out.lse, lse_rest=out.lse_rest), spec, classes)
    assert grads.loss is None
    assert grads.lse is None
    return Results(out.loss, out.lse, *grads[2:5])


def check(inputs, spec, classes=CLASSES):
    """Loss, lse and gradients against float64, nothing not asked for, operands unharmed."""
    before = [None if t is None else t.clone() for t in inputs]
    out = both(inputs, spec, classes)
    for tensor, copy in zip(inputs, before, strict=True):
        assert tensor is None or torch.equal(tensor, copy)
    dtype = inputs.x.dtype
    wanted = [0, 1, *(2 + GRADIENTS.index(name) for name in spec.gradients)]
    assert [i for i, tensor in enumerate(out) if tensor is not None] == wanted
    assert all(out[i].dtype == dtype for i in wanted[2:])
    assert_as_autograd(out, inputs, spec, wanted)
    return out
