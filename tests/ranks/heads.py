"""Heads whose classes are sharded over ranks, compiled with the backend: a step of a small model, and
programs without a module.

PyTorch's own styles make a head parallel. Before that its parameters are the same on all ranks, so
one process can compute what is right. ``LEFT`` are left alone, for a reason that is logged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
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
from fxpass.plan.devices import multiplied_in
from tests.ranks.case import (
    Case,
    Found,
    Rank,
    Values,
    as_eager,
    as_in_one_process,
    as_said,
    values_of,
)
from tests.support import ranks

B, S, D = 2, 6, 8
BF16 = torch.bfloat16
Loss = Callable[..., Any]


class Model(nn.Module):
    """A body and a head; ``loss`` is given its logits ``[B, S, V]`` and the labels ``[B, S]``."""

    def __init__(self, loss: Loss, v: int = 13, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(D, D)
        self.lm_head = nn.Linear(D, v, bias=bias)
        # what is trained in a loss is made anew for each model
        self.loss = loss(v) if isinstance(loss, type) else loss

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.loss(self.lm_head(self.body(x).tanh() * 4), labels)


def data(v: int = 13, ignored: bool = False) -> tuple[Tensor, Tensor]:
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
    v: int = 13,
    bias: bool = False,
    world: int = 2,
    parallel: bool | None = None,
    inner: str = "eager",
    autocast: bool = False,
    frozen: tuple[str, ...] = (),
    strategy: str = "",
    kept: bool = False,
    left: str = "",
    on_one_rank: bool = False,
    sent: str = "48 96 | 384",
) -> Case:
    """A model with a head of this style.

    Args:
        v: classes.
        parallel: whether the loss stands in ``loss_parallel``; where the logits stay sharded.
        frozen: parameters that are not trained.
        kept: whether the logits are returned.
        left: why nothing is fused.
        on_one_rank: whether one rank is to compile for all.
        sent: the exchanges: of the rows a maximum and two sums in f32, and x's gradient.
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
    if left:
        facts = {"matched": 0, "rejected": 1}
        return Case(
            step=step, ways=("fused",) if on_one_rank else ("eager", "fused"), options=options,
            facts=facts, says=(left,), check=as_said if on_one_rank else as_eager,
        )  # fmt: skip
    # logits that are small are saved, but not where a CPU multiplies bf16 in f32
    widened = autocast and not ranks.on_gpus(world)
    widened = widened and multiplied_in(BF16, torch.device("cpu")) != BF16
    lies = "" if "lm_head.weight" in frozen else "(Shard(dim=0),)"
    facts = {"matched": 1, "rejected": 0, "graphs": 1, "placed": lies}
    says = (f"(classes sharded over {world} ranks)", *["(logits kept"] * kept)
    return Case(
        step=step,
        world=world,
        alone=lambda dtype: alone(model(), *data(v), dtype),
        dtype=BF16 if autocast else torch.float32,
        options=options,
        facts=facts | {"saves": not (widened or strategy or kept)},
        says=says,
        conceals=() if kept else ("(logits kept",),
        exchanges=sent,
    )


