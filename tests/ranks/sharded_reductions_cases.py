"""What each rank computes for test_sharded_reductions.py: class reductions over all ranks' classes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from fxpass.op import sharded
from fxpass.spec.outputs import Moment, Output
from tests.support import reduction_cases
from tests.support.reduction_cases import MASKED, OUTPUTS, V, given_of

INF, NAN = float("inf"), float("nan")
SIZES = {2: (4, 7), 4: (3, 5, 2, 1)}  # classes of the ranks
EMPTY = {2: (11, 0), 4: (5, 0, 6, 0)}
FIRST_EMPTY = {2: (0, 11), 4: (0, 5, 4, 2)}


@dataclasses.dataclass(frozen=True)
class Case:
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
    broken: dict[int, float] = dataclasses.field(default_factory=dict)
    sizes: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=lambda: SIZES)
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


def upstream(n: int, rows: int) -> Tensor:
    """Gradients that arrive at the outputs."""
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(1))


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

CASES = {
    f"{name}, {dtype}": dataclasses.replace(case, dtype=DTYPES[dtype])
    for dtype in DTYPES
    for name, case in {
        "log-probabilities": Case(("pick",)),
        "log-probabilities of two": Case(("pick",), many=True),
        "logits": Case(("at",)),
        "logits and log-probabilities of two": Case(("at", "pick"), many=True),
        "lse": Case(("lse",)),
        "entropy": Case((Moment(1, 1),)),
        "squares": Case((Moment(2, 0),)),
        "smoothing": Case(("pick", Moment(0, 1))),
        "squared logarithms": Case((Moment(0, 2), Moment(1, 2), Moment(2, 2))),
        "weights": Case(WEIGHTED),
        "largest": Case(LARGEST),
        "argmax": Case(("argmax",)),
        "a policy's loss": Case(("pick", Moment(1, 1), "argmax"), scaled=True),
        "ties": Case(LARGEST, tied=True),
        "ties, a scale and a transform": Case(
            LARGEST, transform="3*tanh(z/3)", scaled=True, tied=True
        ),
        "a mask": Case(("pick", "lse", "argmax"), transform=MASKED, scaled=True),
        "a mask, everything": Case(EVERYTHING, transform=MASKED, bias=True, scaled=True, many=True),
        "a mask, an empty shard": Case(("pick",), transform=MASKED, sizes=EMPTY),
        "a mask, an empty first shard": Case(
            ("pick", Moment(1, 1)), transform=MASKED, sizes=FIRST_EMPTY
        ),
        "everything": Case(EVERYTHING, bias=True, scaled=True, many=True),
        "everything, a transform": Case(
            EVERYTHING, transform="3*tanh(z/3)", bias=True, scaled=True
        ),
        "everything, logits that exist": Case(EVERYTHING, bias=True, many=True, saved=True),
        "everything, large logits": Case(EVERYTHING, large=30.0),
        "ties of huge logits": Case(("pick", "max", Moment(1, 1)), tied=True, large=1000.0),
        "everything, an empty shard": Case(EVERYTHING, bias=True, scaled=True, sizes=EMPTY),
        "everything, an empty first shard": Case(EVERYTHING, tied=True, sizes=FIRST_EMPTY),
        "an impossible shard": Case(POSSIBLE, bias=True, many=True, impossible=range(4)),
        "an impossible last shard": Case(POSSIBLE, bias=True, tied=True, impossible=range(4, V)),
        "impossible classes": Case(POSSIBLE, bias=True, scaled=True, impossible=range(2, 9, 2)),
        "no possible class": Case(
            ("lse", "at", "pick", *LARGEST, Moment(1, 1)), bias=True, impossible=range(V)
        ),
        **{
            f"nan, {name}": Case(LARGEST, bias=True, broken=broken)
            for name, broken in {
                "the first shard": {1: NAN},
                "the last shard": {10: NAN},
                "after infinity": {2: INF, 7: NAN, 10: NAN},
                "before infinity": {1: NAN, 9: INF},
            }.items()
        },
        "impossible classes of weights": Case(
            (Moment(0, 1), Moment(0, 2)), bias=True, impossible=range(4)
        ),
    }.items()
} | {
    "bfloat16": Case(("pick", "lse", Moment(1, 1), Moment(0, 1)), torch.bfloat16, many=True),
    "bfloat16, weights": Case(WEIGHTED, torch.bfloat16, bias=True),
    "bfloat16, a mask": Case(("pick",), torch.bfloat16, MASKED, bias=True, many=True),
    "bfloat16, largest": Case(LARGEST, torch.bfloat16, tied=True),
    "float16": Case(("pick", Moment(2, 0), "argmax"), torch.float16, bias=True, scaled=True),
}


def run(case: Case, rank: int, world: int, device: torch.device) -> dict[str, Any]:
    """Rows, indices, the gradients of this rank's operands, and how often ranks exchanged."""
    found = case.problem()
    sizes = case.sizes[world]
    first = sum(sizes[:rank])
    here = slice(first, first + sizes[rank])
    leaves = {
        name: local(name, t, here).to(device).detach().requires_grad_(name not in found.frozen)
        for name, t in found.tensors.items()
    }
    given = given_of(leaves)
    x, weight, bias, scale = (leaves.get(name) for name in ("x", "weight", "bias", "scale"))
    logits = F.linear(x, weight, bias).detach() if case.saved else None  # type: ignore[arg-type]
    picks = None if found.picks is None else found.picks.to(device)
    with CommDebugMode() as forward:
        rows, indices = sharded.class_reductions(
            *(x, weight, bias, scale, picks, given, logits, found.spec.text()),  # type: ignore[arg-type]
            first=first,
            classes=V,
            group=dist.group.WORLD.group_name,  # type: ignore[union-attr]
        )
    with CommDebugMode() as backward:
        rows.backward(upstream(rows.shape[1], rows.shape[0]).to(rows))
    out = {"rows": rows.detach(), "indices": indices}
    out |= {name: t.grad for name, t in leaves.items()}
    exchanges = forward.get_total_counts(), backward.get_total_counts()
    return {n: None if t is None else t.cpu() for n, t in out.items()} | {"exchanges": exchanges}


