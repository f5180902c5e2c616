"""The listing of the kernels of a call: what ``explain`` shows is what is launched."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from fxpass import explain
from fxpass.formula import expression
from fxpass.formula.outputs import Moment
from fxpass.formula.reductions import Reductions
from fxpass.kernels import call
from fxpass.kernels.call import ASSUMED, for_reductions, launches
from fxpass.op import rows
from fxpass.plan import plan
from tests.support.gpus import H200, MI300, V100
from tests.support.launches import Launches
from tests.support.specs import spec_of
from tests.support.without_data import operands

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
N, D, V = 6, 8, 20
LLAMA = operands(8192, 4096, 128256, BF16, picks=1)


def listed(text, of_call=LLAMA, gpu=ASSUMED):
    return launches(spec_of(text), of_call, gpu)


# ---------------------------------------------------------------- recorded launches


@pytest.fixture
def recorded(monkeypatch):
    """Launches of compiled programs in Triton's interpreter, for which programs are listed too."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    monkeypatch.setattr(
        plan,
        "implementation_for",
        lambda _, dtype: ("aten" if dtype.itemsize == 8 else "triton", ""),
    )
    monkeypatch.setattr(rows, "gpu_for_listing", call.gpu_of)
    return Launches(monkeypatch)


def everything(x, w, y):
    z = 30 * torch.tanh(F.linear(x, w).float() / 30)
    weights = torch.arange(len(w)) / len(w)
    loss = F.cross_entropy(z, y, weights, label_smoothing=0.1, ignore_index=3)
    return loss, z.argmax(-1) == y


def policy(x, w, y):
    """Log-probabilities, an entropy and an accuracy."""
    z = F.linear(x, w).float() / 0.7
    log = z.log_softmax(-1)
    chosen = log.gather(-1, y.unsqueeze(1)).squeeze(1)
    entropy = -(log.exp() * log).sum(-1)
    return (chosen * chosen.detach().exp() + 0.01 * entropy).mean(), z.argmax(-1) == y


