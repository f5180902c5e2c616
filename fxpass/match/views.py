"""Views: nodes between a linear and its loss that rearrange rows, or select a slice of the classes.

In: a node and the position of the class dimension in its output. Out: a :class:`View`, with the
position in its input and a call that rearranges the rows of another tensor in the same way; the
class dimension of that tensor may have another size. The rewrite applies this call to the hidden
states::

    %view = view(%logits, -1, 32000)      ->      %reshape = reshape(%hidden, -1, 64)

    View(dim=1, function="reshape", args=(-1, CLASS_SIZE))
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fxpass.graph.calls import arguments, first_operand, required
from fxpass.graph.functions import function_of
from fxpass.graph.nodes import REQUIRED, NoMatch, Target, is_tensor, value

CLASS_SIZE: Any = object()  # in a view's arguments: the size of the tensor's class dimension
CLASSES = slice(None)  # in an index: all of the class dimension


@dataclass(frozen=True)
class View:
    """The effect of one view or index.

    Attributes:
        dim: position of the class dimension in the node's input.
        function: the method of ``Tensor`` or the function of ``_FUNCTIONS`` that rearranges the
            rows of another tensor; empty if the rows stay in place.
        args: the call's arguments after the tensor, with ``CLASS_SIZE`` for what depends on it.
        classes: the slice or index tensor of the classes that the node selects; else None.
    """

    dim: int
    function: str = ""
    args: tuple[Any, ...] = ()
    classes: slice | Node | None = None

    def replayed(self, size: Any, _: None = None) -> tuple[str, Target, tuple[Any, ...]]:
        """The call ``(op, target, args)`` on another tensor; ``args`` omits the tensor itself.
        ``size`` is the size of its class dimension, an int or a node."""
        function = _FUNCTIONS.get(self.function)
        op = "call_method" if function is None else "call_function"
        args = tuple(size if argument is CLASS_SIZE else argument for argument in self.args)
        return op, function or self.function, args


# The node, the shape of its input, the position of the class dimension in its output.
ViewReader = Callable[[Node, Size, int], View]


def view_of(node: Node, dim: int) -> View:
    """Reads the view ``node``; ``NoMatch`` if it changes more than rows."""
    return VIEWS[function_of(node)](node, value(first_operand(node)).shape, dim)


def _nothing(node: Node, shape: Size, dim: int) -> View:
    """contiguous, clone, expand: the operator reads any strides."""
    if value(node).shape != shape:
        raise NoMatch(node, f"%{node.name} repeats the logits")
    return View(dim)


# ---------------------------------------------------------------- to another shape


def _reshape(node: Node, shape: Size, dim: int) -> View:
    """view, reshape: the rows change shape, the class dimension and those after it do not."""
    given = arguments(node, {"input": REQUIRED, "size": None, "shape": None})
    new = given["size"] if given["shape"] is None else given["shape"]
    before = _unchanged_from(node, shape, dim)
    if isinstance(new, Node) and isinstance(new.meta.get("example_value"), tuple):
        return View(before, "reshape_rows", (new, dim, CLASS_SIZE))
    new = tuple(new) if isinstance(new, tuple | list) else (new,)
    if not all(isinstance(n, int | Node) for n in new):
        raise NoMatch(node, f"%{node.name}: its arguments are not a shape")
    return View(before, "reshape", (*new[:dim], CLASS_SIZE, *new[dim + 1 :]))


def reshape_rows(x: Tensor, shape: Sequence[int], dim: int, size: int) -> Tensor:
    """``x`` in ``shape``, which the program computes as one value, with ``size`` at ``dim``."""
    return x.reshape(*shape[:dim], size, *shape[dim + 1 :])


def _flatten(node: Node, shape: Size, dim: int) -> View:
    given = arguments(node, {"input": REQUIRED, "start_dim": 0, "end_dim": -1})
    ends = given["start_dim"] % len(shape), given["end_dim"] % len(shape)
    return View(_unchanged_from(node, shape, dim), "flatten", ends)


def _unflatten(node: Node, shape: Size, dim: int) -> View:
    _, split, sizes = required(node, "input", "dim", "sizes")
    before = _unchanged_from(node, shape, dim)
    if split % len(shape) == before:
        raise NoMatch(node, f"%{node.name} splits the class dimension")
    return View(before, "unflatten", (split % len(shape), sizes))


def _unchanged_from(node: Node, shape: Size, dim: int) -> int:
    """The class dimension in ``shape``; ``NoMatch`` if it changes or is joined with another."""
    after = value(node).shape
    tail = len(after) - dim
    if len(shape) >= tail and tuple(shape[-tail:]) == tuple(after[-tail:]):
        return len(shape) - tail
    for before, size in enumerate(shape):
        sizes = (*shape, *after)
        same = all(isinstance(s, int) for s in sizes) and size == after[dim]
        if same and math.prod(shape[before + 1 :]) == math.prod(after[dim + 1 :]):
            return before
    raise NoMatch(node, f"%{node.name} changes the class dimension")


# ---------------------------------------------------------------- dimensions in another order


def _reordered(node: Node, shape: Size, dim: int) -> View:
    """transpose, permute, movedim, mT: the node's own call, of sizes 0, 1, 2 and so on."""
    sizes = torch.empty(tuple(range(len(shape))), device="meta")
    args, kwargs = map_arg((node.args, node.kwargs), lambda _: sizes)
    method = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
    order = tuple(method(*args, **kwargs).shape)
    return View(order[dim], "permute", order)


