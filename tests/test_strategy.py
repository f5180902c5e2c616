"""The choice between the strategies."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys

import expecttest
import pytest
import torch
from planned import BF16, BOTH, CPU, CUDA, F32, F64, GIB, HEADS
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxpass import cost, rates, strategy
from fxpass.cost import MIB
from fxpass.rates import NOMINAL
from fxpass.schedule import budget, work_of
from fxpass.spec import Spec
from fxpass.strategy import choose


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("n", [1024, 4096, 32768])
@pytest.mark.parametrize("gradients", [BOTH, ()])
def test_an_h200_takes_chunks(head, n, gradients, h200):
    got = choose(n, *HEADS[head], BF16, CUDA, Spec(gradients=gradients), "auto")
    assert got.strategy == "chunked"
    first, second = got.predictions()
    assert first.seconds < second.seconds
    floor = (6 if gradients else 2) * n * HEADS[head][0] * HEADS[head][1] / (0.75 * 989.4e12)
    assert floor < first.seconds < 2 * floor
    assert first.scratch <= 1.25 * GIB


@pytest.mark.parametrize(
    ("device", "dtype", "bytes_each"), [(CUDA, BF16, 4 + 2), (CUDA, F32, 4 + 4), (CPU, F32, 0)]
)
def test_scaling_the_gradients_counts(device, dtype, bytes_each, h200, monkeypatch):
    """The end of a backward after ``chunked``; a CPU sees where there is nothing to multiply by."""
    if device == CPU:
        monkeypatch.setattr(strategy, "lowering_for", lambda *_: ("aten", "for the test"))
    n, d, v, rated = 4096, 4096, 128256, NOMINAL[device.type]
    choice = choose(n, d, v, dtype, device, Spec(gradients=BOTH), "chunked")
    got = choice.predict("chunked", rated)
    lowering, _ = strategy.lowering_for(device, dtype)
    work = work_of(n, d, v, dtype, device, lowering, choice.spec, BOTH)
    run = cost.seconds(lowering, "chunked", work, got.rows, got.classes, rated)
    assert got.seconds - run == pytest.approx(bytes_each * (n + v) * d / rated.bandwidth)


@pytest.mark.parametrize(
    ("n", "memory_mb", "gradients", "expected"),
    [
        (8192, 256, BOTH, "chunked"),  # dW's traffic costs less than computing logits again
        (8192, 256, (), "chunked"),
        (1024, 32, BOTH, "tiled"),  # 128 rows: the traffic costs more
        (8192, 32, (), "tiled"),
        (8192, 32, BOTH, "chunked"),  # tiled needs an f32 dX, which is over that budget
    ],
)
def test_an_h200_with_a_small_budget(n, memory_mb, gradients, expected, h200):
    spec = Spec(gradients=gradients, memory_mb=memory_mb)
    got = choose(n, 4096, 128256, BF16, CUDA, spec, "auto")
    assert got.strategy == expected
    assert got.predictions()[0].scratch <= memory_mb * MIB


# of the README's and the shapes, and two more
CPU_CASES = [(2048, 512, 32000), (1024, 1024, 128256), (2048, 768, 50257), (8192, 2048, 128256)]


@pytest.mark.parametrize(("n", "d", "v"), CPU_CASES)
@pytest.mark.parametrize(
    ("dtype", "spec", "expected"),
    [
        (F32, Spec(gradients=BOTH), "chunked"),  # 6 against 8 times N·D·V
        (F64, Spec(gradients=BOTH), "chunked"),
        (BF16, Spec(gradients=BOTH), "tiled"),  # no f32 gradient of the weight
        (torch.float16, Spec(gradients=("weight",)), "tiled"),
        (F32, Spec(), "tiled"),  # the weight is read once, not once per chunk
        (BF16, Spec(), "tiled"),
        (F32, Spec(reduction="none", gradients=BOTH), "tiled"),  # 8 against 8
        (F32, Spec(lse=True, gradients=BOTH), "tiled"),
    ],
)
def test_a_cpu_chooses(n, d, v, dtype, spec, expected, typical_cpu):
    got = choose(n, d, v, dtype, CPU, spec, "auto")
    assert got.strategy == expected
    assert got.predictions()[0].scratch <= budget(v, dtype, CPU, 0)


@pytest.mark.parametrize("factor", list(itertools.product((0.5, 1, 2), repeat=3)))
def test_a_cpu_chooses_the_same_with_other_rates(factor, monkeypatch):
    """Twice or half the arithmetic, bandwidth and softmax of a typical one."""
    usual = NOMINAL["cpu"]
    found = usual._replace(
        flops=usual.flops * factor[0],
        bandwidth=usual.bandwidth * factor[1],
        elements=usual.elements * factor[2],
    )
    monkeypatch.setattr(rates, "_cpu_rates", lambda _: found)
    for (n, d, v), dtype in itertools.product(CPU_CASES[1:], (F32, BF16)):
        got = choose(n, d, v, dtype, CPU, Spec(gradients=BOTH), "auto")
        assert got.strategy == ("chunked" if dtype == F32 else "tiled")


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("gradients", [BOTH, ()])
def test_what_fits_whole_is_one_chunk_and_nothing_is_measured(dtype, gradients, monkeypatch):
    monkeypatch.setattr(rates, "device_rates", lambda *_: pytest.fail("asked"))
    got = choose(100, 64, 1000, dtype, CPU, Spec(gradients=gradients), "auto")
    assert (got.strategy, got.reason) == ("chunked", "one chunk is within the budget")


@pytest.mark.parametrize("setting", ["auto", "chunked", "tiled"])
def test_logits_that_exist_are_taken_in_chunks(setting, monkeypatch):
    monkeypatch.setattr(rates, "device_rates", lambda *_: NOMINAL["cpu"])
    spec = Spec(gradients=BOTH)
    got = choose(8192, 2048, 128256, BF16, CPU, spec, setting, kept=True)
    assert (got.strategy, got.reason) == ("chunked", "the logits exist anyway")
    (only,) = got.predictions()
    assert (
        only.seconds
        < choose(8192, 2048, 128256, BF16, CPU, spec, setting)
        .predict("chunked", NOMINAL["cpu"])
        .seconds
    )  # a product less


@pytest.mark.parametrize("setting", ["chunked", "tiled"])
def test_a_setting_decides(setting, monkeypatch):
    monkeypatch.setattr(rates, "device_rates", lambda *_: pytest.fail("asked"))
    for n in (10, 10**5):
        got = choose(n, 2048, 128256, BF16, CPU, Spec(gradients=BOTH), setting)
        assert (got.strategy, got.reason) == (setting, "as set")


# an eighth of Llama-3-8B's classes
SHARD = Spec(gradients=BOTH, shard_of=128256).of_shard()


@pytest.mark.parametrize(
    ("n", "memory_mb", "saved", "left"),
    [
        (1024, 0, True, 0),
        (4096, 0, True, 0),
        (16384, 0, True, 0),
        (32768, 0, False, 0),
        (32768, 3000, True, 3000),
        (1024, 256, True, 256),
        (8192, 256, False, 256),
    ],
)
def test_a_shards_logits_are_saved_within_half_of_the_budget(n, memory_mb, saved, left, h200):
    spec = dataclasses.replace(SHARD, memory_mb=memory_mb)
    got = choose(n, 4096, 16032, BF16, CUDA, spec, "auto")
    assert (got.saved, got.spec.memory_mb) == (saved, left)
    best, *others = got.predictions()
    assert best.scratch <= budget(16032, BF16, CUDA, memory_mb)
    assert bool(others) != saved
    # a product less than to compute them again
    again = dataclasses.replace(got, saved=False).predict("chunked", NOMINAL["cuda"])
    if saved:
        now = got.predict("chunked", NOMINAL["cuda"])
        assert 0.7 * again.seconds < now.seconds < 0.85 * again.seconds


def test_what_saved_logits_leave_of_the_budget(h200):
    """Alone the operator would take more than what 511 MiB of logits leave of 1024."""
    got = choose(25434, 2048, 10546, BF16, CUDA, SHARD, "auto")
    assert (got.saved, got.spec.memory_mb) == (True, 512)
    assert 512 * MIB < got.predictions()[0].scratch < 1024 * MIB


@pytest.mark.parametrize(
    ("dtype", "spec", "setting", "saved"),
    [
        (F32, SHARD, "auto", True),
        (F64, SHARD, "auto", True),
        (F32, SHARD, "chunked", False),
        (F32, SHARD, "tiled", False),
        (F32, dataclasses.replace(SHARD, gradients=()), "auto", False),
        (F32, Spec(reduction="none", gradients=BOTH), "auto", False),
        (BF16, SHARD, "auto", False),  # products of bf16 are slow there, and up-cast
    ],
)
def test_whose_logits_are_saved_on_a_cpu(dtype, spec, setting, saved, typical_cpu):
    got = choose(100, 64, 1000, dtype, CPU, spec, setting)
    assert got.saved == saved
    assert got.strategy == ("tiled" if setting == "tiled" else "chunked")


def test_where_nothing_is_within_the_budget(typical_cpu):
    got = choose(20000, 512, 10**6, F32, CPU, Spec(memory_mb=1, gradients=BOTH), "auto")
    assert (got.strategy, got.reason) == ("tiled", "nothing is within the budget")
    assert got.predictions()[0].scratch < got.predictions()[1].scratch


def test_frozen_weights_have_no_f32_gradient(typical_cpu):
    got = choose(2048, 768, 50257, BF16, CPU, Spec(gradients=("x",)), "auto")
    chunked, tiled = (got.predict(s, NOMINAL["cpu"]) for s in ("chunked", "tiled"))
    assert chunked.wider == 2048 * 768 * 4
    assert tiled.wider == 0


def test_text(typical_cpu):
    one = choose(2048, 512, 32000, F32, CPU, Spec(gradients=BOTH), "auto")
    expecttest.assert_expected_inline(
        str(one),
        """strategy: chunked, 256 rows at a time: 2.5 s, 32 MiB of scratch (tiled: 3.2 s, 8.6 MiB of scratch); the fastest""",
    )
    two = choose(2048, 512, 32000, BF16, CPU, Spec(gradients=BOTH), "auto")
    expecttest.assert_expected_inline(
        str(two),
        """strategy: tiled, 2672 classes at a time: 3.2 s, 34 MiB of scratch (chunked: 2.8 s, 35 MiB of scratch, 66 MiB of f32 gradients); the least memory within 1.5 times the fastest""",
    )
    shard = choose(512, 512, 4000, F32, CPU, SHARD, "auto")
    expecttest.assert_expected_inline(
        str(shard),
        """strategy: chunked, 512 rows at a time: 79 ms, 16 MiB of scratch; a shard's logits are saved for backward""",
    )
    kept = choose(2048, 512, 32000, F32, CPU, Spec(), "auto", kept=True)
    expecttest.assert_expected_inline(
        str(kept),
        """strategy: chunked, 16 rows at a time: 220 ms, 2.2 MiB of scratch; the logits exist anyway""",
    )


