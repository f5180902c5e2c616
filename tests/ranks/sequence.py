"""The rows of one batch split over ranks, with plain tensors, and one mean over all of them.

Every rank has some positions of every sequence, with the labels of the *next* position, which for
the last one is the first of the next rank. Attention sees keys that are gathered from all ranks.
``torch.distributed.tensor.experimental.context_parallel`` splits the batch of one case; its attention
cannot be run here: in torch 2.13 it has rules for the kernels of GPUs only
(``aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy
registered``), so attention is written out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface

from tests.ranks.case import Case, Found, Rank, Values, as_eager, as_in_one_process
from tests.support import tiny
from tests.support.numerics import FLOOR, error

B, S, D, V = 2, 12, 16, 50
IGNORED = -100

# ---------------------------------------------------------------- spellings of a mean over ranks

# logits [B, S / ranks, V], labels [B, S / ranks] -> what this rank calls backward() on
Spelling = Callable[[Tensor, Tensor], Tensor]


def everywhere(t: Tensor) -> Tensor:
    """The sum over all ranks, a new tensor."""
    return collectives.all_reduce(t, "sum", world_group())


def world_group() -> Any:
    return dist.group.WORLD


def valid(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


def total(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    """What all of these are, where everything is on one rank."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def count_functional(logits: Tensor, labels: Tensor) -> Tensor:
    return total(logits, labels) / everywhere(valid(labels))


def count_in_place(logits: Tensor, labels: Tensor) -> Tensor:
    count = valid(labels)
    dist.all_reduce(count)
    return total(logits, labels) / count


def count_meanwhile(logits: Tensor, labels: Tensor) -> Tensor:
    """Dynamo ends the graph where a collective is waited for later, and then, as in every function
    that cannot be traced to its end, already where this one is called: between linear and loss."""
    loss, count = total(logits, labels), valid(labels)
    work: Any = dist.all_reduce(count, async_op=True)
    work.wait()
    return loss / count


def loss_functional(logits: Tensor, labels: Tensor) -> Tensor:
    """The whole loss on every rank. Backward adds up what arrives at all of them, so gradients
    are to be averaged, as DistributedDataParallel does."""
    return everywhere(total(logits, labels)) / everywhere(valid(labels))


def loss_in_place(logits: Tensor, labels: Tensor) -> Tensor:
    """The same, by a collective that autograd does not know in eager: Dynamo makes it the one
    above, whatever the backend."""
    both = [total(logits, labels), valid(labels)]
    for tensor in both:
        dist.all_reduce(tensor)
    return both[0] / both[1]


