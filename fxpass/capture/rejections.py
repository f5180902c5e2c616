"""Why a loss, or a head, is not fused.

In: a region of a Dynamo graph after its heads are fused, and why others are not. Out: a
:class:`Rejection` for every loss with a name that is left, and for every product that looks like a
head::

    %z = linear(%h, %w);  %s = sort(%z, 0);  %loss = cross_entropy(%s[0], %t)
    ->  not fused: train.py:12 loss = ...: %s (sort) (aten.sort sorts rows)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch.fx import Node

from fxpass.capture.heads import (
    Costs,
    columns,
    hidden_of,
    is_product,
    looks_like_a_head,
    takes_softmax,
    too_small,
    widens,
)
from fxpass.capture.slice import Slice
from fxpass.capture.values import PRODUCTS, numel
from fxpass.graph.calls import first_operand
from fxpass.graph.functions import LOSSES, function_of
from fxpass.graph.nodes import NoMatch, is_tensor, nested_graph, value
from fxpass.graph.region import AUTOGRAD_FUNCTIONS, Region
from fxpass.graph.source import call_name, source_line
from fxpass.plan.plan import size

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rejection:
    """A loss, or a head, that is not fused.

    Attributes:
        node: the node at which reading stopped; the graph's output where nothing reads the logits.
        reason: why, as a sentence without its first capital.
        source: the user's line of the loss or of the linear.
        of: the loss or the linear.
    """

    node: Node
    reason: str
    source: str
    of: Node

    @property
    def loss_elsewhere(self) -> bool:
        """Whether it is a head whose logits leave the graph, which has no loss of them."""
        return self.node.op == "output"

    def __str__(self) -> str:
        return f"not fused: {self.source}: {self.reason}"


def rejections_of(
    region: Region,
    reasons: Mapping[Node, NoMatch],
    kept: Mapping[Node, NoMatch],
    least: float,
    fused: bool,
) -> Iterator[Rejection]:
    """The rejections of a region.

    Args:
        region: the region, with what is fused replaced.
        reasons: for products, why they are no heads.
        kept: for heads whose logits exist, why they have to.
        least: the size of logits, in MiB, that are worth an operator.
        fused: whether anything was fused.
    """
    said: set[Node] = set()
    functions = dict(_of_functions(region))
    for node in region.module.graph.nodes:
        if function_of(node) not in LOSSES:
            continue
        product, no = _of_loss(node, {**kept, **reasons}, functions, least)
        if region.call is not None and not region.plain and product is not None:
            what = f"it is inside %{region.call.name} ({call_name(region.call)})"
            reason = f"{what}; of nested graphs, only those of activation checkpoints are fused"
            no = NoMatch(node, reason)
        said |= {product or node, no.node}
        yield Rejection(no.node, no.reason + _advice(no), source_line(node), node)
    for node, name in functions.items():
        if node not in said and takes_softmax(node):
            said.add(node)
            yield Rejection(node, _INSIDE.format(name), source_line(node), node)
    nothing = not (fused or said)
    for product in filter(is_product, region.module.graph.nodes):
        no = reasons.get(product) or _small(product, least)
        if no is None or not said.isdisjoint((product, no.node)):
            continue
        certain = no.node.op == "output" or (nothing and takes_softmax(product))
        if not (certain or looks_like_a_head(product)):
            continue
        told = region.plain and (certain or least > 0)
        if not told or isinstance(no, Costs):
            log.debug("%s: %s", source_line(product), no.reason)
        else:
            yield Rejection(no.node, no.reason, source_line(product), product)


_INSIDE = (
    "its logits are made inside of an autograd.Function (%{}), whose backward is its own: of a "
    "custom function, fxpass fuses what is computed of logits, but not the product that makes them"
)
_COLUMNS = (
    ": one pass over logits has their rows, or their columns; where a loss of the columns has a "
    "product of its own (b @ a.T beside a @ b.T), both fuse"
)


def _advice(no: NoMatch) -> str:
    return _COLUMNS if "softmax works along rows" in no.reason else ""


def _of_functions(region: Region) -> Iterator[tuple[Node, str]]:
    """The calls of custom functions in whose forward a product is, and their names."""
    for node in region.module.graph.nodes:
        body = nested_graph(node.args[0]) if node.target in AUTOGRAD_FUNCTIONS else None
        if body is not None and any(map(is_product, body.graph.nodes)):
            yield node, node.name


def _small(product: Node, least: float) -> NoMatch | None:
    reason = too_small(product, least)
    return Costs(product, reason) if reason else None


def _of_loss(
    loss: Node, reasons: Mapping[Node, NoMatch], functions: Mapping[Node, str], least: float
) -> tuple[Node | None, NoMatch]:
    """The product that makes the logits of a loss, and why they have to exist."""
    try:
        logits = first_operand(loss)
    except NoMatch as no:
        return None, no
    no = NoMatch(logits, "its logits are not computed by a linear")
    todo, seen, wanted = [logits], {logits}, numel(value(logits).shape)
    while todo:
        node = todo.pop()
        if function_of(node) in PRODUCTS:
            if node in reasons:
                return node, reasons[node]
            unknown = NoMatch(node, "what is made of its logits is not known")
            return node, _small(node, least) or unknown
        if node in functions:
            return None, NoMatch(node, _INSIDE.format(functions[node]))
        if node.op not in ("call_function", "call_method"):
            no = NoMatch(node, _not_computed_here(node))
        sources = [n for n in node.all_input_nodes if n not in seen and _is_as_large(n, wanted)]
        todo += reversed(sources)
        seen.update(sources)
    return None, no


def _is_as_large(node: Node, wanted: int) -> bool:
    several = isinstance(node.meta.get("example_value"), tuple | list)
    return several or (is_tensor(node) and numel(value(node).shape) * 4 >= wanted)


def _not_computed_here(node: Node) -> str:
    ended = getattr(node.graph.owning_module, "compile_subgraph_reason", None)
    if node.op == "placeholder" and getattr(ended, "reason", "").startswith("DDPOptimizer"):
        return (
            f"its logits enter the graph as %{node.name}: DistributedDataParallel's splitting put "
            "the linear into another part; compute each loss right after its head, or set "
            "torch._dynamo.config.optimize_ddp = False"
        )
    if node.op == "placeholder":
        return (
            f"its logits enter the graph as %{node.name}: the linear is in another graph, or there "
            "was a graph break between them (TORCH_LOGS=graph_breaks tells where)"
        )
    return f"its logits come from %{node.name} ({node.op}), not from a linear"


# ---------------------------------------------------------------- a loss elsewhere

# What may be done with logits that are returned: a scale, a soft-cap.
_SCALED = {"mul", "div", "add", "sub", "neg", "tanh", "_to_copy", "clone", "alias", "detach"}
_SCALED |= {"view", "_unsafe_view", "slice", "select", "transpose", "permute", "unsqueeze"}
_ELSEWHERE = (
    "the graph returns its logits, {}, with gradients, and has no loss of them: compile the "
    "function that computes the loss, or pass labels to the model"
)
# Outputs of a vocabulary for each hidden value, or in all; a gated MLP has up to seven for each.
_WIDE, _MANY = 7.5, 8192


def leaves_whole(region: Region, node: Node, found: Slice) -> bool:
    """Whether a product that nothing reduces is a head whose loss is computed after the graph: it
    has as many outputs as a vocabulary, and all that is done with them is to return them, scaled or
    soft-capped."""
    ended = getattr(region.module, "compile_subgraph_reason", None)
    if ended is not None and ended.reason.startswith("DDPOptimizer"):
        return False  # the loss is in another part of the graph
    steps = [s for s in found.steps if any(v.of_classes for v in s.values)]
    scaled = all(s.op.overloadpacket.__name__ in _SCALED for s in steps)
    if not (region.outer is None and found.left and scaled and widens(node)):
        return False
    if columns(node) >= _WIDE * hidden_of(node):
        return True
    # a hidden layer is returned by a graph that ends early, or that has nothing else
    early = ended is not None and ended.graph_break
    alone = any(n.op == "placeholder" for n in node.all_input_nodes[:1])
    return columns(node) >= _MANY and not (early or alone)


def elsewhere(node: Node, found: Slice) -> NoMatch | None:
    """Why the logits of such a head are kept, with gradients."""
    if not any(value(n).requires_grad for n in found.left):
        return None
    taken = size(numel(value(node).shape) * value(node).dtype.itemsize)
    return NoMatch(node.graph.output_node(), _ELSEWHERE.format(taken))