def test_a_symbolic_number_of_rows_is_chosen_for_its_hint(typical_cpu):
    n = ShapeEnv().create_unbacked_symint()
    hinted = torch._dynamo.source.ConstantSource("n")
    env = ShapeEnv()
    n = env.create_symintnode(env.create_symbol(2048, hinted), hint=2048, source=hinted)
    got = choose(n, 512, 32000, BF16, CPU, Spec(gradients=BOTH), "auto")
    plain = choose(2048, 512, 32000, BF16, CPU, Spec(gradients=BOTH), "auto")
    assert got.strategy == plain.strategy == "tiled"
    assert str(got) == f"{plain}; for 2048 rows, as traced"


PROGRAM = """
import torch
from fxpass.spec import Spec
from fxpass.strategy import choose
torch.set_num_threads({threads})
spec = Spec(gradients=("x", "weight"))
for dtype in (torch.float32, torch.bfloat16):
    print(choose(2048, 512, 32000, dtype, torch.device("cpu"), spec, "auto"))
"""


def test_another_process_chooses_the_same():
    """By the same rates, which it finds in the file: the whole line is the same."""
    program = [sys.executable, "-c", PROGRAM.format(threads=torch.get_num_threads())]
    one, other = (
        subprocess.run(program, check=True, capture_output=True, text=True).stdout for _ in range(2)
    )
    assert one.count("strategy: ") == 2
    assert other == one