# ---------------------------------------------------------------- dimensions of one


def _unsqueeze(node: Node, shape: Size, dim: int) -> View:
    _, new = required(node, "input", "dim")
    new %= len(shape) + 1
    if new == dim:
        raise NoMatch(node, f"%{node.name} makes a class dimension of one")
    return View(dim - (new < dim), "unsqueeze", (new,))


def _squeeze(node: Node, shape: Size, dim: int) -> View:
    gone = arguments(node, {"input": REQUIRED, "dim": None})["dim"]
    if isinstance(gone, tuple | list) and len(gone) == 1:
        (gone,) = gone
    if not isinstance(gone, int):
        raise NoMatch(node, f"%{node.name}: name the one dimension that is squeezed")
    gone %= len(shape)
    before = dim + (gone <= dim and len(value(node).shape) < len(shape))
    if gone == before:
        raise NoMatch(node, f"%{node.name} squeezes the class dimension")
    return View(before, "squeeze", (gone,))


# ---------------------------------------------------------------- some of the rows


def _narrow(node: Node, shape: Size, dim: int) -> View:
    _, along, start, length = required(node, "input", "dim", "start", "length")
    if along % len(shape) != dim:
        return View(dim, "narrow", (along % len(shape), start, length))
    if not isinstance(start, int) or not isinstance(length, int) or start < 0:
        raise NoMatch(node, f"%{node.name} selects classes by numbers that vary")
    return View(dim, classes=_some(slice(start, start + length), shape[dim]))


def index_of(node: Node) -> tuple[Any, ...]:
    """The index of ``getitem``, ``select``, or ATen's ``index`` and ``slice``, as in Python."""
    function = function_of(node)
    if function == "getitem":
        index: Any = node.args[1]
        return index if isinstance(index, tuple) else (index,)
    if function == "index":
        _, indices = required(node, "input", "indices")
        return tuple(slice(None) if i is None else i for i in indices)
    if function == "select":
        _, dim, entry = required(node, "input", "dim", "index")
    else:
        wanted = {"input": REQUIRED, "dim": 0, "start": None, "end": None, "step": 1}
        _, dim, start, end, step = arguments(node, wanted).values()
        end = None if end == sys.maxsize else end
        entry = slice(start or None, end, None if step == 1 else step)
    return (*[slice(None)] * (dim % value(first_operand(node)).dim()), entry)


