"""What each rank computes for test_vocab_parallel.py: fused losses over classes of all ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpass.op.kept import saved_logits
from fxpass.spec.expression import parse
from tests.support.losses import Shard, Spec, linear_cross_entropy
from tests.support.targets import centred

N, D = 7, 5
SOFTCAP = parse("30*tanh(z/30)")
GRADIENTS = ("x", "weight", "bias")


@dataclasses.dataclass(frozen=True)
class Case:
    """One loss.

    Attributes:
        spec: without gradients and without the number of classes.
        v: all classes.
        bias, weighted: whether there are a bias and class weights.
        dtype: of x, weight and bias.
        ignored: whether some rows have ``spec.ignore_index`` as their target.
        padding: how many classes, the last ones, a bias makes impossible.
        saved: whether backward gets the logits of forward.
        cancelling: whether each target distribution sums to 0: class probabilities do, or the class
            weights.
    """

    spec: Spec
    v: int = 12
    bias: bool = False
    weighted: bool = False
    dtype: torch.dtype = torch.float32
    ignored: bool = False
    padding: int = 0
    saved: bool = False
    cancelling: bool = False

    def tensors(self) -> dict[str, Tensor | None]:
        """The whole problem, the same on every rank."""
        random = torch.Generator().manual_seed(self.v)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random)

        index = torch.randint(self.v, (N,), generator=random)
        index[0], index[1] = 0, self.v - 1
        index.clamp_(max=self.v - 1 - self.padding)
        if self.ignored:
            assert self.spec.ignore_index is not None
            index[2:4] = self.spec.ignore_index
        probabilities, class_weight = randn(N, self.v).softmax(1), randn(self.v).exp()
        if self.cancelling and not self.weighted:
            probabilities = centred(N, self.v)
        elif self.cancelling:
            class_weight, index[:] = centred(1, self.v)[0], 0
        targets = {"indices": index, "probabilities": probabilities}
        bias = randn(self.v).to(self.dtype) if self.bias else None
        if bias is not None and self.padding:
            bias[-self.padding :] = -torch.inf
        return {
            "x": (3 * randn(N, D)).to(self.dtype),
            "weight": randn(self.v, D).to(self.dtype),
            "bias": bias,
            "target": targets[self.spec.target],
            "class_weight": class_weight if self.weighted else None,
        }


CASES = {
    "mean": Case(Spec()),
    "sum": Case(Spec(reduction="sum")),
    "none": Case(Spec(reduction="none")),
    "uneven": Case(Spec(), v=13),
    "a rank without classes": Case(Spec(label_smoothing=0.1), v=1, bias=True),
    "bias": Case(Spec(), v=13, bias=True),
    "a rank of padding": Case(Spec(), bias=True, padding=7),
    "a rank of padding, tiled": Case(Spec(strategy="tiled"), bias=True, padding=7),
    "ignored": Case(Spec(), ignored=True),
    "ignored 0": Case(Spec(ignore_index=0), ignored=True),
    "ignored -1": Case(Spec(ignore_index=-1, label_smoothing=0.1), ignored=True, v=13),
    "ignored 5, none": Case(Spec(reduction="none", ignore_index=5), ignored=True),
    "no ignored": Case(Spec(ignore_index=None)),
    "smoothed": Case(Spec(label_smoothing=0.1), v=13, bias=True),
    "weighted": Case(Spec(), weighted=True, v=13),
    "weighted, smoothed, ignored": Case(
        Spec(label_smoothing=0.2), v=13, weighted=True, ignored=True
    ),
    "softcap": Case(Spec(transform=SOFTCAP), v=13, bias=True),
    "probabilities": Case(Spec(target="probabilities"), v=13),
    "probabilities, weighted, smoothed": Case(
        Spec(target="probabilities", label_smoothing=0.1), weighted=True
    ),
    "probabilities that cancel": Case(Spec("sum", "probabilities"), v=13, cancelling=True),
    "weights that cancel": Case(
        Spec("none", label_smoothing=0.1), v=13, weighted=True, cancelling=True
    ),
    "tiled": Case(Spec(strategy="tiled", label_smoothing=0.1), v=13, weighted=True, ignored=True),
    "saved": Case(Spec(), v=13, bias=True, saved=True),
    "saved, sum": Case(Spec(reduction="sum", transform=SOFTCAP), v=13, bias=True, saved=True),
    "saved, none": Case(Spec(reduction="none"), ignored=True, saved=True),
    "saved, a rank without classes": Case(Spec(), v=1, saved=True),
    "saved, weighted, smoothed, ignored": Case(
        Spec(label_smoothing=0.2), v=13, weighted=True, ignored=True, saved=True
    ),
    "saved, probabilities": Case(Spec(target="probabilities"), v=13, saved=True),
    "saved, bfloat16": Case(Spec(), v=13, dtype=torch.bfloat16, saved=True),
    "saved, float16": Case(Spec(), v=13, bias=True, dtype=torch.float16, saved=True),
    "bfloat16": Case(Spec(), v=13, dtype=torch.bfloat16),
    "bfloat16, tiled": Case(Spec(strategy="tiled"), v=13, dtype=torch.bfloat16),
    "float16": Case(Spec(), v=13, bias=True, dtype=torch.float16),
    "float64": Case(Spec(label_smoothing=0.1), v=13, dtype=torch.float64),
}


def shard(v: int, rank: int, world: int) -> slice:
    """The classes of a rank, as DTensor's ``Shard(0)`` deals them out."""
    step = -(-v // world)
    return slice(min(rank * step, v), min((rank + 1) * step, v))


def run(case: Case, rank: int, world: int, device: torch.device) -> dict[str, Any]:
    """Loss, and the gradients of the whole operands."""
    whole = {k: None if t is None else t.to(device) for k, t in case.tensors().items()}
    here = shard(case.v, rank, world)
    x, weight, bias = (
        None if (t := whole[name]) is None else t[slice(None) if name == "x" else here]
        for name in GRADIENTS
    )
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias)]
    names = tuple(n for n, t in zip(GRADIENTS, leaves, strict=True) if t is not None)
    spec = dataclasses.replace(case.spec, gradients=names)
    operands: Any = (*leaves, whole["target"], whole["class_weight"])
    logits = saved_logits(*operands[:3]) if case.saved else None
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    loss = linear_cross_entropy(
        *operands, logits, spec=spec, shard=Shard(here.start, case.v, group)
    )
    (loss if loss.dim() == 0 else (loss * weights(N).to(device)).sum()).backward()
    out: dict[str, Any] = {"loss": loss.detach()}
    x_grad = leaves[0].grad  # type: ignore[union-attr]
    dist.all_reduce(x_grad)
    out["x"] = x_grad
    for name, leaf in zip(GRADIENTS[1:], leaves[1:], strict=True):
        if leaf is not None:
            out[name] = leaf.grad
    return {name: t.cpu() for name, t in out.items()}


def weights(n: int) -> Tensor:
    """Gradients that arrive at rows."""
    return torch.linspace(-1, 2, n)


def main(rank: int, world: int, device: torch.device) -> dict[str, Any]:
    out = {}
    for name, case in CASES.items():
        try:
            out[name] = run(case, rank, world, device)
        except Exception as error:
            raise RuntimeError(f"in case {name!r}") from error
    return out
