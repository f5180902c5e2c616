"""Rejections: the reasons why losses and heads are not fused.

In: a Dynamo graph, before the inner backend compiles it, and then the pass's records of the joint
graphs. Out: a :class:`Rejection` for every loss with a name that is not fused, and for every such
product that looks like a head. The pass's reason comes first; the pass does not see logits that
enter the graph, nested graphs, and heads that are too small::

    %z = linear(%h, %w);  %s = sort(%z, 0);  %loss = cross_entropy(%s[0], %t)
    ->  not fused: train.py:12 loss = ...: aten.sort at train.py:11 works along rows
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from fxpass import messages
from fxpass.graph.calls import first_operand
from fxpass.graph.functions import LOSSES, function_of
from fxpass.graph.nodes import NoMatch, is_tensor, nested_graph
from fxpass.graph.region import AUTOGRAD_FUNCTIONS, Region, regions
from fxpass.graph.source import call_name, source_line
from fxpass.rewrite.heads import (
    element_count,
    has_head_shape,
    has_softmax,
    is_multiplied,
    is_product,
    is_reduced,
    product_operands,
    why_not_worth,
)
from fxpass.rows.backend import Rewritten

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rejection:
    """A loss, or a head, that is not fused.

    Attributes:
        node: the node that is the reason; the graph's output where nothing reads the logits.
        reason: a sentence without its first capital.
        source: the user's line of the loss or of the linear.
        of: the loss or the linear.
    """

    node: Node
    reason: str
    source: str
    of: Node

    @property
    def loss_elsewhere(self) -> bool:
        """True for a head whose logits leave a graph that has no loss of them."""
        return self.node.op == "output"

    def __str__(self) -> str:
        return f"not fused: {self.source}: {self.reason}"


@dataclass(frozen=True)
class Suspect:
    """A loss, or a head, that the pass may not fuse.

    Attributes:
        of: the loss or the product.
        name: the name of ``of`` in the joint graph.
        product: the name there of the product that makes the logits; empty if there is none.
        node, reason: as of :class:`Rejection`, as far as Dynamo's graph shows it; the reason may be
            empty.
        has_head_shape: whether ``of`` is a product with many classes, which the graph reduces.
        small: whether its logits are not worth a loop.
    """

    of: Node
    name: str
    product: str
    node: Node
    reason: str = ""
    has_head_shape: bool = False
    small: bool = False

    @property
    def is_loss(self) -> bool:
        """True for a loss with a name."""
        return function_of(self.of) in LOSSES


def suspects_of(
    gm: GraphModule, nodes: Mapping[str, Node], returned: Mapping[Node, str], least: float
) -> tuple[Suspect, ...]:
    """The losses with a name of a graph, and the products that look like heads.

    Args:
        gm: the graph.
        nodes: the graph's nodes, by their names in the joint graph.
        returned: as of :class:`fxpass.rewrite.defer.DeferredOutputs`.
        least: the size of logits, in MiB, that are worth a loop.
    """
    names = {node: name for name, node in nodes.items()}
    end = gm.graph.output_node()
    found: list[Suspect] = []
    for region in regions(gm):
        if region.backward:
            continue
        for node in region.module.graph.nodes:
            if function_of(node) in LOSSES:
                found.append(_suspected_loss(region, node, names, least))
            elif node in returned:
                found.append(Suspect(node, names[node], names[node], end, returned[node]))
            elif is_product(node) and region.plain and not is_multiplied(region, node):
                head = has_head_shape(node) and is_reduced(node)
                if head or has_softmax(node):
                    small = head and why_not_worth([node], least) is not None
                    reason = _reason_of_product(node, least)
                    name = names[node]
                    found.append(Suspect(node, name, name, node, reason, head, small))
    return tuple(found)


def rejections_of(suspects: Sequence[Suspect], made: Sequence[Rewritten]) -> Iterator[Rejection]:
    """The rejections of a graph.

    Args:
        suspects: its losses and heads.
        made: the records of its joint graphs; none if another backend compiles it, or if a cache
            has the code and no record of it.
    """
    fused = {name for joint in made for name in joint.names}
    fused |= {head.name for joint in made for head in joint.heads}
    declined = [why for joint in made for why in joint.declined]
    by_name = {why.name: why for why in reversed(declined)}
    rejected = set[str]()
    for loss in (s for s in suspects if s.is_loss and s.name not in fused):
        reason = loss.reason
        # the pass takes a product with several weights for no head, or for one of its columns
        explained = loss.product in by_name and reason != messages.SEVERAL_WEIGHTS
        if explained or (loss.product and not reason and declined):
            why = by_name.get(loss.product, declined[0])
            reason = f"{why.place} {why.reason}".strip()
        if reason or (loss.product and made):
            rejected.add(loss.product)
            reason = reason or messages.UNKNOWN_READER
            yield Rejection(loss.node, reason, source_line(loss.of), loss.of)
    nothing = not (fused or rejected)
    for head in (s for s in suspects if not s.is_loss and s.name not in fused | rejected):
        reason = head.reason
        line = source_line(head.of)
        returned = head.node.op == "output"
        if (why := by_name.get(head.name) or by_name.get("")) and not returned:
            reason = f"{why.place} {why.reason}".strip()
        if head.small:
            log.debug("%s: %s", line, reason)
        elif reason and (head.has_head_shape or nothing or returned):
            yield Rejection(head.node, reason, line, head.of)


def _suspected_loss(region: Region, loss: Node, names: Mapping[Node, str], least: float) -> Suspect:
    """A loss with the product that makes its logits, or the node at which the search ended."""
    suspect = Suspect(loss, names[loss], "", loss)
    try:
        logits = first_operand(loss)
    except NoMatch as no:
        return replace(suspect, node=no.node, reason=no.reason)
    suspect = replace(suspect, node=logits, reason=messages.NOT_OF_LINEAR)
    todo = [(region, logits)]
    seen = {logits}
    count = element_count(logits)
    while todo:
        around, node = todo.pop()
        if is_product(node):
            reason = _reason_of_nesting(around) or _reason_of_product(node, least)
            return replace(suspect, product=names.get(node, ""), node=node, reason=reason)
        outer = _outer_argument(around, node)
        if outer is None and node.op not in ("call_function", "call_method"):
            suspect = replace(suspect, node=node, reason=_reason_of_input(node))
        sources = [(around, n) for n in node.all_input_nodes] if outer is None else [outer]
        sources = [(r, n) for r, n in sources if n not in seen and _is_as_large(n, count)]
        todo += reversed(sources)
        seen.update(n for _, n in sources)
    return suspect


def _reason_of_product(product: Node, least: float) -> str:
    """The reason why a product is no head, as far as the product shows it."""
    if not product_operands(product).shared:
        return messages.SEVERAL_WEIGHTS
    return why_not_worth([product], least) or ""


def _reason_of_nesting(region: Region) -> str:
    """The reason why a loss or head in a nested graph is not fused; empty if it may be."""
    while region.outer is not None and region.call is not None:
        if not region.plain and region.call.target not in AUTOGRAD_FUNCTIONS:
            return messages.NESTED.format(name=region.call.name, call=call_name(region.call))
        region = region.outer
    return ""


def _outer_argument(region: Region, node: Node) -> tuple[Region, Node] | None:
    """The argument of a checkpoint, or a custom function, for an input of its graph."""
    if node.op != "placeholder" or region.call is None or region.outer is None:
        return None
    if not region.plain and region.call.target not in AUTOGRAD_FUNCTIONS:
        return None
    inputs = list(region.module.graph.find_nodes(op="placeholder"))
    bodies = [nested_graph(argument) is not None for argument in region.call.args]
    given = region.call.args[len(bodies) - bodies[::-1].index(True) :]
    place = inputs.index(node) - (len(inputs) - len(given))
    outer = given[place] if 0 <= place < len(given) else None
    return (region.outer, outer) if isinstance(outer, Node) else None


def _is_as_large(node: Node, count: int) -> bool:
    several = isinstance(node.meta.get("example_value"), tuple | list)
    return several or (is_tensor(node) and element_count(node) * 4 >= count)


def _reason_of_input(node: Node) -> str:
    ended = getattr(node.graph.owning_module, "compile_subgraph_reason", None)
    if node.op == "placeholder" and getattr(ended, "reason", "").startswith("DDPOptimizer"):
        return messages.SPLIT_BY_DDP.format(name=node.name)
    if node.op == "placeholder":
        return messages.ENTERS.format(name=node.name)
    return messages.NO_LINEAR.format(name=node.name, op=node.op)
