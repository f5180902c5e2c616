"""Trains one model with a provider, and compares the speed, memory and losses of several.

``fxpass demo`` and ``python -m benchmarks.training`` share this module and differ in model, data,
and in who takes turns. A :class:`Session` trains, a :class:`Row` has its measurements.
:func:`refuse` refuses a provider whose losses differ from eager's, and :func:`table` prints rows.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from typing import Any

import torch
from torch import Generator, Tensor, nn

from fxpass.cli.memory import Memory

MIB = 2**20
WARM_UP_STEPS = 2  # the first compiles, the second still allocates the optimizer's state
UNTIMED_STEPS = WARM_UP_STEPS + 1  # and one step to measure memory

# Largest allowed relative difference from eager at any step: (loss, gradient norm). The providers
# round differently, and the differences grow during training. In 30 steps Inductor differs from
# eager by up to 2e-7 and 2e-7 in float32, 5e-6 and 3e-5 in float16, 3e-5 and 4e-4 in bfloat16. The
# bounds leave two orders of magnitude for other devices and longer runs. The norm is compared
# because AdamW and clipping cancel a wrong factor of the gradient, which the loss would not show.
TOLERANCE = {
    "float32": (1e-4, 1e-3),
    "float16": (1e-3, 5e-3),
    "bfloat16": (4e-3, 4e-2),
}
COLUMNS = (
    "provider", "tokens/s", "min-max", "steps", "/ inductor", "extra MiB", "/ inductor",
    "peak MiB", "loss, first to last", "differs (loss, norm)",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A model of this size, trained with AdamW."""

    provider: str  # "eager" or the name of a torch.compile backend
    device: str
    dtype: str  # of autocast; parameters are float32
    layers: int
    width: int
    classes: int
    batch: int  # sequences per step
    seq: int  # tokens per sequence

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.seq

    def __str__(self) -> str:
        return (
            f"{self.layers} layers x {self.width} x {self.classes} classes, {self.batch} x "
            f"{self.seq} tokens, {self.dtype}, AdamW"
        )


class Session:
    """A model with its provider and optimizer; every command runs the next training step.

    Args:
        make: makes the model; called with a batch, the model returns a mapping with "loss".
        batch: makes the arguments of one step; the generator is the same for every provider.
    """

    def __init__(
        self,
        job: Job,
        make: Callable[[], nn.Module],
        batch: Callable[[Generator], dict[str, Tensor]],
    ) -> None:
        self.job, self.batch, self.steps = job, batch, 0
        self.device = torch.device(job.device)
        self.notes = BufferingHandler(capacity=10_000)  # a line per match, rejection and cast
        logger = logging.getLogger("fxpass")
        logger.addHandler(self.notes)
        logger.setLevel(logging.INFO)
        torch.manual_seed(0)
        self.model = make().to(self.device)
        self.run: Callable[..., Any] = self.model
        if job.provider != "eager":
            self.run = torch.compile(self.model, backend=job.provider)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=job.dtype == "float16")
        self.memory = Memory(self.device)

    def step(self) -> dict[str, Any]:
        """Runs forward, backward, clipping and AdamW; returns seconds, loss and gradient norm."""
        batch = self.batch(Generator().manual_seed(self.steps))
        batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
        self.steps += 1
        dtype = getattr(torch, self.job.dtype)
        begin = time.perf_counter()
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            out = self.run(**batch)
        self.scaler.scale(out["loss"]).backward()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)  # the logits are still alive, as in any training loop
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "loss": out["loss"].item(), "norm": norm.item()}

    def measure(self) -> dict[str, Any]:
        """Runs a step; returns its peak memory and the memory it added in bytes (None: unknown),
        and the counters and log lines of fusedce so far."""
        self.memory.start()
        answer = self.step()
        answer.update(peak_bytes=self.memory.peak(), extra_bytes=self.memory.added())
        # eager never imports Dynamo
        dynamo = sys.modules.get("torch._dynamo.utils")
        counters = dict(dynamo.counters["fusedce"]) if dynamo else {}
        notes = [record.getMessage() for record in self.notes.buffer]
        return {**answer, "counters": counters, "notes": notes}


