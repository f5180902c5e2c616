"""Placements: nodes that change on which ranks a tensor lies, and not what it is.

In: a node. Out: the name of what it does, or nothing. A DTensor is a tensor that several ranks hold
together; ``redistribute`` moves its parts, ``from_local`` makes one of each rank's part, and
``to_local`` gives each rank its own part again::

    placement_name(%redistribute) == "redistribute"        placement_name(%view) == ""
"""

from __future__ import annotations

import sys
from typing import Any

from torch.fx import Node

from fxpass.rules import Target

FROM_LOCAL = ("from_local", "prim_from_local")
TO_LOCAL = ("to_local", "full_tensor", "prim_to_local", "prim_full_tensor")
# Methods, and functions by name: some versions of Dynamo wrap them in functions of their own.
PLACEMENTS = {"redistribute", "prim_redistribute", *FROM_LOCAL, *TO_LOCAL}


def placement_name(target: Target) -> str:
    """The name of a node's target if it is one of ``PLACEMENTS``, else an empty string."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name if name in PLACEMENTS else ""


def is_dtensor(example: object) -> bool:
    """Whether a value is a DTensor. Does not import them: who has one has done so."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(example, module.DTensor)


def is_gathered(node: Node) -> bool:
    """Whether a placement leaves the shape of a DTensor as it was: one that moves it, or the last
    one, if after it every rank has all of the tensor."""
    name = placement_name(node.target).removeprefix("prim_")
    if name != "to_local":
        return name in ("redistribute", "full_tensor")
    (operand,) = node.all_input_nodes[:1]
    example = operand.meta["example_value"]
    return is_dtensor(example) and all(p.is_replicate() for p in placements_of(example))


def placements_of(example: Any) -> tuple[Any, ...]:
    """How a DTensor lies along each dimension of its mesh."""
    return tuple(example.placements)
