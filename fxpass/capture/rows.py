"""The table of row rules: which ATen calls keep rows apart, and how they run on a chunk of rows.

In: a call, with tags on its tensors. Out: the tags of its results and how they are computed in the
canonical layout ``[n, ...]``; or :class:`fxpass.capture.values.Stop` with a reason. A rule serves a
class of calls (pointwise, reductions, what works along one dimension, gathers); views of rows are
in :mod:`fxpass.capture.views`, products in :mod:`fxpass.capture.products`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fxpass.capture.values import (
    Arg,
    RowOp,
    Size,
    Step,
    Stop,
    Value,
    inner_sizes,
    is_one,
    same,
)

A = torch.ops.aten
Run = Callable[[Any], Any]


class Rowwise(NamedTuple):
    """What a rule finds.

    Attributes:
        tags: of the results, in order.
        run: a function of an environment to the results; the environment has ``of(arg)``, a
            canonical tensor ``[n, ...]`` (``[1, ...]`` for a shared operand, or a scalar),
            ``full(arg)``, always ``[n, ...]``, ``n``, ``device``, and ``sizes(sizes)``.
    """

    tags: tuple[str, ...]
    run: Run


Rule = Callable[[Step, int], Rowwise]
RULES: dict[Any, Rule] = {}


def rule(*packets: str) -> Callable[[Rule], Rule]:
    """Adds a rule for the calls of these names; releases of torch may lack some."""

    def add(function: Rule) -> Rule:
        RULES.update({getattr(A, p): function for p in packets if hasattr(A, p)})
        return function

    return add


def rule_of(op: Any) -> Rule | None:
    """The rule for an overload."""
    found = RULES.get(op.overloadpacket)
    if found is None and torch.Tag.pointwise in op.tags:
        return pointwise
    return found


def bound(step: Step) -> dict[str, Any]:
    """The arguments of a call by name, with defaults."""
    schema = step.op._schema.arguments
    found = {a.name: a.default_value for a in schema if a.has_default_value()}
    found |= {a.name: value for a, value in zip(schema, step.args, strict=False)}
    return {a.name: (found | step.kwargs).get(a.name) for a in schema}


def call(op: Any, given: dict[str, Any]) -> Any:
    """Calls an overload with arguments by name."""
    schema = op._schema.arguments
    positional = [given[a.name] for a in schema if not a.kwarg_only]
    named = {a.name: given[a.name] for a in schema if a.kwarg_only}
    return op(*positional, **named)


def dims_of(dim: Any, rank: int) -> list[int]:
    """Dimensions as a list, without negative ones; all for None."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(rank))
    listed = dim if isinstance(dim, list | tuple) else [dim]
    return sorted(d % max(rank, 1) for d in listed)


# ---------------------------------------------------------------- pointwise


def joined(values: list[Value], shape: tuple[Size, ...]) -> str:
    """The tag of what is broadcast to a shape: rows meet rows, or one entry for all of them."""
    rank, found = len(shape), ["" for _ in shape]
    for value in values:
        tag = value.tag or ""
        for i, letter in enumerate(tag, rank - len(tag)):
            if letter != "r" and is_one(value.shape[i - rank]) and not is_one(shape[i]):
                continue
            mixed = found[i] and (letter == "r") != (found[i] == "r")
            if mixed and not is_one(shape[i]):
                raise Stop("meets rows with classes, or with another dimension")
            found[i] = min(found[i] or "k", letter, key="rck".index)
    return "".join(letter or "k" for letter in found)


def aligned(value: Value, tag: str, shape: tuple[Size, ...]) -> Arg:
    """An argument of a call whose result has a tag and a shape, to which it is broadcast."""
    rank, start = len(shape), len(shape) - len(value.shape)
    letters = value.tag
    if letters is None:
        letters = ""
        for i, size in enumerate(value.shape, start):
            row = tag[i] == "r" and (same(size, shape[i]) or not is_one(size))
            letters += "r" if row else "k"
    if any(a == "r" and b != "r" for a, b in zip(letters, tag[start:], strict=True)):
        raise Stop("meets rows with classes")
    out = [i for i in range(rank) if tag[i] == "r"]
    mine = [i for i, letter in enumerate(letters, start) if letter == "r"]
    whole = mine == out and all(same(value.shape[i - start], shape[i]) for i in out)
    if whole or (not mine and value.tag is None):
        return Arg(value, letters)
    places = tuple(mine.index(i) if i in mine else None for i in out)
    sizes = tuple(shape[i] for i in out)
    return Arg(value, letters, RowOp("broadcast", (places, sizes), len(mine), len(out)))


