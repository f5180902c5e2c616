"""What a capture records: tensors with tags, the ATen calls between them, and views of rows.

A tag has one letter for each dimension of a tensor: ``r`` for rows, ``c`` for classes, ``k`` for
any other that is no row (five candidates, a dimension of size one)::

    logits [B, T, V]  "rrc"        logits.transpose(1, 2) [B, V, T]  "rcr"
    topk(logits, 5)   "rrk"        logits.amax(-1, keepdim=True)     "rrk"

NOTE: row rules. Rows of a tagged tensor are independent: row i is a function of row i of each
head, and of operands. So such a tensor can be computed for some rows only, in the *canonical*
layout: one dimension of rows first, then the other dimensions in their order, ``[n, V]`` for each
of the logits above. A rule of :mod:`fxpass.capture.rows` says how a call is computed there. A call
that only views rows (:class:`RowOp`) computes nothing there: its view is taken of the operands
instead, before their rows become one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxpass.graph.functions import function_of
from fxpass.graph.nodes import hint

Size = int | torch.SymInt
# Functions that may make logits.
PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "mv")


class Stop(Exception):  # noqa: N818
    """Why a call cannot run a chunk of rows at a time."""


@dataclass(eq=False)
class Value:
    """One tensor of a record.

    Attributes:
        fake: its shape, dtype and device.
        tag: its dimensions; None for an operand, which no head's logits are read for.
        step, index: the call that made it, and its position among the call's results.
        node: the Dynamo node that is this operand; None if a step made the value.
        late: whether it mixes rows: it is computed after the region.
        trained: whether it needs a gradient.
        data: of a constant.
    """

    fake: Tensor
    tag: str | None = None
    step: Step | None = None
    index: int = 0
    node: Node | None = None
    late: bool = False
    trained: bool = False
    data: Tensor | None = None

    @property
    def shape(self) -> tuple[Size, ...]:
        """Its sizes."""
        return tuple(self.fake.shape)

    @property
    def of_classes(self) -> bool:
        """Whether it has a dimension of classes."""
        return self.tag is not None and "c" in self.tag

    @property
    def rows(self) -> tuple[Size, ...]:
        """The sizes of its dimensions of rows."""
        assert self.tag is not None
        return tuple(s for s, letter in zip(self.shape, self.tag, strict=True) if letter == "r")


@dataclass(eq=False)
class Step:
    """One functional ATen call of a record.

    Attributes:
        op: the overload.
        args, kwargs: with :class:`Value` in the place of tensors.
        grad: whether gradients were enabled.
        node: the Dynamo node that made the call.
        results: its tensors.
        run: computes the results in the canonical layout; None for a call outside of the region.
        head: for the product that makes logits, its operands.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    node: Node
    results: tuple[Value, ...] = ()
    run: Callable[[Any], Any] | None = None
    head: Head | None = None

    @property
    def head_cast(self) -> bool:
        """Whether it is autocast's cast of an operand of a linear."""
        cast = self.op.overloadpacket is torch.ops.aten._to_copy
        floats = cast and all(v.fake.is_floating_point() for v in (*self.values, *self.results))
        return floats and function_of(self.node) in PRODUCTS

    @property
    def values(self) -> list[Value]:
        """The tensors among the arguments."""
        return list(values_in((self.args, self.kwargs)))


@dataclass(frozen=True, eq=False)
class Head:
    """A product that makes logits ``[N, V]``.

    Attributes:
        x: ``[N, D]``, or ``[D, N]`` if the product has its classes first.
        weight: ``[D, V]``, or ``[V, D]`` if the product has its classes first.
        bias: ``[V]`` or None.
        first: whether the classes are the first dimension.
        node: the Dynamo node.
        grad: whether gradients were enabled.
    """

    x: Value
    weight: Value
    bias: Value | None
    first: bool
    node: Node
    grad: bool

    @property
    def classes(self) -> Size:
        """V."""
        return self.weight.shape[-2 if self.first else -1]

    @property
    def trained(self) -> bool:
        """Whether its logits need a gradient."""
        operands = (self.x, self.weight, self.bias)
        return self.grad and any(t is not None and t.trained for t in operands)


