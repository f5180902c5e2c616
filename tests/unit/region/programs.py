"""Functions of rows of logits, with their inputs: what regions are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass.region.joint import trace
from fxpass.region.text import Input, RowRegion

V = 37
FLOAT = "float"  # the dtype of the test


@dataclass(frozen=True)
class Program:
    """A function of logits, row operands and shared operands, in this order."""

    function: Callable[..., Sequence[Tensor]]
    heads: tuple[Any, ...] = (V,)  # classes of each
    rows: tuple[tuple[Any, ...], ...] = ()  # dtype and what follows the rows
    shared: tuple[tuple[Any, ...], ...] = ()
    trained: tuple[bool, ...] = (True,)  # the rest is not
    biases: tuple[bool, ...] = ()  # of the heads; none by default

    @property
    def of_heads(self) -> tuple[int, ...]:
        """The number of each head's tensors."""
        return tuple(2 + bias for bias in self.biases or [False] * len(self.heads))

    def symbolic(self) -> Program:
        """With any number of classes, ``v0``, in place of V."""
        named = lambda of: tuple("v0" if size == V else size for size in of)  # noqa: E731
        rows, shared = (tuple(map(named, of)) for of in (self.rows, self.shared))
        return replace(self, heads=named(self.heads), rows=rows, shared=shared)

    def inputs(self, dtype: torch.dtype) -> list[Input]:
        known = lambda of: dtype if of is FLOAT else of  # noqa: E731
        heads = [Input(dtype, ("n", v)) for v in self.heads]
        rows = [Input(known(of), ("n", *shape)) for of, *shape in self.rows]
        return [*heads, *rows, *(Input(known(of), tuple(shape)) for of, *shape in self.shared)]

    @property
    def flags(self) -> list[bool]:
        count = len(self.heads) + len(self.rows) + len(self.shared)
        return [*self.trained, *[False] * (count - len(self.trained))]

    def region(
        self,
        dtype: torch.dtype = torch.float32,
        total: bool = False,
        compiled: bool = True,
        frozen: Sequence[int] = (),
    ) -> RowRegion:
        """``frozen`` are positions of the operator's tensors, as of :meth:`operands`."""
        flags, trained, at = [], [], 0
        others = [1] * (len(self.rows) + len(self.shared))
        for flag, size in zip(self.flags, (*self.of_heads, *others), strict=True):
            some = [i for i in range(at, at + size) if flag and i not in frozen]
            flags, trained, at = [*flags, bool(some)], [*trained, *some], at + size
        hints = {"n": 9, "v0": V, "v1": V + 2}
        joint = trace(self.function, self.inputs(dtype), hints, flags, torch.device("cpu"))
        return RowRegion(
            heads=self.of_heads,
            rows=len(self.rows),
            shared=len(self.shared),
            trained=tuple(trained) if joint.tangents else (),
            outputs=len(joint.outputs),
            tangents=joint.tangents,
            total=total and bool(joint.tangents),
            memory_mb=0,
            compiled=compiled,
            graph=joint.graph,
        )

    def tensors(self, n: int, dtype: torch.dtype, sizes: dict[str, int] | None = None):
        """Random inputs; class indices are below V."""
        known = {"n": n, "v0": V, "v1": V + 2} | (sizes or {})
        generator = torch.Generator().manual_seed(n)
        found = []
        for of in self.inputs(dtype):
            shape = [known.get(s, s) for s in of.shape]
            made = torch.randn(shape, generator=generator, dtype=torch.float64) * 2
            if of.dtype == torch.bool:
                made = made > 0
            elif not of.dtype.is_floating_point:
                made = (made.abs() * 1000).long() % V
            found.append(made.to(of.dtype))
        return found

    def operands(self, n: int, dtype: torch.dtype, sizes: dict[str, int] | None = None):
        """Random tensors of the operator: x, weight and bias of each head, and the other inputs."""
        found, inputs = [], self.tensors(n, dtype, sizes)
        for i, size in enumerate(self.of_heads):
            v, d = inputs[i].shape[1], 5 + i
            shapes = ((n, d), (v, d), (v,))[:size]
            found += [torch.randn(shape).to(dtype) for shape in shapes]
        return [*found, *inputs[len(self.heads) :]]

    def eager(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The function of the operator's tensors."""
        logits, left = [], list(tensors)
        for size in self.of_heads:
            logits.append(F.linear(*left[:size]))
            left = left[size:]
        return self.function(*logits, *left)


INT = torch.int64


def straight_through(z):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.tanh()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * 2 * torch.sigmoid(x)

    return [Twice.apply(z).square().sum(-1)]


def assigned(z, label):
    margins = z.clone()
    margins.scatter_(1, label.unsqueeze(1), -1.0)
    margins[:, 3] = 0.5
    margins.masked_fill_(z > 3, 0.0)
    return [margins.logsumexp(-1)]


def jsd(z, y):
    p, q = F.log_softmax(z, -1), F.log_softmax(y, -1)
    mean = torch.logaddexp(p, q) - 0.6931471805599453
    kl = lambda a: F.kl_div(mean, a, log_target=True, reduction="none").sum(-1)  # noqa: E731
    return [0.5 * (kl(p) + kl(q))]


def top_k(z, label):
    values, indices = z.topk(5, -1)
    hit = (indices == label.unsqueeze(1)).any(-1)
    return [values.softmax(-1)[:, 0], hit, indices]


def top_p(z):
    ordered, indices = z.sort(-1, descending=True)
    kept = ordered.softmax(-1).cumsum(-1) < 0.7
    masked = ordered.masked_fill(~kept & (ordered < ordered[:, :1]), float("-inf"))
    return [masked.logsumexp(-1), indices[:, 0]]


def entropy(z):
    log_p = F.log_softmax(z.float() if z.dtype != torch.float64 else z, -1)
    return [-(log_p.exp() * log_p).sum(-1), z.argmax(-1)]


PROGRAMS = {
    "cross entropy": Program(
        lambda z, y: [F.cross_entropy(z, y, reduction="none")], rows=((INT,),)
    ),
    "smoothed": Program(
        lambda z, y: [F.cross_entropy(z, y, reduction="none", label_smoothing=0.1)],
        rows=((INT,),),
    ),
    "entropy and argmax": Program(entropy),
    "softmax": Program(lambda z: [(z.softmax(-1) ** 2).sum(-1), z.logsumexp(-1)]),
    "gather": Program(
        lambda z, y: [z.log_softmax(-1).gather(1, y.unsqueeze(1)).squeeze(1)], rows=((INT,),)
    ),
    "several labels": Program(lambda z, y: [z.log_softmax(-1).gather(1, y)], rows=((INT, 4),)),
    "indexed": Program(
        lambda z, y: [z.log_softmax(-1)[torch.arange(z.shape[0], device=z.device), y]],
        rows=((INT,),),
    ),
    "temperature": Program(
        lambda z, y, t: [F.cross_entropy(z / t.exp(), y, reduction="none")],
        rows=((INT,),),
        shared=((FLOAT,),),
        trained=(True, False, True),
    ),
    "class weights": Program(
        lambda z, y, w: [(z.log_softmax(-1) * w).sum(-1), (z + w).logsumexp(-1)],
        rows=((INT,),),
        shared=((FLOAT, V),),
        trained=(True, False, True),
    ),
    "frozen class weights": Program(
        lambda z, y, w: [F.cross_entropy(z, y, w, reduction="none")],
        rows=((INT,),),
        shared=((FLOAT, V),),
    ),
    "teacher": Program(
        lambda z, t: [F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)],
        rows=((FLOAT, V),),
    ),
    "trained teacher": Program(
        lambda z, t: [F.kl_div(z.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1)],
        rows=((FLOAT, V),),
        trained=(True, True),
    ),
    "row weights": Program(
        lambda z, w: [z.log_softmax(-1).mean(-1) * w], rows=((FLOAT,),), trained=(True, True)
    ),
    "jsd of two heads": Program(jsd, heads=(V, V), trained=(True, True)),
    "jsd of a frozen head": Program(jsd, heads=(V, V), trained=(True, False)),
    "mean": Program(lambda z: [z.mean(-1), z.var(-1)]),
    "max": Program(lambda z: [z.max(-1).values, z.max(-1).indices, z.tanh().amax(-1)]),
    "ties": Program(lambda z: [(z * 2).round().div(2).amax(-1), z.relu().amin(-1)]),
    "std and norm": Program(lambda z: [z.std(-1), torch.linalg.vector_norm(z, dim=-1)]),
    "other norms": Program(lambda z: [z.norm(p=1, dim=-1), z.norm(p=float("inf"), dim=-1)]),
    "nan_to_num": Program(lambda z: [torch.nan_to_num(z.log(), nan=-3.0).sum(-1)]),
    "where": Program(
        lambda z, y: [torch.where(z > 0, z, 0.1 * z).sum(-1) * (y != 3)], rows=((INT,),)
    ),
    "margin": Program(lambda z, y: [F.multi_margin_loss(z, y, reduction="none")], rows=((INT,),)),
    "binary": Program(
        lambda z, y: [
            F.binary_cross_entropy_with_logits(
                z, F.one_hot(y, V).to(z.dtype), reduction="none"
            ).sum(-1)
        ],
        rows=((INT,),),
    ),
    "sort": Program(top_p),
    "top-k": Program(top_k, rows=((INT,),)),
    "cumsum": Program(lambda z: [z.softmax(-1).cumsum(-1).square().sum(-1)]),
    "several": Program(lambda z: [z.softmax(-1)[:, :4], z.argmax(-1), (z > 0).sum(-1)]),
    "detached": Program(lambda z: [(z - z.detach().logsumexp(-1, keepdim=True)).exp().sum(-1)]),
    "own gradient": Program(straight_through),
    "assigned": Program(assigned, rows=((INT,),)),
    "no gradient": Program(lambda z, y: [(z.argmax(-1) == y)], rows=((INT,),), trained=(False,)),
    "frozen": Program(lambda z: [z.logsumexp(-1)], trained=(False,)),
    "symbolic classes": Program(
        lambda z, y: [F.cross_entropy(z, y, reduction="none"), z.mean(-1)],
        heads=("v0",),
        rows=((INT,),),
    ),
    "two symbolic sizes": Program(
        lambda z, y: [z.logsumexp(-1) - y.logsumexp(-1)],
        heads=("v0", "v1"),
        trained=(True, True),
    ),
}
