"""The modes of autograd under which the nodes of a graph run.

In: a graph. Out: for each node whether gradients and inference mode are enabled; a program may
switch both anywhere::

    %h = linear(...)                     Mode(grad=True, inference=False)
    _set_grad_enabled(False)
    %teacher = linear(...)               Mode(grad=False, inference=False)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from fxpass.graph.calls import first_operand
from fxpass.graph.nodes import is_tensor, value


class Mode(NamedTuple):
    """Whether gradients are enabled and whether inference mode is."""

    grad: bool
    inference: bool


def modes_of(graph: Graph) -> dict[Node, Mode]:
    """The mode of every node; the graph starts in the mode in which it is compiled."""
    mode = Mode(torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    found: dict[Node, Mode] = {}
    outer: dict[Node, Mode] = {}
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            mode = mode._replace(grad=bool(node.args[0]))
        elif node.target is torch.autograd.grad_mode._enter_inference_mode:
            outer[node] = mode
            inference = bool(node.args[0])
            mode = Mode(not inference, inference)  # leaving it switches gradients on
        elif node.target is torch.autograd.grad_mode._exit_inference_mode:
            (entered,) = node.all_input_nodes
            mode = outer[entered]
        found[node] = mode
    return found


def enters_inference(node: Node, modes: dict[Node, Mode]) -> bool:
    """Whether a node is in inference mode, and its graph does not start in it."""
    return modes[node].inference and not modes[next(iter(modes))].inference


def cuts_gradients(node: Node, modes: dict[Node, Mode]) -> bool:
    """Whether gradients are off at a node whose inputs need some."""
    needs = any(value(n).requires_grad for n in node.all_input_nodes if is_tensor(n))
    result = node if is_tensor(node) else first_operand(node)  # an assignment returns nothing
    # a view made under no_grad, or a write there, has requires_grad, but passes no gradient on
    return needs and not (value(result).requires_grad and modes[node].grad)
