"""Logits that calls of one nested region (``nested_compile_region``) return, reduced outside."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.row import FORMULA, NOTHING, REGION, Row

KIND = "nested regions"
nested: Any = torch.compiler.nested_compile_region


def kl(one: Tensor, other: Tensor) -> Tensor:
    p, q = one.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


def r_drop(x: Tensor, weight: Tensor) -> Tensor:
    one, two = head(x, weight), head(x * 0.5, weight)
    return kl(one, two) + kl(two, one)


@nested
def head(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


@nested
def softcapped(x: Tensor, weight: Tensor) -> Tensor:
    """The result is a view of what the nested graph makes, and changes in place there."""
    z = F.linear(x, weight).unsqueeze(0)
    z.div_(30)
    z[..., 3] = -1.0
    return (30 * torch.tanh(z)).view(-1, weight.shape[0])


@nested
def with_hidden(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, weight), x.sin()


def _with_loss(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    z = F.linear(x, weight)
    return F.cross_entropy(z, labels), z


def _loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), labels)


NESTED_LOSS: Any = nested(_loss)
NESTED_BOTH: Any = nested(_with_loss)


@nested
def spread_of(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight).sort(-1).values[..., :40].logsumexp(-1)


@nested
def written(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.mul_(2), weight)


@nested
def switched(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.norm()
    return F.linear(x / scale, weight)


@nested
def dropped(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.dropout(x), weight)


@nested
def hidden_layer(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight).relu() @ weight


# fmt: off
ROWS = (
    Row("R-Drop", "r_drop(x, weight)", REGION, ways=("dynamic",)),
    Row("distilled, written inside",
        "student = softcapped(x, weight); teacher = softcapped(second_x, second_weight).detach(); "
        "kl(teacher / 2, student / 2)", REGION),
    Row("one call reads another's result",
        "one, hidden = with_hidden(x, weight); two, hidden = with_hidden(hidden, second_weight); "
        "kl(one, two) + hidden.sum()", REGION, ways=("dynamic",)),
    Row("logits that are returned as well",
        "one, two = (head(x, weight), head(second_x, weight)); (kl(one, two), one)", REGION,
        never=("checkpointed",)),
    Row("in a checkpoint", "checkpoint(r_drop, x, weight, use_reentrant=False)", REGION),
    Row("beside a checkpoint",
        "one, two = (head(x, weight), head(second_x, weight)); "
        "three = checkpoint(F.linear, second_x, second_weight, use_reentrant=False); "
        "kl(one, two) + kl(one, three)", REGION),
    Row("losses with a formula",
        "one, two = (F.cross_entropy(head(h, weight), labels) for h in (x, second_x)); one + two",
        FORMULA),
    Row("losses inside",
        "NESTED_LOSS(x, weight, labels) + NESTED_LOSS(second_x, weight, labels)", FORMULA),
    Row("regions inside", "(spread_of(x, weight) - spread_of(second_x, weight)).square().mean()",
        REGION),
    Row("a loss inside, and logits that leave",
        "(loss, one) = NESTED_BOTH(x, weight, labels); "
        "(more, two) = NESTED_BOTH(second_x, weight, labels); "
        "loss + more + kl(one, two)", REGION),
    Row("heads under autocast",
        "with torch.autocast('cpu', torch.bfloat16):\n"
        "    one, two = (head(x, weight), head(second_x, weight))\n"
        "kl(one.float(), two.float())", REGION),
    # where nothing is trained: torch does not train such a nested region
    Row("an input is written inside",
        "with torch.no_grad():\n"
        "    h, g = (x * 1, second_x * 1)\n"
        "    return kl(written(h, weight), written(g, weight)) + h.sum() + g.sum()", NOTHING),
)
# of tests/unit/rewrite/test_nested_regions.py: torch runs the nested graphs that stay only under
# AOTAutograd, and not in the first way
STAY = (
    Row("a view of a result is written",
        "one, two = (head(x, weight) * 1, head(second_x, weight)); part = two.detach()[:, :5]; "
        "before = (two * 1).amax(-1); part.mul_(2); "
        "(one - two).square().sort(-1).values[:, :9].sum() + before.sum()", REGION),
    Row("other numbers of rows",
        "one, two = (head(x, weight), head(second_x[:20], weight)); "
        "three = head(second_x[20:40], weight); kl(one[:20], two) + kl(two, three)", REGION,
        left=""),
    Row("hidden layers that stay nested",
        "h, g = (hidden_layer(x, second_weight), hidden_layer(second_x, second_weight)); "
        "kl(head(h, weight), head(g, weight))", REGION,
        left="2 invoke_subgraph"),
    Row("sums over rows",
        "one, two = (head(x, weight), head(second_x, weight)); "
        "(one.cumsum(0) * two.cumsum(0)).square().mean()", REGION),
    Row("gradients are switched inside", "kl(switched(x, weight), switched(second_x, weight))",
        NOTHING),
    Row("random numbers inside", "kl(dropped(x, weight), dropped(x, weight))", NOTHING, drawn=True),
)
