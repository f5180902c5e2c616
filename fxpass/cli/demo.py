"""``fxpass demo``: trains a small GPT with eager, Inductor and fusedce, and compares them.

In: a :class:`TextJob`. Out: progress on standard error, a report on standard output, and the exit
status.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

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
    corpus = read_corpus(job.classes)
    print(f"data    {len(corpus):,} words and signs of Python's standard library")
    print(f"model   GPT of {job}, on {job.device}")
    copy = job.tokens * job.classes * 4 / MIB
    print(f"logits  [{job.tokens}, {job.classes}], {copy:.0f} MiB a copy in float32", flush=True)
    names = dict.fromkeys(["eager", *providers])
    rows = [train(dataclasses.replace(job, provider=name), corpus, environ) for name in names]
    refuse(rows, job.dtype)
    if any(row.losses for row in rows):
        print(f"\n{report(rows, job.tokens)}")
    found = [f"{row.name}: {row.failure}" for row in rows if row.failure]
    if any(r.name == "fusedce" and r.losses and not r.counters.get("matched") for r in rows):
        found.append("fusedce fused nothing, so there is nothing to compare")
    for text in found:
        tell(f"fxpass demo: {text}")
    return int(bool(found))


def train(job: TextJob, corpus: Tensor, environ: dict[str, str]) -> Row:
    """Trains with one provider in a process of its own, which ends with this one."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    ran = subprocess.run(
        [sys.executable, "-m", "fxpass.cli.demo_worker", json.dumps(dataclasses.asdict(job))],
        input=corpus.numpy().tobytes(),
        stdout=subprocess.PIPE,
        env=environ,
        start_new_session=True,  # Ctrl-C ends this process, which kills the other
    )
    if ran.returncode == 0:
        return Row(**json.loads(ran.stdout.splitlines()[-1]))
    killed = ran.returncode == -getattr(signal, "SIGKILL", 9)
    why = "killed by the system, most likely because of its memory" if killed else "see its error"
    return Row(job.provider, failure=f"ended with status {ran.returncode}: {why}")


def read_corpus(classes: int, root: Path | None = None) -> Tensor:
    """A text that every machine has, int32 ``[tokens]``: Python sources of ``root`` (the standard
    library), until there are as many words as classes.

    The classes are the most frequent words and signs, and 0 for all others. A trimmed Python may
    have fewer words; the last classes do not occur then.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    words: list[str] = []
    counts: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        # installed packages differ between machines
        if not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts):
            found = re.findall(r"\w+|[^\w\s]", path.read_text("utf-8", errors="replace"))
            words += found
            counts.update(found)
        if len(counts) >= classes:
            break
    index = {word: i for i, (word, _) in enumerate(counts.most_common(classes - 1), start=1)}
    numbers = [index.get(word, 0) for word in words]
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")


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
