"""One training run of the demo, in a process of its own.

In: a :class:`Job` as JSON in the first argument. Out: one JSON object per line on standard output,
``{"step": ..., "loss": ..., "seconds": ...}`` after every step and ``{"result": ...}`` with the
fields of :class:`Result` at the end. Everything else that is printed goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from fxpass.cli.demo_model import GPT
from fxpass.cli.memory import memory_of

# The first step compiles, the second still allocates the optimizer's state.
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Job:
    """What one process trains: provider, device, model shape, data."""

    provider: str  # "eager" or the name of a torch.compile backend
    device: str
    dtype: str  # of autocast; parameters are float32
    steps: int
    batch: int  # sequences per step
    seq: int  # tokens per sequence
    layers: int
    width: int
    classes: int
    corpus: str  # file with the token indices, int32 [tokens]

    @property
    def logits_bytes(self) -> int:
        """Size of the logits of one step, in bytes, in float32."""
        return self.batch * self.seq * self.classes * 4


@dataclass(frozen=True)
class Result:
    """What one process measured.

    Attributes:
        losses: one per step.
        norms: global gradient norm, one per step.
        step_seconds: median of the steps after the warm-up.
        compile_seconds: how much longer the first step took than the median one.
        peak_bytes: largest memory in use during the measured steps; ``None`` if unknown.
        rest_bytes: memory in use between two steps, before the measured ones; ``None`` if unknown.
        counters: fusedce's own ``matched``, ``rejected``, ``casts``.
        notes: fusedce's own log lines, one per match, rejection and cast.
    """

    losses: list[float]
    norms: list[float]
    step_seconds: float
    compile_seconds: float
    peak_bytes: int | None
    rest_bytes: int | None
    counters: dict[str, int]
    notes: list[str]

    @property
    def step_bytes(self) -> int | None:
        """What a step adds at its peak to what is in use between steps, in bytes."""
        if self.peak_bytes is None or self.rest_bytes is None:
            return None
        return self.peak_bytes - self.rest_bytes


def train(job: Job, report: Callable[[dict[str, Any]], None]) -> Result:
    """Trains ``job.steps`` steps; calls ``report`` after each of them."""
    torch.manual_seed(0)
    device = torch.device(job.device)
    model = GPT(job.classes, job.seq, job.layers, job.width).to(device)
    compiled = model if job.provider == "eager" else torch.compile(model, backend=job.provider)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=job.dtype == "float16")
    autocast = torch.autocast(
        device.type, getattr(torch, job.dtype), enabled=job.dtype != "float32"
    )
    memory = memory_of(device)

    def step(windows: Tensor) -> tuple[float, float]:
        with autocast:
            loss = compiled(windows[:, :-1], windows[:, 1:])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.item(), norm.item()

    losses, norms, seconds = [], [], []
    for i, windows in enumerate(batches(job).to(device)):
        if i == WARM_UP_STEPS:
            memory.start()
        begin = time.perf_counter()
        loss, norm = step(windows)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - begin)
        losses.append(loss)
        norms.append(norm)
        report({"step": i + 1, "loss": loss, "seconds": seconds[-1]})

    median = statistics.median(seconds[WARM_UP_STEPS:])
    return Result(
        losses=losses,
        norms=norms,
        step_seconds=median,
        compile_seconds=max(0.0, seconds[0] - median) if job.provider != "eager" else 0.0,
        peak_bytes=memory.peak(),
        rest_bytes=memory.rest,
        counters=_counters(),
        notes=[],
    )


def _counters() -> dict[str, int]:
    """fusedce's counters; empty where nothing was compiled and Dynamo was never imported."""
    utils = sys.modules.get("torch._dynamo.utils")
    return dict(utils.counters["fusedce"]) if utils is not None else {}


def batches(job: Job) -> Tensor:
    """Windows of the corpus at random places, the same for every provider.

    Returns:
        int64 [steps, batch, seq + 1].
    """
    corpus = torch.load(job.corpus).long()
    generator = torch.Generator().manual_seed(0)
    places = (job.steps, job.batch, 1)
    starts = torch.randint(len(corpus) - job.seq, places, generator=generator)
    return corpus[starts + torch.arange(job.seq + 1)]


class _Notes(logging.Handler):
    """Keeps the text of every log record."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _own_stdout() -> TextIO:
    """The process's standard output, for results only: what others print goes to stderr."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return results


def main() -> None:
    """Runs the job in the first argument."""
    results = _own_stdout()

    def report(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=results, flush=True)

    notes = _Notes()
    logger = logging.getLogger("fxpass")
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    result = train(Job(**json.loads(sys.argv[1])), report)
    result = dataclasses.replace(result, notes=notes.lines)
    report({"result": dataclasses.asdict(result)})


if __name__ == "__main__":
    main()
