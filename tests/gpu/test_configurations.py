"""Each kernel with each configuration that this GPU is offered, and the tuner's choice among them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fxpass.kernels import chunked, tile_config, tuning
from fxpass.kernels.call import Operands, for_call, gpu_of
from fxpass.plan.devices import target_of
from fxpass.spec import expression
from fxpass.spec.spec import Spec
from tests.support import implementations, tiled_runs
from tests.support.implementations import GRADIENTS, problem

SOFTCAP = expression.parse("30*tanh(z/30)")
SPECS = {
    "plain": Spec(gradients=GRADIENTS),
    "everything": Spec(gradients=GRADIENTS, label_smoothing=0.1, transform=SOFTCAP, ignore_index=3),
    "probabilities": Spec(gradients=GRADIENTS, target="probabilities", label_smoothing=0.1),
}
# The most candidates that any GPU is offered.
MOST = 5


@pytest.fixture
def take(monkeypatch):
    """``take(2)``: the third candidate is taken wherever there is a choice."""

    def take(place):
        taken = []

        def best(kernel, device, dtype, sizes, candidates, launch):
            taken.append(len(candidates) > place)
            return candidates[place if taken[-1] else 0]

        monkeypatch.setattr(tuning, "best", best)
        return taken

    return take


def inputs_of(device, dtype, spec, v):
    """Rows and classes for several tiles, the last of them not full; rows of 16 bytes."""
    features = {"weighted": spec.label_smoothing > 0, "lse_scaled": spec.label_smoothing > 0}
    inputs = problem(
        device, dtype, n=300, d=192, v=v, target=spec.target, row_scaled=True, size=0.1, **features
    )
    if spec.target == "indices":
        inputs.target[1] = 3
        inputs.row_scale[inputs.target == 3] = 0.0  # what is ignored in a loss beside an lse
    return inputs


@pytest.mark.only_gpu
@pytest.mark.parametrize("dtype", implementations.DTYPES, ids=str)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("place", range(MOST))
def test_tiles(place, name, dtype, device, take):
    spec = SPECS[name]
    if place >= len(tile_config.configs_for(target_of(device), dtype, spec)):
        pytest.skip("this GPU has no more candidates")
    taken = take(place)
    tiled_runs.check(inputs_of(device, dtype, spec, v=1016), spec, classes=512)
    assert taken == [True, True]  # forward and backward


@pytest.mark.only_gpu
@pytest.mark.parametrize("v", [1016, 5003, 16384, 40000])
@pytest.mark.parametrize("dtype", implementations.DTYPES, ids=str)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("place", range(MOST))
def test_rows(place, name, dtype, v, device, take):
    taken = take(place)
    spec = dataclasses.replace(SPECS[name], lse=True)
    implementations.check(inputs_of(device, dtype, spec, v), spec, rows=200)
    if not all(taken):
        pytest.skip("this GPU has no more candidates")


@pytest.mark.only_gpu
@pytest.mark.parametrize("dtype", implementations.DTYPES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_what_is_timed_and_chosen(name, dtype, device, tmp_path, monkeypatch):
    """Without deterministic algorithms the tuner launches each candidate, on the real buffers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_chosen", {})
    torch.use_deterministic_algorithms(False)
    inputs, spec = inputs_of(device, dtype, SPECS[name], v=1016), SPECS[name]
    tiled_runs.check(inputs, spec, classes=512)
    implementations.check(inputs, spec, rows=200)
    assert tuning._chosen
    assert list(tmp_path.rglob("*.autotune.json"))


@pytest.mark.only_gpu
@pytest.mark.parametrize("dtype", implementations.DTYPES[1:], ids=str)
def test_tiles_are_read_as_the_hardware_can(dtype, device):
    """Through tensor descriptors on Hopper and later, and multiplied by its warp groups."""
    target = target_of(device)
    if not tile_config.has_descriptors(target):
        pytest.skip("this GPU has no tensor descriptors")
    tiled_runs.check(inputs_of(device, dtype, SPECS["plain"], v=1016), SPECS["plain"], classes=512)
    spec = dataclasses.replace(SPECS["plain"], gradients=())
    operands = Operands.of(inputs_of(device, dtype, spec, v=1016))
    forward, _ = for_call(dataclasses.replace(spec, strategy="tiled"), operands, gpu_of(device))
    caches = chunked.load(forward.kernel).device_caches
    compiled = [one for kernels, *_ in caches.values() for one in kernels.values()]
    assert compiled
    for one in compiled:
        assert "cp.async.bulk.tensor" in one.asm["ptx"]
        assert target != "sm_90" or "wgmma.mma_async" in one.asm["ptx"]
