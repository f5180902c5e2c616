"""Sizes of the tensors of a graph, which are compared without a guard.

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

UNKNOWN = 1 << 20  # what a size that has no hint is taken for


def key(size: Any) -> Any:
    """A size as an int, or as the expression of a symbol."""
    size = size.meta["val"] if isinstance(size, Node) else size
    if not isinstance(size, torch.SymInt):
        return size
    expr = size.node.expr
    return int(expr) if expr.is_number else expr


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal."""
    if key(a) == key(b):
        return True
    return not (isinstance(a, int) and isinstance(b, int)) and statically_known_true(a == b)


def agree(a: Any, b: Any) -> bool:
    """Whether two sizes are equal; if they are as they were traced, a guard holds them so."""
    return same(a, b) or (hint(a) == hint(b) != UNKNOWN and bool(a == b))


def keys(sizes: Iterable[Any]) -> tuple[Any, ...]:
    """:func:`key` of each."""
    return tuple(map(key, sizes))


def is_one(size: Any) -> bool:
    """Whether a size is known to be 1."""
    return key(size) == 1


def hint(size: Any) -> int:
    """A size as it was traced; ``UNKNOWN`` if it depends on data."""
    size = size.meta["val"] if isinstance(size, Node) else size
    if not isinstance(size, torch.SymInt):
        return int(size) if isinstance(size, int) or size.is_number else UNKNOWN
    return int(size.node.hint) if size.node.has_hint() else UNKNOWN


def is_known(sizes: Iterable[Any]) -> bool:
    """Whether no size depends on data."""
    return all(not isinstance(s, torch.SymInt) or s.node.has_hint() for s in sizes)


def numel(sizes: Sequence[Any]) -> int:
    """The product of the hints."""
    return math.prod(map(hint, sizes))


def value(node: Node) -> Any:
    """The example value of a node."""
    return node.meta.get("val")


def is_tensor(node: Any) -> bool:
    """Whether something is a node of a tensor."""
    return isinstance(node, Node) and isinstance(value(node), Tensor)


def shape(node: Node) -> tuple[Any, ...]:
    """The sizes of a node's tensor."""
    return tuple(value(node).shape)


def packet(node: Node) -> Any:
    """The packet of an ATen call, such as ``aten.add``; else the target, and that of a view of bits
    in another dtype, which is no view of the same numbers."""
    if node.target is torch.ops.aten.view.dtype:
        return node.target
    return getattr(node.target, "overloadpacket", node.target)
