"""Rows of a result that its readers replace by 0: a call need not compute these rows.

In: a result of a part. Out: the masks of its readers. At least one is true for each row read::

    picked [N]    where(labels != -100, -picked, 0).sum()    labels != -100
    picked [N]    picked.sum()                               None: all rows are read

Elementwise functions may stand between the result and a reader that replaces rows, but only linear
functions before a product with a mask: inf times 0 is not 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fxpass.rows.aten_calls import A, P
from fxpass.rows.rules import Ref, Rules
from fxpass.rows.sizes import example, is_tensor_node, numel, packet, shape
from fxpass.rows.tangents import META

_LINEAR = {A.neg, A._to_copy, P.convert_element_type, A.view, A.reshape, A._unsafe_view, A.squeeze}
_LINEAR |= {A.unsqueeze, A.alias, A.clone, A.select, A.slice, A.permute}
_MAX_READERS = 32


class Mask(NamedTuple):
    """An operand that is 0, or if ``negated`` not 0, in rows that a reader replaces by 0."""

    ref: Ref
    negated: bool


def reader_masks(
    rules: Rules, result: Node, inside: set[Node], dependent: set[Node]
) -> list[Mask] | None:
    """The masks of all readers of a result; None if a reader may read all rows.

    Args:
        rules: the plans of the graph.
        result: a value of rows without classes.
        inside: the nodes of regions.
        dependent: the nodes that depend on regions or on tangents: none of them can be a mask.
    """
    found: list[Mask] = []
    todo = [(result, True)]
    seen = 0
    while todo:
        node, linear = todo.pop()
        for user in node.users:
            seen += 1
            if packet(user) in META:
                continue
            if user.op != "call_function" or user in inside or seen > _MAX_READERS:
                return None
            mask = _mask(rules, user, node, linear)
            if mask is not None:
                if mask.ref.node in dependent or example(mask.ref.node).is_complex():
                    return None
                found.append(mask)
            elif packet(user) in _LINEAR:
                todo.append((user, linear))
            elif torch.Tag.pointwise in getattr(user.target, "tags", ()):
                if not is_tensor_node(user) or numel(shape(user)) != numel(shape(node)):
                    return None
                todo.append((user, False))
            else:
                return None
    return found or None


def _mask(rules: Rules, user: Node, node: Node, linear: bool) -> Mask | None:
    """The mask by which a reader replaces rows of a node; None if it replaces none."""
    args = list(user.args)
    if args.count(node) != 1:
        return None
    at = args.index(node)
    if packet(user) is A.where and at > 0:
        condition = args[0]
        negated = at == 2
        other = args[3 - at]
    elif packet(user) is A.masked_fill and at == 0:
        condition = args[1]
        negated = True
        other = args[2]
    elif packet(user) is A.mul and linear:
        condition = args[1 - at]
        negated = False
        other = 0
    else:
        return None
    plan = rules.plans.get(user)
    if not _is_zero(rules, other) or plan is None or not isinstance(condition, Node):
        return None
    refs = [ref for ref in plan.refs if ref.node is condition and ref.kind == "row"]
    return Mask(refs[0], negated) if refs else None


def _is_zero(rules: Rules, value: Any) -> bool:
    if isinstance(value, Node):
        number = value.args[0] if packet(value) is A.scalar_tensor else rules.fill_value(value)
        return isinstance(number, int | float) and number == 0
    return value == 0
