"""Why a loss, or a head, is not fused.

In: a Dynamo graph, before the inner backend compiles it, and then what the pass on the joint graph
says. Out: a :class:`Rejection` for every loss with a name that is left, and for every product that
looks like a head. What the pass says comes first; it does not know of logits that enter the graph,
of nested graphs, and of heads that it does not look at::

    %z = linear(%h, %w);  %s = sort(%z, 0);  %loss = cross_entropy(%s[0], %t)
    ->  not fused: train.py:12 loss = ...: aten.sort at train.py:11 works along rows
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fxpass.graph.calls import first_operand
from fxpass.graph.functions import LOSSES, function_of
from fxpass.graph.nodes import NoMatch, is_tensor, nested_graph
from fxpass.graph.region import AUTOGRAD_FUNCTIONS, Region, regions
from fxpass.graph.source import call_name, source_line
from fxpass.rewrite.heads import (
    elements,
    factors,
    is_multiplied,
    is_product,
    is_reduced,
    takes_softmax,
    too_small,
    widens,
)
from fxpass.rows.backend import Rewritten

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


@dataclass(frozen=True)
class Suspect:
    """A loss, or a head, that may be left.

    Attributes:
        of: the loss or the product.
        name, product: the names of the node, and of the product that makes its logits, in the joint
            graph; empty if there is none.
        node, reason: why it is left, and where, as far as Dynamo's graph shows it.
        wide, small: whether a product has many classes, and whether its logits gain nothing.
    """

    of: Node
    name: str
    product: str
    node: Node
    reason: str = ""
    wide: bool = False
    small: bool = False

    @property
    def is_loss(self) -> bool:
        """Whether it is a loss with a name."""
        return function_of(self.of) in LOSSES


def suspects_of(
    gm: GraphModule, nodes: Mapping[str, Node], returned: Mapping[Node, str], least: float
) -> tuple[Suspect, ...]:
    """The losses with a name of a graph, and the products that look like heads.

    Args:
        gm: the graph.
        nodes: by their names in the joint graph.
        returned: products whose logits are returned, and what to do.
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
                product, at, reason = _of_loss(region, node, least)
                name = names.get(product, "") if product is not None else ""
                found.append(Suspect(node, names[node], name, at, reason))
            elif node in returned:
                found.append(Suspect(node, names[node], names[node], end, returned[node]))
            elif is_product(node) and region.plain and not is_multiplied(region, node):
                wide = widens(node) and is_reduced(node)
                if wide or takes_softmax(node):
                    small = wide and too_small([node], least) is not None
                    of = node, names[node], names[node], node
                    found.append(Suspect(*of, _why(node, least), wide, small))
    return tuple(found)


def rejections_of(suspects: Sequence[Suspect], made: Sequence[Rewritten]) -> Iterator[Rejection]:
    """The rejections of a graph.

    Args:
        suspects: its losses and heads.
        made: what became of its joint graphs; none if a cache had the code and nothing is known of
            it, or where another backend compiles it.
    """
    fused = {name for one in made for name in one.names}
    fused |= {head.name for one in made for head in one.heads}
    declined = [why for one in made for why in one.declined]
    by_name = {why.name: why for why in reversed(declined)}
    said = set[str]()
    for one in (s for s in suspects if s.is_loss and s.name not in fused):
        reason = one.reason
        if one.product in by_name or (one.product and not reason and declined):
            why = by_name.get(one.product, declined[0])
            reason = f"{why.place} {why.reason}".strip()
        if reason or (one.product and made):
            said.add(one.product)
            yield Rejection(one.node, (reason or _UNKNOWN) + _advice(reason), _line(one), one.of)
    nothing = not (fused or said)
    for one in (s for s in suspects if not s.is_loss and s.name not in fused | said):
        reason = one.reason
        returned = one.node.op == "output"
        if one.name in by_name and not returned:
            reason = f"{by_name[one.name].place} {by_name[one.name].reason}".strip()
        if one.small:
            log.debug("%s: %s", _line(one), reason)
        elif reason and (one.wide or nothing or returned):
            yield Rejection(one.node, reason, _line(one), one.of)


_UNKNOWN = "what is made of its logits is not known"
_COLUMNS = (
    ": one pass over logits has their rows, or their columns; where a loss of the columns has a "
    "product of its own (b @ a.T beside a @ b.T), both fuse"
)


def _line(suspect: Suspect) -> str:
    return source_line(suspect.of)


def _advice(reason: str) -> str:
    return _COLUMNS if "softmax" in reason and "works along rows" in reason else ""


def _of_loss(region: Region, loss: Node, least: float) -> tuple[Node | None, Node, str]:
    """The product that makes the logits of a loss; where reading stopped, and why it is left."""
    try:
        logits = first_operand(loss)
    except NoMatch as no:
        return None, no.node, no.reason
    found: tuple[Node | None, Node, str] = None, logits, "its logits are not computed by a linear"
    todo = [(region, logits)]
    seen = {logits}
    wanted = elements(logits)
    while todo:
        around, node = todo.pop()
        if is_product(node):
            return node, node, _inside(around) or _why(node, least)
        outer = _given(around, node)
        if outer is None and node.op not in ("call_function", "call_method"):
            found = None, node, _not_computed_here(node)
        sources = [(around, n) for n in node.all_input_nodes] if outer is None else [outer]
        sources = [(r, n) for r, n in sources if n not in seen and _is_as_large(n, wanted)]
        todo += reversed(sources)
        seen.update(n for _, n in sources)
    return found


def _why(product: Node, least: float) -> str:
    """Why a product is no head, as far as itself shows it."""
    if not factors(product).shared:
        return "its rows have more than one weight, or bias"
    return too_small([product], least) or ""


def _inside(region: Region) -> str:
    """Why what is in a nested graph is left."""
    while region.outer is not None and region.call is not None:
        if not region.plain and region.call.target not in AUTOGRAD_FUNCTIONS:
            what = f"it is inside %{region.call.name} ({call_name(region.call)})"
            nested = "activation checkpoints and custom functions"
            return f"{what}; of nested graphs, only those of {nested} are fused"
        region = region.outer
    return ""


def _given(region: Region, node: Node) -> tuple[Region, Node] | None:
    """The argument of a checkpoint, or a custom function, for an input of its graph."""
    if node.op != "placeholder" or region.call is None or region.outer is None:
        return None
    if not region.plain and region.call.target not in AUTOGRAD_FUNCTIONS:
        return None
    inputs = region.module.graph.find_nodes(op="placeholder")
    bodies = [nested_graph(argument) is not None for argument in region.call.args]
    given = region.call.args[len(bodies) - bodies[::-1].index(True) :]
    place = list(inputs).index(node) - (len(list(inputs)) - len(given))
    outer = given[place] if 0 <= place < len(given) else None
    return (region.outer, outer) if isinstance(outer, Node) else None


def _is_as_large(node: Node, wanted: int) -> bool:
    several = isinstance(node.meta.get("example_value"), tuple | list)
    return several or (is_tensor(node) and elements(node) * 4 >= wanted)


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
