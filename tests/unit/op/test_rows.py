"""``fxpass::rows``: loops in several chunks against their text, run on all rows at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxpass.aten import gemm
from fxpass.op import row_chunks
from fxpass.op.rows import NAME, listed, rows
from fxpass.plan.regions import RegionPlan
from fxpass.region.loop import Loop
from fxpass.region.run import Interpreter
from fxpass.spec.dtypes import compute_dtype
from tests.fuzz.small import small
from tests.support.numerics import FLOOR, error

CPU = torch.device("cpu")
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
N = 23

# A divergence of two heads of different dtypes and hidden sizes, and its gradients; a tangent that
# is expanded; a class index; a sum over all rows, and one by classes.
DIVERGENCE = """rows rows=0,2,5,6 sums=1,2,4,6,7 wide=2 memory_mb=0 compiled=0
%0 = input {a}[n, 5]
%1 = input {a}[v, 5]
%2 = input {b}[n, 6]
%3 = input {b}[v, 6]
%4 = input {a}[v]
%5 = input {c}[n, v]
%6 = input int64[n, 1]
%7 = aten.t.default(%1)
%8 = aten.addmm.default(%4, %0, %7)
%9 = aten.permute.default(%3, [1, 0])
%10 = aten.mm.default(%2, %9)
%11 = aten._to_copy.default(%8, dtype={c})
%12 = aten._to_copy.default(%10, dtype={c})
%13 = aten._log_softmax.default(%11, 1, False)
%14 = aten._softmax.default(%12, 1, False)
%15 = aten.gather.default(%13, 1, %6)
%16 = aten.mul.Tensor(%13, %14)
%17 = aten.mul.Tensor(%16, %5)
%18 = aten.sum.dim_IntList(%17, [0, 1])
%19 = aten.exp.default(%13)
%20 = aten.sub.Tensor(%19, %14)
%21 = aten.mul.Tensor(%20, %5)
%22 = aten._to_copy.default(%21, dtype={a})
%23 = aten.permute.default(%22, [0, 1])
%24 = aten.t.default(%23)
%25 = aten.mm.default(%24, %0)
%26 = aten.mm.default(%22, %1)
%27 = aten._to_copy.default(%20, dtype={b})
%28 = aten.t.default(%2)
%29 = aten.mm.default(%28, %27)
%30 = aten.mm.default(%27, %3)
%31 = aten._to_copy.default(%30, dtype={c})
%32 = aten.sum.dim_IntList(%22, [0], dtype={c})
%33 = aten.argmax.default(%8, 1)
%34 = aten.eq.Scalar(%33, 3)
%35 = aten.sum.dim_IntList(%34, [0])
return %15, %18, %25, %26, %29, %31, %32, %35"""
# Rows that are multiplied twice, two products of one gradient, a gradient that is multiplied with
# rows that the function makes, a bias of the function, and a result that is an input.
LOW_RANK = """rows rows=0,1 sums=2,3,4 wide= memory_mb=0 compiled=0
%0 = input {a}[n, 5]
%1 = input float64[n]
%2 = input {a}[11, 5]
%3 = input {a}[4, 5]
%4 = input {a}[11, 4]
%5 = aten.t.default(%2)
%6 = aten.mm.default(%0, %5)
%7 = aten.t.default(%3)
%8 = aten.mm.default(%0, %7)
%9 = aten.t.default(%4)
%10 = aten.mm.default(%8, %9)
%11 = aten.add.Tensor(%6, %10)
%12 = aten.tanh.default(%11)
%13 = aten.mm.default(%12, %4)
%14 = aten.t.default(%12)
%15 = aten.mm.default(%14, %0)
%16 = aten.mm.default(%14, %8)
%17 = aten.t.default(%13)
%18 = aten.mm.default(%17, %0)
%19 = aten.mm.default(%12, %2)
return %1, %19, %15, %16, %18"""
# The mean of a cross-entropy, some of whose rows are ignored, and its gradients; an accuracy, and
# an entropy. It has a formula, with a total.
LOSS = """rows rows=0,1,3,4 sums=1,4 wide= memory_mb=0 compiled=0
%0 = input bool[n, 1]
%1 = input {a}[n, 5]
%2 = input {a}[11, 5]
%3 = input int64[n, 1]
%4 = input {c}[n, 1]
%5 = aten.permute.default(%2, [1, 0])
%6 = aten.mm.default(%1, %5)
%7 = aten._to_copy.default(%6, dtype={c})
%8 = aten._log_softmax.default(%7, 1, False)
%9 = aten.gather.default(%8, 1, %3)
%10 = aten.zeros_like.default(%9)
%11 = aten.where.self(%0, %9, %10)
%12 = aten.zeros_like.default(%4)
%13 = aten.where.self(%0, %4, %12)
%14 = aten.sym_size.int(%1, 0)
%15 = aten.full.default([%14, 11], 0, dtype={c})
%16 = aten.scatter.value(%15, 1, %3, -1.0)
%17 = aten.mul.Tensor(%16, %13)
%18 = aten.exp.default(%8)
%19 = aten.sum.dim_IntList(%17, [1], True)
%20 = aten.mul.Tensor(%18, %19)
%21 = aten.sub.Tensor(%17, %20)
%22 = aten._to_copy.default(%21, dtype={a})
%23 = aten.permute.default(%22, [0, 1])
%24 = aten.t.default(%23)
%25 = aten.mm.default(%24, %1)
%26 = aten.mm.default(%22, %2)
%27 = aten.argmax.default(%8, 1, True)
%28 = aten.eq.Tensor(%27, %3)
%29 = aten.logical_and.default(%28, %0)
%30 = aten.sum.dim_IntList(%22, [0], dtype={c})
%31 = aten.mul.Tensor(%18, %8)
%32 = aten.sum.dim_IntList(%31, [1], True)
%33 = aten.where.self(%0, %32, %10)
return %11, %25, %26, %29, %30, %33"""
# Of rows whose incoming gradients are made of the outputs: the sum of the label's probability.
PROBABILITY = """rows rows=0,2 sums=1 wide= memory_mb=0 compiled=0
%0 = input {a}[n, 5]
%1 = input {a}[11, 5]
%2 = input int64[n, 1]
%3 = aten.permute.default(%1, [1, 0])
%4 = aten.mm.default(%0, %3)
%5 = aten._to_copy.default(%4, dtype={c})
%6 = aten._log_softmax.default(%5, 1, False)
%7 = aten.gather.default(%6, 1, %2)
%8 = aten.exp.default(%7)
%9 = aten.sym_size.int(%0, 0)
%10 = aten.full.default([%9, 11], 0, dtype={c})
%11 = aten.scatter.value(%10, 1, %2, 1.0)
%12 = aten.mul.Tensor(%11, %8)
%13 = aten.exp.default(%6)
%14 = aten.sum.dim_IntList(%12, [1], True)
%15 = aten.mul.Tensor(%13, %14)
%16 = aten.sub.Tensor(%12, %15)
%17 = aten._to_copy.default(%16, dtype={a})
%18 = aten.permute.default(%17, [0, 1])
%19 = aten.t.default(%18)
%20 = aten.mm.default(%19, %0)
%21 = aten.mm.default(%17, %1)
return %8, %20, %21"""
FORMULAS = {
    "a loss": LOSS.format(a="float32", c="float32"),
    "a loss, bf16": LOSS.format(a="bfloat16", c="float32"),
    "a probability": PROBABILITY.format(a="float32", c="float32"),
    "a probability, fp16": PROBABILITY.format(a="float16", c="float32"),
}
TEXTS = {
    "f32": DIVERGENCE.format(a="float32", b="float32", c="float32"),
    "f64 and f32": DIVERGENCE.format(a="float64", b="float32", c="float64"),
    "bf16 and f32": DIVERGENCE.format(a="bfloat16", b="float32", c="float32"),
    "low rank": LOW_RANK.format(a="float32"),
    "low rank, bf16": LOW_RANK.format(a="bfloat16"),
    **FORMULAS,
}
texts = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())


def tensors_of(text: str, n: int = N, v: int = 9) -> list[Tensor]:
    torch.manual_seed(0)
    found = []
    for of in Loop.parse(text).inputs:
        shape = [s if isinstance(s, int) else {"n": n, "v": v}[s] for s in of.shape]
        if of.dtype == torch.bool:
            made = torch.rand(shape) < 0.8
        elif not of.dtype.is_floating_point:
            made = torch.randint(v, shape)
        elif of.shape == ("n", "v"):  # an expanded number of each row
            made = torch.randn(n, 1).to(of.dtype).expand(n, v)
        else:
            made = torch.randn(shape).to(of.dtype)
        found.append(made)
    return found


def interpreted(text: str, tensors: list[Tensor], wide: bool = False) -> list[Tensor]:
    """The text on all rows; ``wide`` in float64."""
    if wide:
        for name in ("bfloat16", "float16", "float32"):
            text = text.replace(name, "float64")
        tensors = [t.double() if t.is_floating_point() else t for t in tensors]
    return Interpreter(Loop.parse(text).graph, CPU)(list(tensors))


def assert_as_interpreted(text: str, tensors: list[Tensor]) -> None:
    loop, exact = Loop.parse(text), interpreted(text, tensors, wide=True)
    narrow = {t.dtype for t in tensors if t.is_floating_point()}
    floor = max(FLOOR[dtype] for dtype in narrow)
    for i, (got, theirs) in enumerate(
        zip(rows(tensors, text), interpreted(text, tensors), strict=True)
    ):
        assert (got.dtype, got.shape) == (loop.dtype(i), theirs.shape)
        assert got.is_contiguous()
        if not len(tensors[0]):
            assert not got.any()
        elif got.dtype.is_floating_point:
            assert error(got, exact[i]) <= 2 * error(theirs, exact[i]) + floor, i
        else:
            torch.testing.assert_close(got, theirs)


@pytest.fixture(params=["one chunk", "chunks"])
def chunks(request):
    if request.param == "one chunk":
        yield
        return
    with small():
        yield


@pytest.fixture
def few():
    with small():
        yield


def test_the_chunks_of_these_tests_are_several(few):
    text = TEXTS["f32"]
    run = row_chunks._Run(row_chunks.prepared(text, CPU), tensors_of(text), {"n": N, "v": 9})
    assert 2 <= run.plan.rows <= N // 3


@pytest.mark.usefixtures("chunks")
@texts
@pytest.mark.parametrize("n", [0, 1, 2, N])
def test_values(text, n):
    assert_as_interpreted(text, tensors_of(text, n))


@pytest.mark.usefixtures("few")
@texts
def test_products_in_f32(text, monkeypatch):
    """As on a CPU without products in bf16."""
    monkeypatch.setattr(gemm, "multiplied_in", lambda dtype, _: compute_dtype(dtype))
    assert_as_interpreted(text, tensors_of(text))


@pytest.mark.usefixtures("few")
@texts
def test_layouts(text):
    plain = tensors_of(text)
    views = [
        t.t().contiguous().t() if t.dim() == 2 else torch.stack([t, t], -1)[..., 0] for t in plain
    ]
    torch.testing.assert_close(rows(views, text), rows(plain, text), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("few")
@texts
def test_runs_are_equal_and_write_to_no_input(text):
    tensors = tensors_of(text)
    before = [t.clone() for t in tensors]
    first, second = rows(tensors, text), rows(tensors, text)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert all(map(torch.equal, tensors, before))
    storages = [t.untyped_storage().data_ptr() for t in (*tensors, *first)]
    assert len(set(storages)) == len(storages)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", ["f32", pytest.param("low rank, bf16", marks=pytest.mark.full)])
def test_compiled(name):
    text = TEXTS[name].replace("compiled=0", "compiled=1")
    tensors = tensors_of(text)
    assert_as_interpreted(text, tensors)
    [(function, _)] = row_chunks.prepared(text, CPU)._functions.values()
    assert function.kernels


def test_where_inductor_fails_it_is_interpreted(monkeypatch):
    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr("fxpass.region.compile._Compiled", broken)
    text = TEXTS["f32"].replace("memory_mb=0 compiled=0", "memory_mb=512 compiled=1")
    assert_as_interpreted(text, tensors_of(text))


def test_the_budget_of_the_text():
    text, n, v = TEXTS["f32"].replace("memory_mb=0", "memory_mb=1"), 3000, 400
    run = row_chunks._Run(row_chunks.prepared(text, CPU), tensors_of(text, n, v), {"n": n, "v": v})
    assert run.plan.scratch <= 1 << 20


@texts
def test_how_a_call_runs_is_listed(text):
    """Of tensors that need no data: the kernels of a formula, else the plan of a loop."""
    tensors = tensors_of(text)
    found = listed(tensors, text)
    with FakeTensorMode() as mode:
        again = listed([mode.from_tensor(t) for t in tensors], text)
    assert (str(again.choice), again.plan) == (str(found.choice), found.plan)
    has_formula = text in FORMULAS.values()
    assert (found.choice is not None, found.plan is None) == (has_formula, has_formula)
    names = [launch.name.rpartition("_")[0] for launch in found.launches]
    both = ["class_reductions", "class_reductions_backward"]
    assert names == both[: 1 + ("exp.default(%7)" in text)] * has_formula


@texts
def test_opcheck(text):
    torch.library.opcheck(torch.ops.fxpass.rows.default, (tensors_of(text), text))


def test_meta():
    text = TEXTS["f32"]
    found = rows([t.to("meta") for t in tensors_of(text)], text)
    assert [(t.shape, t.dtype) for t in found] == [
        (t.shape, t.dtype) for t in rows(tensors_of(text), text)
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:-1], "needs 7 tensors, got 6"),
        (lambda t: [t[0][1:], *t[1:]], r"needs float32\[22, 6\] as tensor 2, got float32\[23, 6\]"),
        (lambda t: [t[0], t[1][:, 1:], *t[2:]], r"needs float32\[9, 5\] as tensor 1"),
        (
            lambda t: [t[0], t[1].double(), *t[2:]],
            r"needs float32\[v, 5\] as tensor 1, got float64",
        ),
        (lambda t: [*t[:4], t[4][1:], *t[5:]], r"needs float32\[9\] as tensor 4, got float32\[8\]"),
        (lambda t: [*t[:6], t[6][:, 0]], r"needs int64\[23, 1\] as tensor 6, got int64\[23\]"),
        (lambda t: [*t[:6], t[6].to("meta")], "needs tensors of one device, got cpu, meta"),
    ],
)
def test_tensors_that_do_not_fit(change, message):
    text = TEXTS["f32"]
    with pytest.raises(ValueError, match=message):
        rows(change(tensors_of(text)), text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rows rows=0", "rows row=0", "does not say"),
        ("wide=2", "wide=19", "wide="),
        ("sums=1", "sums=19", "sums="),
        ("aten.exp", "aten.exp_", "no operation|writes"),
    ],
)
def test_texts_that_do_not_fit(old, new, message):
    text = TEXTS["f32"]
    with pytest.raises(ValueError, match=message):
        rows(tensors_of(text), text.replace(old, new))


@pytest.mark.parametrize("text", FORMULAS.values(), ids=FORMULAS.keys())
def test_these_have_a_formula(text):
    formula = row_chunks.prepared(text, CPU).formula
    assert formula is not None
    assert bool(formula.spec.total) == ("bool" in text)


def test_the_others_have_none():
    others = [row_chunks.prepared(text, CPU) for k, text in TEXTS.items() if k not in FORMULAS]
    assert not any(prepared.formula for prepared in others)


@texts
def test_autocast_changes_nothing(text):
    tensors = tensors_of(text)
    with torch.autocast("cpu", BF16):
        cast = rows(tensors, text)
    torch.testing.assert_close(cast, rows(tensors, text), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("index", [-1, -100, 11, 2**40])
@pytest.mark.parametrize("text", FORMULAS.values(), ids=FORMULAS.keys())
def test_a_pick_that_is_no_class(text, index):
    tensors = tensors_of(text)
    picks = next(t for t in tensors if t.dtype == torch.int64)
    picks[-1] = index
    for t in tensors:
        if t.dtype == torch.bool:
            t.fill_(True)
    with pytest.raises(IndexError, match=f"class {index} is out of bounds: there are 11 classes"):
        rows(tensors, text)


def test_the_schema():
    """Graphs in compile caches call it like this."""
    schema = str(torch.ops.fxpass.rows.default._schema)
    assert schema == f"{NAME}(Tensor[] tensors, str text) -> Tensor[]"


def test_a_plan_of_other_rows(monkeypatch):
    """Products of few classes, and a last chunk of one row."""
    found = lambda n, heads, *_: RegionPlan(2, (4,) * len(heads), 0, 0)  # noqa: E731
    monkeypatch.setattr(row_chunks, "plan", found)
    for text in TEXTS.values():
        assert_as_interpreted(text, tensors_of(text))


MASKED = """rows rows=0,2 sums=1,3 wide= memory_mb=0 compiled=0
%0 = input float32[n, 5]
%1 = input float32[9, 5]
%2 = input bool[n, 1]
%3 = aten.t.default(%1)
%4 = aten.mm.default(%0, %3)
%5 = aten.exp.default(%4)
%6 = aten.mul.Tensor(%5, %2)
%7 = aten.sum.dim_IntList(%6, [1])
%8 = aten.t.default(%6)
%9 = aten.mm.default(%8, %0)
%10 = aten.mm.default(%6, %1)
%11 = aten.sum.dim_IntList(%6, [0])
return %7, %9, %10, %11"""


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("text", [MASKED, FORMULAS["a loss"]], ids=["no formula", "a formula"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("counted", [0, 1, 9, N])
def test_rows_that_change_nothing_are_left_out(counted, bad, text):
    """What stands in them does not show."""
    tensors, mask = tensors_of(text), (torch.arange(N) < counted).view(N, 1)
    x, of_mask = ((0, 2), (1, 0))[text != MASKED]
    tensors[of_mask] = mask
    wanted = interpreted(text, tensors)
    tensors[x] = torch.where(mask, tensors[x], bad)
    torch.testing.assert_close(rows(tensors, text), wanted)


def test_few_rows_are_not_worth_to_be_left_out():
    x, weight, _ = tensors_of(MASKED)
    mask = (torch.arange(N) != 3).view(N, 1)
    run = row_chunks.prepared(MASKED, CPU)
    assert row_chunks._counted(run, [x, weight, mask], {"n": N}) is None
    x[3] = torch.nan
    assert rows([x, weight, mask], MASKED)[0].isnan().any()
