"""Expressions: the text form both ways, what it refuses, exact numbers, slopes and values."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import sympy
import torch

from fxpass.formula.expression import FUNCTIONS, Z, derivative, evaluate, exact, parse, text
from fxpass.releases.torch_2_13 import ABOVE, BELOW

Z_VALUES = torch.tensor([-40.0, -2.5, -1e-3, 0.0, 1e-7, 0.3, 1.0, 29.0], dtype=torch.float64)

# the text of an expression → the same function in torch
PROGRAMS = {
    "z": lambda z: z,
    "-z": lambda z: -z,
    "z/3": lambda z: z / 3,
    "-2*z/3": lambda z: -2 * z / 3,
    "0.1*z": lambda z: 0.1 * z,
    "z-2.5": lambda z: z - 2.5,
    "1e-05*z+1e+20": lambda z: 1e-5 * z + 1e20,
    "30*tanh(z/30)": lambda z: 30 * torch.tanh(z / 30),
    "tanh(z)/2+0.5": lambda z: torch.sigmoid(2 * z),
    "0.5*tanh(0.5*z)+0.5": lambda z: torch.tanh(z / 2) / 2 + 0.5,
    "z**2+z": lambda z: z * z + z,
    "z*tanh(z)": lambda z: z * torch.tanh(z),
    "tanh(tanh(z)+1)": lambda z: torch.tanh(torch.tanh(z) + 1),
    "(z**2+1)**(-2)": lambda z: 1 / (z * z + 1) ** 2,
    "(z**2+1)**0.5": lambda z: (z * z + 1).sqrt(),
    "2*(z+1)*tanh(z)": lambda z: 2 * (z + 1) * torch.tanh(z),
    "-(z+1)*tanh(z)": lambda z: -(z + 1) * torch.tanh(z),
    "z*2**0.5": lambda z: z * math.sqrt(2),
    "z-z+3": lambda z: torch.full_like(z, 3),
    "2*exp(z/9)": lambda z: 2 * torch.exp(z / 9),
    "log(exp(z)+1)": lambda z: torch.log(torch.exp(z) + 1),
    "z*sigmoid(1.7*z)": lambda z: z * torch.sigmoid(1.7 * z),
    "sign(z)*log(1+abs(z))": lambda z: z.sign() * torch.log(1 + z.abs()),
    "1/sqrt(z**2+1)": lambda z: (z * z + 1).rsqrt(),
    "minimum(maximum(z/2,-5),5)": lambda z: torch.clamp(z / 2, -5, 5),
    "tanh(maximum(z,0.3)-z)": lambda z: torch.tanh(torch.clamp(z, min=0.3) - z),
    "where(z<=0,0.01*z,z)": lambda z: torch.where(z <= 0, 0.01 * z, z),
    "where(z>1,-1,where(z<-2,tanh(z),2))": lambda z: torch.where(
        z > 1, -1.0, torch.where(z < -2, torch.tanh(z), 2.0)
    ),
    "where(z**2>=z,exp(z),1)*z": lambda z: torch.where(z**2 >= z, z.exp(), 1.0) * z,
}


def grown(rng: random.Random, depth: int) -> str:
    """A random sentence of the grammar without infinite values: no divisor is ever zero."""
    if depth == 0:
        number = rng.choice([0.1, 1e-5, 2.5, 30.0, 1e20, rng.uniform(-9, 9), rng.randint(1, 50)])
        return rng.choice(["z", "z", repr(number)])
    a, b = (grown(rng, rng.randrange(depth)) for _ in range(2))
    unary = [name for name, function in FUNCTIONS.items() if function.arity == 1]
    return rng.choice(
        [
            f"({a})+({b})",
            f"({a})-({b})",
            f"({a})*({b})",
            f"({a})/(({b})**2+1)",
            f"(({a})**2+1)**-{rng.randint(1, 3)}",
            f"({a})**{rng.randint(2, 4)}",
            f"-({a})",
            f"tanh({a})",
            # of a number in [1, 2], where every function is finite
            f"{rng.choice(unary)}(tanh({a})**2+1)",
            f"{rng.choice(['maximum', 'minimum'])}({a},{b})",
            f"where({a}{rng.choice(['<', '<=', '>', '>='])}{b},{b},({a})**2)",
        ]
    )


# ---------------------------------------------------------------- text form


@pytest.mark.parametrize(
    "source", [*PROGRAMS, "((z+1)**3)**0.5", "((z-1)**0.5)**3", "(1/3)**0.5*z", "z**(1/3)"]
)
def test_text_is_read_back_as_the_same_expression(source):
    expr = parse(source)
    assert parse(text(expr)) == expr
    assert text(parse(text(expr))) == text(expr)
    assert " " not in text(expr)


@pytest.mark.parametrize("seed", range(8))
def test_text_of_a_random_expression_is_read_back(seed):
    rng = random.Random(seed)
    for _ in range(30):
        source = grown(rng, rng.randint(1, 4))
        expr = parse(source)
        assert parse(text(expr)) == expr, source
        slope = derivative(expr)
        assert parse(text(slope)) == slope, source


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("30 * tanh(z / 30.0)", "30*tanh(z/30)"),
        ("z * 0.1", "0.1*z"),
        ("z / 10", "z/10"),  # a tenth is no double; 0.1 is another number
        ("2*z/3 - 1/3", "2*z/3-1/3"),
        ("-z - 1", "-z-1"),
        ("1e20*z", "100000000000000000000*z"),
        ("-(0.5)*z", "-0.5*z"),
        ("1/(z+1)**2", "(z+1)**(-2)"),
        ("(-0.25)**2*z", "0.0625*z"),
        ("where(2 > z, z, 1)", "where(z<2,z,1)"),
        ("where(2<=z, z, 1)", "where(z>=2,z,1)"),
        ("where(z<2, exp(z), exp(z))", "exp(z)"),
        ("where(2>1, z, 1)", "z"),
        ("exp(0)*z", "z"),
        ("maximum(3, 1)*z", "3*z"),
        # as mathematics says they are z and 1, but what overflows has to overflow
        ("log(exp(z))", "log(exp(z))"),
        ("exp(z)*exp(-z)", "exp(z)*exp(-z)"),
        ("(z**2)**0.5", "(z**2)**0.5"),
        ("sqrt(z)**2", "sqrt(z)**2"),
    ],
)
def test_text_is_short_and_canonical(source, expected):
    assert text(parse(source)) == expected


@pytest.mark.parametrize(
    "source",
    [
        *("", " ", "z z", "z +", "(z", "z\0", "1..2", "z; z", "x = z", "import os"),  # no grammar
        *("x", "Z", "tanh", "tanh(tanh)", "gamma(z)", "sympy", "__builtins__"),  # names
        *("z.real", "tanh.__class__", "().__class__", "z.tanh()"),  # attributes
        *("__import__('os').getpid()", "eval('z')", "open('x')", "z(1)", "tanh(z)(z)"),  # calls
        *("tanh()", "tanh(z, z)", "tanh(x=z)", "tanh(*z)", "tanh(z, **z)"),
        *("'z'", "b'z'", "f'{z}'", "1j*z", "True", "None", "..."),  # constants
        *("lambda: z", "(lambda z: z)(1)", "[z]", "(z,)", "{z}", "{}", "z[0]", "[z for z in z]"),
        *("z if z else 1", "z < 1", "z and z", "not z", "(y := z)", "await z", "yield z"),
        *("exp(z, 1)", "maximum(z)", "maximum(z, 1, 2)", "maximum(z, y=1)"),
        *("where(z, 1, 2)", "where(z<1, z)", "where(0<z<1, z, 1)", "where(z==1, z, 1)"),
        *("where(z<1, z, 1, 2)", "where(z<1, x, 1)", "where(*z)", "where", "where(z<1, z, b=1)"),
        *("+z", "~z", "z//2", "z%2", "z@z", "z<<1", "z|1", "z^2"),  # operators
    ],
)
def test_what_is_not_in_the_grammar_is_refused(source):
    with pytest.raises(ValueError, match="not a logit transform"):
        parse(source)


def test_nothing_that_is_refused_is_evaluated(tmp_path):
    file = tmp_path / "evaluated"
    for source in (f"open({str(file)!r}, 'w')", f"z + open({str(file)!r}, 'w').write(z)"):
        with pytest.raises(ValueError, match="not a logit transform"):
            parse(source)
    assert not file.exists()


@pytest.mark.parametrize(
    "source",
    [
        *("1e999", "z*1e999", "-1e999*z", "tanh(z/1e999)"),  # an infinite literal
        *("1e200*1e200*z", "z+1e200*1e200", "10**400*z", "10**400+z", "10**400"),  # none a double
        *("1/0", "z/0", "0/0", "0*z/0", "0**-1", "(-1)**0.5", "(-1)**0.5*z", "tanh((-1)**0.5)"),
        *("9**9**9", "10**99999", "9" * 5000),
        *("log(0)*z", "log(-1)", "sqrt(-2)+z", "exp(1e5)", "exp(z/0)", "where(z<1e999,z,1)"),
        *("-inf", "z-inf", "maximum(z,-inf)"),  # it is a branch, or what a logit compares with
        *("2**z", "z**z", "z**tanh(z)"),  # neither torch nor Triton code is generated for these
    ],
    ids=lambda source: source[:20],
)
def test_what_no_finite_double_can_hold_is_refused(source):
    with pytest.raises(ValueError):  # noqa: PT011 -- the message depends on where it shows
        parse(source)


@pytest.mark.parametrize("source", ["-" * 20000 + "z", "+".join(["z"] * 20000), "(" * 500 + "z"])
def test_text_that_is_too_deep_to_read_is_refused(source):
    with pytest.raises(ValueError, match="not a logit transform"):
        parse(source)


@pytest.mark.parametrize(
    "expr",
    [
        sympy.exp(Z),  # sympy's own, not the one of fxpass.formula.functions
        sympy.log(Z),
        sympy.Abs(Z),
        sympy.I * Z,
        sympy.pi * Z,
        sympy.zoo,
        sympy.nan,
        sympy.Integer(10) ** 400 * Z,  # what the matcher meets in z * 1e200 * 1e200
        sympy.Integer(10) ** 400 + Z,
    ],
    ids=lambda expr: str(expr)[:20],
)
def test_an_expression_without_a_text_form_is_a_value_error(expr):
    with pytest.raises(ValueError):  # noqa: PT011 -- the message depends on the expression
        text(expr)


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 0.1, 1 / 3, 30.0, -2.5, 5e-324, 1.7976931348623157e308, 3, 2**70]
)
def test_exact_is_the_double_itself(value):
    number = exact(value)
    assert Fraction(number.p, number.q) == Fraction(value)
    assert parse(text(number)) == number


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_exact_refuses_what_is_not_finite(value):
    with pytest.raises(ValueError, match=f"finite constants, got {value}"):
        exact(value)


def test_products_of_doubles_lose_nothing():
    product = exact(0.1) * exact(0.2) * exact(0.3) * Z
    coefficient = parse(text(product)).as_coeff_Mul()[0]
    assert Fraction(int(coefficient.p), int(coefficient.q)) == (
        Fraction(0.1) * Fraction(0.2) * Fraction(0.3)
    )


# ---------------------------------------------------------------- value and derivative


@pytest.mark.parametrize("source", PROGRAMS)
def test_value_is_that_of_torch_and_of_sympy(source):
    expr = parse(source)
    got = evaluate(expr, Z_VALUES)
    torch.testing.assert_close(got, PROGRAMS[source](Z_VALUES), rtol=1e-13, atol=1e-15)
    points = [sympy.Rational(Fraction(z)) for z in Z_VALUES.tolist()]
    precise = [float(expr.subs(Z, z).evalf(40)) for z in points]
    precise = torch.tensor(precise, dtype=torch.float64)
    torch.testing.assert_close(got, precise, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("source", PROGRAMS)
def test_derivative_is_that_of_autograd(source):
    z = Z_VALUES.clone().requires_grad_()
    # 0 * z ties a constant to z; every program is finite at these points
    (expected,) = torch.autograd.grad((PROGRAMS[source](z) + 0 * z).sum(), z)
    got = evaluate(derivative(parse(source)), Z_VALUES)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("source", PROGRAMS)
def test_evaluate_reads_only(source, dtype):
    storage = torch.linspace(-2, 2, 12, dtype=dtype).view(3, 4)
    z, before = storage.t(), storage.clone()
    for expr in (parse(source), derivative(parse(source))):
        out = evaluate(expr, z)
        assert (out.shape, out.dtype) == (z.shape, z.dtype)
        assert (out is z) == (expr == Z)
        if out is not z:
            out.fill_(7)  # the caller owns it: it may not share memory with z
        assert torch.equal(storage, before)


def test_derivatives_that_the_kernels_use():
    assert derivative(Z) == 1
    assert text(derivative(parse("30*tanh(z/30)"))) == "1-tanh(z/30)**2"
    assert text(derivative(parse("z/4-1"))) == "0.25"


@pytest.mark.parametrize(
    ("source", "slope"),
    [
        ("maximum(z,2)", f"where(z{ABOVE}2,1,0)"),
        ("minimum(z,2)", f"where(z{BELOW}2,1,0)"),
        ("where(z>0,3*z,0)", "where(z>0,3,0)"),
        ("2*log(where(z<=0,0,z))", "2*where(z<=0,0,where(z<=0,0,z)**(-1))"),
        ("exp(maximum(minimum(z,9),-9))", None),
    ],
)
def test_slopes_of_branches(source, slope):
    got = derivative(parse(source))
    assert slope is None or text(got) == slope
    assert parse(text(got)) == got


@pytest.mark.parametrize(
    ("source", "program"),
    [
        ("log(where(z<=0,0,z))", lambda z: torch.log(torch.relu(z))),
        ("sqrt(where(z<=0,0,z))", lambda z: torch.sqrt(torch.relu(z))),
        ("z**3/maximum(z,0)", lambda z: z**3 / torch.clamp(z, min=0)),
        # autograd multiplies the other way round here, and gets nan at 800
        ("exp(minimum(exp(z),3))", lambda z: torch.where(z < 1, z, -torch.inf).exp().exp()),
    ],
)
def test_a_branch_that_is_flat_hides_an_infinite_slope(source, program):
    z = torch.tensor([-9.0, -0.0, 0.0, 1.5, 800.0], dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(program(z).sum(), z)
    got = evaluate(derivative(parse(source)), z.detach())
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=0, equal_nan=True)


@pytest.mark.parametrize("softcap", ["30*tanh(z/30)", "2*tanh(z)", "tanh(3*z)"])
def test_the_slope_of_a_saturated_tanh(softcap):
    """Its error is that of the tanh: the square of a number near 1 is not rounded."""
    slope, tanh = derivative(parse(softcap)), parse(softcap[softcap.index("tanh") :])
    z = torch.linspace(0, 8, 200) / float(tanh.args[0].coeff(Z))
    exact = float(slope.subs(Z, 0)) * (1 - evaluate(tanh, z).double().square())
    torch.testing.assert_close(evaluate(slope, z).double(), exact, rtol=2**-21, atol=0)


@pytest.mark.parametrize(
    ("source", "slope"),
    [
        ("sigmoid(z)", "sigmoid(z)*sigmoid(-z)"),
    ],
)
def test_the_slope_of_a_sigmoid(source, slope):
    """1 - sigmoid(x) would be 0 where a class is improbable, as most classes are."""
    assert text(derivative(parse(source))) == slope
    z = torch.tensor([-40.0, -30, 0, 3, 30, 40])
    values = {"given0": torch.tensor([0.0, 0, 1, 1, 0, 0])}
    got = evaluate(derivative(parse(source)), z, values)
    exact = {"given0": values["given0"].double()}
    want = evaluate(derivative(parse(source)), z.double(), exact)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(3, 5), (5,), (3, 1), ()])
@pytest.mark.parametrize(
    "source",
    [
        *("1-given0-given1", "2-3*given0*given1+z", "-given0/7-2*z", "given0+given1"),
        *("5*given0*sigmoid(z)*given1", "4-2*sigmoid(given0)-3*given1*z", "-sigmoid(given1)/3"),
    ],
)
def test_operands_of_any_shape_stay_as_they_are(source, shape):
    z, given = torch.randn(3, 5), torch.randn(shape)
    values = {"given0": given, "given1": torch.randn(3, 1)}
    before = {name: t.clone() for name, t in values.items()}
    got = evaluate(parse(source), z.clone(), values)
    doubles = {name: t.double() for name, t in values.items()}
    names = {"z": z.double(), **doubles, "sigmoid": torch.sigmoid}
    want = eval(source, {}, names) + torch.zeros(3, 5, dtype=torch.float64)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(values[name], t) for name, t in before.items())
