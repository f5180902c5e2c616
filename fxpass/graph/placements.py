"""Placements: nodes that change on which ranks a tensor lies, and not what it is.

In: a node. Out: the name of what it does, or nothing. A DTensor is a tensor that several ranks hold
together; ``redistribute`` moves its parts, ``from_local`` makes one of each rank's part, and
``to_local`` gives each rank its own part again::

    placement_name(%redistribute) == "redistribute"        placement_name(%view) == ""

Dynamo of torch 2.11 makes them functions of its own, one for each call, that hold whatever is no
tensor: FX can write placements as arguments in later versions only. Nodes that we put in call a
:class:`Placing` for the same reason.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from torch.fx import Node

from fxpass.graph.nodes import NoMatch, Target

FROM_LOCAL = ("from_local", "prim from_local")
TO_LOCAL = ("to_local", "full_tensor", "prim_to_local")
# Methods, and functions by name; "prim" in those of Dynamo's own.
PLACEMENTS = {"redistribute", "prim_redistribute", *FROM_LOCAL, *TO_LOCAL}


def placement_name(target: Target) -> str:
    """The name of a node's target if it is one of ``PLACEMENTS``, else an empty string."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name if name in PLACEMENTS else ""


def options_of(node: Node) -> Mapping[str, Any]:
    """The keyword arguments of a node with a ``placement_name``.

    Raises:
        NoMatch: nothing says what they are.
    """
    if not placement_name(node.target).startswith("prim"):
        return node.kwargs
    if isinstance(node.target, FunctionType):
        held = zip(node.target.__code__.co_freevars, node.target.__closure__ or (), strict=True)
        options = {name: cell.cell_contents for name, cell in held}.get("kwargs_as_value")
        if isinstance(options, dict):
            return {**options, **node.kwargs}
    raise NoMatch(node, f"%{node.name} does not show its arguments")


class Placing(functools.partial[Any]):
    """What a node calls that moves parts of a DTensor: ``function`` with placements.

    Its keyword arguments are placements, the others are those of the node. A node's text and
    ``placement_name`` call it by the name of the function.
    """

    def __init__(self, function: Callable[..., Any], **placements: Any) -> None:
        del placements  # partial keeps them
        self.__name__ = self.__qualname__ = function.__name__
        self.__module__ = __name__


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
