"""Calls of :func:`fxpass.distributed.linear_cross_entropy`, against PyTorch on all classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fxpass.distributed import linear_cross_entropy
from fxpass.formula.shards import class_shard
from tests.ranks.case import Case, Rank, Values, in_orders, same

B, S, D = 2, 6, 5
OF_PYTORCH = ("reduction", "ignore_index", "label_smoothing", "weight")


def centred(n, v):
    """Targets ``[n, v]`` whose rows sum to exactly 0."""
    target = torch.zeros(n, v)
    target[:, 1], target[:, -2] = 0.5, -0.5
    return target


BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        options: of the function.
        v: all classes.
        bias: whether the head has one.
        padding: how many classes, the last ones, it makes impossible.
        probabilities: whether the target holds them.
        cancelling: whether each target distribution sums to 0: class probabilities do, or the class
            weights.
        way: how it is compiled, as one graph.
        dtensors: whether the operands are DTensors.
        autocast: whether bf16 is on.
        dtype: of x, weight and bias.
        worlds: of how many ranks.
    """

    options: dict[str, Any] = field(default_factory=dict)
    v: int = 12
    bias: bool = False
    padding: int = 0
    probabilities: bool = False
    cancelling: bool = False
    way: str = "eager"
    dtensors: bool = False
    autocast: bool = False
    dtype: torch.dtype = F32
    worlds: tuple[int, ...] = (2, 4)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
        """x, weight, bias, target and class weights, whole."""
        random = torch.Generator().manual_seed(self.v)
        x, weight = (torch.randn(s, generator=random) for s in ((B, S, D), (self.v, D)))
        target = torch.randint(self.v - self.padding, (B, S), generator=random)
        target[0, 1] = self.options.get("ignore_index", -100)
        class_weight = self.options.get("weight")
        if self.cancelling and class_weight is not None:
            class_weight, target[:] = centred(1, self.v)[0], 0
        if self.probabilities:
            target = torch.randn((B, S, self.v), generator=random).softmax(-1)
            target = centred(B * S, self.v).view(B, S, self.v) if self.cancelling else target
        bias = torch.randn(self.v, generator=random).to(self.dtype) if self.bias else None
        if self.padding and bias is not None:
            bias[-self.padding :] = -torch.inf
        return (3 * x).to(self.dtype), weight.to(self.dtype), bias, target, class_weight

    def alone(self, dtype: torch.dtype) -> Values:
        x, weight, *_ = self.tensors()
        return self.whole(dtype, x, weight)

    def whole(self, dtype: torch.dtype, x: Tensor, weight: Tensor) -> Values:
        _, _, bias, target, class_weight = self.tensors()
        cast = (lambda t: t.to(F64)) if dtype == F64 else (lambda t: t)
        leaves = [None if t is None else cast(t).requires_grad_() for t in (x, weight, bias)]
        with torch.autocast("cpu", BF16, enabled=self.autocast and dtype != F64):
            z = F.linear(*leaves)  # type: ignore[arg-type]
        z = z.to(torch.promote_types(F64 if dtype == F64 else F32, self.dtype))
        z = 30 * (z / 30).tanh() if "logits" in self.options else z
        options = {k: v for k, v in self.options.items() if k in OF_PYTORCH}
        if class_weight is not None:
            options["weight"] = class_weight.to(z)
        if self.probabilities:
            target = target.to(z).movedim(-1, 1)
        return backward(F.cross_entropy(z.movedim(-1, 1), target, **options), leaves)

    def step(self, here: Rank) -> Values:
        x, weight, bias, target, class_weight = (
            None if t is None else t.to(here.device) for t in self.tensors()
        )
        assert x is not None
        assert weight is not None
        assert target is not None
        dim = self.options.get("sequence_dim")
        if self.dtensors:
            x = distribute_tensor(x, here.mesh(), [Replicate()])
            weight = distribute_tensor(weight, here.mesh(), [Shard(0)])
            bias = None if bias is None else distribute_tensor(bias, here.mesh(), [Shard(0)])
        else:
            first, count = class_shard(self.v, here.world, here.rank)
            x = x if dim is None else x.chunk(here.world, dim)[here.rank]
            weight, bias = (None if t is None else t[first : first + count] for t in (weight, bias))
        leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias)]
        options: dict[str, Any] = dict(self.options)
        if class_weight is not None:
            options["weight"] = class_weight
        if self.v % here.world and not self.dtensors:
            options["classes"] = self.v

        def call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return linear_cross_entropy(x * 1, weight, target, linear_bias=bias, **options)

        with torch.autocast(here.device.type, BF16, enabled=self.autocast):
            loss = here.compile(call, fullgraph=True)(*leaves)
        return backward(loss, leaves, here)

    def exchanges(self, sent: str) -> bool:
        """A maximum of each row and two or three sums, and x's gradient; of a sequence, x as well.
        Those of rows are in a call, unless nobody fuses."""
        forward, backward = (half.split() for half in sent.split(" | "))
        size, gathers = self.dtype.itemsize, "sequence_dim" in self.options
        nbytes, row = B * S * D * size, B * S * max(4, size)
        right = len(forward) == gathers + 2 * (self.way == "aot_eager")
        if self.way == "aot_eager":
            maximum, sums = map(int, forward[-2:])
            right = right and maximum == row and 2 * row <= sums <= 3 * row
        if self.v == 1:  # the gradient is no product, and of the region
            return right and not backward
        return right and backward == [f"scatter:{nbytes}" if gathers else f"{nbytes}"]

    def join(self, name: str, parts: list[Tensor]) -> Tensor:
        if self.dtensors or name == "loss":
            return same(name, parts)
        if name != "x":
            return torch.cat(parts)
        dim = self.options.get("sequence_dim")
        return same(name, parts) if dim is None else torch.cat(parts, dim)

    def case(self, world: int) -> Case:
        dtype = BF16 if self.autocast else self.dtype
        x, weight, *_ = self.tensors()
        return Case(
            step=self.step,
            world=world,
            alone=self.alone,
            dtype=dtype,
            ways=(self.way,),
            facts={"matched": 1, "rejected": 0} if self.way == "fused" else {},
            exchanges=self.exchanges,
            join=self.join,
            others=in_orders(lambda *two: self.whole(dtype, *two), x, weight),
        )


