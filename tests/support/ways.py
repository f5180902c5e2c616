"""The ways in which a program runs: backends, dtypes, modes, and how it is handed over.

In: a name. Out: a :class:`Way` of :data:`WAYS`, for :func:`tests.support.oracle.outcome`::

    WAYS["bf16"].dtype, WAYS["chunks"].patched, WAYS["outside"].spell
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.fuzz.small import small
from tests.programs.row import BF16, F16, Function, Row
from tests.support.traced import decomposed, exported, traced, traced_before_autograd


@dataclass(frozen=True)
class Way:
    """A way to run a program.

    Attributes:
        inner: the backend inside of fusedce.
        dtype: of the floating-point operands; that of the row by default.
        around: what the call stands in, eager's too.
        autocasts: it is an autocast, to bf16.
        dynamic: as of ``torch.compile``.
        patched: what only the compiled program runs in.
        spell: makes the function that is called from a row and ``torch.compile``.
        graph: whether the graph is that of the first way, and becomes the same.
        options: more of fusedce's.
        spread: how often eager runs again on inputs that differ by a rounding, whose largest error
            counts: for programs that nobody chose, and that may be ill-conditioned.
        deferred: whether the head has a graph of its own, whose logits are deferred.
    """

    inner: str = "eager"
    dtype: torch.dtype | None = None
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    autocasts: bool = False
    dynamic: bool | None = None
    patched: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    spell: Callable[[Row, Callable[[Function], Function]], Function] | None = None
    graph: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    spread: int = 0
    deferred: bool = False


def _outside(row: Row, compile: Callable[[Function], Function]) -> Function:
    head, rest = compile(row.head()), row.rest()
    return lambda *tensors: rest(*head(*tensors), *tensors)


def _behind_a_break(row: Row, compile: Callable[[Function], Function]) -> Function:
    head, rest = row.head(), row.rest()

    def program(*tensors: Tensor) -> Any:
        logits = head(*tensors)
        torch._dynamo.graph_break()
        return rest(*logits, *tensors)

    return compile(program)


def _checkpointed(row: Row, compile: Callable[[Function], Function]) -> Function:
    head, rest = row.head(), row.rest()

    def program(*tensors: Tensor) -> Any:
        return checkpoint(rest, *head(*tensors), *tensors, use_reentrant=False)

    return compile(program)


def _by(tracer: Callable[..., Function], detached: bool = False) -> Any:
    def spell(row: Row, compile: Callable[[Function], Function]) -> Function:
        tensors = row.tensors()
        tensors = [t.detach() for t in tensors] if detached else tensors
        return compile(tracer(row.program(), *tensors))

    return spell


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", BF16)


FIRST = "eager"
OUTSIDE = Way(spell=_outside, patched=small, graph=False, deferred=True)
WAYS = {
    FIRST: Way(),
    "aot_eager": Way(inner="aot_eager"),
    "inductor": Way(inner="inductor"),
    "bf16": Way(dtype=BF16, spread=8),
    "f16": Way(dtype=F16, spread=8),
    "autocast": Way(around=_autocast, autocasts=True, graph=False, spread=8),
    "dynamic": Way(dynamic=True),
    "no_grad": Way(around=torch.no_grad),
    "inference": Way(around=torch.inference_mode),
    "chunks": Way(patched=small),
    "outside": OUTSIDE,
    "outside under autocast": replace(OUTSIDE, around=_autocast, autocasts=True),
    "behind a break": replace(OUTSIDE, spell=_behind_a_break),
    # the eager backend forgets writes to what a checkpoint computes
    "checkpointed": Way(inner="aot_eager", spell=_checkpointed),
    "exported": Way(spell=_by(exported)),
    "decomposed": Way(spell=_by(decomposed), graph=False),
    "made": Way(spell=_by(traced, detached=True), graph=False),
    "made before autograd": Way(spell=_by(traced_before_autograd, detached=True), graph=False),
}