def _index(node: Node, shape: Size, dim: int) -> View:
    index = entries_of(index_of(node), len(shape))
    tensors = _tensors_of(node, index)
    rest = (*index[:dim], *index[dim + 1 :])
    if tensors == [dim] and value(index[dim]).dim() == 1 and all(e == CLASSES for e in rest):
        if _is_mask(index[dim]):
            raise NoMatch(node, f"%{node.name} selects classes by a mask")
        return View(dim, classes=index[dim])
    before = after = 0  # the dimensions of input and output before this entry
    for position, entry in enumerate(index):
        if after == dim and isinstance(entry, slice):
            rows = (*index[:position], CLASSES, *index[position + 1 :])
            return View(before, "getitem", (rows,), _some(entry, shape[before]))
        if position in tensors[:1]:  # adjacent index tensors share their output dimensions
            after += max(1 if _is_mask(index[i]) else value(index[i]).dim() for i in tensors)
        before += _width(entry)
        after += entry is None or isinstance(entry, slice)
    raise NoMatch(node, f"%{node.name} selects one class")


def entries_of(index: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    """An index with an entry for each of ``rank`` dimensions."""
    used = sum(_width(entry) for entry in index)
    at = next((i for i, entry in enumerate(index) if entry is Ellipsis), len(index))
    return (*index[:at], *[slice(None)] * (rank - used), *index[at + 1 :])


def _is_mask(entry: Any) -> bool:
    return is_tensor(entry) and value(entry).dtype in (torch.bool, torch.uint8)


def _width(entry: Any) -> int:
    """The dimensions that an entry of an index reads; a mask reads each of its own."""
    return value(entry).dim() if _is_mask(entry) else int(entry not in (None, Ellipsis))


def _tensors_of(node: Node, index: tuple[Any, ...]) -> list[int]:
    """The positions of the index tensors; ``NoMatch`` unless their output dimensions are there."""
    for entry in index:
        if not (entry is None or isinstance(entry, int | slice | Node)):
            what = f"%{node.name} indexes with {entry!r}, not with slices and numbers"
            raise NoMatch(node, what)
    tensors = [i for i, entry in enumerate(index) if is_tensor(entry)]
    if len(tensors) > 1 and any(_is_mask(index[i]) for i in tensors):
        raise NoMatch(node, f"%{node.name} indexes with a mask and with other tensors")
    # else the index dimensions would come first
    if tensors and tensors[-1] - tensors[0] + 1 != len(tensors):
        raise NoMatch(node, f"%{node.name} indexes with tensors that are not adjacent")
    if tensors and any(isinstance(entry, int) for entry in index):
        raise NoMatch(node, f"%{node.name} indexes with tensors and with numbers")
    return tensors


def _some(entry: slice, size: Any) -> slice | None:
    """The slice of classes; None if it selects all."""
    parts = (size, entry.start, entry.stop, entry.step)
    known = isinstance(size, int) and all(isinstance(part, int | None) for part in parts)
    whole = entry == CLASSES or (known and entry.indices(size) == (0, size, 1))
    return None if whole else entry


def _index_select(node: Node, shape: Size, dim: int) -> View:
    _, along, index = required(node, "input", "dim", "index")
    if along % len(shape) == dim:
        if value(index).dim() != 1:
            raise NoMatch(node, f"%{node.name} selects one class")
        return View(dim, classes=index)
    return View(dim, "index_select", (along, index))


def repeat_rows(x: Tensor, dim: int, count: int) -> Tensor:
    """``count`` views of ``x`` along a new dimension."""
    x = x.unsqueeze(dim)
    return x.expand(*x.shape[:dim], count, *x.shape[dim + 1 :])


_FUNCTIONS = {
    "getitem": operator.getitem,
    "reshape_rows": reshape_rows,
    "repeat_rows": repeat_rows,
}

VIEWS: dict[str, ViewReader] = {
    **dict.fromkeys(("contiguous", "clone", "expand"), _nothing),
    **dict.fromkeys(("view", "reshape"), _reshape),
    **{"flatten": _flatten, "unflatten": _unflatten},
    **dict.fromkeys(("transpose", "permute", "movedim"), _reordered),
    **dict.fromkeys(("t", "numpy_T", "mT", "mH", "matrix_H"), _reordered),
    **{"unsqueeze": _unsqueeze, "squeeze": _squeeze},
    **{"narrow": _narrow, "index_select": _index_select},
    **dict.fromkeys(("getitem", "select", "index", "slice"), _index),
}
