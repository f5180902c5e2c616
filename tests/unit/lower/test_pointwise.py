"""Every function of one logit, by its overloads in ATen, against autograd; and calls that are none.

Runs on the CPU; the same expressions in Triton are in tests/unit/kernels/test_expression.py.
"""

from __future__ import annotations

import math

import pytest
import torch

from fxpass.formula.expression import Z, derivative, evaluate, exact, parse, text
from fxpass.lower.pointwise import POINTWISE, REQUIRED
from tests.fuzz.spellings import name_of, spelled, spellings
from tests.support.numerics import assert_close

A = torch.ops.aten
# Arguments after the logits of the rows that need some, or have several cases; by name.
NUMBER = [((2.5,), {})]
ARGUMENTS = {
    **{key: [*NUMBER, ((-3,), {"alpha": 2})] for key in ("add", "sub", "rsub")},
    **dict.fromkeys(("mul", "div"), NUMBER),
    "pow": [((e,), {}) for e in (1, 2, 3.0, -2, 0.5, -0.5, 1.5, 0.3)],
    **{
        key: [
            ((-1, 1.5), {}),
            ((None, 3), {}),
            ((), {"min": -3}),
            ((), {"max": 2}),
            ((0.5, -0.5), {}),
        ]
        for key in ("clamp",)
    },
    **{key: [((1,), {})] for key in ("clamp_min", "clamp_max")},
}

# Zero, the corners of every row, tiny, large, where f32 and f64 exponentials end, infinities, nan.
POSITIVE = [0.0, 0.25, 0.3, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 5.0, 6.0, 7.0, 10.0, 12.0, 20.0]
POSITIVE += [1e-300, 1e-30, 1e-8, 1e-4, 20.00001, 40.0, 89.5, 100.0, 700.0, 1e4, 1e30, math.inf]
POINTS = torch.tensor([*POSITIVE, *(-p for p in POSITIVE), math.nan], dtype=torch.float64)


def _id(call):
    target, operands, kwargs = call
    return f"{spelled(target)}{operands[1:] or ''}{kwargs or ''}".lstrip(".")


def called(call, z):
    target, operands, kwargs = call
    return target(*(z if operand is Z else operand for operand in operands), **kwargs)


def _takes(target, args, kwargs):
    """Tells if an overload has these arguments."""
    try:
        called((target, (Z, *args), kwargs), torch.ones(1))
    except (TypeError, RuntimeError):
        return False
    return True


# A call is a target, its operands with Z where the logits stand, and its keyword arguments.
CALLS = [
    (target, (Z, *args), kwargs)
    for target in spellings(POINTWISE)
    if isinstance(target, torch._ops.OpOverload)
    for args, kwargs in ARGUMENTS.get(name_of(target), [((), {})])
    if _takes(target, args, kwargs)
]


def expression_of(call, z=Z):
    """The expression of a call, with its arguments as the reader gives them."""
    target, operands, kwargs = call
    spelling = POINTWISE[name_of(target)]
    signature = spelling.signature
    operands = [z if operand is Z else operand for operand in operands]
    given = dict(zip(signature, operands, strict=False)) | kwargs
    assert given.keys() <= signature.keys()
    assert len(given) == len(operands) + len(kwargs)
    values = [given.get(name, default) for name, default in signature.items()]
    assert REQUIRED not in values
    return spelling.value(*map(constant, values))


def constant(value):
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return exact(value)


def with_slope(function, z):
    z = z.clone().requires_grad_()
    out = function(z)
    (slope,) = torch.autograd.grad(out.sum(), z)
    return out.detach(), slope


def assert_same(function, expr, z):
    """Value and slope in float64 against autograd."""
    value, slope = with_slope(function, z)
    close = {"atol": 1e-15, "equal_nan": True}
    torch.testing.assert_close(evaluate(expr, z), value, rtol=1e-12, **close)
    torch.testing.assert_close(evaluate(derivative(expr), z), slope, rtol=1e-12, **close)


def assert_same_f32(function, expr, z):
    """Judged as everything is, by tests/support/numerics.py, where the value is finite."""
    z = z[function(z.double()).isfinite()]
    theirs, true = (with_slope(function, z.to(t)) for t in (torch.float32, torch.float64))
    assert_close((evaluate(expr, z), evaluate(derivative(expr), z)), theirs, true, torch.float32)


