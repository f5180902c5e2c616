"""How the chunked implementation walks its chunks: offsets, launch options, GEMMs, CUDA graphs.

What it computes is in ``test_chunked.py``.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fxpass.kernels import call, chunked, render, render_reductions, row_config, tuning
from fxpass.spec.operands import Inputs
from fxpass.spec.reductions import REVISION, Reductions
from fxpass.spec.spec import Spec
from tests.support.allocations import Allocations
from tests.support.gpus import A100, H200, MI300, T4
from tests.support.implementations import DTYPES, GRADIENTS, check, problem
from tests.support.launches import Launches

FAR = 1 << 24  # elements from row to row: row 128 starts at element 2**31


def far_rows(path, rows, v, dtype):
    """``[rows, v]`` in a file of holes, so far apart that their offsets pass 2**31.

    As much room lies before them, so that offsets that wrap around would read and write holes.
    """
    before, size = 1 << 31, (1 << 31) + rows * FAR
    whole = torch.from_file(str(path), shared=True, size=size, dtype=dtype)
    return whole.as_strided((rows, v), (FAR, 1), before)


@pytest.mark.parametrize("target", ["indices", "probabilities"])
def test_offsets_beyond_2_31(tmp_path, target, device):
    """Every program's offset is a product of numbers that fit 32 bits each."""
    if device.type == "cuda":
        pytest.skip("a GPU has no memory with holes")
    rows, v = 131, 16
    inputs = problem("cpu", n=rows, v=v, target=target)
    logits = torch.randn(rows, v)
    chunk = far_rows(tmp_path / "logits", rows, v, torch.float32)
    chunk.copy_(logits)
    if target == "probabilities":
        far = far_rows(tmp_path / "target", rows, v, torch.float32)
        inputs = inputs._replace(target=far.copy_(inputs.target))
    loss = torch.empty(rows)
    kernel = render.row(Spec(target=target, gradients=("x",)), weighted=False)
    arguments = {"logits": chunk, "stride": FAR, "target": inputs.target, "loss": loss, "V": v}
    if target == "probabilities":
        arguments["target_stride"] = FAR
    chunked.load(kernel)[(rows,)](**arguments, BLOCK_V=16, num_warps=1)
    want = F.cross_entropy(logits, inputs.target, reduction="none")
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    one_hot = F.one_hot(inputs.target, v) if target == "indices" else inputs.target
    gradient = (logits.softmax(1) - one_hot) * render.GAIN
    torch.testing.assert_close(chunk.clone(), gradient, rtol=1e-4, atol=1e-2)


@pytest.mark.full
def test_offsets_of_reductions_beyond_2_31(tmp_path, device):
    """Of the logits, and of weights of moments."""
    if device.type == "cuda":
        pytest.skip("a GPU has no memory with holes")
    rows, v = 131, 16
    logits, given = torch.randn(rows, v), torch.rand(rows, v)
    chunk = far_rows(tmp_path / "logits", rows, v, torch.float32)
    far = far_rows(tmp_path / "given", rows, v, torch.float32)
    chunk.copy_(logits)
    far.copy_(given)
    spec = Reductions.parse(f"{REVISION} gradients=x total=moment(0,1,0)")
    kernel = render_reductions.reductions(spec, given=(True,), whole_row=True)
    total, lse, rest = (torch.empty(rows) for _ in range(3))
    chunked.load(kernel)[(rows,)](
        logits=chunk,
        given0=far,
        given0_stride=FAR,
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


@pytest.mark.parametrize(
    ("n", "rows", "starts"),
    [
        (0, 4, []),
        (4100, 4096, [0, 2176]),  # and not 4096 + 4
        (8192, 4096, [0, 4096]),
        (8193, 4096, [0, 2816, 5632]),
        (7, 3, [0, 3, 6]),
        (300, 200, [0, 200]),  # no more than was allowed
        (300, 299, [0, 256]),
        (5, 100, [0]),
        (1, 1, [0]),
    ],
)
def test_chunks(n, rows, starts):
    parts = chunked.chunks(n, rows)
    assert [part.start for part in parts] == starts
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(n))


