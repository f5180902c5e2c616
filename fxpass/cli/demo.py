"""``fxpass demo``: trains a small GPT with eager, Inductor and fusedce, and compares them.

In: a :class:`TextJob` and a number of steps. Out: progress on standard error, a report on standard
output, a picture if matplotlib is installed, and the exit status.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fxpass.cli import doctor
from fxpass.cli.demo_worker import HEAD_WIDTH, TextJob
from fxpass.cli.training import MIB, UNTIMED_STEPS, Row, table, train

CLASSES = 50_304  # GPT-2's vocabulary, padded to a multiple of 64
WORKER = "fxpass.cli.demo_worker"


def job_of(
    device: str | None, dtype: str | None, layers: int, heads: int, batch: int | None, seq: int
) -> TextJob:
    """A job without provider and corpus; None is the default for the device.

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
    return TextJob("", device, dtype, layers, heads * HEAD_WIDTH, CLASSES, batch, seq, corpus="")


def run(job: TextJob, providers: Sequence[str], steps: int, picture: Path) -> int:
    """Trains with eager and the providers, ``steps`` steps each (more than ``UNTIMED_STEPS``), and
    prints the comparison.

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
    for name in ("SIGTERM", "SIGHUP"):  # so that ``with`` and ``finally`` clean up
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _end)
    with tempfile.TemporaryDirectory(prefix="fxpass-demo-") as folder:
        file = Path(folder) / "corpus.pt"
        torch.save(corpus, file)
        job = dataclasses.replace(job, corpus=str(file))
        rows = train(WORKER, job, providers, steps - UNTIMED_STEPS, environ=environ)
    if any(row.losses for row in rows):
        print(f"\n{report(rows, job.tokens)}")
        if draw(rows, job, picture):
            print(f"\npicture: {picture}")
    found = problems(rows, steps)
    for text in found:
        print(f"fxpass demo: {text}", file=sys.stderr)
    return int(bool(found))


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


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


def problems(rows: Sequence[Row], steps: int) -> list[str]:
    """The problems, one sentence each, with the end of a failed process's output."""
    found = []
    for row in rows:
        log = "\n".join(["", *row.log.splitlines()[-15:]])
        if row.failure:
            found.append(f"{row.name}: {row.failure}{log.rstrip()}")
        elif len(row.losses) < steps:
            found.append(f"{row.name}: interrupted after {len(row.losses)} of {steps} steps")
        if row.name == "fusedce" and row.losses and not row.counters.get("matched"):
            found.append("fusedce fused nothing, so there is nothing to compare")
    return found


def draw(rows: Sequence[Row], job: TextJob, path: Path) -> bool:
    """Draws loss curves, tokens per second and memory; False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyright: ignore[reportMissingImports]
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    # pyplot would choose a window system and keep global state
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    loss, speed, memory = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    for i, row in enumerate(rows):
        loss.plot(range(1, len(row.losses) + 1), row.losses, label=row.name, linewidth=5 - 2 * i)
        rates = [job.tokens / s for s in row.seconds] or [0.0]
        speed.bar(row.name, sorted(rates)[len(rates) // 2])
        memory.bar(row.name, (row.extra_bytes or 0) / MIB)
    loss.set(title="loss", xlabel="step")
    loss.legend()
    speed.set(title="tokens / s")
    memory.set(title="MiB a step adds")
    figure.suptitle(f"GPT of {job}")
    figure.savefig(path, dpi=120)
    return True
