"""``python -m benchmarks.bandwidth``: predicts the bytes and the time of a sharded head.

It measures nothing. Formulas give the bytes that each rank sends; ``benchmarks.communication``
checks them against counted bytes. Assumed rates give the time of a training step of the head and
its loss, forward and backward::

    python -m benchmarks.bandwidth
    python -m benchmarks.bandwidth --head qwen3-8b --n 16384 --across 4e11
    >>> sympy.factor(sent(HEADS["fusedce"].loss))
    6*N*a*(W - 1)/W

Symbols: ``N`` rows, ``D`` hidden size, ``V`` classes, ``W`` ranks; ``e`` bytes of an element of
hidden states and logits, ``a`` of one number of a row, from which the loss is computed (f32: 4).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy
from sympy import Eq, Expr, Piecewise, ceiling, log

from benchmarks.communication.collectives import RING
from benchmarks.loss import heads
from benchmarks.loss.table import MIB

RANKS = (1, 2, 4, 8, 16, 32, 64)


class Exchange(NamedTuple):
    """One collective of a step.

    Attributes:
        backward: whether it is in backward.
        op: a key of :data:`benchmarks.communication.collectives.RING`.
        nbytes: bytes of the whole tensor that is reduced, gathered or scattered.
    """

    backward: bool
    op: str
    nbytes: Expr


class Head(NamedTuple):
    """A way to compute a sharded head and its loss.

    Attributes:
        loss: its exchanges, without hidden states and their gradient.
        products: GEMMs of a step, each of 2·N·D·V / W operations.
        passes: reads and writes of logits by a rank outside the GEMMs, in units of N·V; a lower
            bound, not a count of real code.
    """

    loss: tuple[Exchange, ...]
    products: Expr
    passes: Expr


class Assumed(NamedTuple):
    """Assumed rates of a machine; the fields are symbols of the model.

    Attributes:
        flops: operations a second of a GEMM: 70 % of the 989e12 of an H100's or H200's bf16.
        memory: bytes a second, an H100's.
        within: bytes a second that a rank sends to ranks of its node, NVLink of an H100.
        across: ... where there are more ranks than in a node: one 400 Gb/s adapter for each GPU.
        latency: seconds of a collective, for each doubling of the ranks.
        node: ranks of a node.
        budget: bytes of scratch that fusedce may take.
    """

    flops: float = 0.7 * 989e12
    memory: float = 3.35e12
    within: float = 450e9
    across: float = 50e9
    latency: float = 10e-6
    node: int = 8
    budget: float = 1024.0 * MIB


N, D, V, W, e, a = SIZES = sympy.symbols("N D V W e a", positive=True)
RATES = sympy.symbols("flops memory within across latency node budget", positive=True)
_flops, _memory, _within, _across, _latency, _node, _budget = RATES

_three = sympy.Integer(3)
_row = Exchange(False, "all_reduce", a * N)
HEADS = {
    # maximum; then sum of exponentials and the target's logit in one. On one rank fusedce computes
    # gradients in forward; among more backward computes the logits again, unless half of the budget
    # holds them.
    "fusedce": Head(
        (_row, Exchange(False, "all_reduce", 2 * a * N)),
        Piecewise((3, Eq(W, 1) | (2 * e * N * V / W <= _budget)), (4, True)),
        3 / W,
    ),
    # maximum, sum of exponentials, the target's logarithm
    "loss_parallel": Head((_row,) * 3, _three, 3 / W),
    # every rank reads all logits, and of their gradient needs its own part
    "gathered logits": Head((Exchange(False, "all_gather", e * N * V),), _three, 1 + 2 / W),
}
_states = e * N * D
# how the hidden states lie -> what every such head exchanges of them and their gradient
HIDDEN = {
    "replicated": (Exchange(True, "all_reduce", _states),),
    "sequence-sharded": (
        Exchange(False, "all_gather", _states),
        Exchange(True, "reduce_scatter", _states),
    ),
}


def sent(exchanges: Sequence[Exchange]) -> Expr:
    """Bytes that each rank sends, by rings."""
    return sum((RING[x.op] * (W - 1) / W * x.nbytes for x in exchanges), sympy.Integer(0))


def seconds(name: str) -> Expr:
    """Seconds of a step of a head with replicated hidden states, without overlap."""
    head = HEADS[name]
    exchanges = (*head.loss, *HIDDEN["replicated"])
    bandwidth = Piecewise((_within, _node >= W), (_across, True))
    return (
        head.products * 2 * N * D * V / W / _flops
        + head.passes * e * N * V / _memory
        + sent(exchanges) / bandwidth
        + len(exchanges) * _latency * ceiling(log(W, 2))
    )


class Sizes(NamedTuple):
    """A head's sizes; the fields are symbols of the model, in its order, but for the ranks."""

    n: int
    d: int
    v: int
    element: int = 2
    number: int = 4

    def at(self, ranks: int) -> tuple[int, ...]:
        """The values of ``SIZES`` for a number of ranks."""
        return (self.n, self.d, self.v, ranks, self.element, self.number)


