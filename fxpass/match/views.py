"""Views: nodes between a linear and its loss that rearrange rows, or select a slice of the classes.

In: a node and the position of the class dimension in its output. Out: a :class:`View`, with the
position in its input and a call that rearranges the rows of another tensor in the same way; the
class dimension of that tensor may have another size. The rewrite applies this call to the hidden
states::

    %view = view(%logits, -1, 32000)      ->      %reshape = reshape(%hidden, -1, 64)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor
from torch.fx import Node

from fxpass.graph.calls import arguments, first_operand
from fxpass.graph.nodes import ATTRIBUTES, REQUIRED, NoMatch, Target, attribute_of, is_tensor, value

Replay = Callable[[Any], tuple[str, Target, tuple[Any, ...]]]


@dataclass(frozen=True)
class View:
    """The effect of one view or index.

    Attributes:
        dim: position of the class dimension in the node's input.
        replay: a function of the size of another tensor's class dimension, an int or a node. It
            returns the call ``(op, target, args)`` that rearranges the rows of that tensor;
            ``args`` omits the tensor itself. None if the rows stay in place.
        classes: the slice of classes that the node selects; else None.
    """

    dim: int
    replay: Replay | None
    classes: slice | None = None


# The node, the shape of its input, the position of the class dimension in its output.
ViewReader = Callable[[Node, Size, int], View]


def view_of(node: Node, dim: int) -> View:
    """Reads the view ``node``; ``NoMatch`` if it changes more than rows."""
    return VIEWS[node.target](node, value(first_operand(node)).shape, dim)


def _nothing(node: Node, shape: Size, dim: int) -> View:
    return View(dim, None)  # the operator reads any strides


# ---------------------------------------------------------------- to another shape


def _reshape(node: Node, shape: Size, dim: int) -> View:
    """view, reshape: the rows change shape, the class dimension and those after it do not."""
    given = arguments(node, {"input": REQUIRED, "size": None, "shape": None})
    new = given["size"] if given["shape"] is None else given["shape"]
    before = _unchanged_from(node, shape, dim)
    if isinstance(new, Node) and isinstance(new.meta.get("example_value"), tuple):
        return View(before, lambda size: ("call_function", reshape_rows, (new, dim, size)))
    new = tuple(new) if isinstance(new, tuple | list) else (new,)
    if not all(isinstance(n, int | Node) for n in new):
        raise NoMatch(node, f"%{node.name}: its arguments are not a shape")
    return View(
        before, lambda size: ("call_method", "reshape", (*new[:dim], size, *new[dim + 1 :]))
    )


def reshape_rows(x: Tensor, shape: Sequence[int], dim: int, size: int) -> Tensor:
    """``x`` in ``shape``, which the program computes as one value, with ``size`` at ``dim``."""
    return x.reshape(*shape[:dim], size, *shape[dim + 1 :])


def _flatten(node: Node, shape: Size, dim: int) -> View:
    given = arguments(node, {"input": REQUIRED, "start_dim": 0, "end_dim": -1})
    before = _unchanged_from(node, shape, dim)
    start, end = given["start_dim"] % len(shape), given["end_dim"] % len(shape)
    if start <= before <= end and start != end:
        raise NoMatch(node, f"%{node.name} joins the class dimension with another one")
    return View(before, lambda size: ("call_method", "flatten", (start, end)))


def _unflatten(node: Node, shape: Size, dim: int) -> View:
    given = arguments(node, {"input": REQUIRED, "dim": REQUIRED, "sizes": REQUIRED})
    before = _unchanged_from(node, shape, dim)
    if given["dim"] % len(shape) == before:
        raise NoMatch(node, f"%{node.name} splits the class dimension")
    args = (given["dim"] % len(shape), given["sizes"])
    return View(before, lambda size: ("call_method", "unflatten", args))


def _unchanged_from(node: Node, shape: Size, dim: int) -> int:
    """The class dimension in ``shape``; ``NoMatch`` if it or a dimension after it changes."""
    after = value(node).shape
    tail = len(after) - dim
    if len(shape) < tail or tuple(shape[-tail:]) != tuple(after[-tail:]):
        raise NoMatch(node, f"%{node.name} changes the class dimension")
    return len(shape) - tail


# ---------------------------------------------------------------- dimensions in another order


def _transpose(node: Node, shape: Size, dim: int) -> View:
    given = arguments(node, {"input": REQUIRED, "dim0": REQUIRED, "dim1": REQUIRED})
    return _swapped(shape, dim, given["dim0"], given["dim1"])


def _swapped(shape: Size, dim: int, a: int, b: int) -> View:
    a, b = a % len(shape), b % len(shape)
    return View({a: b, b: a}.get(dim, dim), lambda size: ("call_method", "transpose", (a, b)))


def _swapaxes(node: Node, shape: Size, dim: int) -> View:
    given = arguments(node, {"input": REQUIRED, "axis0": REQUIRED, "axis1": REQUIRED})
    return _swapped(shape, dim, given["axis0"], given["axis1"])


def _permute(node: Node, shape: Size, dim: int) -> View:
    dims = arguments(node, {"input": REQUIRED, "dims": REQUIRED})["dims"]
    order = tuple(d % len(shape) for d in (dims if isinstance(dims, tuple | list) else (dims,)))
    return View(order[dim], lambda size: ("call_method", "permute", order))


def _movedim(node: Node, shape: Size, dim: int) -> View:
    given = arguments(node, {"input": REQUIRED, "source": REQUIRED, "destination": REQUIRED})
    source, destination = given["source"], given["destination"]
    if not isinstance(source, int) or not isinstance(destination, int):
        raise NoMatch(node, f"%{node.name} moves several dimensions; use permute")
    order = [d for d in range(len(shape)) if d != source % len(shape)]
    order.insert(destination % len(shape), source % len(shape))
    return View(order[dim], lambda size: ("call_method", "permute", tuple(order)))


def _transposed(node: Node, shape: Size, dim: int) -> View:
    last = len(shape) - 1
    return _swapped(shape, dim, max(last - 1, 0), last)


def _attribute(node: Node, shape: Size, dim: int) -> View:
    name = attribute_of(node)
    if name not in ("T", "mT") or (len(shape) > 2 and name == "T"):
        raise NoMatch(node, f"%{node.name} reads .{name} of the logits")
    return _transposed(node, shape, dim)


# ---------------------------------------------------------------- dimensions of one


def _unsqueeze(node: Node, shape: Size, dim: int) -> View:
    new = arguments(node, {"input": REQUIRED, "dim": REQUIRED})["dim"] % (len(shape) + 1)
    if new == dim:
        raise NoMatch(node, f"%{node.name} makes a class dimension of one")
    return View(dim - (new < dim), lambda size: ("call_method", "unsqueeze", (new,)))


def _squeeze(node: Node, shape: Size, dim: int) -> View:
    gone = arguments(node, {"input": REQUIRED, "dim": None})["dim"]
    if not isinstance(gone, int):
        raise NoMatch(node, f"%{node.name}: name the one dimension that is squeezed")
    gone %= len(shape)
    before = dim + (gone <= dim and len(value(node).shape) < len(shape))
    if gone == before:
        raise NoMatch(node, f"%{node.name} squeezes the class dimension")
    return View(before, lambda size: ("call_method", "squeeze", (gone,)))


# ---------------------------------------------------------------- some of the rows


def _select(node: Node, shape: Size, dim: int) -> View:
    given = arguments(node, {"input": REQUIRED, "dim": REQUIRED, "index": REQUIRED})
    gone = given["dim"] % len(shape)
    if gone == dim and len(shape) == dim + 1:
        raise NoMatch(node, f"%{node.name} selects one class")
    args = (gone, given["index"])
    return View(dim + (gone <= dim), lambda size: ("call_method", "select", args))


def _narrow(node: Node, shape: Size, dim: int) -> View:
    wanted: dict[str, Any] = dict.fromkeys(("input", "dim", "start", "length"), REQUIRED)
    _, along, *where = arguments(node, wanted).values()
    if along % len(shape) == dim:
        raise NoMatch(node, f"%{node.name} selects classes")
    args = (along % len(shape), *where)
    return View(dim, lambda size: ("call_method", "narrow", args))


def _getitem(node: Node, shape: Size, dim: int) -> View:
    index: Any = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    used = sum(1 for i in index if i is not None and i is not Ellipsis)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (len(shape) - used), *index[at + 1 :])
    else:
        index = (*index, *[slice(None)] * (len(shape) - used))
    _check_index(node, index)
    before = after = 0  # the dimensions of input and output before this entry
    passed = False  # adjacent index tensors share their output dimensions
    for position, entry in enumerate(index):
        if after == dim and isinstance(entry, slice):
            classes = _some(entry, shape[before])
            whole = (*index[:position], slice(None), *index[position + 1 :])
            return View(before, _indexing(whole), classes)
        if is_tensor(entry) and not passed:
            after += max(value(entry).dim() for entry in index if is_tensor(entry))
            passed = True
        before += entry is not None
        after += entry is None or isinstance(entry, slice)
    raise NoMatch(node, f"%{node.name} selects one class")


def _indexing(index: tuple[Any, ...]) -> Replay:
    return lambda size: ("call_function", operator.getitem, (index,))


def _check_index(node: Node, index: tuple[Any, ...]) -> None:
    tensors = [i for i, entry in enumerate(index) if is_tensor(entry)]
    for entry in index:
        if entry is None or isinstance(entry, int | slice | Node):
            continue
        raise NoMatch(node, f"%{node.name} indexes with {entry!r}, not with slices and numbers")
    for i in tensors:
        if index[i].meta["example_value"].dtype in (torch.bool, torch.uint8):
            raise NoMatch(node, f"%{node.name} selects rows by a mask")
    # else the index dimensions would come first
    if tensors and tensors[-1] - tensors[0] + 1 != len(tensors):
        raise NoMatch(node, f"%{node.name} indexes with tensors that are not adjacent")
    if tensors and any(isinstance(entry, int) for entry in index):
        raise NoMatch(node, f"%{node.name} indexes with tensors and with numbers")


def _some(entry: slice, size: Any) -> slice | None:
    """The slice of classes; None if it selects all."""
    if entry == slice(None):
        return None
    parts = (entry.start, entry.stop, entry.step)
    if not isinstance(size, int) or any(isinstance(part, Node) for part in parts):
        return entry
    return None if entry.indices(int(size)) == (0, int(size), 1) else entry


def _index_select(node: Node, shape: Size, dim: int) -> View:
    given = arguments(node, {"input": REQUIRED, "dim": REQUIRED, "index": REQUIRED})
    if given["dim"] % len(shape) == dim:
        raise NoMatch(node, f"%{node.name} selects classes by a tensor")
    args = (given["dim"], given["index"])
    return View(dim, lambda size: ("call_method", "index_select", args))


VIEWS: dict[Target, ViewReader] = {
    "view": _reshape,
    "reshape": _reshape,
    torch.reshape: _reshape,
    "flatten": _flatten,
    torch.flatten: _flatten,
    "unflatten": _unflatten,
    torch.unflatten: _unflatten,
    "contiguous": _nothing,
    "clone": _nothing,
    torch.clone: _nothing,
    "transpose": _transpose,
    torch.transpose: _transpose,
    "swapaxes": _swapaxes,
    torch.swapaxes: _swapaxes,
    "swapdims": _transpose,
    torch.swapdims: _transpose,
    "permute": _permute,
    torch.permute: _permute,
    "movedim": _movedim,
    torch.movedim: _movedim,
    "t": _transposed,
    torch.t: _transposed,
    **dict.fromkeys((getattr, *ATTRIBUTES), _attribute),
    "unsqueeze": _unsqueeze,
    torch.unsqueeze: _unsqueeze,
    "squeeze": _squeeze,
    torch.squeeze: _squeeze,
    "select": _select,
    torch.select: _select,
    "narrow": _narrow,
    torch.narrow: _narrow,
    "index_select": _index_select,
    torch.index_select: _index_select,
    operator.getitem: _getitem,
}
