"""The gradient filter of the tiled Triton lowering: what it drops, and what that costs.

Runs on the GPU where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from lowerings import DTYPES, GRADIENTS, autograd, problem
from numerics import FLOOR
from tiled_runs import both, check, small_blocks

from fxpass.kernels import tile_filter as triton_tile_filter
from fxpass.spec.spec import Spec


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    small_blocks(monkeypatch)


@pytest.fixture
def flags(monkeypatch):
    """The flags of every tile of classes that a run looks at."""
    seen = []

    def kept(flags):
        seen.append(flags.clone())
        return original(flags)

    original = triton_tile_filter.kept
    monkeypatch.setattr(triton_tile_filter, "kept", kept)
    return seen


FILTERED = Spec(gradients=GRADIENTS, gradient_filter=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_filter_keeps_what_is_large(device, dtype, flags, monkeypatch):
    """A flat distribution: nothing is dropped, and the bits are those of no threshold at all."""
    inputs = problem(device, dtype, n=18, v=45, row_scaled=True)
    inputs = inputs._replace(row_scale=inputs.row_scale * 2.0**-10)  # 1/N must not count
    out = check(inputs, FILTERED)
    assert all(flag.all() for flag in flags)
    assert len(flags) == 6  # twice for each of three tiles of classes
    monkeypatch.setattr(triton_tile_filter, "resolution", lambda dtype: 0.0)
    everything = both(inputs, FILTERED)
    assert all(torch.equal(a, b) for a, b in zip(out, everything, strict=True))


def peaked(device, dtype):
    """Rows whose probability is at a few classes: of three blocks of classes one has them all."""
    inputs = problem(device, dtype, n=20, d=16, v=45, row_scaled=True)
    bias = torch.full_like(inputs.bias, -15)
    bias[16:32] = 0
    target = inputs.target % 16 + 16
    target[3] = 40  # one row's target is elsewhere
    return inputs._replace(bias=bias, target=target, x=inputs.x / 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_filter_drops_what_is_small(device, dtype, flags):
    """The error is that of what is dropped: at most the resolution for each entry."""
    inputs = peaked(device, dtype)
    out, plain = (
        both(inputs, FILTERED),
        both(inputs, dataclasses.replace(FILTERED, gradient_filter=False)),
    )
    exact = autograd(inputs, FILTERED, torch.float64)
    kept = torch.cat(flags[::2], 1)
    if dtype == torch.float32:  # whose resolution is 4e-9: exp(-15) is above it
        assert kept.all()
    else:
        # the blocks of 8 rows and 16 classes that hold a probability above 2**-12, or a target
        assert kept.tolist() == [[0, 1, 1], [0, 1, 0], [0, 1, 0]]
        assert not out.weight[:16].any()
        assert plain.weight[:16].any()
    resolution = triton_tile_filter.resolution(dtype)
    scale = inputs.row_scale.abs().double()
    most_x = resolution * scale[:, None] * inputs.weight.double().abs().sum(0)
    most_weight = resolution * (scale @ inputs.x.double().abs())
    bounds = (most_x, most_weight.expand(45, 16))
    assert torch.equal(out.bias, plain.bias)
    for got, whole, true, bound in zip(out[2:4], plain[2:4], exact[2:4], bounds, strict=True):
        rounding = 2 * (whole.double() - true).norm() + FLOOR[dtype] * true.norm()
        assert (got.double() - true).norm() <= bound.norm() + rounding
        assert (got.double() - whole).norm() <= bound.norm() + FLOOR[dtype] * whole.norm()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
def test_filter_keeps_nan(device, flags):
    inputs = peaked(device, torch.bfloat16)
    inputs.bias[2] = torch.nan
    out = both(inputs, FILTERED)
    assert all(flag.all() for flag in flags)
    assert out.x.isnan().all()


def test_filter_with_nothing_to_keep(device, flags):
    """Rows that nothing arrives at: no tile is kept, and what is written is zero."""
    inputs = problem(device, torch.float16, n=9, row_scaled=True)
    out = both(inputs._replace(row_scale=torch.zeros_like(inputs.row_scale)), FILTERED)
    assert not any(flag.any() for flag in flags)
    assert not any(grad.any() for grad in out[2:])


def test_filter_gives_the_same_bits_every_time(device):
    inputs = peaked(device, torch.bfloat16)
    first, second = (both(inputs, FILTERED) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
