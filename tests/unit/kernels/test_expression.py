"""Logit transforms as Triton: each function, whole expressions with slopes, and machine code.

Runs on the GPU where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import math

import pytest
import torch

from fxpass.formula import functions
from fxpass.formula.expression import derivative, evaluate, parse, text
from fxpass.kernels import expression
from fxpass.kernels.chunked import jit_function
from fxpass.kernels.render import Kernel
from tests.support.compiled import Unit, resources
from tests.support.numerics import assert_close
from tests.unit.lower.test_pointwise import (
    CALLS,
    COMPOSITIONS,
    POINTS,
    called,
    composed,
    expression_of,
    with_slope,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter

HEAD = "import triton\nimport triton.language as tl"

APPLY = """\
@triton.jit
def apply(x, value, slope, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(x + i, mask=i < N, other=1.0)
    {results} = {call}
    {store}
"""


def module(expr, kernel):
    return "\n\n\n".join([HEAD, expression.LIBRARY, *expression.transform_functions(expr), kernel])


def applied(expr, call, results, z):
    """What the functions of an expression return for every element of ``z``, as f32."""
    names = ["value", "slope"][:results]
    store = "\n    ".join(f"tl.store({n} + i, {n}_of_z, mask=i < N)" for n in names)
    apply = APPLY.format(results=", ".join(f"{n}_of_z" for n in names), call=call, store=store)
    kernel = jit_function(Kernel("apply", module(expr, apply)))
    value, slope = torch.empty_like(z), torch.empty_like(z)
    block = 1 << 12
    # as where kernels compare logits of two passes: both compute the same, to the last bit
    kernel[(-(-len(z) // block),)](z, value, slope, len(z), BLOCK=block, enable_fp_fusion=False)
    return (value, slope)[:results]


def value_and_slope(expr, z):
    factor, unit = expression.unit_slope(expr)
    if unit.is_number:
        (value,) = applied(expr, "transform(z)", 1, z)
        return value, torch.full_like(z, float(factor * unit))
    value, slope = applied(expr, "transform_and_slope(z)", 2, z)
    assert torch.equal(
        *(torch.nan_to_num(v) for v in (value, *applied(expr, "transform(z)", 1, z)))
    )
    return value, slope * float(factor)


# ---------------------------------------------------------------- each function

# units in the last place by which each may be off
ULPS = {
    **dict.fromkeys(("tanh", "abs", "sign", "sqrt"), 2),
    **dict.fromkeys(("exp", "log", "sigmoid"), 3),
}
OF_EXPONENTIALS = ("exp", "sigmoid")
UNARY = [name for name, function in functions.FUNCTIONS.items() if function.arity == 1]
SMALLEST = 2.0**-126  # GPUs may flush what is smaller to zero


def every_magnitude(device):
    sizes = torch.cat([torch.logspace(-37, 38, 4000), torch.linspace(0, 100, 4001)[1:]])
    return torch.cat([sizes, -sizes, torch.linspace(-3, 3, 2001)]).to(device)


@pytest.mark.parametrize("name", UNARY)
def test_function_is_within_its_units_in_the_last_place(device, name):
    z = every_magnitude(device)
    (got,) = applied(parse(f"{name}(z)"), "transform(z)", 1, z)
    want = functions.FUNCTIONS[name].tensor(z.double())
    overflows = want.abs() > torch.finfo(torch.float32).max
    assert (got.isinf() | got.isnan())[overflows | want.isinf()].all()
    assert torch.equal(got.isnan(), want.isnan())
    sane = want.isfinite() & ~overflows
    got, want = got[sane].double(), want[sane]
    ulp = 2.0 ** (torch.frexp(want.abs().clamp(min=SMALLEST)).exponent.double() - 24)
    fast_exp = device.type == "cuda" and name in OF_EXPONENTIALS
    bound = ULPS[name] + (3 + z[sane].abs() if fast_exp else 0.0)
    flushed = (want.abs() < SMALLEST) & (got.abs() < SMALLEST)
    assert ((got - want).abs() / ulp - bound)[~flushed].max() <= 0


SPECIAL = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0])


@pytest.mark.parametrize("name", UNARY)
def test_function_of_zeros_infinities_and_nan(device, name):
    z = SPECIAL.to(device)
    (got,) = applied(parse(f"{name}(z)"), "transform(z)", 1, z)
    want = functions.FUNCTIONS[name].tensor(z)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0, equal_nan=True)


# ---------------------------------------------------------------- whole expressions

# One call for each expression: the spellings of one function are the same expression.
EXPRESSIONS = {text(expression_of(call)): call for call in CALLS}


@pytest.mark.parametrize("source", EXPRESSIONS)
def test_value_and_slope_are_as_good_as_eager(device, source):
    """Judged as everything is, by tests/support/numerics.py, where the function is finite."""
    call = EXPRESSIONS[source]
    z = torch.linspace(-12, 12, 1001)
    z = z[called(call, z.double()).isfinite()].to(device)
    theirs, true = (
        with_slope(lambda z: called(call, z), z.to(t)) for t in (z.dtype, torch.float64)
    )
    assert_close(value_and_slope(parse(source), z), theirs, true, torch.float32)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions_are_as_good_as_eager(device, name):
    function, expr = composed(COMPOSITIONS[name])
    z = torch.linspace(-12, 12, 1001, device=device)
    z = z[function(z.double()).isfinite()]
    theirs, true = (with_slope(function, z.to(t)) for t in (z.dtype, torch.float64))
    assert_close(value_and_slope(expr, z), theirs, true, torch.float32)


@pytest.mark.parametrize("source", EXPRESSIONS)
def test_corners_and_infinities_as_in_aten(device, source):
    expr = parse(source)
    z = POINTS.float().to(device)
    z = z[(z == 0) | (z.abs() > 1e-20) | z.isnan()]
    if source == "z**0.3":
        z = z[z != -math.inf]  # PyTorch has inf for (-inf)**0.3, and nan for other negative ones
    value, slope = value_and_slope(expr, z)
    close = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(value, evaluate(expr, z), **close)
    torch.testing.assert_close(slope, evaluate(derivative(expr), z), **close)


# ---------------------------------------------------------------- constants of slopes


@pytest.mark.parametrize(
    ("source", "factor", "unit"),
    [
        ("where(z>0,8*z,2*z)", "8", "where(z>0,1,0.25)"),
        ("where(z<=0,0,4*z)", "4", "where(z<=0,0,1)"),
        ("3*where(z<=0,-16*exp(z),z)", "48", "where(z<=0,-exp(z),0.0625)"),
        ("where(z<=0,0,8*z)+4*z", "8", "where(z<=0,0,1)+0.5"),
        ("exp(2*where(z<0,4*z,0))", "8", "where(z<0,exp(2*where(z<0,4*z,0)),0)"),
        ("tanh(2*where(z>0,4*z,z))", "8", None),
        ("where(z<0,3,5)+z", "1", "1"),
    ],
)
def test_no_branch_of_a_unit_slope_has_a_large_constant(source, factor, unit):
    expr = parse(source)
    got, rest = expression.unit_slope(expr)
    assert got == parse(factor)
    assert unit is None or rest == parse(unit)
    z = torch.tensor([-1.5, -0.1, 0.0, 0.3, 0.7], dtype=torch.float64)
    torch.testing.assert_close(
        float(got) * evaluate(rest, z).clone(), evaluate(derivative(expr), z), rtol=1e-12, atol=0
    )


# ---------------------------------------------------------------- machine code

# every function once, and branches, in one kernel
EVERYTHING = "+".join(
    [
        *(f"{name}(z)" for name in UNARY),
        "where(maximum(z,1)<=minimum(z,2),z**3/(z+1)**2,z**0.3)",
        "where(z>=0,0,1)",
    ]
)


@pytest.mark.parametrize("gpu", ["sm_75", "gfx942"])
def test_every_function_compiles(gpu):
    apply = APPLY.format(
        results="value_of_z, slope_of_z",
        call="transform_and_slope(z)",
        store="tl.store(value + i, value_of_z + slope_of_z, mask=i < N)",
    )
    types = {**dict.fromkeys(("x", "value", "slope"), "*fp32"), "N": "i32"}
    unit = Unit(module(parse(EVERYTHING), apply), "apply", types, {"BLOCK": 128})
    assert resources({"everything": unit}, gpu)
