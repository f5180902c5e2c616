"""The listing of the kernels of a call: what ``explain`` shows is what is launched."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from fxpass import explain
from fxpass.kernels import call, tile_config
from fxpass.kernels.call import ASSUMED, Gpu, OfReductions, Operand, Operands, for_call
from fxpass.op import runs
from fxpass.plan import plan
from fxpass.rewrite import transform
from fxpass.spec.reductions import REVISION, Reductions
from fxpass.spec.spec import Spec
from tests.support.gpus import H200, MI300, V100
from tests.support.launches import Launches

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
N, D, V = 6, 8, 20
LLAMA = Operands(Operand((8192, 4096), BF16), Operand((128256, 4096), BF16))


def listed(spec, operands=LLAMA, gpu=ASSUMED):
    return runs.launches(Spec.parse(f"v7 {spec}"), operands, gpu)


# ---------------------------------------------------------------- recorded launches


@pytest.fixture
def recorded(monkeypatch):
    """Launches of compiled programs in Triton's interpreter, for which programs are listed too."""
    if torch.cuda.is_available():
        pytest.skip("the GPU's tuner launches every candidate")
    monkeypatch.setattr(
        plan,
        "implementation_for",
        lambda _, dtype: ("aten" if dtype.itemsize == 8 else "triton", ""),
    )
    monkeypatch.setattr(transform, "gpu_for_listing", call.gpu_of)
    return Launches(monkeypatch)


def mean(x, w, y):
    return F.cross_entropy(F.linear(x, w), y)


def everything(x, w, y):
    z = 30 * torch.tanh(F.linear(x, w).float() / 30)
    return F.cross_entropy(z, y, torch.ones(len(w)), label_smoothing=0.1, ignore_index=3)


def summed(x, w, y):
    return F.cross_entropy(F.linear(x, w), y, reduction="sum")


def rows(x, w, y):
    return F.cross_entropy(F.linear(x, w), y, reduction="none").square().sum()


def z_loss(x, w, y):
    z = F.linear(x, w).float()
    return F.cross_entropy(z, y) + 1e-4 * z.logsumexp(-1).square().mean()


def lse_alone(x, w, y):
    return F.linear(x, w).float().logsumexp(-1).sum() + y.sum()


def wide_bias(x, w, y):
    return F.cross_entropy(F.linear(x, w).float() + torch.arange(len(w)) / 8, y)


def probabilities(x, w, y):
    q = F.one_hot(y, len(w)).float() * 0.5
    return F.cross_entropy(F.linear(x, w).float(), q, label_smoothing=0.1)


def logits_too(x, w, y):
    z = F.linear(x, w)
    return F.cross_entropy(z, y), z


PROGRAMS = (
    *(mean, everything, summed, rows, z_loss, lse_alone, wide_bias, probabilities),
    logits_too,
)


def policy(x, w, y):
    """Log-probabilities, an entropy and an accuracy."""
    z = F.linear(x, w).float() / 0.7
    log = z.log_softmax(-1)
    chosen = log.gather(-1, y.unsqueeze(1)).squeeze(1)
    entropy = -(log.exp() * log).sum(-1)
    return (chosen * chosen.detach().exp() + 0.01 * entropy).mean(), z.argmax(-1) == y


