"""Heads that are sharded over classes, through the pass on the joint graph alone.

In: the models of :mod:`tests.ranks.heads`, and programs of plain tensors with collectives of their
own. ``WHOLE`` are fused with the collectives in the calls, a few rows at a time; ``OUTSIDE`` have
the collectives between calls, since sizes may differ between ranks; ``LEFT`` stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from fxpass.formula.shards import class_shard
from fxpass.op.collectives import with_summed_gradient
from fxpass.rewrite.inner import InnerBackend, compile_inner
from fxpass.rows.aten_calls import VIEWS
from fxpass.rows.backend import RowsPass
from fxpass.rows.sizes import example, numel, packet, shape
from tests.fuzz.small import small
from tests.ranks import heads
from tests.ranks.case import Case, Rank, Values, same, values_of
from tests.ranks.heads import (
    BF16,
    FROM_SEQUENCE,
    GATHERED,
    SHARDED,
    B,
    Loss,
    Model,
    alone,
    data,
    mean,
)

COLLECTIVE = "_c10d_functional.all_"  # in texts
V = 80  # all classes; no other dimension has as many, nor as many as a rank has


def of_heads(
    loss: Loss,
    style: Any = GATHERED,
    *,
    v: int = V,
    bias: bool = False,
    world: int = 2,
    calls: int = 1,
    within: bool = True,
    autocast: bool = False,
    compiled: bool = False,
    inductor: bool = False,
) -> Case:
    """A model with a head of this style.

    Args:
        v: classes.
        calls: how many calls there are.
        within: whether they have collectives.
        autocast: whether bf16 is on.
        compiled: whether Inductor compiles what is between the collectives of a call.
        inductor: whether it compiles the graph too.
    """
    parallel = style in (SHARDED, FROM_SEQUENCE)

    def model() -> Model:
        return Model(loss, v, bias)

    def step(here: Rank) -> Values:
        made = model().to(here.device)
        parallelize_module(made, here.mesh(), {"lm_head": style})
        x, labels = here.move(data(v))
        x = x.chunk(here.world, 1)[here.rank] if style is FROM_SEQUENCE else x
        rows = RowsPass(compiled=compiled)
        with small(), loss_parallel() if parallel else nullcontext():
            with torch.autocast(here.device.type, BF16, enabled=autocast):
                backend = within_inductor(rows) if inductor else rows.backend()
                found = torch.compile(made, backend=backend)(x, labels)
            here.backward(found)
        if style is FROM_SEQUENCE:  # its body saw some of the rows
            for p in made.body.parameters():
                dist.all_reduce(p.grad)
        facts_of(here, rows, labels.numel())
        return values_of(found, made)

    return Case(
        step=step,
        world=world,
        alone=lambda dtype: alone(model(), *data(v), dtype),
        dtype=BF16 if autocast else torch.float32,
        ways=("rows",),
        facts=facts(calls, within),
    )


def within_inductor(rows: RowsPass) -> Any:
    """A backend, with the pass in Inductor."""
    inner = InnerBackend("inductor")
    return lambda module, inputs: compile_inner(inner, module, inputs, "cast", rows=rows)


def facts(calls: int, within: bool) -> dict[str, Any]:
    """What there is of a program that is fused."""
    return {"calls": calls, "within": within, "declined": [], "large": []}


def facts_of(here: Rank, rows: RowsPass, n: int) -> None:
    """Notes the calls, and which nodes beside them make logits of ``n`` rows, or most of them."""
    sizes = {some * classes for some in (n, n - B) for classes in (V, V // here.world)}
    texts = [str(n.args[1]) for one in rows.made for n in calls_of(one.graph)]
    here.facts |= {
        "calls": sum(one.calls for one in rows.made),
        "within": any(COLLECTIVE in text for text in texts),
        "declined": [str(why) for one in rows.made for why in one.declined],
        "large": [
            node.name
            for one in rows.made
            for node in one.graph.graph.nodes
            if node.op == "call_function" and packet(node) not in VIEWS
            if isinstance(example(node), Tensor)
            if numel(shape(node)) in sizes
        ],
    }


def calls_of(module: Any) -> Any:
    """The calls of a graph."""
    return module.graph.find_nodes(op="call_function", target=torch.ops.fxpass.rows.default)


def jensen_shannon(z: Tensor, t: Tensor) -> Tensor:
    """A divergence from the distribution at another temperature."""
    p, q = z.log_softmax(-1), (z / 2).log_softmax(-1)
    m = ((p.exp() + q.exp()) / 2).log()
    return ((p.exp() * (p - m) + q.exp() * (q - m)).sum(-1) / 2).mean() + mean(z, t)


def with_z_loss(z: Tensor, t: Tensor) -> Tensor:
    return mean(z, t) + 1e-2 * (z.flatten(0, 1).logsumexp(-1) ** 2).mean()


def thresholds(z: Tensor, t: Tensor) -> Tensor:
    limit = torch.linspace(-1, 1, z.shape[1], device=z.device).to(z.dtype).unsqueeze(-1)
    return mean(torch.where(z > limit, z, 0.1 * z), t)


def of_top_p(z: Tensor, t: Tensor) -> Tensor:
    """The loss among the likeliest classes."""
    probabilities, order = z.softmax(-1).sort(-1, descending=True)
    beyond = probabilities.cumsum(-1) - probabilities > 0.9
    left = z.masked_fill(beyond.scatter(-1, order, beyond), -30.0)
    return mean(left, t)


def both_directions(z: Tensor, t: Tensor) -> Tensor:
    """Beside the loss of rows, one of columns, which need all chunks of rows."""
    own = torch.arange(z.shape[-1], device=z.device) * 7 % t.numel()
    return mean(z, t) + F.cross_entropy(z.flatten(0, 1).t(), own)


WHOLE = {
    "loss_parallel": of_heads(mean, SHARDED),
    "loss_parallel, per row": of_heads(heads.of_rows, SHARDED),
    "loss_parallel, sum, bias": of_heads(heads.summed, SHARDED, bias=True),
    "loss_parallel, bf16": of_heads(heads.summed, SHARDED, autocast=True),
    "loss_parallel, four": of_heads(mean, SHARDED, bias=True, world=4),
    "loss_parallel, compiled": of_heads(mean, SHARDED, bias=True, compiled=True),
    "loss_parallel, Inductor": of_heads(mean, SHARDED, compiled=True, inductor=True),
    "gathered, Inductor": of_heads(heads.shifted, inductor=True),
    "gathered, compiled": of_heads(heads.policy, compiled=True),
    "softcap": of_heads(heads.softcap, SHARDED, bias=True),
    "sequence": of_heads(mean, FROM_SEQUENCE),
    "gathered": of_heads(mean),
    "gathered, four": of_heads(mean, world=4),
    "shifted": of_heads(heads.shifted),
    "smoothed": of_heads(lambda z, t: mean(z, t, label_smoothing=0.1), bias=True),
    "policy": of_heads(heads.policy, bias=True),
    "soft targets": of_heads(heads.soft_targets),
    "masked": of_heads(heads.masked),
    "margin": of_heads(heads.with_margin),
    "angle": of_heads(heads.with_angle, bias=True),
    "trained temperature": of_heads(heads.TEMPERATURE),
    "trained bias": of_heads(heads.FACTORS),
    "accuracy": of_heads(heads.with_accuracy),
    "policy of DTensors": of_heads(heads.policy_of_dtensors, SHARDED, calls=2),
    "z-loss": of_heads(with_z_loss, SHARDED),
    "trained targets": of_heads(heads.SOFT),
    "trained bias and temperature": of_heads(heads.BIAS_AND_SCALE, bias=True),
    "thresholds": of_heads(thresholds),
    "divergence": of_heads(jensen_shannon),
    "top-p": of_heads(of_top_p),
    "both directions": of_heads(both_directions, calls=2),
    "both directions, bf16": of_heads(both_directions, autocast=True, compiled=True, calls=2),
}


# ---------------------------------------------------------------- programs with their own collectives


class VocabularyParallel(torch.autograd.Function):
    """The loss of each row, as Megatron spells it: with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, t: Tensor, first: int) -> Any:
        z = z - funcol.all_reduce(z.amax(-1), "max", group()).unsqueeze(-1)
        mine = (t >= first) & (t < first + z.shape[-1])
        index = torch.where(mine, t - first, 0)
        picked = torch.where(mine, z.gather(-1, index.unsqueeze(-1)).squeeze(-1), 0.0)
        picked = funcol.all_reduce(picked, "sum", group())
        total = funcol.all_reduce(z.exp().sum(-1), "sum", group())
        ctx.save_for_backward(z.exp() / total.unsqueeze(-1), mine, index)
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        softmax, mine, index = ctx.saved_tensors
        picked = torch.zeros_like(softmax).scatter(-1, index.unsqueeze(-1), 1.0)
        return (softmax - picked * mine.unsqueeze(-1)) * grad.unsqueeze(-1), None, None


