"""Process groups for tests: every rank a process, started once for a whole file of cases.

In: a module with a function ``main(rank, world, device)`` that returns anything ``torch.save``
takes. Out: what each rank returned::

    first, second = ranks.run("tests.ranks.vocab_parallel_cases", world=2)

gloo on loopback; NCCL where there are as many GPUs as ranks. A fresh interpreter imports the module
and forks the ranks before anything is computed: forked later, threads and locks would be shared. A
rank that is not done in time says where it is and ends, and so do the others.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import subprocess
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

import fxpass.rewrite.inner  # once, before the ranks are forked
import fxpass.rewrite.transform  # noqa: F401

ROOT = Path(__file__).parents[2]
SECONDS = 400  # far more than any of them takes, unless the machine has other work


_known: dict[Any, Any] = {}  # what a call returned or raised: a rank that hangs does so once


def run(module: str, world: int, *arguments: str, seconds: int = SECONDS) -> list[Any]:
    """What ``main`` of a module returned on each of ``world`` ranks; started once.

    Args:
        module: its full name.
        world: number of ranks.
        arguments: passed on to ``main`` after rank, world and device.
        seconds: after which a rank gives up.

    Raises:
        AssertionError: a rank failed; with the end of what the ranks wrote.
    """
    key = (module, world, *arguments)
    if key not in _known:
        try:
            _known[key] = _started(module, world, *arguments, seconds=seconds)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            _known[key] = AssertionError(str(error))
    if isinstance(_known[key], AssertionError):
        raise _known[key]
    return _known[key]


def _started(module: str, world: int, *arguments: str, seconds: int) -> list[Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not on_gpus(world):
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if sys.platform == "linux":
        # else gloo asks for the machine's name, which a container may not know
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-m", __name__, module, str(world), str(seconds), folder]
        done = subprocess.run(
            [*program, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=2 * seconds,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(world)]


def on_gpus(world: int) -> bool:
    """Whether each rank has one of its own."""
    return torch.cuda.device_count() >= world


def _run_rank(
    rank: int, module: str, world: int, seconds: int, folder: str, arguments: list[str]
) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True)
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if on_gpus(world) else torch.device("cpu")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )
    main: Any = importlib.import_module(module).main
    torch.save(main(rank, world, device, *arguments), Path(folder, str(rank)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    name, ranks, limit, place, *rest = sys.argv[1:]
    importlib.import_module(name)
    # a process that has seen a GPU cannot be forked
    alone = threading.active_count() == 1 and not torch.cuda.is_initialized()
    start_processes(
        _run_rank,
        (name, int(ranks), int(limit), place, rest),
        nprocs=int(ranks),
        start_method="fork" if alone else "spawn",
    )
