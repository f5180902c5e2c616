"""Calls of :func:`fxpass.op.sharded.class_reductions` on the classes of several ranks, against the
operator on all classes: rows, indices, and the gradient of every operand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fxpass.op import sharded
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.outputs import Moment, Output
from tests.ranks.case import (
    Case,
    Found,
    Rank,
    Values,
    as_eager,
    as_in_one_process,
    as_said,
    in_orders,
    same,
)
from tests.support import ranks, reduction_cases
from tests.support.reduction_cases import MASKED, OUTPUTS, V, given_of

INF, NAN = float("inf"), float("nan")
SIZES = {2: (4, 7), 4: (3, 5, 2, 1)}  # classes of the ranks
EMPTY = {2: (11, 0), 4: (5, 0, 6, 0)}
FIRST_EMPTY = {2: (0, 11), 4: (0, 5, 4, 2)}


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        outputs: what is computed.
        dtype: of x, weight, bias and values ``[N, V]``.
        transform: of the logits.
        bias, scaled, many: whether there are a bias, a scale, and several picks in a row.
        tied: whether equal rows of the weight make several classes the largest, of several ranks.
        impossible: classes whose bias is -inf, some of them picked.
        broken: the bias of classes that is no number, or infinite.
        sizes: by number of ranks, the classes of each.
        saved: whether the call is given its logits.
        large: a factor of x.
    """

    outputs: tuple[Output, ...]
    dtype: torch.dtype = torch.float32
    transform: str = "z"
    bias: bool = False
    scaled: bool = False
    many: bool = False
    tied: bool = False
    impossible: range = range(0)
    broken: dict[int, float] = field(default_factory=dict)
    sizes: dict[int, tuple[int, ...]] = field(default_factory=lambda: SIZES)
    saved: bool = False
    large: float = 1.0

    def problem(self) -> reduction_cases.Case:
        """All classes; the same on every rank."""
        torch.manual_seed(0)
        bias = self.dtype if self.bias else None
        found = reduction_cases.case(
            self.outputs, self.dtype, self.transform, bias, self.scaled, self.many, size=self.large
        )
        if self.tied:
            for tensor in (found.tensors["x"], found.tensors["weight"]):
                tensor.mul_(2).round_()  # exact products, in any order of summation
            weight = found.tensors["weight"]
            weight[5:] = weight[:6].clone()
            weight[10] = weight[1]  # three times
        if self.impossible:
            found.tensors["bias"][list(self.impossible)] = -INF
        for position, value in self.broken.items():
            found.tensors["bias"][position] = value
        return found

    def step(self, here: Rank) -> Values:
        """The rows, and the gradients of this rank's operands."""
        found, sizes = self.problem(), self.sizes[here.world]
        first = sum(sizes[: here.rank])
        shard = slice(first, first + sizes[here.rank])
        leaves = {
            name: local(name, t, shard).to(here.device).detach().requires_grad_(grad)
            for name, t in found.tensors.items()
            for grad in [name not in found.frozen]
        }
        x, weight, bias, scale = (leaves.get(name) for name in ("x", "weight", "bias", "scale"))
        logits = F.linear(x, weight, bias).detach() if self.saved else None  # type: ignore[arg-type]
        picks = None if found.picks is None else found.picks.to(here.device)
        rows, indices = sharded.class_reductions(
            *(x, weight, bias, scale, picks, given_of(leaves), logits, found.spec.text()),  # type: ignore[arg-type]
            first=first,
            classes=V,
            group=group(),
        )
        here.backward(rows, upstream(rows))
        here.facts |= {"indices": indices.cpu(), "dtype": rows.dtype}
        return values_of(rows, {n: leaves[n].grad for n in found.spec.gradients})

    def whole(self, dtype: torch.dtype, x: Tensor, weight: Tensor) -> tuple[Values, Tensor]:
        """The operator on all classes, and the indices."""
        found = self.problem()
        leaves = {
            name: t.detach().to(dtype if dtype == torch.float64 else t.dtype).requires_grad_()
            for name, t in (found.tensors | {"x": x, "weight": weight}).items()
        }
        results = found.run([*leaves.values()])
        indices = results.get("indices", torch.empty((0, len(x)), dtype=torch.int64))
        rows, trained = results.get("rows", torch.empty(0)), found.spec.gradients
        if not len(rows):
            return {name: torch.zeros_like(leaves[name]) for name in trained}, indices
        rows.backward(upstream(rows))
        return values_of(rows, {name: leaves[name].grad for name in trained}), indices

    def exchanges(self, sent: str) -> bool:
        """A maximum and a sum, and where the first class counts its index; nothing in backward."""
        forward, backward = sent.split(" | ")
        return (
            len(forward.split()) == 2 + bool({"argmax", "max"} & {*self.outputs}) and not backward
        )

    def case(self, world: int) -> Case:
        tensors = self.problem().tensors
        x, weight = tensors["x"], tensors["weight"]

        def check(case: Case, each: list[Found]) -> None:
            as_in_one_process(case, each)
            _, indices = self.whole(self.dtype, x, weight)
            for rank in each:
                assert torch.equal(rank.facts["indices"], indices)
                assert rank.facts["dtype"] == compute_dtype(self.dtype)
                grads = {n: t for n, t in rank.values["fused"].items() if n in tensors}
                assert all(grad.dtype == tensors[n].dtype for n, grad in grads.items())
                if self.outputs is POSSIBLE and self.impossible.step == 1:  # a whole shard
                    assert all(grad.isfinite().all() for grad in grads.values())

        return Case(
            step=self.step,
            world=world,
            alone=lambda dtype: self.whole(dtype, x, weight)[0],
            dtype=self.dtype,
            exchanges=self.exchanges,
            join=joined,
            check=check,
            others=in_orders(lambda *two: self.whole(self.dtype, *two)[0], x, weight),
        )


