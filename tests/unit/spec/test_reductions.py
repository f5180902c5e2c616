"""The algebra of class reductions: texts, sums of blocks joined, values and slopes in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fxpass.spec import expression
from fxpass.spec.outputs import HIGHEST_POWER, INDICES, ROWS, TOTAL, Moment
from fxpass.spec.reductions import REVISION, Reductions, for_slopes, normalised, raw, shifted
from fxpass.spec.terms import Terms

POWERS = range(HIGHEST_POWER + 1)
MOMENTS = [Moment(a, b, w) for a in POWERS for b in POWERS for w in (None, 0)]
SOFTCAP = expression.parse("30*tanh(z/30)")
EVERY = ("x", "weight", "bias", "scale", "given0", "given2", "given10")
SPECS = [
    *(Reductions((name,)) for name in (*ROWS, *INDICES)),
    *(Reductions((moment,)) for moment in MOMENTS),
    Reductions(("at", Moment(0, 0, 0), Moment(2, 2, 10))),
    Reductions(("pick", "lse"), SOFTCAP),
    Reductions(("pick", Moment(1, 1), "argmax"), SOFTCAP, EVERY),
    Reductions(("lse", Moment(1, 1), "pick"), gradients=EVERY, detached=(Moment(1, 1), "pick")),
    *(Reductions(("lse",), gradients=(name,)) for name in EVERY),
]


# ---------------------------------------------------------------- text


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text())
def test_round_trip(spec):
    assert Reductions.parse(spec.text()) == spec


def test_one_computation_has_one_text():
    assert len({spec.text() for spec in SPECS}) == len(SPECS)
    assert SPECS[-len(EVERY) - 2].text() == (
        "r6 outputs=pick;moment(1,1);argmax transform=30*tanh(z/30) "
        "gradients=x,weight,bias,scale,given0,given2,given10"
    )


@pytest.mark.parametrize(
    "words",
    [
        *("", "outputs=", "gradients=x", "outputs=lse;", "outputs=lse;lse", "outputs=loss"),
        *("outputs=lse,pick", "outputs=logits", "outputs=sum(z)", "outputs=top(2)", "outputs=peak"),
        *(f"outputs=moment({some})" for some in ("1", "3,0", "0,3", "-1,0", "1,1,", "1,1,-1")),
        *(f"outputs=moment({some})" for some in ("1,1,00", "1,1,x", "\uff11,1")),
        *("outputs=lse  gradients=x", "outputs=lse ", "gradients=x outputs=lse"),
        *(f"outputs=lse gradients={some}" for some in ("", "y", "x,x", "weight,x", "given")),
        *(f"outputs=lse gradients=given{some}" for some in ("00", "-1", "1,given0", "\u0663")),
        "outputs=lse gradients=given0,x",
        *(f"outputs=lse transform={some}" for some in ("z", "y", "hit0", "l", "import(z)", "1/0")),
        *("outputs=lse outputs=lse", "outputs=lse rows=1", "outputs=lse lse"),
        *("outputs=lse;max detached=max", "outputs=lse;max gradients=x detached=pick"),
        *(
            "outputs=lse;max gradients=x detached=max;lse",
            "outputs=lse;argmax gradients=x detached=argmax",
        ),
        "outputs=lse gradients=x total=pick detached=lse",
    ],
)
def test_other_texts_are_refused(words):
    with pytest.raises(ValueError, match="not reductions"):
        Reductions.parse(f"{REVISION} {words}")


@pytest.mark.parametrize("revision", ["r0", "r", "", "v6", "R1"])
def test_another_revision_is_refused(revision):
    with pytest.raises(ValueError, match=r"another version of fxpass .*clear the compile cache"):
        Reductions.parse(f"{revision} outputs=lse")


@pytest.mark.parametrize(
    ("outputs", "gradients", "message"),
    [
        ((), (), "without outputs"),
        (("loss",), (), "'loss' is no reduction"),
        ((Moment(3, 0),), (), r"moment\(3,0\) has a power"),
        ((Moment(0, -1),), (), r"moment\(0,-1\) has a power"),
        ((Moment(1, 1, -1),), (), "negative position"),
        (("max", "max"), (), "named twice"),
        (("max",), ("weight", "x"), "in order"),
        (("max",), ("logits",), "'logits' is no operand"),
    ],
)
def test_a_bad_value_is_named(outputs, gradients, message):
    with pytest.raises(ValueError, match=message):
        Reductions(outputs, gradients=gradients)


def test_outputs_by_their_kinds():
    spec = Reductions(("argmax", "pick", Moment(1, 2, 3), TOTAL), gradients=("x",))
    assert spec.rows == ("pick", Moment(1, 2, 3), TOTAL)
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
    assert raw(["at"]) == ()
    assert raw(["max"]) == raw(["lse", "pick"]) == (TOTAL,)
    assert raw([Moment(0, 2, 1)]) == (TOTAL, *(Moment(0, b, 1) for b in POWERS))
    assert raw([TOTAL, Moment(1, 1)]) == (TOTAL, Moment(1, 1))
    assert set(raw(MOMENTS)) == {*MOMENTS}


@pytest.mark.parametrize("size", [1, 10, 300])
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_normalised_moment_is_the_sum_over_the_log_softmax(moment, size):
    z, w = size * torch.randn(23, dtype=torch.float64), torch.randn(23, dtype=torch.float64)
    sums = of_block(raw([moment]), z - z.max(), w)
    got = normalised(moment, sums, math.log(sums[TOTAL]), 1 / sums[TOTAL])
    assert_equal(got, direct(moment, z.log_softmax(0), w))


@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
@pytest.mark.parametrize("seed", range(5))
def test_blocks_are_joined_under_any_order_of_maxima(seed, order):
    torch.manual_seed(seed)
    z, w = 3 * torch.randn(40, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
    places = {"rising": z.argsort(), "falling": (-z).argsort(), "mixed": torch.arange(40)}
    cuts = [0, *sorted(torch.randperm(39)[:6].add(1).tolist()), 40]
    moments, highest, sums = raw(MOMENTS), -1e3, dict.fromkeys(MOMENTS, 0.0)
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
    terms.add_output(moment, 1.0, {m: direct(m, log, w) for m in for_slopes([moment])})
    found = sum(
        (w if weight is not None else 1) * (a * log).exp() * factor * log**b
        for (a, weight), polynomial in terms.coefficients.items()
        for b, factor in polynomial.items()
    )
    assert z.grad is not None
    assert (found - z.grad).abs().max() < 1e-12 * max(1.0, float(z.grad.abs().max()))
