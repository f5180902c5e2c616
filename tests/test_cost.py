"""The cost model: its limits, units and shape."""

from __future__ import annotations

import itertools
import math

import expecttest
import pytest
import sympy

from fxpass import cost
from fxpass.cost import COSTS, RATES, TILE, WORK, Rates, Work
from fxpass.rates import NOMINAL

N, D, V = 4096, 512, 32768
LOWERINGS = [*COSTS]
TRAINING = {"gx": 1, "gw": 1, "gb": 1}
# operands as wide as what is computed with; half as wide; half as wide and up-cast
OPERANDS = [(4, 4, 0), (2, 4, 0), (2, 4, 1), (8, 8, 0)]

# nothing but arithmetic takes time, one operation a second
ARITHMETIC = Rates(1, math.inf, math.inf, call=0, half=0, share=1)


def work(e=4, a=4, up=0, **kwargs) -> Work:
    return Work(N, D, V, e, a, up=up, **kwargs)


def flops(key, work, rows=256, classes=1024) -> float:
    """In units of N·D·V."""
    return cost.seconds(*key, work, rows, classes, ARITHMETIC) / (N * D * V)


@pytest.mark.parametrize(
    ("strategy", "gradients", "expected"),
    [
        ("chunked", {}, 2),
        ("chunked", {"gx": 1, "gw": 1}, 6),
        ("chunked", {"gx": 1}, 4),
        ("chunked", {"gw": 1}, 4),
        ("chunked", {"gb": 1}, 2),
        ("chunked", {"kept": 1}, 0),
        ("chunked", {"kept": 1, "gx": 1, "gw": 1}, 4),
        ("tiled", {}, 2),
        ("tiled", {"gx": 1, "gw": 1}, 6),  # and 2 of forward
        ("tiled", {"gx": 1}, 4),
    ],
)
@pytest.mark.parametrize("lowering", ["aten", "triton"])
@pytest.mark.parametrize("operand", OPERANDS)
def test_arithmetic(lowering, strategy, gradients, expected, operand):
    assert flops((lowering, strategy), work(*operand, **gradients)) == expected


def test_a_generated_product_has_its_share_of_the_rate():
    half = ARITHMETIC._replace(share=0.5)
    for gradients, expected in (({}, 4), (TRAINING, 8)):
        seconds = cost.seconds("triton", "tiled", work(**gradients), N, V, half)
        assert seconds / (N * D * V) == expected
    for key in LOWERINGS[:3]:
        assert cost.seconds(*key, work(), 256, 1024, half) == cost.seconds(
            *key, work(), 256, 1024, ARITHMETIC
        )


def test_short_products_are_slow():
    rates = ARITHMETIC._replace(half=64)
    for key in (("aten", "chunked"), ("triton", "chunked")):
        seconds = cost.seconds(*key, work(**TRAINING), 64, V, rates)
        assert seconds / (N * D * V) == 12  # 64 rows are half as fast


@pytest.mark.parametrize(("rows", "chunks"), [(4096, 1), (256, 16), (300, 14)])
def test_the_weights_gradient_is_read_and_written_once_per_chunk(rows, chunks):
    memory = Rates(math.inf, 1, math.inf, call=0, half=0, share=1)
    with_, without = (
        cost.seconds("triton", "chunked", work(2, 4, gx=1, gw=gw), rows, V, memory) for gw in (1, 0)
    )
    logits_read = 2 * N * V
    assert with_ - without == 2 * 4 * D * V * chunks + logits_read


def test_up_casting_costs_traffic_for_every_chunk():
    memory = Rates(math.inf, 1, math.inf, call=0, half=0, share=1)

    def seconds(rows: int, up: int) -> float:
        return cost.seconds("aten", "chunked", work(2, 4, up, gw=1), rows, V, memory)

    for rows, chunks in ((4096, 1), (256, 16)):
        assert seconds(rows, 1) - seconds(rows, 0) == chunks * D * V * (2 + 4)


@pytest.mark.parametrize("key", LOWERINGS, ids="-".join)
@pytest.mark.parametrize("operand", OPERANDS)
def test_twice_as_fast_a_device_takes_half_as_long(key, operand):
    slow = NOMINAL["cuda"]
    fast = Rates(
        2 * slow.flops,
        2 * slow.bandwidth,
        2 * slow.elements,
        slow.call / 2,
        slow.half,
        slow.share,
    )
    one = work(*operand, **TRAINING)
    times = [cost.seconds(*key, one, 256, 1024, rates) for rates in (slow, fast)]
    assert times[1] == pytest.approx(times[0] / 2)


