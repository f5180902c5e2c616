"""The products of parts of gradients: GEMMs, their dtypes and roundings."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fxpass.formula.operands import Operands
from fxpass.formula.outputs import Moment
from fxpass.formula.reductions import Reductions
from fxpass.kernels import chunked, reductions
from fxpass.kernels.chunked import Gradients, LogitsPart, gradient_dtypes
from fxpass.plan.plan import MOST_ROUNDED
from tests.support.gpus import A100, H200, MI300, T4
from tests.support.launches import Launches
from tests.support.numerics import error
from tests.support.pairs import in_pairs
from tests.unit.kernels.test_chunked import DTYPES, ROWS, operands, plan

# NumPy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_rounded_once_however_many_slices_there_are(dtype, device, monkeypatch):
    """To the dtypes of the weight and of the bias; the others are sums."""
    monkeypatch.setattr(chunked, "_F32_BYTES", 4 * 16 * 20)  # several passes behind an f32 result
    with device:
        given = operands(24, 90, dtype, d=16, bias=dtype)._replace(scale=torch.rand(24))
    spec = Reductions(("lse", "pick", Moment(1, 1)), gradients=("x", "weight", "bias"))
    answers = []
    for classes in (16, 90, 1 << 20):
        out, _ = reductions.forward(given, spec, plan(classes=classes))
        incoming = torch.ones_like(out.rows)
        answers.append(reductions.backward(given, spec, plan(classes=classes), out, incoming))
    many, one, more = answers
    assert all(torch.equal(one[name], more[name]) for name in one)
    assert {name: grad.dtype for name, grad in many.items()} == {
        **{"x": torch.float32, "weight": dtype, "bias": dtype}
    }
    for name in ("weight", "bias"):
        assert error(many[name], one[name]) < (1e-6 if dtype == torch.float32 else 1e-4)
    # in f32 the order of a sum hardly shows behind one rounding; six roundings are off by 2e-3
    assert error(many["x"], one["x"]) < 2e-4


@pytest.mark.parametrize(("v", "added"), [(37, [False]), (200, [False, True, True])])
def test_the_first_slice_overwrites_the_gradient_of_x(v, added, device, monkeypatch):
    """An addmm of one row may read an f32 sum as 16 bits; all its classes are one slice."""
    adds, product = [], chunked.write_product
    monkeypatch.setattr(
        chunked, "write_product", lambda *args: (adds.append(args[-1]), product(*args))[1]
    )
    spec = Reductions(("pick",), gradients=("x",))
    with device:
        given = operands(1, v, d=8)
        out, _ = reductions.forward(given, spec, plan(classes=80))
        reductions.backward(given, spec, plan(classes=80), out, torch.ones(1, 1))
    assert adds == added


@in_pairs(
    way=("chunks", "rounded chunks", "slices"),
    unrounded=((), ("weight",), ("x", "weight")),
    dtype=DTYPES,
)
def test_products(device, way, unrounded, dtype, monkeypatch):
    """Of parts of a gradient: their sums are those of the whole."""
    monkeypatch.setattr(chunked, "UPCAST_CLASSES", 16)  # some at a time, where they are up-cast
    with device:
        given = operands(6, 50, dtype, d=7, bias=dtype)
        g = torch.randn(6, 64).to(dtype)[:, :50]  # rows are padded
    spec, sliced = replace(ROWS, unrounded=unrounded), way == "slices"
    starts = range(0, 50, 20) if sliced else range(0, 6, 4)
    parts = [
        LogitsPart(slice(0, 6), slice(i, min(i + 20, 50)))
        if sliced
        else LogitsPart(slice(i, min(i + 4, 6)), slice(0, 50))
        for i in starts
    ]
    unscale = torch.tensor(0.5, device=device) if sliced else None
    planned = plan()._replace(rounded=way == "rounded chunks")
    sums = Gradients(given, gradient_dtypes(given, spec, planned, parts, sliced), 4.0, unscale)
    for part in parts:
        sums.add(part, g[part.rows, part.classes])
    x, w, wide = given.x.double(), given.weight.double(), g.double()
    times = 2.0 if sliced else 4.0
    want = {"x": 4 * wide @ w, "weight": times * wide.T @ x, "bias": times * wide.sum(0)}
    once = {"slices": ("weight", "bias"), "rounded chunks": ("weight",), "chunks": ()}[way]
    for name, grad in sums.found.items():
        rounded = name in once and name not in unrounded
        # fp16 has too small a range for sums
        rounded &= sliced or dtype != torch.float16
        assert grad.dtype == (dtype if rounded else torch.float32)
        assert error(grad, want[name]) < (torch.finfo(dtype).eps if rounded else 1e-6)


@pytest.mark.parametrize("count", [1, 4, MOST_ROUNDED])
def test_the_error_of_sums_in_bf16(count, device):
    """K chunks have sqrt((K + 1) / 2) of the error of one rounding, which is eager's: less than
    twice, up to the most that a plan takes."""
    with device:
        given = operands(384, 256, torch.bfloat16, d=64)
        g = torch.randn(384, 256).bfloat16()
    parts, planned = chunked.row_parts(given, 384 // count), plan()._replace(rounded=True)
    spec = replace(ROWS, gradients=("weight",))
    sums = Gradients(given, gradient_dtypes(given, spec, planned, parts, False), 1.0)
    for part in parts:
        sums.add(part, g[part.rows])
    exact = g.double().T @ given.x.double()
    found = error(sums.found["weight"], exact) / error(exact.bfloat16(), exact)
    assert found == pytest.approx(((count + 1) / 2) ** 0.5, rel=0.06)
    assert found < 2


# ---------------------------------------------------------------- what only a GPU does


def addmm_of_fakes(add, a, b, **more):
    """``torch.addmm`` of tensors without values. That of torch 2.11 takes out_dtype= for beta, so
    that the operands are checked here."""
    try:
        return ADDMM(add, a, b, **more)
    except TypeError as error:
        if not re.search("multiple values for argument 'beta'|'torch.dtype' and", str(error)):
            raise
    assert (a @ b).shape == add.shape
    assert more["out_dtype"] == more["out"].dtype == add.dtype
    return more["out"]


ADDMM = torch.addmm


@pytest.mark.parametrize("v", [37, 40])
@pytest.mark.parametrize("run", ["total", "evaluation", "chunks", "slices"])
def test_nothing_waits_for_the_gpu(monkeypatch, run, v):
    """Nothing asks for the value of a tensor: these have none, and say so when they are asked.

    They also check what is multiplied with what, for the GEMMs that only GPUs have.
    """
    launches = Launches(monkeypatch)
    # a torch without CUDA has no such tensors on a GPU: these are on the CPU
    monkeypatch.setattr(chunked, "mixed_gemm", lambda x: True)
    monkeypatch.setattr(torch, "addmm", addmm_of_fakes)
    gradients = ("x", "weight", "bias")
    outputs = ("pick", Moment(1, 1))
    total = run == "total"
    spec = Reductions(outputs, gradients=gradients, total=outputs if total else ())
    if run == "evaluation":
        spec = Reductions(outputs)
    given = operands(7, v, torch.bfloat16, bias=torch.bfloat16, total=2 if total else None)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = Operands(*(mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in given))
        out, grads = reductions.forward(fake, spec, plan(rows=3))
        assert len(launches) == 3
        if run in ("chunks", "slices"):
            del launches[:]
            some = plan(rows=3, classes=16, strategy="tiled" if run == "slices" else "chunked")
            grads = reductions.backward(fake, spec, some, out, torch.empty_like(out.rows))
            assert len(launches) == 3
        assert [t.shape for t in grads.values()] == [(7, 5), (v, 5), (v,)][: 3 * len(grads)]
        narrow = torch.bfloat16 if run == "slices" else torch.float32
        # x's is a sum over slices, and over the GEMMs of classes that fill no vector
        of_x = torch.float32 if run == "slices" or v % 8 else torch.bfloat16
        wanted = {"x": of_x, "weight": narrow, "bias": narrow}
        assert {name: t.dtype for name, t in grads.items()} == (
            {} if run == "evaluation" else wanted
        )
        with pytest.raises(DataDependentOutputException):
            fake.x.sum().item()


@pytest.mark.parametrize(
    ("rows", "classes", "dtype", "ends"),
    [
        (1024, 50257, torch.bfloat16, [50256, 50257]),
        (1024, 50257, torch.float32, [50256, 50257]),
        (1024, 50260, torch.float16, [50256, 50260]),
        (1024, 50260, torch.float32, [50260]),
        (1024, 128256, torch.bfloat16, [128256]),
        (1, 50257, torch.bfloat16, [50257]),
        (1024, 5, torch.bfloat16, [5]),
    ],
)
def test_classes_that_fill_no_vector_have_a_gemm(rows, classes, dtype, ends):
    for first in (0, 256):
        part = LogitsPart(slice(0, rows), slice(first, first + classes))
        found = chunked.aligned_classes(part, dtype)
        assert [one.stop - first for one in found] == ends
        assert [one.start - first for one in found] == [0, *ends[:-1]]


class OnGpu:
    """A tensor's dtype and device, without the device."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, dtype):
        self.dtype = dtype