def loss_logged(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of all ranks is only looked at."""
    loss = count_in_place(logits, labels)
    logged = loss.detach().clone()
    dist.all_reduce(logged)
    return loss + 0 * logged


def loss_differentiable(logits: Tensor, labels: Tensor) -> Tensor:
    """By collectives that torch 2.13 itself refuses to compile. Torch 2.11 compiles them, whatever
    the backend, to a program with the right loss and gradients that are zero."""
    count = differentiable.all_reduce(valid(labels))
    return differentiable.all_reduce(total(logits, labels)) / count


def rows_by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    rows = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (rows * (labels != IGNORED)).sum() / everywhere(valid(labels))


def weighted_means(logits: Tensor, labels: Tensor) -> Tensor:
    """Each rank's mean, by its share of the rows; nan where a rank has none."""
    share = valid(labels) / everywhere(valid(labels))
    return mean(logits, labels) * share


def weighted_finite_means(logits: Tensor, labels: Tensor) -> Tensor:
    share = valid(labels) / everywhere(valid(labels))
    return mean(logits, labels).nan_to_num() * share


# ---------------------------------------------------------------- models


class Attends(nn.Module):
    """Ids [B, S / ranks] at positions [S / ranks] to a loss; no row sees what is after it.

    ``gathers``: whether there are keys on other ranks; ``attends``: whether there is attention.
    """

    def __init__(self, spelling: Spelling, gathers: bool, attends: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spelling, self.gathers, self.attends = spelling, gathers, attends
        self.embed = nn.Embedding(V, D)
        self.key = nn.Linear(D, D, bias=False)
        self.head = nn.Linear(D, V)

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.attends:
            keys, places = self.key(x), positions
            if self.gathers:
                keys, places = gathered(keys, 1), gathered(positions, 0)
            later = places > positions.unsqueeze(1)
            scores = (x @ keys.transpose(1, 2)).masked_fill(later, -torch.inf)
            x = x + scores.softmax(-1) @ keys
        else:
            x = self.key(x)
        return self.spelling(self.head(x.tanh()), labels)


def gathered(t: Tensor, dim: int) -> Tensor:
    """``t`` of all ranks; its gradient comes back from all of them."""
    return GATHER(t.contiguous(), dim, world_group())


# its name since torch 2.13
GATHER: Any = getattr(collectives, "all_gather_single_autograd", None)
GATHER = GATHER or collectives.all_gather_tensor_autograd


class Llama(nn.Module):
    """A real Llama as Hugging Face means it to be split: labels that are shifted already, and a
    count of items that is all ranks'. ``scaled``: times the ranks, for an average of gradients."""

    def __init__(self, gathers: bool, scaled: bool = False) -> None:
        super().__init__()
        self.model, self.gathers, self.scaled = tiny.llama(), gathers, scaled
        AttentionInterface.register("gathered" if gathers else "whole", attention(gathers))
        self.model.set_attn_implementation("gathered" if gathers else "whole")

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        items = valid(labels)
        ranks = dist.get_world_size() if self.scaled else 1
        if self.gathers:
            dist.all_reduce(items)
        out = self.model(
            input_ids=ids,
            position_ids=positions.expand_as(ids),
            labels=labels,
            shift_labels=labels,
            num_items_in_batch=items,
        )
        return out.loss * ranks


def attention(gathers: bool) -> Callable[..., tuple[Tensor, None]]:
    """A causal attention over the keys of all ranks, in the order of the ranks."""

    def attend(module, query, key, value, mask, scaling, **rest):
        before = query.shape[2] * (dist.get_rank() if gathers else 0)
        if gathers:
            key, value = gathered(key, 2), gathered(value, 2)
        rows = torch.arange(query.shape[2], device=query.device) + before
        later = torch.arange(key.shape[2], device=query.device) > rows.unsqueeze(1)
        scores = (query @ key.transpose(2, 3) * scaling).masked_fill(later, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    return attend


# ---------------------------------------------------------------- cases


@dataclass(frozen=True)
class Split:
    """A training step.

    Attributes:
        spelling: of the mean; None is a Llama.
        inner: the inner backend.
        averaged: whether loss and gradients are to be averaged over ranks, and not added up.
        balanced: whether ``context_parallel`` splits the batch, so that each rank has an early and
            a late piece of it.
        ddp: whether DistributedDataParallel averages.
        lengths: positions of each rank, the last one's all ignored, which do not see each other;
            without, all have as many.
    """

    spelling: Spelling | None
    inner: str = "eager"
    averaged: bool = False
    balanced: bool = False
    ddp: bool = False
    lengths: tuple[int, ...] = ()

    def model(self, alone: bool) -> nn.Module:
        if self.spelling is None:
            return Llama(not alone, scaled=self.ddp and not alone)
        return Attends(mean if alone else self.spelling, not alone, not self.lengths)

    def batch(self) -> list[Tensor]:
        """Everybody's ids [B, S], positions [S] and labels [B, S], a third of them ignored."""
        random = torch.Generator().manual_seed(1)
        ids = torch.randint(V if self.spelling else tiny.V, (B, S + 1), generator=random)
        labels = ids[:, 1:].clone()
        labels[torch.rand(B, S, generator=random) < 0.3] = IGNORED
        labels[:, :2] = IGNORED  # a prompt
        if self.lengths:
            labels[:, S - self.lengths[-1] :] = IGNORED  # padding: one rank has nothing else
        return [ids[:, :-1], torch.arange(S), labels]

    def share(self, here: Rank) -> list[Tensor]:
        """What this rank has of the batch."""
        batch = self.batch()
        if self.balanced:
            with context_parallel(here.mesh(), buffers=batch, buffer_seq_dims=[1, 0, 1]):
                return here.move(t.clone() for t in batch)
        lengths = self.lengths or (S // here.world,) * here.world
        return here.move(t.split(lengths, dim=-1)[here.rank].contiguous() for t in batch)

    def step(self, here: Rank) -> Values:
        model: Any = self.model(alone=False).to(here.device)
        parameters = dict(model.named_parameters())
        batch = self.share(here)
        if self.ddp:
            model = DistributedDataParallel(model)
            # Dynamo cuts the graph where a bucket of gradients is full, here in many places
            dist._DEFAULT_FIRST_BUCKET_BYTES = model.bucket_bytes_cap = 4096  # type: ignore[assignment]
        loss = here.compile(model)(*batch)
        here.backward(loss)
        return values_of(loss, parameters)

    def alone(self, dtype: torch.dtype) -> Values:
        model = copy.deepcopy(self.model(alone=True)).to(dtype)
        loss = model(*self.batch())
        loss.backward()
        values = values_of(loss, dict(model.named_parameters()))
        assert all(value.norm() > 0 for value in values.values())
        return {n.replace("module.", ""): value for n, value in values.items()}

    def join(self, name: str, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).sum(0) / (len(parts) if self.averaged else 1)

    def case(self, ranks: int = 2, broken: bool = False, **more: Any) -> Case:
        """A graph is ``broken`` by Dynamo between linear and loss; else the collectives are in one
        graph with the operator."""
        dumps = [] if broken else ["fxpass.rows(", "= all_reduce("]
        gathers = not (broken or self.lengths or self.ddp)
        return Case(
            step=self.step,
            world=ranks,
            alone=self.alone,
            options={"fusedce.inner": self.inner},
            join=self.join,
            **{
                "ways": ("eager", "fused"),
                "facts": {"matched": int(not broken), "rejected": int(broken)},
                "dumps": (*dumps, *["= all_gather_into_tensor("] * gathers),
                "check": one_graph(not (broken or self.ddp)),
                **more,
            },
        )


def values_of(loss: Tensor, parameters: dict[str, nn.Parameter]) -> Values:
    """A rank without rows may have no gradient."""
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
    return {"loss": loss.detach(), **grads}


def one_graph(one: bool) -> Callable[[Case, Sequence[Found]], None]:
    def check(case: Case, each: Any) -> None:
        for rank in each:
            assert not one or len(rank.dumps) == 1
            if one:
                assert ("= all_gather_into_tensor(" in rank.dumps[0]) == (len(case.dumps) > 2)
        as_in_one_process(case, each)

    return check


def of_any_backend(case: Case, each: list[Found]) -> None:
    """Not what eager does, whose autograd knows no all_reduce: its gradients lack a factor."""
    as_in_one_process(replace(case, ways=("traced", "fused")), each)
    for rank in each:
        rank.values["eager"] = {
            name: value if name == "loss" else value * len(each)
            for name, value in rank.values["eager"].items()
        }
    as_in_one_process(replace(case, ways=("eager",)), each)


def refused(case: Case, each: list[Found]) -> None:
    """Where torch does not refuse, its gradients are zero: the collective is an autograd.Function
    that returns what it wrote to. fxpass's are those of eager."""
    if each[0].facts["rejected"]:
        return as_in_one_process(replace(case, ways=("eager", "fused")), each)
    assert [rank.facts["matched"] for rank in each] == [1] * len(each)
    for rank in each:
        traced, eager = rank.values["traced"], rank.values["eager"]
        assert error(traced["loss"], eager["loss"]) < 4 * FLOOR[torch.float32]
        assert not any(value.any() for name, value in traced.items() if name != "loss")
    as_eager(case, each)


def a_mean_of_nothing(case: Case, each: list[Found]) -> None:
    """The mean of a rank without valid rows is nan, as in eager, and its gradients are not."""
    last = len(each) - 1
    for number, rank in enumerate(each):
        assert rank.values["fused"]["loss"].isnan() == (number == last)
    as_eager(case, each)


UNLIKE = (5, 4, 2, 1)
ALL: dict[str, Any] = {"ways": ("eager", "traced", "fused")}
CASES = {
    "in place": Split(count_in_place).case(),
    "meanwhile": Split(count_meanwhile).case(broken=True),
    "loss functional": Split(loss_functional, "aot_eager", averaged=True).case(),
    "loss in place": Split(loss_in_place, averaged=True).case(**ALL, check=of_any_backend),
    "logged": Split(loss_logged, "aot_eager").case(),
    "refused": Split(loss_differentiable, averaged=True).case(
        **ALL, facts={}, dumps=(), check=refused
    ),
    "rows": Split(rows_by_hand).case(),
    "balanced": Split(count_in_place, balanced=True).case(),
    "llama": Split(None).case(),
    "ddp": Split(None, averaged=True, ddp=True).case(),
    "unlike": Split(count_functional, lengths=UNLIKE).case(4),
    "unlike means": Split(weighted_means, lengths=UNLIKE).case(4, check=a_mean_of_nothing),
    "unlike finite means": Split(weighted_finite_means, "aot_eager", lengths=UNLIKE).case(4),
    "no rows": Split(count_functional, lengths=(12, 0, 0, 0)).case(
        4, facts={"matched": lambda rank: int(not rank)}, dumps=("= all_reduce(",)
    ),
}
