"""Calls of nested regions that have a head: their nodes become part of the graph around them.

AOTAutograd enters checkpoints, custom functions and the contexts of ``torch.export``, but compiles
a ``torch.compiler.nested_compile_region`` on its own. In: Dynamo's graph. Out: the same graph, in
which the nodes of such a region stand in the place of a call::

    %call = invoke_subgraph(%body, "head", %h, %w)    ->    %z = linear(%h, %w)
    %z = getitem(%call, 0)
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from fxpass.graph.calls import written
from fxpass.graph.functions import function_of, out_of_place
from fxpass.graph.modes import Mode, modes_of
from fxpass.graph.nodes import is_tensor, nested_graph
from fxpass.graph.placements import is_dtensor
from fxpass.graph.region import NESTED_REGIONS, Region
from fxpass.graph.source import source_line
from fxpass.rewrite.copies import copied
from fxpass.rewrite.heads import is_multiplied, may_be_large

log = logging.getLogger(__name__)


def inline_heads(region: Region, least: float) -> bool:
    """Replaces the calls of nested regions that make logits by their nodes, where that is safe.

    Args:
        region: the outermost region, or that of a checkpoint.
        least: the size of logits, in MiB, that are worth a loop.

    Returns:
        whether a call was replaced.
    """
    graph = region.module.graph
    calls = [n for n in graph.nodes if n.target in NESTED_REGIONS and _has_head(region, n, least)]
    untouched = copied(graph) if calls else graph
    try:
        modes = modes_of(region)
        done = [call for call in calls if _is_safe(call, modes[call])]
        for call in done:
            _inline(region.module, call)
        for node in graph.find_nodes(op="get_attr") if done else ():
            if not node.users and nested_graph(node) is not None:
                graph.erase_node(node)
    except Exception:
        log.warning("%s: inlining failed", source_line(calls[0]), exc_info=True)
        region.module.graph = untouched
        done = []
    region.module.recompile()
    return bool(done)


def _has_head(region: Region, call: Node, least: float) -> bool:
    """True if a product of a nested graph may be a head, and no hidden layer."""
    body = _body(call)
    inside = Region(body, region, call)
    return any(may_be_large(n, least) and not is_multiplied(inside, n) for n in body.graph.nodes)


def _body(call: Node) -> GraphModule:
    """The nested graph of a call."""
    body = nested_graph(call.args[0])
    assert body is not None
    return body


def _operands(call: Node) -> tuple[Any, ...]:
    """The arguments of a call for its nested graph, which follow the region's name."""
    return call.args[2:]


def _is_safe(call: Node, mode: Mode) -> bool:
    reason = next(_reasons(call, mode), None)
    if reason is not None:
        log.debug("%s: the nested region stays: %s", source_line(call), reason)
    return reason is None


def _reasons(call: Node, mode: Mode) -> Iterator[str]:
    """The reasons why the nodes of a nested region may not be part of the graph around it."""
    body = _body(call)
    if written(call):
        yield "it may write to its inputs"
    if mode.inference or mode.transforms:
        yield "it is in inference mode, or in a transform of torch.func"
    if body.meta.get("nested_region_config") is not None:
        yield "it is compiled with options of its own"
    if any(is_tensor(n) and is_dtensor(n.meta["example_value"]) for n in _operands(call)):
        yield "it is given a DTensor"
    if call.kwargs or any(user.target is not operator.getitem for user in call.users):
        yield "it is not called as Dynamo calls it"
    for node in body.graph.nodes:
        if node.op == "call_module" or nested_graph(node) is not None:
            yield f"%{node.name} calls another graph"
        valueless = "example_value" not in node.meta and node.op != "output"
        if valueless and node.target is not operator.setitem:  # it may switch a mode
            yield f"%{node.name} has no value"
        if any(map(free_unbacked_symbols, tree_leaves(node.meta.get("example_value")))):
            yield f"%{node.name} has a size that depends on data"
        if _is_random(node):
            yield "it draws random numbers"


def _is_random(node: Node) -> bool:
    packet: Any = getattr(torch.ops.aten, out_of_place(function_of(node)) or "-", None)
    ops = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    return any(torch.Tag.nondeterministic_seeded in op.tags for op in ops)


def _inline(module: GraphModule, call: Node) -> None:
    graph = module.graph
    body = _body(call)
    operands = _operands(call)
    copies: dict[Node, Any] = {}
    copies |= zip(body.graph.find_nodes(op="placeholder"), operands, strict=True)
    returned: Any = body.graph.output_node().args[0]
    with graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                copies[node].target = _attribute(module, body, node)
    results = map_arg(returned, copies.__getitem__)
    for user in list(call.users):
        result = results[user.args[1]]
        # the example values of the body are the first call's
        if isinstance(result, Node) and result not in operands:
            result.meta["example_value"] = user.meta.get("example_value")
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(call)


def _attribute(module: GraphModule, body: GraphModule, node: Node) -> str:
    """Sets an attribute of ``body``, which ``node`` gets, in ``module`` too; its name there."""
    name = f"{node.target}"
    count = 0
    while hasattr(module, name):
        count += 1
        name = f"{node.target}_{count}"
    setattr(module, name, getattr(body, str(node.target)))
    return name
