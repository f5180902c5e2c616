"""What one run of a lowering costs: seconds and bytes, as sympy expressions.

In: sizes, a strategy's rows and classes, and a device's :class:`Rates`. Out: predicted seconds and
an upper bound of the scratch. ``COSTS`` is the model; print it to read it::

    >>> COSTS["triton", "chunked"].scratch
    16*N*a + 16*R*e*ceiling(V/16) + 4*V*a + a*up*(C*D + C*R + D*R)

Symbols: ``N`` rows, ``D`` hidden size, ``V`` classes; ``R`` rows and ``C`` classes at a time; ``e``
bytes of an operand's element, ``a`` of one that is computed with. 1 or 0: ``gx gw gb`` gradients of
x, weight, bias; ``kept`` logits that exist already; ``up`` operands that have to be copied to the
compute dtype before they are multiplied; ``temporaries`` copies of a block of logits that the
target and the logit transform need, and ``P`` processors of the device. The rates are those of
:class:`Rates`.

A product costs what is larger, its arithmetic or its traffic, and runs at ``k / (k + H)`` of the
full rate where one of its sides is only ``k`` long. Everything else is added up: it runs before or
after the products, not beside them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import sympy
from sympy import Expr, Max, Min, ceiling

MIB = 1 << 20

# Bytes of logits that the ATen lowering works on at a time between two products.
BLOCK_BYTES = 2 * MIB
# The tiled kernel's forward: its smallest tiles, how many of them run beside each other, and what
# a row holds for each part of the classes that a program of its own passes over.
TILE_ROWS, TILE_CLASSES, GROUP, PARTIAL_BYTES = 128, 64, 8, 20
# ... and the most that its backward takes to round a tile of the weight's gradient once.
ROUNDED_BYTES = 32 * MIB
# Per row: counts, scales and picked logits that lowerings hold, in elements of the compute dtype.
ROW_ELEMENTS, GPU_ROW_ELEMENTS = 32, 16


class Work(NamedTuple):
    """What one run has to do; the fields are the model's symbols, in its order."""

    n: int
    d: int
    v: int
    e: int
    a: int
    gx: int = 0
    gw: int = 0
    gb: int = 0
    kept: int = 0
    up: int = 0
    temporaries: int = 0
    processors: int = 1


class Rates(NamedTuple):
    """How fast a device is; the fields are the model's symbols, in its order.

    Attributes:
        flops: floating-point operations a second of the vendor's GEMM.
        bandwidth: bytes a second, read and written alike.
        elements: logits a second through softmax and its gradient, each read and written once.
        call: seconds that one operation costs before it does anything.
        half: length of a product's side at which it runs at half of ``flops``.
        share: of ``flops`` that a generated GEMM reaches.
    """

    flops: float
    bandwidth: float
    elements: float
    call: float
    half: float
    share: float


class Cost(NamedTuple):
    """Seconds and bytes of one run. Outputs, and gradients kept for backward, are not scratch."""

    seconds: Expr
    scratch: Expr


def _symbols(names: str) -> tuple[Any, ...]:
    return sympy.symbols(names, nonnegative=True)


WORK = _symbols("N D V e a gx gw gb kept up temporaries P")
TILE = _symbols("R C")
RATES = _symbols("F B E L H S")

N, D, V, e, a, gx, gw, gb, kept, up, temporaries, P = WORK
R, C = TILE
F, B, E, L, H, S = RATES

_flops = 2 * N * D * V
_any = Max(gx, gw, gb)
_narrow = Min(1, a - e)  # element sizes are 2, 4 and 8


def _product(flops: Any, traffic: Any, *sides: Any, share: Any = 1) -> Expr:
    """Seconds of products of some flops and bytes, the shortest of whose sides are ``sides``."""
    rate = F * share
    for side in sides:
        rate = rate * side / (side + H)
    return Max(flops / rate, traffic / B)


# In both, a loop's next up-cast copy is made before its last one ends; a forward that is tiled
# keeps one place for each.
def _aten_chunked() -> Cost:
    chunks, tiles = ceiling(N / R), ceiling(V / C)
    weight = chunks * D * V
    logits = _product(_flops * (1 - kept), (1 - kept) * weight * a + N * V * (a + kept * e), R)
    x = _product(_flops, (weight + N * V) * a, R) + 2 * a * N * D * (1 + up * (tiles - 1)) / B
    # the whole f32 gradient of the weight is written for the first chunk, then read and written
    w = _product(_flops, N * V * a, R) + a * (2 * weight - D * V) / B
    upcast = up * (e + a) * weight * (1 - kept + gx) / B
    calls = L * chunks * (8 + 4 * up * tiles)
    return Cost(
        logits + upcast + N * V / E + gx * x + gw * w + gb * N * V * a / B + calls,
        a * R * V
        + temporaries * Min(a * R * V, Max(BLOCK_BYTES, a * V))
        + up * a * (2 * R * D + 2 * C * D)
        + a * V * (up + gb)
        + ROW_ELEMENTS * a * N,
    )


