"""Sizes of the tensors of a graph, compared without a guard.

In: a size of an example value. Out: an int, or an expression that can be compared and hashed::

    >>> key(3), is_one(1), numel((2, 5))
    (3, True, 10)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

NO_HINT = 1 << 20  # the hint of a size that depends on data


def key(size: Any) -> Any:
    """A size as an int, or as the expression of a symbol."""
    size = size.meta["val"] if isinstance(size, Node) else size
    if not isinstance(size, torch.SymInt):
        return size
    expr = size.node.expr
    return int(expr) if expr.is_number else expr


def same_size(a: Any, b: Any) -> bool:
    """Is true if two sizes are equal for all values of their symbols."""
    if key(a) == key(b):
        return True
    return not (isinstance(a, int) and isinstance(b, int)) and statically_known_true(a == b)


def guard_equal(a: Any, b: Any) -> bool:
    """Is true if two sizes are equal. Adds a guard if only their hints show it."""
    return same_size(a, b) or (size_hint(a) == size_hint(b) != NO_HINT and bool(a == b))


def keys(sizes: Iterable[Any]) -> tuple[Any, ...]:
    """:func:`key` of each."""
    return tuple(map(key, sizes))


def is_one(size: Any) -> bool:
    """Is true for a size that is always 1."""
    return key(size) == 1


def size_hint(size: Any) -> int:
    """A size as it was traced; ``UNKNOWN`` if it depends on data."""
    size = size.meta["val"] if isinstance(size, Node) else size
    if not isinstance(size, torch.SymInt):
        return int(size) if isinstance(size, int) or size.is_number else NO_HINT
    return int(size.node.hint) if size.node.has_hint() else NO_HINT


def all_backed(sizes: Iterable[Any]) -> bool:
    """Is true if no size depends on data."""
    return all(not isinstance(s, torch.SymInt) or s.node.has_hint() for s in sizes)


def numel(sizes: Sequence[Any]) -> int:
    """The product of the sizes' hints."""
    return math.prod(map(size_hint, sizes))


def example(node: Node) -> Any:
    """The example value of a node."""
    return node.meta.get("val")


def is_tensor_node(node: Any) -> bool:
    """Is true for a node whose example value is a tensor."""
    return isinstance(node, Node) and isinstance(example(node), Tensor)


def shape(node: Node) -> tuple[Any, ...]:
    """The sizes of a node's tensor."""
    return tuple(example(node).shape)


def packet(node: Node) -> Any:
    """The overload packet of an ATen call, such as ``aten.add``; another node's target. Of ``view``
    to another dtype the overload, as it is no view of the same numbers."""
    if node.target is torch.ops.aten.view.dtype:
        return node.target
    return getattr(node.target, "overloadpacket", node.target)
