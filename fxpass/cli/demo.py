"""``fxpass demo``: trains a small GPT with eager, Inductor and fusedce, and compares them.

In: a :class:`TextJob`. Out: progress on standard error, a report on standard output, and the exit
status.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import torch

from fxpass.cli import doctor
from fxpass.cli.demo_worker import HEAD_WIDTH, TextJob
from fxpass.cli.training import MIB, UNTIMED_STEPS, Row, refuse, table, tell

CLASSES = 50_304  # GPT-2's vocabulary, padded to a multiple of 64


def job_of(
    device: str | None,
    dtype: str | None,
    layers: int,
    heads: int,
    batch: int | None,
    seq: int,
    steps: int,
) -> TextJob:
    """A job without provider; None is the default for the device.

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
    return TextJob("", device, dtype, layers, heads * HEAD_WIDTH, CLASSES, batch, seq, steps)


def run(job: TextJob, providers: Sequence[str]) -> int:
    """Trains with eager and the providers, and prints the comparison.

    Returns:
        0; or 1 if a provider failed, fusedce fused nothing or the curves disagree.
    """
    environ = {"FUSEDCE_MIN_LOGITS_MB": "0", **os.environ}  # fuses a loss of any size
    problem = doctor.inductor_problem(torch.device(job.device).type)
    if problem:
        print(f"Inductor cannot run here: {problem}")
        print("Continuing without it; fusedce hands the rest of its graph to aot_eager.\n")
        environ["FUSEDCE_INNER"] = "aot_eager"
        providers = [name for name in providers if name != "inductor"]
    print("data    words and signs of Python's standard library")
    print(f"model   GPT of {job}, on {job.device}")
    copy = job.tokens * job.classes * 4 / MIB
    print(f"logits  [{job.tokens}, {job.classes}], {copy:.0f} MiB a copy in float32", flush=True)
    rows = train(job, list(dict.fromkeys(["eager", *providers])), environ)
    refuse(rows, job.dtype)
    if any(row.losses for row in rows):
        print(f"\n{report(rows, job.tokens)}")
    found = [f"{row.name}: {row.failure}" for row in rows if row.failure]
    if any(r.name == "fusedce" and r.losses and not r.counters.get("matched") for r in rows):
        found.append("fusedce fused nothing, so there is nothing to compare")
    for text in found:
        tell(f"fxpass demo: {text}")
    return int(bool(found))


def train(job: TextJob, names: Sequence[str], environ: dict[str, str]) -> list[Row]:
    """Trains with each provider in a process of its own, one step in turn: a drift of the machine's
    speed affects all of them."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # runs ``finally``
    rows = [Row(name) for name in names]
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
        for step in range(job.steps):
            for row, process in zip(rows, processes, strict=True):
                if not row.failure:
                    _take_step(row, process, timed=step >= UNTIMED_STEPS)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return rows


def _take_step(row: Row, process: subprocess.Popen[str], timed: bool) -> None:
    assert process.stdin
    assert process.stdout
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("\n")
        process.stdin.flush()
    answer = process.stdout.readline()
    if answer:
        row.add(json.loads(answer), timed)
        return
    status = process.wait()
    killed = status == -getattr(signal, "SIGKILL", 9)
    why = "killed by the system, most likely because of its memory" if killed else "see its error"
    row.failure = f"ended with status {status}: {why}"


def report(rows: Sequence[Row], tokens: int) -> str:
    """The fused losses, the loss curves, and the table, of rows with at least one step."""
    blocks = []
    for row in rows:
        if row.notes:
            fused, others = (row.counters.get(name, 0) for name in ("matched", "rejected"))
            blocks.append([f"{row.name}: {fused} fused, {others} not fused"])
            blocks[-1] += [f"  {note}" for note in row.notes]
    steps = max(len(row.losses) for row in rows)
    shown = sorted({round(i * (steps - 1) / 9) for i in range(10)})
    blocks.append(["loss at  " + "".join(f"{i + 1:>7}" for i in shown)])
    for row in rows:
        curve = "".join(f"{row.losses[i]:>7.3f}" for i in shown if i < len(row.losses))
        blocks[-1].append(f"{row.name:<9}{curve}")
    told = [
        "extra MiB: a step's peak memory beyond the memory in use between steps",
        f"steps: timed steps; {UNTIMED_STEPS} untimed steps come first",
    ]
    return "\n\n".join(map("\n".join, [*blocks, [table(rows, tokens)], told]))
