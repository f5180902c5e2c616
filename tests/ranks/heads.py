"""Heads whose classes are sharded over ranks, compiled with the backend: a step of a small model.

PyTorch's own styles make a head parallel. Before that its parameters are the same on all ranks, so
one process can compute what is right. ``JOINT`` are fused in the joint graph, ``LEFT`` left
alone, for a reason that is logged. What is exchanged inside a call is not among what is ``sent``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from fxpass import messages
from fxpass.releases.torch_2_13 import one_rank_settings
from tests.ranks.case import (
    Case,
    Rank,
    Values,
    as_eager,
    as_said,
    values_of,
)

B, S, D = 2, 6, 8
V = 80  # divides by the ranks, and no other dimension has as many
BF16 = torch.bfloat16
Loss = Callable[..., Any]


class Model(nn.Module):
    """A body and a head; ``loss`` is given its logits ``[B, S, V]`` and the labels ``[B, S]``."""

    def __init__(self, loss: Loss, v: int = V, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(D, D)
        self.lm_head = nn.Linear(D, v, bias=bias)
        # what is trained in a loss is made anew for each model
        self.loss = loss(v) if isinstance(loss, type) else loss

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self.lm_head(self.body(x).tanh() * 4), labels)


def data(v: int = V, ignored: bool = False) -> tuple[Tensor, Tensor]:
    """Hidden states and labels, of which the ranks' halves have unlike numbers that count."""
    random = torch.Generator().manual_seed(1)
    x, labels = torch.randn((B, S, D), generator=random), torch.randint(v, (B, S), generator=random)
    labels[0, :2] = -100 if ignored else labels[0, :2]
    return x, labels


def alone(model: nn.Module, x: Tensor, labels: Tensor, dtype: torch.dtype) -> Values:
    """A step of one process; bfloat16 is that of autocast."""
    if dtype != BF16:
        model, x = model.to(dtype), x.to(dtype)
    with torch.autocast("cpu", BF16, enabled=dtype == BF16):
        out = model(x, labels)
    loss, *logits = out if isinstance(out, tuple) else (out,)
    loss.backward()
    return values_of(loss, model, **dict(zip(["logits"], logits, strict=False)))


# ---------------------------------------------------------------- losses


