"""The state of reading a row function, and facts about nodes that rules ask for.

In: nodes of a canonical ATen graph. Out: a :class:`Reading`, which the rules of
:mod:`fxpass.lower.elementwise` and :mod:`fxpass.lower.reduced` fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sympy import Expr
from torch.fx import Node

from fxpass.lower.records import RowValues, Unknown
from fxpass.lower.tables import Tables


@dataclass
class Reading:
    """The state of reading.

    Attributes:
        tables: the meaning of symbols.
        classes: tensors with classes, as expressions of a class's element.
        rows: rows that are expressions of outputs.
        opaque: nodes that are computed from rows, and are no expressions: they stay in the graph.
        columns: sums over the rows of tensors with classes.
        totals: the nodes of ``rows`` that are summed over the rows, too.
        pairs: calls of ``max``, whose two results are separate nodes.
    """

    tables: Tables = field(default_factory=Tables)
    classes: dict[Node, Expr] = field(default_factory=dict)
    rows: dict[Node, RowValues] = field(default_factory=dict)
    opaque: set[Node] = field(default_factory=set)
    columns: dict[Node, Expr] = field(default_factory=dict)
    totals: set[Node] = field(default_factory=set)
    pairs: dict[Node, Expr] = field(default_factory=dict)


# Functions that keep all elements and their order.
SAME_ELEMENTS = (
    *("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand"),
    *("alias", "clone", "detach", "_to_copy"),
)


def aten_name(node: Node) -> str:
    """The name of an ATen function, without its overload's."""
    packet = getattr(node.target, "overloadpacket", None)
    name = "" if packet is None else packet.__name__
    return name.removeprefix("special_")


def reads_sizes(node: Node) -> bool:
    """Tells if a node is a size."""
    return aten_name(node) in ("sym_size", "sym_numel")


def example_of(node: Node) -> torch.Tensor:
    """The example value of a tensor, or of the first of several."""
    example = node.meta["val"]
    return example[0] if isinstance(example, tuple | list) else example


def sizes_of(node: Node) -> list[Any]:
    """The sizes of a tensor."""
    return list(example_of(node).shape)


def equal_sizes(one: Any, other: Any) -> bool:
    """Tells if two sizes are the same number or symbol."""
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return bool(one.node.expr == other.node.expr)
    return isinstance(one, int) and isinstance(other, int) and one == other


def equal_shapes(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Tells if two shapes are the same."""
    return len(sizes) == len(others) and all(map(equal_sizes, sizes, others))


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by name, with defaults, in the order of the schema."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def operand_of(reading: Reading, node: Node, dim: Any = None) -> Expr:
    """The first argument, if no other has classes; ``dim``: the dimension that the call reduces."""
    first, *others = node.all_input_nodes
    if node.args[0] is not first or any(n in reading.classes for n in others):
        raise Unknown("reads logits in another place")
    rank = len(sizes_of(first))
    dims = dim if isinstance(dim, list | tuple) else [dim]
    if dim is not None and [d % rank for d in dims] != [class_dim(first)]:
        raise Unknown("is not over the classes alone")
    return reading.classes[first]


def class_dim(node: Node) -> int:
    """The dimension of the classes: all dimensions but the rows' and this have one element."""
    dims = [i for i, size in enumerate(sizes_of(node)) if i and not equal_sizes(size, 1)]
    if len(dims) != 1:
        raise Unknown(f"has the shape {sizes_of(node)}")
    return dims[0]


def sizes_beyond_one(node: Node) -> list[Any]:
    """The sizes of a tensor that are not 1."""
    return [size for size in sizes_of(node) if not equal_sizes(size, 1)]
