"""Rows and classes at a time: within the budget, in equal parts, as fast as any."""

from __future__ import annotations

import itertools

import pytest

from fxpass import cost
from fxpass.cost import COSTS, MIB, Work
from fxpass.fit import ALIGNMENT, CPU_ALIGNMENT, CPU_SLACK, SLACK, TILE_SLACK, fit
from fxpass.rates import NOMINAL

# e, a, up and the device: f32 and bf16 on a CPU, bf16 on NVIDIA's and on AMD's GPUs
KINDS = {
    "aten-f32": ("aten", 4, 4, 0, "cpu"),
    "aten-bf16": ("aten", 2, 4, 1, "cpu"),
    "triton-bf16": ("triton", 2, 4, 0, "cuda"),
    "triton-hip": ("triton", 2, 4, 1, "cuda"),
}
GRADIENTS = [{}, {"gx": 1, "gw": 1, "gb": 1}]
STRATEGIES = ["chunked", "tiled"]


def work(kind: str, n: int, d: int, v: int, **kwargs) -> Work:
    _, e, a, up, _ = KINDS[kind]
    return Work(n, d, v, e, a, up=up, processors=100, **kwargs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("gradients", GRADIENTS)
def test_the_budget_is_kept(kind, strategy, gradients):
    lowering, *_, device = KINDS[kind]
    sizes = itertools.product((1, 100, 5001), (3, 1024), (3, 50257))
    kept = 0
    for (n, d, v), allowed in itertools.product(sizes, (MIB, 7 * MIB, 40 * MIB, 256 * MIB)):
        one = work(kind, n, d, v, **gradients)
        rows, classes = fit(lowering, strategy, one, allowed, device)
        assert 1 <= rows <= n
        assert 1 <= classes <= v
        taken = cost.scratch(lowering, strategy, one, rows, classes)
        # sizes are looked up for slightly longer batches
        longer = one._replace(n=n + n // 16 + 1)
        least = (longer.n if (lowering, strategy) == ("triton", "tiled") else 1), 1
        assert taken <= allowed or cost.scratch(lowering, strategy, longer, *least) > allowed
        kept += taken <= allowed
    assert kept > 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize(("n", "d", "v"), [(300, 64, 1000), (2048, 256, 8000), (777, 32, 50257)])
@pytest.mark.parametrize("allowed", [2 * MIB, 8 * MIB, 32 * MIB])
def test_no_number_of_rows_is_faster(kind, gradients, n, d, v, allowed):
    """Against every multiple of the alignment, and every number of classes that is up-cast."""
    lowering, *_, device = KINDS[kind]
    one = work(kind, n, d, v, **gradients)
    align = ALIGNMENT.get(device, CPU_ALIGNMENT)

    def seconds(rows: int, classes: int) -> float:
        return cost.seconds(lowering, "chunked", one, rows, classes, NOMINAL[device])

    best = min(
        (
            seconds(rows, classes)
            for rows in (*range(align, n, align), n)
            for classes in {min(v, 1 << shift) for shift in range(14)}
            if cost.scratch(lowering, "chunked", one, rows, classes) <= allowed
        ),
        default=None,
    )
    if best is not None:
        found = seconds(*fit(lowering, "chunked", one, allowed, device))
        # not every number of classes is tried, and rows for slightly longer batches
        assert found <= best * SLACK.get(device, CPU_SLACK) * 1.05


@pytest.mark.parametrize("kind", ["aten-f32", "aten-bf16"])
@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize(("n", "d", "v"), [(300, 64, 1000), (2048, 256, 8000)])
@pytest.mark.parametrize("allowed", [4 * MIB, 8 * MIB, 32 * MIB])
def test_no_tile_is_faster(kind, gradients, n, d, v, allowed):
    one = work(kind, n, d, v, **gradients)

    def seconds(rows: int, classes: int) -> float:
        return cost.seconds("aten", "tiled", one, rows, classes, NOMINAL["cpu"])

    best = min(
        seconds(rows, classes)
        for rows in {min(n, 32 * i) for i in range(1, 65)}
        for classes in {min(v, 64 * i) for i in range(1, 126)}
        if cost.scratch("aten", "tiled", one, rows, classes) <= allowed
    )
    found = seconds(*fit("aten", "tiled", one, allowed, "cpu"))
    # only powers of two of the blocks of rows are tried
    assert found <= best * CPU_SLACK * 1.15


@pytest.mark.parametrize(("n", "d", "v"), [(2048, 512, 32000), (1024, 1024, 128256)])
@pytest.mark.parametrize("kind", ["aten-f32", "aten-bf16"])
@pytest.mark.parametrize("allowed", [36 * MIB, 128 * MIB, 1024 * MIB])
def test_a_tile_without_gradients_is_no_larger_for_a_larger_budget(kind, n, d, v, allowed):
    one = work(kind, n, d, v)
    rows, classes = fit("aten", "tiled", one, allowed, "cpu")
    # f32: no more than a chunk of logits as large as x; bf16: three times that with the f32 copies
    x = n * d * 4
    assert cost.scratch("aten", "tiled", one, rows, classes) <= x * (1 if one.e == 4 else 3)
    # and as fast as a tile of everything, but for the slack
    fastest = cost.seconds("aten", "tiled", one, n, v, NOMINAL["cpu"])
    assert cost.seconds("aten", "tiled", one, rows, classes, NOMINAL["cpu"]) <= 1.05 * fastest


def test_only_a_tile_without_gradients_is_looked_for_in_small_steps():
    """On CPUs; what others get are their budgets, halved again and again."""
    one = work("aten-f32", 2048, 512, 32000)

    def seconds(rows: int, classes: int) -> float:
        return cost.seconds("aten", "tiled", one, rows, classes, NOMINAL["cpu"])

    on_cpu, on_gpu = (fit("aten", "tiled", one, 64 * MIB, kind) for kind in ("cpu", "cuda"))
    assert seconds(*on_gpu) < seconds(*on_cpu)
    assert seconds(*on_cpu) <= TILE_SLACK * 1.01 * seconds(2048, 8000)
    assert cost.scratch("aten", "tiled", one, *on_cpu) < cost.scratch("aten", "tiled", one, *on_gpu)


@pytest.mark.parametrize("n", [4096, 4097, 5000, 8191, 30000])
def test_chunks_are_of_equal_size(n):
    one = work("triton-bf16", n, 4096, 128256, gx=1, gw=1)
    rows, _ = fit("triton", "chunked", one, 1024 * MIB, "cuda")
    chunks = -(-n // rows)
    assert rows % 64 == 0 or rows == n
    assert rows - n / chunks < 64
    assert chunks == -(-n // 4160)  # as few as the budget allows


def test_four_thousand_rows_of_llama_in_a_gibibyte():
    one = work("triton-bf16", 4096, 4096, 128256, gx=1, gw=1)
    assert fit("triton", "chunked", one, 1024 * MIB, "cuda")[0] == 4096
    assert fit("triton", "chunked", one._replace(n=32768), 1024 * MIB, "cuda")[0] == 4096


def test_less_is_taken_where_more_would_be_no_faster():
    """Forward alone reads no gradient of the weight for every chunk."""
    rows = {
        gw: fit("aten", "chunked", work("aten-f32", 4096, 512, 32000, gw=gw), 256 * MIB, "cpu")[0]
        for gw in (0, 1)
    }
    assert rows[0] < rows[1]


@pytest.mark.parametrize("key", COSTS, ids="-".join)
def test_where_nothing_fits_as_little_as_possible(key):
    one = Work(4096, 4096, 128256, 2, 4, gx=1, gw=1, up=1)
    rows, classes = fit(*key, one, MIB, "cuda" if key[0] == "triton" else "cpu")
    assert (rows, classes) == (4096 if key == ("triton", "tiled") else 1, 1)
