"""Programs of sharded heads beside those of :mod:`tests.ranks.heads`: rows that are sharded, logits
that a program gathers itself, and what it does with a rank's part of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import loss_parallel

from fxpass import messages
from tests.ranks.case import (
    Case,
    Found,
    Rank,
    Values,
    as_eager,
    as_in_one_process,
    same,
    values_of,
)
from tests.ranks.heads import UNEVEN, Loss, Model, alone, data, mean
from tests.support.numerics import FLOOR, error

# ---------------------------------------------------------------- rows that are sharded

NO_SHARDED_SEQUENCES = (
    "Attempted to flatten multiple dimensions, with dimension 1",  # torch 2.11
    "DTensorSpec doesn't allow specify shard_order",  # 2.15, when it compiles
)


def of_sharded_rows(reduction: str, dim: int) -> Case:
    """A replicated head; hidden states and labels are sharded along ``dim``, all DTensors. A mean is
    torch's own: of each rank's mean, whatever its number of rows that count. Torch cannot do sharded
    sequences in 2.11, and not compile them in 2.15: there it says the same with fxpass as without."""

    def model() -> Model:
        return Model(lambda z, t: mean(z, t, reduction=reduction), bias=True)

    def step(here: Rank) -> Values:
        mesh, made = here.mesh(), model()
        distribute_module(made.to(here.device), mesh)
        x, t = (distribute_tensor(o, mesh, [Shard(dim)]) for o in here.move(data(ignored=True)))
        try:
            loss = here.compile(made)(x, t)
        except RuntimeError as refused:
            if dim != 1 or not any(why in str(refused) for why in NO_SHARDED_SEQUENCES):
                raise
            return {}
        here.backward(loss)
        return values_of(loss, made)

    def check(case: Case, each: list[Found]) -> None:
        refused = [not values for rank in each for values in rank.values.values()]
        assert all(refused) or not any(refused)
        if any(refused):
            return
        assert [rank.facts["matched"] for rank in each] == [1, 1]
        if reduction == "sum":
            as_in_one_process(case, each)
        for rank in each:
            torchs, fused = rank.values["aot_eager"], rank.values["fused"]
            assert torchs.keys() == fused.keys()
            for name, value in fused.items():
                assert error(value, torchs[name]) < 4 * FLOOR[torch.float32], name

    return Case(
        step=step,
        alone=lambda dtype: alone(model(), *data(ignored=True), dtype),
        ways=("aot_eager", "fused"),
        check=check,
    )


ROWS = {
    "mean": of_sharded_rows("mean", 1),
    "sum": of_sharded_rows("sum", 1),
    "mean, whole sequences": of_sharded_rows("mean", 0),
}


# ---------------------------------------------------------------- programs without a module

# rows, hidden size, classes; of the second, a copy of the weight is smaller than the logits of one
# rank and larger than those of the other
SMALL, UNEQUAL = (9, 8, 12), (518, 259, 259)
LEFT: dict[str, Any] = {"facts": {"matched": 0}, "says": (UNEVEN,)}


def operands(n: int, d: int, v: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(2)
    made = (torch.randn(size, generator=random) for size in ((n, d), (v, d), (v,)))
    return *made, torch.randint(v // 2, v, (n,), generator=random)


def of_all_classes(z: Tensor, t: Tensor) -> Tensor:
    """What the number of all classes is part of."""
    wrapped = z.log_softmax(-1)[torch.arange(len(t), device=t.device), t - z.shape[1]]
    return F.cross_entropy(z, t, label_smoothing=0.2) - 2 * wrapped.mean()


def squares(z: Tensor, t: Tensor) -> Tensor:
    """Of each row's loss, whose backward computes the logits."""
    return F.cross_entropy(z, t, reduction="none").square().mean()


def from_shards(local: Any, mesh: Any, dim: int = 1, **sizes: Any) -> Any:
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, **sizes)


def replicated(local: Any, mesh: Any) -> Any:
    return DTensor.from_local(local, mesh, [Replicate()], run_check=False)


def of_weight(
    step: Callable[[Rank], Values], of: Loss, sizes: Any, left: bool = False, **options: Any
) -> Case:
    """The loss, and the gradient of the weight.

    Args:
        left: whether nothing is fused.
    """

    def in_one(dtype: torch.dtype) -> Values:
        x, w, b, t = operands(*sizes)
        x, w, b = (tensor.to(dtype) for tensor in (x, w.requires_grad_(), b))
        w = w.detach().requires_grad_()
        loss = of(F.linear(x, w, b if options else None), t)
        loss.backward()
        return {"loss": loss.detach(), "weight": w.grad}  # type: ignore[dict-item]

    more = LEFT if left else {"facts": {"matched": 1, "rejected": 0}}
    return Case(step=step, alone=in_one, options=options, **more)


