"""``fxpass::rows``: loops in several chunks against their text, run on all rows at once."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fxpass.aten import gemm
from fxpass.formula.dtypes import compute_dtype
from fxpass.op import prepared_loop, row_chunks
from fxpass.op.rows import NAME, describe_call, rows
from fxpass.plan.regions import RegionPlan
from tests.fuzz.small import small
from tests.support.numerics import error
from tests.support.row_texts import (
    CPU,
    FORMULAS,
    TEXTS,
    N,
    assert_as_interpreted,
    interpreted,
    tensors_of,
)

texts = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())


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
    run = row_chunks._LoopRun(row_chunks.prepared(text, CPU), tensors_of(text), {"n": N, "v": 9})
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
    run = row_chunks._LoopRun(
        row_chunks.prepared(text, CPU), tensors_of(text, n, v), {"n": n, "v": v}
    )
    assert run.plan.scratch <= 1 << 20


@texts
def test_how_a_call_runs_is_listed(text):
    """Of tensors that need no data: the kernels of a formula, else the plan of a loop."""
    tensors = tensors_of(text)
    found = describe_call(tensors, text)
    with FakeTensorMode() as mode:
        again = describe_call([mode.from_tensor(t) for t in tensors], text)
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
    with torch.autocast("cpu", torch.bfloat16):
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
    found = lambda n, heads, **_: RegionPlan(2, (4,) * len(heads), 0, 0)  # noqa: E731
    monkeypatch.setattr(prepared_loop, "plan_region", found)
    for text in TEXTS.values():
        assert_as_interpreted(text, tensors_of(text))


def test_few_chunks_add_up_in_bf16(monkeypatch):
    """Within twice the error of eager's; vectors are added up in f32."""
    text = MASKED.replace("float32", "bfloat16").replace("exp", "sin")  # which no formula has
    tensors = tensors_of(text, 256)
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    exact = interpreted(text.replace("bfloat16", "float64"), wide)
    eager = [error(t, true) for t, true in zip(interpreted(text, tensors), exact, strict=True)]

    def errors(rounded):
        found = lambda n, heads, **_: RegionPlan(n // 4, (9,) * len(heads), 0, 0, rounded)  # noqa: E731
        monkeypatch.setattr(prepared_loop, "plan_region", found)
        return [error(t, true) for t, true in zip(rows(tensors, text), exact, strict=True)]

    rounded, unrounded = errors(True), errors(False)
    assert all(ours <= 2 * theirs for ours, theirs in zip(rounded, eager, strict=True))
    assert rounded[1] > unrounded[1]  # the product alone
    assert rounded[:1] + rounded[2:] == unrounded[:1] + unrounded[2:]


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
@pytest.mark.parametrize(
    ("text", "bad"),
    [(MASKED, torch.nan), (MASKED, torch.inf), (FORMULAS["a loss"], torch.nan)],
    ids=["no formula, nan", "no formula, inf", "a formula"],
)
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
    assert row_chunks._contributing_rows(run, [x, weight, mask], {"n": N}) is None
    x[3] = torch.nan
    assert rows([x, weight, mask], MASKED)[0].isnan().any()
