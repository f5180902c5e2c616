"""The rows of one batch split over ranks, with plain tensors: what each rank computes.

Every rank has some positions of every sequence, with the labels of the *next* position, which for
the last one is the first of the next rank. Attention sees keys that are gathered from all ranks.
What a loss's mean is taken over is then on several ranks: the spellings of that are ``SPELLINGS``.
``train`` of a case is called by the ranks and, with ``alone``, by the test itself on everything.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface

from tests.support import tiny

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


def total(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def count_functional(logits: Tensor, labels: Tensor) -> Tensor:
    count = everywhere((labels != IGNORED).sum())
    return total(logits, labels) / count


def count_in_place(logits: Tensor, labels: Tensor) -> Tensor:
    count = (labels != IGNORED).sum()
    dist.all_reduce(count)
    return total(logits, labels) / count


def count_meanwhile(logits: Tensor, labels: Tensor) -> Tensor:
    """Dynamo ends the graph where a collective is waited for later, and then, as in every function
    that cannot be traced to its end, already where this one is called: between linear and loss."""
    loss = total(logits, labels)
    count = (labels != IGNORED).sum()
    work: Any = dist.all_reduce(count, async_op=True)
    work.wait()
    return loss / count


def loss_functional(logits: Tensor, labels: Tensor) -> Tensor:
    """The whole loss on every rank. Backward adds up what arrives at all of them, so gradients
    are to be averaged, as DistributedDataParallel does."""
    count = everywhere((labels != IGNORED).sum())
    return everywhere(total(logits, labels)) / count


def loss_in_place(logits: Tensor, labels: Tensor) -> Tensor:
    """The same, by a collective that autograd does not know in eager: Dynamo makes it the one
    above, whatever the backend."""
    both = [total(logits, labels), (labels != IGNORED).sum()]
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
    count = differentiable.all_reduce((labels != IGNORED).sum())
    return differentiable.all_reduce(total(logits, labels)) / count


def rows_by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    rows = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    valid = labels != IGNORED
    count = everywhere(valid.sum())
    return (rows * valid).sum() / count


def weighted_means(logits: Tensor, labels: Tensor) -> Tensor:
    """Each rank's mean, by its share of the rows; nan where a rank has none."""
    valid = (labels != IGNORED).sum()
    share = valid / everywhere(valid)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * share


def weighted_finite_means(logits: Tensor, labels: Tensor) -> Tensor:
    valid = (labels != IGNORED).sum()
    share = valid / everywhere(valid)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()).nan_to_num() * share


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    """What all of these are, where everything is on one rank."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


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
                keys = gathered(keys, 1)
                places = gathered(positions, 0)
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
        items = (labels != IGNORED).sum()
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
class Case:
    """A training step.

    Attributes:
        spelling: a key of ``SPELLINGS``; None is a Llama.
        inner: the inner backend.
        averaged: whether loss and gradients are to be averaged over ranks, and not added up.
        balanced: whether ``context_parallel`` splits the batch, so that each rank has an early and
            a late piece of it.
        ddp: whether DistributedDataParallel averages.
        attends: whether positions see each other.
        lengths: positions of each rank, the last one's all ignored; without, all have as many.
    """

    name: str
    spelling: Spelling | None
    inner: str = "eager"
    averaged: bool = False
    balanced: bool = False
    ddp: bool = False
    attends: bool = True
    lengths: tuple[int, ...] = ()

    def model(self, alone: bool) -> nn.Module:
        if self.spelling is None:
            return Llama(not alone, scaled=self.ddp and not alone)
        return Attends(mean if alone else self.spelling, not alone, self.attends)

    def batch(self) -> list[Tensor]:
        """Everybody's ids [B, S], positions [S] and labels [B, S], a third of them ignored."""
        random = torch.Generator().manual_seed(1)
        size = V if self.spelling else tiny.V
        ids = torch.randint(size, (B, S + 1), generator=random)
        labels = ids[:, 1:].clone()
        labels[torch.rand(B, S, generator=random) < 0.3] = IGNORED
        labels[:, :2] = IGNORED  # a prompt
        if self.lengths:
            labels[:, S - self.lengths[-1] :] = IGNORED  # padding: one rank has nothing else
        return [ids[:, :-1], torch.arange(S), labels]


