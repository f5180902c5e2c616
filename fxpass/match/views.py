"""Views: nodes between a linear and its loss that rearrange rows, or select a slice of the classes.

In: a node and the position of the class dimension in its input. Out: a :class:`View`, with the
position in its output and a call that rearranges the rows of another tensor in the same way; the
class dimension of that tensor may have another size. The rewrite applies this call to the hidden
states::

    %view = view(%logits, -1, 32000)      ->      %reshape = reshape(%hidden, -1, 64)

    View(before=2, after=1, target="reshape", args=(-1, CLASS_SIZE))
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from fxpass.graph.calls import arguments, first_operand, required
from fxpass.graph.functions import function_of
from fxpass.graph.nodes import REQUIRED, NoMatch, Target, hint, is_tensor, value

CLASS_SIZE: Any = object()  # in a view's arguments: the size of the tensor's class dimension
CLASSES = slice(None)  # in an index: all of the class dimension


@dataclass(frozen=True)
class View:
    """The effect of one view or index.

    Attributes:
        before, after: positions of the class dimension in the node's input and output.
        target: the method or function that rearranges the rows of another tensor; an empty string
            if the rows stay in place.
        args: its arguments after the tensor, with ``CLASS_SIZE`` for what depends on it.
        classes: the slice or index tensor of the classes that the node selects; else None.
    """

    before: int
    after: int
    target: Target = ""
    args: tuple[Any, ...] = ()
    classes: slice | Node | None = None

    def replayed(self, size: Any) -> tuple[str, Target, tuple[Any, ...]]:
        """The call ``(op, target, args)`` on another tensor; ``args`` omits the tensor itself.
        ``size`` is the size of its class dimension, an int or a node."""
        op = "call_method" if isinstance(self.target, str) else "call_function"
        return op, self.target, tuple(size if a is CLASS_SIZE else a for a in self.args)


def view_of(node: Node, dim: int) -> View:
    """Reads the view ``node``; ``NoMatch`` if it changes more than rows."""
    function, shape = function_of(node), value(first_operand(node)).shape
    if function in _INDEXED:
        return _index(node, shape, dim)
    if function in _COPIES:  # the operator reads any strides
        if value(node).shape != shape:
            raise NoMatch.at(node, "repeats the logits")
        return View(dim, dim)
    if function in _REORDERED:  # the node's own call, of sizes 0, 1, 2 and so on
        order = tuple(_called(node, torch.empty(tuple(range(len(shape))), device="meta")).shape)
        return View(dim, order.index(dim), "permute", order)
    given = list(arguments(node, _PARAMETERS[function]).values())[1:]
    if function == "narrow":
        axis, start, length = given
        if isinstance(start, int) and isinstance(length, int) and start >= 0:
            return _index(node, shape, dim)
        if axis % len(shape) == dim:
            raise NoMatch.at(node, "selects classes by numbers that vary")
    if function == "squeeze" and given == [None]:
        raise NoMatch(node, f"%{node.name}: name the one dimension that is squeezed")
    if function == "unflatten" and given[0] % len(shape) == dim:
        raise NoMatch.at(node, "splits the class dimension")
    if function not in ("view", "reshape"):
        return View(dim, _followed(node, dim, function, given), function, tuple(given))
    new: Any = next(n for n in given if n is not None)
    after = _followed(node, dim, "view", [new] if isinstance(new, Node) else new)
    if isinstance(new, Node) and isinstance(new.meta.get("example_value"), tuple):
        return View(dim, after, reshape_rows, (new, after, CLASS_SIZE))
    new = tuple(new) if isinstance(new, tuple | list) else (new,)
    return View(dim, after, "reshape", (*new[:after], CLASS_SIZE, *new[after + 1 :]))


def _followed(node: Node, dim: int, method: str, args: Sequence[Any]) -> int:
    """The position of the class dimension after a view: that of the only stride which is not 0.
    Of a view that splits this dimension, or joins it with rows, there is none of its size."""
    shape = value(first_operand(node)).shape
    strides = [int(i == dim) for i in range(len(shape))]
    probe = torch.empty_strided([hint(s) or 2 for s in shape], strides, device="meta")
    try:
        found = getattr(probe, method)(*map_arg(tuple(args), _number))
    except (RuntimeError, TypeError, IndexError):
        found = torch.empty((), device="meta")
    view = found.untyped_storage()._cdata == probe.untyped_storage()._cdata  # and no copy
    for i, size in enumerate(value(node).shape if view else ()):
        if found.stride(i) == 1 and statically_known_true(size == shape[dim]):
            return i
    raise NoMatch.at(node, "changes the class dimension")


def _number(node: Node) -> Any:
    example = node.meta.get("example_value")
    return tuple(map(hint, example)) if isinstance(example, tuple) else hint(example)


def reshape_rows(x: Tensor, shape: Sequence[int], dim: int, size: int) -> Tensor:
    """``x`` in ``shape``, which the program computes as one value, with ``size`` at ``dim``."""
    return x.reshape(*shape[:dim], size, *shape[dim + 1 :])


def _called(node: Node, tensor: Tensor) -> Tensor:
    args, kwargs = map_arg((node.args, node.kwargs), lambda _: tensor)
    method = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
    return method(*args, **kwargs)


# ---------------------------------------------------------------- some of the rows or classes


def index_of(node: Node) -> tuple[Any, ...]:
    """The index of ``getitem``, ``select``, or ATen's ``index`` and ``slice``, as in Python."""
    function = function_of(node)
    if function == "getitem":
        index: Any = node.args[1]
        return index if isinstance(index, tuple) else (index,)
    if function == "index":
        _, indices = required(node, "input", "indices")
        return tuple(slice(None) if i is None else i for i in indices)
    if function in ("select", "index_select"):
        _, dim, entry = required(node, "input", "dim", "index")
        if function == "index_select" and value(entry).dim() != 1:
            raise NoMatch.at(node, "selects by a number")
    elif function == "narrow":
        _, dim, start, length = required(node, "input", "dim", "start", "length")
        entry = slice(start, start + length)
    else:
        wanted = {"input": REQUIRED, "dim": 0, "start": None, "end": None, "step": 1}
        _, dim, start, end, step = arguments(node, wanted).values()
        end = None if end == sys.maxsize else end
        entry = slice(start or None, end, None if step == 1 else step)
    return (*[slice(None)] * (dim % value(first_operand(node)).dim()), entry)


