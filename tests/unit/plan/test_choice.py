"""The strategy of a fused loss, and why."""

from __future__ import annotations

from dataclasses import replace

import expecttest
import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxpass.plan.choice import Choice, choose
from fxpass.plan.devices import multiplied_in
from fxpass.plan.plan import MIB
from fxpass.spec.reductions import Reductions
from tests.support.planned import BF16, BOTH, CPU, CUDA, F32, F64

F16 = torch.float16
# of the README's and the shapes, and two more
# a call of which forward may compute the gradients, one without gradients, and one that waits for
# the rows' incoming gradients
TRAINED = Reductions((), gradients=BOTH, total=("pick",))
FROZEN = replace(TRAINED, gradients=("x",))
EVALUATION = Reductions(("pick",))
WAITING = replace(EVALUATION, gradients=BOTH)
CASES = [(2048, 512, 32000), (1024, 1024, 128256), (2048, 768, 50257), (8192, 2048, 128256)]


def chosen(n, d, v, dtype, device, spec, setting="auto", **options) -> Choice:
    """Of a call with a total, the other call has its outputs instead."""
    waiting = replace(spec, outputs=spec.outputs or spec.total, total=())
    total = spec if spec.total else None
    return choose(n, d, v, dtype, device, total, waiting, setting, **options)


@pytest.mark.parametrize(("n", "d", "v"), CASES)
@pytest.mark.parametrize(
    ("dtype", "spec", "expected"),
    [
        (F32, TRAINED, "chunked"),  # 6 against 8 times N·D·V
        (F64, TRAINED, "chunked"),
        (BF16, TRAINED, "chunked"),
        (F16, FROZEN, "chunked"),
        (F32, EVALUATION, "chunked"),
        (BF16, EVALUATION, "chunked"),
        (F32, WAITING, "tiled"),
        (F32, replace(WAITING, outputs=("lse", "pick")), "tiled"),
    ],
)
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_what_is_chosen(n, d, v, dtype, spec, expected, device, h200):
    assert chosen(n, d, v, dtype, device, spec).strategy == expected


def test_fp16_keeps_no_more_than_the_logits():
    """Its gradients are kept in f32, 2·V·D bytes more than they are in the end."""
    for n, expected in ((100, "tiled"), (1023, "tiled"), (1024, "chunked")):
        got = chosen(n, 1024, 50000, F16, CPU, TRAINED)
        assert got.strategy == expected
    assert "more than the logits" in chosen(9, 64, 99, F16, CPU, TRAINED).reason


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_losses_over_one_weight_keep_no_more_than_the_logits(dtype):
    """Heads chunked by hand: each loss would keep a gradient as large as the weight."""
    whole = chosen(4096, 512, 32000, dtype, CPU, TRAINED)
    assert whole.strategy == "chunked"
    for losses, expected in ((4, "chunked"), (16, "tiled"), (32, "tiled")):
        each = 4096 // losses
        others = (each,) * (losses - 1)
        got = chosen(each, 512, 32000, dtype, CPU, TRAINED, others=others)
        assert got.strategy == expected
        frozen = FROZEN
        got = chosen(each, 512, 32000, dtype, CPU, frozen, others=others)
        assert got.strategy == "chunked"


def test_a_budget_too_small_for_f32_sums_is_kept():
    for memory_mb, expected in ((16, "tiled"), (200, "chunked")):
        spec = replace(TRAINED, memory_mb=memory_mb)
        got = chosen(8192, 512, 32000, BF16, CPU, spec)
        assert got.strategy == expected
        assert got.plan().scratch <= memory_mb * MIB


@pytest.mark.parametrize("setting", ["auto", "chunked", "tiled"])
def test_logits_that_exist_are_taken_in_chunks(setting):
    got = chosen(8192, 2048, 128256, BF16, CPU, TRAINED, setting, logits_exist=True)
    assert (got.strategy, got.reason) == ("chunked", "the logits exist anyway")


