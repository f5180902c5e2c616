"""Every spelling of a function of one logit against autograd, and the calls that are none.

Runs on the CPU; the same expressions in Triton are in tests/unit/kernels/test_expression.py.
"""

from __future__ import annotations

import math
import operator

import pytest
import torch
import torch.nn.functional as F

from fxpass.graph.functions import REFLECTED
from fxpass.lower.pointwise import POINTWISE, REQUIRED
from fxpass.spec.expression import Z, derivative, evaluate, exact, parse, text
from tests.fuzz.spellings import name_of, spelled, spellings
from tests.support.numerics import assert_close

# Arguments after the logits of the rows that need some, or have several cases; by name.
NUMBER = [((2.5,), {})]
ARGUMENTS = {
    **{key: [*NUMBER, ((-3,), {"alpha": 2})] for key in ("add", "sub", "rsub")},
    **dict.fromkeys(("mul", "div"), NUMBER),
    "pow": [((e,), {}) for e in (1, 2, 3.0, -2, 0.5, -0.5, 1.5, 0.3)],
    "softplus": [((), {}), ((2.0,), {}), ((), {"beta": 0.5, "threshold": 1.0})],
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
    "leaky_relu": [((), {}), ((0.2,), {}), ((), {"negative_slope": -0.5})],
    "elu": [((), {}), ((0.5,), {})],
    "celu": [((), {}), ((2.0,), {})],
    "gelu": [((), {}), ((), {"approximate": "tanh"})],
    "hardtanh": [((), {}), ((-3, 5.0), {})],
    "hardshrink": [((), {}), ((1.0,), {})],
    "softshrink": [((), {}), ((1.0,), {})],
    "threshold": [((0.5, 20.0), {}), ((0.0, -1.0), {})],
}

# Zero, the corners of every row, tiny, large, where f32 and f64 exponentials end, infinities, nan.
POSITIVE = [0.0, 0.25, 0.3, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 5.0, 6.0, 7.0, 10.0, 12.0, 20.0]
POSITIVE += [1e-300, 1e-30, 1e-8, 1e-4, 20.00001, 40.0, 89.5, 100.0, 700.0, 1e4, 1e30, math.inf]
POINTS = torch.tensor([*POSITIVE, *(-p for p in POSITIVE), math.nan], dtype=torch.float64)


def _id(call):
    target, operands, kwargs = call
    return f"{spelled(target)}{operands[1:] or ''}{kwargs or ''}".lstrip(".")


def run(call, z):
    target, operands, kwargs = call
    function = getattr(torch.Tensor, target) if isinstance(target, str) else target
    return function(*(z if operand is Z else operand for operand in operands), **kwargs)


def _takes(target, args, kwargs):
    """Whether a spelling takes the arguments: an operator has no names, an overload one kind."""
    if target in REFLECTED and (kwargs or args[0] < 0):
        return False  # it ignores keywords, and a negative number has no power
    try:
        run((target, (Z, *args), kwargs), torch.ones(1))
    except (TypeError, RuntimeError):
        return False
    return True


# A call is a target, its operands with Z where the logits stand, and its keyword arguments.
CALLS = [
    (target, (Z, *args), kwargs)
    for target in spellings(POINTWISE)
    for args, kwargs in ARGUMENTS.get(name_of(target), [((), {})])
    if _takes(target, args, kwargs)
]


def expression_of(call, z=Z):
    """The expression of a call, with its arguments as the matcher gives them."""
    target, operands, kwargs = call
    row = POINTWISE[name_of(target)]
    signature = row.signature
    operands = [z if operand is Z else operand for operand in operands]
    operands = operands[::-1] if target in REFLECTED else operands
    given = dict(zip(signature, operands, strict=False)) | kwargs
    assert given.keys() <= signature.keys()
    assert len(given) == len(operands) + len(kwargs)
    values = [given.get(name, default) for name, default in signature.items()]
    assert REQUIRED not in values
    return row.value(*map(constant, values))


def constant(value):
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return exact(value)


def with_slope(function, z):
    z = z.clone().requires_grad_()
    out = function(z)
    (slope,) = torch.autograd.grad(out.sum(), z)
    return out.detach(), slope


def check(function, expr, z, slope_rtol=1e-12):
    """Value and slope in float64 against autograd."""
    value, slope = with_slope(function, z)
    close = {"atol": 1e-15, "equal_nan": True}
    torch.testing.assert_close(evaluate(expr, z), value, rtol=1e-12, **close)
    torch.testing.assert_close(evaluate(derivative(expr), z), slope, rtol=slope_rtol, **close)


def check_f32(function, expr, z):
    """Judged as everything is, by tests/support/numerics.py, where the value is finite."""
    z = z[function(z.double()).isfinite()]
    theirs, true = (with_slope(function, z.to(t)) for t in (torch.float32, torch.float64))
    assert_close((evaluate(expr, z), evaluate(derivative(expr), z)), theirs, true, torch.float32)