def fit(t: Any, letters: str, tag: str) -> Any:
    """A canonical tensor with the dimensions of a result that has a tag, for broadcasting."""
    if t.dim() == 0:
        return t
    start, index = len(tag) - len(letters), [slice(None)]
    for i, letter in enumerate(tag):
        mine = letters[i - start] if i >= start else ""
        if letter != "r":
            index.append(slice(None) if mine else None)  # type: ignore[arg-type]
        elif mine and mine != "r":
            index.append(0)  # type: ignore[arg-type]
    return t if all(i == slice(None) for i in index) else t[tuple(index)]


def pointwise(step: Step, classes: int) -> Rowwise:
    """A call that reads one element of each argument."""
    out = step.results[0]
    tag = joined(step.values, out.shape)
    args = {id(v): aligned(v, tag, out.shape) for v in step.values}
    kwargs = {k: v for k, v in step.kwargs.items() if k not in _PLACES}

    def run(env: Any) -> Any:
        def of(argument: Any) -> Any:
            if isinstance(argument, Value):
                arg = args[id(argument)]
                return fit(env.of(arg), arg.letters, tag)
            if isinstance(argument, list | tuple):
                return [of(a) for a in argument]
            return env.sizes([argument])[0]

        return step.op(*map(of, step.args), **{k: of(v) for k, v in kwargs.items()})

    _check_place(step)
    return Rowwise((tag,) * len(step.results), run)


_PLACES = ("device", "layout", "pin_memory", "memory_format", "non_blocking")


def _check_place(step: Step) -> None:
    device = step.kwargs.get("device")
    new = step.results[0].fake.device
    old = next((v.fake.device for v in step.values if v.fake.device != new), None)
    if device is not None and old is not None:
        advice = f"move the labels to {old} instead, and the loss afterwards"
        raise Stop(f"moves the logits from {old} to {new}; {advice}")
    if step.kwargs.get("layout") not in (None, torch.strided):
        raise Stop("changes the layout")


# Losses of one element each, whose derivative is not that of their decomposition.
ELEMENTWISE_LOSSES = {
    *(A.binary_cross_entropy, A.binary_cross_entropy_with_logits, A.soft_margin_loss),
    *(A.mse_loss, A.huber_loss, A.smooth_l1_loss),
}
RULES |= dict.fromkeys(ELEMENTWISE_LOSSES, pointwise)
RULES |= {
    getattr(A, name): pointwise
    for name in (
        *("clone", "_to_copy", "detach", "alias", "fill", "masked_fill", "where", "isin"),
        "log_sigmoid_forward",
    )
    if hasattr(A, name)
}


@rule("copy")
def _copy(step: Step, classes: int) -> Rowwise:
    """``copy(self, src)``: src in the dtype and shape of self."""
    out, source = step.results[0], step.args[1]
    tag = joined(step.values, out.shape)
    arg, sizes = aligned(source, tag, out.shape), inner_sizes(out, tag)

    def run(env: Any) -> Any:
        found = fit(env.of(arg), arg.letters, tag).to(out.fake.dtype)
        return found.expand(env.n, *env.sizes(sizes))

    return Rowwise((tag,), run)


@rule("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full")
@rule("new_empty")
def _like(step: Step, classes: int) -> Rowwise:
    """A tensor of one number, as large as the logits."""
    value, out = step.args[0], step.results[0]
    number, sizes = number_of(step), inner_sizes(out, value.tag)

    def run(env: Any) -> Any:
        sizes_now = (env.n, *env.sizes(sizes))
        return torch.full(sizes_now, number, dtype=out.fake.dtype, device=env.device)

    return Rowwise((value.tag,), run)


def number_of(step: Step) -> Any:
    """What a tensor is filled with."""
    name, given = step.op.overloadpacket.__name__, bound(step)
    return given.get("fill_value", int("ones" in name))


def is_like(step: Step) -> bool:
    """Whether a call makes a tensor as large as its argument, which it does not read."""
    return RULES.get(step.op.overloadpacket) is _like
