"""``python -m benchmarks.training``: a whole model's training step, tokens per second and memory.

Trains a small Llama of transformers with a real vocabulary, which returns its logits, with eager,
Inductor and fusedce (which hands the rest of the graph to Inductor)::

    python -m benchmarks.training --json training.json --markdown training.md
    python -m benchmarks.training --layers 2 --width 128 --classes 64000 --dtype bfloat16
    python -m benchmarks.training --loss copied    # what deferred logits cost where all are read
    python -m benchmarks.trainers --markdown benchmarks/trainers/results.md
    python -m benchmarks.trainers --only 'DPO|GRPO' --classes 64000

``benchmarks.trainers`` runs training loops whose loss is outside of the compiled model
(:mod:`benchmarks.trainers.programs`) instead, on a CPU, with plain gradient descent on the same
random tokens. A program is fused if its logits never existed as a whole, forward or backward; its
memory is what the steps add at most to what the process holds, after the first ones, which compile.

Every provider trains in a separate process, one step in turn. A provider whose losses or gradient
norms differ from eager's by more than rounding is refused; the exit status is 1 if it is fusedce.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.about import about, heading
from benchmarks.trainers.programs import PROGRAMS
from benchmarks.training.job import LOSSES, Job
from benchmarks.training.table import Row, table
from benchmarks.training.turns import train
from fxpass.cli.demo import TOLERANCE, print_progress

PROVIDERS = ("eager", "inductor", "fusedce")
SIZES = {
    "layers": "layers",
    "width": "hidden size, whole heads of 64",
    "classes": "vocabulary size",
    "batch": "sequences of a step",
    "seq": "tokens of a sequence",
}
ON_GPU, ON_CPU, OF_TRAINERS = (
    dict(zip(SIZES, numbers, strict=True))
    for numbers in ((16, 2048, 128256, 8, 2048), (4, 256, 32000, 2, 512), (2, 128, 32000, 8, 128))
)


def main(argv: Sequence[str] | None = None, trainers: bool = False) -> int:
    """Parses the command line, trains, prints and writes; returns the exit status."""
    args = parser(trainers).parse_args(argv)
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("this needs a model of transformers: pip install transformers")
    fields = [f.name for f in dataclasses.fields(Job) if f.name not in ("provider", "program")]
    job, what = Job("", **{name: getattr(args, name) for name in fields}), about(args.device)
    names = [name for name in PROGRAMS if re.search(args.only, name)] if trainers else [""]
    results: list[tuple[str, list[Row]]] = []
    text = ""
    for name in names:
        of_name = dataclasses.replace(job, program=name)
        print_progress(of_name.what)
        missing = PROGRAMS[name].missing if name else []
        rows = [Row("fusedce", f"needs {', '.join(missing)}")] if missing else None
        results.append(
            (name or "Llama", rows or train(of_name, args.providers, args.rounds, args.timeout))
        )
        # only the whole model is trained with AdamW
        loops = f"{job.steps} steps of {str(job).replace('AdamW', 'plain gradient descent')}"
        title = loops if trainers else job.what
        text = f"## Training: {heading(what)}\n\n### {title}\n\n{table(results, job.tokens)}\n"
        if args.markdown:
            args.markdown.write_text(text)
    print(text)
    if args.json:
        found = [{"program": name, "rows": list(map(vars, rows))} for name, rows in results]
        value = {"about": what, "job": dataclasses.asdict(job), "results": found}
        args.json.write_text(json.dumps(value, indent=1) + "\n")
    ours = [row for _, rows in results for row in rows if row.name == "fusedce"]
    return int(any(row.failure for row in ours))


def parser(trainers: bool) -> argparse.ArgumentParser:
    """The command line of both."""
    on_gpu = torch.cuda.is_available() and not trainers
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{'trainers' if trainers else 'training'}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    sizes = OF_TRAINERS if trainers else ON_GPU if on_gpu else ON_CPU
    for name, what in SIZES.items():
        add(f"--{name}", type=int, default=sizes[name], help=what)
    add("--providers", nargs="+", default=list(PROVIDERS), help="torch.compile backends or eager")
    add("--timeout", type=float, default=1800.0, help="seconds that a step, or a program, may take")
    add("--json", type=Path)
    add("--markdown", type=Path)
    if trainers:
        add("--only", default="", help="a pattern of the programs' names")
        add("--steps", type=int, default=20, help="of a program")
        parser.set_defaults(loss="model", dtype="float32", device="cpu", rounds=0)
        return parser
    add("--loss", choices=list(LOSSES), default="model", help="where the loss is computed")
    add("--dtype", choices=sorted(TOLERANCE), default="bfloat16" if on_gpu else "float32")
    add("--device", default="cuda" if on_gpu else "cpu")
    add("--rounds", type=int, default=7, help="timed steps of each provider")
    parser.set_defaults(steps=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
