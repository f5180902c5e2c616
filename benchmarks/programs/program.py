"""What a program is: a function that reduces the logits of one head, and the tensors that it takes.

In: functions whose parameters are named after :data:`benchmarks.programs.operands.OPERANDS`. Out:
:class:`Program` records::

    >>> probabilities = Kind("log-probabilities")
    >>> @probabilities("z - lse", "papers", "[N]")
    ... def _(logits, labels):
    ...     return logits.gather(-1, labels[:, None])[:, 0] - logits.logsumexp(-1)
    >>> [program] = probabilities.programs
    >>> program.names
    ('x', 'weight', 'labels')
    >>> program.function(*program.tensors()).shape
    torch.Size([48])

A function that takes ``logits`` (``[N, V]``) or ``sequences`` (``[B, T, V]``) gets a head in front
of it, so that every program is a function of hidden states and a weight.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.programs.operands import INPUTS, SIZES, TRAINED, make

Function = Callable[..., Any]

F32, BF16 = torch.float32, torch.bfloat16
SHORT = {F32: "", BF16: ", bf16"}


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def _sequences(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.view(SIZES.b, SIZES.t, SIZES.d), weight)


# the first parameter of a function → the head in front of it
HEADS: dict[str, Function] = {"logits": _logits, "sequences": _sequences}


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        name: unique among all programs.
        kind: the group in the table.
        origin: the library or paper whose computation it is.
        returns: the shapes of its outputs.
        function: takes the tensors of :attr:`names`, returns a tensor or a tuple of tensors.
        names: keys of ``OPERANDS``, in the order of the function's parameters.
        gradients: the names of the operands that need gradients; none for an evaluation, which runs
            under ``no_grad``.
        dtype: of the floating-point operands.
        spell: makes the function that is compiled from ``function`` and its tensors, such as its
            exported graph; None for the function itself.
        dynamo: settings of ``torch._dynamo.config``.
    """

    name: str
    kind: str
    origin: str
    returns: str
    function: Function
    names: tuple[str, ...]
    gradients: tuple[str, ...]
    dtype: torch.dtype = F32
    spell: Callable[[Function, list[Tensor]], Function] | None = None
    dynamo: Mapping[str, Any] = field(default_factory=dict)

    def tensors(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The same tensors at every call, converted to ``dtype`` after they were rounded."""
        made = [make(name, self.dtype) for name in self.names]
        if dtype is not None:
            made = [t.to(dtype) if t.is_floating_point() else t for t in made]
        return [
            t.requires_grad_(name in self.gradients)
            for name, t in zip(self.names, made, strict=True)
        ]


@dataclass
class Kind:
    """A group of programs; calling it gives the decorator that adds one to ``programs``."""

    name: str
    programs: list[Program] = field(default_factory=list)

    def __call__(
        self,
        name: str,
        origin: str,
        returns: str,
        *,
        dtypes: tuple[torch.dtype, ...] = (F32,),
        gradients: tuple[str, ...] | None = None,
        **rest: Any,
    ) -> Callable[[Function], Function]:
        """The decorator of a function.

        Args:
            dtypes: one program for each.
            gradients: the operands that need gradients; all of ``TRAINED`` that it takes by
                default.
            rest: ``spell`` and ``dynamo`` of :class:`Program`.
        """

        def add(function: Function) -> Function:
            headed, names = _headed(function)
            taken = tuple(n for n in names if n in TRAINED) if gradients is None else gradients
            self.programs += [
                Program(
                    *(name + SHORT[dtype], self.name, origin, returns, headed, names, taken, dtype),
                    **rest,
                )
                for dtype in dtypes
            ]
            return function

        return add


def _headed(function: Function) -> tuple[Function, tuple[str, ...]]:
    """The function of hidden states and a weight, and the names of its operands."""
    first, *others = inspect.signature(function).parameters
    if first not in HEADS:
        return function, (first, *others)
    head = HEADS[first]

    def program(x: Tensor, weight: Tensor, *rest: Tensor) -> Any:
        return function(head(x, weight), *rest)

    return program, (*INPUTS, *others)