def group() -> Any:
    return dist.group.WORLD


def by_function(z: Tensor, t: Tensor, first: int) -> Tensor:
    return VocabularyParallel.apply(z, t, first).mean()  # type: ignore[union-attr]


def entropy(z: Tensor, t: Tensor, first: int) -> Tensor:
    """The entropies of all classes, whose parts are added up."""
    z = z - funcol.all_reduce(z.detach().amax(-1), "max", group()).unsqueeze(-1)
    sums = torch.stack([z.exp().sum(-1), (z.exp() * z).sum(-1)], -1)
    total, product = _AllReduced.apply(sums).unbind(-1)  # type: ignore[union-attr]
    return (total.log() - product / total).mean()


def gathered(z: Tensor, t: Tensor, first: int) -> Tensor:
    """Of gathered logits, whose gradients add up over the ranks."""
    whole = funcol.all_gather_tensor(z, 1, group())
    return F.cross_entropy(whole, t)


class _AllReduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor) -> Any:
        return funcol.all_reduce(parts, "sum", group())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad


def by_hand(
    of: Callable[..., Tensor],
    right: Callable[[Tensor, Tensor], Tensor],
    *,
    calls: int,
    known: bool = True,
    summed: bool = True,
    world: int = 2,
    v: int = V,
) -> Case:
    """A program of x, this rank's part of a weight, and labels.

    Args:
        of: the loss of this rank's logits, the labels, and its first class.
        right: what one process computes of all logits.
        calls: how many calls there are.
        known: whether the weight is a DTensor: then sizes are known to be the same on all ranks.
        summed: whether x's gradient is added up over ranks by the program.
    """

    def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        random = torch.Generator().manual_seed(3)
        x, w = (torch.randn(s, generator=random).to(dtype) for s in ((12, 8), (v, 8)))
        return x, w, torch.randint(v, (12,), generator=random)

    def in_one(dtype: torch.dtype) -> Values:
        x, w, t = operands(dtype)
        x, w = x.requires_grad_(), w.requires_grad_()
        loss = right(F.linear(x, w), t)
        loss.backward()
        return {"loss": loss.detach(), "x": x.grad, "w": w.grad}  # type: ignore[dict-item]

    def step(here: Rank) -> Values:
        x, w, t = here.move(operands(torch.float32))
        first, count = class_shard(v, here.world, here.rank)
        x = x.requires_grad_()
        if known:
            w = distribute_tensor(w, here.mesh(), [Shard(0)])
        else:
            w = w[first : first + count].clone()
        w, rows = w.detach().requires_grad_(), RowsPass()

        def program(x: Tensor, w: Any) -> Tensor:
            x = with_summed_gradient(x, group().group_name) if summed else x
            return of(F.linear(x, w.to_local() if known else w), t, first)

        with small():
            loss = torch.compile(program, backend=rows.backend(), fullgraph=True)(x, w)
            here.backward(loss)
        facts_of(here, rows, 12)
        return {"loss": loss.detach(), "x": x.grad, "w": w.grad}  # type: ignore[dict-item]

    def join(name: str, parts: list[Tensor]) -> Tensor:
        if name == "x" and not summed:
            return torch.stack(parts).sum(0)
        return same(name, parts) if name != "w" or known else torch.cat(parts)

    return Case(
        step=step,
        world=world,
        alone=in_one,
        ways=("rows",),
        facts=facts(calls, known),
        join=join,
    )


def of_entropies(z: Tensor, t: Tensor) -> Tensor:
    return -(z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean()


def with_gradients_of_two(z: Tensor, t: Tensor) -> Tensor:
    loss = F.cross_entropy(z, t)
    return 2 * loss - loss.detach()


HAND = {
    "by hand": by_hand(by_function, F.cross_entropy, calls=1),
    "by hand, four": by_hand(by_function, F.cross_entropy, calls=1, world=4),
    "by hand, entropy": by_hand(entropy, of_entropies, calls=1),
    "by hand, gathered": by_hand(gathered, with_gradients_of_two, calls=2, summed=False),
}
OUTSIDE = {
    "outside": by_hand(by_function, F.cross_entropy, calls=3, known=False),
    "outside, uneven": by_hand(by_function, F.cross_entropy, calls=3, known=False, v=79),
    "outside, entropy": by_hand(entropy, of_entropies, calls=3, known=False),
    "loss_parallel, uneven": of_heads(mean, SHARDED, v=79, calls=3, within=False),
}

CASES = {**WHOLE, **HAND, **OUTSIDE}