@dataclass
class Row:
    """The measurements of one provider."""

    name: str
    failure: str = ""  # why it has no numbers; empty if it has
    log: str = ""  # the end of a failed process's output
    losses: list[float] = field(default_factory=list)  # and norms: one per step, untimed ones too
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # one per timed step
    peak_bytes: int | None = None  # of a step, and its part beyond the memory in use before
    extra_bytes: int | None = None
    counters: dict[str, int] = field(default_factory=dict)  # and log lines, of fusedce
    notes: list[str] = field(default_factory=list)
    # the largest relative differences from eager's losses and norms
    differences: tuple[float, float] | None = None

    def add(self, answer: dict[str, Any], timed: bool) -> None:
        """Adds a step of a :class:`Session`, and tells its loss on standard error."""
        self.losses.append(answer.pop("loss"))
        self.norms.append(answer.pop("norm"))
        self.seconds += [seconds := answer.pop("seconds")] * timed
        vars(self).update(answer)
        told = f"{seconds:.2f} s" if timed else "not timed"
        tell(f"{self.name} step {len(self.losses)}: {self.losses[-1]:.3f}, {told}")


def tell(text: str) -> None:
    """Prints progress."""
    print(text, file=sys.stderr, flush=True)


def refuse(rows: Sequence[Row], dtype: str) -> None:
    """Refuses the numbers of rows whose curves differ from eager's, over their common steps."""
    eager = next((row for row in rows if row.name == "eager" and row.losses), None)
    for row in rows:
        steps = min(len(row.losses), len(eager.losses)) if eager else 0
        if eager and steps and not row.failure:
            loss = max_difference(eager.losses[:steps], row.losses[:steps])
            norm = max_difference(eager.norms[:steps], row.norms[:steps])
            row.differences = (loss[0], norm[0])
            found = zip(("loss", "gradient norm"), (loss, norm), TOLERANCE[dtype], strict=True)
            for name, (difference, step), bound in found:
                if not difference <= bound:
                    row.failure = row.failure or (
                        f"refused: {name} differs from eager's by {difference:.1e} at step {step} "
                        f"(bound {bound:.0e})"
                    )
        elif row.losses:
            row.failure = row.failure or "refused: eager has no numbers to compare with"
        if row.failure:
            row.seconds.clear()


def max_difference(expected: Sequence[float], actual: Sequence[float]) -> tuple[float, int]:
    """The largest relative difference of two curves, and its step, counted from 1.

    The first gradients under a GradScaler may overflow; two values that are not finite count as
    equal.
    """

    def difference(left: float, right: float) -> float:
        if math.isfinite(left) != math.isfinite(right):
            return math.inf
        return abs(right - left) / max(abs(left), 1e-12) if math.isfinite(left) else 0.0

    differences = list(map(difference, expected, actual))
    worst = max(range(len(differences)), key=differences.__getitem__)
    return differences[worst], worst + 1


def table(rows: Sequence[Row], tokens: int) -> str:
    """A markdown table with aligned columns; rates in tokens per second."""
    base = next((row for row in rows if row.name == "inductor" and row.seconds), None)
    lines = [COLUMNS, *(_cells(row, base, tokens) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    padded = ([c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)


def _cells(row: Row, base: Row | None, tokens: int) -> tuple[str, ...]:
    if not row.seconds:
        return (row.name, *"-" * (len(COLUMNS) - 2), row.failure or "no rounds")
    rates = [tokens / s for s in row.seconds]
    speed = space = "-"
    if base:
        pairs = zip(base.seconds, row.seconds, strict=False)
        speed = f"{statistics.median(a / b for a, b in pairs):.2f}"
        if row.extra_bytes is not None and base.extra_bytes:
            space = f"{row.extra_bytes / base.extra_bytes:.2f}"
    return (
        row.name,
        f"{statistics.median(rates):,.0f}",
        f"{min(rates):,.0f}-{max(rates):,.0f}",
        f"{len(rates)}",
        speed,
        _mib(row.extra_bytes),
        space,
        _mib(row.peak_bytes),
        f"{row.losses[0]:.4f} to {row.losses[-1]:.4f}",
        "-" if row.differences is None else "{:.1e}, {:.1e}".format(*row.differences),
    )


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:,.0f}"
