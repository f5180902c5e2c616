"""Equal, infinite, undefined and very large logits, and rows that add nothing, by each
implementation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from fxpass.formula.operands import Operands
from fxpass.formula.outputs import INDICES, PRODUCTS, Moment, Output
from tests.support.engine import reduced
from tests.support.pairs import in_pairs
from tests.support.reduction_cases import (
    BF16,
    F32,
    FEW,
    INF,
    NAN,
    PLANS,
    WEIGHTS,
    Case,
    D,
    V,
    assert_almost_certain,
    case,
    check,
    implement,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
WAYS = [("triton" if way == "triton" else "aten", way) for way in PLANS]
OF_ROWS = pytest.mark.parametrize(
    ("implementation", "way"), [one for one in WAYS if one[1] != "in place"]
)
OF_TOTALS = pytest.mark.parametrize(
    ("implementation", "way"), [one for one in WAYS if one[1] != "tiled"]
)


def reduce(x, weight, text: str, picks=None, given=(), coef=None):
    return reduced(Operands(x, weight, None, None, picks, tuple(given), coef), text)


def with_logits(outputs: Sequence[Output], row: Sequence[float], shape, **more) -> Case:
    """Every row has these logits, one of each for so many classes; hidden states are zero."""
    found = case(outputs, bias=F32, shape=shape, **more)
    times = -(-shape[2] // len(row))
    found.tensors["bias"] = torch.tensor(row).repeat_interleave(times)[: shape[2]].clone()
    found.tensors["x"].zero_()
    return found


def assert_as_eager(found: Case, gradients: bool = True) -> None:
    """To rounding, with nan and infinities at the same places."""
    answers = []
    for program in (found.fused, found.eager):
        leaves = [t.detach().requires_grad_() for t in found.all]
        rows = program(*leaves)
        if gradients:
            rows.backward(torch.ones_like(rows))
        answers.append([rows.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


LOGITS = {
    "equal maxima": [1.0, 4.0, 4.0, 2.0, 4.0, 0.0],
    "all -inf": [-INF] * 3,
    "a tile of -inf first": [-INF, -INF, 1.0, 2.0],
    "some -inf": [2.0, -INF, 1.0, -INF, 0.5],
    "inf": [1.0, INF, 2.0],
    "nan": [1.0, 5.0, NAN, 7.0],
    "nan before inf": [NAN, INF, 7.0],
    "the lowest number": [torch.finfo(F32).min] * 3,
    "-inf and the lowest number": [-INF, -INF, torch.finfo(F32).min],
}


@OF_ROWS
@pytest.mark.parametrize("name", LOGITS)
def test_the_largest_logit_is_torchs(implementation, way, name, sizes):
    """With the class of the first of equal ones, but a nan before them."""
    for shape in sizes:
        found = with_logits(["max", *INDICES], LOGITS[name], shape, frozen=PRODUCTS)
        results = found.run([t.detach() for t in found.all])
        bias = found.tensors["bias"]
        highest = bias.max()
        first = (bias.isnan() if highest.isnan() else bias == highest).nonzero()[0, 0]
        assert torch.equal(results["indices"], first.expand(1, shape[0]))
        torch.testing.assert_close(
            results["rows"], highest.expand(1, shape[0]), equal_nan=True, rtol=0, atol=0
        )


OF_SOFTMAX: list[Output] = ["lse", "pick", Moment(1, 0, 0), Moment(2, 0), Moment(2, 0, 1)]


@OF_ROWS
def test_some_infinite_logits(implementation, way, sizes):
    for shape in sizes:
        row = [-INF, -INF, 2.0, 1.0, -INF, 0.5]
        found = with_logits([*OF_SOFTMAX, "at"], row, shape)
        assert found.picks is not None
        found.picks.fill_(int(found.tensors["bias"].isfinite().nonzero()[0]))
        assert_as_eager(found)
    # infinite sums, and nan where the weight is 0
    outputs = [Moment(0, 1), Moment(0, 2), Moment(0, 1, 0), Moment(0, 1, 1), "at", "max"]
    found = with_logits(outputs, [-INF, 1.0, 2.0], sizes[-1], frozen=PRODUCTS)
    for of_infinite in (1.0, 0.0):
        found.tensors["given0"][found.tensors["bias"] == -INF] = of_infinite
        assert_as_eager(found, gradients=False)


@OF_ROWS
@pytest.mark.parametrize("bad", [-INF, INF, NAN])
def test_rows_without_a_distribution(implementation, way, bad, sizes):
    """Every logit is -inf, one is inf, or one is nan."""
    row = [bad] * 3 if bad == -INF else [0.0, bad, 1.0]
    outputs: list[Output] = ["pick", Moment(1, 1), Moment(2, 0), *(["lse"] if bad != INF else [])]
    for output in outputs:
        for shape in sizes:
            assert_as_eager(with_logits([output], row, shape))


@OF_ROWS
@in_pairs(
    row=([-INF, 1.0, 2.0, -INF, 0.0], [-INF, -INF, 1.0, 2.0, 1.0], [1.0, -INF, -INF, 2.0]),
    a=(1, 2),
    b=(1, 2),
)
def test_a_class_without_probability_counts_nothing(implementation, way, row, a, b, sizes):
    """An entropy, say: eager has nan. The answer is that without these classes."""
    weights = WEIGHTS if way != "triton" else (None, 0)
    for shape in sizes if a + b == 3 and row[1] == 1.0 else sizes[:1]:
        found = with_logits([Moment(a, b, w) for w in weights], row, shape)
        kept = found.tensors["bias"].isfinite()
        answers = []
        for some in (slice(None), kept):
            classes = {
                n: t[:, some] if n == "given1" else t if n == "x" else t[some]
                for n, t in found.tensors.items()
            }
            leaves = [t.detach().requires_grad_() for t in classes.values()]
            rows = found._replace(tensors=classes).fused(*leaves)
            rows.sum().backward()
            answers.append((rows, leaves[2].grad))
        (rows, bias), (rows_of_kept, bias_of_kept) = answers
        torch.testing.assert_close(rows, rows_of_kept, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(bias[kept], bias_of_kept, rtol=1e-5, atol=1e-6)
        assert not bias[~kept].any()


@OF_ROWS
def test_nan_stays_in_its_row(implementation, way, sizes):
    found = case(["pick", "lse", Moment(1, 1)])
    found.tensors["x"][2] = NAN
    rows = found.fused(*found.all)
    assert rows[:, 2].isnan().all()
    assert rows[:, [0, 1, 3, 4, 5, 6]].isfinite().all()


@OF_ROWS
@pytest.mark.parametrize("output", ["pick", "lse"])
def test_a_row_that_is_masked_wholly(implementation, way, output, sizes):
    """Its softmax is nan, and its logits have no gradient."""
    for n, d, v in sizes:
        x, weight = torch.randn(n, d), torch.randn(v, d)
        mask, picks = torch.rand(n, v) < 0.3, torch.zeros(n, dtype=torch.int64)
        mask[:, 0], mask[1] = False, True
        text = f"outputs={output} transform=where(given0>0,-inf,z) gradients=x,weight"
        got, want = ([t.clone().requires_grad_() for t in (x, weight)] for _ in range(2))
        of_picks = picks if output == "pick" else None
        rows = reduce(*got, text, of_picks, [mask])["rows"]
        z = F.linear(*want).masked_fill(mask, -INF)
        eager = z.log_softmax(1)[:, 0] if output == "pick" else z.logsumexp(1)
        torch.testing.assert_close(rows[0], eager, equal_nan=True)
        ours = torch.autograd.grad(rows.sum(), got)
        assert all(t.isfinite().all() for t in ours)
        torch.testing.assert_close(ours, torch.autograd.grad(eager.sum(), want))


@OF_ROWS
def test_the_gradient_of_an_entropy_of_almost_0(implementation, way, sizes):
    """A multiple of the softmax cancels before others are added to it."""
    for shape in sizes:
        assert_almost_certain(case([Moment(1, 1)], shape=shape, size=0.0, bias=F32))


@OF_ROWS
def test_huge_logits_that_differ_by_ones(implementation, way, sizes):
    """A softmax from an lse in f32 alone would be off by half of f32's spacing, 1e-3 here."""
    for shape in sizes:
        found = case(["pick", "lse", Moment(1, 1)], bias=F32, shape=shape)
        found.tensors["x"].mul_(2.0**-20)
        found.tensors["bias"].add_(3e4)
        check(found, F32, 4e-6 if way == "triton" else 0.0)