@pytest.mark.parametrize("n", [1, 127, 128, 129, 1000, 4097, 12289])
@pytest.mark.parametrize("rows", [1, 3, 64, 128, 1000, 4096])
def test_chunks_are_few_and_none_is_too_large(n, rows):
    parts = chunked.chunks(n, rows)
    assert max(part.stop - part.start for part in parts) <= rows
    assert len(parts) <= -(-n // rows)


@pytest.mark.parametrize("rows", [3, 4096])
def test_the_buffer_is_no_larger_than_the_chunks(device, rows):
    v = 1000  # to the next multiple of 16
    inputs = problem(device, n=7, v=v, bias=False)
    with Allocations() as allocations:
        out = chunked.run(inputs, Spec(gradients=("x",)), rows)
    of_gemms = 2 * min(7, rows) * v if device.type == "cpu" else 0  # which have no out= there
    allowed = (min(7, rows) * 1008 + of_gemms) * 4 + 1000
    assert allocations.peak(out) <= allowed


# NumPy's, of memory that holds nan
UNINITIALISED = pytest.mark.filterwarnings("ignore:.* encountered.*:RuntimeWarning")


class Tuner:
    """Stands for Triton's autotuner, which needs a GPU: tries all candidates, takes the last."""

    def __init__(self):
        self.candidates = []

    def best(self, kernel, device, dtype, sizes, candidates, launch):
        for candidate in candidates:
            launch(candidate)
        self.candidates += candidates
        return candidates[-1]


@pytest.fixture
def tuner(monkeypatch):
    tuner = Tuner()
    monkeypatch.setattr(tuning, "best", tuner.best)
    return tuner


@UNINITIALISED
@pytest.mark.parametrize("v", [1, 37, 1000, 8192, 8193, 32000, 50257, 128256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_candidates(v, dtype, device, tuner):
    """The default first, no block twice as large as the row, no more threads than there can be."""
    chunked.run(problem(device, dtype, n=1, v=v), Spec(), rows=1)
    candidates = tuner.candidates
    assert candidates[0] == row_config.row_options(v, dtype)
    assert len(candidates) <= 5
    for options in candidates:
        assert options["BLOCK_V"] < 2 * v
        assert 1 <= options["num_warps"] <= 32
    whole = [options for options in candidates if options["BLOCK_V"] >= v]
    assert bool(whole) == (v <= 1 << 14)


@UNINITIALISED
def test_blocks_are_tuned_in_the_buffer(device, tuner, monkeypatch):
    """Whatever is tried on uninitialised memory (here: nan) leaves nothing behind, and what is
    chosen runs."""
    launches = Launches(monkeypatch, runs=True)
    inputs = problem(device, n=10, v=1500, row_scaled=True, lse_scaled=True)
    inputs.target[1] = -100
    spec = Spec(gradients=GRADIENTS, lse=True)
    check(inputs, spec, rows=4)
    blocks = [launch["BLOCK_V"] for launch in launches]
    tried = [candidate["BLOCK_V"] for candidate in tuner.candidates]
    assert {2048, 1024} <= set(tried)  # whole rows, and parts of them
    assert blocks == [*tried, *[tried[-1]] * 3]  # a launch for each chunk
    # logits that are only read are where they are tried, too
    inputs = inputs._replace(logits=torch.randn(10, 1500, device=device), bias=None)
    copy = inputs.logits.clone()
    out = chunked.run(inputs, Spec(), rows=4)
    assert tuner.candidates[len(tried) :] == tuner.candidates[: len(tried)]
    assert torch.equal(inputs.logits, copy)
    want = F.cross_entropy(copy, inputs.target, reduction="none")
    torch.testing.assert_close(out.loss, want, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("target", ["indices", "probabilities", "none"])
def test_nothing_waits_for_the_gpu(monkeypatch, target, reduction):
    """Nothing asks for the value of a tensor: these have none, and say so when they are asked.

    They also check what is multiplied with what, for the GEMMs that only GPUs have.
    """
    launches = Launches(monkeypatch)
    # a torch without CUDA has no such tensors on a GPU: these are on the CPU
    monkeypatch.setattr(chunked, "_mixed_gemm", lambda x: True)
    monkeypatch.setattr(torch, "addmm", addmm_of_fakes)
    monkeypatch.setattr(call, "aligned", lambda tensor: True)  # these have no address
    inputs = problem(
        "cpu",
        torch.bfloat16,
        target=target,
        weighted=target != "none",
        row_scaled=True,
        lse_scaled=True,
    )
    spec = Spec(reduction=reduction, target=target, gradients=GRADIENTS, lse=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = Inputs(*(None if t is None else mode.from_tensor(t) for t in inputs))
        out = chunked.run(fake, spec, rows=3)
        assert [t.shape for t in out[2:5]] == [(7, 5), (37, 5), (37,)]
        assert {t.dtype for t in out[:5]} == {torch.float32}
        assert len(launches) == 3
        with pytest.raises(DataDependentOutputException):
            fake.x.sum().item()


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
    """All classes are multiplied at once where they can be added to an f32 result."""
    gpus.have(card)
    assert at_once(OnGpu(dtype)) == mixed
    assert at_once(torch.empty(1, dtype=dtype)) == (dtype == torch.float32)


def at_once(x) -> bool:
    return len(list(chunked.class_tiles(x, 128256))) == 1


def test_fp16_sums_and_f32_results_exclude_each_other(gpus):
    gpus.have(H200)
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_fp16_accumulation = matmul.allow_fp16_accumulation, True
    try:
        assert not at_once(OnGpu(torch.float16))
    finally:
        matmul.allow_fp16_accumulation = before
    assert at_once(OnGpu(torch.float16))


@pytest.mark.parametrize(
    ("library", "mixed"), [("Cublas", True), ("Cublaslt", True), ("Ck", False)]
)
def test_hip_adds_to_f32(gpus, monkeypatch, library, mixed):
    gpus.have(MI300, hip="7.0")
    backend = getattr(torch._C._BlasBackend, library)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: backend)
    assert at_once(OnGpu(torch.bfloat16)) == mixed
