"""``python -m benchmarks.communication``: counts the bytes that ranks of a sharded head exchange.

Each of several programs runs one training step of a head with a sharded vocabulary and its mean
cross-entropy, on gloo ranks of one machine, or with NCCL if there are as many GPUs. Collectives are
counted at the process group (:mod:`benchmarks.communication.collectives`), and their bytes compared
with the model (:mod:`benchmarks.bandwidth`)::

    python -m benchmarks.communication --markdown benchmarks/communication/results.md
    python -m benchmarks.communication --ranks 2 --programs fusedce "gathered logits, eager"

A program whose error against float64 exceeds twice the error of eager in one process is refused.
The exit status is 1 if fusedce is refused, or if the collectives differ from the model. Most of the
time goes into Inductor's C++ compiler; ``--inner aot_eager`` with the eager programs is much faster
and counts the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import bandwidth
from benchmarks.about import about, heading
from benchmarks.bandwidth import Exchange, Sizes
from benchmarks.communication.collectives import RING, Call
from benchmarks.communication.worker import HIDDEN, PROGRAMS, Job, RanksError, Step, run, wrong
from benchmarks.loss.measure import say

# program → the model of its exchanges, a key of bandwidth.HEADS
MODEL = {
    "fusedce": "fusedce",
    "fusedce, of the program that gathers": "fusedce",
    "loss_parallel, eager": "loss_parallel",
    "loss_parallel, Inductor": "loss_parallel",
    "gathered logits, eager": "gathered logits",
    "gathered logits, Inductor": "gathered logits",
}


Pair = tuple[float, float]  # forward, backward


@dataclasses.dataclass
class Row:
    """One line of the table; bytes are those that one rank sends per row of logits.

    Attributes:
        failure: why there are no numbers; empty if there are.
        collectives: of the loss.
        loss, hidden: bytes of the loss, and of the hidden states and their gradient.
        model_loss, model_hidden: what they should be.
        as_modelled: whether exactly the model's collectives were issued.
    """

    program: str
    hidden_states: str
    ranks: int
    failure: str = ""
    collectives: str = ""
    loss: Pair = (0.0, 0.0)
    hidden: Pair = (0.0, 0.0)
    model_loss: Pair = (0.0, 0.0)
    model_hidden: Pair = (0.0, 0.0)
    as_modelled: bool = False


def ring(call: Call, ranks: int) -> float:
    """Bytes that a rank sends in one collective."""
    return RING[call.op] * call.nbytes * (ranks - 1) / ranks


def of_hidden_states(call: Call, job: Job) -> bool:
    """Whether the tensor has the size of the hidden states or their gradient, ``[N, D]``."""
    return call.numel == job.n * job.d


def rows_of(job: Job, each: Sequence[Sequence[Step]], eager: dict[str, float]) -> list[Row]:
    """The lines of one number of ranks.

    Args:
        each: the steps of each rank, in the order of the job.
        eager: errors of eager, in one process.
    """
    return [_row(job, steps, eager) for steps in zip(*each, strict=True)]


def _row(job: Job, steps: Sequence[Step], eager: dict[str, float]) -> Row:
    """One step, by all ranks."""
    step = steps[0]
    row = Row(step.program, step.hidden, job.world)
    passes = (step.forward, step.backward)
    row.failure = next(filter(None, (wrong(s, eager, job.dtype) for s in steps)), "")
    if not row.failure and any((s.forward, s.backward) != passes for s in steps):
        row.failure = "refused: the ranks do not issue the same collectives"
    if row.failure:
        return row
    for_loss, for_hidden = (
        [[c for c in part if of_hidden_states(c, job) == hidden] for part in passes]
        for hidden in (False, True)
    )
    row.loss, row.hidden = _sent(for_loss, job), _sent(for_hidden, job)
    of_loss = _model(bandwidth.HEADS[MODEL[step.program]].loss, job)
    of_hidden = _model(bandwidth.HIDDEN[step.hidden], job)
    row.model_loss, row.model_hidden = _sent(of_loss, job), _sent(of_hidden, job)
    row.as_modelled = all(
        _whole(calls) == _whole(model)
        for calls, model in zip((*for_loss, *for_hidden), (*of_loss, *of_hidden), strict=True)
    )
    named = {"forward": _named(for_loss[0]), "backward": _named(for_loss[1])}
    row.collectives = ", ".join(f"{key}: {text}" for key, text in named.items() if text)
    return row


def _sent(passes: Sequence[Sequence[Call]], job: Job) -> Pair:
    forward, backward = (sum(ring(c, job.world) for c in part) / job.n for part in passes)
    return forward, backward


def _model(exchanges: Sequence[Exchange], job: Job) -> list[list[Call]]:
    """The model's collectives, as if they had been counted; forward and backward."""
    sizes = Sizes(job.n, job.d, job.v, job.case.itemsize)
    calls = [Call(x.op, bandwidth.whole(x, sizes, job.world), 1) for x in exchanges]
    return [
        [call for call, x in zip(calls, exchanges, strict=True) if x.backward == backward]
        for backward in (False, True)
    ]


def _whole(calls: Sequence[Call]) -> Counter[tuple[str, int]]:
    return Counter((call.op, call.nbytes) for call in calls)