MODELS = {
    "loss_parallel": case(mean, SHARDED),
    "loss_parallel, Inductor": case(summed, SHARDED, inner="inductor"),
    "per row": case(of_rows, SHARDED),
    "sum": case(summed, SHARDED, bias=True),
    "ignored": case(shifted, SHARDED, sent="40 80 | 384"),
    "softcap": case(softcap, SHARDED, bias=True),
    "z-loss": case(
        lambda z, t: mean(z, t) + 1e-2 * (z.flatten(0, 1).logsumexp(-1) ** 2).mean(), SHARDED
    ),
    "gathered": case(mean),
    "gathered, smoothed": case(
        lambda z, t: mean(z, t, weight=spaced(0.5, 2, z), label_smoothing=0.1),
        inner="aot_eager",
        bias=True,
        sent="48 192 | 384",
    ),
    "gathered, shifted": case(shifted, sent="40 80 | 384"),
    "gathered, then a bias": case(lambda z, t: mean(z + spaced(-1, 1, z), t)),
    "sequence": case(mean, FROM_SEQUENCE, sent="gather:192 48 96 | scatter:384"),
    "bf16": case(summed, SHARDED, autocast=True, sent="48 96 | 192"),
    "frozen head": case(mean, SHARDED, frozen=("lm_head.weight",)),
    "frozen body": case(mean, SHARDED, frozen=("body.weight", "body.bias"), sent="48 96 | "),
    "tiled": case(mean, SHARDED, strategy="tiled", bias=True),
    "chunked": case(mean, SHARDED, strategy="chunked", bias=True),
    "logits returned": case(lambda z, t: (mean(z, t), z), SHARDED, bias=True, kept=True),
    "gathered logits returned": case(
        lambda z, t: (mean(z, t), z), kept=True, sent="gather:336 48 96 | 384"
    ),
    "full tensor": case(
        lambda z, t: mean(z.full_tensor() if isinstance(z, DTensor) else z, t),
        SHARDED,
        parallel=False,
    ),
    "scaled": case(lambda z, t: mean(z * spaced(1, 2, z, S).unsqueeze(-1), t)),
    "policy": case(policy, bias=True, sent="48 144 | 384"),
    "policy of DTensors": case(policy_of_dtensors, SHARDED),
    "accuracy": case(with_accuracy, sent="96 96 144 | 384"),
    "soft targets": case(soft_targets, sent="48 144 | 384"),
    "masked": case(masked),
    "margin": case(with_margin),
    "margin, bf16": case(with_margin, autocast=True, sent="48 96 | 192"),
    "angle": case(with_angle, inner="aot_eager", bias=True),
    "trained temperature": case(TEMPERATURE, inner="aot_eager", sent="48 96 | 4 384"),
    "trained temperature, frozen head": case(
        TEMPERATURE, frozen=("lm_head.weight",), sent="48 96 | 4 384"
    ),
    "trained temperatures": case(
        trained(lambda v: torch.linspace(0.5, 2, S), lambda z, p, *_: z * p.unsqueeze(-1)),
        bias=True,
        sent="48 96 | 48 384",
    ),
    "trained bias": case(trained(of_classes, lambda z, p, *_: z + p), sent="48 96 | 52 384"),
    "trained factors": case(FACTORS, sent="48 96 | 52 384"),
    "trained bias and temperature": case(BIAS_AND_SCALE, bias=True, sent="48 96 | 4 52 384"),
    "trained soft targets": case(SOFT, sent="48 144 | 624 384"),
    "thresholds": case(
        lambda z, t: mean(torch.where(z > spaced(-1, 1, z, S).unsqueeze(-1), z, 0.1 * z), t)
    ),
    # on four ranks, of which the last has one class, or none
    "four, margin": case(with_margin, v=9, bias=True, world=4),
    "four, trained": case(BIAS_AND_SCALE, v=9, bias=True, world=4, sent="48 96 | 4 36 384"),
    "four, trained factors": case(FACTORS, world=4, sent="48 96 | 52 384"),
}
LEFT = {
    "hidden sharded": case(mean, OF_ROWS, left="the head's weight is placed [S(1)]"),
    "own classes": case(
        lambda z, t: mean(z, t.clamp(max=z.shape[-1] - 1)), ColwiseParallel(), v=12,
        left="gives each rank only its part of the logits",
    ),
    "own rows": case(
        lambda z, t: mean(z, t[:, : z.shape[1]]), ColwiseParallel(output_layouts=Shard(1)),
        left="gives each rank only its part of the logits, [S(1)]",
    ),
    "some classes": case(
        lambda z, t: mean(z[..., :10], t.clamp(max=9)),
        left="selects some classes of sharded logits",
    ),
    "compiled on one rank": case(
        mean, SHARDED, v=12, inner="aot_eager", on_one_rank=True,
        left="one rank compiles for all ranks (compile_on_one_rank)",
    ),
}  # fmt: skip


# ---------------------------------------------------------------- rows that are sharded

NO_SHARDED_SEQUENCES = (
    "Attempted to flatten multiple dimensions, with dimension 1",  # torch 2.11
    "DTensorSpec doesn't allow specify shard_order",  # 2.15, when it compiles
)


