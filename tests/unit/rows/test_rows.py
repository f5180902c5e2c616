"""Programs through the pass alone, in several chunks of which the last one is smaller."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import lowering

from fxpass.casts.aot import with_pass
from fxpass.rows.backend import RowsPass
from tests.fuzz.small import small
from tests.programs.catalog import catalog
from tests.programs.operands import SQUARE
from tests.programs.row import FORMULA, Row
from tests.support.joint import captured

EACH = 24  # of so many programs, one is tried
# formulas, which Dynamo's graph has as class reductions; logits that leave are for deferral
FUSED = [
    row
    for row in catalog(libraries=False)
    if row.becomes == FORMULA and not row.left and row.kind != "logits that leave"
]
# What is not captured whole yet, and what stops it; with dynamic sizes, texts that fix some of them.
DECLINED = {
    "logits that are returned as well": "they are deferred on Dynamo's graph",
    "a vector": "a tensor of one number is an operand",
}
DECLINED_DYNAMIC = {"halves": "a number of rows that may be odd"}


@pytest.fixture(autouse=True)
def chunks():
    with small():
        yield


TRIED = [
    (row, way)
    for row in FUSED[::EACH]
    for way in ("eager", "dynamic")
    if row.name not in DECLINED and way not in row.never
    if way == "eager" or row.name not in DECLINED_DYNAMIC
]


@pytest.mark.parametrize(("row", "way"), TRIED, ids=lambda one: getattr(one, "name", one))
def test_programs(row, way):
    found = captured(row, way)
    assert not found.wrong
    assert found.whole, found


# Rows do not mix where there are as many rows as classes and hidden values.
SQUARES = (
    "F.cross_entropy(z, labels)",
    "z.softmax(-1).square().sum(-1)",
    "(z.log_softmax(-1) * z.softmax(-1)).sum(-1).mean()",
    "z.sort(-1).values[:, 1:].cumsum(-1).tanh().sum(-1)",
    "F.kl_div(z.log_softmax(-1), q.softmax(-1), reduction='batchmean')",
    "z.view(B, T, V)[:, :-1].flatten(0, 1).logsumexp(-1)",
)


@pytest.mark.parametrize("text", SQUARES)
def test_sizes_that_coincide(text):
    found = captured(Row("square", text, sizes=SQUARE), "eager")
    assert not found.wrong
    assert found.calls


# An index may take a row twice, or none of a row.
CHOSEN = (
    "z[labels % 7].logsumexp(-1)",
    "s[torch.arange(B), tokens[:, 0] % T].log_softmax(-1)[:, 3]",
    "torch.index_select(s, 1, labels[:5] % T).softmax(-1).square().sum(-1)",
    "F.cross_entropy(z[labels % N], labels.flip(0))",
)


@pytest.mark.parametrize("way", ["eager", "bf16"])
@pytest.mark.parametrize("text", CHOSEN)
def test_rows_by_an_index(text, way):
    found = captured(Row("chosen", text), way)
    assert not found.wrong
    assert found.whole


def test_an_index_of_logits_that_are_read_elsewhere():
    """All of them are multiplied anyway."""
    text = "z[labels % 7].logsumexp(-1).sum() + F.cross_entropy(z, labels)"
    assert not captured(Row("both", text), "eager").wrong


@pytest.mark.parametrize(
    "text", ["s.softmax(1).softmax(-1).amax(-1)", "(z - z.cumsum(0)).logsumexp(-1)"]
)
def test_what_mixes_rows_is_left_as_it_is(text):
    found = captured(Row("mixed", text), "eager")
    assert not found.wrong
    assert not found.calls
    assert found.declined


def _graphs(program, *tensors):
    rows = RowsPass()
    torch.compile(program, backend=rows.backend())(*tensors)
    return rows.made


def test_gradients_of_a_mean_are_computed_in_forward():
    """One call, for a tangent of 1: three products."""
    row = Row("mean", "F.cross_entropy(z, labels)")
    [one] = _graphs(row.program(), *row.tensors())
    assert one.calls == 1
    assert one.regions.factor is not None


def test_rows_that_leave_take_a_second_call():
    row = Row("rows", "z.log_softmax(-1).gather(-1, labels[:, None])[:, 0]")
    [one] = _graphs(row.program(), *row.tensors())
    assert (one.calls, one.regions.factor) == (2, None)


def test_an_exception_in_the_pass_declines(monkeypatch):
    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr("fxpass.rows.backend.emit", broken)
    found = captured(Row("mean", "F.cross_entropy(z, labels)"), "eager")
    assert not found.wrong
    assert found.declined[0] == "failed: RuntimeError: broken"


def test_any_number_of_rows():
    """One compiled graph."""
    rows = RowsPass()
    compiled = torch.compile(
        lambda x, w, y: F.cross_entropy(F.linear(x, w), y), backend=rows.backend(), dynamic=True
    )
    weight = torch.randn(97, 16, requires_grad=True)
    for n in (5, 48, 300):
        x, labels = torch.randn(n, 16), torch.randint(97, (n,))
        torch.testing.assert_close(
            compiled(x, weight, labels), F.cross_entropy(F.linear(x, weight), labels)
        )
    assert [one.calls for one in rows.made] == [1]


def test_inductor(tmp_path, monkeypatch):
    """Training and inference graphs; another time, its cache has the code."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    row = Row("mean", "F.cross_entropy(z, labels) + z.logsumexp(-1).square().mean()")
    x, weight, labels = row.tensors()
    want = row.program()(x, weight, labels)
    gradients = torch.autograd.grad(want, (x, weight))
    for again in (False, True):
        rows = RowsPass()
        torch._dynamo.reset()
        counters.clear()
        options = with_pass({}, "joint_custom_pre_pass", rows, rows.key())
        compiled = torch.compile(row.program(), options=options)
        got = compiled(x, weight, labels)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, (x, weight)), gradients)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, weight, labels), want)
        assert [one.calls for one in rows.made] == ([] if again else [1, 1])
        assert counters["aot_autograd"]["autograd_cache_hit"] == 2 * again


