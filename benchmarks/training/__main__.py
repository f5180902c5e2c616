"""``python -m benchmarks.training``: a whole model's training step, tokens per second and memory.

Trains a small Llama of transformers with a real vocabulary, which returns its logits, with eager,
Inductor and fusedce (which hands the rest of the graph to Inductor)::

    python -m benchmarks.training --json training.json --markdown training.md
    python -m benchmarks.training --layers 2 --width 128 --classes 64000 --dtype bfloat16
    python -m benchmarks.training --loss copied    # what deferred logits cost where all are read

Every provider trains in a separate process, one step in turn. A provider whose losses or gradient
norms differ from eager's by more than rounding is refused; the exit status is 1 if it is fusedce.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.about import about, heading
from benchmarks.training.job import LOSSES, Job
from benchmarks.training.table import table
from benchmarks.training.turns import train
from fxpass.cli.demo import TOLERANCE

PROVIDERS = ("eager", "inductor", "fusedce")


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
    add("--loss", choices=list(LOSSES), default="model", help="where the loss is computed")
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
    sizes = {f.name: getattr(args, f.name) for f in dataclasses.fields(Job) if f.name != "provider"}
    job, what = Job(provider="", **sizes), about(args.device)
    rows = train(job, args.providers, args.rounds, args.timeout)
    text = f"## Training: {heading(what)}\n\n### {job.what}\n\n{table(rows, job.tokens)}\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text)
    if args.json:
        value = {"about": what, "job": dataclasses.asdict(job), "rows": list(map(vars, rows))}
        args.json.write_text(json.dumps(value, indent=1) + "\n")
    return int(any(row.failure and row.name == "fusedce" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
