"""The strategy of a fused loss, and why."""

from __future__ import annotations

import dataclasses

import expecttest
import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxpass.plan.choice import choose
from fxpass.plan.devices import multiplied_in
from fxpass.plan.plan import MIB
from fxpass.spec.spec import Spec
from tests.support.planned import BF16, BOTH, CPU, CUDA, F32, F64

F16 = torch.float16
# of the README's and the shapes, and two more
CASES = [(2048, 512, 32000), (1024, 1024, 128256), (2048, 768, 50257), (8192, 2048, 128256)]


@pytest.mark.parametrize(("n", "d", "v"), CASES)
@pytest.mark.parametrize(
    ("dtype", "spec", "expected"),
    [
        (F32, Spec(gradients=BOTH), "chunked"),  # 6 against 8 times N·D·V
        (F64, Spec(gradients=BOTH), "chunked"),
        (BF16, Spec(gradients=BOTH), "chunked"),
        (F16, Spec(gradients=("x",)), "chunked"),
        (F32, Spec(), "chunked"),
        (BF16, Spec(), "chunked"),
        (F32, Spec(reduction="none", gradients=BOTH), "tiled"),
        (F32, Spec(lse=True, gradients=BOTH), "tiled"),
    ],
)
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_what_is_chosen(n, d, v, dtype, spec, expected, device, h200):
    assert choose(n, d, v, dtype, device, spec, "auto").strategy == expected


def test_fp16_keeps_no_more_than_the_logits():
    """Its gradients are kept in f32, 2·V·D bytes more than they are in the end."""
    for n, expected in ((100, "tiled"), (1023, "tiled"), (1024, "chunked")):
        got = choose(n, 1024, 50000, F16, CPU, Spec(gradients=BOTH), "auto")
        assert got.strategy == expected
    assert (
        "more than the logits" in choose(9, 64, 99, F16, CPU, Spec(gradients=BOTH), "auto").reason
    )


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_losses_over_one_weight_keep_no_more_than_the_logits(dtype):
    """Heads chunked by hand: each loss would keep a gradient as large as the weight."""
    whole = choose(4096, 512, 32000, dtype, CPU, Spec(gradients=BOTH), "auto")
    assert whole.strategy == "chunked"
    for losses, expected in ((4, "chunked"), (16, "tiled"), (32, "tiled")):
        each = 4096 // losses
        others = (each,) * (losses - 1)
        got = choose(each, 512, 32000, dtype, CPU, Spec(gradients=BOTH), "auto", False, others)
        assert got.strategy == expected
        frozen = Spec(gradients=("x",))
        got = choose(each, 512, 32000, dtype, CPU, frozen, "auto", False, others)
        assert got.strategy == "chunked"


def test_a_budget_too_small_for_f32_sums_is_kept():
    for memory_mb, expected in ((16, "tiled"), (200, "chunked")):
        spec = Spec(gradients=BOTH, memory_mb=memory_mb)
        got = choose(8192, 512, 32000, BF16, CPU, spec, "auto")
        assert got.strategy == expected
        assert got.plan().scratch <= memory_mb * MIB


@pytest.mark.parametrize("setting", ["auto", "chunked", "tiled"])
def test_logits_that_exist_are_taken_in_chunks(setting):
    got = choose(8192, 2048, 128256, BF16, CPU, Spec(gradients=BOTH), setting, logits_exist=True)
    assert (got.strategy, got.reason) == ("chunked", "the logits exist anyway")


@pytest.mark.parametrize("setting", ["chunked", "tiled"])
def test_a_setting_decides(setting):
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
        (32768, 0, False, 0),
        (1024, 256, True, 256),
        (8192, 256, False, 256),
    ],
)
def test_a_shards_logits_are_saved_within_half_of_the_budget(n, memory_mb, saved, left, h200):
    spec = dataclasses.replace(SHARD, memory_mb=memory_mb)
    got = choose(n, 4096, 16032, BF16, CUDA, spec, "auto")
    assert (got.save_logits, got.spec.memory_mb) == (saved, left)


def test_what_saved_logits_leave_of_the_budget(h200):
    got = choose(25434, 2048, 10546, BF16, CUDA, SHARD, "auto")
    assert got.save_logits
    assert got.plan().scratch + got.logits <= 1024 * MIB


@pytest.mark.parametrize(
    ("dtype", "spec", "setting", "saved"),
    [
        (F32, SHARD, "auto", True),
        (F64, SHARD, "auto", True),
        (F32, SHARD, "chunked", False),
        (F32, SHARD, "tiled", False),
        (F32, dataclasses.replace(SHARD, gradients=()), "auto", False),
        (F32, Spec(reduction="none", gradients=BOTH), "auto", False),
        # not where products are of up-cast operands: logits rounded to 16 bits would be another's
        (BF16, SHARD, "auto", multiplied_in(BF16, CPU) == BF16),
    ],
)
def test_whose_logits_are_saved_on_a_cpu(dtype, spec, setting, saved):
    assert choose(100, 64, 1000, dtype, CPU, spec, setting).save_logits == saved


def test_text():
    one = choose(2048, 512, 32000, F32, CPU, Spec(gradients=BOTH), "auto")
    expecttest.assert_expected_inline(
        str(one),
        """strategy: chunked, 352 rows at a time: 44 MiB of scratch; the gradients are computed with the loss""",
    )
    two = choose(512, 512, 32000, F32, CPU, Spec(gradients=BOTH), "auto")
    expecttest.assert_expected_inline(
        str(two),
        """strategy: chunked, 512 rows and 16000 classes at a time, the logits in the weight's gradient: 31 MiB of scratch; the gradients are computed with the loss""",
    )
    evaluation = choose(2048, 512, 32000, F32, CPU, Spec(), "auto")
    expecttest.assert_expected_inline(
        str(evaluation),
        """strategy: chunked, 2048 rows and 2000 classes at a time: 16 MiB of scratch; there are no gradients""",
    )
    shard = choose(512, 512, 4000, F32, CPU, SHARD, "auto")
    expecttest.assert_expected_inline(
        str(shard),
        """strategy: chunked, 512 rows and 4000 classes at a time: 16 MiB of scratch; a shard's logits are saved for backward""",
    )


def test_symbolic_sizes_are_chosen_for_their_hints():
    env = ShapeEnv()

    def symbol(name: str, hint: int) -> torch.SymInt:
        source = torch._dynamo.source.ConstantSource(name)
        made = env.create_symintnode(env.create_symbol(hint, source), hint=hint, source=source)
        assert isinstance(made, torch.SymInt)
        return made

    n, d, v = symbol("n", 2048), symbol("d", 512), symbol("v", 32000)
    plain = choose(2048, 512, 32000, F32, CPU, Spec(gradients=BOTH), "auto")
    for sizes in ((n, 512, 32000), (n, d, v)):
        got = choose(*sizes, F32, CPU, Spec(gradients=BOTH), "auto")
        assert str(got) == f"{plain}; for 2048 rows, as traced"