UNLIKE = (5, 4, 3)
CASES = [
    Case("in place", count_in_place),
    Case("meanwhile", count_meanwhile),
    Case("loss functional", loss_functional, inner="aot_eager", averaged=True),
    Case("loss in place", loss_in_place, averaged=True),
    Case("logged", loss_logged, inner="aot_eager"),
    Case("refused", loss_differentiable, averaged=True),
    Case("rows", rows_by_hand),
    Case("balanced", count_in_place, balanced=True),
    Case("llama", None),
    Case("ddp", None, averaged=True, ddp=True),
    Case("unlike", count_functional, attends=False, lengths=UNLIKE),
    Case("unlike means", weighted_means, attends=False, lengths=UNLIKE),
    Case("unlike finite means", weighted_finite_means, "aot_eager", attends=False, lengths=UNLIKE),
    Case("no rows", count_functional, attends=False, lengths=(12, 0, 0)),
]

# ---------------------------------------------------------------- what a rank does


def main(rank: int, world: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """By case: loss and gradients of this rank in eager and fused, and what was done for it."""
    return {case.name: run(case, rank, world, device) for case in CASES}


def run(case: Case, rank: int, world: int, device: torch.device) -> dict[str, Any]:
    batch = [t.to(device) for t in share(case, rank, world, device)]
    with tempfile.TemporaryDirectory() as folder:
        eager = train(case, batch)
        torch._dynamo.reset()
        counters.clear()
        alike = case.spelling not in (loss_in_place, loss_differentiable)
        traced = eager if alike else train(case, batch, backend="eager")
        broken = counters["stats"]["unique_graphs"] > 1
        torch._dynamo.reset()
        counters.clear()
        options = {"fusedce.inner": case.inner, "fusedce.dump": folder}
        fused = train(case, batch, backend="fusedce", options=options)
        graphs = [path.read_text() for path in sorted(Path(folder).glob("*_after.txt"))]
    return {
        "eager": eager,
        "traced": traced,  # by Dynamo, compiled by nobody
        "broken": broken,  # by Dynamo, of those that are traced
        "fused": fused,
        "graphs": graphs,
        **{name: counters["fusedce"][name] for name in ("matched", "rejected")},
    }


def share(case: Case, rank: int, world: int, device: torch.device) -> Sequence[Tensor]:
    """What this rank has of the batch."""
    batch = case.batch()
    if case.balanced:
        mesh = init_device_mesh(device.type, (world,))
        with context_parallel(mesh, buffers=batch, buffer_seq_dims=[1, 0, 1]):
            return [t.clone() for t in batch]
    lengths = case.lengths or (S // world,) * world
    return [t.split(lengths, dim=-1)[rank].contiguous() for t in batch]


def train(
    case: Case, batch: Sequence[Tensor], alone: bool = False, double: bool = False, **compiled: Any
) -> list[Tensor]:
    """The loss and every parameter's gradient."""
    model = case.model(alone).to(batch[0].device)
    model = copy.deepcopy(model).double() if double else model
    parameters = list(model.parameters())
    if case.ddp and not alone:
        model = DistributedDataParallel(model)
        # Dynamo cuts the graph where a bucket of gradients is full, here in many places
        dist._DEFAULT_FIRST_BUCKET_BYTES = model.bucket_bytes_cap = 4096  # type: ignore[assignment]
    loss = (torch.compile(model, **compiled) if compiled else model)(*batch)
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return [loss.detach().cpu(), *(g.cpu() for g in gradients)]
