"""The modes under which the nodes of a graph run.

In: a region. Out: for each node whether gradients and inference mode are enabled, and how many
transforms of torch.func it is in; a program may switch all of them anywhere::

    %h = linear(...)                     Mode(grad=True, inference=False)
    _set_grad_enabled(False)
    %teacher = linear(...)               Mode(grad=False, inference=False)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.fx import Node

from fxpass.graph.calls import first_operand
from fxpass.graph.nodes import is_tensor, value
from fxpass.graph.region import Region


class Mode(NamedTuple):
    """The modes at a node.

    Attributes:
        grad, inference: whether gradients, and inference mode, are enabled.
        transforms: the number of transforms (vmap, grad) around the node.
    """

    grad: bool
    inference: bool
    transforms: int = 0


def modes_of(region: Region) -> dict[Node, Mode]:
    """The mode of every node; the outermost graph starts in the mode in which it is compiled."""
    if region.outer is None or region.call is None:
        mode = Mode(torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    else:
        mode = modes_of(region.outer)[region.call]
        if region.call.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            mode = mode._replace(grad=bool(region.call.args[0]))  # of torch.export
    found: dict[Node, Mode] = {}
    outer: dict[Node, Mode] = {}
    for node in region.module.graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            mode = mode._replace(grad=bool(node.args[0]))
        elif node.target is torch.autograd.grad_mode._enter_inference_mode:
            outer[node] = mode
            inference = bool(node.args[0])
            # leaving it switches gradients on
            mode = mode._replace(grad=not inference, inference=inference)
        elif node.target is torch.autograd.grad_mode._exit_inference_mode:
            (entered,) = node.all_input_nodes
            mode = outer[entered]
        name = getattr(node.target, "__name__", "")
        if not name.startswith("autocast"):  # of an autocast that make_fx traced, no transform
            depth = name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
            mode = mode._replace(transforms=mode.transforms + depth)
        found[node] = mode
    return found


def cuts_gradients(node: Node, modes: Mapping[Node, Mode]) -> bool:
    """True if gradients are off at a node whose inputs need gradients."""
    needs = any(value(n).requires_grad for n in node.all_input_nodes if is_tensor(n))
    result = node if is_tensor(node) else first_operand(node)  # an assignment returns nothing
    # the result of a view or a write under no_grad has requires_grad, but passes no gradient on
    return needs and not (value(result).requires_grad and modes[node].grad)