def rows(z: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    return z.flatten(0, 1), t.flatten()


def mean(z: Tensor, t: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(*rows(z, t), **options)


def of_rows(z: Tensor, t: Tensor) -> Tensor:
    return mean(z, t, reduction="none").square().mean()


def summed(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z.float().view(-1, z.shape[-1]), t.view(-1), reduction="sum") / 7


def softcap(z: Tensor, t: Tensor) -> Tensor:
    z = (z.float() / 5).tanh() * 5
    return F.cross_entropy(z.view(-1, z.shape[-1]), t.view(-1))


def shifted(z: Tensor, t: Tensor) -> Tensor:
    z = z[:, :-1, :].contiguous()
    return F.cross_entropy(z.view(-1, z.shape[-1]), t[:, 1:].reshape(-1), ignore_index=3)


def spaced(first: float, last: float, z: Tensor, count: int = 0) -> Tensor:
    return torch.linspace(first, last, count or z.shape[-1], device=z.device).to(z.dtype)


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
    return mean(2 * (z - 0.5 * F.one_hot(t, z.shape[-1])), t, ignore_index=3)


def with_angle(z: Tensor, t: Tensor) -> Tensor:
    """ArcFace."""
    flat, target = rows(z.float() / 20, t)
    angle = flat.clamp(-0.99, 0.99).acos()
    margin = torch.zeros_like(angle).scatter(1, target.unsqueeze(1), 0.3)
    return F.cross_entropy(20 * (angle + margin).cos(), target)


def trained(first: Callable[[int], Tensor], of: Loss, then: Loss = of_rows) -> type[nn.Module]:
    """A loss of logits that parameters change, by the first values of ``p``."""

    class Trained(nn.Module):
        def __init__(self, v: int) -> None:
            super().__init__()
            self.p, self.scale = nn.Parameter(first(v)), nn.Parameter(torch.tensor(0.7))

        def forward(self, z: Tensor, t: Tensor) -> Tensor:
            return then(of(z, self.p, self.scale, t), t)

    return Trained


def of_classes(v: int) -> Tensor:
    return torch.linspace(-1, 1, v)


TEMPERATURE = trained(lambda v: torch.tensor(0.3), lambda z, p, *_: z / p.exp())
BIAS_AND_SCALE = trained(of_classes, lambda z, p, scale, _: (z + p) * scale)
FACTORS = trained(of_classes, lambda z, p, *_: (z * p.exp()).sin() * 3)
SOFT = trained(
    of_classes,
    lambda z, p, _, t: -((p * t.unsqueeze(-1)).softmax(-1) * z.log_softmax(-1)).sum(-1),
    lambda of_rows, t: of_rows.mean(),
)

# ---------------------------------------------------------------- models

SHARDED = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
FROM_SEQUENCE = ColwiseParallel(
    input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
)
GATHERED = ColwiseParallel(output_layouts=Replicate())
OF_ROWS = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())


def case(
    loss: Loss,
    style: Any = GATHERED,
    *,
    v: int = V,
    bias: bool = False,
    world: int = 2,
    parallel: bool | None = None,
    inner: str = "eager",
    autocast: bool = False,
    frozen: tuple[str, ...] = (),
    strategy: str = "",
    left: str = "",
    rejected: int = 1,
    region: str = "",
    on_one_rank: bool = False,
    sent: str = " | 384",
) -> Case:
    """A model with a head of this style.

    Args:
        v: classes.
        parallel: whether the loss stands in ``loss_parallel``; where the logits stay sharded.
        frozen: parameters that are not trained.
        left: why nothing is fused.
        rejected: how many lines say so; loss and product may each have one.
        region: what is fused of a rank's own logits, or of logits that no rank shards.
        on_one_rank: whether one rank is to compile for all.
        sent: the exchanges beside the calls: x's gradient, and what a mean adds up of rows.
    """
    inside = style in (SHARDED, FROM_SEQUENCE) if parallel is None else parallel

    def model() -> Model:
        made = Model(loss, v, bias)
        for name in frozen:
            made.get_parameter(name).requires_grad_(False)
        return made

    def step(here: Rank) -> Values:
        made = model().to(here.device)
        parallelize_module(made, here.mesh(), {"lm_head": style})
        x, labels = here.move(data(v))
        x = x.chunk(here.world, 1)[here.rank] if style is FROM_SEQUENCE else x
        one_rank_settings().compile_on_one_rank = on_one_rank and here.way == "fused"
        with loss_parallel() if inside else nullcontext():
            with torch.autocast(here.device.type, BF16, enabled=autocast):
                out = here.compile(made)(x, labels)
            found, *logits = out if isinstance(out, tuple) else (out,)
            here.backward(found)
        one_rank_settings().compile_on_one_rank = False
        if style is FROM_SEQUENCE:  # its body saw some of the rows
            for p in made.body.parameters():
                dist.all_reduce(p.grad)
        here.facts["placed"] = str(getattr(made.lm_head.weight.grad, "placements", ""))
        return values_of(found, made, **dict(zip(["logits"], logits, strict=False)))

    options = {"fusedce.inner": inner, **({"fusedce.strategy": strategy} if strategy else {})}
    if left or region:
        facts = {"matched": int(bool(region)), "rejected": rejected * bool(left)}
        return Case(
            step=step, world=world, ways=("fused",) if on_one_rank else ("eager", "fused"),
            options=options, facts=facts, says=(left, region), check=as_said if on_one_rank else as_eager,
        )  # fmt: skip
    lies = "" if "lm_head.weight" in frozen else "(Shard(dim=0),)"
    return Case(
        step=step,
        world=world,
        alone=lambda dtype: alone(model(), *data(v), dtype),
        dtype=BF16 if autocast else torch.float32,
        options=options,
        facts={"matched": 1, "rejected": 0, "graphs": 1, "placed": lies},
        conceals=("(logits kept",),
        exchanges=sent,
    )


MEAN = "48 | 384"  # of loss_parallel: the logits of the labels are added up behind the call
UNEVEN = messages.COLLECTIVE_SIZES
MODELS = {
    "loss_parallel": case(mean, SHARDED, sent=MEAN),
    "loss_parallel, Inductor": case(summed, SHARDED, inner="inductor", sent=MEAN),
    "per row": case(of_rows, SHARDED),
    "sum": case(summed, SHARDED, bias=True, sent=MEAN),
    "ignored": case(shifted, SHARDED, sent="40 | 384"),
    "softcap": case(softcap, SHARDED, bias=True, sent=MEAN),
    "z-loss": case(
        lambda z, t: mean(z, t) + 1e-2 * (z.flatten(0, 1).logsumexp(-1) ** 2).mean(),
        SHARDED,
        sent=MEAN,
    ),
    "gathered": case(mean),
    "gathered, smoothed": case(
        lambda z, t: mean(z, t, weight=spaced(0.5, 2, z), label_smoothing=0.1),
        inner="aot_eager",
        bias=True,
    ),
    "gathered, shifted": case(shifted),
    "gathered, then a bias": case(lambda z, t: mean(z + spaced(-1, 1, z), t)),
    "sequence": case(mean, FROM_SEQUENCE, sent="gather:192 48 | scatter:384"),
    "bf16": case(summed, SHARDED, autocast=True, sent="48 | 192"),
    "frozen head": case(mean, SHARDED, frozen=("lm_head.weight",), sent=MEAN),
    "frozen body": case(mean, SHARDED, frozen=("body.weight", "body.bias"), sent="48 | "),
    "tiled": case(mean, SHARDED, strategy="tiled", bias=True, sent=MEAN),
    "chunked": case(mean, SHARDED, strategy="chunked", bias=True, sent=MEAN),
    # the ranks exchange between calls
    "uneven": case(mean, SHARDED, v=79, sent="48 48 48 | 384"),
    "full tensor": case(
        lambda z, t: mean(z.full_tensor() if isinstance(z, DTensor) else z, t),
        SHARDED,
        parallel=False,
    ),
    "scaled": case(lambda z, t: mean(z * spaced(1, 2, z, S).unsqueeze(-1), t)),
    "policy": case(policy, bias=True),
    "policy of DTensors": case(policy_of_dtensors, SHARDED),
    "accuracy": case(with_accuracy),
    "soft targets": case(soft_targets),
    "masked": case(masked),
    "margin": case(with_margin),
    "margin, bf16": case(with_margin, autocast=True, sent=" | 192"),
    "angle": case(with_angle, inner="aot_eager", bias=True),
    "some classes": case(lambda z, t: mean(z[..., :10], t.clamp(max=9))),
    "trained temperature": case(TEMPERATURE, inner="aot_eager"),
    "trained temperature, frozen head": case(TEMPERATURE, frozen=("lm_head.weight",)),
    "trained temperatures": case(
        trained(lambda v: torch.linspace(0.5, 2, S), lambda z, p, *_: z * p.unsqueeze(-1)),
        bias=True,
    ),
    "trained bias": case(trained(of_classes, lambda z, p, *_: z + p)),
    "trained factors": case(FACTORS),
    "trained bias and temperature": case(BIAS_AND_SCALE, bias=True),
    "trained soft targets": case(SOFT),
    "thresholds": case(
        lambda z, t: mean(torch.where(z > spaced(-1, 1, z, S).unsqueeze(-1), z, 0.1 * z), t)
    ),
    "four": case(mean, SHARDED, bias=True, world=4, sent=MEAN),
    "four, margin": case(with_margin, bias=True, world=4),
    "four, trained": case(BIAS_AND_SCALE, bias=True, world=4),
    "four, trained factors": case(FACTORS, world=4),
}
JOINT = {
    "hidden sharded": case(
        mean, OF_ROWS, region="logits [12, 80]: all_reduce, wait_tensor, log_softmax, gather"
    ),
    "own classes": case(
        lambda z, t: mean(z, t.clamp(max=z.shape[-1] - 1)), ColwiseParallel(),
        region="logits [12, 40]",
    ),
}  # fmt: skip
LEFT = {
    "own rows": case(
        lambda z, t: mean(z, t[:, : z.shape[1]]), ColwiseParallel(output_layouts=Shard(1)),
        left=messages.OTHER_ROWS,
    ),
    "gathered logits returned": case(
        lambda z, t: (mean(z, t), z), left=messages.LEAVES_GRAPH
    ),
    # torch wants a gradient of DTensors that leave
    "logits returned": case(
        lambda z, t: (mean(z, t), z.detach()), SHARDED, bias=True,
        left=messages.LEAVES_GRAPH,
    ),
    "gathered, uneven": case(mean, v=79, left=UNEVEN),
    # the last rank has none
    "four, uneven": case(with_margin, v=9, bias=True, world=4, left=UNEVEN),
    "compiled on one rank": case(
        mean, SHARDED, v=12, inner="aot_eager", on_one_rank=True,
        left=UNEVEN,
    ),
}  # fmt: skip


CASES = {**MODELS, **JOINT, **LEFT}
