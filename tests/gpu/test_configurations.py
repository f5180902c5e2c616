"""Each kernel with each configuration that this GPU is offered, and the tuner's choice among them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fxpass.kernels import reductions, tuning
from fxpass.op import run
from fxpass.plan.plan import Plan
from fxpass.spec.operands import Operands
from fxpass.spec.outputs import PRODUCTS, Moment
from tests.support.numerics import error
from tests.support.pairs import in_pairs
from tests.support.reduction_cases import Case, case, check

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WEIGHTS = ("given0", "given1")
# outputs, transform, and whether there are a scale of rows and several picks
CASES = {
    "a loss": (["pick"], "z", False),
    "a policy's loss": (["pick", Moment(1, 1), "argmax"], "3*tanh(z/3)", True),
    "soft targets": ([Moment(0, 1, 1), "lse"], "z", False),
    "a maximum": (["lse", "max", "argmax"], "0.5-0.5*z", True),
}
CLASSES = (1016, 5003, 16384, 40000)
# The most candidates that any GPU is offered.
MOST = 5


@pytest.fixture
def take(monkeypatch, device):
    """``take(2)``: the third candidate is taken wherever there is a choice, in several chunks and
    slices."""

    def take(place):
        taken = []

        def best(kernel, device, dtype, sizes, candidates, launch):
            taken.append(len(candidates) > place)
            return candidates[place if taken[-1] else 0]

        monkeypatch.setattr(tuning, "best", best)
        return taken

    in_parts(monkeypatch)
    with device:
        yield take


def in_parts(monkeypatch) -> None:
    plan = Plan("triton", "tiled", rows=200, classes=768)
    monkeypatch.setattr(run, "plan", lambda *_: plan)


def made(name: str, dtype: torch.dtype, v: int) -> Case:
    outputs, transform, full = CASES[name]
    shape = (300, 192, v)
    found = case(outputs, dtype, transform, dtype, full, full, shape, 0.1)
    for tensor in found.tensors.values():
        tensor.mul_(0.5)  # of logits that are not all in the transform's flat part
    return found


@pytest.mark.only_gpu
@in_pairs(name=CASES, dtype=DTYPES, v=CLASSES)
@pytest.mark.parametrize("place", range(MOST))
def test_rows(place, name, dtype, v, take):
    taken = take(place)
    check(made(name, dtype, v), dtype)
    if not any(taken):
        pytest.skip("this GPU has no more candidates")


@pytest.mark.only_gpu
@in_pairs(name=("a loss", "soft targets"), dtype=DTYPES, v=CLASSES)
@pytest.mark.parametrize("place", range(MOST))
def test_totals(place, name, dtype, v, take):
    """Their gradients are those of the outputs, however these were computed."""
    taken = take(place)
    found = made(name, dtype, v)
    named = found.tensors
    given = tuple(t for one, t in named.items() if one in WEIGHTS)
    x, weight, bias = (named[one] for one in PRODUCTS)
    operands = Operands(x, weight, bias, named.get("scale"), found.picks, given)
    plan = Plan("triton", "tiled", rows=200, classes=768)
    out, _ = reductions.forward(operands, found.spec, plan)
    coef = torch.randn_like(out.rows)
    want = reductions.backward(operands, found.spec, plan, out, coef)
    spec = dataclasses.replace(found.spec, total=found.spec.rows)
    of_total, grads = reductions.forward(operands._replace(coef=coef), spec, plan)
    assert error(of_total.rows, out.rows) < 1e-4
    for one, grad in grads.items():
        # two roundings of each logit's gradient, and one of those of weight and bias
        assert error(grad, want[one]) < 4 * torch.finfo(dtype).eps + 1e-6
    if not any(taken):
        pytest.skip("this GPU has no more candidates")


@pytest.mark.only_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name", ["a loss", "a policy's loss", "a maximum"]
)  # of several candidates
def test_what_is_timed_and_chosen(name, dtype, device, tmp_path, monkeypatch):
    """Without deterministic algorithms the tuner launches each candidate, on the real buffers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_chosen", {})
    torch.use_deterministic_algorithms(False)
    in_parts(monkeypatch)
    with device:
        check(made(name, dtype, v=5003), dtype)
    assert tuning._chosen
    assert list(tmp_path.rglob("*.autotune.json"))
