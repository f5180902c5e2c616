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

from tests.support import ranks

from .campaign import KINDS, Tally, printed_campaign

RANKS = 2
MOST_SECONDS = 20_000  # of a campaign on ranks, one of which may hang


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a program failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    add = parser.add_argument
    add("--programs", type=int, default=200, help="valid programs of each kind")
    add("--seed", type=int, default=0)
    add("--first", type=int, default=0, help="number of the first program")
    add("--kind", choices=[*KINDS, "all"], default="all")
    add("--seconds", type=float, default=float("inf"), help="of each kind and job")
    add("--jobs", type=int, default=1, help="processes")
    add("--no-minimise", action="store_true", help="print failures as they were drawn")
    given = parser.parse_args(arguments)
    total = Tally()
    for kind in KINDS if given.kind == "all" else (given.kind,):
        tally = _of_kind(kind, given)
        print(f"{kind}: {tally}", flush=True)
        total.add(tally)
    return bool(total.failures)


def _of_kind(kind: str, given: argparse.Namespace) -> Tally:
    if kind == "sharded":
        numbers = given.seed, given.programs, given.first, int(not given.no_minimise)
        seconds = int(min(given.seconds, MOST_SECONDS))
        tally, *_ = ranks.run("tests.fuzz.sharded", RANKS, *map(str, numbers), seconds=seconds)
        print("\n\n".join(tally.failures))
        return tally
    jobs = [
        {
            "programs": given.programs // given.jobs + (job < given.programs % given.jobs),
            "first": given.first + job,
            "step": given.jobs,
            "seconds": given.seconds,
            "reduce": not given.no_minimise,
        }
        for job in range(given.jobs)
    ]
    if len(jobs) == 1:
        return printed_campaign(kind, given.seed, **jobs[0])
    tally = Tally()
    with ProcessPoolExecutor(len(jobs), get_context("spawn")) as pool:
        for one in [pool.submit(printed_campaign, kind, given.seed, **job) for job in jobs]:
            tally.add(one.result())
    return tally


if __name__ == "__main__":
    sys.exit(main())