def of_sharded_rows(reduction: str, dim: int) -> Case:
    """A replicated head; hidden states and labels are sharded along ``dim``, all DTensors, and the
    mean is over all rows. Torch cannot do sharded sequences in 2.11, and not compile them in 2.15:
    there it says the same with fxpass as without."""

    def model() -> Model:
        return Model(lambda z, t: mean(z, t, reduction=reduction), bias=True)

    def step(here: Rank) -> Values:
        mesh, made = here.mesh(), model()
        distribute_module(made.to(here.device), mesh)
        x, t = (distribute_tensor(o, mesh, [Shard(dim)]) for o in here.move(data(ignored=True)))
        try:
            loss = here.compile(made)(x, t)
        except RuntimeError as refused:
            if dim != 1 or not any(why in str(refused) for why in NO_SHARDED_SEQUENCES):
                raise
            return {}
        here.backward(loss)
        return values_of(loss, made)

    def check(case: Case, each: list[Found]) -> None:
        refused = [not values for rank in each for values in rank.values.values()]
        assert all(refused) or not any(refused)
        if not any(refused):  # torch's own mean is over each rank's rows
            assert [rank.facts["matched"] for rank in each] == [1, 1]
            assert all("(rows over 2)" in rank.said[0] for rank in each)
            as_in_one_process(replace(case, ways=("fused",)), each)

    return Case(
        step=step,
        alone=lambda dtype: alone(model(), *data(ignored=True), dtype),
        ways=("aot_eager", "fused"),
        check=check,
    )


ROWS = {
    "mean": of_sharded_rows("mean", 1),
    "sum": of_sharded_rows("sum", 1),
    "mean, whole sequences": of_sharded_rows("mean", 0),
}


# ---------------------------------------------------------------- programs without a module

# rows, hidden size, classes; of the second, a copy of the weight is smaller than the logits of one
# rank and larger than those of the other
SMALL, UNEQUAL = (9, 8, 12), (518, 259, 259)


