"""What a program of :mod:`benchmarks.trainers` gets, and what is found out about it.

In: the sizes, and the name of a backend. The program calls :meth:`Task.compile` with each of its
models, and :meth:`Task.step` with the loss of each step. Out: the losses, the peak of memory, and
whether logits were computed as a whole (:class:`Watch`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpass.cli.memory import Memory
from fxpass.deferred import replay, run
from fxpass.deferred.tensor import DeferredLogits

WARM = 4  # steps before memory is measured: the first ones compile


@dataclass(frozen=True)
class Sizes:
    """The model and its batches.

    Attributes:
        classes: vocabulary size.
        hidden: hidden size, a multiple of 4.
        sequences: of a step; an even number.
        tokens: of a sequence.
        steps: of a training run.
    """

    classes: int = 32000
    hidden: int = 128
    layers: int = 2
    sequences: int = 8
    tokens: int = 128
    steps: int = 20

    @property
    def rows(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.tokens


class Watch:
    """Counts what is computed of deferred logits, as a context manager.

    Attributes:
        counts: calls, by what they compute: "values" of more than half of the rows of logits, or
            of what a function made of them; "gradients" of their inputs, from a plain tensor of
            the logits' size.
        plain: calls of compiled models that returned plain logits.
        forwards: calls of compiled models.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.plain = self.forwards = 0
        self._before: list[tuple[Any, str, Any]] = []

    @property
    def fused(self) -> bool:
        """Whether no logits existed as a whole."""
        return self.forwards > 0 and not self.plain and not self.counts

    @property
    def why(self) -> str:
        """What computed logits; empty if nothing did."""
        found = [f"{count} times {what}" for what, count in self.counts.items()]
        found += [f"{self.plain} of {self.forwards} calls returned plain logits"] * bool(self.plain)
        return "; ".join(found)

    def __enter__(self) -> Watch:
        self._wrap(run.Run, "logits", self._values)
        self._wrap(replay.Replay, "logits", self._values)
        self._wrap(run.Run, "gradients", lambda *_: self.counts.update(["gradients"]))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, method in self._before:
            setattr(owner, name, method)

    def _wrap(self, owner: Any, name: str, see: Callable[..., None]) -> None:
        method = owner.__dict__.get(name)
        assert method is not None

        @functools.wraps(method)
        def seen(self: Any, *args: Any, **kwargs: Any) -> Any:
            see(self, *args, **kwargs)
            return method(self, *args, **kwargs)

        self._before.append((owner, name, method))
        setattr(owner, name, seen)

    def _values(self, made: Any, rows: Tensor | None = None) -> None:
        found = made.like.shape[:-1].numel() if rows is None else rows.numel()
        sources = [made]  # of a slice that a function made, the logits that it was made of
        if isinstance(made, replay.Replay):
            sources = made.roots
        if 2 * found > max(source.like.shape[:-1].numel() for source in sources):
            self.counts["values"] += 1

    def output(self, made: Any) -> None:
        """Counts a call of a compiled model, which returned ``made``."""
        self.forwards += 1
        self.plain += not isinstance(getattr(made, "logits", made), DeferredLogits)


class Task:
    """A program's run with one backend.

    Attributes:
        losses: of each step.
        memory: started after the first ``WARM`` steps.
    """

    def __init__(self, sizes: Sizes, backend: str, options: dict[str, Any] | None = None) -> None:
        self.sizes, self.backend, self.options = sizes, backend, options
        self.watch = Watch()
        self.losses: list[float] = []
        self.memory = Memory(torch.device("cpu"))

    def compile(self, model: nn.Module) -> None:
        """Compiles a model in place, or leaves it eager."""
        if self.backend == "eager":
            return
        model.compile(backend=self.backend, options=self.options)
        call: Any = model._compiled_call_impl

        def counted(*args: Any, **kwargs: Any) -> Any:
            made = call(*args, **kwargs)
            self.watch.output(made)
            return made

        model._compiled_call_impl = counted

    def step(self, loss: float) -> None:
        """Notes the loss of a step that has ended."""
        self.losses.append(loss)
        if len(self.losses) == WARM:
            self.memory.start()
