"""Nested graphs that become part of the graph around them: logits are read across their borders.

In: a region. Out: the same region without nested graphs of torch.export's contexts, as Dynamo
writes a context; or without a checkpoint::

    %wrap = wrap_with_set_grad_enabled(False, %body, %z)    ->    _set_grad_enabled(False)
    %best = getitem(%wrap, 0)                                     %best = argmax(%z, -1)
                                                                  _set_grad_enabled(True)
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxpass.graph.calls import storage
from fxpass.graph.nodes import is_tensor, nested_graph
from fxpass.graph.region import CHECKPOINTS, Region
from fxpass.match.modes import modes_of

_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled
_CONTEXTS = {_AUTOCAST, _GRAD_MODE}


def inline_contexts(region: Region) -> None:
    """Replaces the calls of torch.export's contexts (autocast, a grad mode) by their nodes.

    Not in a backward pass, which runs after the program's contexts have ended.
    """
    _inline(region, _CONTEXTS)


def inline_checkpoints(region: Region, calls: Collection[Node]) -> set[Node]:
    """Replaces calls of checkpoints by their nodes, which then are not computed again in backward.

    Returns:
        the new nodes.
    """
    return _inline(region, CHECKPOINTS, calls)


def _inline(region: Region, targets: Collection[Any], calls: Collection[Node] = ()) -> set[Node]:
    graph = region.module.graph
    found = [n for n in graph.nodes if n.target in targets and (not calls or n in calls)]
    found = [] if region.backward else [call for call in found if _is_seen_through(call)]
    old, modes = set(graph.nodes), modes_of(region) if found else {}
    for call in found:
        with graph.inserting_before(call):
            results = _inlined(region.module, call, {}, modes[call].grad)
        for result in list(call.users):
            result.replace_all_uses_with(results[result.args[1]])
            graph.erase_node(result)
        graph.erase_node(call)
    for node in graph.find_nodes(op="get_attr") if found else ():
        if not node.users and nested_graph(node) is not None:
            graph.erase_node(node)
    if found:
        region.module.recompile()
    return set(graph.nodes) - old


def _inlined(module: GraphModule, call: Node, known: dict[Node, Any], enabled: bool) -> Any:
    """The results of a nested graph, whose nodes are copied to the graph of ``module``.

    Args:
        known: the copies of the nodes beside ``call``, where it is nested itself.
        enabled: the grad mode around it.
    """
    graph, (position, body) = module.graph, _body(call)
    given, operands = call.args[:position], call.args[position + 1 :]
    copies: dict[Node, Any] = {}
    inputs = body.graph.find_nodes(op="placeholder")
    for node, operand in zip(inputs, operands, strict=True):
        copies[node] = known.get(operand, operand) if isinstance(operand, Node) else operand
    inside: Any = enabled
    entered = None
    if call.target is _AUTOCAST:
        entered = graph.call_function(_enter_autocast, given)
    elif call.target is _GRAD_MODE:
        (inside,) = given
        graph.call_function(torch._C._set_grad_enabled, given)
    results: Any = ()
    for node in body.graph.nodes:
        if node.op == "output":
            results = map_arg(node.args[0], copies.__getitem__)
        elif node.target in _CONTEXTS:
            copies[node] = _inlined(module, node, copies, inside)
        elif node.target is operator.getitem and isinstance(copies[node.args[0]], tuple | list):
            copies[node] = copies[node.args[0]][node.args[1]]
        elif node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                copies[node].target = _attribute(module, body, node)
    if entered is not None:
        graph.call_function(_exit_autocast, (entered,))
    elif call.target is _GRAD_MODE:
        graph.call_function(torch._C._set_grad_enabled, (enabled,))
    return results


def _body(call: Node) -> tuple[int, GraphModule]:
    """The position of the nested graph among the arguments of a call, and the graph."""
    bodies = ((i, nested_graph(argument)) for i, argument in enumerate(call.args))
    return next((i, body) for i, body in bodies if body is not None)


def _attribute(module: GraphModule, body: GraphModule, node: Node) -> str:
    """The name in ``module`` of what ``node`` gets from ``body``."""
    name, count = f"{node.target}", 0
    while hasattr(module, name):
        count += 1
        name = f"{node.target}_{count}"
    setattr(module, name, getattr(body, str(node.target)))
    return name


def _is_seen_through(call: Node) -> bool:
    """Whether the inputs and results of a nested graph have the example values of what the graph
    around it gives and takes, so that a write to one of them is seen in both."""
    position, body = _body(call)
    inputs = body.graph.find_nodes(op="placeholder")
    pairs: list[tuple[Any, Any]] = [*zip(inputs, call.args[position + 1 :], strict=False)]
    if len(pairs) != len(inputs) or any(isinstance(v, Node) for v in call.kwargs.values()):
        return False
    returned: Any = body.graph.output_node().args[0]
    if any(user.target is not operator.getitem for user in call.users):
        return False
    pairs += [(returned[user.args[1]], user) for user in call.users]  # type: ignore[index]
    alike = all(isinstance(one, Node) and _are_alike(one, other) for one, other in pairs)
    return alike and all(_is_seen_through(n) for n in body.graph.nodes if n.target in _CONTEXTS)


def _are_alike(one: Node, other: Any) -> bool:
    """Whether two values are no tensors, or tensors of one memory."""
    tensors = is_tensor(one), is_tensor(other)
    return storage(one) == storage(other) if all(tensors) else not any(tensors)