@OF_ROWS
def test_ranks_are_of_rounded_logits(implementation, way, sizes, monkeypatch):
    """Two logits that are equal in bf16, and not in f32: eager picks the first of them."""
    implement(way, monkeypatch, F32)
    x = torch.ones(2, 2, dtype=BF16)
    w = torch.tensor([[0.0, 0.0], [4.0, 0.0], [4.0, 2**-10]], dtype=BF16)
    out = reduce(x, w, "outputs=argmax;max")
    assert out["indices"].tolist() == [[1, 1]]
    assert out["rows"].tolist() == [[4.0, 4.0]]


# ---------------------------------------------------------------- totals


INFINITE = [(3e38, 0.0), (-3e38, 0.0), (3e38, 3e38)]


@pytest.mark.parametrize("total", [["pick"], ["pick", Moment(1, 1)], [Moment(0, 1, 1), "lse"]])
@pytest.mark.parametrize(
    ("implementation", "way", "bad", "outputs"),
    # kernels multiply these rows by 0, as eager does
    [
        ("aten", way, bad, outputs)
        for way in ("chunked", "in place")
        for bad in INFINITE
        for outputs in ([], ["lse"])
    ],
)
def test_a_row_without_a_coefficient_adds_nothing(implementation, way, bad, outputs, total, sizes):
    """Its logits are inf or -inf. (A loop leaves many such rows out, also those of nan.)"""
    found = case(outputs, total=total, shape=FEW)
    x, w = found.tensors["x"], found.tensors["weight"]
    x[:, :2], w[:, :2] = 0, torch.tensor([2.0, -2.0])
    without = found._replace(tensors={k: t.clone() for k, t in found.tensors.items()})
    x[1, :2] = torch.tensor(bad)
    answers = []
    for one in (found, without):
        leaves = [t.requires_grad_(k not in one.frozen) for k, t in one.tensors.items()]
        loss = one.fused(*leaves)
        loss.backward()
        answers.append([loss, *(t.grad for t in leaves if t.grad is not None)])
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not answers[0][1][1].any()


