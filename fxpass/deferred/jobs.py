"""What is computed of deferred logits: tensors of a record, and what they are made of.

In: values of a record; the logits and operands among what they are made of. Out: plain tensors,
computed from logits, or from those of a few rows::

    Job([value], {root: Logits(run, logits, logits.grad_fn, buffer), labels: Operand(t)}).whole()
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpass.capture.values import Value
from fxpass.deferred.inputs import Input, StaleLogitsError, quiet
from fxpass.deferred.rows import computed, of_few_rows
from fxpass.deferred.run import Recipe, Run
from fxpass.deferred.values import Buffer


@dataclass(eq=False)
class Logits:
    """Logits of a model, among what a record is made of.

    Attributes:
        run: computes them.
        tensor: the tensor that autograd knows.
        history: its history when it was used; a write to it makes another one.
        buffer: where their values are, if they are computed.
    """

    run: Run
    tensor: Tensor
    history: Any
    buffer: weakref.ref[Buffer]

    def __post_init__(self) -> None:
        self._version = None if self.tensor.is_inference() else self.tensor._version

    @property
    def is_written(self) -> bool:
        """Whether the program may have written to them; then eager's backward raises."""
        return self._version is None or self.tensor._version != self._version


@dataclass(eq=False)
class Operand:
    """A plain tensor among what a record is made of.

    Attributes:
        tensor: the tensor, with its history.
        input: where it is read later, the check that it is unchanged; or else
        copy: a copy, of one that is small.
    """

    tensor: Tensor
    input: Input | None = None
    copy: Tensor | None = None

    def kept(self, logits: int) -> Operand:
        """What is read later, if logits take so many bytes."""
        if self.input is not None or self.copy is not None:
            return self
        if self.tensor.nbytes * SMALL <= logits:
            return Operand(self.tensor, copy=self.tensor.detach().clone())
        return Operand(self.tensor, Input(self.tensor, is_row=False))

    def value(self, source: str) -> Tensor:
        """The values, as they were.

        Raises:
            StaleLogitsError: they were changed.
        """
        if self.input is not None:
            return self.input.checked(source)
        return self.tensor.detach() if self.copy is None else self.copy


# An operand that takes this part of the logits, or less, is copied where it is read later.
SMALL = 8
Given = Mapping[Value, Logits | Operand]


@dataclass(frozen=True, eq=False)
class Record:
    """How deferred logits were made: a tensor of a record, and what that is made of."""

    value: Value
    given: Given

    def alone(self) -> Tensor | None:
        """The values, if they are those of a few rows."""
        return Job([self.value], self.given).few()


@dataclass(eq=False)
class Job:
    """What is computed of logits, when it is computed.

    NOTE: two ways of autograd. Results are linked to the logits and operands that they are made of
    in the end (``tracked``), and to the arguments of the function that made them (``arguments``).
    Backward takes the first way, on which gradients of logits stay deferred. It takes the second
    one, which is eager's (``exact``), where a program asks for the gradient of something between.

    Attributes:
        values: tensors of a record.
        given: what they are made of.
        arguments: what the function that returns them was called with, if it has a gradient.
        tracked: the tensors among what is given that have a gradient.
    """

    values: Sequence[Value]
    given: Given
    arguments: tuple[Value, ...] = ()

    def __post_init__(self) -> None:
        passed = _passed(self.values)
        self.arguments = tuple(value for value in self.arguments if value in passed)
        each = ((value, given.tensor) for value, given in self.given.items())
        self.tracked = {value: t for value, t in each if value in passed and t.requires_grad}

    @property
    def linked(self) -> list[Value]:
        """What autograd links the values to, in the order of its inputs."""
        return [*self.tracked, *(v for v in self.arguments if v not in self.tracked)]

    @property
    def exact(self) -> bool:
        """Whether a program asks for gradients of what is made of these logits."""
        return any(logits.run.exact > 0 for logits in self.logits.values())

    @property
    def logits(self) -> dict[Value, Logits]:
        """The logits among what is given."""
        return {v: g for v, g in self.given.items() if isinstance(g, Logits)}

    @property
    def recipe(self) -> Recipe:
        """That of the first logits, for messages."""
        return next(iter(self.logits.values())).run.recipe

    def operands(self) -> dict[Value, Tensor]:
        """The plain tensors.

        Raises:
            StaleLogitsError: one of them was changed.
        """
        each = [(v, given) for v, given in self.given.items() if isinstance(given, Operand)]
        return {value: given.value(self.recipe.source) for value, given in each}

    def inputs(self) -> list[Input]:
        """All that must not change until it is computed."""
        found: list[Input] = []
        for given in self.given.values():
            if isinstance(given, Logits):
                found += [i for i in given.run.inputs or () if isinstance(i, Input)]
            elif given.input is not None:
                found.append(given.input)
        return found

    def plain(self) -> dict[Value, Tensor]:
        """The logits, computed, and the operands."""
        found = self.operands()
        for value, logits in self.logits.items():
            buffer = logits.buffer()
            with logits.run.lock:
                if buffer is not None and not buffer.exposed:
                    found[value] = buffer.whole()
                    continue
                try:
                    found[value] = logits.run.logits()
                except StaleLogitsError:
                    if buffer is None or buffer.value is None or logits.is_written:
                        raise
                    found[value] = buffer.value
        return found

    # ------------------------------------------------------------ results with classes

    def whole(self) -> Tensor:
        """The one value, from logits."""
        few = self.few()
        with quiet():
            return computed(self.values, self.plain())[0] if few is None else few

    def few(self) -> Tensor | None:
        """The one value, if it has few of the rows of logits that are not computed."""
        buffers = [logits.buffer() for logits in self.logits.values()]
        if any(b is not None and b.value is not None and not b.exposed for b in buffers):
            return None
        with quiet():
            runs = {v: (logits.run, logits.run.checked()) for v, logits in self.logits.items()}
            return of_few_rows(self.values[0], runs, self.operands())

    def gradients(
        self, grads: Sequence[Tensor | None], exact: bool = False
    ) -> dict[Value, Tensor | None]:
        """The gradients of what autograd tracks, or of the arguments, for those of the values; from
        logits."""
        with quiet():
            given = self.plain()
            wanted = self.arguments if exact else [*self.tracked]
            known = computed(wanted, given)
            leaves = {v: t.detach().requires_grad_() for v, t in zip(wanted, known, strict=True)}
            with torch.enable_grad():
                results = computed(self.values, given | leaves)
            pairs = zip(results, grads, strict=True)
            known = [(r, g) for r, g in pairs if g is not None and r.requires_grad]
            if not known:
                return dict.fromkeys(leaves)
            outs, of_outs = zip(*known, strict=True)
            found = torch.autograd.grad(outs, [*leaves.values()], of_outs, allow_unused=True)
        return dict(zip(leaves, found, strict=True))


def _passed(values: Sequence[Value]) -> set[Value]:
    """The tensors of a record that gradients of some of its tensors pass."""
    todo, found = [*values], set[Value]()
    while todo:
        value = todo.pop()
        if value.trained and value not in found:
            found.add(value)
            todo += value.step.values if value.step is not None else ()
    return found
