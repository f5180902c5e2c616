"""What ranks of FSDP2 and DDP train: networks, batches that differ by rank, and a training loop.

In: a model as the user would call it, and what is to be compared. Out: a :class:`Course`, which
:func:`compare` sets against that of eager, and against one process's on the batches of all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

STEPS, BATCH, LENGTH, RATE = 4, 4, 12, 1.0
WORDS = 196
V = 201  # does not divide by the number of ranks
Losses = Callable[[Any], Tensor]  # from what a model returns
Sync = Callable[[bool], AbstractContextManager[Any]]


class Block(nn.Module):
    """[B, S, width] to the same."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Body(nn.Module):
    """Ids [B, S] to hidden states [B, S, width]."""

    def __init__(self, width: int, inner: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(blocks))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x


class Network(nn.Module):
    """Ids [B, S] to the loss of the next id and the logits, as models of transformers are built:
    blocks in a module of their own, head and loss in the outermost ``forward``."""

    def __init__(
        self, width: int = 32, inner: int = 64, blocks: int = 2, tied: bool = False
    ) -> None:
        super().__init__()
        self.body = Body(width, inner, blocks)
        self.lm_head = nn.Linear(width, V, bias=False)
        if tied:
            self.lm_head.weight = nn.init.normal_(self.body.embed.weight, std=0.3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lm_head(self.body(input_ids))
        return next_id_loss(logits, labels), logits


def next_id_loss(logits: Tensor, labels: Tensor) -> Tensor:
    classes = logits.shape[-1]
    rows = logits[:, :-1].float().reshape(-1, classes)
    return F.cross_entropy(rows, labels[:, 1:].reshape(-1))


def sorted_next_id_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The same loss by no known formula, and of each row the entropy of its likeliest classes."""
    rows, picks = logits[:, :-1].float(), labels[:, 1:, None]
    lse = rows.sort(-1).values.logsumexp(-1)
    likely = rows.topk(5).values.log_softmax(-1)
    loss = (lse - rows.gather(-1, picks).squeeze(-1)).mean()
    return loss, -(likely.exp() * likely).sum(-1)


def seeded(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(0)
    return make(*args, **kwargs)


def batches(ranks: range, device: torch.device, longer: int = 0) -> list[Tensor]:
    """``STEPS`` times ids [B, S] that count upward, of all these ranks one after another.

    ``longer``: by how much S grows at each step.
    """
    each = []
    for rank in ranks:
        random = torch.Generator().manual_seed(rank)
        starts = torch.randint(WORDS, (STEPS, BATCH, 1), generator=random)
        each.append(starts)
    starts = torch.cat(each, 1)
    return [
        ((start + torch.arange(LENGTH + longer * k)) % WORDS).to(device)
        for k, start in enumerate(starts)
    ]


def outputs(returned: Any) -> tuple[Tensor, Tensor]:
    """Loss and logits, of a network's tuple or of what transformers return."""
    return returned if isinstance(returned, tuple) else (returned.loss, returned.logits)


@dataclass
class Course:
    """What became of a model in ``STEPS`` steps.

    Attributes:
        losses: step by step.
        gradients: the first step's, whole and by name, in float64.
        logits: the last step's, in float64, or the error when they were read.
        kind: type of the returned logits.
        counted: matched, rejected, casts; graphs that AOTAutograd made.
        said: what fxpass logged.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    logits: Tensor | str = ""
    kind: str = ""
    counted: dict[str, int] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)


def train(
    call: Callable[..., Any],
    parameters: Mapping[str, nn.Parameter],
    given: list[Tensor],
    *,
    parts: int = 1,
    sync: Sync = lambda last: nullcontext(),
    more: Callable[[Tensor], Tensor] | None = None,
    late: bool = False,
) -> Course:
    """Trains along the plain gradient.

    Args:
        call: the model, compiled or not.
        parameters: what is trained.
        given: ids [B, S] for each step.
        parts: of how many batches the gradients are summed.
        sync: entered for each part: told whether it is the last.
        more: a further loss, of the logits.
        late: whether the last logits are read after the optimizer's step instead of before
            ``backward``.
    """
    torch._dynamo.reset()
    counters.clear()
    course = Course()
    optimizer = torch.optim.SGD(parameters.values(), lr=RATE)
    with said_by_fxpass() as course.said:
        for step, ids in enumerate(given):
            total, logits = 0.0, ids
            for k, part in enumerate(ids.chunk(parts)):
                with sync(k == parts - 1):
                    loss, logits = outputs(call(input_ids=part, labels=part))
                    loss = loss if more is None else loss + more(logits)
                    if step == len(given) - 1 and not late:
                        course.logits = read(logits)
                    (loss / parts).backward()
                total += loss.item() / parts
            if not step:
                course.gradients = {n: whole(p.grad) for n, p in parameters.items()}
            optimizer.step()
            optimizer.zero_grad()
            course.losses.append(total)
            course.kind = type(logits).__name__
            if step == len(given) - 1 and late:
                course.logits = read(logits)
    course.counted = {n: counters["fusedce"][n] for n in ("matched", "rejected", "casts")}
    course.counted["graphs"] = counters["aot_autograd"]["total"]
    return course


def read(logits: Tensor) -> Tensor | str:
    """The values in float64, or the error."""
    try:
        return logits.clone().detach().double()  # what keeps rows apart computes nothing
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def whole(gradient: Any) -> Tensor:
    """What the ranks hold together; zeros where there is none."""
    if gradient is None:
        return torch.zeros(())
    return getattr(gradient, "full_tensor", lambda: gradient)().double()


def relative(values: Tensor, right: Tensor) -> float:
    return float((values - right).abs().max() / right.abs().max().clamp_min(1e-30))


def compare(got: Course, right: Course, alone: Course | None) -> dict[str, Any]:
    """The course without its tensors, with how far they are off.

    Args:
        right: what eager did on this rank.
        alone: what one process did on the batches of all ranks; None where dtypes differ.
    """
    off = {f"{n} against eager": relative(g, right.gradients[n]) for n, g in got.gradients.items()}
    if alone is not None:
        off |= {
            f"{n} against one": relative(g, alone.gradients[n]) for n, g in got.gradients.items()
        }
    if isinstance(got.logits, Tensor) and isinstance(right.logits, Tensor):
        off["logits"] = relative(got.logits, right.logits)
    return {
        "losses": got.losses,
        "eager": right.losses,
        "alone": None if alone is None else alone.losses,
        "off": off,
        "logits": got.logits if isinstance(got.logits, str) else "",
        "kind": got.kind,
        "said": got.said,
        **got.counted,
    }


def identical(got: Course, right: Course) -> bool:
    """Losses, first gradients and logits, to the bit."""
    assert isinstance(got.logits, Tensor)
    assert isinstance(right.logits, Tensor)
    pairs = [(got.gradients[n], g) for n, g in right.gradients.items()]
    pairs.append((got.logits, right.logits))
    return got.losses == right.losses and all(torch.equal(a, b) for a, b in pairs)


@contextmanager
def said_by_fxpass() -> Iterator[list[str]]:
    """The messages of fxpass's loggers."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("fxpass")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def assert_trains_like_eager(of_ranks: list[dict[str, Any]], rtol: float, case: str) -> None:
    """Losses, first gradients and logits of all ranks, to the dtype's rounding.

    Args:
        of_ranks: what :func:`compare` returned on each.
    """
    first = of_ranks[0]
    assert len({tuple(rank["losses"]) for rank in of_ranks}) == len(of_ranks), f"{case}: same data"
    mean = [
        sum(losses) / len(losses) for losses in zip(*(r["losses"] for r in of_ranks), strict=True)
    ]
    assert mean[-1] < 0.97 * mean[0], f"{case}: nothing was learned"
    if first["alone"] is not None:
        assert_close(mean, first["alone"], rtol, case)
    for rank in of_ranks:
        assert_close(rank["losses"], rank["eager"], rtol, case)
        assert len(rank["off"]) > 2, case
        for name, off in rank["off"].items():
            assert off < 10 * rtol, f"{case}: {name}"


def assert_close(got: list[float], right: list[float], rtol: float, case: str) -> None:
    assert len(got) == len(right), case
    for a, b in zip(got, right, strict=True):
        assert abs(a - b) <= rtol * abs(b), f"{case}: {got} and {right}"
