"""Incoming gradients of any magnitude, of logits that are stored in fp16.

Runs on the GPU where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxpass.aten import reductions as aten
from fxpass.formula.expression import parse
from fxpass.formula.operands import Operands
from fxpass.formula.outputs import Moment
from fxpass.formula.reductions import Reductions
from fxpass.kernels import reductions as kernels
from fxpass.kernels.scaling import scale_incoming
from fxpass.plan.plan import Plan
from tests.support.numerics import error

PLANS = {
    "chunks": Plan("triton", "chunked", rows=1000, classes=1000),
    "slices": Plan("triton", "tiled", rows=1000, classes=16),
}
WIDE = Plan("aten", "chunked", rows=1000, classes=1000)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
BOTH = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
PICK = Reductions(("pick",), gradients=("x", "weight", "bias"))


def operands(n: int = 7, v: int = 37, size: float = 1.0, dtype=torch.float16) -> Operands:
    x, weight, bias = size * torch.randn(n, 5), torch.randn(v, 5), torch.randn(v)
    picks = torch.randint(v, (n,))
    return Operands(x.to(dtype), weight.to(dtype), bias.to(dtype), None, picks, ())


def gradients(given: Operands, spec: Reductions, plan: Plan, incoming: Tensor) -> dict[str, Tensor]:
    out, _ = kernels.forward(given, spec, plan)
    return kernels.backward(given, spec, plan, out, incoming)


def exact(given: Operands, spec: Reductions, incoming: Tensor) -> dict[str, Tensor]:
    """The gradients in float64."""
    floats = ("x", "weight", "bias")
    wide = {name: t.double() for name in floats if (t := getattr(given, name)) is not None}
    double = given._replace(**wide, given=tuple(t.double() for t in given.given))
    out, _ = aten.forward(double, spec, WIDE)
    return aten.backward(double, spec, WIDE, out, incoming.double())


@BOTH
def test_fp16_keeps_small_probabilities(device, plan):
    """One class takes it all; the others' probabilities, 1e-7, have one bit in fp16."""
    with device:
        given = operands(4)._replace(bias=torch.zeros(37).half(), picks=torch.zeros(4).long())
        given.weight[0] = 16
        given.x.copy_(torch.eye(4, 5))  # logits are the weight's columns
        scale = 2.0**12  # what a gradient scaler multiplies with, as fp16 gradients need
        grad = gradients(given, PICK, plan, torch.full((1, 4), -scale))["bias"].double() / scale
    want = given.weight[:, :4].double().softmax(0).sum(1)
    # two roundings, of the logits' gradient and of the bias's: half a unit in fp16's last place each
    assert ((grad - want)[1:].abs() <= 2**-10 * want[1:]).all()


@BOTH
def test_many_rows_of_one_class_do_not_overflow_fp16(device, plan):
    """80 gradients of nearly -1, times the gain, are beyond 65504."""
    with device:
        given = operands(80, 5, size=0.1)
        incoming = torch.ones(1, 80)
        assert given.picks is not None
        given.picks.zero_()
        found = gradients(given, PICK, plan, incoming)
        wide = given._replace(x=given.x.float(), weight=given.weight.float())
        want = gradients(wide._replace(bias=given.bias), PICK, plan, incoming)  # type: ignore[arg-type]
    for name, grad in found.items():
        assert error(grad, want[name]) < 2e-3


@BOTH
@pytest.mark.parametrize(
    ("outputs", "transform"),
    [
        (("pick",), "exp(0.25*exp(0.25*z))"),  # slopes of hundreds, which no table bounds
        (("pick",), "given0*z"),  # factors of hundreds
        (("pick",), "given0**2*tanh(z)"),
    ],
)
def test_large_slopes_do_not_overflow_fp16(device, plan, outputs, transform):
    """Times the gain, they are beyond 65504."""
    spec = Reductions(outputs, parse(transform), gradients=("x", "weight", "bias"))
    with device:
        given, incoming = operands(size=0.5), 2.0**-12 * torch.randn(len(outputs), 7)
        given.weight.clamp_(-1.5, 1.5)
        given.x.clamp_(-1, 1)
        given.x[0], given.weight[:2] = 1.0, 1.5
        bias = torch.zeros(37)
        bias[:2] = 0.5  # exp(8) is 2981
        factors = 600 * torch.rand(37)
        given = given._replace(bias=bias.half(), given=(factors,))
        found = gradients(given, spec, plan, incoming)
        want = exact(given, spec, incoming)
    for name, grad in found.items():
        assert error(grad, want[name]) < 2e-3


@pytest.mark.parametrize("exponent", [-60, 40])
@BOTH
def test_gradients_of_any_magnitude(device, plan, exponent):
    """Powers of two change no bits. (Slices return gradients of the weight in fp16.)"""
    rows = ("pick", Moment(1, 1), Moment(0, 1))
    spec = Reductions(rows, gradients=("x", "weight", "bias"))
    of_total = Reductions(rows, gradients=("x", "weight", "bias"), total=rows)
    with device:
        given, incoming = operands(v=300), torch.randn(3, 7)
    answers = []
    for power in (0, exponent):
        scaled = incoming * 2.0**power
        grads = gradients(given, spec, plan, scaled)
        found = [t * 2.0**-power for t in grads.values() if t.dtype == torch.float32]
        assert len(found) == (3 if plan.strategy == "chunked" else 1)
        out, grads = kernels.forward(given._replace(coef=scaled), of_total, plan)
        answers.append([*found, out.rows, *(t * 2.0**-power for t in grads.values())])
    assert all(map(torch.equal, *answers))
    assert all(t.isfinite().all() and t.any() for t in answers[0])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@BOTH
def test_overflow_of_the_loss_scale_is_seen(device, plan, value):
    """GradScaler looks for gradients that are not finite."""
    with device:
        given, incoming = operands(), torch.ones(1, 7)
        incoming[0, 3] = value
        found = gradients(given, PICK, plan, incoming)
    assert not found["x"][3].isfinite().any()
    assert found["x"][4].isfinite().all()
    assert not found["weight"].isfinite().any()


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_incoming_gradients_of_zero(device, plan, dtype):
    with device:
        found = gradients(operands(dtype=dtype), PICK, plan, torch.zeros(1, 7))
    assert not any(grad.any() for grad in found.values())


@BOTH
def test_the_dtype_of_new_tensors_does_not_matter(device, plan):
    spec = Reductions(("pick", Moment(1, 1)), gradients=("x", "weight", "bias"))
    with device:
        given, incoming = operands(), torch.randn(2, 7)
        want = gradients(given, spec, plan, incoming)
        torch.set_default_dtype(torch.float16)
        try:
            found = gradients(given, spec, plan, incoming)
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("value", [0.0, 1e-45, 2.0**-126, 1.0, 1e30, float("inf"), float("nan")])
def test_the_power(value):
    """A power of two below the largest gradient, or 1 / 2**126 below all normal numbers."""
    incoming = torch.tensor([[value, 0.0]])
    found, power = scale_incoming(operands(2), ["pick"], incoming)
    assert power is not None
    assert torch.frexp(power).mantissa == 0.5
    assert torch.equal(found * power, incoming) or value != value
    if 2.0**-126 <= value < float("inf"):
        assert 1 <= found[0, 0] < 2
    assert scale_incoming(operands(dtype=torch.bfloat16), ["pick"], incoming)[1] is None