def _named(calls: Sequence[Call]) -> str:
    counts = Counter(call.op for call in calls)
    return " + ".join(f"{count} {op}" for op, count in counts.items())


def table(rows: Sequence[Row]) -> str:
    """A markdown table: bytes per row and rank, forward + backward, as counted and as modelled."""
    lines = [
        "| program | hidden states | ranks | collectives of the loss | bytes of the loss | model "
        "| bytes of hidden states | model | |",
        "|---|---|---:|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        start = f"| {row.program} | {row.hidden_states} | {row.ranks} |"
        if row.failure:
            lines.append(f"{start}{' - |' * 5} {row.failure} |")
            continue
        pairs = (row.loss, row.model_loss, row.hidden, row.model_hidden)
        numbers = " | ".join(_pair(p) for p in pairs)
        note = "" if row.as_modelled else "not as modelled"
        lines.append(f"{start} {row.collectives or 'none'} | {numbers} | {note} |")
    return "\n".join(lines)


def _pair(pair: tuple[float, float]) -> str:
    return " + ".join(f"{number:,.1f}".removesuffix(".0") for number in pair)


def document(rows: Sequence[Row], job: Job, where: str, command: str) -> str:
    """The whole file."""
    return f"""\
# Communication

What each rank sends in one training step of a head whose V={job.v:,} classes are sharded over the
ranks, and of its mean cross-entropy: N={job.n} rows, D={job.d}, {job.dtype}; in bytes per row of
logits, forward + backward. Measured: collectives and the sizes of their tensors are counted at the
process group, where compiled graphs, eager DTensors and autograd all end. The bytes follow from
these sizes by the ring algorithm: with S bytes in the whole tensor, a rank sends 2·S·(W-1)/W for an
all-reduce and S·(W-1)/W for an all-gather or a reduce-scatter (what gloo itself puts on the wire is
another matter: it has no reduce-scatter of its own). Beside them is what the formulas of
`benchmarks/bandwidth.py` give.

- *fusedce*: `ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)` inside
  `loss_parallel()`, compiled with `backend="fusedce"`, which hands the rest to `{job.inner}`.
- *fusedce, of the program that gathers*: the program of *gathered logits*, compiled likewise.
- *loss_parallel*: the first program, eager or by Inductor.
- *gathered logits*: `ColwiseParallel(output_layouts=Replicate())` and `F.cross_entropy`.
- *sequence-sharded* is `input_layouts=Shard(1)`: each rank comes with some tokens of each sequence.
- Bytes of hidden states: they, if they were sharded, and their gradient. Every head whose classes
  are sharded exchanges these.
- The logits are made f32 before the loss, as Hugging Face's models do.

Loss and gradients of each were compared with float64 first (bound: twice the error of eager in one
process, plus a few units in the last place).

Written by `{command}`: {where}.

{table(rows)}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, counts, prints and writes; returns the exit status."""
    given = Job(world=1)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.communication",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 3, 4])
    for name in ("batch", "seq", "d", "v"):
        add(f"--{name}", type=int, default=getattr(given, name), help="default: %(default)s")
    add("--dtype", choices=("float32", "bfloat16"), default=given.dtype)
    add("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    add("--hidden", nargs="+", choices=HIDDEN, default=list(HIDDEN), help="how hidden states lie")
    add("--inner", default=given.inner, help="who compiles what fusedce leaves")
    add("--seconds", type=int, default=1800, help="that a number of ranks may take")
    add("--markdown", type=Path, help="a file to write")
    args = parser.parse_args(argv)
    if min(args.ranks) < 2:
        parser.error("--ranks: one rank exchanges nothing")
    device = "cuda" if torch.cuda.device_count() >= max(args.ranks) else "cpu"
    try:
        jobs = [_job(args, world, device) for world in args.ranks]
    except ValueError as error:
        parser.error(str(error))
    text = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "-m", "benchmarks.communication", *text])
    kind = "NCCL" if device == "cuda" else "gloo"
    where = f"{kind} on one machine; {heading(about(device))}"
    rows = []
    for job in jobs:
        begin = time.monotonic()
        try:
            rows += rows_of(job, *run(job))
        except RanksError as error:
            say(f"{job.world} ranks: {error}")
            return 1
        say(f"{job.world} ranks: {time.monotonic() - begin:.0f} s")
        if args.markdown:  # what there is so far
            args.markdown.write_text(document(rows, job, where, command))
    print(table(rows))
    found = list(filter(None, map(complaint, rows)))
    for text in found:
        say(text)
    return int(bool(found))


def complaint(row: Row) -> str:
    """Why a row makes the benchmark fail; empty if it does not."""
    if row.failure:
        ours = MODEL[row.program] == "fusedce"
        return f"{row.program}, {row.ranks} ranks: {row.failure}" if ours else ""
    return "" if row.as_modelled else f"{row.program}, {row.ranks} ranks: not as modelled"


def _job(args: argparse.Namespace, world: int, device: str) -> Job:
    names = {f.name for f in dataclasses.fields(Job)} - {"world", "device"}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(args).items()}
    known: dict[str, Any] = {k: v for k, v in values.items() if k in names}
    return Job(world, device=device, **known)


if __name__ == "__main__":
    sys.exit(main())