@pytest.mark.parametrize("key", LOWERINGS, ids="-".join)
@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("gradients", [{}, TRAINING, {"gx": 1}])
def test_more_at_a_time_is_never_slower_and_never_takes_less(key, operand, gradients):
    one = work(*operand, **gradients)
    sizes = [2**i for i in range(13)]
    for rates in NOMINAL.values():
        for fixed in (1, 64, 4096):
            for tiles in ([(n, fixed) for n in sizes], [(fixed, n) for n in sizes]):
                times = [cost.seconds(*key, one, *tile, rates) for tile in tiles]
                bytes_ = [cost.scratch(*key, one, *tile) for tile in tiles]
                for less, more in itertools.pairwise(times):
                    assert more <= less * (1 + 1e-12)
                assert bytes_ == sorted(bytes_)


@pytest.mark.parametrize("key", LOWERINGS, ids="-".join)
def test_scratch_is_affine_in_what_the_budget_is_divided_by(key):
    """As :mod:`fxpass.fit` takes it to be; blocks of temporaries and paddings aside."""
    expression = COSTS[key].scratch.replace(sympy.ceiling, lambda x: x)
    expression = expression.replace(sympy.Min, lambda *_: sympy.Integer(1))
    for symbol in TILE:
        assert sympy.diff(expression, symbol, 2) == 0


@pytest.mark.parametrize("key", LOWERINGS, ids="-".join)
def test_the_model_has_no_other_symbols(key):
    symbols = {*WORK, *TILE}
    assert COSTS[key].scratch.free_symbols <= symbols
    assert COSTS[key].seconds.free_symbols <= symbols | {*RATES}


@pytest.mark.parametrize(
    ("key", "work", "tile", "expected"),
    [
        # a chunk of f32 logits, a block of temporaries, 128 bytes a row
        (
            ("aten", "chunked"),
            work(temporaries=1),
            (256, V),
            256 * V * 4 + cost.BLOCK_BYTES + 128 * N,
        ),
        # ... one row is more than a block
        (
            ("aten", "chunked"),
            work(8, 8, temporaries=1)._replace(v=2**19),
            (2, 1),
            3 * 2**19 * 8 + 256 * N,
        ),
        # ... nor does one chunk need more temporaries than it has rows
        (("aten", "chunked"), work(temporaries=2), (1, V), 3 * V * 4 + 128 * N),
        # ... and the f32 copies of its rows of x and of some classes of the weight
        (
            ("aten", "chunked"),
            work(2, 4, 1, gb=1),
            (16, 1024),
            16 * V * 4 + 2 * 16 * D * 4 + 2 * 1024 * D * 4 + 2 * V * 4 + 128 * N,
        ),
        (("aten", "tiled"), work(temporaries=2), (512, 1024), 3 * 512 * 1024 * 4 + 128 * N),
        # forward has one place for the f32 copies of its rows of x and classes of the weight
        (
            ("aten", "tiled"),
            work(2, 4, 1),
            (512, 1024),
            512 * 1024 * 4 + 128 * N + (512 + 1024) * D * 4 + V * 4,
        ),
        (
            ("aten", "tiled"),
            work(2, 4, 1, **TRAINING),
            (512, 1024),
            512 * 1024 * 4 + 128 * N + (2 * 512 + 3 * 1024 + N) * D * 4 + 3 * V * 4,
        ),
        # rows are padded to 16 elements
        (
            ("triton", "chunked"),
            work(2, 4)._replace(v=50257),
            (1024, 1),
            1024 * 50272 * 2 + 64 * N + 16 * 50257,
        ),
        (("triton", "tiled"), work(2, 4, processors=132), (N, V), N * (17 * 8 * 20 + 64) + 16 * V),
        (
            ("triton", "tiled"),
            work(2, 4, **TRAINING),
            (N, 1024),
            N * 1024 * 2 + N * D * 4 + 1024 * D * 4 + 64 * N + 16 * V,
        ),
        (("triton", "tiled"), work(gx=1), (N, 1024), N * 1024 * 4 + 64 * N + 16 * V),
    ],
)
def test_scratch(key, work, tile, expected):
    assert cost.scratch(*key, work, *tile) == expected


def test_it_can_be_read():
    expecttest.assert_expected_inline(
        str(COSTS["aten", "chunked"].scratch),
        """32*N*a + R*V*a + V*a*(gb + up) + a*up*(2*C*D + 2*D*R) + temporaries*Min(R*V*a, Max(2097152, V*a))""",
    )
    expecttest.assert_expected_inline(
        str(COSTS["aten", "tiled"].scratch),
        """C*R*a*(temporaries + 1) + 32*N*a + V*a*(2*gb + up) + a*up*(C*D*gw + D*N*gx + D*(C + R)*(Max(gb, gw, gx) + 1))""",
    )