def operands(n: int, d: int, v: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(2)
    made = (torch.randn(size, generator=random) for size in ((n, d), (v, d), (v,)))
    return *made, torch.randint(v // 2, v, (n,), generator=random)


def of_all_classes(z: Tensor, t: Tensor) -> Tensor:
    """What the number of all classes is part of."""
    wrapped = z.log_softmax(-1)[torch.arange(len(t), device=t.device), t - z.shape[1]]
    return F.cross_entropy(z, t, label_smoothing=0.2) - 2 * wrapped.mean()


def squares(z: Tensor, t: Tensor) -> Tensor:
    """Of each row's loss, whose backward computes the logits."""
    return F.cross_entropy(z, t, reduction="none").square().mean()


def from_shards(local: Any, mesh: Any, dim: int = 1, **sizes: Any) -> Any:
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, **sizes)


def replicated(local: Any, mesh: Any) -> Any:
    return DTensor.from_local(local, mesh, [Replicate()], run_check=False)


def of_weight(step: Callable[[Rank], Values], of: Loss, sizes: Any, **options: Any) -> Case:
    """The loss, and the gradient of the weight."""

    def in_one(dtype: torch.dtype) -> Values:
        x, w, b, t = operands(*sizes)
        x, w, b = (tensor.to(dtype) for tensor in (x, w.requires_grad_(), b))
        w = w.detach().requires_grad_()
        loss = of(F.linear(x, w, b if options else None), t)
        loss.backward()
        return {"loss": loss.detach(), "weight": w.grad}  # type: ignore[dict-item]

    return Case(step=step, alone=in_one, options=options, facts={"matched": 1})


def by_hand(here: Rank) -> Values:
    """Each rank multiplies a plain tensor by its classes, and gathers the logits."""
    mesh = here.mesh()
    x, w, _, t = here.move(operands(*SMALL))
    x, w = x.requires_grad_(), w.chunk(here.world)[here.rank].clone().requires_grad_()
    run = here.compile(
        lambda x, w: of_all_classes(from_shards(F.linear(x, w), mesh).full_tensor(), t)
    )
    loss = run(x, w)
    here.backward(loss)
    return {"loss": loss, "weight": from_shards(w.grad, mesh, 0)}


def on_shards(sizes: tuple[int, int, int], written: str = "", trains_x: bool = False) -> Case:
    """With an operand that is written between the two passes."""

    def step(here: Rank) -> Values:
        mesh = here.mesh()
        x, w, b, t = here.move(operands(*sizes))
        w, b = (distribute_tensor(o, mesh, [Shard(0)]).detach().requires_grad_() for o in (w, b))
        run = here.compile(
            lambda x, w, b: squares(F.linear(replicated(x, mesh), w, b).full_tensor(), t)  # type: ignore[attr-defined]
        )
        loss = run(x.requires_grad_(trains_x), w, b)
        with torch.no_grad():
            {"bias": b, "weight": w}.get(written, torch.zeros(())).add_(1)
        here.backward(loss)
        return {"loss": loss, "weight": w.grad}  # type: ignore[dict-item]

    least = 0.0 if written else 0.01
    options = {"fusedce.strategy": "chunked", "fusedce.min_logits_mb": least}
    return of_weight(step, squares, sizes, **options)


PROGRAMS = {
    "gathered by hand": of_weight(by_hand, of_all_classes, SMALL),
    "bias written": on_shards(SMALL, "bias", trains_x=True),
    "weight written": on_shards(SMALL, "weight"),
    "unequal shards": on_shards(UNEQUAL),
}


def masked_class(z: Tensor) -> Tensor:
    z = z * 1.0
    z[:, 1] = -3.0
    return z


def of_part(program: Loss, matched: int, sharded: bool = False, classes: int = 12) -> Case:
    """A program of x, the rank's part of the weight (or the weight as a DTensor), labels, and a
    function that gathers logits. What it does with its part is left alone: what is fused is of all
    logits, which exist beside it."""

    def step(here: Rank) -> Values:
        mesh = here.mesh()
        x, w, _, t = here.move(operands(9, 8, 12))
        part = w[:classes].chunk(2)[here.rank]
        given = [x, distribute_tensor(w, mesh, [Shard(0)]) if sharded else part]
        given = [leaf.detach().clone().requires_grad_() for leaf in given]

        def gathered(z: Tensor) -> Tensor:
            sizes = {} if classes == 12 else {"shape": torch.Size((9, 11)), "stride": (11, 1)}
            return from_shards(z, mesh, **sizes).full_tensor()

        def of_leaves(x: Tensor, w: Tensor) -> Tensor:
            if sharded:
                return program(F.linear(replicated(x, mesh), w))
            return program(F.linear(x, w), t, gathered)

        out = here.compile(of_leaves)(*given)
        if out.requires_grad:
            here.backward(out)
        grads = {name: leaf.grad for name, leaf in zip("xw", given, strict=True)}
        return {"out": out.detach(), **{n: g for n, g in grads.items() if g is not None}}

    facts = {"matched": matched}
    return Case(step=step, ways=("eager", "fused"), facts=facts, check=as_eager)


PARTS = {
    "lse": of_part(
        lambda z, t, all: F.cross_entropy(all(z), t) + z.logsumexp(-1).square().mean(), 1
    ),
    "max": of_part(lambda z, t, all: F.cross_entropy(all(z), t) + z.max(-1).values.mean(), 1),
    "log-softmax": of_part(lambda z, t, all: F.nll_loss(all(z.log_softmax(-1)), t), 0),
    "assigned": of_part(lambda z, t, all: F.cross_entropy(all(masked_class(z)), t), 0),
    "one-hot": of_part(lambda z, t, all: F.cross_entropy(all(z - F.one_hot(t % 6, 6)), t), 0),
    "own labels": of_part(
        lambda z, t, all: F.cross_entropy(all(z), t) + F.cross_entropy(z, t % 6), 1
    ),
    "uneven": of_part(
        lambda z, t, all: F.cross_entropy(all(z), t.clamp(max=10)), 0, classes=11
    ),
    # of the logits as a DTensor: a rank has its part of each
    "sum": of_part(lambda z: z.exp().sum(-1).to_local().mean(), 0, sharded=True),
    "maximum": of_part(
        lambda z: z.amax(-1).to_local().mean() + z.logsumexp(-1).full_tensor().mean(), 0,
        sharded=True,
    ),
    "largest class": of_part(lambda z: z.full_tensor().argmax(-1), 1, sharded=True),
}  # fmt: skip
CASES = {
    **MODELS,
    **LEFT,
    **{f"rows, {name}": row for name, row in ROWS.items()},
    **PROGRAMS,
    **{f"part, {name}": row for name, row in PARTS.items()},
}