@pytest.mark.parametrize("setting", ["chunked", "tiled"])
def test_a_setting_decides(setting):
    for n in (10, 10**5):
        got = chosen(n, 2048, 128256, BF16, CPU, TRAINED, setting)
        assert (got.strategy, got.reason) == (setting, "as set")


# an eighth of Llama-3-8B's classes
SHARD = replace(WAITING, outputs=("lse", "pick"))


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
    spec = replace(SHARD, memory_mb=memory_mb)
    got = chosen(n, 4096, 16032, BF16, CUDA, spec, sharded=True)
    assert (got.save_logits, got.spec.memory_mb) == (saved, left)


def test_what_saved_logits_leave_of_the_budget(h200):
    got = chosen(25434, 2048, 10546, BF16, CUDA, SHARD, sharded=True)
    assert got.save_logits
    assert got.plan().scratch + got.logits <= 1024 * MIB


@pytest.mark.parametrize(
    ("dtype", "spec", "setting", "saved"),
    [
        (F32, SHARD, "auto", True),
        (F64, SHARD, "auto", True),
        (F32, SHARD, "chunked", False),
        (F32, SHARD, "tiled", False),
        (F32, replace(SHARD, gradients=()), "auto", False),
        # not where products are of up-cast operands: logits rounded to 16 bits would be another's
        (BF16, SHARD, "auto", multiplied_in(BF16, CPU) == BF16),
    ],
)
def test_whose_logits_are_saved_on_a_cpu(dtype, spec, setting, saved):
    got = chosen(100, 64, 1000, dtype, CPU, spec, setting, sharded=True)
    assert got.save_logits == saved
    assert not chosen(100, 64, 1000, dtype, CPU, spec, setting).save_logits


def test_text():
    one = chosen(2048, 512, 32000, F32, CPU, TRAINED)
    expecttest.assert_expected_inline(
        str(one),
        """strategy: chunked, 352 rows at a time: 44 MiB of scratch; the gradients are computed with the loss""",
    )
    two = chosen(512, 512, 32000, F32, CPU, TRAINED)
    expecttest.assert_expected_inline(
        str(two),
        """strategy: chunked, 512 rows and 8000 classes at a time, the logits in the weight's gradient: 16 MiB of scratch; the gradients are computed with the loss""",
    )
    evaluation = chosen(2048, 512, 32000, F32, CPU, EVALUATION)
    expecttest.assert_expected_inline(
        str(evaluation),
        """strategy: chunked, 2048 rows and 2000 classes at a time: 16 MiB of scratch; there are no gradients""",
    )
    shard = chosen(512, 512, 4000, F32, CPU, SHARD, sharded=True)
    expecttest.assert_expected_inline(
        str(shard),
        """strategy: tiled, 512 rows and 4000 classes at a time: 16 MiB of scratch; a shard's logits are saved for backward""",
    )


def test_text_of_sums_in_bf16(h200):
    got = chosen(8192, 4096, 128256, BF16, CUDA, TRAINED)
    expecttest.assert_expected_inline(
        str(got),
        """strategy: chunked, 2048 rows at a time: 501 MiB of scratch, 4 chunks are added up in bf16; the gradients are computed with the loss""",
    )


def test_symbolic_sizes_are_chosen_for_their_hints():
    env = ShapeEnv()

    def symbol(name: str, hint: int) -> torch.SymInt:
        source = torch._dynamo.source.ConstantSource(name)
        made = env.create_symintnode(env.create_symbol(hint, source), hint=hint, source=source)
        assert isinstance(made, torch.SymInt)
        return made

    n, d, v = symbol("n", 2048), symbol("d", 512), symbol("v", 32000)
    plain = chosen(2048, 512, 32000, F32, CPU, TRAINED)
    for sizes in ((n, 512, 32000), (n, d, v)):
        got = chosen(*sizes, F32, CPU, TRAINED)
        assert str(got) == f"{plain}; for 2048 rows, as traced"