def by_hand(known: bool) -> Callable[[Rank], Values]:
    """Each rank multiplies a plain tensor by its classes, and gathers the logits.

    Args:
        known: whether its classes are those of a DTensor.
    """

    def step(here: Rank) -> Values:
        mesh = here.mesh()
        x, w, _, t = here.move(operands(*SMALL))
        if known:
            w = distribute_tensor(w, mesh, [Shard(0)])
        else:
            w = w.chunk(here.world)[here.rank].clone()
        x, w = x.requires_grad_(), w.detach().requires_grad_()

        def program(x: Tensor, w: Any) -> Tensor:
            z = F.linear(x, w.to_local() if known else w)
            return of_all_classes(from_shards(z, mesh).full_tensor(), t)

        loss = here.compile(program)(x, w)
        here.backward(loss)
        grad: Any = w.grad
        return {"loss": loss, "weight": grad if known else from_shards(grad, mesh, 0)}

    return step


def on_shards(
    sizes: tuple[int, int, int], written: str = "", trains_x: bool = False, left: bool = False
) -> Case:
    """With an operand that is written between the two passes."""

    def step(here: Rank) -> Values:
        mesh = here.mesh()
        x, w, b, t = here.move(operands(*sizes))
        w, b = (distribute_tensor(o, mesh, [Shard(0)]).detach().requires_grad_() for o in (w, b))
        run = here.compile(
            lambda x, w, b: squares(F.linear(replicated(x, mesh), w, b).full_tensor(), t)  # type: ignore[attr-defined]
        )
        loss = run(x.requires_grad_(trains_x), w, b)
        with torch.no_grad():
            {"bias": b, "weight": w}.get(written, torch.zeros(())).add_(1)
        here.backward(loss)
        return {"loss": loss, "weight": w.grad}  # type: ignore[dict-item]

    least = 0.0 if written else 0.01
    options = {"fusedce.strategy": "chunked", "fusedce.min_logits_mb": least}
    return of_weight(step, squares, sizes, left, **options)


PROGRAMS = {
    "gathered by hand": of_weight(by_hand(known=True), of_all_classes, SMALL),
    "gathered by hand, plain": of_weight(by_hand(known=False), of_all_classes, SMALL, left=True),
    "bias written": on_shards(SMALL, "bias", trains_x=True),
    "weight written": on_shards(SMALL, "weight"),
    "unequal shards": on_shards(UNEQUAL, left=True),
}


def masked_class(z: Tensor) -> Tensor:
    z = z * 1.0
    z[:, 1] = -3.0
    return z


def of_part(program: Loss, matched: int, sharded: bool = False, classes: int = 12) -> Case:
    """A program of x, the rank's part of the weight (or the weight as a DTensor), labels, and a
    function that gathers logits. Nothing is fused of a plain part: ranks may have unlike ones."""

    def step(here: Rank) -> Values:
        mesh = here.mesh()
        x, w, _, t = here.move(operands(9, 8, 12))
        part = w[:classes].chunk(2)[here.rank]
        given = [x, distribute_tensor(w, mesh, [Shard(0)]) if sharded else part]
        given = [leaf.detach().clone().requires_grad_() for leaf in given]

        def gathered(z: Tensor) -> Tensor:
            sizes = {} if classes == 12 else {"shape": torch.Size((9, 11)), "stride": (11, 1)}
            return from_shards(z, mesh, **sizes).full_tensor()

        def of_leaves(x: Tensor, w: Tensor) -> Tensor:
            if sharded:
                return program(F.linear(replicated(x, mesh), w))
            return program(F.linear(x, w), t, gathered)

        out = here.compile(of_leaves)(*given)
        if out.requires_grad:
            here.backward(out)
        grads = {name: leaf.grad for name, leaf in zip("xw", given, strict=True)}
        return {"out": out.detach(), **{n: g for n, g in grads.items() if g is not None}}

    facts = {"matched": matched}
    return Case(step=step, ways=("eager", "fused"), facts=facts, check=as_eager)