def several_picks(x, w, y):
    z = F.linear(x, w).float()
    return z.log_softmax(-1).gather(-1, torch.stack([y, y // 2, y * 0], 1)).square().sum()


def distilled(x, w, y):
    """From given probabilities."""
    q = F.one_hot(y, len(w)).float() * 0.5
    return -(q * F.linear(x, w).float().log_softmax(-1)).sum(-1).square().sum()


def accurate(x, w, y):
    """One kernel: forward computes the gradients of the loss."""
    z = F.linear(x, w).float()
    return F.cross_entropy(z, y), z.argmax(-1) == y


REDUCTIONS = (policy, several_picks, distilled, accurate)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize(
    ("strategy", "v", "dtype"),
    [("auto", 20, F32), ("auto", 16, F16), ("auto", 20000, BF16), ("tiled", 20, F16)],
)
def test_what_is_launched_is_listed(program, v, dtype, strategy, recorded, monkeypatch):
    """In training and in evaluation; the kernels in order, with their options."""
    monkeypatch.setenv("FUSEDCE_STRATEGY", strategy)
    monkeypatch.setenv("FUSEDCE_INNER", "eager")
    x, w = torch.randn(N, D, dtype=dtype), torch.randn(v, D, dtype=dtype)
    y = torch.randint(16, (N,))
    for needs_gradients in (True, False):
        operands = [t.clone().requires_grad_(needs_gradients) for t in (x, w)]
        kernels = explain(program, *operands, y).kernels
        recorded.clear()
        out = torch.compile(program, backend="fusedce")(*operands, y)
        if needs_gradients:
            (out[0] if isinstance(out, tuple) else out).backward()
        assert_listed(kernels, recorded)


def assert_listed(kernels, recorded):
    launched = {launch["kernel"]: launch for launch in recorded}  # once for all chunks
    assert [kernel.name for kernel in kernels] == [kernel.name for kernel in launched]
    for kernel, launch in zip(kernels, launched.values(), strict=True):
        assert kernel.options.items() <= launch.items()
    assert kernels


@pytest.mark.parametrize("program", REDUCTIONS, ids=lambda program: program.__name__)
@pytest.mark.parametrize(("v", "dtype"), [(20, F32), (16, F16), (20000, BF16)])
def test_reductions_that_are_launched_are_listed(program, v, dtype, recorded, monkeypatch):
    monkeypatch.setenv("FUSEDCE_INNER", "eager")
    x, w = torch.randn(N, D, dtype=dtype), torch.randn(v, D, dtype=dtype)
    y = torch.randint(16, (N,))
    for needs_gradients in (True, False):
        operands = [t.clone().requires_grad_(needs_gradients) for t in (x, w)]
        kernels = explain(program, *operands, y).kernels
        recorded.clear()
        out = torch.compile(program, backend="fusedce")(*operands, y)
        if needs_gradients:
            (out[0] if isinstance(out, tuple) else out).backward()
        assert_listed(kernels, recorded)
        assert [kernel.stage for kernel in kernels] == [
            "reductions",
            *["reductions_backward"] * (needs_gradients and program is not accurate),
        ]


# ---------------------------------------------------------------- what it depends on


def test_rows_do_not_matter():
    """With ignored rows left out, the same kernels run; a captured graph runs all rows."""
    for spec in ("reduction=mean gradients=x", "reduction=none gradients=x strategy=tiled"):
        some = [
            listed(spec, LLAMA._replace(x=Operand((n, 4096), BF16))) for n in (1, 2, 100, 896, 8192)
        ]
        assert all(launches == some[0] for launches in some)
    one_row_of_many = Operand((1, 4096), BF16, strides=(1, 1), aligned=False)
    assert listed(spec, LLAMA._replace(x=one_row_of_many)) == some[0]


def test_the_scale_of_a_mean():
    """Forward includes 1 / N, but in fp16, which has no range for it."""
    half = LLAMA._replace(x=Operand((8192, 4096), F16), weight=Operand((128256, 4096), F16))
    for spec, operands, scaled in (
        ("reduction=mean gradients=x", LLAMA, True),
        ("reduction=mean gradients=x", half, False),
        ("reduction=sum gradients=x", LLAMA, False),
        ("reduction=mean", LLAMA, False),
    ):
        (row,) = listed(spec, operands)
        assert ("row_scale" in row.source) == scaled


@pytest.mark.parametrize(
    ("v", "whole", "padded"), [(4096, True, False), (50257, False, True), (128256, False, False)]
)
def test_blocks_of_a_row(v, whole, padded):
    (row,) = listed("reduction=mean", LLAMA._replace(weight=Operand((v, 4096), BF16)))
    assert ("for start in" not in row.source) == whole == (row.options["BLOCK_V"] >= v)
    assert ("padded" in row.source) == padded


def test_a_candidate_is_a_kernel_with_its_options():
    """One block for each row is another kernel."""
    (row,) = listed("reduction=mean", LLAMA._replace(weight=Operand((12000, 4096), BF16)))
    whole = ["for start in" not in candidate.kernel.source for candidate in row.candidates]
    assert whole == [candidate.options["BLOCK_V"] >= 12000 for candidate in row.candidates]
    assert whole == [False, False, False, False, True]


TF32 = ASSUMED._replace(precision="tf32")
A100 = Gpu("A100", "sm_80", 108)
F32S = Operands(Operand((64, 32), F32), Operand((1000, 32), F32))


@pytest.mark.parametrize(
    ("gpu", "operands", "described", "precision"),
    [
        (ASSUMED, LLAMA, True, ""),
        (A100, LLAMA, False, ""),
        (ASSUMED, F32S, True, "ieee"),
        (TF32, F32S, True, "tf32"),
        (ASSUMED, LLAMA._replace(weight=LLAMA.weight._replace(aligned=False)), False, ""),
        (ASSUMED, LLAMA._replace(weight=Operand((128256, 4096), BF16, (4100, 1))), False, ""),
        # copied, to be contiguous
        (ASSUMED, LLAMA._replace(weight=Operand((128256, 4096), BF16, (1, 128256))), True, ""),
        (ASSUMED, LLAMA._replace(x=Operand((9, 4096), BF16, (4100, 1), False)), True, ""),
    ],
)
def test_how_tiles_are_loaded(gpu, operands, described, precision):
    launches = listed("reduction=none gradients=x strategy=tiled", operands, gpu)
    assert [launch.stage for launch in launches] == ["forward", "merge", "backward"]
    for launch in (launches[0], launches[2]):
        assert launch.described == described == ("x.load" in launch.source)
        assert (f'input_precision="{precision}"' in launch.source) == bool(precision)
        configs = tile_config.configs_for(gpu.target, operands.x.dtype, Spec())
        assert [one.options for one in launch.candidates] == [one._asdict() for one in configs]


def test_a_loss_in_float64_has_no_kernels():
    f64 = Operands(Operand((8, 8), torch.float64), Operand((9, 8), torch.float64))
    assert for_call(Spec(), f64, ASSUMED) == ()


def test_reductions_that_aten_computes_have_no_kernels():
    """In float64, and gradients of weights of moments."""
    x, weight = Operand((8, 8), F32), Operand((9, 8), F32)
    wide = (Operand(one.shape, torch.float64) for one in (x, weight))
    for text, operands, there in (
        ("outputs=moment(0,1,0) gradients=x", OfReductions(x, weight, given=(False,)), True),
        (
            "outputs=moment(0,1,0) gradients=x,given0",
            OfReductions(x, weight, given=(False,)),
            False,
        ),
        ("outputs=lse gradients=x", OfReductions(*wide), False),
    ):
        spec = Reductions.parse(f"{REVISION} {text}")
        stages = [one.stage for one in runs.launches_of_reductions(spec, operands, ASSUMED)]
        assert stages == ["reductions", "reductions_backward"] * there


# ---------------------------------------------------------------- the GPU of a listing


def test_the_gpu_of_a_listing(gpus):
    def names(*cards, current=0, **built):
        gpus.have(*cards, **built)
        gpus.current = current
        devices = [torch.device("cpu"), torch.device("cuda"), torch.device("cuda", 0)]
        return [call.gpu_for_listing(device).name for device in devices]

    assert names(H200) == ["NVIDIA H200"] * 3
    assert names(MI300, hip="7.0") == ["MI300X"] * 3
    assert names(V100) == [ASSUMED.name] * 3  # on which the kernels do not run
    assert names(H200, MI300, current=1) == ["MI300X", "MI300X", "NVIDIA H200"]
    assert names() == [ASSUMED.name] * 3
    assert str(ASSUMED) == "sm_90 (an H200, assumed)"


def test_a_call_is_listed_without_triton():
    """The text is the same in every process."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        f"{LISTED}\n"
        "for spec in ('reduction=mean gradients=x', 'reduction=none gradients=x strategy=tiled'):\n"
        "    print(*(launch.source for launch in listed(spec)), sep='')"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
    )
    assert not out.returncode, out.stderr
    specs = ("reduction=mean gradients=x", "reduction=none gradients=x strategy=tiled")
    assert out.stdout == "".join(
        "".join(launch.source for launch in listed(spec)) + "\n" for spec in specs
    )


LISTED = """\
import torch
from fxpass.kernels.call import *
from fxpass.op import runs
from fxpass.spec.spec import Spec

LLAMA = Operands(
    Operand((8192, 4096), torch.bfloat16), Operand((128256, 4096), torch.bfloat16)
)

def listed(spec):
    return runs.launches(Spec.parse(f"v7 {spec}"), LLAMA, ASSUMED)
"""
