"""Time against extra memory, a panel per case, a point per provider.

In: :class:`benchmarks.loss.rows.Result`. Out: an image; needs matplotlib.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.about import heading
from benchmarks.loss.providers import BARE
from benchmarks.loss.rows import Result, Row
from benchmarks.loss.table import MIB

MISSING = "the picture needs matplotlib: pip install matplotlib"
# Okabe and Ito's colours, which colour-blind people can distinguish; the marks differ as well.
STYLE = {
    "eager": ("#000000", "o"),
    "inductor": ("#E69F00", "s"),
    "auto_chunker": ("#E69F00", "D"),
    "core": ("#56B4E9", "^"),
    "liger": ("#009E73", "v"),
    "cce": ("#CC79A7", "P"),
    "quack": ("#0072B2", "X"),
    "fusedce": ("#D55E00", "*"),
    "fusedce_chunked": ("#D55E00", "<"),
    "fusedce_tiled": ("#D55E00", ">"),
}
ACROSS = 4  # panels in a row
LEAST = 1.0  # MiB: a logarithm has no zero


def problem() -> str:
    """Why a picture cannot be drawn; empty if it can."""
    return "" if importlib.util.find_spec("matplotlib") else MISSING


def draw(results: Sequence[Result], what: dict[str, Any], path: Path) -> None:
    """Draws all cases that have numbers into ``path``, whose suffix is the format.

    Raises:
        ImportError: without matplotlib; ValueError: a suffix that it does not know.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyright: ignore[reportMissingImports]
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    shown = [r for r in results if any(points(r))]
    across = max(1, min(ACROSS, len(shown)))
    down = max(1, -(-len(shown) // across))
    # pyplot would choose a window system and keep global state
    figure = Figure(figsize=(5.2 * across, 4.2 * down + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for panel, result in zip(panels, shown, strict=False):
        _panel(panel, result)
    for panel in panels[len(shown) :]:
        panel.set_axis_off()
    figure.suptitle(heading(what), fontsize=9, wrap=True)
    figure.savefig(path, dpi=120)


def points(result: Result) -> list[tuple[Row, float, float]]:
    """The providers with time and memory: row, extra peak in MiB, milliseconds."""
    return [
        (row, max(row.extra_bytes / MIB, LEAST), row.median * 1e3)
        for row in result.rows
        if row.median is not None and row.extra_bytes is not None
    ]


def _panel(panel: Any, result: Result) -> None:
    for row, size, time in points(result):
        color, mark = STYLE.get(row.name, ("#999999", "."))
        panel.scatter(size, time, color=color, marker=mark, s=60, zorder=3)
        side, offset = ("right", (-7, -10)) if row.name == "fusedce" else ("left", (7, 4))
        panel.annotate(  # fusedce is at the point of its strategy: its label is on the other side
            row.name, (size, time), textcoords="offset points", xytext=offset, ha=side, fontsize=8
        )
    bare = result.row(BARE)
    if bare and bare.median:
        panel.axhline(bare.median * 1e3, color="#999999", linestyle="--", linewidth=1)
        panel.annotate(
            "bare GEMMs", (0.01, bare.median * 1e3), xycoords=("axes fraction", "data"),
            textcoords="offset points", xytext=(0, 3), fontsize=8, color="#666666",
        )  # fmt: skip
    panel.set(xscale="log", yscale="log", xlabel="extra peak memory (MiB)", ylabel="time (ms)")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}" if axis is panel.xaxis else "")
        axis.set_tick_params(which="both", labelsize=7)
    panel.margins(0.2)
    title = f"{result.head + ': ' if result.head else ''}{result.case}"
    panel.set_title(title, fontsize=8)
