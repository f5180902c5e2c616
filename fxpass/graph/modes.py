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
from torch.fx import Graph, Node

from fxpass.graph.calls import first_operand, storage, written
from fxpass.graph.functions import reads_values
from fxpass.graph.hazards import Writers
from fxpass.graph.nodes import is_tensor, value
from fxpass.graph.region import Region


class Mode(NamedTuple):
    """Whether gradients are enabled and whether inference mode is, and the number of transforms
    (vmap, grad) around the node."""

    grad: bool
    inference: bool
    transforms: int = 0


def modes_of(region: Region) -> dict[Node, Mode]:
    """The mode of every node; the outermost graph starts in the mode in which it is compiled."""
    if region.outer is None or region.call is None:
        mode = Mode(torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    else:
        mode = modes_of(region.outer)[region.call]
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


def gradients_reach(graph: Graph, writers: Writers) -> set[Node]:
    """The nodes that gradients may reach: with a path of nodes with gradients to an output, or to
    a write to memory from which there is one. Of the shape of a node, or of a comparison, there is
    none."""
    found = set(graph.find_nodes(op="output"))
    ends = [*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes]
    read = {None, *(storage(n) for n in ends if is_tensor(n))}
    writing = set().union(*writers.values())
    for node in reversed(graph.nodes):
        if is_tensor(node) and not value(node).requires_grad:
            continue
        users = any(user in found and reads_values(user, node) for user in node.users)
        if users or (node in writing and any(storage(n) in read for n in written(node))):
            found.add(node)
            read |= {storage(n) for n in node.all_input_nodes if is_tensor(n)}
    return found


def cuts_gradients(node: Node, modes: Mapping[Node, Mode]) -> bool:
    """Whether gradients are off at a node whose inputs need some."""
    needs = any(value(n).requires_grad for n in node.all_input_nodes if is_tensor(n))
    result = node if is_tensor(node) else first_operand(node)  # an assignment returns nothing
    # a view made under no_grad, or a write there, has requires_grad, but passes no gradient on
    return needs and not (value(result).requires_grad and modes[node].grad)
