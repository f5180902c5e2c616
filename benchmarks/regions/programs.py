"""The programs of ``python -m benchmarks.regions``: losses of rows that no formula covers.

In: a :class:`Case`, which a worker gets as JSON. Out: its tensors, its program, and the exact
answer in float64::

    >>> case = Case("jsd", "eager", 8, 4, 16, "float32", "cpu")
    >>> list(case.tensors())
    ['x', 'weight', 'teacher_x', 'teacher_weight']
    >>> case.program(case.stack())(*case.tensors().values()).shape
    torch.Size([])
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loss.case import SEED

RANK = 16  # of a low-rank adapter
EXACT_ROWS = 128  # that float64 computes at a time, and that the layers take as a sequence
OF_A_HEAD = 64  # channels of attention


def jsd(x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor) -> Tensor:
    """The Jensen-Shannon divergence of two heads, as TRL's ``generalized_jsd_loss``: ``[N]``."""
    student = F.linear(x, weight).log_softmax(-1)
    teacher = F.linear(teacher_x, teacher_weight).log_softmax(-1)
    half = math.log(0.5)
    mixed = torch.logsumexp(torch.stack([student + half, teacher + half]), dim=0)
    of_teacher = F.kl_div(mixed, teacher, reduction="none", log_target=True)
    of_student = F.kl_div(mixed, student, reduction="none", log_target=True)
    return (0.5 * of_teacher + 0.5 * of_student).sum(-1)


