"""Heads that are sharded over classes, through the pass on the joint graph alone.

In: the models of :mod:`tests.ranks.heads`, and programs of plain tensors with collectives of their
own. ``WHOLE`` are fused with the collectives in the calls, a few rows at a time; ``OUTSIDE`` have
the collectives between calls, since sizes may differ between ranks; ``LEFT`` stay as they are.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from fxpass.rows.backend import RowsPass
from fxpass.rows.rules import VIEWS
from fxpass.rows.sizes import numel, packet, shape, value
from tests.fuzz.small import small
from tests.ranks import heads
from tests.ranks.case import Case, Rank, Values, values_of
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
V = 20  # all classes; no other dimension has as many, nor as many as a rank has


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
) -> Case:
    """A model with a head of this style.

    Args:
        v: classes.
        calls: how many calls there are.
        within: whether they have collectives.
        autocast: whether bf16 is on.
    """
    parallel = style in (SHARDED, FROM_SEQUENCE)

    def model() -> Model:
        return Model(loss, v, bias)

    def step(here: Rank) -> Values:
        made = model().to(here.device)
        parallelize_module(made, here.mesh(), {"lm_head": style})
        x, labels = here.move(data(v))
        x = x.chunk(here.world, 1)[here.rank] if style is FROM_SEQUENCE else x
        rows = RowsPass()
        with small(), loss_parallel() if parallel else nullcontext():
            with torch.autocast(here.device.type, BF16, enabled=autocast):
                found = torch.compile(made, backend=rows.backend())(x, labels)
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
            if isinstance(value(node), Tensor)
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


def of_top_p(z: Tensor, t: Tensor) -> Tensor:
    """The loss among the likeliest classes."""
    probabilities, order = z.softmax(-1).sort(-1, descending=True)
    beyond = probabilities.cumsum(-1) - probabilities > 0.9
    left = z.masked_fill(beyond.scatter(-1, order, beyond), -30.0)
    return mean(left, t)


WHOLE = {
    "loss_parallel": of_heads(mean, SHARDED),
    "loss_parallel, per row": of_heads(heads.of_rows, SHARDED),
    "loss_parallel, sum, bias": of_heads(heads.summed, SHARDED, bias=True),
    "loss_parallel, bf16": of_heads(heads.summed, SHARDED, autocast=True),
    "loss_parallel, four": of_heads(mean, SHARDED, bias=True, world=4),
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
    "divergence": of_heads(jensen_shannon),
    "top-p": of_heads(of_top_p),
}

CASES = {**WHOLE}
