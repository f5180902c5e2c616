"""The strategy of a fused loss, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
# a call of which forward may compute the gradients, one without gradients, one that waits for the
# rows' incoming gradients, and that of a vocabulary shard
TRAINED = Reductions((), gradients=BOTH, total=("pick",))
FROZEN = replace(TRAINED, gradients=("x",))
EVALUATION = Reductions(("pick",))
WAITING = replace(EVALUATION, gradients=BOTH)
SHARD = replace(WAITING, outputs=("lse", "pick"))
HEAD, SMALL, LARGE = (2048, 512, 32000), (9, 64, 99), (8192, 2048, 128256)


def chosen(n, d, v, dtype, device, spec, setting="auto", **options) -> Choice:
    """Of a call with a total, the other call has its outputs instead."""
    waiting = replace(spec, outputs=spec.outputs or spec.total, total=())
    total = spec if spec.total else None
    return choose(n, d, v, dtype, device, total, waiting, setting, **options)


def of_losses(count: int) -> dict[str, Any]:
    """Heads chunked by hand: each loss would keep a gradient as large as the weight."""
    return {"n": 4096 // count, "others": (4096 // count,) * (count - 1)}


def budget(memory_mb: int, spec: Reductions = TRAINED) -> Reductions:
    return replace(spec, memory_mb=memory_mb)


# N x D x V, dtype, call, what else is said; strategy and a part of the reason
CASES: list[tuple[tuple[int, int, int], torch.dtype, Reductions, dict[str, Any], str, str]] = [
    *((HEAD, dtype, TRAINED, {}, "chunked", "with the loss") for dtype in (F64, F32, BF16)),
    ((1024, 1024, 128256), BF16, TRAINED, {}, "chunked", "with the loss"),
    (LARGE, F16, FROZEN, {}, "chunked", "with the loss"),
    *((size, F32, EVALUATION, {}, "chunked", "no gradients") for size in (HEAD, LARGE)),
    *((size, F32, WAITING, {}, "tiled", "only in backward") for size in (HEAD, LARGE)),
    (HEAD, BF16, SHARD, {}, "tiled", "only in backward"),
    # fp16 keeps gradients in f32, 2·V·D bytes more than they are in the end
    ((1023, 1024, 50000), F16, TRAINED, {}, "tiled", "more than the logits"),
    ((1024, 1024, 50000), F16, TRAINED, {}, "chunked", ""),
    (SMALL, F16, TRAINED, {}, "tiled", "more than the logits"),
    # several losses over one weight
    *((HEAD, dtype, TRAINED, of_losses(4), "chunked", "") for dtype in (F32, BF16, F16)),
    *((HEAD, dtype, TRAINED, of_losses(16), "tiled", "16 losses") for dtype in (F32, BF16, F16)),
    (HEAD, F32, FROZEN, of_losses(32), "chunked", ""),
    # a budget that f32 sums exceed
    ((8192, 512, 32000), BF16, budget(16), {}, "tiled", "exceed the budget"),
    ((8192, 512, 32000), BF16, budget(200), {}, "chunked", ""),
    # what a graph or a setting says
    *(
        (LARGE, BF16, TRAINED, {"setting": s, "logits_exist": True}, "chunked", "exist anyway")
        for s in ("auto", "chunked", "tiled")
    ),
    *((size, BF16, TRAINED, {"setting": "tiled"}, "tiled", "as set") for size in (SMALL, LARGE)),
    *(
        (size, BF16, TRAINED, {"setting": "chunked"}, "chunked", "as set")
        for size in (SMALL, LARGE)
    ),
]


@pytest.mark.parametrize(("sizes", "dtype", "spec", "more", "strategy", "why"), CASES)
def test_what_is_chosen(sizes, dtype, spec, more, strategy, why, h200):
    """On a CPU, and where no budget depends on the device, on a GPU."""
    more = dict(more)
    n, d, v = (more.pop("n", sizes[0]), *sizes[1:])
    for device in (CPU, CUDA) if not spec.memory_mb else (CPU,):
        got = chosen(n, d, v, dtype, device, spec, **more)
        assert (got.strategy, why in got.reason) == (strategy, True), got
        assert not spec.memory_mb or got.plan().scratch <= spec.memory_mb * MIB


@pytest.mark.parametrize(
    ("sizes", "dtype", "device", "spec", "setting", "saved", "left"),
    [
        # within half of the budget of 1 GiB
        ((1024, 4096, 16032), BF16, CUDA, SHARD, "auto", True, 0),
        ((32768, 4096, 16032), BF16, CUDA, SHARD, "auto", False, 0),
        ((1024, 4096, 16032), BF16, CUDA, budget(256, SHARD), "auto", True, 256),
        ((8192, 4096, 16032), BF16, CUDA, budget(256, SHARD), "auto", False, 256),
        ((100, 64, 1000), F32, CPU, SHARD, "auto", True, 0),
        ((100, 64, 1000), F64, CPU, SHARD, "auto", True, 0),
        ((100, 64, 1000), F32, CPU, SHARD, "chunked", False, 0),
        ((100, 64, 1000), F32, CPU, replace(SHARD, gradients=()), "auto", False, 0),
        # not where products are of up-cast operands: logits rounded to 16 bits would be another's
        ((100, 64, 1000), BF16, CPU, SHARD, "auto", multiplied_in(BF16, CPU) == BF16, 0),
    ],
)
def test_whose_logits_are_saved(sizes, dtype, device, spec, setting, saved, left, h200):
    """Of shards alone."""
    got = chosen(*sizes, dtype, device, spec, setting, sharded=True)
    assert (got.save_logits, got.spec.memory_mb) == (saved, left)
    assert not chosen(*sizes, dtype, device, spec, setting).save_logits


def test_what_saved_logits_leave_of_the_budget(h200):
    got = chosen(25434, 2048, 10546, BF16, CUDA, SHARD, sharded=True)
    assert got.save_logits
    assert got.plan().scratch + got.logits <= 1024 * MIB


def test_text(h200):
    found = [
        chosen(*HEAD, F32, CPU, TRAINED),
        chosen(512, 512, 32000, F32, CPU, TRAINED),
        chosen(512, 512, 4000, F32, CPU, SHARD, sharded=True),
        chosen(8192, 4096, 128256, BF16, CUDA, TRAINED),
    ]
    expecttest.assert_expected_inline(
        "\n".join(map(str, found)),
        """\
strategy: chunked, 352 rows at a time: 44 MiB of scratch; the gradients are computed with the loss
strategy: chunked, 512 rows and 8000 classes at a time, the logits in the weight's gradient: 16 MiB of scratch; the gradients are computed with the loss
strategy: tiled, 512 rows and 4000 classes at a time: 16 MiB of scratch; a shard's logits are saved for backward
strategy: chunked, 2048 rows at a time: 501 MiB of scratch, 4 chunks are added up in bf16; the gradients are computed with the loss""",
    )


def test_symbolic_sizes_are_chosen_for_their_hints():
    env = ShapeEnv()

    def symbol(name: str, hint: int) -> torch.SymInt:
        source = torch._dynamo.source.ConstantSource(name)
        made = env.create_symintnode(env.create_symbol(hint, source), hint=hint, source=source)
        assert isinstance(made, torch.SymInt)
        return made

    plain = chosen(*HEAD, F32, CPU, TRAINED)
    sizes = [symbol(name, hint) for name, hint in zip("ndv", HEAD, strict=True)]
    for some in ((sizes[0], *HEAD[1:]), sizes):
        assert str(chosen(*some, F32, CPU, TRAINED)) == f"{plain}; for 2048 rows, as traced"
