"""How logits are computed in parts: offsets, buffers, launch options, GEMMs, roundings.

What is computed is in ``test_reductions.py``.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fxpass.kernels import call, chunked, reductions, render, tuning
from fxpass.kernels.chunked import Gradients, Part, dtypes_of
from fxpass.plan.plan import MOST_ROUNDED, Plan
from fxpass.spec import expression
from fxpass.spec.operands import Operands
from fxpass.spec.outputs import Moment
from fxpass.spec.reductions import REVISION, Reductions
from tests.support import without_data
from tests.support.allocations import Allocations
from tests.support.gpus import A100, H200, MI300, T4
from tests.support.launches import Launches
from tests.support.numerics import error

# NumPy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def operands(n, v, dtype=torch.float32, d=5, bias=None, total=None, **more) -> Operands:
    """Of picks, and coefficients of a total of so many outputs."""
    x, weight, picks = torch.randn(n, d), torch.randn(v, d), torch.randint(v, (n,))
    bias = None if bias is None else torch.randn(v).to(bias)
    coef = None if total is None else torch.randn(total, n)
    given = Operands(x.to(dtype), weight.to(dtype), bias, None, picks, (), coef)
    return given._replace(**more)


def plan(rows: int = 4096, classes: int = 1 << 20, strategy: str = "tiled") -> Plan:
    return Plan("triton", strategy, rows=rows, classes=classes)


LOSS = Reductions((), gradients=("x", "weight"), total=("pick",))
EVALUATED = Reductions((), total=("pick",))
ROWS = Reductions(("pick", "lse"), gradients=("x", "weight", "bias"))

FAR = 1 << 24  # elements from row to row: row 128 starts at element 2**31


def far_rows(path, rows, v, dtype):
    """``[rows, v]`` in a file of holes, so far apart that their offsets pass 2**31.

    As much room lies before them, so that offsets that wrap around would read and write holes.
    """
    before, size = 1 << 31, (1 << 31) + rows * FAR
    whole = torch.from_file(str(path), shared=True, size=size, dtype=dtype)
    return whole.as_strided((rows, v), (FAR, 1), before)


def test_offsets_beyond_2_31(tmp_path, device):
    """Of the logits, and of weights of moments: products of numbers that fit 32 bits each."""
    if device.type == "cuda":
        pytest.skip("a GPU has no memory with holes")
    rows, v = 131, 16
    logits, given = torch.randn(rows, v), torch.rand(rows, v)
    chunk = far_rows(tmp_path / "logits", rows, v, torch.float32)
    far = far_rows(tmp_path / "given", rows, v, torch.float32)
    chunk.copy_(logits)
    far.copy_(given)
    spec = Reductions.parse(f"{REVISION} gradients=x total=moment(0,1,0)")
    kernel = render.reductions(spec, given=(True,), whole_row=True)
    total, lse, rest = (torch.empty(rows) for _ in range(3))
    chunked.load(kernel)[(rows,)](
        logits=chunk,
        given0=far,
        given0_stride=FAR,
        given0_step=1,
        lse=lse,
        rest=rest,
        incoming=torch.ones(1, rows),
        total=total,
        stride=FAR,
        N=rows,
        V=v,
        BLOCK_V=16,
        num_warps=1,
    )
    log = logits.log_softmax(1)
    torch.testing.assert_close(total, (given * log).sum(1), rtol=1e-5, atol=1e-5)
    gradient = (given - log.exp() * given.sum(1, keepdim=True)) * render.GAIN
    torch.testing.assert_close(chunk.clone(), gradient, rtol=1e-4, atol=1e-2)


# ---------------------------------------------------------------- how it is walked


@pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 1000, 4097, 12289])
@pytest.mark.parametrize("rows", [1, 3, 64, 128, 1000, 4096])
def test_chunks_and_slices_are_few_and_none_is_too_large(n, rows):
    parts = chunked.chunks(without_data.operands(n, 1, 9, torch.float32), rows)
    assert all(part.classes == slice(0, 9) for part in parts)
    some = chunked.slices(without_data.operands(9, 1, n, torch.float32), rows)
    assert all(part.rows == slice(0, 9) for part in some)
    for found in ([part.rows for part in parts], [part.classes for part in some]):
        assert [i for one in found for i in range(one.start, one.stop)] == list(range(n))
        assert all(one.stop - one.start <= rows for one in found)
        assert len(found) <= -(-n // rows)


@pytest.mark.parametrize("rows", [3, 4096])
def test_the_buffer_is_no_larger_than_the_chunks(device, rows):
    v = 1000  # to the next multiple of 16
    with device:
        given = operands(7, v, total=1)
    spec = Reductions((), gradients=("x",), total=("pick",))
    with Allocations() as allocations:
        out, grads = reductions.forward(given, spec, plan(rows))
    of_gemms = 2 * min(7, rows) * v if device.type == "cpu" else 0  # which have no out= there
    allowed = (min(7, rows) * 1008 + of_gemms) * 4 + 1000
    assert allocations.peak([*out, *grads.values()]) <= allowed


@pytest.mark.parametrize("classes", [100, 4096])
def test_the_buffer_is_no_larger_than_a_slice(device, classes):
    v = 1000
    with device:
        given = operands(7, v)
        out, _ = reductions.forward(given, ROWS, plan())
        incoming = torch.ones_like(out.rows)
    with Allocations() as allocations:
        grads = reductions.backward(given, ROWS, plan(classes=classes), out, incoming)
    columns = min(1008, -(-classes // 16) * 16)
    of_gemms = 2 * 7 * min(v, classes) if device.type == "cpu" else 0
    of_bias = columns  # its sum of the rows
    bound = (7 * columns + of_gemms + of_bias) * 4 + 1000
    assert allocations.peak([*grads.values()]) <= bound


class Tuner:
    """Stands for the tuner, which needs a GPU: tries all candidates, takes the last."""

    def __init__(self):
        self.candidates = []

    def best(self, kernel, device, dtype, sizes, candidates, launch):
        for candidate in candidates:
            launch(candidate)
        self.candidates += [candidate.options for candidate in candidates]
        return candidates[-1]


@pytest.fixture
def tuner(monkeypatch):
    tuner = Tuner()
    monkeypatch.setattr(tuning, "best", tuner.best)
    return tuner


@pytest.mark.parametrize("v", [1, 1000, 8193, 50257])
@pytest.mark.parametrize("dtype", DTYPES)
def test_candidates(v, dtype, device, tuner):
    """The default first, no block twice as large as the row, no more threads than there can be."""
    with device:
        given = operands(1, v, dtype)
        out, _ = reductions.forward(given, ROWS, plan())
        forward = len(tuner.candidates)
        reductions.backward(given, ROWS, plan(), out, torch.ones_like(out.rows))
    check_candidates(tuner.candidates[:forward], v, call.blocks(v, dtype, "sm_90", ROWS))
    sliced = call.blocks(v, dtype, "sm_90", ROWS, sliced=True)
    check_candidates(tuner.candidates[forward:], v, sliced)


def check_candidates(candidates, v, blocks) -> None:
    block, warps = blocks[0]
    assert {"BLOCK_V": block, "num_warps": warps}.items() <= candidates[0].items()
    assert len(candidates) <= 5
    for options in candidates:
        assert options["BLOCK_V"] < 2 * v
        assert 1 <= options["num_warps"] <= 32
        if "LANES" in options:  # of which a block has all
            assert options["LANES"] * options["VECTOR"] <= options["BLOCK_V"] < v
    whole = [options for options in candidates if options["BLOCK_V"] >= v]
    assert bool(whole) == (v <= 1 << 14)


@pytest.mark.parametrize("given_logits", [False, True])
def test_blocks_are_tuned_in_the_buffer(device, tuner, monkeypatch, given_logits):
    """Whatever is tried on uninitialised memory (here: nan) leaves nothing behind, and what is
    chosen runs; so do logits that are only read."""
    launches = Launches(monkeypatch, runs=True)
    with device:
        x, w = torch.randn(10, 5), torch.randn(1500, 5)
        logits = x @ w.T if given_logits else None
        given = operands(10, 1500, total=1, x=x, weight=w, logits=logits)
        for spec in (LOSS, EVALUATED):
            del launches[:], tuner.candidates[:]
            out, grads = reductions.forward(given, spec, plan(rows=4))
            blocks = [launch["BLOCK_V"] for launch in launches]
            tried = [candidate["BLOCK_V"] for candidate in tuner.candidates]
            assert {2048, 1024} <= set(tried)  # whole rows, and parts of them
            assert blocks == [*tried, *[tried[-1]] * 3]  # a launch for each chunk
            assert given.coef is not None
            assert given.picks is not None
            loss = -F.cross_entropy(x @ w.T, given.picks, reduction="none") * given.coef[0]
            torch.testing.assert_close(out.total, loss, rtol=1e-5, atol=1e-5)
            assert all(grad.isfinite().all() for grad in grads.values())
        backward = Reductions(("pick",), gradients=("x", "scale"))
        scaled = given._replace(coef=None, scale=torch.rand(10))
        out, _ = reductions.forward(scaled, backward, plan())
        found = [
            reductions.backward(scaled, backward, plan(classes=some), out, torch.ones(1, 10))
            for some in (1500, 400)
        ]
    for name in ("x", "scale"):  # what is tried is not added
        assert error(found[1][name], found[0][name]) < 1e-5
    assert logits is None or torch.equal(logits, x @ w.T)


@pytest.mark.parametrize("shape", [(3, 5, 37), (3, 5, 8200)], ids=["whole", "blocked"])
def test_one_value_of_each_row_is_not_copied(device, shape):
    n, d, v = shape
    with device:
        x, weight, row = torch.randn(n, d), torch.randn(v, d), torch.randn(n, 1)
        bias = torch.randn(1).expand(v)
    values = row.expand(n, v), torch.randn(v, device=device), row.square().expand(n, v)
    spec = Reductions(("lse", Moment(1, 0, 2)), expression.parse("z-given0*given1"), ("x",))
    given = Operands(x, weight, bias, None, None, values)
    with Allocations() as allocations:
        out, _ = reductions.forward(given, spec, plan(rows=1))
    of_gemms = v if device.type == "cpu" else 0  # which has no out= there
    assert allocations.peak(out) <= (v + 16 + of_gemms) * 4 + 1000
    z = x.double() @ weight.double().T + bias
    want = torch.stack([(z - row * values[1]).logsumexp(1), row.squeeze(1) ** 2])
    torch.testing.assert_close(out.rows, want.float(), rtol=1e-5, atol=1e-4)


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_rounded_once_however_many_slices_there_are(dtype, device, monkeypatch):
    """To the dtypes of the weight and of the bias; the others are sums."""
    monkeypatch.setattr(chunked, "_F32_BYTES", 4 * 16 * 20)  # several passes behind an f32 result
    with device:
        given = operands(24, 90, dtype, d=16, bias=dtype)._replace(scale=torch.rand(24))
    spec = Reductions(("lse", "pick", Moment(1, 1)), gradients=("x", "weight", "bias", "scale"))
    answers = []
    for classes in (16, 90, 1 << 20):
        out, _ = reductions.forward(given, spec, plan(classes=classes))
        incoming = torch.ones_like(out.rows)
        answers.append(reductions.backward(given, spec, plan(classes=classes), out, incoming))
    many, one, more = answers
    assert all(torch.equal(one[name], more[name]) for name in one)
    assert {name: grad.dtype for name, grad in many.items()} == {
        **{"x": torch.float32, "weight": dtype, "bias": dtype, "scale": torch.float32}
    }
    for name in ("weight", "bias"):
        assert error(many[name], one[name]) < (1e-6 if dtype == torch.float32 else 1e-4)
    # in f32 the order of a sum hardly shows behind one rounding; six roundings are off by 2e-3
    for name in ("x", "scale"):
        assert error(many[name], one[name]) < 2e-4


@pytest.mark.parametrize(("v", "added"), [(37, [False]), (200, [False, True, True])])
def test_the_first_slice_overwrites_the_gradient_of_x(v, added, device, monkeypatch):
    """An addmm of one row may read an f32 sum as 16 bits; all its classes are one slice."""
    adds, product = [], chunked.product
    monkeypatch.setattr(
        chunked, "product", lambda *args, add: (adds.append(add), product(*args, add))[1]
    )
    spec = Reductions(("pick",), gradients=("x",))
    with device:
        given = operands(1, v, d=8)
        out, _ = reductions.forward(given, spec, plan(classes=80))
        reductions.backward(given, spec, plan(classes=80), out, torch.ones(1, 1))
    assert adds == added


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unrounded", [(), ("weight",), ("x", "weight")])
@pytest.mark.parametrize("way", ["chunks", "rounded chunks", "slices"])
def test_products(device, dtype, way, unrounded, monkeypatch):
    """Of parts of a gradient: their sums are those of the whole."""
    monkeypatch.setattr(chunked, "UPCAST_CLASSES", 16)  # some at a time, where they are up-cast
    with device:
        given = operands(6, 50, dtype, d=7, bias=dtype)
        g = torch.randn(6, 64).to(dtype)[:, :50]  # rows are padded
    spec, sliced = replace(ROWS, unrounded=unrounded), way == "slices"
    starts = range(0, 50, 20) if sliced else range(0, 6, 4)
    parts = [
        Part(slice(0, 6), slice(i, min(i + 20, 50)))
        if sliced
        else Part(slice(i, min(i + 4, 6)), slice(0, 50))
        for i in starts
    ]
    unscale = torch.tensor(0.5, device=device) if sliced else None
    planned = plan()._replace(rounded=way == "rounded chunks")
    sums = Gradients(given, dtypes_of(given, spec, planned, parts, sliced), 4.0, unscale)
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
    parts, planned = chunked.chunks(given, 384 // count), plan()._replace(rounded=True)
    spec = replace(ROWS, gradients=("weight",))
    sums = Gradients(given, dtypes_of(given, spec, planned, parts, False), 1.0)
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
    outputs = ("pick", Moment(1, 1), *["max"] * (run == "chunks"))
    total = run in ("total", "evaluation")
    spec = Reductions(() if total else outputs, gradients=gradients, total=outputs if total else ())
    if run == "evaluation":
        spec = Reductions((), total=outputs)
    given = operands(7, v, torch.bfloat16, bias=torch.bfloat16, total=2 if total else None)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = Operands(*(mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in given))
        out, grads = reductions.forward(fake, spec, plan(rows=3))
        assert len(launches) == 3
        if not total:
            del launches[:]
            some = plan(rows=3, classes=16)
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
        part = Part(slice(0, rows), slice(first, first + classes))
        found = chunked.gemms_of(part, dtype)
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


def test_a_row_that_is_heavy_is_not_kept_in_registers():
    """Weights, a transform or the gradient of a scale need registers for each logit."""
    for outputs, transform, scaled, whole in (
        (["pick", Moment(1, 1)], "z", False, True),
        (["pick", Moment(1, 1)], "z", True, False),
        (["lse"], "3*tanh(z/3)", False, False),
        ([Moment(0, 1, 1)], "z", False, False),
    ):
        gradients = ("x", "scale") if scaled else ("x",)
        spec = Reductions(tuple(outputs), expression.parse(transform), gradients)
        found = call.blocks(16032, torch.bfloat16, "sm_90", spec)
        assert any(block >= 16032 for block, _ in found) == whole


def test_source_is_a_file(device):
    kernel = render.reductions(Reductions(("lse",)))
    function = chunked.load(kernel)
    with open(function.fn.__code__.co_filename) as file:
        assert file.read().strip() == kernel.source.strip()
    assert chunked.load(render.reductions(Reductions(("lse",)))) is function
