"""A loop in the manner of torchtitan: FSDP2 on two ranks, and a loss that is compiled apart.

This process is rank 0, whose losses and memory are those of the program; it starts rank 1.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.trainers.loops import descend
from benchmarks.trainers.models import llama, tokens
from benchmarks.trainers.task import Sizes, Task

RANKS = 2


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """torchtitan's loss, of logits ``[B, T, V]`` and labels ``[B, T]``."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def sharded(task: Task) -> None:
    """Trains on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        context = multiprocessing.get_context("spawn")
        other = context.Process(
            target=_other, args=(task.sizes, task.backend, task.options, meeting)
        )
        other.start()
        try:
            _rank(task, 0, meeting)
        finally:
            other.join(60)
            other.kill()


def _other(sizes: Sizes, backend: str, options: dict[str, Any] | None, meeting: str) -> None:
    _rank(Task(sizes, backend, options), 1, meeting)


def _rank(task: Task, rank: int, meeting: str) -> None:
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        model = llama(task.sizes)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        task.compile(model)
        loss_of = cross_entropy
        if task.backend != "eager":
            loss_of = torch.compile(cross_entropy, backend=task.backend, options=task.options)
        ids = tokens(task.sizes, seed=1 + rank)

        def loss() -> Tensor:
            return loss_of(model(input_ids=ids[:, :-1]).logits, ids[:, 1:])

        descend(task, model, loss)
    finally:
        dist.destroy_process_group()
