"""Evaluates what was recorded of deferred logits, on real tensors.

In: values of a record, the runs of the logits that they are made of, and the operands. Out: plain
tensors. Results without classes are computed by programs, from hidden states; all others from
logits, call by call::

    job = Job(recorded, givens)
    job.results(with_grad=True)      rows of hidden states -> [n] -> the loss
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from fxpass.capture.function import function_of, leaves_of
from fxpass.capture.replay import in_place_of, rows_first
from fxpass.capture.values import Leaf, Step, Stop, Value
from fxpass.deferred.recording import LOCK, Recorded, Rows
from fxpass.deferred.run import Run, with_dims
from fxpass.graph.source import calling_line

Tensors = Mapping[Value, Tensor]


class Calls:
    """The tensors of a record, from those that are given."""

    def __init__(self, given: Tensors) -> None:
        self._known: dict[Value, Tensor] = dict(given)

    def know(self, value: Value, tensor: Tensor) -> None:
        """Gives one tensor more."""
        self._known[value] = tensor

    def tensor(self, value: Value) -> Tensor:
        """A tensor, by the calls that make it."""
        if value not in self._known:
            if value.step is None:
                data = value.data
                data = data.constant if isinstance(data, FakeTensor) else data
                if data is None:
                    raise Stop("reads a constant of the function")
                return data
            self._run(value.step)
        return self._known[value]

    def arguments(self, arguments: Any) -> Any:
        """Arguments of a call."""
        return pytree.tree_map(
            lambda a: self.tensor(a) if isinstance(a, Value) else a,
            arguments,
            is_leaf=lambda a: isinstance(a, Value),
        )

    def _run(self, step: Step) -> None:
        args, kwargs = self.arguments((step.args, step.kwargs))
        with torch.set_grad_enabled(step.grad and torch.is_grad_enabled()):
            operation: Any = _IN_PLACE.get(step.op, step.op)
            made = operation(*args, **kwargs)
        tensors = [t for t in pytree.tree_leaves(made) if isinstance(t, Tensor)]
        for result, tensor in zip(step.results, tensors, strict=True):
            self._known.setdefault(result, tensor)


# Functional calls that have no derivative: in place, they have one.
_IN_PLACE = {torch.ops.aten.copy.default: lambda t, new, *more: torch.empty_like(t).copy_(new)}


def computed(values: Sequence[Value], given: Tensors) -> list[Tensor]:
    """Tensors with classes, from logits."""
    with torch._C._DisableAutocast():
        calls = Calls(given)
        return [calls.tensor(value) for value in values]


def of_few_rows(
    value: Value, runs: Mapping[Value, tuple[Run, Sequence[Any]]], given: Tensors
) -> Tensor | None:
    """A tensor with classes, from the logits of its rows alone; None if these are more than half of
    the rows that some logits have, or not known."""
    n = math.prod(map(int, value.rows)) if value.tag is not None else 0
    whole = min(run.like.shape[:-1].numel() for run, _ in runs.values())
    if not n or 2 * n > whole or not all(run.recipe.rows for run, _ in runs.values()):
        return None
    try:
        with LOCK, torch._C._DisableAutocast():
            leaves = leaves_of([value], value.fake.device)
    except Stop:
        return None
    calls, tensors = Calls(given), []
    for leaf in leaves:
        assert leaf.value is not None
        if leaf.value not in runs:
            tensors.append(_operand(leaf, calls))
            continue
        run, inputs = runs[leaf.value]
        rows = _inputs(leaf, run, inputs, calls)
        for i in run.recipe.rows:
            rows[i] = with_dims(rows[i], inputs[i].dim())
        logits = run.recipe(*rows)
        tensors.append(logits.reshape(-1, logits.shape[-1]))
    (made,) = function_of(leaves, [value])(*tensors)
    assert value.tag is not None
    return in_place_of(made, value.tag, [int(size) for size in value.shape]).contiguous()


def reduced(
    found: Recorded, runs: Mapping[Value, tuple[Run, Sequence[Any]]], given: Tensors
) -> list[Tensor]:
    """The results of a function, from the inputs of logits; with gradients where they are enabled.

    Args:
        found: a function whose results have no classes.
        runs: for the logits the runs, and the inputs that they read now.
        given: the operands.

    Raises:
        Stop: there is no program of its rows.
    """
    with torch._C._DisableAutocast():
        calls = Calls(given)
        for rows in found.rows:
            tensors = _of_program(rows, runs, calls)
            for output, tensor in zip(rows.outputs, tensors, strict=True):
                assert output.tag is not None
                shape = [int(size) for size in output.shape]
                calls.know(output, in_place_of(tensor, output.tag, shape))
        return [calls.tensor(value) for value in found.values]


def prepare(found: Recorded, runs: Mapping[Value, tuple[Run, Sequence[Any]]]) -> None:
    """Makes the programs of a function.

    Raises:
        Stop: there is none of some rows.
    """
    for rows in found.rows:
        if rows.program is None:
            rows.program = _program(rows, runs)
        if isinstance(rows.program, str):
            raise Stop(rows.program)


def _program(
    rows: Rows, runs: Mapping[Value, tuple[Run, Sequence[Any]]]
) -> Callable[..., Sequence[Tensor]] | str:
    sources = {}
    for leaf in rows.leaves:
        if leaf.value is not None and leaf.value in runs:
            run, inputs = runs[leaf.value]
            if not run.recipe.rows or not all(isinstance(a, Tensor) for a in inputs):
                return "reads logits whose rows cannot be computed apart"
            sources[id(leaf.value)] = run.recipe, inputs, run.trained
    make = next((recipe.programs for recipe, *_ in sources.values()), None)
    return "reads no logits" if make is None else make(rows, sources, number(rows), calling_line())


def _of_program(
    rows: Rows, runs: Mapping[Value, tuple[Run, Sequence[Any]]], calls: Calls
) -> Sequence[Tensor]:
    tensors: list[Tensor] = []
    for leaf in rows.leaves:
        assert leaf.value is not None
        if leaf.value not in runs:
            tensors.append(_operand(leaf, calls))
            continue
        run, inputs = runs[leaf.value]
        tensors += _inputs(leaf, run, inputs, calls)
    return rows.program(*tensors)


def _inputs(leaf: Leaf, run: Run, inputs: Sequence[Any], calls: Calls) -> list[Any]:
    """What a run reads, of the rows that are left of its logits."""
    found = list(inputs)
    for i in run.recipe.rows:  # whose hidden values are last
        letters = "r" * (found[i].dim() - 1) + "k"
        found[i] = rows_first(found[i], letters, leaf.chain, calls.arguments).contiguous()
    return found


def _operand(leaf: Leaf, calls: Calls) -> Tensor:
    assert leaf.value is not None
    tensor = calls.tensor(leaf.value)
    if leaf.kind == "shared":
        return tensor
    return rows_first(tensor, leaf.letters, leaf.chain, calls.arguments).contiguous()


def number(rows: Rows) -> int:
    """The number of rows."""
    return math.prod(map(int, rows.outputs[0].rows))
