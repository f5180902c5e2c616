"""The state of reading a row function, and the questions that rules ask of nodes.

In: nodes of a canonical ATen graph. Out: a :class:`Reading`, which the rules of
:mod:`fxpass.lower.elementwise` and :mod:`fxpass.lower.reduced` fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from fxpass.lower.records import Classes, RowValues, Unknown
from fxpass.lower.tables import Tables


@dataclass
class Reading:
    """The state of reading.

    Attributes:
        tables: what the symbols stand for.
        classes: tensors with classes.
        rows: rows whose value is known.
        late: what is computed of rows, and stays in the graph.
        columns: sums over the rows of tensors with classes.
        totals: those of ``rows`` that are summed over the rows.
        pairs: results of ``max``, which are read apart.
    """

    tables: Tables = field(default_factory=Tables)
    classes: dict[Node, Classes] = field(default_factory=dict)
    rows: dict[Node, RowValues] = field(default_factory=dict)
    late: set[Node] = field(default_factory=set)
    columns: dict[Node, Classes] = field(default_factory=dict)
    totals: set[Node] = field(default_factory=set)
    pairs: dict[Node, Classes] = field(default_factory=dict)


def name_of(node: Node) -> str:
    """The name of an ATen function, without those of its overloads."""
    packet = getattr(node.target, "overloadpacket", None)
    name = "" if packet is None else packet.__name__
    return name.removeprefix("special_")


def reads_sizes(node: Node) -> bool:
    """Whether a node is a size."""
    return name_of(node) in ("sym_size", "sym_numel")


def example_of(node: Node) -> torch.Tensor:
    """The example value of a tensor, or of the first of several."""
    example = node.meta["val"]
    return example[0] if isinstance(example, tuple | list) else example


def sizes_of(node: Node) -> list[Any]:
    """The sizes of a tensor."""
    return list(example_of(node).shape)


def same(one: Any, other: Any) -> bool:
    """Whether two sizes are the same number or symbol."""
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return bool(one.node.expr == other.node.expr)
    return isinstance(one, int) and isinstance(other, int) and one == other


def alike(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two shapes are the same."""
    return len(sizes) == len(others) and all(map(same, sizes, others))


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by name, with defaults, in the order of the schema."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def operand_of(found: Reading, node: Node, dim: Any = None) -> Classes:
    """The first argument, if no other has classes; ``dim``: of the classes."""
    first, *others = node.all_input_nodes
    if node.args[0] is not first or any(n in found.classes for n in others):
        raise Unknown("reads logits in another place")
    rank = len(sizes_of(first))
    dims = dim if isinstance(dim, list | tuple) else [dim]
    if dim is not None and [d % rank for d in dims] != [class_dim(first)]:
        raise Unknown("is not over the classes alone")
    return found.classes[first]


def class_dim(node: Node) -> int:
    """The dimension of the classes: all others but the rows have one element."""
    wide = [i for i, size in enumerate(sizes_of(node)) if i and not same(size, 1)]
    if len(wide) != 1:
        raise Unknown(f"has the shape {sizes_of(node)}")
    return wide[0]