def kl(
    x: Tensor, weight: Tensor, teacher_x: Tensor, teacher_weight: Tensor, labels: Tensor
) -> Tensor:
    """Cross-entropy, and the divergence from a teacher at a temperature of 2: ``[N]``."""
    z, teacher = F.linear(x, weight), F.linear(teacher_x, teacher_weight)
    soft = F.kl_div((z / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="none").sum(-1)
    return 0.5 * F.cross_entropy(z, labels, reduction="none") + 2 * soft


def lora(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of a frozen head with a low-rank adapter: ``[N]``."""
    z = F.linear(x, weight) + 2.0 * F.linear(F.linear(x, down), up)
    return F.cross_entropy(z, labels, reduction="none")


def top_p(x: Tensor, weight: Tensor) -> Tensor:
    """The entropy of the classes that have 0.9 of the probability together: ``[N]``."""
    ordered = F.linear(x, weight).sort(-1, descending=True).values
    p = ordered.softmax(-1)
    kept = p.cumsum(-1) - p < 0.9
    log_probs = ordered.masked_fill(~kept, -1e4).log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


@dataclass(frozen=True)
class Program:
    """A loss of rows.

    Attributes:
        title: of its table.
        rows: the loss of each row, of the operands.
        operands: their names; those of a row are in :data:`OF_ROWS`.
        trained: the operands that get a gradient.
        squared: the loss is the mean of the rows' squares, so that backward has to compute the
            logits again: the rows' gradients are not known before.
    """

    title: str
    rows: Callable[..., Tensor]
    operands: tuple[str, ...]
    trained: tuple[str, ...]
    squared: bool = False

    def sum(self, *tensors: Tensor) -> Tensor:
        """The sum over the rows."""
        rows = self.rows(*tensors)
        return (rows.square() if self.squared else rows).sum()


BOTH = ("x", "weight")
HEADS = (*BOTH, "teacher_x", "teacher_weight")
PROGRAMS: dict[str, Program] = {
    "jsd": Program("Jensen-Shannon of two heads", jsd, HEADS, BOTH),
    "jsd_squared": Program("Jensen-Shannon of two heads, squared", jsd, HEADS, BOTH, squared=True),
    "kl": Program("KL plus cross-entropy", kl, (*HEADS, "labels"), BOTH),
    "lora": Program("low-rank adapter", lora, (*BOTH, "down", "up", "labels"), ("x", "down", "up")),
    "top_p": Program("entropy of the top-p classes", top_p, BOTH, BOTH),
}
OF_ROWS = ("x", "teacher_x", "labels")


@dataclass(frozen=True)
class Case:
    """A program at a size, and who runs it.

    Attributes:
        name: a key of :data:`PROGRAMS`.
        provider: ``eager``, or a backend of torch.compile.
        cache: the folder of Inductor's caches.
        exact: the file that has the exact answer, or gets it.
        layers: the transformer layers that make the head's hidden states of x; none: x is these.
    """

    name: str
    provider: str
    n: int
    d: int
    v: int
    dtype: str
    device: str
    cache: str = ""
    exact: str = ""
    layers: int = 0

    @property
    def what(self) -> Program:
        return PROGRAMS[self.name]

    def tensors(self) -> dict[str, Tensor]:
        """The operands by name, the same for every provider."""
        shapes = {
            "x": (self.n, self.d),
            "weight": (self.v, self.d),
            "teacher_x": (self.n, self.d),
            "teacher_weight": (self.v, self.d),
            "down": (RANK, self.d),
            "up": (self.v, RANK),
        }
        made = {}
        for i, name in enumerate(self.what.operands):
            generator = torch.Generator(self.device).manual_seed(SEED + i)
            if name == "labels":
                made[name] = torch.randint(
                    self.v, (self.n,), generator=generator, device=self.device
                )
                continue
            values = torch.randn(shapes[name], generator=generator, device=self.device)
            if name not in OF_ROWS:
                values *= 2 * shapes[name][-1] ** -0.5
            values = values.to(getattr(torch, self.dtype))
            made[name] = values.requires_grad_(name in self.what.trained)
        return made

    def stack(self) -> nn.Sequential:
        """The trained layers, the same for every provider: pre-norm, on sequences of rows."""
        if not self.layers:
            return nn.Sequential()
        heads = self.d // OF_A_HEAD if self.d % OF_A_HEAD == 0 else 1
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            layers = nn.Sequential(
                nn.Unflatten(0, (-1, EXACT_ROWS)),
                *(
                    nn.TransformerEncoderLayer(self.d, heads, 2 * self.d, **options)
                    for _ in range(self.layers)
                ),
                nn.Flatten(0, 1),
                nn.LayerNorm(self.d),
            )
        return layers.to(self.device, getattr(torch, self.dtype))

    def program(self, stack: nn.Module) -> Callable[..., Tensor]:
        """The mean loss of the operands, as its user writes it."""
        what = self.what

        def loss(x: Tensor, *others: Tensor) -> Tensor:
            rows = what.rows(stack(x), *others)
            return (rows.square() if what.squared else rows).mean()

        return loss

    def answer(self) -> dict[str, Tensor]:
        """Loss and the operands' gradients in float64, a few rows at a time."""
        wide = {
            name: t.detach().double() if t.is_floating_point() else t
            for name, t in self.tensors().items()
        }
        leaves = [wide[name].requires_grad_() for name in self.what.trained]
        stack = self.stack().double().requires_grad_(False)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for first in range(0, self.n, EXACT_ROWS):
            part = [
                t[first : first + EXACT_ROWS] if name in OF_ROWS else t for name, t in wide.items()
            ]
            loss = self.what.sum(stack(part[0]), *part[1:]) / self.n
            loss.backward()
            total += loss.detach()
        gradients = {f"d{name}": t.grad for name, t in zip(self.what.trained, leaves, strict=True)}
        return {"loss": total} | {name: t for name, t in gradients.items() if t is not None}

    def __str__(self) -> str:
        behind = f", behind {self.layers} transformer layers" if self.layers else ""
        return f"N={self.n} D={self.d} V={self.v}, {self.dtype}{behind}"

    def to(self, provider: str, cache: str = "") -> Case:
        """The same for another provider, with another cache."""
        return dataclasses.replace(self, provider=provider, cache=cache)