# Views of rows, a number, rows that are chosen, and fp16, whose tangents have a power of two;
# softmaxes of something else.
AROUND = (
    "F.cross_entropy(z.view(B, T, V)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())",
    "z.flip(0).logsumexp(-1).square().sum()",
    "z[labels % 7].softmax(-1).square().sum()",
    "z.view(B, T, V)[:, -1].softmax(-1).amax(-1).sum()",
    "F.cross_entropy(F.linear((x @ x.t()).softmax(-1) @ x, weight), labels)",
    "F.cross_entropy(z, labels) + (x.log_softmax(-1) * x.logsumexp(-1, True)).sum()",
    "F.cross_entropy(z, labels) + x.logsumexp(-1).sum()",
)


@pytest.mark.parametrize("way", ["eager", "fp16"])
@pytest.mark.parametrize("text", AROUND)
def test_inductor_lowers_what_stands_around_calls(text, way):
    """It has decomposed the graph before the pass: what it decomposes, it does not lower."""
    row = Row("around", text)
    dtype = torch.float16 if way == "fp16" else torch.float32
    tensors = [t.detach().to(dtype if t.is_floating_point() else t.dtype) for t in row.tensors()]
    leaves = [
        t.requires_grad_(of.requires_grad) for t, of in zip(tensors, row.tensors(), strict=True)
    ]
    [one] = _graphs(row.program(), *leaves)
    assert one.calls
    called = {node.target for node in one.graph.graph.nodes if node.op == "call_function"}
    ours = {torch.ops.fxpass.rows.default, torch.ops.fxpass.scaled.default, operator.getitem}
    assert not [op for op in called - ours if op not in lowering.lowerings]


def test_caches_know_the_settings():
    keys = {RowsPass(least_mb).key() for least_mb in (0, 0, 64)}
    assert len(keys) == 2
