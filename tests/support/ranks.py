"""Process groups for tests: worlds of ranks, each a process that stays up and is given calls.

In: a module with a function ``main(rank, world, device, *arguments)`` that returns anything that
``torch.save`` takes. Out: what each rank returned::

    with World(2, "tests.ranks.tables") as world:  # imports this before there are ranks
        first, second = world.run("tests.ranks.tables", "heads: softcap")

gloo on loopback; NCCL where there are as many GPUs as ranks. A fresh interpreter imports the modules
and forks the ranks before anything is computed: forked later, threads and locks would be shared.
Between two calls the compiler is reset, and process groups that a call made are gone. A rank that
raises, dies, or is not done in time fails the call with what the ranks wrote (one that hangs writes
where it is), and the world: the next call starts another one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx  # as fxpass: once, before the ranks are forked
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.multiprocessing.spawn import start_processes

import fxpass.rewrite.inner
import fxpass.rewrite.transform  # noqa: F401
from fxpass.casts import casts
from fxpass.graph import source

ROOT = Path(__file__).parents[2]
SECONDS = 400  # far more than any of them takes, unless the machine has other work
GRACE = 5  # for the other ranks, after one has failed


def on_gpus(world: int) -> bool:
    """Whether each rank has one of its own."""
    return torch.cuda.device_count() >= world


def run(module: str, world: int, *arguments: Any, seconds: int = SECONDS) -> list[Any]:
    """What ``main`` of a module returned on each rank of a world that is started for it alone."""
    with World(world, module) as alone:
        return alone.run(module, *arguments, seconds=seconds)


class World:
    """Ranks that wait for calls. They are started by the first one."""

    def __init__(self, size: int, *modules: str) -> None:
        self.size, self.modules = size, modules
        self.started = 0  # how often
        self._lines: list[connection.Connection] = []  # to the ranks, in their order

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, module: str, *arguments: Any, seconds: int = SECONDS) -> list[Any]:
        """What ``main`` of a module returned on each rank.

        Args:
            arguments: passed on to ``main`` after rank, world and device.
            seconds: after which a rank gives up.

        Raises:
            AssertionError: a rank failed; with what it raised, and the end of what was written.
        """
        if not self._lines:
            self._start()
        written = self._output.stat().st_size
        for line in self._lines:
            line.send((module, arguments, seconds))
        answers, wrong = self._answers(seconds)
        if wrong:
            said = self._output.read_bytes()[written:].decode(errors="replace")
            self.stop()
            raise AssertionError("\n".join(wrong)[-8000:] + "\n" + said[-8000:])
        return [answers[line] for line in self._lines]

    def _answers(self, seconds: int) -> tuple[dict[Any, Any], list[str]]:
        """By line, and what went wrong. A rank that is late ends itself; see :func:`_rank`."""
        answers: dict[Any, Any] = {}
        wrong: list[str] = []
        end = time.monotonic() + seconds + GRACE
        while waiting := [line for line in self._lines if line not in answers]:
            ready: list[Any] = connection.wait(waiting, max(0.0, end - time.monotonic()))
            for line in ready:
                which = f"rank {self._lines.index(line)} of {self.size}"
                try:
                    fine, answers[line] = _loaded(line.recv_bytes())
                except (EOFError, OSError):
                    fine, answers[line] = False, "ended"
                if not fine:
                    wrong.append(f"{which}: {answers[line]}")
                    end = min(end, time.monotonic() + GRACE)
            if not ready:
                missing = [self._lines.index(line) for line in waiting]
                return answers, [*wrong, f"ranks {missing} of {self.size} gave no answer"]
        return answers, wrong

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._output = Path(self._folder.name, "output")
        address = str(Path(self._folder.name, "line"))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if not on_gpus(self.size):
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if sys.platform == "linux":
            # else gloo asks for the machine's name, which a container may not know
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        program = [sys.executable, "-m", __name__, str(self.size), self._folder.name]
        with socket.create_server(address, family=socket.AF_UNIX) as server:
            server.settimeout(1)
            with self._output.open("wb") as output:
                self._process = subprocess.Popen(
                    [*program, *self.modules],
                    cwd=ROOT,
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            lines: dict[int, connection.Connection] = {}
            while len(lines) < self.size:
                assert self._process.poll() is None, self._output.read_text()[-8000:]
                with contextlib.suppress(TimeoutError):
                    line = connection.Connection(server.accept()[0].detach())
                    lines[line.recv()] = line
        self._lines = [lines[rank] for rank in range(self.size)]
        self.started += 1

    def stop(self) -> None:
        """Ends the ranks, if there are any."""
        if not self._lines:
            return
        for line in self._lines:
            line.close()
        self._lines = []
        try:
            self._process.wait(3)  # ranks end where nobody is at the other end of their lines
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # of the session that was started
            self._process.wait()
        self._folder.cleanup()


def _loaded(answer: bytes) -> Any:
    return torch.load(io.BytesIO(answer), weights_only=False)


# ---------------------------------------------------------------- a rank


def _rank(rank: int, world: int, folder: str) -> None:
    """Answers calls until nobody is there any more."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if on_gpus(world) else torch.device("cpu")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meetings = 0
    with connection.Client(f"{folder}/line") as line:
        line.send(rank)
        while True:
            try:
                module, arguments, seconds = line.recv()
            except EOFError:
                os._exit(0)
            faulthandler.dump_traceback_later(seconds, exit=True)
            try:
                if meetings == 0 or _has_more_groups():
                    meetings += 1
                    _meet(rank, world, device, f"{folder}/meeting{meetings}", seconds)
                _clean()
                answer = True, importlib.import_module(module).main(rank, world, device, *arguments)
            except BaseException:
                answer = False, traceback.format_exc()
            faulthandler.cancel_dump_traceback_later()
            saved = io.BytesIO()
            torch.save(answer, saved)
            line.send_bytes(saved.getvalue())


def _has_more_groups() -> bool:
    """Whether groups were made, which this rank may not be in: all ranks say the same."""
    made = dist.distributed_c10d._world
    return max(len(made.pg_map), made.group_count) > 1


def _meet(rank: int, world: int, device: torch.device, place: str, seconds: int) -> None:
    """One process group, and no others."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{place}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )


def _clean() -> None:
    """No compiled code, counters, log or random state of another call; nothing of its meshes."""
    torch._dynamo.reset()
    _clear_sharding_prop_cache()
    counters.clear()
    casts.logged.clear()
    source.warned.clear()
    torch.manual_seed(0)


if __name__ == "__main__":
    size, place, *names = sys.argv[1:]
    for name in names:
        importlib.import_module(name)
    # a process that has seen a GPU cannot be forked
    alone = threading.active_count() == 1 and not torch.cuda.is_initialized()
    start_processes(
        _rank,
        (int(size), place),
        nprocs=int(size),
        start_method="fork" if alone else "spawn",
    )
