"""Reductions of logits in small tiles, and in the memory of the weight's gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fxpass.aten import reductions as aten
from fxpass.op.reductions import class_reductions
from fxpass.plan.plan import Plan
from fxpass.spec import expression
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.operands import Operands
from fxpass.spec.outputs import INDICES, OF_PICKS, Moment, Output
from fxpass.spec.reductions import Reductions
from tests.support.reduction_cases import (
    COMBINATIONS,
    DTYPES,
    INF,
    NAN,
    OUTPUTS,
    TOTALS,
    TRANSFORMS,
    WEIGHTS,
    D,
    K,
    N,
    V,
    case,
    check,
    check_total,
)

# The others need a whole row.
SOME = [output for output in OUTPUTS if output != "max"]
TILED: dict[str, list[Output]] = {
    name: some
    for name, outputs in COMBINATIONS.items()
    if (some := [output for output in outputs if output != "max"])
}
FEW = (4, 9, V)  # no more rows than the hidden size


# ---------------------------------------------------------------- tiles


@pytest.mark.usefixtures("tiled", "multiplied")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("output", SOME, ids=str)
def test_each_output(output, dtype):
    for transform in TRANSFORMS:
        check(case([output], dtype, transform), dtype)
        check(case([output], dtype, transform, dtype, many=True), dtype)
        check(case([output], dtype, transform, compute_dtype(dtype), scaled=True), dtype)


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TILED)
def test_combinations(name, dtype):
    for transform, many in itertools.product(TRANSFORMS, (False, True)):
        check(case(TILED[name], dtype, transform, dtype, many, many), dtype)


SHAPES = [(1, 5, 11), (7, 1, 11), (7, 5, 1), (1, 1, 1), (7, 5, 4), (3, 5, 12), (33, 17, 129)]


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TILED)
def test_sizes(name, shape):
    check(case(TILED[name], bias=torch.float32, scaled=True, shape=shape))


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("many", [False, True])
def test_no_rows(many):
    outputs = TILED["everything"]
    found = case(outputs, bias=torch.float32, scaled=True, many=many, shape=(0, D, V))
    tensors = [t.requires_grad_() for t in found.tensors.values()]
    results = found.run(tensors)
    rows, indices = results["rows"], results["indices"]
    assert rows.shape == (len(found.spec.rows) + (2 * (K - 1) if many else 0), 0)
    assert indices.shape == (1, 0)
    rows.sum().backward()
    assert all(t.grad is not None and not t.grad.any() for t in tensors)


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize(
    "frozen",
    [("x",), ("weight",), ("weight", "bias"), ("scale", "given0"), ("x", "weight", "bias")],
)
@pytest.mark.parametrize("name", TILED)
def test_frozen_operands(name, frozen):
    check(case(TILED[name], bias=torch.float32, scaled=True, frozen=frozen))


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_contiguous_operands(dtype):
    found = case(TILED["everything"], dtype, bias=dtype, scaled=True, many=True)
    for name, tensor in found.tensors.items():
        strided = tensor.repeat_interleave(2, dim=-1)[..., ::2]
        found.tensors[name] = tensor.T.contiguous().T if name == "x" else strided
    assert found.picks is not None
    check(found._replace(picks=found.picks.T.contiguous().T), dtype)


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("output", SOME, ids=str)
def test_huge_logits(output, dtype):
    check(case([output], dtype, bias=dtype, size=1e4), dtype)


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_written_to_operands(dtype):
    found = case(TILED["everything"], dtype, "3*tanh(z/3)", dtype, True, True)
    assert found.picks is not None
    before = [t.clone() for t in (*found.tensors.values(), found.picks)]
    leaves = [t.requires_grad_() for t in found.tensors.values()]
    rows = found.fused(*leaves)
    rows.backward(grad := torch.ones_like(rows))
    assert all(map(torch.equal, (*found.tensors.values(), found.picks), before))
    assert torch.equal(grad, torch.ones_like(rows))


def answers(found, plan: Plan, upstream=None) -> list[Tensor]:
    """All outputs and gradients, without the operator."""
    tensors, spec = found.tensors, found.spec
    named = [tensors.get(name) for name in ("x", "weight", "bias", "scale")]
    given = tuple(t for name, t in tensors.items() if name.startswith("given"))
    operands = Operands(*named, found.picks, given, logits=tensors.get("logits"))
    out, _ = aten.forward(operands, spec, plan)
    incoming = torch.ones_like(out.rows) if upstream is None else upstream
    grads = aten.backward(operands, spec, plan, out, incoming)
    return [*out, *(grads[name] for name in spec.gradients)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 4), (4, 3), (7, 4), (3, 11), (100, 100)])
def test_tiles_of_any_size(sizes, dtype):
    found = case(TILED["everything"], dtype, bias=dtype, scaled=True, many=True)
    upstream = torch.randn(len(found.spec.rows) + 2 * (K - 1), N, dtype=compute_dtype(dtype))
    plan = Plan("aten", "tiled", *sizes)
    tiled, again = answers(found, plan, upstream), answers(found, plan, upstream)
    chunked = answers(found, Plan("aten", "chunked", 100, 100), upstream)
    tolerance = 64 * torch.finfo(dtype).eps
    for ours, same, theirs in zip(tiled, again, chunked, strict=True):
        assert torch.equal(ours, same)
        assert (ours - theirs).double().norm() <= tolerance * (1 + theirs.double().norm())


@pytest.mark.parametrize("output", SOME, ids=str)
def test_tiles_of_one_class(output):
    found = case([output], torch.float64, many=True)
    upstream = torch.randn(K if output in OF_PICKS else 1, N, dtype=torch.float64)
    tiled, whole = (answers(found, Plan("aten", "tiled", 3, v), upstream) for v in (1, 100))
    torch.testing.assert_close(tiled, whole)


@pytest.mark.usefixtures("tiled", "multiplied")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_logits(dtype):
    """Values without gradients, and the first of equal maxima; equal are logits as they round."""
    outputs = ("max", *INDICES)
    found = case(outputs, dtype, size=0.0, bias=dtype)
    bias = torch.tensor([1.0, 4.0, 4.0, 2.0, 4.0, 0.0, 4.0, 4.0, 3.0, 1.0, 4.01])
    if dtype != torch.bfloat16:
        bias[-1] = 4
    found.tensors["bias"] = bias.to(dtype)
    tensors = [*found.tensors.values()]
    found = found._replace(spec=Reductions(outputs))
    results = found.run(tensors)
    rows, indices = results["rows"], results["indices"]
    torch.testing.assert_close(rows, found.eager(*tensors))
    assert (indices == 1).all()
    found.tensors["x"][2] = NAN
    results = found.run(tensors)
    rows, indices = results["rows"], results["indices"]
    torch.testing.assert_close(rows, found.eager(*tensors), equal_nan=True)
    assert (indices == torch.where(torch.arange(N) == 2, 0, 1)).all()


@pytest.mark.parametrize("plan", [Plan("aten", "tiled", 3, 4), Plan("aten", "chunked", 3, 4)])
def test_ranks_are_of_rounded_logits(plan, monkeypatch):
    """Two logits that are equal in bf16, and not in f32: eager picks the first of them."""
    for module in ("tiles", "chunked"):
        name = f"fxpass.aten.{module}.multiplied_in"
        monkeypatch.setattr(name, lambda dtype, _: compute_dtype(dtype))
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    w = torch.tensor([[0.0, 0.0], [4.0, 0.0], [4.0, 2**-10]], dtype=torch.bfloat16)
    assert (x @ w.t()).argmax(1).tolist() == [1, 1]
    out, _ = aten.forward(Operands(x, w, None, None, None, ()), Reductions(("argmax", "max")), plan)
    assert out.indices.tolist() == [[1, 1]]
    assert out.rows.tolist() == [[4.0, 4.0]]


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_that_exist(dtype):
    found = case(("pick", Moment(1, 1)), dtype)
    x, w = (found.tensors[name].requires_grad_() for name in ("x", "weight"))
    logits = torch.nn.functional.linear(x, w).detach()

    def run(some, weight):
        spec = "r6 outputs=pick;moment(1,1) gradients=x,weight"
        rows = class_reductions(x, weight, None, None, found.picks, [], None, some, spec)["rows"]
        return rows, *torch.autograd.grad(rows.sum(), (x, w if weight is w else weight))

    tolerance = torch.finfo(dtype).eps * 16
    torch.testing.assert_close(run(logits, w), run(None, w), rtol=tolerance, atol=tolerance)
    other = (w * 2).detach().requires_grad_()
    assert torch.equal(run(logits, other)[0], run(logits, w)[0])


# ---------------------------------------------------------------- the logits in the gradient


@pytest.mark.usefixtures("in_place", "multiplied")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("total", TOTALS.values(), ids=TOTALS)
def test_the_total_and_its_gradients(total, dtype):
    for flags in (0, 1, 2, 4, 7):
        scaled, many, zeros = (bool(flags & bit) for bit in (1, 2, 4))
        wide = compute_dtype(dtype) if flags == 1 else None
        for transform in TRANSFORMS if flags == 7 else ("z",):
            check_total(*(total, dtype, transform, (), scaled, many, zeros), bias=wide, shape=FEW)


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("total", TOTALS.values(), ids=TOTALS)
def test_other_outputs_beside_the_total(total, dtype):
    picks = ("pick", "at") if {"pick", "at"} & set(total) else ()
    outputs: tuple[Output, ...] = (
        *picks,
        *("lse", "max", "argmax", Moment(1, 1), Moment(0, 2)),
    )
    for transform in ("z", "3*tanh(z/3)"):
        check_total(total, dtype, transform, outputs, scaled=True, zeros=True, shape=FEW)


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("total", TOTALS.values(), ids=TOTALS)
def test_huge_logits_in_place(total, dtype):
    check_total(total, dtype, shape=FEW, size=1e4)


@pytest.mark.usefixtures("in_place")
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 5, 11), (5, 5, 1), (5, 5, 12), (17, 17, 129)])
@pytest.mark.parametrize("total", TOTALS.values(), ids=TOTALS)
def test_sizes_in_place(total, shape):
    check_total(total, torch.float32, bias=torch.float32, shape=shape)


def of_total(spec: str, bias: Tensor, coef: Tensor, picks: Tensor, plan: Plan) -> list[Tensor]:
    n, d, v = FEW
    random = torch.Generator().manual_seed(0)
    x, w = torch.randn(n, d, generator=random), torch.randn(v, d, generator=random)
    given = (torch.randn(v, generator=random), torch.randn(n, v, generator=random))
    operands = Operands(x, w, bias, None, picks, given, coef)
    out, grads = aten.forward(operands, Reductions.parse(spec), plan)
    return [out.total, *(grads[name] for name in ("x", "weight", "bias"))]


IN_PLACE, IN_CHUNKS = Plan("aten", "chunked", 4, 4, in_place=True), Plan("aten", "chunked", 4, 100)


@pytest.mark.parametrize("total", TOTALS.values(), ids=TOTALS)
@pytest.mark.parametrize("where", [[0, 5], [0, 1, 2, 3], [8, 9, 10], [5]])
@pytest.mark.parametrize("bad", [-INF, INF, NAN])
def test_infinite_logits_in_place(bad, where, total):
    """In the first tile, in a whole tile, in the last: as in one chunk, with nan where it has."""
    bias = torch.randn(V)
    bias[where] = bad
    text = Reductions((), gradients=("x", "weight", "bias"), total=tuple(total)).text()
    coef = torch.randn(len(total), FEW[0])
    picks = torch.tensor([4, 7, 6, 4])
    ours, theirs = (of_total(text, bias, coef, picks, plan) for plan in (IN_PLACE, IN_CHUNKS))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("where", [[2, 7], [0, 1, 2, 3], [4, 5, 6, 7]])
def test_classes_without_probability_in_tiles(where, weight, b, a):
    """A whole tile of them, first or later, leaves the sums as they are."""
    spec, x = Reductions((Moment(a, b, weight), "lse")), torch.randn(N, D)
    w, bias, given = torch.randn(V, D), torch.randn(V), (torch.randn(V), torch.randn(N, V))
    bias[where] = -INF
    out, _ = aten.forward(
        Operands(x, w, bias, None, None, given), spec, Plan("aten", "tiled", 3, 4)
    )
    kept = [i for i in range(V) if i not in where]
    fewer = tuple(t[..., kept] for t in given)
    some = Operands(x, w[kept], bias[kept], None, None, fewer)
    want, _ = aten.forward(some, spec, Plan("aten", "chunked", 100, 100))
    torch.testing.assert_close(out.rows, want.rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("largest", [0, 10])
@pytest.mark.parametrize("bad", [-INF, INF, NAN])
@pytest.mark.parametrize("where", [0, 6, 9])
def test_sums_over_infinite_logits_are_those_of_one_chunk(where, bad, largest):
    """Before and after the tile with the largest logit; the class of a nan is the largest."""
    outputs = (*OUTPUTS, *INDICES)
    bias = torch.randn(V)
    bias[where], bias[largest] = bad, (bad if where == largest else 100)
    given = (torch.rand(V), torch.rand(N, V))
    picks = torch.arange(N)
    operands = Operands(torch.randn(N, D), torch.randn(V, D), bias, None, picks, given)
    tiled, chunked = (
        aten.forward(operands, Reductions(outputs), plan)[0]
        for plan in (Plan("aten", "tiled", 3, 4), Plan("aten", "chunked", 100, 100))
    )
    assert torch.equal(tiled.indices, chunked.indices)
    torch.testing.assert_close(tiled.rows, chunked.rows, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("plan", [IN_PLACE, IN_CHUNKS])
@pytest.mark.parametrize("total", TOTALS.values(), ids=TOTALS)
@pytest.mark.parametrize("row", [(3e38, 0.0), (-3e38, 0.0), (3e38, 3e38)])
def test_a_row_without_a_coefficient_adds_nothing(row, total, plan):
    """Its logits are inf, -inf or nan."""
    n, d, _ = FEW
    x, w = torch.randn(n, d), torch.randn(V, d)
    x[:, :2], w[:, :2] = 0, torch.tensor([2.0, -2.0])
    x[1, :2] = torch.tensor(row)
    assert not (x @ w.t())[1].isfinite().any()
    coef = torch.randn(len(total), n)
    coef[:, 1] = 0
    spec = Reductions((), gradients=("x", "weight"), total=tuple(total))
    picks, given = torch.tensor([4, 7, 6, 4]), (torch.randn(V), torch.randn(n, V))
    out, grads = aten.forward(Operands(x, w, None, None, picks, given, coef), spec, plan)
    assert out.total[1] == 0
    assert out.total.isfinite().all()
    assert not grads["x"][1].any()
    assert grads["x"].isfinite().all()
    assert grads["weight"].isfinite().all()
    assert not grads["weight"][:, :2].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_is_deterministic(dtype):
    n, d, v = 6, 9, 37
    x, w = torch.randn(n, d).to(dtype), torch.randn(v, d).to(dtype)
    coef = torch.randn(4, n).to(compute_dtype(dtype))
    spec = Reductions(
        ("argmax",),
        expression.parse("3*tanh(z/3)"),
        ("x", "weight"),
        ("pick", Moment(1, 1)),
    )
    operands = Operands(x, w, None, None, torch.randint(v, (n, K)), (), coef)
    before = [x.clone(), w.clone()]
    plan = Plan("aten", "chunked", n, 8, in_place=True)
    (one, of_one), (two, of_two) = (aten.forward(operands, spec, plan) for _ in range(2))
    for a, b in zip([*one, *of_one.values()], [*two, *of_two.values()], strict=True):
        assert torch.equal(a, b)
    assert all(map(torch.equal, (x, w), before))
