"""Calls of ATen: their arguments by name, tensors of one number, and nodes behind views.

In: a node of a functional ATen graph. Out: facts that its arguments tell::

    fill_value(zeros_like(z))          0
    origin_of(permute(w, [1, 0]))      w
    call_arguments(sum(z))["dtype"]    None, by default
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch.fx import Node

from fxpass.formula.dtypes import cast_number
from fxpass.rows.sizes import example, is_tensor_node, packet

A: Any = torch.ops.aten
P: Any = torch.ops.prims

# The calls that make a tensor of one number, and the position of the number in their arguments.
_FILLS = {A.scalar_tensor: 0, A.full: 1, A.full_like: 1, A.new_full: 2}
_ZEROS = {A.zeros, A.zeros_like, A.new_zeros, A.empty, A.empty_like, A.new_empty}
_ZEROS |= {A.new_empty_strided, A.empty_strided}
_ONES = {A.ones, A.ones_like, A.new_ones}
# The calls that compute nothing.
VIEWS = {A.view, A._unsafe_view, A.reshape, A.permute, A.expand, A.alias, A.unsqueeze, A.squeeze}
VIEWS |= {A.t, A.transpose, A.slice, A.select, A.detach}
_SAME = {A.expand, A.clone, A.view, A.alias, A.permute, A._to_copy, P.convert_element_type}


def fill_value(node: Node, tagged: Container[Node] = ()) -> Any:
    """The number of a tensor of one number; None for other tensors, and for tagged ones."""
    call = packet(node)
    if call in _FILLS:
        return node.args[_FILLS[call]]
    if call in _ZEROS:
        return 0
    if call in _ONES:
        return 1
    source: Any = node.args[0] if node.args else None
    if call in _SAME and is_tensor_node(source) and source not in tagged:
        number = fill_value(source, tagged)
        dtype = example(source).dtype
        return number if example(node).dtype == dtype else cast_number(number, dtype)
    return None


def origin_of(node: Any) -> Any:
    """The node behind views, copies and casts."""
    same = VIEWS | _SAME
    while isinstance(node, Node) and node.op == "call_function" and packet(node) in same:
        node = node.args[0]
    return node


def _schema(node: Node) -> Any:
    target: Any = node.target
    return target._schema.arguments


def call_arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by name, with defaults."""
    schema = _schema(node)
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    return given | dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs


def call_with(node: Node, arguments: Mapping[str, Any]) -> Any:
    """Calls the target of a node with other arguments."""
    schema = _schema(node)
    args = [arguments[a.name] for a in schema if not a.kwarg_only]
    return node.target(*args, **{a.name: arguments[a.name] for a in schema if a.kwarg_only})  # pyright: ignore