@pytest.mark.parametrize(
    ("dtype", "card", "mixed"),
    [
        (torch.bfloat16, H200, True),
        (torch.bfloat16, A100, True),
        (torch.bfloat16, T4, False),  # PyTorch refuses
        (torch.float16, T4, True),
        (torch.float32, T4, True),
    ],
)
def test_which_gemms_add_to_f32(gpus, dtype, card, mixed):
    """There all classes are multiplied at once."""
    gpus.have(card)
    assert chunked.mixed_gemm(OnGpu(dtype)) == mixed
    assert chunked.mixed_gemm(torch.empty(1, dtype=dtype)) == (dtype == torch.float32)


def test_fp16_sums_and_f32_results_exclude_each_other(gpus):
    gpus.have(H200)
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_fp16_accumulation = matmul.allow_fp16_accumulation, True
    try:
        assert not chunked.mixed_gemm(OnGpu(torch.float16))
    finally:
        matmul.allow_fp16_accumulation = before
    assert chunked.mixed_gemm(OnGpu(torch.float16))


@pytest.mark.parametrize(
    ("library", "mixed"), [("Cublas", True), ("Cublaslt", True), ("Ck", False)]
)
def test_hip_adds_to_f32(gpus, monkeypatch, library, mixed):
    gpus.have(MI300, hip="7.0")
    backend = getattr(torch._C._BlasBackend, library)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: backend)
    assert chunked.mixed_gemm(OnGpu(torch.bfloat16)) == mixed
