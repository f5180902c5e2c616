"""Carries out a match: the linear, its loss and what stands between become one operator call.

In: a region and a :class:`fxpass.match.Match`. Out: the casts that were put in. The graph changes
in place: row movements are replayed on the hidden states, and the nodes that lost their last user
are erased::

    %logits = linear(%h, %w)                     %x = reshape(%h, -1, 64)
    %flat = view(%logits, -1, 32000)      ->     %out = linear_cross_entropy(%x, %w, ..., 'v1 ...')
    %loss = cross_entropy(%flat, %labels)        %loss = getitem(%out, 0)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from fxpass import rules
from fxpass.casts import Cast, MixedDtypeError, autocast_dtype, cast, common_dtype, short
from fxpass.match import Match, value
from fxpass.region import Region
from fxpass.schedule import compute_dtype
from fxpass.settings import Settings
from fxpass.source import source_line


def rewrite(region: Region, match: Match, settings: Settings) -> list[Cast]:
    """Replaces the match in the graph of ``region``.

    Raises:
        MixedDtypeError: the linear's operands differ outside autocast and the setting is ``error``.
    """
    graph, linear, loss = region.module.graph, match.linear, match.loss
    dtype = _linear_dtype(region, match, settings)
    with graph.inserting_before(loss):
        casts, operands = [], []
        for operand in (match.x, match.weight, match.bias):
            node = operand
            if operand is not None:
                node, made = cast(graph, operand, dtype, linear)
                casts += [made] if made else []
            operands.append(node)
        operands[0] = _replay(graph, operands[0], match, loss)
        logits = None
        if match.keep:
            logits = _replay(graph, _detach(graph, linear), match, loss)
        out = graph.call_function(
            torch.ops.fxpass.linear_cross_entropy.default,
            (*operands, match.target, match.class_weight, logits, match.spec.text()),
            name="linear_cross_entropy",
        )
        out.meta["stack_trace"] = loss.meta.get("stack_trace")
        new = graph.call_function(operator.getitem, (out, 0), name="fused_loss")
        new.meta = dict(loss.meta)
        if compute_dtype(dtype) != value(loss).dtype:
            new.meta["example_value"] = value(loss).to(compute_dtype(dtype))
            new, _ = cast(graph, new, value(loss).dtype, loss)
    loss.replace_all_uses_with(new)
    graph.erase_node(loss)
    for node in reversed(match.chain):
        if not node.users:
            graph.erase_node(node)
    return casts


def _linear_dtype(region: Region, match: Match, settings: Settings) -> torch.dtype:
    """The dtype that the linear computes in."""
    x, weight = value(match.x), value(match.weight)
    if x.dtype == weight.dtype or autocast_dtype(region, match.linear, x.device) is not None:
        return value(match.linear).dtype
    if settings.mixed_dtypes == "error":
        raise MixedDtypeError(
            f"linear of {short(x.dtype)} hidden states and a {short(weight.dtype)} weight outside "
            f"autocast, at {source_line(match.linear)}: cast one of them, or let fxpass do it with "
            "FUSEDCE_MIXED_DTYPES=cast"
        )
    return common_dtype(x.dtype, weight.dtype)


def _detach(graph: Graph, node: Node) -> Node:
    """The logits that exist anyway; their gradient goes through the operator's x and weight."""
    return _call(graph, node, "call_method", "detach", node)


def _replay(graph: Graph, node: Node, match: Match, like: Node) -> Node:
    """The match's row movements, done to ``node`` instead of to the logits."""
    size = int(value(node).shape[-1])
    for movement in match.movements:
        before = value(movement.all_input_nodes[0])
        replay = rules.MOVEMENTS[movement.target](movement, before.shape, size)
        if replay is not None:
            op, target, args = replay
            node = _call(graph, like, op, target, node, *args)
    return node


def _call(graph: Graph, like: Node, op: str, target: Any, *args: Any) -> Node:
    """A new node with its example value and the stack trace of ``like``."""
    node = graph.create_node(op, target, args)
    node.meta["stack_trace"] = like.meta.get("stack_trace")
    examples = torch.fx.map_arg(args, lambda n: n.meta["example_value"])
    function = getattr(torch.Tensor, target) if op == "call_method" else target
    with torch.no_grad():
        node.meta["example_value"] = function(*examples)
    return node
