"""The fuzzer's command line; see the package."""

from __future__ import annotations

import argparse
import os
import sys

# Before triton and the libraries of threads are imported.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FUSEDCE_MIN_LOGITS_MB", "0")  # its programs are tiny

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.fuzz.campaign import SPELLED, Tally, printed_campaign
from tests.support import ranks

MOST_SECONDS = 20_000  # of a campaign on ranks, one of which may hang


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a program failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    add = parser.add_argument
    add("--programs", type=int, default=200, help="valid programs")
    add("--seed", type=int, default=0)
    add("--first", type=int, default=0, help="number of the first program")
    add("--only", choices=SPELLED, default="", help="how every program is spelled")
    add("--ranks", action="store_true", help="classes are dealt to two processes")
    add("--seconds", type=float, default=float("inf"), help="of each job")
    add("--jobs", type=int, default=1, help="processes")
    add("--no-minimise", action="store_true", help="print failures as they were drawn")
    given = parser.parse_args(arguments)
    tally = _on_ranks(given) if given.ranks else _here(given)
    print(tally, flush=True)
    return bool(tally.failures)


def _on_ranks(given: argparse.Namespace) -> Tally:
    numbers = given.seed, given.programs, given.first, int(not given.no_minimise)
    seconds = int(min(given.seconds, MOST_SECONDS))
    tally, *_ = ranks.run("tests.fuzz.ranks", 2, *map(str, numbers), seconds=seconds)
    print("\n\n".join(tally.failures))
    return tally


def _here(given: argparse.Namespace) -> Tally:
    tally = Tally()
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        jobs = [
            pool.submit(
                printed_campaign,
                given.seed,
                given.programs // given.jobs + (job < given.programs % given.jobs),
                first=given.first + job,
                step=given.jobs,
                seconds=given.seconds,
                only=given.only,
                reduce=not given.no_minimise,
            )
            for job in range(given.jobs)
        ]
        for job in jobs:
            tally.add(job.result())
    return tally


if __name__ == "__main__":
    sys.exit(main())
