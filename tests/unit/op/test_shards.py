"""Every implementation where the weight holds some of the classes: a target may be in another shard."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fxpass.aten import chunked as aten_chunked
from fxpass.aten import tiled as aten_tiled
from fxpass.spec import expression
from fxpass.spec.spec import ELSEWHERE, IGNORED, Spec
from tests.support.implementations import DTYPES, GRADIENTS, assert_as_autograd, centred, problem

N, V, ALL = 7, 21, 50
AWAY, LEFT_OUT = [1, 5], [3]


# ---------------------------------------------------------------- the implementations, called alike


IMPLEMENTATIONS = {
    "aten chunked": lambda inputs, spec: aten_chunked.run(inputs, spec, 4),
    "aten tiled": lambda inputs, spec: aten_tiled.run(inputs, spec, 4, 16),
}


def run(implementation, inputs, spec):
    """Loss and lse, then gradients, as the operator asks for them."""
    out = IMPLEMENTATIONS[implementation](inputs, dataclasses.replace(spec, gradients=()))
    if "tile" in implementation:
        assert out.lse_rest.isfinite().all()
        inputs = inputs._replace(lse=out.lse, lse_rest=out.lse_rest)
    grads = IMPLEMENTATIONS[implementation](inputs, dataclasses.replace(spec, lse=False))
    return out.loss, out.lse, grads.x, grads.weight, grads.bias


def shard(device, spec, dtype=torch.float32, v=V, **features):
    """A problem with targets that are here, in another shard, and ignored."""
    inputs = problem(device, dtype, n=N, v=v, target=spec.target, **features)
    if spec.target == "indices":
        inputs.target[AWAY] = ELSEWHERE
        inputs.target[LEFT_OUT] = IGNORED if spec.ignore_index is not None else ELSEWHERE
        inputs.target[0], inputs.target[2] = 0, v - 1
    return inputs


def check(implementation, inputs, spec):
    """Loss, lse and gradients against float64."""
    out = run(implementation, inputs, spec)
    assert_as_autograd(out, inputs, spec)
    return out


# ---------------------------------------------------------------- the meaning

SPEC = Spec("none", gradients=GRADIENTS, lse=True, shard_of=ALL)
BOTH = {"row_scaled": True, "lse_scaled": True}
# what differs from SPEC, and what is there beside the target
CASES = {
    "plain": ({}, BOTH),
    "no scales, no ignored rows": ({"ignore_index": None}, {}),
    "weighted": ({}, {"weighted": True, "row_scaled": True}),
    "smoothed": ({"label_smoothing": 0.3, "ignore_index": None}, {"row_scaled": True}),
    "everything": (
        {"label_smoothing": 0.3, "transform": expression.parse("30*tanh(z/30)")},
        {"weighted": True, **BOTH},
    ),
    "probabilities": (
        {"target": "probabilities", "label_smoothing": 0.3},
        {"weighted": True, **BOTH},
    ),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(device, name, implementation):
    changes, features = CASES[name]
    spec = dataclasses.replace(SPEC, **changes)
    check(implementation, shard(device, spec, **features), spec)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_target_distribution_that_cancels(device, implementation):
    spec = dataclasses.replace(SPEC, target="probabilities")
    for features in (BOTH, {"row_scaled": True}, {}):
        inputs = shard(device, spec, **features)
        check(implementation, inputs._replace(target=centred(N, V).to(device)), spec)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_low_precision(device, dtype, implementation):
    spec = dataclasses.replace(SPEC, label_smoothing=0.1)
    check(implementation, shard(device, spec, dtype, v=32, **BOTH), spec)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_target_is_here(device, implementation):
    """Then the loss is 0, and so is its gradient; that of the lse remains."""
    inputs = shard(device, SPEC, row_scaled=True)
    inputs.target[:] = ELSEWHERE
    loss, _, *grads = check(implementation, inputs, SPEC)
    assert not loss.any()
    assert not any(grad.any() for grad in grads)
    check(implementation, inputs._replace(lse_scale=inputs.row_scale), SPEC)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_read_in_place_of_a_class_elsewhere(device, implementation):
    """Class 0, which is impossible here; no target of this shard is that class."""
    inputs = shard(device, SPEC, weighted=True, **BOTH)
    inputs.target[0] = 5
    inputs.bias[0] = -torch.inf
    check(implementation, inputs, SPEC)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_class_of_the_shard_is_possible(device, implementation):
    """As a shard of padding is: it adds nothing to a row, and no gradient comes from it."""
    inputs = shard(device, SPEC, row_scaled=True)
    inputs.target[:] = ELSEWHERE
    # what arrives at an lse that is far below another shard's
    inputs = inputs._replace(lse_scale=torch.zeros(N, device=device))
    inputs.bias[:] = -torch.inf
    loss, lse, *grads = run(implementation, inputs, SPEC)
    assert not loss.any()
    assert (lse == torch.finfo(torch.float32).min).all()
    assert not any(grad.any() for grad in grads)
