"""Heads: linears whose large outputs the program reduces over the classes.

In: a region. Out: a :class:`Head` for every linear whose reductions are fused, the outputs of the
graph that are deferred, and for every other linear why it is none. Logits that a node of the graph
reads in a way that is not understood, or that are an output that cannot be deferred, are kept: the
operator reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import sympy
from torch.fx import Node

from fxpass.graph import hazards
from fxpass.graph.functions import function_of, reads_values
from fxpass.graph.nodes import NoMatch, hint, is_tensor, value
from fxpass.graph.region import Region
from fxpass.graph.source import source_line
from fxpass.match import profitability
from fxpass.match.classes import Flow
from fxpass.match.edits import symbols_of
from fxpass.match.flow import flow_of
from fxpass.match.head import Head
from fxpass.match.join import Options, calls_of
from fxpass.match.leaving import Deferred, deferred_outputs, is_computable
from fxpass.match.linears import LINEARS, Linear, linear_of
from fxpass.match.modes import Mode, gradients_reach, modes_of
from fxpass.match.outputs import Summed
from fxpass.match.profitability import bytes_of
from fxpass.settings import Settings
from fxpass.spec.expression import L, Z
from fxpass.spec.functions import FUNCTIONS

log = logging.getLogger(__name__)


@dataclass
class Heads:
    """The heads of a region.

    Attributes:
        fused: the heads, in the graph's order.
        deferred: outputs of the graph, each with the nodes that compute it.
        reasons: for other linears, why they are not fused.
        costs: those of them that would cost more than they save.
        stops: nodes that read logits in a way that is not understood, and why.
        softmaxes: linears of whose outputs the program takes a softmax, or its logarithm.
    """

    fused: list[Head] = field(default_factory=list)
    deferred: Deferred = field(default_factory=dict)
    reasons: dict[Node, NoMatch] = field(default_factory=dict)
    costs: set[Node] = field(default_factory=set)
    stops: dict[Node, NoMatch] = field(default_factory=dict)
    softmaxes: set[Node] = field(default_factory=set)

    @contextmanager
    def reading(self, linear: Node) -> Iterator[None]:
        """Notes why a linear is not fused, if its reading raises."""
        try:
            yield
        except NoMatch as no:
            self.reasons[linear] = no
        except Exception as error:
            # the graph has not changed yet: an unforeseen program runs without the rewrite
            log.warning("%s: reading the graph failed", source_line(linear), exc_info=True)
            reason = f"fxpass failed to read it, please report this: {error!r}"
            self.reasons[linear] = NoMatch(linear, reason)


def heads_of(region: Region, settings: Settings) -> Heads:
    """Reads all linears of a region, and decides which are fused."""
    modes = modes_of(region)
    found = Heads()
    flows = list(_owned(_flows(region, modes, settings, found), found))
    while True:
        found.deferred = _deferred(region, flows, modes, settings)
        found.fused = list(_decided(flows, modes, settings, found))
        if len(found.fused) == len(flows):
            return found
        # the logits of a rejected head have to exist: decide again
        flows = [head.flow for head in found.fused]


def _flows(region: Region, modes: dict[Node, Mode], settings: Settings, found: Heads) -> list[Flow]:
    """The flows of large linears with reductions that are more than sums of logits."""
    flows: list[Flow] = []
    writers = hazards.writers_in(region.module.graph)
    trained = gradients_reach(region.module.graph, writers)
    for node in region.module.graph.nodes:
        if function_of(node) not in LINEARS:
            continue
        with found.reading(node):
            linear = linear_of(node)
            if linear is None or not is_tensor(node):
                continue
            if reason := profitability.too_small(linear, settings.min_logits_mb):
                found.costs.add(node)
                raise NoMatch(node, reason)
            flow = flow_of(linear, region, modes, writers, trained)
            found.stops |= {no.node: no for no in flow.stops}
            logs = {base.log for base in flow.bases}
            if any(logs & known.expr.free_symbols for known in flow.classes.values()):
                found.softmaxes.add(node)
            if _reduces_classes(flow):
                flows.append(flow)
            elif flow.stops and getattr(flow.stops[0].node.target, "namespace", "") != "fxpass":
                found.reasons[node] = flow.stops[0]
            elif _leaves_without_a_loss(flow):
                raise NoMatch(node.graph.output_node(), _LOSS_ELSEWHERE.format(bytes_of(linear)))
    return flows


_LOSS_ELSEWHERE = (
    "the graph returns its logits, {}, with gradients, and has no loss of them: compile the "
    "function that computes the loss, or pass labels to the model"
)


def _leaves_without_a_loss(flow: Flow) -> bool:
    """Whether the outputs of a linear are logits, as far as a graph shows, whose loss is computed
    after it: all that is done with them is to return them, scaled or soft-capped.

    The outputs of a hidden layer are returned by a graph that ends early, or has nothing else."""
    linear = flow.linear
    ended = getattr(flow.region.module, "compile_subgraph_reason", None)
    if ended is not None and (ended.graph_break or ended.reason.startswith("DDPOptimizer")):
        return False
    left = [flow.classes[node].expr for node in flow.left if node in flow.classes]
    called = {type(function) for expr in left for function in expr.atoms(sympy.Function)}
    return (
        bool(left)
        and not flow.reductions
        and flow.region.outer is None
        and any(value(node).requires_grad for node in flow.left)
        and linear.x.op != "placeholder"
        and called <= {FUNCTIONS["tanh"].symbolic}
        and _widens(linear)
    )


def _reduces_classes(flow: Flow) -> bool:
    """Whether a reduction is more than a sum of functions of one output, as a mean of hidden
    values, or of its square error, is."""
    read = {s for reduced in flow.reductions for s in reduced.symbols if s in flow.outputs}
    for base, output in map(flow.outputs.__getitem__, read):
        if not isinstance(output, Summed) or output.function.has(L):
            return True
        if symbols_of(base.transform) != {Z} and not base.transform.is_polynomial(Z):
            return True
    return False


def _owned(flows: Collection[Flow], found: Heads) -> Iterable[Flow]:
    """The flows, where a reduction that reads the logits of several heads is one of one head, and
    stops the others: of a student, not of its teacher, and else of the last one."""
    owners: dict[Node, Flow] = {}
    for flow in flows:
        for reduced in flow.reductions:
            owner = owners.get(reduced.node)
            if owner is None or _trains(flow) or not _trains(owner):
                owners[reduced.node] = flow
    for flow in flows:
        for reduced in [r for r in flow.reductions if owners[r.node] is not flow]:
            other = owners[reduced.node].linear.node
            no = NoMatch.at(reduced.node, f"is fused with the head %{other.name}")
            flow.stops.append(no)
            flow.reductions.remove(reduced)
        if flow.reductions:
            yield flow
        else:
            found.reasons[flow.linear.node] = flow.stops[-1]


def _trains(flow: Flow) -> bool:
    return value(flow.linear.node).requires_grad


def _deferred(
    region: Region, flows: Collection[Flow], modes: dict[Node, Mode], settings: Settings
) -> Deferred:
    """The deferred outputs: those of heads whose logits do not have to exist anyway."""
    if _mode(flows, settings) == "keep":
        return {}
    inside = set().union(*(flow.inside for flow in flows)) if flows else set()
    found = dict(deferred_outputs(region, inside, modes, drop=settings.logits == "drop"))
    while True:
        free = {f.linear.node for f in flows if not _is_kept(f, found)}
        left = {
            output: nodes
            for output, nodes in found.items()
            if all(node in free for node in nodes if function_of(node) in LINEARS)
        }
        if left == found:
            return found
        found = left


def _mode(flows: Iterable[Flow], settings: Settings) -> str:
    """``keep``, ``defer`` or ``drop``: what becomes of logits that are outputs."""
    if settings.logits != "auto":
        return settings.logits
    trained = (value(r.node).requires_grad for flow in flows for r in flow.reductions)
    return "defer" if any(trained) else "keep"


def _is_kept(flow: Flow, deferred: Deferred) -> bool:
    return bool(flow.stops) or any(node not in deferred for node in flow.left)


def _decided(
    flows: Collection[Flow], modes: dict[Node, Mode], settings: Settings, found: Heads
) -> Iterable[Head]:
    """The heads of flows, without those that cannot be fused, or cost more than they save."""
    made: list[Head] = []
    for flow in flows:
        kept = _is_kept(flow, found.deferred)
        mode = "keep" if kept else _mode(flows, settings) if flow.left else "never"
        with found.reading(flow.linear.node):
            if kept:
                _check_kept(flow, settings.min_logits_mb)
                # the program may compare others with the logits, bit by bit
                flow.reductions = [r for r in flow.reductions if r.loss is not None]
            made.append(Head(flow, calls_of(flow, Options(modes, settings, kept)), mode))
    for head in made:
        linear = head.flow.linear
        others = profitability.others(head, made)
        with found.reading(linear.node):
            if others:
                options = Options(modes, settings, head.logits_mode == "keep", others)
                head = replace(head, calls=calls_of(head.flow, options))
            for rule in profitability.RULES:
                if reason := rule(head, made, settings.min_logits_mb):
                    found.costs.add(linear.node)
                    raise NoMatch(linear.node, reason)
            yield head


def _check_kept(flow: Flow, least: float) -> None:
    """``NoMatch`` if fusing the reductions of logits that exist gains nothing."""
    why = flow.stops[0] if flow.stops else None
    if not any(r.loss for r in flow.reductions):
        raise why or NoMatch(flow.left[0], "the logits are an output of the graph")
    trained = any(value(r.node).requires_grad for r in flow.reductions)
    if least and trained and not hazards.leaves(flow.linear.node):
        reason = "another node of the graph reads its logits, so they are saved for backward anyway"
        raise NoMatch(why.node if why else flow.left[0], f"{reason} ({profitability.FUSES_ALL})")


def looks_like_a_head(node: Node) -> bool:
    """Whether a linear has more outputs than inputs, and the graph computes more than functions of
    one output from them, but no product, as from those of a hidden layer."""
    try:
        linear = linear_of(node)
    except NoMatch:
        return False  # a product that is read as no linear, such as attention by einsum
    if linear is None or not _widens(linear):
        return False
    found, todo = {node}, [node]
    while todo:
        read = todo.pop()
        users = [user for user in read.users if user not in found and reads_values(user, read)]
        if any(function_of(user) in LINEARS for user in users):
            return False
        found.update(users)
        todo += users
    return not all(user.op == "output" or is_computable(function_of(user)) for user in found)


def _widens(linear: Linear) -> bool:
    """Whether a linear has as many outputs as a head, and more than inputs."""
    v = hint(value(linear.node).shape[linear.dim])
    return v > hint(value(linear.x).shape[-1]) and v >= profitability.LEAST_CLASSES