def metrics(x, w, y):
    """Log-probabilities, and under no_grad a moment and an accuracy."""
    log = F.linear(x, w).float().log_softmax(-1)
    chosen = log.gather(-1, y.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        read = (log.exp() * torch.ones(len(w))).sum(-1), log.argmax(-1) == y
    return chosen.square().sum(), *read


def several_picks(x, w, y):
    z = F.linear(x, w).float()
    return z.log_softmax(-1).gather(-1, torch.stack([y, y // 2], 1)).square().sum()


# Soft targets that programs are given: what they compute of all classes may take another loop.
GIVEN = torch.rand(N, 20001)


def distilled(x, w, y):
    return -(GIVEN[:, : len(w)] * F.linear(x, w).float().log_softmax(-1)).sum(-1).mean()


def plain(x, w, y):
    return F.cross_entropy(F.linear(x, w), y)


def smoothed(x, w, y):
    weights = (torch.arange(len(w)) / len(w)).to(w.dtype)
    return F.cross_entropy(F.linear(x, w), y, weights, label_smoothing=0.1, reduction="sum")


def probabilities(x, w, y):
    return F.cross_entropy(F.linear(x, w), GIVEN[:, : len(w)])


def with_lse(x, w, y):
    z = F.linear(x, w)
    return F.cross_entropy(z, y) + 1e-4 * z.logsumexp(-1).square().mean()


IN_FORWARD = (everything, plain, smoothed, probabilities, distilled)
PROGRAMS = (policy, metrics, several_picks, with_lse, *IN_FORWARD)


def assert_listed(kernels, recorded):
    launched = {launch["kernel"]: launch for launch in recorded}  # once for all chunks
    assert [kernel.name for kernel in kernels] == [kernel.name for kernel in launched]
    for kernel, launch in zip(kernels, launched.values(), strict=True):
        assert kernel.options.items() <= launch.items()
    assert kernels


@pytest.mark.parametrize(
    ("program", "v", "dtype"),
    [
        *((program, 20, F32) for program in PROGRAMS),
        *((program, 20000, BF16) for program in PROGRAMS),
        *((program, 16, F16) for program in (plain, policy)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_launched_is_listed(program, v, dtype, recorded, monkeypatch):
    """In training and in evaluation; the kernels in order, with their options."""
    monkeypatch.setenv("FUSEDCE_INNER", "eager")
    x, w = torch.randn(N, D, dtype=dtype), torch.randn(v, D, dtype=dtype)
    y = torch.randint(16, (N,))
    for needs_gradients in (True, False):
        given = [t.clone().requires_grad_(needs_gradients) for t in (x, w)]
        kernels = explain(program, *given, y).kernels
        recorded.clear()
        out = torch.compile(program, backend="fusedce")(*given, y)
        if needs_gradients:
            (out[0] if isinstance(out, tuple) else out).backward()
        assert_listed(kernels, recorded)
        # f32 gradients of fp16 operands would take more than the few logits: backward computes all
        later = "class_reductions" if dtype == F16 else "class_reductions_backward"
        waits = program not in IN_FORWARD or dtype == F16
        assert [kernel.name.rpartition("_")[0] for kernel in kernels] == [
            "class_reductions",
            *[later] * (needs_gradients and waits),
        ]


# ---------------------------------------------------------------- what it depends on


BACKWARD = "outputs=pick gradients=x,weight"


LARGEST = "outputs=lse;max gradients=x detached=max"


@pytest.mark.parametrize("text", [BACKWARD, "gradients=x total=pick", LARGEST])
def test_rows_do_not_matter(text):
    """With rows left out, the same kernels run; a captured graph runs all rows."""
    some = [listed(text, operands(n, 4096, 128256, BF16, picks=1)) for n in (1, 2, 100, 896, 8192)]
    assert all(launches == some[0] for launches in some)


@pytest.mark.parametrize("v", [12000, 6000])
def test_a_row_that_is_one_block_has_another_kernel(v):
    for one in listed(BACKWARD, operands(8192, 4096, v, BF16, picks=1)):
        whole = "for start in" not in one.source
        assert whole == (one.options["BLOCK_V"] >= v) == (v == 6000)


@pytest.mark.parametrize("v", [1, 1000, 8193, 50257])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_sizes_of_a_launch(v, dtype):
    """No block twice as large as the row, no more threads than there can be."""
    spec = spec_of("outputs=pick;lse gradients=x,weight,bias")
    for one in launches(spec, operands(1, 5, v, dtype, dtype, picks=1), ASSUMED):
        sliced = "backward" in one.name
        block, warps = call.block_of(v, dtype, spec, sliced)
        assert {"BLOCK_V": block, "num_warps": warps}.items() <= one.options.items()
        assert block < 2 * v
        assert 1 <= warps <= 16
        if "LANES" in one.options:  # of which a block has all
            assert one.options["LANES"] * one.options["VECTOR"] <= block < v


def test_a_thread_has_fewer_logits_of_a_heavy_row():
    """Weights or a transform need registers for each logit."""
    for outputs, transform, light in (
        (["pick", Moment(1, 1)], "z", True),
        (["lse"], "3*tanh(z/3)", False),
        ([Moment(0, 1, 1)], "z", False),
    ):
        spec = Reductions(tuple(outputs), expression.parse(transform), ("x",))
        assert (call.block_of(128256, BF16, spec)[0] == 1 << 14) == light


@pytest.mark.parametrize(("bias", "added"), [(None, False), (BF16, False), (F32, True)])
def test_who_adds_the_bias(bias, added):
    """The kernel, if the GEMM would round it."""
    for one in listed(BACKWARD, operands(8192, 4096, 128256, BF16, bias, picks=1)):
        assert ("tl.load(bias" in one.source) == added


def test_reductions_that_aten_computes_have_no_kernels():
    """In float64."""
    one = operands(8, 8, 9, F32, given=(False,))
    for text, of_call, there in (
        ("outputs=moment(0,1,0) gradients=x", one, True),
        ("outputs=lse gradients=x", operands(8, 8, 9, torch.float64), False),
    ):
        names = [launch.name.rpartition("_")[0] for launch in listed(text, of_call)]
        assert names == ["class_reductions", "class_reductions_backward"] * there


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


TEXTS = (BACKWARD, "gradients=x total=pick")
PRINTS = """
import sys
sys.modules["triton"] = None
import torch
from fxpass.kernels.call import ASSUMED, launches
from tests.support.without_data import operands
from tests.support.specs import spec_of
llama = operands(8192, 4096, 128256, torch.bfloat16, picks=1)
for text in sys.argv[1:]:
    print(*(one.source for one in launches(spec_of(text), llama, ASSUMED)), sep="")
"""


def test_a_call_is_listed_without_triton():
    """The text is the same in every process."""
    environ = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", PRINTS, *TEXTS]
    out = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert not out.returncode, out.stderr
    assert out.stdout == "".join(
        "".join(one.source for one in listed(text)) + "\n" for text in TEXTS
    )


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ("outputs=argmax;pick transform=30*tanh(z/30)", True),
        ("outputs=max transform=2*z+1", True),
        ("outputs=pick transform=30*tanh(z/30)", False),
        ("outputs=argmax;pick", False),  # what is compared is read, not computed
    ],
)
def test_logits_that_passes_compare_are_computed_alike(text, exact):
    """Without products and sums that are fused in one pass and not in the other."""
    spec = spec_of(text)
    (launch,) = for_reductions(spec, operands(8192, 4096, 128256, BF16, picks=1), ASSUMED)
    assert launch.options.get("enable_fp_fusion") is (False if exact else None)


@pytest.mark.parametrize(
    ("text", "barrier"),
    [
        ("outputs=at gradients=x total=at", True),
        ("gradients=x total=lse", False),
        ("outputs=at", False),
    ],
)
def test_a_picked_logit_is_read_before_it_is_overwritten(text, barrier):
    """By another warp: where no pass over the row comes first, nothing else waits for it."""
    spec = spec_of(text)
    given = operands(64, 8, 128256, BF16, picks=1 if spec.reads_picks else 0)
    given = given._replace(coef=torch.empty(1, 64, device="meta") if spec.total else None)
    (launch,) = for_reductions(spec, given, ASSUMED)
    assert ("tl.debug_barrier()" in launch.source) == barrier
