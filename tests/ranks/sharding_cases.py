"""What each rank trains for test_sharding.py: models with a sharded head, compiled with the backend.

Every case is one step of a small model whose head is made parallel by PyTorch's own styles. Its
parameters are the same on all ranks before that, so one process can compute what is right.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from fxpass.capture.sharding import one_rank_settings
from tests.ranks.parallel import said_by_fxpass

B, S, D = 2, 6, 8  # a sequence has to be as long on 2 ranks as on 3


class Model(nn.Module):
    """A body and a head; ``loss`` is given its logits ``[B, S, V]`` and the labels ``[B, S]``."""

    def __init__(self, loss: Callable[..., Any], v: int, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(D, D)
        self.lm_head = nn.Linear(D, v, bias=bias)
        # what is trained in a loss is made anew for each model
        self.loss = loss(v) if isinstance(loss, type) else loss

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self.lm_head(self.body(x).tanh() * 4), labels)


def rows(z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return z.flatten(0, 1), t.flatten()


def mean(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(*rows(z, t))


def none(z: Tensor, t: Tensor) -> Tensor:
    return (F.cross_entropy(*rows(z, t), reduction="none") ** 2).mean()


def summed(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z.float().view(-1, z.shape[-1]), t.view(-1), reduction="sum") / 7


def softcap(z: Tensor, t: Tensor) -> Tensor:
    z = (z.float() / 5).tanh() * 5
    return F.cross_entropy(z.view(-1, z.shape[-1]), t.view(-1))


def shifted(z: Tensor, t: Tensor) -> Tensor:
    z = z[:, :-1, :].contiguous()
    return F.cross_entropy(z.view(-1, z.shape[-1]), t[:, 1:].reshape(-1), ignore_index=3)


def smoothed(z: Tensor, t: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, z.shape[-1], device=z.device).to(z.dtype)
    return F.cross_entropy(*rows(z, t), weight, label_smoothing=0.1)


def biased(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(*rows(z + torch.linspace(-1, 1, z.shape[-1], device=z.device), t))


def with_logits(z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return mean(z, t), z


def z_loss(z: Tensor, t: Tensor) -> Tensor:
    flat, target = rows(z, t)
    return F.cross_entropy(flat, target) + 1e-2 * (flat.logsumexp(-1) ** 2).mean()


def narrow(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(*rows(z[..., :10], t.clamp(max=9)))


def of_full_tensor(z: Tensor, t: Tensor) -> Tensor:
    return mean(z.full_tensor() if isinstance(z, DTensor) else z, t)


def scaled(z: Tensor, t: Tensor) -> Tensor:
    return mean(z * torch.linspace(1, 2, S, device=z.device).unsqueeze(-1), t)


def policy(z: Tensor, t: Tensor) -> Tensor:
    """A policy's loss with an entropy bonus, at a temperature."""
    logs = (z / 1.3).log_softmax(-1)
    picked = logs.gather(-1, t.unsqueeze(-1)).squeeze(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    return -((picked - picked.detach()).exp() * (t - 5)).mean() - 0.1 * entropy.mean()


def policy_of_dtensors(z: Tensor, t: Tensor) -> Tensor:
    """The part of it that torch shards."""
    flat, target = rows(z, t)
    return F.nll_loss(flat.log_softmax(-1), target, reduction="none").exp().mean().log()


def with_accuracy(z: Tensor, t: Tensor) -> Tensor:
    right = (z.argmax(-1) == t).float().mean() + (z.amax(-1) > z.logsumexp(-1) - 1).float().mean()
    return mean(z, t) + right.detach()


def soft_targets(z: Tensor, t: Tensor) -> Tensor:
    soft = torch.eye(z.shape[-1], device=z.device).to(z.dtype)[t] * 0.7 + 0.02
    return -(soft * z.log_softmax(-1)).sum(-1).mean()


def masked(z: Tensor, t: Tensor) -> Tensor:
    """A factor of each class, and some that are masked."""
    classes = torch.arange(z.shape[-1], device=z.device)
    return mean((z * (1 + 0.1 * classes)).masked_fill(classes % 5 == 1, -3.0), t)


def with_margin(z: Tensor, t: Tensor) -> Tensor:
    """CosFace, with ignored rows."""
    z = 2 * (z - 0.5 * F.one_hot(t, z.shape[-1]))
    return F.cross_entropy(*rows(z, t), ignore_index=3)


def with_angle(z: Tensor, t: Tensor) -> Tensor:
    """ArcFace."""
    flat, target = rows(z.float() / 20, t)
    angle = flat.clamp(-0.99, 0.99).acos()
    margin = torch.zeros_like(angle).scatter(1, target.unsqueeze(1), 0.3)
    return F.cross_entropy(20 * (angle + margin).cos(), target)


class Trained(nn.Module):
    """Cross-entropy of logits that parameters change."""

    def __init__(self, v: int) -> None:
        super().__init__()
        self.p = nn.Parameter(self.first(v))

    def first(self, v: int) -> Tensor:
        del v
        return torch.tensor(0.3)

    def changed(self, z: Tensor) -> Tensor:
        return z / self.p.exp()

    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        return none(self.changed(z), t)


class OfRows(Trained):
    def first(self, v: int) -> Tensor:
        return torch.linspace(0.5, 2, S)

    def changed(self, z: Tensor) -> Tensor:
        return z * self.p.unsqueeze(-1)


class Biased(Trained):
    def first(self, v: int) -> Tensor:
        return torch.linspace(-1, 1, v)

    def changed(self, z: Tensor) -> Tensor:
        return z + self.p


class OfClasses(Biased):
    def changed(self, z: Tensor) -> Tensor:
        return (z * self.p.exp()).sin() * 3


class BiasAndTemperature(Biased):
    def __init__(self, v: int) -> None:
        super().__init__(v)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def changed(self, z: Tensor) -> Tensor:
        return (z + self.p) * self.scale


class SoftTargets(Biased):
    def forward(self, z: Tensor, t: Tensor) -> Tensor:
        soft = (self.p * t.unsqueeze(-1)).softmax(-1)
        return -(soft * z.log_softmax(-1)).sum(-1).mean()


def above_threshold(z: Tensor, t: Tensor) -> Tensor:
    least = torch.linspace(-1, 1, S, device=z.device).to(z.dtype).unsqueeze(-1)
    return mean(torch.where(z > least, z, 0.1 * z), t)


def of_own_rows(z: Tensor, t: Tensor) -> Tensor:
    return mean(z, t[:, : z.shape[1]])


def of_own_classes(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(*rows(z, t.clamp(max=z.shape[-1] - 1)))


SHARDED = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
GATHERED = ColwiseParallel(output_layouts=Replicate())
FROM_SEQUENCE = ColwiseParallel(
    input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        loss: of its logits.
        style: of its head.
        v: classes.
        bias: whether the head has one.
        parallel: whether the loss stands in ``loss_parallel``.
        inner: the backend behind.
        autocast: whether it runs in bf16.
        frozen: parameters that are not trained.
        settings: of the backend.
        on_one_rank: whether one rank is to compile for all.
    """

    loss: Callable[..., Any]
    style: Any = SHARDED
    v: int = 13
    bias: bool = False
    parallel: bool = True
    inner: str = "eager"
    autocast: bool = False
    frozen: tuple[str, ...] = ()
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    on_one_rank: bool = False

    def model(self) -> Model:
        model = Model(self.loss, self.v, self.bias)
        for name in self.frozen:
            model.get_parameter(name).requires_grad_(False)
        return model

    def data(self) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(1)
        x = torch.randn((B, S, D), generator=random)
        return x, torch.randint(self.v, (B, S), generator=random)


FUSED = {
    "loss_parallel": Case(mean),
    "loss_parallel, Inductor": Case(summed, inner="inductor"),
    "per row": Case(none),
    "sum": Case(summed, bias=True),
    "ignored": Case(shifted),
    "softcap": Case(softcap, bias=True),
    "z-loss": Case(z_loss),
    "gathered": Case(mean, GATHERED, parallel=False),
    "gathered, smoothed": Case(smoothed, GATHERED, parallel=False, inner="aot_eager", bias=True),
    "gathered, shifted": Case(shifted, GATHERED, parallel=False),
    "gathered, then a bias": Case(biased, GATHERED, parallel=False),
    "sequence": Case(mean, FROM_SEQUENCE),
    "bf16": Case(summed, autocast=True),
    "frozen head": Case(mean, frozen=("lm_head.weight",)),
    "frozen body": Case(mean, frozen=("body.weight", "body.bias")),
    "tiled": Case(mean, settings={"fusedce.strategy": "tiled"}, bias=True),
    "chunked": Case(mean, settings={"fusedce.strategy": "chunked"}, bias=True),
    "logits returned": Case(with_logits, bias=True),
    "gathered logits returned": Case(with_logits, GATHERED, parallel=False),
    "full tensor": Case(of_full_tensor, parallel=False),
    "scaled": Case(scaled, GATHERED, parallel=False),
    "policy": Case(policy, GATHERED, parallel=False, bias=True),
    "policy of DTensors": Case(policy_of_dtensors),
    "accuracy": Case(with_accuracy, GATHERED, parallel=False),
    "soft targets": Case(soft_targets, GATHERED, parallel=False),
    "masked": Case(masked, GATHERED, parallel=False),
    "margin": Case(with_margin, GATHERED, parallel=False),
    "margin, bf16": Case(with_margin, GATHERED, parallel=False, autocast=True),
    "angle": Case(with_angle, GATHERED, parallel=False, inner="aot_eager", bias=True),
    "trained temperature": Case(Trained, GATHERED, parallel=False, inner="aot_eager"),
    "trained temperature, frozen head": Case(
        Trained, GATHERED, parallel=False, frozen=("lm_head.weight",)
    ),
    "trained temperatures": Case(OfRows, GATHERED, parallel=False, bias=True),
    "trained bias": Case(Biased, GATHERED, parallel=False),
    "trained factors": Case(OfClasses, GATHERED, parallel=False),
    "trained bias and temperature": Case(BiasAndTemperature, GATHERED, parallel=False, bias=True),
    "trained soft targets": Case(SoftTargets, GATHERED, parallel=False),
    "thresholds": Case(above_threshold, GATHERED, parallel=False),
}
# on four ranks, of which the last has one class, or none
OF_FOUR = {
    "four, margin": Case(with_margin, GATHERED, v=9, parallel=False, bias=True),
    "four, trained": Case(BiasAndTemperature, GATHERED, v=9, parallel=False, bias=True),
    "four, trained factors": Case(OfClasses, GATHERED, parallel=False),
}
LEFT = {
    "hidden sharded": Case(
        mean, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()), parallel=False
    ),
    "own classes": Case(of_own_classes, ColwiseParallel(), v=12, parallel=False),
    "own rows": Case(of_own_rows, ColwiseParallel(output_layouts=Shard(1)), parallel=False),
    "some classes": Case(narrow, GATHERED, parallel=False),
    "compiled on one rank": Case(mean, v=12, inner="aot_eager", on_one_rank=True),
}


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def result(out: Any, model: nn.Module, said: list[str]) -> dict[str, Any]:
    """After backward: what came out and every gradient, put together from all ranks."""
    loss, *logits = out if isinstance(out, tuple) else (out,)
    seen = {"loss": whole(loss.detach())}
    if logits:
        seen["logits"] = whole(logits[0].detach())
    seen |= {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    placed = {n: str(getattr(p.grad, "placements", "")) for n, p in model.named_parameters()}
    return {
        "values": {name: t.cpu() for name, t in seen.items()},
        "placed": placed,
        "type": type(loss).__name__,
        "said": said,
        **{name: counters["fusedce"][name] for name in ("matched", "rejected")},
        "graphs": counters["stats"]["unique_graphs"],
    }


def step(case: Case, mesh: DeviceMesh) -> dict[str, Any]:
    """One step on the ranks of ``mesh``."""
    torch._dynamo.reset()
    counters.clear()
    device = mesh.device_type
    model = case.model().to(device)
    parallelize_module(model, mesh, {"lm_head": case.style})
    x, labels = (t.to(device) for t in case.data())
    if case.style is FROM_SEQUENCE:
        x = x.chunk(mesh.size(), 1)[mesh.get_local_rank()]
    parallel = loss_parallel() if case.parallel else contextlib.nullcontext()
    autocast = torch.autocast(device, torch.bfloat16, enabled=case.autocast)
    one_rank_settings().compile_on_one_rank = case.on_one_rank
    with tempfile.TemporaryDirectory() as dumps, said_by_fxpass() as said, parallel:
        options = {"fusedce.inner": case.inner, "fusedce.dump": dumps, **case.settings}
        run: Any = torch.compile(model, backend="fusedce", options=options)
        with autocast:
            out = run(x, labels)
        (out[0] if isinstance(out, tuple) else out).backward()
        graphs = "".join(path.read_text() for path in Path(dumps).rglob("*after*"))
    one_rank_settings().compile_on_one_rank = False
    if case.style is FROM_SEQUENCE:  # its body saw some of the rows
        for p in model.body.parameters():
            dist.all_reduce(p.grad)
    # whether backward gets the logits of forward
    return result(out, model, said) | {"saves": "saved_logits(" in graphs}


# ---------------------------------------------------------------- rows that are sharded


def data_with_ignored() -> tuple[Tensor, Tensor]:
    """The ranks have different numbers of rows that count."""
    x, labels = Case(mean).data()
    labels[0, :2] = -100
    return x, labels


ROWS = {  # reduction, and the dimension of hidden states and labels that is sharded
    "mean": ("mean", 1),
    "sum": ("sum", 1),
    "mean, whole sequences": ("mean", 0),
}


def rows_as_dtensors(mesh: DeviceMesh, reduction: str, dim: int) -> dict[str, Any]:
    """A replicated head; hidden states and labels are sharded, all DTensors.

    Torch cannot do sharded sequences in 2.11, and not compile them in 2.15: ``refused`` is what it
    says there without fxpass, and what it says with.
    """
    torch._dynamo.reset()
    counters.clear()
    model = Model(lambda z, t: F.cross_entropy(*rows(z, t), reduction=reduction), 13, True)
    distribute_module(model.to(mesh.device_type), mesh)
    placements: list[Placement] = [Shard(dim)] * mesh.ndim
    x, labels = (
        distribute_tensor(t.to(mesh.device_type), mesh, placements) for t in data_with_ignored()
    )
    run = torch.compile(model, backend="fusedce", options={"fusedce.inner": "aot_eager"})
    try:
        torch.compile(model, backend="aot_eager")(x, labels)
    except RuntimeError as refused:
        try:
            return {"refused": [str(refused), str(run(x, labels))]}
        except RuntimeError as again:
            return {"refused": [str(refused), str(again)]}
    torch._dynamo.reset()
    counters.clear()
    with said_by_fxpass() as said:
        out = run(x, labels)
        out.backward()
    return result(out, model, said)


# ---------------------------------------------------------------- programs without a module


# rows, hidden size, classes; of the second, a copy of the weight is smaller than the logits of one
# rank and larger than those of the other
SMALL, UNEQUAL = (9, 8, 12), (518, 259, 259)


def of_local_linear(z: Tensor, t: Tensor) -> Tensor:
    """What the number of all classes is part of."""
    wrapped = z.log_softmax(-1)[torch.arange(len(t), device=t.device), t - z.shape[1]]
    return F.cross_entropy(z, t, label_smoothing=0.2) - 2 * wrapped.mean()


def per_row(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z, t, reduction="none").square().mean()


def operands(n: int, d: int, v: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(2)
    made = (torch.randn(size, generator=random) for size in ((n, d), (v, d), (v,)))
    return *made, torch.randint(v // 2, v, (n,), generator=random)


def gathered_by_hand(mesh: DeviceMesh, rank: int) -> dict[str, Any]:
    """Each rank multiplies a plain tensor by its classes, and gathers the logits."""
    x, w, _, t = (o.to(mesh.device_type) for o in operands(9, 8, 12))
    x, w = x.requires_grad_(), w.chunk(mesh.size())[rank].clone().requires_grad_()

    def program(x: Tensor, w: Tensor) -> Tensor:
        z = DTensor.from_local(F.linear(x, w), mesh, [Shard(1)], run_check=False).full_tensor()
        return of_local_linear(z, t)

    torch._dynamo.reset()
    counters.clear()
    loss: Tensor = torch.compile(program, backend="fusedce")(x, w)
    loss.backward()
    assert w.grad is not None
    whole = DTensor.from_local(w.grad, mesh, [Shard(0)], run_check=False).full_tensor()
    return {"values": [loss.detach(), whole], "matched": counters["fusedce"]["matched"]}


def on_shards(
    mesh: DeviceMesh, sizes: tuple[int, int, int], written: str = "", trains_x: bool = True
) -> dict[str, Any]:
    """A loss of each row, whose backward computes the logits; with an operand that is written
    between the two passes."""
    x, w, b, t = (o.to(mesh.device_type) for o in operands(*sizes))
    w, b = (distribute_tensor(o, mesh, [Shard(0)]).detach().requires_grad_() for o in (w, b))

    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        z = F.linear(DTensor.from_local(x, mesh, [Replicate()], run_check=False), w, b)
        return per_row(z.full_tensor(), t)  # type: ignore[attr-defined]

    torch._dynamo.reset()
    counters.clear()
    options = {"fusedce.strategy": "chunked", "fusedce.min_logits_mb": 0.0 if written else 0.01}
    run: Any = torch.compile(program, backend="fusedce", options=options)
    loss = run(x.requires_grad_(trains_x), w, b)
    with torch.no_grad():
        {"bias": b, "weight": w}.get(written, torch.zeros(())).add_(1)
    loss.backward()
    counted = counters["fusedce"]["matched"]
    return {"values": [loss.detach(), w.grad.full_tensor()], "matched": counted}  # type: ignore[union-attr]


def masked_class(z: Tensor) -> Tensor:
    z = z * 1.0
    z[:, 1] = -3.0
    return z


# of a rank's plain logits and labels, with all logits gathered from them
OF_LOCAL_LOGITS: dict[str, Callable[..., Any]] = {
    "lse": lambda z, t, whole: F.cross_entropy(whole(z), t) + z.logsumexp(-1).square().mean(),
    "max": lambda z, t, whole: F.cross_entropy(whole(z), t) + z.max(-1).values.mean(),
    "log-softmax": lambda z, t, whole: F.nll_loss(whole(z.log_softmax(-1)), t),
    "assigned": lambda z, t, whole: F.cross_entropy(whole(masked_class(z)), t),
    "one-hot": lambda z, t, whole: F.cross_entropy(whole(z - F.one_hot(t % 6, 6)), t),
    "own labels": lambda z, t, whole: F.cross_entropy(whole(z), t) + F.cross_entropy(z, t % 6),
}
# of the logits as a DTensor: a rank has its part of each
PARTS: dict[str, Callable[[Any], Tensor]] = {
    "sum": lambda z: z.exp().sum(-1).to_local().mean(),
    "maximum": lambda z: z.amax(-1).to_local().mean() + z.logsumexp(-1).full_tensor().mean(),
}


def beside_eager(program: Callable[..., Tensor], *leaves: Tensor) -> dict[str, Any]:
    """What a program and its compiled form compute on this rank."""
    found: dict[str, Any] = {}
    options = {"fusedce.inner": "aot_eager"}
    for name, fn in (
        ("eager", program),
        ("ours", torch.compile(program, backend="fusedce", options=options)),
    ):
        torch._dynamo.reset()
        counters.clear()
        given = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        out = fn(*given)
        if out.requires_grad:
            out.backward()
        found[name] = [whole(t) for t in (out.detach(), *(g.grad for g in given)) if t is not None]
    return found | {"matched": counters["fusedce"]["matched"]}


def local_programs(mesh: DeviceMesh, rank: int) -> dict[str, Any]:
    """Programs of a rank's plain logits, or of its part of a DTensor; and the largest class alone,
    as the only output of a call."""
    x, w, _, t = (o.to(mesh.device_type) for o in operands(9, 8, 12))
    gather: Any = lambda z: DTensor.from_local(z, mesh, [Shard(1)], run_check=False).full_tensor()  # noqa: E731
    sharded = distribute_tensor(w, mesh, [Shard(0)])

    def logits(x: Tensor, w: Tensor) -> Any:
        return F.linear(DTensor.from_local(x, mesh, [Replicate()], run_check=False), w)

    out = {
        name: beside_eager(
            lambda x, w, loss=loss: loss(F.linear(x, w), t, gather), x, w.chunk(2)[rank]
        )
        for name, loss in OF_LOCAL_LOGITS.items()
    }
    out |= {
        name: beside_eager(lambda x, w, part=part: part(logits(x, w)), x, sharded)
        for name, part in PARTS.items()
    }
    out["largest class"] = beside_eager(
        lambda x, w: logits(x, w).full_tensor().argmax(-1), x, sharded
    )
    uneven = w[:11].chunk(2)[rank]

    def of_uneven(x: Tensor, w: Tensor) -> Tensor:
        sizes = {"shape": torch.Size((9, 11)), "stride": (11, 1)}
        z = DTensor.from_local(F.linear(x, w), mesh, [Shard(1)], run_check=False, **sizes)
        return F.cross_entropy(z.full_tensor(), t.clamp(max=10))  # type: ignore[attr-defined]

    out["uneven"] = beside_eager(of_uneven, x, uneven)
    return out


def main(rank: int, world: int, device: torch.device) -> dict[str, Any]:
    mesh = init_device_mesh(device.type, (world,))
    out: dict[str, Any] = {}
    for name, case in (OF_FOUR if world == 4 else {**FUSED, **LEFT}).items():
        try:
            out[name] = step(case, mesh)
        except Exception as error:
            raise RuntimeError(f"in case {name!r}") from error
    for name, (reduction, dim) in ROWS.items() if world == 2 else ():
        out[f"rows, {name}"] = rows_as_dtensors(mesh, reduction, dim)
    if world == 2:
        out["local"] = local_programs(mesh, rank)
        out["gathered by hand"] = gathered_by_hand(mesh, rank)
        out["bias written"] = on_shards(mesh, SMALL, "bias")
        out["weight written"] = on_shards(mesh, SMALL, "weight", trains_x=False)
        out["unequal shards"] = on_shards(mesh, UNEQUAL, trains_x=False)
    return out