def group() -> str:
    return dist.group.WORLD.group_name  # type: ignore[union-attr]


def upstream(rows: Tensor) -> Tensor:
    """Gradients that arrive at the outputs."""
    random = torch.Generator().manual_seed(1)
    return torch.randn(rows.shape, generator=random).to(rows)


def values_of(rows: Tensor, grads: dict[str, Any]) -> Values:
    return {**{f"row {i}": row.detach() for i, row in enumerate(rows)}, **grads}


def local(name: str, tensor: Tensor, shard: slice) -> Tensor:
    """The part of an operand that belongs to some classes."""
    if name in ("weight", "bias"):
        return tensor[shard]
    return tensor[..., shard] if name.startswith("given") else tensor


def joined(name: str, parts: list[Tensor]) -> Tensor:
    """One gradient from those of the ranks' operands."""
    if name.startswith("row "):
        return same(name, parts)
    if name in ("x", "scale"):
        return torch.stack([part.double() for part in parts]).sum(0)
    return torch.cat(parts, 0 if name in ("weight", "bias") else -1)


# ---------------------------------------------------------------- the calls

LARGEST: tuple[Output, ...] = ("max", "argmax")
WEIGHTED: tuple[Output, ...] = tuple(
    Moment(a, b, w) for a, b in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0)) for w in (0, 1)
)
EVERYTHING: tuple[Output, ...] = (*OUTPUTS, "argmax")
# sums of classes whose logits are all -inf have no finite value where there is no softmax in them
POSSIBLE: tuple[Output, ...] = (
    *("lse", "pick", "at", *LARGEST),
    *(Moment(a, b, w) for a in (1, 2) for b in range(3) for w in (None, 0, 1)),
    *(Moment(0, 0, w) for w in (None, 0, 1)),
)
DTYPES = {"float64": torch.float64, "float32": torch.float32}