# ---------------------------------------------------------------- against autograd


@pytest.mark.parametrize("call", CALLS, ids=_id)
def test_a_call(call):
    """Its value and slope in float64 and in f32, its text, and that nan stays nan."""
    points, expr = POINTS[~POINTS.isnan()], expression_of(call)
    if name_of(call[0]) == "pow":
        # PyTorch has inf for (-inf)**1.5, -inf for the slope of (-0.0)**-0.5
        points = points[(points > -math.inf) & ~((points == 0) & points.signbit())]
    assert_same(lambda z: called(call, z), expr, points)
    assert_same_f32(lambda z: called(call, z), expr, torch.linspace(-12, 12, 1001))
    nan = torch.tensor([math.nan])
    torch.testing.assert_close(
        evaluate(expr, nan), called(call, nan), equal_nan=True, rtol=0, atol=0
    )
    for some in (expr, derivative(expr)):
        assert parse(text(some)) == some


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((A.clamp.default, (Z, -5, 5.0), {}), "minimum(maximum(z,-5),5)"),
        ((A.rsub.Scalar, (Z, 1), {"alpha": 2}), "1-2*z"),
        ((A.pow.Tensor_Scalar, (Z, 0.5), {}), "sqrt(z)"),
        ((A.mul.Tensor, (Z, Z), {}), "z**2"),
        ((A.relu.default, (Z,), {}), "where(z<=0,0,z)"),
        ((A.div.Tensor_mode, (Z, 4), {"rounding_mode": None}), "0.25*z"),
    ],
    ids=lambda value: _id(value) if isinstance(value, tuple) else "",
)
def test_text(call, expected):
    assert text(expression_of(call)) == expected


# ---------------------------------------------------------------- compositions

COMPOSITIONS = {
    "soft-cap": [
        (A.div.Tensor, (Z, 30), {}),
        (A.tanh.default, (Z,), {}),
        (A.mul.Tensor, (Z, 30), {}),
    ],
    "clamp after scale": [(A.mul.Tensor, (Z, 0.125), {}), (A.clamp.default, (Z, -1, 1), {})],
    "log of sigmoid": [
        *((A.sigmoid.default, (Z,), {}), (A.add.Tensor, (Z, 1e-6), {}), (A.log.default, (Z,), {})),
    ],
    "bounded": [
        *((A.clamp.default, (Z, -4, 2), {}), (A.sigmoid.default, (Z,), {})),
        *((A.abs.default, (Z,), {}), (A.sqrt.default, (Z,), {})),
    ],
    "square of a relu": [
        *((A.sub.Tensor, (Z, 1), {"alpha": 2}), (A.relu.default, (Z,), {})),
        (A.square.default, (Z,), {}),
    ],
}


def composed(calls):
    """The composition as a function of tensors and as an expression."""

    def function(z):
        for call in calls:
            z = called(call, z)
        return z

    expr = Z
    for call in calls:
        expr = expression_of(call, expr)
    return function, expr


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions(name):
    function, expr = composed(COMPOSITIONS[name])
    assert parse(text(expr)) == expr
    points = POINTS[POINTS.abs() <= 1e4]
    points = points[function(points).isfinite()]
    assert_same(function, expr, points)
    assert_same_f32(function, expr, torch.linspace(-12, 12, 1001))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (
            (A.div.Tensor_mode, (Z, 2), {"rounding_mode": "floor"}),
            "rounding_mode='floor' is not fused",
        ),
        ((A.div.Tensor, (Z, 0), {}), "it divides by zero"),
        ((A.clamp.Tensor, (Z, Z), {}), "min= is not a number"),
        ((A.clamp.default, (Z, math.nan), {}), "finite constants, got nan"),
        ((A.add.Tensor, (Z, math.inf), {}), "finite constants, got inf"),
        ((A.pow.Tensor_Tensor, (Z, Z), {}), "exponent= is not a number"),
        ((A.pow.Tensor_Scalar, (Z, 65), {}), "exponents beyond 64 are not fused"),
        ((A.pow.Scalar, (2, Z), {}), "exponent= is not a number"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_is_no_logit_transform_says_why(call, reason):
    with pytest.raises(ValueError, match=reason):
        expression_of(call)
