"""``python -m benchmarks.memory``: a picture of the memory of a head's training step over its rows.

It measures nothing. A line is the peak beyond hidden states and weight in bf16, gradients included:
fusedce's by its plan for a GPU, the others' by formulas, which equal what GPUs measured::

    python -m benchmarks.memory --svg benchmarks/memory.svg     # the README's picture
    python -m benchmarks.memory --head gemma-2-2b --svg gemma.svg
    >>> {name: line(8192, 4096, 128256) // MIB for name, line in LINES.items()}
    {'eager': 12024, 'Inductor': 3070, 'fusedce': 1567, 'gradients alone': 1066}
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.loss.heads import HEADS, ROWS
from benchmarks.loss.picture import STYLE
from benchmarks.loss.table import MIB
from fxpass.formula.reductions import Reductions
from fxpass.plan.plan import plan_head

LOSS = Reductions((), gradients=("x", "weight"), total=("pick",))
# A browser shows the picture on white or on black: grey can be read on both.
GREY, FUSEDCE, INDUCTOR = "#7d7d7d", STYLE["fusedce"][0], STYLE["inductor"][0]
# Of the picture and of its axes' area, in pixels; the tops of the axes, in GiB and in rows.
SIZE, LEFT, RIGHT, ABOVE, BELOW = (640, 320), 48, 470, 30, 270
HIGHEST, STEP = 10, 256


def gradients(n: int, d: int, v: int) -> int:
    """Bytes of the gradients of hidden states ``[n, d]`` and weight ``[v, d]`` in bf16."""
    return 2 * d * (n + v)


def eager(n: int, d: int, v: int) -> int:
    """Three tensors of ``[n, v]`` in f32, of a loss of ``logits.float()``: the log-softmax, its
    gradient, and that of the logits; or later the logits' in bf16, beside the gradients."""
    return max(12 * n * v, 2 * n * v + gradients(n, d, v))


def inductor(n: int, d: int, v: int) -> int:
    """The logits in bf16, which become their gradient, and the gradients."""
    return 2 * n * v + gradients(n, d, v)


def fusedce(n: int, d: int, v: int) -> int:
    """A chunk of logits, and the gradients or the f32 sums of the weight's."""
    got = plan_head(n, d, v, torch.bfloat16, torch.device("cuda"), LOSS, False, True)
    weight = 2 * d * v
    of_weight = got.sums + max(got.scratch, weight) if got.sums else got.scratch + weight
    return of_weight + 2 * n * d


LINES: dict[str, Callable[[int, int, int], int]] = {
    "eager": eager,
    "Inductor": inductor,
    "fusedce": fusedce,
    "gradients alone": gradients,
}
LOOKS = {
    "eager": f'stroke="{GREY}" stroke-width="2"',
    "Inductor": f'stroke="{INDUCTOR}" stroke-width="2.5"',
    "fusedce": f'stroke="{FUSEDCE}" stroke-width="4"',
    "gradients alone": f'stroke="{GREY}" stroke-dasharray="5 4"',
}


def svg(head: str) -> str:
    """The picture of one of :data:`benchmarks.loss.heads.HEADS`, as text."""
    d, v, _ = HEADS[head]
    most = ROWS[-1]

    def across(n: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * n / most, 1)

    def down(number: float) -> float:
        return round(BELOW - (BELOW - ABOVE) * number / (HIGHEST << 30), 1)

    def text(x: float, y: float, words: str, anchor: str = "start") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'

    drawn = [text(LEFT, 16, f"GiB that a training step adds: {head}'s head, {d} x {v}, bf16")]
    for gib in range(0, HIGHEST + 1, 2):
        y = down(gib << 30)
        drawn.append(f'<path d="M{LEFT} {y}H{RIGHT}" stroke="{GREY}" stroke-opacity=".3"/>')
        drawn.append(text(LEFT - 8, y + 4, str(gib), "end"))
    for n in range(0, most + 1, 8192):
        drawn.append(text(across(n), BELOW + 20, f"{n:,}", "middle"))
    drawn.append(text((LEFT + RIGHT) / 2, BELOW + 40, "rows (tokens)", "middle"))
    for name, line in LINES.items():
        points = [(n, line(n, d, v)) for n in range(ROWS[0], most + 1, STEP)]
        shown = [(n, number) for n, number in points if number <= HIGHEST << 30]
        path = " ".join(f"{across(n)},{down(number)}" for n, number in shown)
        drawn.append(f'<polyline points="{path}" fill="none" {LOOKS[name]}/>')
        n, number = shown[-1]
        last = f"{name}, {points[-1][1] / (1 << 30):.1f}"
        at = across(n) + 8, down(number) + (4 if n == most else 16)
        drawn.append(text(*at, last if n == most else name))
    width, height = SIZE
    look = f'width="{width}" font-family="sans-serif" font-size="13" fill="{GREY}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {look}>'
    return "\n".join([start, *drawn, "</svg>\n"])


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, prints the lines' MiB and writes the picture; returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--head", choices=HEADS, default="llama-3-8b")
    parser.add_argument("--svg", type=Path, help="the file that is written")
    args = parser.parse_args(argv)
    d, v, _ = HEADS[args.head]
    print(f"| {args.head}, N | {' | '.join(LINES)} |\n|---:|{'---:|' * len(LINES)}")
    for n in ROWS:
        print(f"| {n:,} | {' | '.join(f'{line(n, d, v) // MIB:,}' for line in LINES.values())} |")
    if args.svg:
        args.svg.write_text(svg(args.head))
    return 0


if __name__ == "__main__":
    sys.exit(main())