def backward(loss: Tensor, leaves: list[Any], here: Rank | None = None) -> Values:
    total = loss.square().sum()
    here.backward(total) if here else total.backward()
    grads = {
        n: t.grad for n, t in zip(("x", "weight", "bias"), leaves, strict=True) if t is not None
    }
    return {"loss": loss, **grads}


TWO: dict[str, Any] = {"worlds": (2,)}  # what does not depend on how many ranks there are
WEIGHT = torch.linspace(0.5, 2, 12)
WEIGHT_13 = torch.randn(13, generator=torch.Generator().manual_seed(0)).exp()
ALL: dict[str, Any] = {"label_smoothing": 0.2, "weight": WEIGHT_13}
CALLS = {
    "mean": Call(),
    "sum": Call({"reduction": "sum"}),
    "uneven": Call(v=13, bias=True),
    "per row": Call({"reduction": "none", "label_smoothing": 0.1}),
    "per row, ignored 5": Call({"reduction": "none", "ignore_index": 5}),
    "ignored 0": Call({"ignore_index": 0}),
    "ignored -1, smoothed": Call({"ignore_index": -1, "label_smoothing": 0.1}, 13),
    "ranks without classes": Call({"label_smoothing": 0.1}, 1, bias=True),
    "ranks without classes, plain": Call(v=1),
    "a rank of padding": Call(bias=True, padding=7),
    "soft-cap": Call({"logits": "30*tanh(z/30)", "reduction": "sum"}, bias=True),
    "soft-cap, uneven": Call({"logits": "30*tanh(z/30)"}, 13, bias=True),
    "weighted": Call({"weight": WEIGHT, "ignore_index": 7}),
    "weighted, uneven": Call({"weight": WEIGHT_13}, 13),
    "weighted, smoothed": Call(ALL, 13),
    "weights that cancel": Call(ALL | {"reduction": "none"}, 13, cancelling=True),
    "probabilities": Call(probabilities=True),
    "probabilities, uneven": Call(v=13, probabilities=True),
    "probabilities, weighted, smoothed": Call(ALL, 13, probabilities=True),
    "probabilities that cancel": Call(
        {"reduction": "sum"}, 13, probabilities=True, cancelling=True
    ),
    "bfloat16": Call(v=13, dtype=BF16),
    "float16": Call(v=13, bias=True, dtype=F16),
    "float64": Call({"label_smoothing": 0.1}, v=13, dtype=F64),
    "autocast": Call(autocast=True, bias=True),
    "sequence": Call({"sequence_dim": 1}, **TWO),
    "compiled": Call({"sequence_dim": 1, "label_smoothing": 0.1}, way="fused", **TWO),
    "compiled, uneven": Call(v=13, bias=True, way="aot_eager", **TWO),
    "DTensors": Call(v=13, bias=True, dtensors=True, **TWO),
    "compiled DTensors": Call(v=13, dtensors=True, way="aot_eager", **TWO),
}


def _cases() -> Iterator[tuple[str, Case]]:
    for name, call in CALLS.items():
        for world in call.worlds:
            yield f"{name}, {world}", call.case(world)


CASES = dict(_cases())