@OF_TOTALS
@pytest.mark.parametrize("classes", [[0, 5], [0, 1, 2, 3], [8, 9, 10]])
@pytest.mark.parametrize("bad", [-INF, INF, NAN])
def test_infinite_logits_of_a_total(implementation, way, bad, classes, sizes):
    """In the first tile, in a whole tile, in the last: with nan where eager has it."""
    found = case([], bias=F32, total=["pick", "lse"], shape=FEW)
    found = found._replace(picks=torch.tensor([4, 7, 6, 4]))
    found.tensors["bias"][classes] = bad
    found = found._replace(coef=torch.randn(2, FEW[0]))
    if bad != INF:
        assert_as_eager(found)
    total = found.fused(*found.all)
    assert total.isnan() == (bad != -INF)


@OF_TOTALS
def test_a_masked_function_without_a_slope(implementation, way, sizes):
    n, d, v = FEW
    leaves = [torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True)]
    text = "outputs=lse transform=where(given0>0,-inf,where(z>0,1,-1)) gradients=x,weight total=lse"
    mask = (torch.arange(v) % 3 == 1,)
    total = reduce(*leaves, text, given=mask, coef=torch.ones(1, n))["total"]
    assert not any(t.any() for t in torch.autograd.grad(total, leaves))


@OF_TOTALS
@pytest.mark.parametrize("exponent", [-60, -95, -104])
@pytest.mark.parametrize("v", [V, 1003])
def test_coefficients_that_are_nearly_zero(implementation, way, v, exponent, sizes):
    """Those of a discount, for example. Divided by the sum of exponentials, they would be 0."""
    x, w, picks = torch.randn(3, D), 0.1 * torch.randn(v, D), torch.tensor([1, 2, 3])
    coef = torch.tensor([[0.0, 0.0, exponent]]).exp()
    ours, theirs = ([t.clone().requires_grad_() for t in (x, w)] for _ in range(2))
    total = reduce(*ours, "outputs=pick gradients=x,weight total=pick", picks, coef=coef)["total"]
    loss = (F.linear(*theirs).log_softmax(1).gather(1, picks[:, None]).T * coef).sum()
    of_x, of_w = torch.autograd.grad(total, ours)
    exact_x, exact_w = torch.autograd.grad(loss, theirs)
    # some units of the smallest denormal number
    torch.testing.assert_close(of_x[2], exact_x[2], rtol=1e-4, atol=1e-44)
    torch.testing.assert_close(of_x[:2], exact_x[:2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_w, exact_w, rtol=1e-5, atol=1e-6)