PARTS = {
    "lse": of_part(
        lambda z, t, all: F.cross_entropy(all(z), t) + z.logsumexp(-1).square().mean(), 0
    ),
    "max": of_part(lambda z, t, all: F.cross_entropy(all(z), t) + z.max(-1).values.mean(), 0),
    "log-softmax": of_part(lambda z, t, all: F.nll_loss(all(z.log_softmax(-1)), t), 0),
    "assigned": of_part(lambda z, t, all: F.cross_entropy(all(masked_class(z)), t), 0),
    "one-hot": of_part(lambda z, t, all: F.cross_entropy(all(z - F.one_hot(t % 6, 6)), t), 0),
    "own labels": of_part(
        lambda z, t, all: F.cross_entropy(all(z), t) + F.cross_entropy(z, t % 6), 0
    ),
    "uneven": of_part(
        lambda z, t, all: F.cross_entropy(all(z), t.clamp(max=10)), 0, classes=11
    ),
    # of the logits as a DTensor: a rank has its part of each
    "sum": of_part(lambda z: z.exp().sum(-1).to_local().mean(), 1, sharded=True),
    "maximum": of_part(
        lambda z: z.amax(-1).to_local().mean() + z.logsumexp(-1).full_tensor().mean(), 1,
        sharded=True,
    ),
    "largest class": of_part(lambda z: z.full_tensor().argmax(-1), 1, sharded=True),
}  # fmt: skip

# ---------------------------------------------------------------- pairs, in both directions

SQUARE = (12, 8, 12)


def both(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z, t) + F.cross_entropy(z.t(), t)


def of_pairs(of: Callable[..., Any], rows: Any, columns: Any, left: str = "") -> Case:
    """Both operands are DTensors; ``of`` is given the logits, the labels and those of the rank."""

    def step(here: Rank) -> Values:
        mesh = here.mesh()
        x, w, _, t = here.move(operands(*SQUARE))
        x = distribute_tensor(x, mesh, [rows]).detach().requires_grad_()
        w = distribute_tensor(w, mesh, [columns]).detach().requires_grad_()
        own = t.chunk(here.world)[here.rank]
        with loss_parallel():
            loss = here.compile(lambda x, w: of(F.linear(x, w), t, own))(x, w)
            here.backward(loss)
        return {"loss": loss, "x": x.grad, "w": w.grad}  # type: ignore[dict-item]

    facts = {"matched": 0 if left else 2, "rejected": 2 if left else 0}
    return Case(step=step, alone=of_both, facts=facts, says=(left,))


def columns_of_ranks(z: Any, t: Tensor, own: Tensor) -> Tensor:
    """Of rows all ranks have a part; of columns, each has some."""
    columns = F.cross_entropy(z.to_local().t(), own, reduction="sum") / len(t)
    columns = DTensor.from_local(columns, z.device_mesh, [Partial()])
    return (F.cross_entropy(z, replicated(t, z.device_mesh)) + columns).full_tensor()


def of_both(dtype: torch.dtype) -> Values:
    x, w, _, t = operands(*SQUARE)
    x, w = (leaf.to(dtype).requires_grad_() for leaf in (x, w))
    loss = both(F.linear(x, w), t)
    loss.backward()
    return {"loss": loss.detach(), "x": x.grad, "w": w.grad}  # type: ignore[dict-item]


def of_gathered(gather: Callable[[Tensor], Tensor], outside: bool = False) -> Case:
    """As in open_clip: each rank has all pairs, and a part of the gradients of all losses.

    Args:
        outside: whether features are gathered before the compiled function.
    """

    def step(here: Rank) -> Values:
        x, w, _, t = here.move(operands(*SQUARE))
        given = [o.chunk(here.world)[here.rank].clone().requires_grad_() for o in (x, w)]
        late = (lambda x: x) if outside else gather
        run = here.compile(lambda x, w: both(F.linear(late(x), late(w)), t))
        loss = run(*map(gather, given)) if outside else run(*given)
        here.backward(loss)
        return {"loss": loss, **{n: o.grad / here.world for n, o in zip("xw", given, strict=True)}}  # type: ignore[operator]

    def join(name: str, parts: list[Tensor]) -> Tensor:
        return same(name, parts) if name == "loss" else torch.cat(parts)

    return Case(step=step, alone=of_both, facts={"matched": 2, "rejected": 0}, join=join)


PAIRS = {
    "gathered": of_pairs(lambda z, t, _: both(z.full_tensor(), t), Replicate(), Shard(0)),
    "columns of ranks": of_pairs(columns_of_ranks, Replicate(), Shard(0)),
    "rows gathered": of_pairs(
        lambda z, t, _: both(z.full_tensor(), t), Shard(0), Replicate(),
        left=messages.COLLECTIVE_ENTRIES,
    ),
    "gathered features": of_gathered(
        lambda x: funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
    ),
    "features gathered outside": of_gathered(lambda x: torch.cat(all_gather(x)), outside=True),
}  # fmt: skip

CASES = {
    **{f"rows, {name}": row for name, row in ROWS.items()},
    **PROGRAMS,
    **{f"pairs, {name}": row for name, row in PAIRS.items()},
    **{f"part, {name}": row for name, row in PARTS.items()},
}
