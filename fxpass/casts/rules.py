"""The operations that need operands of one dtype, and the positions of these operands.

In: a node of a graph, Dynamo's or AOTAutograd's. Out: its :class:`Rule`, or None. The rows are
names of ATen operations; the schemas give operands and spellings: ``addmm`` stands for
``torch.addmm``, ``Tensor.addmm`` and ``torch.ops.aten.addmm``, with three operands.

Element-wise operations promote dtypes, and normalisations accept float32 parameters beside
low-precision inputs: they need no row. A new row needs a test which shows that eager raises.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from fxpass.graph.nodes import Target

aten = torch.ops.aten


@dataclass(frozen=True)
class Rule:
    """One operation.

    Attributes:
        name: the ATen operation, ``aten::addmm``.
        slots: position → name of each operand that has to have the common dtype.
        in_place: whether the operation writes to its first operand.
    """

    name: str
    slots: dict[int, str]
    in_place: bool

    def operands(self, node: Node, key: str) -> dict[int | str, Node]:
        """The floating-point operands of a call by position, or by name for keyword arguments.

        Args:
            node: the call.
            key: the key of example values in ``node.meta``.
        """
        found: dict[int | str, Node] = {}
        for position, name in self.slots.items():
            # Python calls the first operand "input" where the schemas call it "self"
            for slot in (position, name, "input" if position == 0 else name):
                given: Any = (
                    node.kwargs.get(slot)
                    if isinstance(slot, str)
                    else (node.args[slot] if slot < len(node.args) else None)
                )
                if isinstance(given, Node) and _counts(given.meta.get(key)):
                    found[slot] = given
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
    if node.op not in ("call_function", "call_method"):
        return None
    rule = RULES.get(node.target)
    # mm(a, b, out_dtype=...) allows several dtypes
    given = (*node.args, *node.kwargs.values())
    return None if any(isinstance(a, torch.dtype) for a in given) else rule


def _counts(example: Any) -> bool:
    return (
        isinstance(example, torch.Tensor)
        and example.is_floating_point()
        and example.layout == torch.strided
    )


# Arguments of these names are masks, which may have another dtype, or outputs.
_OTHERS = {"attn_mask", "mask", "out"}

# ATen name -> spellings beside torch.<name>, Tensor.<name> and torch.ops.aten.<name>
_OPERATIONS: dict[str, tuple[Target, ...]] = {
    "linear": (F.linear,),
    "matmul": (operator.matmul, operator.imatmul, "__matmul__", "__rmatmul__"),
    **dict.fromkeys(("mm", "bmm", "mv"), ()),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv"), ()),
    **dict.fromkeys(("addmm_", "baddbmm_", "addbmm_", "addmv_"), ()),
    "conv1d": (F.conv1d,),
    "conv2d": (F.conv2d,),
    "conv3d": (F.conv3d,),
    "conv_transpose1d": (F.conv_transpose1d,),
    "conv_transpose2d": (F.conv_transpose2d,),
    "conv_transpose3d": (F.conv_transpose3d,),
    **dict.fromkeys(("convolution", "convolution_backward"), ()),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention,),
    **dict.fromkeys(("_native_multi_head_attention", "_transformer_encoder_layer_fwd"), ()),
}


def _rows(name: str, spellings: tuple[Target, ...]) -> dict[Target, Rule]:
    packet = getattr(aten, name)
    rows: dict[Target, Rule] = {}
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema
        arguments = schema.arguments
        if "out" in overload or any(a.name == "out_dtype" for a in arguments):
            continue
        slots = {
            position: argument.name
            for position, argument in enumerate(arguments)
            if "Tensor" in str(argument.type) and argument.name not in _OTHERS
        }
        rule = Rule(f"aten::{name}.{overload}".removesuffix(".default"), slots, name.endswith("_"))
        rows[getattr(packet, overload)] = rule
        # Python's spellings have the operands of the first overload
        for target in (*spellings, getattr(torch, name, None), name):
            if target is not None and (target != name or hasattr(torch.Tensor, name)):
                rows.setdefault(target, rule)
    return rows


RULES: dict[Target, Rule] = {
    target: rule
    for name, spellings in _OPERATIONS.items()
    for target, rule in _rows(name, spellings).items()
}
