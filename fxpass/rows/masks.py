"""Rows of a result that its readers replace by 0: a call need not compute them.

In: a result of a part. Out: the conditions of its readers, one of which holds where a row is read::

    picked [N]    where(labels != -100, -picked, 0).sum()    labels != -100
    picked [N]    picked.sum()                               None: all rows are read

What stands between may be any function of single values where a row is replaced, but linear where
it is multiplied by a mask: 0 times inf is no 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fxpass.rows.rules import A, P, Ref, Rules
from fxpass.rows.sizes import is_tensor, numel, packet, shape, value
from fxpass.rows.tangents import META

_LINEAR = {A.neg, A._to_copy, P.convert_element_type, A.view, A.reshape, A._unsafe_view, A.squeeze}
_LINEAR |= {A.unsqueeze, A.alias, A.clone, A.select, A.slice, A.permute}
_MOST = 32  # readers


class Mask(NamedTuple):
    """An operand that is 0, or if ``negated`` not 0, in rows that a reader replaces by 0."""

    ref: Ref
    negated: bool


def masks(rules: Rules, result: Node, inside: set[Node], late: set[Node]) -> list[Mask] | None:
    """The masks of all readers of a result; None if some reader may read each row.

    Args:
        rules: the plans of the graph.
        result: a value of rows without classes.
        inside: the nodes of regions.
        late: the nodes that a mask must not be: what reads regions, or tangents.
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
            if user.op != "call_function" or user in inside or seen > _MOST:
                return None
            mask = _mask(rules, user, node, linear)
            if mask is not None:
                if mask.ref.node in late or value(mask.ref.node).is_complex():
                    return None
                found.append(mask)
            elif packet(user) in _LINEAR:
                todo.append((user, linear))
            elif torch.Tag.pointwise in getattr(user.target, "tags", ()):
                if not is_tensor(user) or numel(shape(user)) != numel(shape(node)):
                    return None
                todo.append((user, False))
            else:
                return None
    return found or None


def _mask(rules: Rules, user: Node, node: Node, linear: bool) -> Mask | None:
    """The mask of a reader."""
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
        number = value.args[0] if packet(value) is A.scalar_tensor else rules.fill(value)
        return isinstance(number, int | float) and number == 0
    return value == 0