CALLS = {
    f"{name}, {dtype}": replace(call, dtype=DTYPES[dtype])
    for dtype in DTYPES
    for name, call in {
        "log-probabilities": Call(("pick",)),
        "log-probabilities of two": Call(("pick",), many=True),
        "logits": Call(("at",)),
        "logits and log-probabilities of two": Call(("at", "pick"), many=True),
        "lse": Call(("lse",)),
        "entropy": Call((Moment(1, 1),)),
        "squares": Call((Moment(2, 0),)),
        "smoothing": Call(("pick", Moment(0, 1))),
        "squared logarithms": Call((Moment(0, 2), Moment(1, 2), Moment(2, 2))),
        "weights": Call(WEIGHTED),
        "largest": Call(LARGEST),
        "argmax": Call(("argmax",)),
        "a policy's loss": Call(("pick", Moment(1, 1), "argmax"), scaled=True),
        "ties": Call(LARGEST, tied=True),
        "ties, a scale and a transform": Call(
            LARGEST, transform="3*tanh(z/3)", scaled=True, tied=True
        ),
        "a mask": Call(("pick", "lse", "argmax"), transform=MASKED, scaled=True),
        "a mask, everything": Call(EVERYTHING, transform=MASKED, bias=True, scaled=True, many=True),
        "a mask, an empty shard": Call(("pick",), transform=MASKED, sizes=EMPTY),
        "a mask, an empty first shard": Call(
            ("pick", Moment(1, 1)), transform=MASKED, sizes=FIRST_EMPTY
        ),
        "everything": Call(EVERYTHING, bias=True, scaled=True, many=True),
        "everything, a transform": Call(
            EVERYTHING, transform="3*tanh(z/3)", bias=True, scaled=True
        ),
        "everything, logits that exist": Call(EVERYTHING, bias=True, many=True, saved=True),
        "everything, large logits": Call(EVERYTHING, large=30.0),
        "ties of huge logits": Call(("pick", "max", Moment(1, 1)), tied=True, large=1000.0),
        "everything, an empty shard": Call(EVERYTHING, bias=True, scaled=True, sizes=EMPTY),
        "everything, an empty first shard": Call(EVERYTHING, tied=True, sizes=FIRST_EMPTY),
        "an impossible shard": Call(POSSIBLE, bias=True, many=True, impossible=range(4)),
        "an impossible last shard": Call(POSSIBLE, bias=True, tied=True, impossible=range(4, V)),
        "impossible classes": Call(POSSIBLE, bias=True, scaled=True, impossible=range(2, 9, 2)),
        "no possible class": Call(
            ("lse", "at", "pick", *LARGEST, Moment(1, 1)), bias=True, impossible=range(V)
        ),
        **{
            f"nan, {name}": Call(LARGEST, bias=True, broken=broken)
            for name, broken in {
                "the first shard": {1: NAN},
                "the last shard": {10: NAN},
                "after infinity": {2: INF, 7: NAN, 10: NAN},
                "before infinity": {1: NAN, 9: INF},
            }.items()
        },
        "impossible classes of weights": Call(
            (Moment(0, 1), Moment(0, 2)), bias=True, impossible=range(4)
        ),
    }.items()
} | {
    "bfloat16": Call(("pick", "lse", Moment(1, 1), Moment(0, 1)), torch.bfloat16, many=True),
    "bfloat16, weights": Call(WEIGHTED, torch.bfloat16, bias=True),
    "bfloat16, a mask": Call(("pick",), torch.bfloat16, MASKED, bias=True, many=True),
    "bfloat16, largest": Call(LARGEST, torch.bfloat16, tied=True),
    "float16": Call(("pick", Moment(2, 0), "argmax"), torch.float16, bias=True, scaled=True),
}


# ---------------------------------------------------------------- other programs


def of_half(
    here: Rank, x: Tensor, weight: Tensor, picks: Any, spec: str, sizes: Any = (2, 2)
) -> Any:
    """A call on four classes."""
    shard = {"first": sum(sizes[: here.rank]), "classes": 4, "group": group()}
    return sharded.class_reductions(*(x, weight, None, None, picks, [], None), spec, **shard)