# ---------------------------------------------------------------- against autograd


@pytest.mark.parametrize("call", CALLS, ids=_id)
def test_value_and_slope_are_those_of_autograd(call):
    points = POINTS[~POINTS.isnan()]
    if name_of(call[0]) in ("hardswish", "pow"):
        # PyTorch has nan for hardswish(-inf), inf for (-inf)**1.5, -inf for the slope of (-0.0)**-0.5
        points = points[(points > -math.inf) & ~((points == 0) & points.signbit())]
    # PyTorch's slope of hardsigmoid is the f32 that is next to 1/6
    slope_rtol = 1e-7 if name_of(call[0]) == "hardsigmoid" else 1e-12
    check(lambda z: run(call, z), expression_of(call), points, slope_rtol)


@pytest.mark.parametrize("call", CALLS, ids=_id)
def test_nan_stays_nan(call):
    nan = torch.tensor([math.nan])
    torch.testing.assert_close(
        evaluate(expression_of(call), nan), run(call, nan), equal_nan=True, rtol=0, atol=0
    )


@pytest.mark.parametrize("call", CALLS, ids=_id)
def test_f32_is_as_good_as_eager(call):
    check_f32(lambda z: run(call, z), expression_of(call), torch.linspace(-12, 12, 1001))


@pytest.mark.parametrize("call", CALLS, ids=_id)
def test_text_is_read_back(call):
    expr = expression_of(call)
    for some in (expr, derivative(expr)):
        assert parse(text(some)) == some


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((torch.tanh, (Z,), {}), "tanh(z)"),
        (("sigmoid", (Z,), {}), "sigmoid(z)"),
        (("clamp", (Z, -5, 5.0), {}), "minimum(maximum(z,-5),5)"),
        ((operator.truediv, (3, Z), {}), "3*z**(-1)"),
        ((torch.sub, (1, Z), {}), "1-z"),
        ((torch.rsub, (Z, 1), {"alpha": 2}), "1-2*z"),
        ((operator.pow, (2, Z), {}), "exp2(z)"),
        ((operator.pow, (Z, 0.5), {}), "sqrt(z)"),
        ((torch.mul, (Z, Z), {}), "z**2"),
        ((F.logsigmoid, (Z,), {}), "-softplus(-z)"),
        ((F.relu, (Z,), {"inplace": False}), "where(z<=0,0,z)"),
        ((F.gelu, (Z,), {}), "0.5*(z*(erf(0.7071067811865476*z)+1))"),
        ((F.leaky_relu, (Z, 0.2), {}), "where(z>0,z,0.2*z)"),
        ((F.softplus, (Z,), {}), "where(z>20,z,softplus(z))"),
        ((torch.tanh, (Z,), {"out": None}), "tanh(z)"),
        ((torch.div, (Z, 4), {"rounding_mode": None}), "0.25*z"),
    ],
    ids=lambda value: _id(value) if isinstance(value, tuple) else "",
)
def test_text(call, expected):
    assert text(expression_of(call)) == expected


# ---------------------------------------------------------------- chains

CHAINS = {
    "soft-cap": [(operator.truediv, (Z, 30), {}), ("tanh", (Z,), {}), (operator.mul, (30, Z), {})],
    "temperature": [(torch.div, (Z, 0.7), {}), (operator.sub, (2, Z), {})],
    "clamp after scale": [("mul", (Z, 0.125), {}), (torch.clamp, (Z, -1, 1), {})],
    "scale after clamp": [("clamp", (Z, -8, 8), {}), ("div", (Z, 3), {}), ("exp", (Z,), {})],
    "log of sigmoid": [("sigmoid", (Z,), {}), ("add", (Z, 1e-6), {}), ("log", (Z,), {})],
    "log of bounded sigmoid": [
        (torch.special.expit, (Z,), {}),
        ("clamp", (Z,), {"min": 1e-3}),
        ("log", (Z,), {}),
    ],
    "scaled log-sigmoid": [(F.logsigmoid, (Z,), {}), (operator.mul, (Z, 2.5), {})],
    "square of a relu": [("sub", (Z, 1), {"alpha": 2}), (F.relu, (Z,), {}), ("square", (Z,), {})],
    "log of a relu": [(F.relu, (Z,), {}), (torch.log1p, (Z,), {}), (operator.neg, (Z,), {})],
    "root of a softplus": [(F.softplus, (Z, 2.0), {}), (torch.sqrt, (Z,), {})],
    "arsinh as a logarithm": [("div", (Z, 2), {}), ("asinh", (Z,), {}), ("div", (Z, 2.3), {})],
    "bounded activation": [
        (F.silu, (Z,), {}),
        (F.elu, (Z, 0.5), {}),
        (F.hardtanh, (Z, -0.2, 4), {}),
        (F.gelu, (Z,), {"approximate": "tanh"}),
    ],
    "power of two tanh": [("tanh", (Z,), {}), (operator.pow, (2, Z), {}), ("rsqrt", (Z,), {})],
}