@dataclass(frozen=True, eq=False)
class RowOp:
    """A view of rows, or a selection: of the first dimensions of a tensor ``[*rows, ...]``.

    Attributes:
        kind: ``reshape`` (sizes), ``permute`` (order), ``slice`` (dim, start, end, step),
            ``select`` (dim, index), ``flip`` (dims), ``roll`` (shifts, dims), ``broadcast`` (for
            each new dimension of rows the old one or None, sizes), ``index`` (one tensor or None
            for each of the first dimensions, and for a mask the number of its rows).
        args: ints, symbolic sizes, operands.
        before, after: the number of dimensions of rows.
    """

    kind: str
    args: tuple[Any, ...]
    before: int
    after: int

    @property
    def key(self) -> str:
        """Equal for row views that do the same."""
        return f"{self.kind}{_text(self.args)}"


Chain = tuple[RowOp, ...]


def key_of(chain: Chain) -> str:
    """Equal for chains that do the same to flat rows."""
    return "".join(op.key for op in trimmed(chain))


def trimmed(chain: Sequence[RowOp]) -> Sequence[RowOp]:
    """A chain without the last reshapes, which flat rows do not see."""
    last = len(chain)
    while last and chain[last - 1].kind == "reshape":
        last -= 1
    return chain[:last]


def _text(argument: Any) -> str:
    if isinstance(argument, Value):
        return f"%{id(argument)}"
    if isinstance(argument, tuple | list):
        return "(" + ",".join(map(_text, argument)) + ")"
    return str(argument)


@dataclass(frozen=True, eq=False)
class Arg:
    """A tensor argument of a step in the canonical layout.

    Attributes:
        value: the tensor.
        letters: its tag; for an operand, what its dimensions are in this call.
        then: a view of its rows that comes first.
    """

    value: Value
    letters: str
    then: RowOp | None = None


@dataclass
class Leaf:
    """An input of a row function.

    Attributes:
        kind: ``logits``, ``row`` (an operand with a dimension of rows) or ``shared``.
        head: for logits.
        value, letters: for an operand.
        chain: the views of rows that are taken of it.
    """

    kind: str
    chain: Chain = ()
    head: Head | None = None
    value: Value | None = None
    letters: str = ""
    key: str = field(default="", compare=False)


def values_in(arguments: Any) -> Iterable[Value]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(arguments, Value):
        yield arguments
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from values_in(argument)
    elif isinstance(arguments, dict):
        yield from values_in(list(arguments.values()))


def nodes_behind(values: Iterable[Value]) -> list[Node]:
    """The Dynamo nodes that tensors are made of, each once."""
    found: dict[Node, None] = {}
    todo, seen = list(values)[::-1], set[int]()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if value.node is not None:
            found[value.node] = None
        elif value.step is not None:
            todo += value.step.values[::-1]
    return list(found)


def inner(letters: str, dim: int) -> int:
    """The position of a dimension that is no row in the canonical layout."""
    return 1 + sum(letter != "r" for letter in letters[:dim])


def inner_sizes(value: Value, letters: str) -> list[Size]:
    """The sizes of a tensor without its rows."""
    return [s for s, letter in zip(value.shape, letters, strict=True) if letter != "r"]


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for all inputs of the graph."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    with disable_proxy_modes_tracing():  # a size of the graph is none of what is traced
        return a is b or statically_known_true(a == b)


def is_one(size: Size) -> bool:
    """Whether a size is one for all inputs of the graph."""
    return same(size, 1)


def letter_of(size: Size, classes: int) -> str:
    """``c`` for a dimension about as large as the classes, else ``k``."""
    return "c" if hint(size) * 8 > classes else "k"


def numel(sizes: Iterable[Size]) -> int:
    """The number of elements, as traced."""
    return math.prod(map(hint, sizes))
