"""What each rank runs for test_bytes.py: a training step of a head whose classes are sharded.

Out: program, placement of the hidden states → the collectives of forward and of backward, each as
its operation and the bytes of the whole tensor that is reduced, gathered or scattered.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

from fxpass.op import rows
from tests.ranks.case import Counted

BATCH, SEQ, D, V, DTYPE = 1, 8, 24, 60, torch.bfloat16
# program → whether it gathers all logits on each rank, else the loss reads sharded ones; and
# whether fxpass compiles it
PROGRAMS = {
    "fusedce": (False, True),
    "fusedce, of the program that gathers": (True, True),
    "loss_parallel": (False, False),
    "gathered logits": (True, False),
}
HIDDEN = {"replicated": Replicate(), "sequence-sharded": Shard(1)}
Collective = tuple[str, int]


class Head(nn.Module):
    """Hidden states ``[B, T, D]`` and targets ``[B, T]`` to the mean loss, in f32 as transformers'."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lm_head = nn.Linear(D, V, bias=False, dtype=DTYPE)

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(h).float().flatten(0, 1), target.flatten())


NAMES = {"": "all_reduce", "gather": "all_gather_into_tensor", "scatter": "reduce_scatter_tensor"}


class Exchanged(Counted):
    """And those in calls of ``fxpass::rows``, where the dispatcher would leave the mode."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.fxpass.rows.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with Exchanged() as calls:
            made = rows._run(*args)
        self.calls += calls
        return made


def collectives(calls: list[str], world: int) -> list[Collective]:
    """What was counted, sorted: the bytes of a rank's tensors in each call of a process group."""
    out = []
    for call in calls:
        kind, _, size = call.rpartition(":")
        out.append((NAMES[kind], int(size) * (world if kind == "gather" else 1)))
    return sorted(out)


def step(program: str, hidden: str, rank: int, world: int, device: torch.device) -> Any:
    """The collectives of forward and backward."""
    torch._dynamo.reset()
    gathers, compiled = PROGRAMS[program]
    mesh = init_device_mesh(device.type, (world,))
    style = ColwiseParallel(
        input_layouts=HIDDEN[hidden],
        output_layouts=Replicate() if gathers else Shard(-1),
        use_local_output=gathers,
    )
    model = Head().to(device)
    parallelize_module(model, mesh, {"lm_head": style})
    if compiled:
        model.compile(backend="fusedce", options={"fusedce.inner": "eager"})
    x = torch.randn(BATCH, SEQ, D, dtype=DTYPE, device=device)
    x = x.chunk(world, 1)[rank] if hidden == "sequence-sharded" else x
    x, target = x.clone().requires_grad_(), torch.randint(V, (BATCH, SEQ), device=device)
    with contextlib.nullcontext() if gathers else loss_parallel():
        with Exchanged() as forward:
            loss = model(x, target)
        with Exchanged() as backward:
            loss.backward()
    return collectives(forward, world), collectives(backward, world)


def main(rank: int, world: int, device: torch.device) -> dict[tuple[str, str], Any]:
    return {(p, h): step(p, h, rank, world, device) for p in PROGRAMS for h in HIDDEN}