def chain_of(calls):
    """The chain as a function of tensors and as an expression."""

    def function(z):
        for call in calls:
            z = run(call, z)
        return z

    expr = Z
    for call in calls:
        expr = expression_of(call, expr)
    return function, expr


@pytest.mark.parametrize("name", CHAINS)
def test_chains(name):
    function, expr = chain_of(CHAINS[name])
    assert parse(text(expr)) == expr
    points = POINTS[POINTS.abs() <= 1e4]
    points = points[function(points).isfinite()]
    check(function, expr, points)
    check_f32(function, expr, torch.linspace(-12, 12, 1001))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ((torch.div, (Z, 2), {"rounding_mode": "floor"}), "rounding_mode='floor' is not fused"),
        (("div", (Z, 2), {"rounding_mode": "trunc"}), "rounding_mode='trunc' is not fused"),
        ((operator.truediv, (Z, 0), {}), "it divides by zero"),
        (("clamp", (Z, Z), {}), "min= is not a number"),
        ((torch.clamp, (Z,), {"max": Z + 1}), "max= is not a number"),
        ((torch.clamp, (Z, math.nan), {}), "finite constants, got nan"),
        ((torch.add, (Z, math.inf), {}), "finite constants, got inf"),
        ((torch.pow, (Z, Z), {}), "exponent= is not a number"),
        ((torch.pow, (Z, 65), {}), "exponents beyond 64 are not fused"),
        ((torch.pow, (0, Z), {}), "its base has to be positive, got 0"),
        ((operator.pow, (-2.5, Z), {}), "its base has to be positive, got -2.5"),
        ((torch.exp, (Z,), {"out": Z}), "it writes to out="),
        ((F.softplus, (Z, 0), {}), "beta=0 divides by zero"),
        ((F.celu, (Z, 0.0), {}), "alpha=0 divides by zero"),
        ((torch.log, (0,), {}), "finite constants, got -inf"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_is_no_logit_transform_says_why(call, reason):
    with pytest.raises(ValueError, match=reason):
        expression_of(call)


@pytest.mark.parametrize(
    "target",
    [
        *(torch.softmax, torch.log_softmax, torch.cumsum, torch.sum, torch.maximum, torch.where),
        *(torch.round, torch.floor, torch.nan_to_num, torch.float_power, torch.logit, torch.lerp),
        *(F.dropout, F.rrelu, F.softmin, F.normalize, F.prelu, F.glu, torch.special.log_softmax),
        *(operator.floordiv, operator.mod, operator.matmul, operator.getitem, operator.iadd),
        *("softmax", "sum", "masked_fill", "where", "copy_", "add_", "tanh_", "fill_", "maximum"),
        *(torch.ops.aten.softmax.int, torch.ops.aten.where.self, torch.ops.prims.tanh.default),
    ],
    ids=lambda target: str(getattr(target, "__name__", target)),
)
def test_what_is_not_in_the_table(target):
    assert name_of(target) not in POINTWISE


def test_a_function_of_the_user_with_a_name_of_torch():
    def tanh(z):
        return z

    assert name_of(tanh) == ""


# ---------------------------------------------------------------- in place


def _out_of_place(target):
    """The first call of the same function that an in-place spelling takes, or None."""
    for functional, operands, kwargs in CALLS:
        same = name_of(functional) == name_of(target).removesuffix("_")
        if same and functional not in REFLECTED and _takes(target, operands[1:], kwargs):
            return functional, operands, kwargs
    return None


# Some overloads take tensors only.
IN_PLACE = [(t, c) for t in spellings(POINTWISE, in_place=True) if (c := _out_of_place(t))]


@pytest.mark.parametrize(
    ("target", "call"),
    IN_PLACE,
    ids=lambda value: "" if isinstance(value, tuple) else spelled(value),
)
def test_in_place_spellings_compute_their_row(target, call):
    _, operands, kwargs = call
    z = torch.tensor([0.25, 0.5, 2.0])
    changed = z.clone()
    run((target, operands, kwargs), changed)
    torch.testing.assert_close(changed, run(call, z), equal_nan=True)


def test_in_place_spellings_of_every_kind():
    assert len(IN_PLACE) > 100
    assert (
        name_of(operator.iadd) == name_of("add_") == name_of(torch.ops.aten.add_.Tensor) == "add_"
    )
    assert name_of(torch.clip_) == name_of("clamp_") == "clamp_"
    assert name_of(F.hardtanh_) == "hardtanh_"
