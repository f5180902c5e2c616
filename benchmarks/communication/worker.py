"""The rank processes of :mod:`benchmarks.communication`.

In: a :class:`Job`. Out: the collectives of each rank for each program, and the errors of loss and
gradients against float64. Started by::

    found = run(Job(world=2, inner="inductor"))
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.multiprocessing.spawn import start_processes

import fxpass.rewrite.inner  # as Inductor: once, before the ranks are forked
import fxpass.rewrite.transform  # noqa: F401
from benchmarks.communication.collectives import Call, counted
from benchmarks.loss import reference
from benchmarks.loss.case import FLOOR, Case
from benchmarks.loss.measure import say

HIDDEN = ("replicated", "sequence-sharded")


@dataclass(frozen=True)
class Program:
    """A program with a sharded head and its loss.

    Attributes:
        gathers: whether it gathers all logits on every rank; else the loss uses sharded logits.
        backend: of ``torch.compile``; None is eager.
    """

    gathers: bool
    backend: str | None


PROGRAMS = {
    "fusedce": Program(False, "fusedce"),
    "fusedce, of the program that gathers": Program(True, "fusedce"),
    "loss_parallel, eager": Program(False, None),
    "loss_parallel, Inductor": Program(False, "inductor"),
    "gathered logits, eager": Program(True, None),
    "gathered logits, Inductor": Program(True, "inductor"),
}


@dataclass(frozen=True)
class Job:
    """One problem for a number of ranks.

    Attributes:
        world: ranks.
        batch, seq, d, v: sequences, tokens of each, hidden size, classes.
        inner: the inner backend of fusedce.
        programs: keys of ``PROGRAMS``.
        hidden: placements of the hidden states, from ``HIDDEN``.
        seconds: timeout of a rank.
    """

    world: int
    batch: int = 2
    seq: int = 48
    d: int = 64
    v: int = 1536
    dtype: str = "bfloat16"
    device: str = "cpu"
    inner: str = "inductor"
    programs: tuple[str, ...] = tuple(PROGRAMS)
    hidden: tuple[str, ...] = HIDDEN
    seconds: int = 600

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: the ranks would get parts of different sizes.
        """
        for name in ("seq", "v"):
            if getattr(self, name) % self.world:
                raise ValueError(f"{name}={getattr(self, name)} is no multiple of {self.world}")

    @property
    def n(self) -> int:
        """Rows."""
        return self.batch * self.seq

    @property
    def case(self) -> Case:
        """The problem of one process."""
        return Case("", self.n, self.d, self.v, self.dtype, self.device, True)


@dataclass
class Step:
    """The collectives of one rank in a step, and the errors of its results.

    Attributes:
        forward, backward: collectives, in their order.
        errors: of loss, dx and dw, relative to float64.
    """

    program: str
    hidden: str
    forward: list[Call]
    backward: list[Call]
    errors: dict[str, float]