def _aten_tiled() -> Cost:
    blocks, tiles = ceiling(N / R), ceiling(V / C)
    weight, hidden = blocks * D * V, tiles * N * D
    logits = _product(_flops, (weight + hidden + N * V) * a, R, C)
    x = _product(_flops, (weight + N * V) * a, R, C) + 2 * a * hidden / B
    w = (
        _product(_flops, (hidden + N * V) * a, R, C)
        + (a * (2 * weight - D * V) + up * e * D * V) / B
    )
    # forward goes through the classes for each block of rows, backward the other way round
    upcast = up * (e + a) * (_any * (D * V + hidden) + (1 - _any) * (weight + N * D)) / B
    calls = L * blocks * tiles * 12
    return Cost(
        logits + upcast + N * V / E + gx * x + gw * w + gb * N * V * a / B + calls,
        (1 + temporaries) * a * R * C
        + up * a * ((1 + _any) * (R + C) * D + gw * C * D + gx * N * D)
        + a * V * (up + 2 * gb)
        + ROW_ELEMENTS * a * N,
    )


def _triton_chunked() -> Cost:
    chunks, tiles = ceiling(N / R), ceiling(V / C)
    weight = chunks * D * V
    logits = _product(_flops * (1 - kept), (1 - kept) * weight * e + N * V * e, R)
    x = _product(_flops, (weight + N * V) * e, R) + 2 * a * N * D * (1 + up * (tiles - 1)) / B
    w = _product(_flops, N * V * e, R) + 2 * a * weight / B
    in_place = Max(N * V / E, N * V * e * (1 + _any) / B)
    upcast = up * (e + a) * (weight * gx + N * V * (gx + gw)) / B
    calls = L * chunks * (4 + 4 * up * tiles)
    return Cost(
        logits + in_place + upcast + gx * x + gw * w + gb * N * V * e / B + calls,
        e * R * 16 * ceiling(V / 16)
        + up * a * (R * C + C * D + R * D)
        + GPU_ROW_ELEMENTS * a * N
        + 4 * a * V,
    )


def _triton_tiled() -> Cost:
    tiles = ceiling(V / C)
    splits = Min(ceiling(V / TILE_CLASSES), 8 * ceiling(P / Min(GROUP, ceiling(N / TILE_ROWS))))
    generated = _product(_flops, N * V * e * _any, share=S) + N * V / E
    x = _product(_flops, (D * V + N * V) * e, N, C) + 2 * a * N * D * tiles / B
    w = _product(_flops, (N * D * tiles + N * V) * e, N, C)
    return Cost(
        generated + gx * x + gw * w + gb * N * V * e / B + L * (2 + _any * tiles * 4),
        _any * e * N * 16 * ceiling(C / 16)
        + _narrow * a * (N * D * gx + gw * Min(D * C, ROUNDED_BYTES / a))
        + up * a * (N * C + C * D + N * D)
        + (1 - _any) * PARTIAL_BYTES * N * splits
        + GPU_ROW_ELEMENTS * a * N
        + 4 * a * V,
    )


# lowering, strategy -> what one run costs
COSTS: dict[tuple[str, str], Cost] = {
    ("aten", "chunked"): _aten_chunked(),
    ("aten", "tiled"): _aten_tiled(),
    ("triton", "chunked"): _triton_chunked(),
    ("triton", "tiled"): _triton_tiled(),
}


def seconds(
    lowering: str, strategy: str, work: Work, rows: int, classes: int, rates: Rates
) -> float:
    """Predicted seconds of one run, ``rows`` and ``classes`` at a time (both at least 1)."""
    return _functions(lowering, strategy)[0](*work, rows, classes, *rates)


def scratch(lowering: str, strategy: str, work: Work, rows: int, classes: int) -> int:
    """Upper bound, in bytes, of what one run allocates beside its outputs."""
    return int(_functions(lowering, strategy)[1](*work, rows, classes))


@functools.cache
def _functions(lowering: str, strategy: str) -> tuple[Callable[..., float], Callable[..., float]]:
    """The two expressions as Python functions: sympy is not asked again."""
    cost = COSTS[lowering, strategy]
    return (
        sympy.lambdify((*WORK, *TILE, *RATES), cost.seconds, "math", cse=True),
        sympy.lambdify((*WORK, *TILE), cost.scratch, "math"),
    )