def local(name: str, tensor: Tensor, here: slice) -> Tensor:
    """The part of an operand that belongs to some classes."""
    if name in ("weight", "bias"):
        return tensor[here]
    return tensor[..., here] if name.startswith("given") else tensor


def refused(rank: int, device: torch.device) -> list[str]:
    """The errors of calls that are wrong on all ranks."""
    x = torch.ones(3, 4, device=device)
    said = []
    for spec, picks, trained, *sizes in (
        ("r6 outputs=pick", torch.tensor([0, 1, 4]), False, 4, 0),
        ("r6 outputs=pick", torch.tensor([0, 1, 4]), False),
        ("r6 outputs=pick", torch.tensor([0, -1, 3]), False),
        ("r6 outputs=pick", torch.zeros(3, 2, 2, dtype=torch.int64), False),
        ("r6 outputs=lse", None, True),
        ("r6 total=lse", None, False),
    ):
        try:
            sharded.class_reductions(
                x.clone().requires_grad_(trained),
                torch.ones((sizes or [2, 2])[rank], 4, device=device),
                None,
                None,
                None if picks is None else picks.to(device),
                [],
                None,
                spec,
                first=sum((sizes or [2, 2])[:rank]),
                classes=4,
                group=dist.group.WORLD.group_name,  # type: ignore[union-attr]
            )
            said.append("nothing")
        except (IndexError, RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def compiled(rank: int, device: torch.device) -> list[Tensor]:
    """A loss, a metric, and the gradients of x and weight: compiled, then eager."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 5, device=device), torch.randn(4, 5, device=device)
    picks = torch.tensor([1, 0, 3, 2], device=device)
    spec = "r6 outputs=pick;moment(1,1);argmax;max gradients=x,weight"
    shard = {"first": 2 * rank, "classes": 4, "group": dist.group.WORLD.group_name}  # type: ignore[union-attr]

    @torch.compiler.allow_in_graph
    def reduced(x: Tensor, weight: Tensor, picks: Tensor) -> tuple[Tensor, Tensor]:
        return sharded.class_reductions(
            *(x, weight, None, None, picks, [], None, spec),
            **shard,  # type: ignore[arg-type]
        )

    def program(x: Tensor, weight: Tensor, picks: Tensor) -> tuple[Tensor, Tensor]:
        (log, minus_entropy, highest), (predicted,) = reduced(x, weight, picks)
        return (log.exp() * minus_entropy + highest).sum(), predicted == picks

    found = []
    for function in (torch.compile(program, backend="aot_eager", fullgraph=True), program):
        leaves = x.clone().requires_grad_(), weight[shard["first"] :][:2].clone().requires_grad_()
        loss, right = function(*leaves, picks)
        found += [loss.detach(), right, *torch.autograd.grad(loss, leaves)]
    return [t.cpu() for t in found]


def twice(rank: int, device: torch.device) -> str:
    """The error of a second derivative."""
    x = torch.ones(3, 4, device=device, requires_grad=True)
    rows, _ = sharded.class_reductions(
        *(x, torch.ones(2, 4, device=device), None, None, None, [], None),
        "r6 outputs=lse gradients=x",
        first=2 * rank,
        classes=4,
        group=dist.group.WORLD.group_name,  # type: ignore[union-attr]
    )
    try:
        torch.autograd.grad(rows.sum(), x, create_graph=True)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def main(rank: int, world: int, device: torch.device) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            out[name] = run(case, rank, world, device)
        except Exception as error:
            raise RuntimeError(f"in case {name!r}") from error
    if world == 2 and device.type == "cpu":  # an assertion on a GPU ends the process
        out["refused"] = refused(rank, device)
    out |= {"compiled": compiled(rank, device), "twice": twice(rank, device)} if world == 2 else {}
    return out
