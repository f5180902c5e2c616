"""What each rank computes for test_distributed.py: the fused loss of a sharded head, by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fxpass.distributed import linear_cross_entropy
from tests.ranks.vocab_parallel_cases import shard

B, S, D = 2, 6, 5


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        options: of the function.
        v: all classes.
        bias: whether the head has one.
        probabilities: whether the target holds them.
        backend: that compiles it, as one graph; None for eager.
        dtensors: whether the operands are DTensors.
        autocast: whether bf16 is on.
    """

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    v: int = 12
    bias: bool = False
    probabilities: bool = False
    backend: str | None = None
    dtensors: bool = False
    autocast: bool = False

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """x, weight, target and bias, whole."""
        random = torch.Generator().manual_seed(self.v)
        x, weight = (torch.randn(s, generator=random) for s in ((B, S, D), (self.v, D)))
        target = torch.randint(self.v, (B, S), generator=random)
        target[0, 1] = self.options.get("ignore_index", -100)
        if self.probabilities:
            target = torch.randn((B, S, self.v), generator=random).softmax(-1)
        bias = torch.randn(self.v, generator=random) if self.bias else None
        return 3 * x, weight, target, bias

    def whole(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Loss and gradients in one process."""
        x, weight, target, bias = self.tensors()
        leaves = [None if t is None else t.to(dtype).requires_grad_() for t in (x, weight, bias)]
        with torch.autocast("cpu", enabled=self.autocast and dtype == torch.float32):
            z = F.linear(*leaves)  # type: ignore[arg-type]
        z = z.to(dtype)
        if "logits" in self.options:
            z = 30 * (z / 30).tanh()
        options = {k: v for k, v in self.options.items() if k in _OF_PYTORCH}
        if "weight" in options:
            options["weight"] = options["weight"].to(dtype)
        target = target.to(dtype) if self.probabilities else target
        loss = F.cross_entropy(
            z.movedim(-1, 1), target.movedim(-1, 1) if self.probabilities else target, **options
        )
        loss.square().sum().backward()
        return found(loss, *leaves)


_OF_PYTORCH = ("reduction", "ignore_index", "label_smoothing", "weight")


def found(loss: Tensor, *leaves: Tensor | None) -> dict[str, Tensor]:
    grads = {
        k: t.grad for k, t in zip(("x", "weight", "bias"), leaves, strict=True) if t is not None
    }
    return {"loss": loss.detach(), **grads}  # type: ignore[dict-item]


CASES = {
    "eager": Case(),
    "uneven": Case({"classes": 13}, v=13, bias=True),
    "per row": Case({"reduction": "none", "label_smoothing": 0.1}),
    "soft-cap": Case({"logits": "30*tanh(z/30)", "reduction": "sum"}, bias=True),
    "weighted": Case({"weight": torch.linspace(0.5, 2, 12), "ignore_index": 7}),
    "probabilities": Case(probabilities=True),
    "sequence": Case({"sequence_dim": 1}),
    "compiled": Case({"sequence_dim": 1, "label_smoothing": 0.1}, backend="fusedce"),
    "compiled, uneven": Case({"classes": 13}, v=13, bias=True, backend="aot_eager"),
    "DTensors": Case(v=13, bias=True, dtensors=True),
    "compiled DTensors": Case(v=13, dtensors=True, backend="aot_eager"),
    "autocast": Case(autocast=True, bias=True),
}


def run(case: Case, rank: int, world: int, device: torch.device) -> dict[str, Tensor]:
    """Loss and whole gradients."""
    x, weight, target, bias = (None if t is None else t.to(device) for t in case.tensors())
    assert x is not None
    assert weight is not None
    assert target is not None
    here = shard(case.v, rank, world)
    dim = case.options.get("sequence_dim")
    if case.dtensors:
        mesh = init_device_mesh(device.type, (world,))
        x = distribute_tensor(x, mesh, [Replicate()])
        weight = distribute_tensor(weight, mesh, [Shard(0)])
        bias = None if bias is None else distribute_tensor(bias, mesh, [Shard(0)])
    else:
        x = x if dim is None else x.chunk(world, dim)[rank]
        weight, bias = weight[here], None if bias is None else bias[here]
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias)]
    options = dict(case.options)
    if "weight" in options:
        options["weight"] = options["weight"].to(device)

    def call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear_cross_entropy(x * 1, weight, target, linear_bias=bias, **options)

    if case.backend is not None:
        torch._dynamo.reset()
        inner = {"fusedce.inner": "aot_eager"} if case.backend == "fusedce" else None
        call = torch.compile(call, backend=case.backend, fullgraph=True, options=inner)
    with torch.autocast(device.type, torch.bfloat16, enabled=case.autocast):
        loss = call(*leaves)  # type: ignore[arg-type]
    loss.square().sum().backward()
    out = found(loss, *leaves)
    for name in ("weight", "bias"):
        if name in out:
            out[name] = gathered(out[name], case.v, world, 0)
    if dim is not None:
        out["x"] = gathered(out["x"], S, world, dim)
    whole = {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in out.items()}
    return {name: t.cpu() for name, t in whole.items()}


def gathered(part: Tensor, size: int, world: int, dim: int) -> Tensor:
    """The parts of all ranks."""
    if isinstance(part, DTensor):
        return part
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, part.cpu())
    whole = torch.cat(parts, dim)
    assert whole.shape[dim] == size
    return whole


def main(rank: int, world: int, device: torch.device) -> dict[str, Any]:
    return {name: run(case, rank, world, device) for name, case in CASES.items()}
