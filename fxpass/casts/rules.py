"""The operations that need operands of one dtype, and the positions of these operands.

In: a node of a graph, Dynamo's or AOTAutograd's. Out: its :class:`Rule`, or None. The rows are
names of ATen operations; the schemas give operands and spellings: ``addmm`` stands for
``torch.addmm``, ``Tensor.addmm`` and ``torch.ops.aten.addmm``, with three operands.

Element-wise operations promote dtypes, and normalisations accept float32 parameters beside
low-precision inputs: they need no row. A new row needs a test which shows that eager raises.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxpass.graph.functions import function_of
from fxpass.graph.placements import is_dtensor


@dataclass(frozen=True)
class Rule:
    """One operation."""

    name: str  # the ATen operation, ``aten::addmm``
    slots: dict[int, str]  # position → name of each operand that has to have the common dtype
    in_place: bool  # the operation writes to its first operand

    def operands(self, node: Node, key: str) -> dict[int | str, Node]:
        """The floating-point operands of a call by position, or by name for keyword arguments;
        ``key`` is the key of example values in ``node.meta``."""
        given: dict[int | str, Any] = {**dict(enumerate(node.args)), **node.kwargs}
        found: dict[int | str, Node] = {}
        for position, name in self.slots.items():
            # Python calls the first operand "input" where the schemas call it "self"
            for slot in (position, name, "input" if position == 0 else name):
                operand = given.get(slot)
                if isinstance(operand, Node) and _needs_common_dtype(operand.meta.get(key)):
                    found[slot] = operand
                    break
        return found

    def factors(self, operands: Mapping[int | str, Node]) -> list[int | str]:
        """The slots of the operands that are multiplied: not a bias, and not ``addmm``'s input."""
        adds = self.name.removeprefix("aten::").startswith(("add", "baddbmm"))
        addends = {"bias", *(p for p, name in self.slots.items() if name == "bias")}
        addends |= {0, "self", "input"} if adds else set()
        return [slot for slot in operands if slot not in addends]

    def written(self, node: Node) -> Node | None:
        """The tensor that the call writes to: an in-place operand, or ``out=``."""
        target: Any = node.args[0] if self.in_place else node.kwargs.get("out")
        return target if isinstance(target, Node) else None

    def overload(self, node: Node) -> str:
        """The name of the ATen overload of a call."""
        return f"{self.name}.out" if "out" in node.kwargs else self.name


def rule_of(node: Node) -> Rule | None:
    """The rule of a call; None if its operands may have different dtypes."""
    function = function_of(node)
    if function not in OPERATIONS:
        return None
    rule = _rule(function, getattr(node.target, "_overloadname", ""))
    # mm(a, b, out_dtype=...) allows several dtypes
    given = (*node.args, *node.kwargs.values())
    return None if any(isinstance(a, torch.dtype) for a in given) else rule


def _needs_common_dtype(example: Any) -> bool:
    """Is true for an operand whose dtype has to be that of the others; a library's subclass, such
    as a quantized weight, may take any."""
    return (
        isinstance(example, torch.Tensor)
        and example.is_floating_point()
        and example.layout == torch.strided
        and (is_dtensor(example) or not is_traceable_wrapper_subclass(example))
    )


# Arguments with these names are masks, which may have another dtype, or outputs.
_OTHERS = {"attn_mask", "mask", "out"}

# The in-place spellings are functions of their own.
OPERATIONS = frozenset(
    (
        *("linear", "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "addbmm", "addmv"),
        *("addmm_", "baddbmm_", "addbmm_", "addmv_"),
        *("conv1d", "conv2d", "conv3d", "convolution", "convolution_backward"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("scaled_dot_product_attention", "_native_multi_head_attention"),
        "_transformer_encoder_layer_fwd",
    )
)


@functools.cache
def _rule(name: str, overload: str) -> Rule | None:
    """The rule of an overload; without its name, of the first, which other spellings call."""
    packet = getattr(torch.ops.aten, name)
    for candidate in [overload] if overload else packet.overloads():
        arguments = getattr(packet, candidate)._schema.arguments
        if "out" in candidate or any(a.name == "out_dtype" for a in arguments):
            continue
        slots = {
            position: argument.name
            for position, argument in enumerate(arguments)
            if "Tensor" in str(argument.type) and argument.name not in _OTHERS
        }
        return Rule(f"aten::{name}.{candidate}".removesuffix(".default"), slots, name.endswith("_"))
    return None
