"""What the demo says about its measurements, and whether the curves agree.

In: one :class:`fxpass.cli.demo_worker.Result` per provider. Out: text, a list of :class:`Check`,
and a picture. Nothing here runs a model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fxpass.cli.demo_worker import WARM_UP_STEPS, Job, Result

MIB = 2**20

# Largest relative difference from the reference, at any step: (loss, gradient norm). The providers
# round differently, and training carries the differences on. Inductor measures up to 2e-7 and
# 2e-7 from eager in 30 steps of float32, 5e-6 and 3e-5 of float16, 3e-5 and 4e-4 of bfloat16; the
# bounds leave two orders of magnitude for other devices and longer runs. The norm is compared
# because AdamW and clipping forgive a gradient that is wrong by a factor, so the loss alone would
# not show it.
TOLERANCE = {
    "float32": (1e-4, 1e-3),
    "float16": (1e-3, 5e-3),
    "bfloat16": (4e-3, 4e-2),
}


@dataclass(frozen=True)
class Check:
    """The comparison of one curve of one provider with the reference's.

    Attributes:
        provider, reference, quantity: what is compared with what.
        difference: the largest relative difference; infinite if only one of them is finite.
        step: where it is, counted from 1.
        tolerance: how much is allowed.
    """

    provider: str
    reference: str
    quantity: str
    difference: float
    step: int
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether the curves are the same but for rounding."""
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        verdict = "agrees with" if self.agrees else "DISAGREES with"
        return (
            f"{self.quantity} of {self.provider} {verdict} {self.reference}: largest relative "
            f"difference {self.difference:.1e} (step {self.step}), allowed {self.tolerance:.0e}"
        )


def compare(results: dict[str, Result], dtype: str) -> list[Check]:
    """Loss and gradient norm of every provider against the first one's, at every step."""
    checks = []
    (reference, expected), *others = results.items()
    for provider, result in others:
        curves = (
            ("loss", expected.losses, result.losses),
            ("gradient norm", expected.norms, result.norms),
        )
        for (quantity, left, right), tolerance in zip(curves, TOLERANCE[dtype], strict=True):
            difference, step = max_difference(left, right)
            checks.append(Check(provider, reference, quantity, difference, step, tolerance))
    return checks


def max_difference(expected: Sequence[float], actual: Sequence[float]) -> tuple[float, int]:
    """The largest relative difference of two curves, and its step, counted from 1.

    A GradScaler's first gradients may overflow: two values that are not finite do not differ.
    """
    differences = []
    for left, right in zip(expected, actual, strict=True):
        if math.isfinite(left) and math.isfinite(right):
            differences.append(abs(right - left) / max(abs(left), 1e-12))
        else:
            differences.append(math.inf if math.isfinite(left) or math.isfinite(right) else 0.0)
    worst = max(range(len(differences)), key=differences.__getitem__)
    return differences[worst], worst + 1


def fused_text(result: Result) -> str:
    """What fusedce did to the model, in its own words."""
    counts = ", ".join(f"{result.counters.get(k, 0)} {k}" for k in ("matched", "rejected", "casts"))
    return "\n".join([f"fusedce: {counts}", *(f"  {note}" for note in result.notes)])


def measurements_text(results: dict[str, Result]) -> str:
    """Time and memory, one row per provider, with the ratios to Inductor's."""
    base = results.get("inductor")
    head = (
        "provider", "step time", "vs inductor", "step memory", "vs inductor", "peak memory",
        "compile", "final loss",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [head]
    for provider, result in results.items():
        rows.append(
            (
                provider,
                f"{result.step_seconds * 1e3:,.0f} ms",
                _ratio(result.step_seconds, base and base.step_seconds),
                _mib(result.step_bytes),
                _ratio(result.step_bytes, base and base.step_bytes),
                _mib(result.peak_bytes),
                "-" if provider == "eager" else f"{result.compile_seconds:.1f} s",
                f"{result.losses[-1]:.4f}",
            )
        )
    return (
        f"{_table(rows)}\n"
        f"step time: median without the first {WARM_UP_STEPS} steps; compile: what the first step "
        "took longer\n"
        "step memory: what one step adds, at its peak, to what the process holds between steps\n"
        "peak memory: all that is in use at that moment, on a CPU the libraries too"
    )


def curves_text(results: dict[str, Result], samples: int = 7) -> str:
    """The loss of every provider at a few steps, from the first to the last."""
    steps = len(next(iter(results.values())).losses)
    shown = sorted({round(i * (steps - 1) / (samples - 1)) for i in range(samples)})
    rows = [("loss at step", *(str(i + 1) for i in shown))]
    for provider, result in results.items():
        rows.append((provider, *(f"{result.losses[i]:.4f}" for i in shown)))
    return _table(rows)


def draw(results: dict[str, Result], job: Job, path: Path) -> bool:
    """Draws loss curves, step time and step memory into ``path``.

    Returns:
        False if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyright: ignore[reportMissingImports]
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    # A figure of its own: pyplot would choose a window system and keep global state.
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    loss, seconds, memory = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    for width, (provider, result) in zip((5, 3, 1), results.items(), strict=False):
        loss.plot(range(1, job.steps + 1), result.losses, label=provider, linewidth=width)
    loss.set(title="loss", xlabel="step")
    loss.legend()
    names = list(results)
    colors = [f"C{i}" for i in range(len(names))]
    seconds.bar(names, [r.step_seconds * 1e3 for r in results.values()], color=colors)
    seconds.set(title="step time (ms)")
    memory.bar(names, [(r.step_bytes or 0) / MIB for r in results.values()], color=colors)
    memory.set(title="step memory (MiB)")
    rows = job.batch * job.seq
    figure.suptitle(f"{rows} tokens, {job.classes} classes, {job.dtype} on {job.device}")
    figure.savefig(path, dpi=120)
    return True


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}x" if value is not None and base else "-"


def _mib(value: int | None) -> str:
    return "unknown" if value is None else f"{value / MIB:,.0f} MiB"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