class _Head(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(weight.detach().clone())

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        logits = self.lm_head(h).float()  # as Hugging Face's losses do
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _measure(
    job: Job, name: str, hidden: str, mesh: DeviceMesh, calls: list[Call], exact: Any
) -> Step:
    """One training step of one program."""
    torch._dynamo.reset()  # the same code is compiled by another backend
    program = PROGRAMS[name]
    x, weight, target = job.case.tensors()
    apart = hidden != HIDDEN[0]
    head = _Head(weight)
    plan = ColwiseParallel(
        input_layouts=Shard(1) if apart else Replicate(),
        output_layouts=Replicate() if program.gathers else Shard(-1),
        use_local_output=program.gathers,
    )
    parallelize_module(head, mesh, {"lm_head": plan})
    step: Any = head
    if program.backend is not None:
        options: Any = {"fusedce.inner": job.inner, "fusedce.min_logits_mb": 0}
        options = options if program.backend == "fusedce" else None
        step = torch.compile(head, backend=program.backend, options=options)
    h = x.detach().unflatten(0, (job.batch, job.seq))
    here = slice(None)
    if apart:
        part = job.seq // job.world
        here = slice(mesh.get_rank() * part, (mesh.get_rank() + 1) * part)
    h = h[:, here].clone().requires_grad_()
    with contextlib.nullcontext() if program.gathers else loss_parallel():
        calls.clear()
        loss = step(h, target.unflatten(0, (job.batch, job.seq)))
        forward = calls.copy()
        calls.clear()
        loss.backward()
        backward = calls.copy()
    assert h.grad is not None
    dx = DTensor.from_local(h.grad, mesh, [Shard(1) if apart else Replicate()], run_check=False)
    dw: Any = head.lm_head.weight.grad
    if isinstance(loss, DTensor):
        loss = loss.full_tensor()
    got = (loss.detach(), dx.full_tensor().flatten(0, 1), dw.full_tensor())
    return Step(name, hidden, forward, backward, exact(got))


def _eager(job: Job) -> Any:
    """A function that computes the errors of (loss, dx, dw); and eager's errors."""
    x, weight, target = job.case.tensors()

    def errors(got: Any) -> dict[str, float]:
        return reference.errors(got, x, weight, target, len(x), 0.0)

    loss = F.cross_entropy(F.linear(x, weight).float(), target)
    loss.backward()
    return errors, errors((loss.detach(), x.grad, weight.grad))


def _steps(job: Job) -> Iterator[Any]:
    group, calls = counted()
    mesh = DeviceMesh.from_group(group, job.device)
    errors, eager = _eager(job)
    yield eager
    for name in job.programs:
        for hidden in job.hidden:
            say(f"{name}, hidden states {hidden}")  # shows the program in case of a timeout
            yield dataclasses.asdict(_measure(job, name, hidden, mesh, calls, errors))


def _run_rank(rank: int, job: Job, folder: str) -> None:
    faulthandler.dump_traceback_later(job.seconds, exit=True)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.world)}
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if job.device == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=job.world,
        timeout=timedelta(seconds=job.seconds),
    )
    found = list(_steps(job))
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, str(rank)).write_text(json.dumps(found))


class RanksError(Exception):
    """A rank gave no answer; the message has the reason."""


def run(job: Job) -> tuple[list[list[Step]], dict[str, float]]:
    """The steps of each rank, and the errors of eager in one process.

    Raises:
        RanksError: a rank failed or took too long; the message has the end of its output.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        # otherwise gloo resolves the machine's host name, which may fail in a container
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    program = [sys.executable, "-m", "benchmarks.communication.worker"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [*program, json.dumps(dataclasses.asdict(job)), folder],
                env=environment,
                cwd=Path(__file__).parents[2],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=job.seconds + 60,
            )
        except subprocess.TimeoutExpired:
            raise RanksError(f"{job.world} ranks took more than {job.seconds} s") from None
        if done.returncode != 0:
            raise RanksError(done.stdout[-4000:])
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(job.world)]
    return [[_step(step) for step in steps] for _, *steps in found], found[0][0]


def _step(found: dict[str, Any]) -> Step:
    step = Step(**found)
    step.forward, step.backward = (
        [Call(*c) for c in part] for part in (step.forward, step.backward)
    )
    return step


def wrong(step: Step, eager: dict[str, float], dtype: str) -> str:
    """Why a step is refused: an error against float64 exceeds twice eager's; empty if none does."""
    for name, error in step.errors.items():
        bound = 2 * eager[name] + FLOOR[dtype]
        if not error <= bound:
            return f"refused: the error of {name} is {error:.1e} (bound {bound:.1e})"
    return ""


if __name__ == "__main__":
    found: dict[str, Any] = json.loads(sys.argv[1])
    found |= {key: tuple(v) for key, v in found.items() if isinstance(v, list)}
    job = Job(**found)
    # a process that has initialised a GPU cannot be forked
    alone = threading.active_count() == 1 and not torch.cuda.is_initialized()
    start_processes(
        _run_rank, (job, sys.argv[2]), nprocs=job.world, start_method="fork" if alone else "spawn"
    )
