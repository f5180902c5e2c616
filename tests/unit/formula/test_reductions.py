"""The algebra of class reductions: texts, sums of blocks joined, values and slopes in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fxpass.formula import expression
from fxpass.formula.outputs import HIGHEST_POWER, INDICES, ROWS, TOTAL, Moment
from fxpass.formula.reductions import Reductions, normalised, raw_moments, shifted, slope_moments
from fxpass.formula.terms import Terms
from tests.support.specs import spec_of

POWERS = range(HIGHEST_POWER + 1)
MOMENTS = [Moment(a, b, w) for a in POWERS for b in POWERS for w in (None, 0)]
SOFTCAP = expression.parse("30*tanh(z/30)")
EVERY = ("x", "weight", "bias")
SPECS = [
    *(Reductions((name,)) for name in (*ROWS, *INDICES)),
    *(Reductions((moment,)) for moment in MOMENTS if moment != TOTAL),
    Reductions(("at", Moment(0, 0, 0), Moment(2, 2, 10))),
    Reductions(("pick", "lse"), SOFTCAP),
    Reductions(("pick", Moment(1, 1), "argmax"), SOFTCAP, EVERY),
    Reductions(("lse", Moment(1, 1), "pick"), gradients=EVERY, detached=(Moment(1, 1), "pick")),
    *(Reductions(("lse",), gradients=(name,)) for name in EVERY),
]


# ---------------------------------------------------------------- text


def test_one_computation_has_one_text():
    assert len({spec.text() for spec in SPECS}) == len(SPECS)
    assert all(spec_of(spec.text()) == spec for spec in SPECS)
    assert Reductions(("pick", "argmax"), SOFTCAP, ("x",), ("lse",), memory_mb=3).text() == (
        "outputs=pick;argmax transform=30*tanh(z/30) gradients=x total=lse memory_mb=3"
    )


@pytest.mark.parametrize(
    ("outputs", "gradients", "message"),
    [
        ((), (), "without outputs"),
        (("loss",), (), "'loss' is no reduction"),
        ((Moment(3, 0),), (), r"moment\(3,0\) has a power"),
        ((Moment(0, -1),), (), r"moment\(0,-1\) has a power"),
        ((Moment(1, 1, -1),), (), "negative position"),
        (("max", "max"), (), "named twice"),
        ((TOTAL,), (), r"moment\(1,0\) is 1"),
        (("lse",), ("weight", "x"), "in order"),
        (("lse",), ("x", "x"), "named once"),
        (("lse",), ("scale",), "'scale' has no gradient: only x, weight, bias"),
        (("lse", "max"), ("x",), "max has no gradient"),
    ],
)
def test_a_bad_value_is_named(outputs, gradients, message):
    with pytest.raises(ValueError, match=message):
        Reductions(outputs, gradients=gradients)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("outputs=lse;max detached=max", "where others have a gradient"),
        ("outputs=lse;max gradients=x detached=pick;max", "must be rows in their order"),
        ("outputs=lse;max gradients=x detached=max;lse", "must be rows in their order"),
        ("outputs=lse;argmax gradients=x detached=argmax", "must be rows in their order"),
        ("outputs=lse gradients=x total=pick detached=lse", "where others have a gradient"),
        ("gradients=x total=max", "max has no gradient"),
        ("gradients=x total=argmax", "argmax has no gradient"),
        ("outputs=lse total=pick", "a total without gradients"),
        ("gradients=x total=pick;pick", "named twice"),
    ],
)
def test_a_combination_that_is_none(words, message):
    with pytest.raises(ValueError, match=message):
        spec_of(words)


def test_outputs_by_their_kinds():
    spec = Reductions(("argmax", "pick", Moment(1, 2, 3)), gradients=("x",))
    assert spec.rows == ("pick", Moment(1, 2, 3))
    assert spec.saved == (Moment(1, 2, 3), Moment(1, 1, 3))
    assert Reductions(spec.outputs).saved == ()


# ---------------------------------------------------------------- values


def direct(moment: Moment, y: Tensor, w: Tensor) -> float:
    """The definition."""
    term = (moment.a * y).exp() * y**moment.b
    return float((term if moment.weight is None else w * term).sum())


def of_block(moments: tuple[Moment, ...], y: Tensor, w: Tensor) -> dict[Moment, float]:
    terms = {m: m.term(y) for m in moments}
    return {m: float((t if m.weight is None else w * t).sum()) for m, t in terms.items()}


def assert_equal(got: float, exact: float) -> None:
    assert abs(got - exact) <= 1e-12 * max(1.0, abs(exact)), (got, exact)


def test_raw_sums_are_closed_and_begin_with_the_total():
    assert raw_moments(["at"]) == ()
    assert raw_moments(["max"]) == raw_moments(["lse", "pick"]) == (TOTAL,)
    assert raw_moments([Moment(0, 2, 1)]) == (TOTAL, *(Moment(0, b, 1) for b in POWERS))
    assert raw_moments([TOTAL, Moment(1, 1)]) == (TOTAL, Moment(1, 1))
    assert set(raw_moments(MOMENTS)) == {*MOMENTS}


@pytest.mark.parametrize("size", [1, 10, 300])
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_normalised_moment_is_the_sum_over_the_log_softmax(moment, size):
    z, w = size * torch.randn(23, dtype=torch.float64), torch.randn(23, dtype=torch.float64)
    sums = of_block(raw_moments([moment]), z - z.max(), w)
    got = normalised(moment, sums, math.log(sums[TOTAL]), 1 / sums[TOTAL])
    assert_equal(got, direct(moment, z.log_softmax(0), w))


@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
@pytest.mark.parametrize("seed", range(5))
def test_blocks_are_joined_under_any_order_of_maxima(seed, order):
    torch.manual_seed(seed)
    z, w = 3 * torch.randn(40, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
    places = {"rising": z.argsort(), "falling": (-z).argsort(), "mixed": torch.arange(40)}
    cuts = [0, *sorted(torch.randperm(39)[:6].add(1).tolist()), 40]
    moments, highest, sums = raw_moments(MOMENTS), -1e3, dict.fromkeys(MOMENTS, 0.0)
    for start, stop in itertools.pairwise(cuts):
        part = places[order][start:stop]
        new = max(highest, float(z[part].max()))
        more = of_block(moments, z[part] - new, w[part])
        shift = highest - new
        sums = {m: shifted(m, sums, shift, math.exp(shift)) + more[m] for m in moments}
        highest = new
    for moment in moments:
        assert_equal(sums[moment], direct(moment, z - z.max(), w))


def test_a_shift_takes_tensors_too():
    sums = {m: torch.rand(3, dtype=torch.float64) for m in MOMENTS}
    shift = -torch.rand(3, dtype=torch.float64)
    for moment in MOMENTS:
        got = shifted(moment, sums, shift, shift.exp())
        each = [{m: float(s[i]) for m, s in sums.items()} for i in range(3)]
        for i, one in enumerate(each):
            by = float(shift[i])
            assert_equal(float(got[i]), shifted(moment, one, by, math.exp(by)))


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_class_without_probability_counts_nothing(moment):
    y = torch.tensor([0.0, -math.inf, -1e30], dtype=torch.float64)
    term = moment.term(y)
    if moment.a:
        assert term[1] == term[2] == 0
    assert moment.term(torch.tensor([math.nan])).isnan().item() == bool(moment.a or moment.b)


# ---------------------------------------------------------------- slopes


@pytest.mark.parametrize("size", [1, 10])
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_the_gradient_of_the_logits_is_autograds(moment, size):
    """dz_j = psi_j - p_j sigma, in terms of powers."""
    z = (size * torch.randn(31, dtype=torch.float64)).requires_grad_()
    w = torch.randn(31, dtype=torch.float64) if moment.weight is not None else torch.ones(31)
    log = z.log_softmax(0)
    (w.double() * (moment.a * log).exp() * log**moment.b).sum().backward()
    log = log.detach()
    terms = Terms()
    terms.add_output(moment, 1.0, {m: direct(m, log, w) for m in slope_moments([moment])})
    found = sum(
        (w if weight is not None else 1) * (a * log).exp() * factor * log**b
        for (a, weight), polynomial in terms.coefficients.items()
        for b, factor in polynomial.items()
    )
    assert z.grad is not None
    assert (found - z.grad).abs().max() < 1e-12 * max(1.0, float(z.grad.abs().max()))