def _index(node: Node, shape: Size, dim: int) -> View:
    index = entries_of(index_of(node), len(shape))
    tensors = _tensors_of(node, index)
    before = after = 0  # the dimensions of input and output before this entry
    for position, entry in enumerate(index):
        if before <= dim < before + _width(entry):
            rows = (*index[:position], CLASSES, *index[position + 1 :])
            if isinstance(entry, slice):
                return View(dim, after, operator.getitem, (rows,), _some(entry, shape[dim]))
            if _is_mask(entry):
                raise NoMatch.at(node, "selects classes by a mask")
            alone = is_tensor(entry) and all(e == CLASSES for e in rows)
            if alone and value(entry).dim() == 1:
                return View(dim, dim, classes=entry)
            break
        if position in tensors[:1]:  # adjacent index tensors share their output dimensions
            after += max(1 if _is_mask(index[i]) else value(index[i]).dim() for i in tensors)
        before += _width(entry)
        after += entry is None or isinstance(entry, slice)
    raise NoMatch.at(node, "selects one class, or classes and rows at once")


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
        if isinstance(entry, bool) or not (entry is None or isinstance(entry, int | slice | Node)):
            what = f"%{node.name} indexes with {entry!r}, not with slices and numbers"
            raise NoMatch(node, what)
    tensors = [i for i, entry in enumerate(index) if is_tensor(entry)]
    if len(tensors) > 1 and any(_is_mask(index[i]) for i in tensors):
        raise NoMatch.at(node, "indexes with a mask and with other tensors")
    # else the index dimensions would come first
    if tensors and tensors[-1] - tensors[0] + 1 != len(tensors):
        raise NoMatch.at(node, "indexes with tensors that are not adjacent")
    if tensors and any(isinstance(entry, int) for entry in index):
        raise NoMatch.at(node, "indexes with tensors and with numbers")
    return tensors


def _some(entry: slice, size: Any) -> slice | None:
    """The slice of classes; None if it selects all."""
    parts = (size, entry.start, entry.stop, entry.step)
    known = isinstance(size, int) and all(isinstance(part, int | None) for part in parts)
    whole = entry == CLASSES or (known and entry.indices(size) == (0, size, 1))
    return None if whole else entry


_INPUT = {"input": REQUIRED}
_PARAMETERS: dict[str, Any] = {
    "view": {**_INPUT, "size": None, "shape": None},
    "reshape": {**_INPUT, "size": None, "shape": None},
    "flatten": {**_INPUT, "start_dim": 0, "end_dim": -1},
    "unflatten": {**_INPUT, "dim": REQUIRED, "sizes": REQUIRED},
    "unsqueeze": {**_INPUT, "dim": REQUIRED},
    "squeeze": {**_INPUT, "dim": None},
    "narrow": {**_INPUT, "dim": REQUIRED, "start": REQUIRED, "length": REQUIRED},
}
_REORDERED = ("transpose", "permute", "movedim", "t", "numpy_T", "mT", "mH", "matrix_H")
_INDEXED = ("getitem", "select", "index", "slice", "index_select")
_COPIES = ("contiguous", "clone", "expand")
VIEWS = {*_INDEXED, *_COPIES, *_REORDERED, *_PARAMETERS}