def predicted(name: str, sizes: Sizes, ranks: int, assumed: Assumed) -> float:
    """Seconds of a step."""
    known = zip((*SIZES, *RATES), (*sizes.at(ranks), *assumed), strict=True)
    # sympy evaluates exactly; a logarithm of floats would be rounded up
    return float(seconds(name).subs(dict(known)))


def whole(exchange: Exchange, sizes: Sizes, ranks: int) -> int:
    """Bytes of the whole tensor of a collective."""
    return int(exchange.nbytes.subs(dict(zip(SIZES, sizes.at(ranks), strict=True))))


def per_rank(exchanges: Sequence[Exchange], sizes: Sizes, ranks: int) -> float:
    """Bytes that each rank sends."""
    return float(sent(exchanges).subs(dict(zip(SIZES, sizes.at(ranks), strict=True))))


def table(sizes: Sizes, assumed: Assumed, ranks: Sequence[int] = RANKS) -> str:
    """Predicted bytes and times as markdown."""
    lines = [
        "| ranks | hidden states' gradient, MiB | "
        + " | ".join(f"{name}: loss MiB | ms | speed-up" for name in HEADS)
        + " |",
        "|" + "---:|" * (2 + 3 * len(HEADS)),
    ]
    for w in ranks:
        cells = [str(w), f"{per_rank(HIDDEN['replicated'], sizes, w) / MIB:,.1f}"]
        for name, head in HEADS.items():
            now, alone = (predicted(name, sizes, k, assumed) for k in (w, 1))
            nbytes = per_rank(head.loss, sizes, w) / MIB
            cells += [f"{nbytes:,.2f}", f"{now * 1e3:.2f}", f"{alone / now:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def assumptions(assumed: Assumed) -> str:
    """The assumptions of the prediction, as text."""
    return (
        f"GEMMs at {assumed.flops / 1e12:,.0f} TFLOP/s, memory at {assumed.memory / 1e12:g} TB/s; "
        f"each rank sends at {assumed.within / 1e9:g} GB/s among up to {assumed.node} ranks and at "
        f"{assumed.across / 1e9:g} GB/s among more; a collective takes "
        f"{assumed.latency * 1e6:g} µs for each doubling of the ranks beside that; "
        f"fusedce's budget is {assumed.budget / MIB:,.0f} MiB; nothing overlaps"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bandwidth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add: Any = parser.add_argument
    add("--head", choices=heads.HEADS, default="llama-3-8b", help="whose sizes")
    add("--n", type=int, default=8192, help="rows (tokens)")
    add("--ranks", type=int, nargs="+", default=list(RANKS))
    for field, default in Assumed()._asdict().items():
        add(f"--{field}", type=type(default), default=default, help="assumed; default: %(default)g")
    args = parser.parse_args(argv)
    if min(args.ranks) < 1:
        parser.error("--ranks: at least 1")
    head = heads.HEADS[args.head]
    assumed = Assumed(*(getattr(args, field) for field in Assumed._fields))
    print(
        f"Predicted, not measured: {args.head} (D={head.d}, V={head.v}), N={args.n}, bf16, a step "
        f"of the head and its loss, bytes sent by each rank.\n{assumptions(assumed)}.\n\n"
        f"{table(Sizes(args.n, head.d, head.v), assumed, args.ranks)}"
    )


if __name__ == "__main__":
    sys.exit(main())
