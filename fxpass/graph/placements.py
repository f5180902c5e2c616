"""Placements: nodes that change the distribution of a DTensor over ranks, and not its value.

In: a node. Out: the name of its operation, or an empty string. ``from_local`` makes a DTensor of
each rank's local tensor, ``redistribute`` changes its placements, and ``to_local`` returns the
rank's local tensor::

    placement_name(%redistribute) == "redistribute"        placement_name(%view) == ""
"""

from __future__ import annotations

import sys
from typing import Any

from torch.fx import Node

from fxpass.graph.nodes import Target
from fxpass.releases.torch_2_13 import one_rank_settings

FROM_LOCAL = ("from_local", "prim from_local")
TO_LOCAL = ("to_local", "full_tensor", "prim_to_local")
# Names of methods and functions; "prim" is in those of the functions that Dynamo makes.
PLACEMENTS = {"redistribute", "prim_redistribute", *FROM_LOCAL, *TO_LOCAL}


def placement_name(target: Target) -> str:
    """The name of a node's target if it is one of ``PLACEMENTS``, else an empty string."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name if name in PLACEMENTS else ""


def dtensors() -> Any:
    """The module of DTensors, which a program with DTensors has imported; else None."""
    return sys.modules.get("torch.distributed.tensor")


def is_dtensor(example: object) -> bool:
    """True for a DTensor."""
    return dtensors() is not None and isinstance(example, dtensors().DTensor)


def is_gathered(node: Node) -> bool:
    """True if a node's output has the DTensor's global shape on every rank: ``redistribute``,
    ``full_tensor``, or ``to_local`` of a replicated DTensor."""
    name = placement_name(node.target).removeprefix("prim_")
    if name != "to_local":
        return name in ("redistribute", "full_tensor")
    (operand,) = node.all_input_nodes[:1]
    example = operand.meta["example_value"]
    return is_dtensor(example) and all(p.is_replicate() for p in placements_of(example))


def placements_of(example: Any) -> tuple[Any, ...]:
    """A DTensor's placements, one for each dimension of its mesh."""
    return tuple(example.placements)


def compiled_for_all_ranks() -> bool:
    """True if all ranks run one compiled graph, which must not contain a rank's numbers."""
    return bool(getattr(one_rank_settings(), "compile_on_one_rank", False))