def refused(*call: Any) -> Case:
    """A call that is wrong on all ranks, and the start of its error."""
    spec, picks, trained, sizes, said = call

    def step(here: Rank) -> Values:
        x = torch.ones(3, 4).requires_grad_(trained)
        try:
            of_half(here, x, torch.ones(sizes[here.rank], 4), picks, spec, sizes)
        except (IndexError, RuntimeError, ValueError) as error:
            here.facts["error"] = f"{type(error).__name__}: {error}".startswith(said)
        return {}

    return Case(step=step, facts={"error": True}, check=as_said)


def twice(here: Rank) -> Values:
    x = torch.ones(3, 4, device=here.device, requires_grad=True)
    weight = torch.ones(2, 4, device=here.device)
    rows, _ = of_half(here, x, weight, None, "r6 outputs=lse gradients=x")
    try:
        torch.autograd.grad(rows.sum(), x, create_graph=True)
    except RuntimeError as error:
        here.facts["refused"] = "no second derivative" in str(error)
    return {}


def program(here: Rank) -> Values:
    """A loss, a metric, and the gradients of x and weight."""
    leaves = [torch.randn(size, 5, device=here.device) for size in (4, 4)]
    picks = torch.tensor([1, 0, 3, 2], device=here.device)
    spec = "r6 outputs=pick;moment(1,1);argmax;max gradients=x,weight"

    @torch.compiler.allow_in_graph
    def reduced(x: Tensor, weight: Tensor, picks: Tensor) -> Any:
        return of_half(here, x, weight, picks, spec)

    def of(x: Tensor, weight: Tensor, picks: Tensor) -> tuple[Tensor, Tensor]:
        (log, minus_entropy, highest), (predicted,) = reduced(x, weight, picks)
        return (log.exp() * minus_entropy + highest).sum(), predicted == picks

    x, weight = leaves[0].requires_grad_(), leaves[1][2 * here.rank :][:2].clone().requires_grad_()
    loss, right = here.compile(of, fullgraph=True)(x, weight, picks)
    here.backward(loss)
    return {"loss": loss, "right": right, "x": x.grad, "weight": weight.grad}  # type: ignore[dict-item]


REFUSED = {
    "last": ("r6 outputs=pick", torch.tensor([0, 1, 4]), False, (4, 0), "IndexError: class"),
    "beyond": (
        *("r6 outputs=pick", torch.tensor([0, 1, 4]), False, (2, 2)),
        "IndexError: class 4 is out of bounds",
    ),
    "negative": (
        *("r6 outputs=pick", torch.tensor([0, -1, 3]), False, (2, 2)),
        "IndexError: class -1 is out of bounds",
    ),
    "sizes": (
        *("r6 outputs=pick", torch.zeros(3, 2, 2, dtype=torch.int64), False, (2, 2)),
        "ValueError: fxpass::class_reductions needs picks [3] or [3, K]",
    ),
    "unnamed": (
        *("r6 outputs=lse", None, True, (2, 2)),
        "RuntimeError: fxpass::class_reductions: x requires a gradient",
    ),
    "total": ("r6 total=lse", None, False, (2, 2), "ValueError: a total needs"),
}


def _cases() -> Iterator[tuple[str, Case]]:
    for name, call in CALLS.items():
        for world in (2, 4):
            yield f"{name}, {world}", call.case(world)
    if not ranks.on_gpus(2):  # an assertion on a GPU ends the process
        for name, call in REFUSED.items():
            yield f"refused, {name}", refused(*call)
    yield "compiled", Case(step=program, ways=("eager", "aot_eager", "fused"), check=as_eager)
    yield "twice", Case(step=twice, facts={"refused": True}, check=as_said)


CASES = dict(_cases())
