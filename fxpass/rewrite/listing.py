"""The Triton kernels of a rewritten graph, as they run on a GPU.

In: a rewritten Dynamo graph. Out: the launches of its operator calls, for its GPU or for the
one that :func:`fxpass.kernels.call.gpu_for_listing` names::

    %out = fxpass.linear_cross_entropy(x=%x, weight=%w, target=%t, spec='v7 reduction=mean')
    ->  the launch of the kernel for `total=pick`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from fxpass.graph.nodes import hint, value
from fxpass.kernels.call import (
    Launch,
    OfReductions,
    Operand,
    for_reductions,
    gpu_for_listing,
    launches,
)
from fxpass.spec.reductions import Moment, Reductions
from fxpass.spec.shards import of_backward, of_forward
from fxpass.spec.spec import Spec


def launches_of(graph: Graph) -> Iterator[Launch]:
    """The launches of all calls, in the graph's order."""
    for node in graph.nodes:
        if node.target is torch.ops.fxpass.class_reductions.default:
            spec, operands = _of_reductions(node)
            shard = False
        elif getattr(node.target, "__name__", "").startswith("linear_cross_entropy"):
            if "spec" not in node.kwargs:
                continue  # core's own function
            spec, operands = _of_loss(node)
            shard = node.kwargs.get("group") is not None
        else:
            continue
        x: Any = node.kwargs.get("x") or node.args[0]
        gpu = gpu_for_listing(value(x).device)
        if not shard:
            yield from launches(spec, operands, gpu)
            continue
        yield from for_reductions(of_forward(spec), operands, gpu)
        if spec.gradients:
            yield from for_reductions(of_backward(spec), operands, gpu, forward=False)


def _of_loss(call: Node) -> tuple[Reductions, OfReductions]:
    """A call of ``fxpass::linear_cross_entropy``, or of the loss of a vocabulary shard."""
    named: Any = call.kwargs
    loss = Spec.parse(named["spec"])
    if named.get("group") is not None:
        loss = loss.of_shard()
    spec = loss.reductions("class_weight" in named)
    read = (*spec.outputs, *spec.total)
    weights = [o.weight for o in read if isinstance(o, Moment) and o.weight is not None]
    return spec, OfReductions(
        x=_operand(named["x"]),
        weight=_operand(named["weight"]),
        bias=_operand(named["bias"]) if "bias" in named else None,
        picks=1 if "pick" in read else None,
        given=tuple(loss.target == "probabilities" and i == 0 for i in sorted(weights)),
        logits="logits" in named or named.get("save_logits", False),
    )


def _of_reductions(call: Node) -> tuple[Reductions, OfReductions]:
    arguments: Any = call.args
    x, weight, bias, scale, picks, given, _, logits, text = arguments
    of_row = None
    if picks is not None:
        of_row = hint(value(picks).shape[1]) if value(picks).dim() == 2 else 1
    return Reductions.parse(text), OfReductions(
        x=_operand(x),
        weight=_operand(weight),
        bias=bias and _operand(bias),
        scaled=scale is not None,
        picks=of_row,
        given=tuple(value(w).dim() == 2 for w in given),
        logits=logits is not None,
    )


def _operand(node: Node) -> Operand:
    tensor = value(node)
    return Operand(tuple(map(hint, tensor.shape)), tensor.dtype)
