"""``python -m benchmarks.training``: a whole model's training step, tokens per second and memory.

A small Llama of transformers with a real vocabulary returns its logits, as Hugging Face models do,
and is trained by eager, by Inductor and by fusedce (which hands the rest to Inductor)::

    python -m benchmarks.training --json training.json --markdown training.md
    python -m benchmarks.training --layers 2 --width 128 --classes 64000 --dtype bfloat16

Every provider trains in a process of its own, one step in turn. One whose losses or gradient norms
differ from eager's by more than rounding gets no numbers, and the status is 1 if that was fusedce.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.about import about, heading
from benchmarks.loss.measure import Say, say
from benchmarks.loss.table import MIB
from benchmarks.loss.worker import job as as_argument
from benchmarks.process import Worker, WorkerError
from benchmarks.training.worker import Job
from fxpass.cli.demo_report import TOLERANCE, max_difference

WORKER = "benchmarks.training.worker"
PROVIDERS = ("eager", "inductor", "fusedce")
WARM_UP_STEPS = 2  # the first compiles, the second still allocates the optimizer's state


@dataclass
class Row:
    """What is known of one provider.

    Attributes:
        failure: why it has no numbers; empty if it has.
        losses, norms: one per step from the first on, those that are not timed included.
        seconds: one per round.
        peak_bytes, extra_bytes: of a step: all that is in use, and what it adds.
        differences: from eager's losses and norms, the largest relative ones.
    """

    name: str
    failure: str = ""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    extra_bytes: int | None = None
    differences: tuple[float, float] | None = None


def train(job: Job, names: Sequence[str], rounds: int, timeout: float, say: Say) -> list[Row]:
    """Warms up and measures each provider, then lets them step in turn; refuses who differs."""
    rows = [Row(name) for name in names]
    workers: dict[str, Worker] = {}

    def attempt(row: Row, function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return function()
        except WorkerError as error:
            row.failure = str(error)
            row.seconds.clear()
            del workers[row.name]
            say(f"{row.name}: {row.failure}")
            return {}

    def step(row: Row, command: str = "step") -> dict[str, Any]:
        if row.name not in workers:
            return {}
        answer = attempt(row, lambda: workers[row.name].ask(command))
        if answer:
            row.losses.append(answer["loss"])
            row.norms.append(answer["norm"])
        return answer

    try:
        for name in names:  # they import side by side
            own = as_argument(dataclasses.replace(job, provider=name))
            workers[name] = Worker(WORKER, own, timeout)
        for row in rows:
            attempt(row, workers[row.name].answer)
        for row in rows:
            warm = [step(row) for _ in range(WARM_UP_STEPS)]
            answer = step(row, "measure")
            row.peak_bytes, row.extra_bytes = answer.get("peak_bytes"), answer.get("extra_bytes")
            if answer:
                say(f"{row.name}: first step {warm[0]['seconds']:.1f} s")
        for _ in range(rounds):
            for row in rows:
                if answer := step(row):
                    row.seconds.append(answer["seconds"])
    except KeyboardInterrupt:
        say("interrupted")
        for worker in workers.values():
            worker.kill()
    for worker in workers.values():
        worker.close()
    refuse(rows, job.dtype)
    return rows


def refuse(rows: Sequence[Row], dtype: str) -> None:
    """Takes the numbers of those whose curves differ from eager's, as far as both go."""
    eager = next((row for row in rows if row.name == "eager" and row.losses), None)
    for row in rows:
        steps = min(len(row.losses), len(eager.losses)) if eager else 0
        if row.failure or not steps:
            row.failure = row.failure or "refused: there is nothing of eager's to compare with"
            row.seconds.clear()
            continue
        assert eager
        found = []
        for name, of_row, of_eager, bound in zip(
            ("loss", "gradient norm"),
            (row.losses, row.norms),
            (eager.losses, eager.norms),
            TOLERANCE[dtype],
            strict=True,
        ):
            difference, step = max_difference(of_eager[:steps], of_row[:steps])
            found.append(difference)
            if not difference <= bound and not row.failure:
                row.failure = (
                    f"refused: {name} differs from eager's by {difference:.1e} at step {step} "
                    f"(bound {bound:.0e})"
                )
                row.seconds.clear()
        row.differences = (found[0], found[1])


def table(rows: Sequence[Row], tokens: int) -> str:
    """A markdown table; rates in tokens per second."""
    lines = [
        "| provider | tokens/s (median) | min-max | steps | / inductor | step's extra peak MiB "
        "| / inductor | peak MiB | loss, first to last | differs from eager (loss, norm) |",
        "|" + "---|" * 10,
    ]
    base = next((row for row in rows if row.name == "inductor" and row.seconds), None)
    for row in rows:
        if not row.seconds:
            lines.append(f"| {row.name} |{' - |' * 8} {row.failure or 'no rounds'} |")
            continue
        rates = [tokens / s for s in row.seconds]
        speed = space = "-"
        if base:
            pairs = zip(base.seconds, row.seconds, strict=False)
            speed = f"{statistics.median(a / b for a, b in pairs):.2f}"
            if row.extra_bytes is not None and base.extra_bytes:
                space = f"{row.extra_bytes / base.extra_bytes:.2f}"
        differs = "-" if row.differences is None else "{:.1e}, {:.1e}".format(*row.differences)
        lines.append(
            f"| {row.name} | {statistics.median(rates):,.0f} | {min(rates):,.0f}-{max(rates):,.0f} "
            f"| {len(rates)} | {speed} | {_mib(row.extra_bytes)} | {space} "
            f"| {_mib(row.peak_bytes)} | {row.losses[0]:.4f} to {row.losses[-1]:.4f} | {differs} |"
        )
    return "\n".join(lines)


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:,.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, trains, prints and writes; returns the exit status."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--layers", type=int, default=16 if on_gpu else 4)
    add("--width", type=int, default=2048 if on_gpu else 256, help="hidden size, whole heads of 64")
    add("--classes", type=int, default=128256 if on_gpu else 32000)
    add("--batch", type=int, default=8 if on_gpu else 2, help="sequences of a step")
    add("--seq", type=int, default=2048 if on_gpu else 512, help="tokens of a sequence")
    add("--dtype", choices=sorted(TOLERANCE), default="bfloat16" if on_gpu else "float32")
    add("--device", default="cuda" if on_gpu else "cpu")
    add("--providers", nargs="+", default=list(PROVIDERS), help="torch.compile backends or eager")
    add("--rounds", type=int, default=7, help="timed steps of each provider")
    add("--timeout", type=float, default=1800.0, help="seconds that a step may take")
    add("--json", type=Path)
    add("--markdown", type=Path)
    args = parser.parse_args(argv)
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("this needs a model of transformers: pip install transformers")
    names = list(dict.fromkeys(["eager", *args.providers]))  # the curves are compared with eager's
    sizes = {f.name: getattr(args, f.name) for f in dataclasses.fields(Job) if f.name != "provider"}
    job, what = Job(provider="", **sizes), about(args.device)
    rows = train(job, names, args.rounds, args.timeout, say)
    text = f"## Training: {heading(what)}\n\n### {job}\n\n{table(rows, job.tokens)}\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text)
    if args.json:
        value = {"about": what, "job": dataclasses.asdict(job), "rows": list(map(vars, rows))}
        args.json.write_text(json.dumps(value, indent=1) + "\n")
    return int(any(row.failure and row.name == "fusedce" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
