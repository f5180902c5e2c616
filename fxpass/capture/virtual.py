"""Operands as large as logits that a graph makes of small ones: they are made a chunk at a time.

In: an operand of a slice, and what its dimensions are in the call that reads it. Out: the operand
in the canonical layout, computed from smaller operands; or None: it is read as it is. One-hot
labels, masks of classes and numbers are such operands::

    (labels[:, None] == arange(V)).float()    ->    the same, of the chunk's labels
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpass.capture.rows import A, aligned, bound, call, fit, is_like, number_of
from fxpass.capture.values import Chain, Value, inner, inner_sizes, numel, same

# Calls that make a tensor of one number: the position of the number, if it is an argument.
FILLED = {A.full: 1, A.zeros: None, A.ones: None, A.scalar_tensor: 0}
FILLED |= {A.empty: None, A.fill: 1}
_SAME = (A.expand, A.alias, A.detach, A.clone)


def filled(env: Any, value: Value, letters: str, chain: Chain) -> Tensor | None:
    """The operand on the rows of a chunk, if it is worth to make it there.

    Args:
        env: the environment of the rules.
        value: an operand.
        letters: what its dimensions are.
        chain: the views of rows to take of it.
    """
    step = value.step
    if step is None or not _is_large(value, letters):
        return None
    packet = step.op.overloadpacket
    if packet in FILLED or is_like(step):
        at = FILLED.get(packet)
        number = number_of(step) if at is None else step.args[at]
        if isinstance(number, Value):
            return None
        sizes = (env.n, *env.sizes(inner_sizes(value, letters)))
        return torch.full(sizes, number, dtype=value.fake.dtype, device=env.device)
    if packet in _SAME and all(map(same, value.shape, step.values[0].shape)):
        return filled(env, step.values[0], letters, chain)
    if packet in (A.scatter, A.scatter_add):
        return _scattered(env, value, letters, chain)
    if torch.Tag.pointwise in step.op.tags or packet in (A._to_copy, A.to):
        return _pointwise(env, value, letters, chain)
    return None


def _is_large(value: Value, letters: str) -> bool:
    """Whether an operand has rows, and more than a few values in each."""
    return "r" in letters and numel(inner_sizes(value, letters)) >= 32


def _pointwise(env: Any, value: Value, letters: str, chain: Chain) -> Tensor | None:
    """A pointwise call of operands."""
    step = value.step
    assert step is not None
    others = [v for v in step.values if len(v.shape)]
    if any(v.trained for v in others) or not others:
        return None

    def of(argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return [of(a) for a in argument]
        if not isinstance(argument, Value):
            return argument
        return _broadcast(env, argument, value, letters, chain)

    kwargs = {k: v for k, v in step.kwargs.items() if k in ("dtype", "alpha", "rounding_mode")}
    return step.op(*map(of, step.args), **{k: of(v) for k, v in kwargs.items()})


def _broadcast(env: Any, argument: Value, value: Value, letters: str, chain: Chain) -> Tensor:
    """An argument of a pointwise call, with the dimensions of the result."""
    arg = aligned(argument, letters, value.shape)
    then = chain if arg.then is None else (arg.then, *chain)
    return fit(env.value(argument, arg.letters, then), arg.letters, letters)


def _scattered(env: Any, value: Value, letters: str, chain: Chain) -> Tensor | None:
    """A scatter into numbers: one-hot labels."""
    step = value.step
    assert step is not None
    given = bound(step)
    dim = given["dim"] % len(letters)
    tensors = [v for v in given.values() if isinstance(v, Value)]
    if letters[dim] == "r" or any(v.trained or len(v.shape) != len(letters) for v in tensors):
        return None
    for v in tensors:
        for i, letter in enumerate(letters):
            if letter == "r" and not same(v.shape[i], value.shape[i]):
                return None

    def of(argument: Any) -> Any:
        if not isinstance(argument, Value):
            return argument
        found = env.value(argument, letters, chain)
        return found.expand(env.n, *found.shape[1:])

    return call(step.op, {k: of(v) for k, v in given.items()} | {"dim": inner(letters, dim)})
