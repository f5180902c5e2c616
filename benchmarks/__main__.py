"""``python -m benchmarks``: providers side by side, numerics first.

Every provider runs in a process of its own. All start together and then step in turn, so that a
machine whose speed drifts slows all of them alike. A provider whose loss or gradients are further
from float64 than twice eager's own error gets no numbers.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.providers import PROVIDERS
from benchmarks.worker import FLOOR, Case, job


@dataclass
class Row:
    """What is known of one provider."""

    name: str
    failure: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    extra_bytes: int | None = None


class Worker:
    """A provider's process."""

    def __init__(self, case: Case) -> None:
        self.case, self.row = case, Row(case.provider)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", job(case)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(self, command: str) -> dict[str, Any]:
        """The answer to one command; empty, and the row marked as failed, if the process died."""
        if self.row.failure:
            return {}
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            _, err = self.process.communicate()
            self.row.failure = (err.strip().splitlines() or ["ended without a word"])[-1][:100]
            return {}

    def close(self) -> None:
        """Ends the process."""
        if self.process.poll() is None:
            self.process.communicate()


def measure(cases: list[Case], rounds: int) -> list[Row]:
    """Checks, measures and times all cases; seconds are one list per provider."""
    rows = []
    workers = []
    for case in cases:
        # one at a time: compiling and the float64 reference need the machine to themselves
        worker = Worker(case)
        worker.row.errors = worker.ask("check")
        worker.row.failure = worker.row.failure or wrong(worker.row.errors, case.dtype)
        worker.row.extra_bytes = worker.ask("measure").get("bytes")
        workers.append(worker)
        rows.append(worker.row)
    for _ in range(rounds):
        for worker in workers:
            if answer := worker.ask("step"):
                worker.row.seconds.append(answer["seconds"])
    for worker in workers:
        worker.close()
    return rows


def wrong(errors: dict[str, float], dtype: str) -> str:
    """Why a provider's numerics are off; empty if they are within twice eager's error."""
    for name in ("loss", "dx", "dw"):
        if name in errors:
            bound = 2 * errors["eager " + name] + FLOOR[dtype]
            if not errors[name] <= bound:
                return f"{name} is off by {errors[name]:.1e} (bound {bound:.1e})"
    return ""


def table(rows: list[Row]) -> str:
    """A markdown table; ratios are to inductor, round by round."""
    base = next((r for r in rows if r.name == "inductor" and r.seconds), None)
    lines = [
        "| provider | ms (median) | min-max | time / inductor | extra peak MiB | / inductor |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if not row.seconds:
            lines.append(f"| {row.name} | - | - | - | - | {row.failure} |")
            continue
        ms = [1e3 * s for s in row.seconds]
        speed = space = "-"
        if base:
            pairs = zip(row.seconds, base.seconds, strict=True)
            speed = f"{statistics.median(a / b for a, b in pairs):.2f}"
            if row.extra_bytes is not None and base.extra_bytes:
                space = f"{row.extra_bytes / base.extra_bytes:.2f}"
        size = "-" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.0f}"
        lines.append(
            f"| {row.name} | {statistics.median(ms):.0f} | {min(ms):.0f}-{max(ms):.0f} | {speed} "
            f"| {size} | {space} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parses the command line, prints one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--n", type=int, default=2048, help="rows (tokens)")
    parser.add_argument("--d", type=int, default=512, help="hidden size")
    parser.add_argument("--v", type=int, default=32000, help="classes")
    parser.add_argument("--dtype", choices=sorted(FLOOR), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--forward", action="store_true", help="forward only, without gradients")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--providers", nargs="+", choices=sorted(PROVIDERS), default=PROVIDERS)
    args = parser.parse_args()
    cases = [
        Case(name, args.n, args.d, args.v, args.dtype, args.device, not args.forward)
        for name in args.providers
    ]
    where = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    print(
        f"N={args.n} D={args.d} V={args.v} {args.dtype} "
        f"{'forward' if args.forward else 'forward + backward'} on {args.device} "
        f"({where or platform.machine()}, {torch.get_num_threads()} threads), torch "
        f"{torch.__version__}\n"
    )
    print(table(measure(cases, args.rounds)))


if __name__ == "__main__":
    main()
