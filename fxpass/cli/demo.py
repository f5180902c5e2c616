"""``fxpass demo``: trains a small GPT with eager, Inductor and fusedce, and compares them.

In: a :class:`Job`. Out: progress on standard error, a report on standard output, and the exit
status.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpass.cli import doctor
from fxpass.cli.demo_worker import HEAD_WIDTH, UNTIMED_STEPS, Job

CLASSES = 50_304  # GPT-2's vocabulary, padded to a multiple of 64
MIB = 2**20
# Largest relative difference from eager's loss at any step; of the gradient's norm ten times that,
# which is compared because AdamW and clipping cancel a wrong factor of the gradient. The providers
# round differently, and the differences grow: in 30 steps Inductor's losses differ by up to 2e-7 in
# float32, 5e-6 in float16 and 3e-5 in bfloat16. The bounds leave two orders of magnitude.
TOLERANCE = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 4e-3}


@dataclass
class Trial:
    """The measurements of training with one provider."""

    name: str
    failure: str = ""  # why it has no numbers; empty if it has numbers
    losses: list[float] = field(default_factory=list)  # as norms and seconds, one per step
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    extra_bytes: int | None = None  # a step's peak memory beyond the memory in use before it
    counters: dict[str, int] = field(default_factory=dict)  # of fusedce
    notes: list[str] = field(default_factory=list)  # fusedce's log lines

    @property
    def timed(self) -> list[float]:
        """The seconds of the timed steps; none of a failed run."""
        return [] if self.failure else self.seconds[UNTIMED_STEPS:]

    def add(self, answer: dict[str, Any]) -> None:
        """Adds a step of :func:`fxpass.cli.demo_worker.train_steps`, and prints its loss on
        standard error."""
        self.losses.append(answer.pop("loss"))
        self.norms.append(answer.pop("norm"))
        self.seconds.append(answer.pop("seconds"))
        vars(self).update(answer)  # memory, counters and notes, of one step
        loss = self.losses[-1]
        seconds = self.seconds[-1]
        print_progress(f"{self.name} step {len(self.losses)}: {loss:.3f}, {seconds:.2f} s")


def print_progress(text: str) -> None:
    """Prints a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def job_of(
    device: str | None, dtype: str | None, batch: int | None, heads: int, **sizes: int
) -> Job:
    """A job without provider, with layers and seq in ``sizes``; None: the device's default.

    Raises:
        ValueError: torch cannot use the device.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        kind = torch.empty(0, device=device).device.type
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from error
    native = kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = dtype or ("bfloat16" if native else "float32")
    batch = batch or (8 if kind == "cpu" else 16)
    width = heads * HEAD_WIDTH
    return Job("", device, dtype, width=width, classes=CLASSES, batch=batch, **sizes)


def compare_providers(job: Job, steps: int, providers: Sequence[str]) -> int:
    """Trains with eager and the providers, and prints the comparison.

    Returns:
        0; or 1 if a provider failed, fusedce fused nothing or the losses disagree.
    """
    environ = {"FUSEDCE_MIN_LOGITS_MB": "0", **os.environ}  # fuses a loss of any size
    if problem := doctor.inductor_problem(torch.device(job.device).type):
        print(f"Inductor cannot run here: {problem}")
        print("Continuing without it; fusedce hands the rest of its graph to aot_eager.\n")
        environ["FUSEDCE_INNER"] = "aot_eager"
        providers = [name for name in providers if name != "inductor"]
    print("data    words and signs of Python's standard library")
    print(f"model   GPT of {job}, on {job.device}")
    copy = job.tokens * job.classes * 4 / MIB
    print(f"logits  [{job.tokens}, {job.classes}], {copy:.0f} MiB a copy in float32", flush=True)
    trials = train_in_turn(job, steps, list(dict.fromkeys(["eager", *providers])), environ)
    refuse(trials, job.dtype)
    if any(trial.losses for trial in trials):
        print(f"\n{report(trials, job.tokens)}")
    failures = [f"{trial.name}: {trial.failure}" for trial in trials if trial.failure]
    fusedce = next((trial for trial in trials if trial.name == "fusedce"), None)
    if fusedce and fusedce.losses and not fusedce.counters.get("matched"):
        failures.append("fusedce fused nothing, so there is nothing to compare")
    for text in failures:
        print_progress(f"fxpass demo: {text}")
    return int(bool(failures))


def train_in_turn(
    job: Job, steps: int, names: Sequence[str], environ: dict[str, str]
) -> list[Trial]:
    """Trains with each provider in a process of its own, one step in turn: a drift of the machine's
    speed affects all of them."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # runs ``finally``
    trials = [Trial(name) for name in names]
    processes: list[subprocess.Popen[str]] = []
    try:
        for name in names:
            fields = {**dataclasses.asdict(job), "provider": name}
            process = subprocess.Popen(
                [sys.executable, "-m", "fxpass.cli.demo_worker", json.dumps(fields)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environ,
                start_new_session=True,  # Ctrl-C ends this process, which kills the others
            )
            processes.append(process)
        for _ in range(steps):
            for trial, process in zip(trials, processes, strict=True):
                if not trial.failure:
                    _train_step(trial, process)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return trials


def _train_step(trial: Trial, process: subprocess.Popen[str]) -> None:
    assert process.stdin
    assert process.stdout
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("\n")
        process.stdin.flush()
    if line := process.stdout.readline():
        trial.add(json.loads(line))
        return
    status = process.wait()
    killed = status == -getattr(signal, "SIGKILL", 9)
    why = "killed by the system, most likely because of its memory" if killed else "see its error"
    trial.failure = f"ended with status {status}: {why}"


def refuse(trials: Sequence[Trial], dtype: str) -> None:
    """Refuses the numbers of trials whose curves differ from those of eager, the first trial, over
    their common steps."""
    eager = trials[0]
    bound = TOLERANCE[dtype]
    for trial in trials:
        if trial.losses and not eager.losses:
            trial.failure = trial.failure or "refused: eager has no numbers to compare with"
        for curve, most in (("losses", bound), ("norms", 10 * bound)):
            step = first_difference(getattr(eager, curve), getattr(trial, curve), most)
            if step is not None:
                why = f"{curve} differ from eager's at step {step} (bound {most:.0e})"
                trial.failure = trial.failure or f"refused: {why}"


def first_difference(expected: Sequence[float], actual: Sequence[float], most: float) -> int | None:
    """The first step, counted from 1, at which two curves differ relatively by more than ``most``.

    Two values that are not finite count as equal: the first gradients under a GradScaler may
    overflow.
    """
    for step, pair in enumerate(zip(expected, actual, strict=False), 1):
        if not math.isclose(*pair, rel_tol=most) and any(map(math.isfinite, pair)):
            return step
    return None


def report(trials: Sequence[Trial], tokens: int) -> str:
    """The fused losses, the loss curves, and a table of speed and memory."""
    blocks = []
    for trial in trials:
        if trial.notes:
            fused, others = (trial.counters.get(name, 0) for name in ("matched", "rejected"))
            notes = "".join(f"\n  {note}" for note in trial.notes)
            blocks.append(f"{trial.name}: {fused} fused, {others} not fused{notes}")
    steps = max(len(trial.losses) for trial in trials)
    shown = sorted({round(i * (steps - 1) / 9) for i in range(10)})
    curves = [("loss at step", *(str(i + 1) for i in shown))]
    for trial in trials:
        losses = dict(enumerate(trial.losses))
        curves.append((trial.name, *(f"{losses[i]:.3f}" if i in losses else "" for i in shown)))
    table = [("provider", "tokens/s", "/ inductor", "extra MiB", "/ inductor")]
    timed = [trial for trial in trials if trial.timed]
    base = next((trial for trial in timed if trial.name == "inductor"), None)
    for trial in timed:
        speed = tokens / statistics.median(trial.timed)
        size = trial.extra_bytes
        times = share = "-"
        if base:
            rounds = zip(base.timed, trial.timed, strict=True)
            times = f"{statistics.median(theirs / own for theirs, own in rounds):.2f}"
            share = f"{size / base.extra_bytes:.2f}" if size and base.extra_bytes else "-"
        mib = "-" if size is None else f"{size / MIB:,.0f}"
        table.append((trial.name, f"{speed:,.0f}", times, mib, share))
    legend = (
        "extra MiB: a step's peak memory beyond the memory in use between steps\n"
        f"tokens/s: of the median step; the first {UNTIMED_STEPS} steps are not timed"
    )
    return "\n\n".join([*blocks, doctor.aligned(curves), doctor.aligned(table), legend])
