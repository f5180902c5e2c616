"""Decides whether the logits have to exist, from their users other than the losses.

In: a region and its matches. Out: for each match ``never``, ``keep``, ``defer`` or ``drop``, and
the deferred outputs of the graph, with the nodes that compute them. An output can be deferred if
only casts, views and pointwise functions are between the linears and the output, and if these
nodes have the same result when they are recomputed at the end of the graph::

    %logits = linear(%h, %w);  %float = float(%logits);  return (%loss, %float)

    deferred = {%float: (%logits, %float)}
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch.fx import Node

from fxpass.graph import hazards
from fxpass.graph.calls import storage, written
from fxpass.graph.functions import CASTS, function_of, is_in_place, out_of_place, reads_values
from fxpass.graph.nodes import NoMatch, is_tensor, value
from fxpass.graph.placements import is_dtensor, is_gathered
from fxpass.graph.region import Region
from fxpass.graph.source import call_name, source_line
from fxpass.match.chain_node import STACKS
from fxpass.match.linears import LINEARS, linear_of
from fxpass.match.losses import LOG_SOFTMAXES
from fxpass.match.modes import Mode, cuts_gradients, modes_of
from fxpass.match.pointwise import POINTWISE
from fxpass.match.views import VIEWS
from fxpass.settings import Settings

if TYPE_CHECKING:
    from fxpass.match.match import Match

_COMPUTABLE = CASTS | STACKS | LINEARS.keys() | VIEWS.keys() | POINTWISE.keys()


class LogitUsers:
    """The decisions for all matches of one region; see the module."""

    def __init__(self, region: Region, matches: list[Match], settings: Settings) -> None:
        self._mode = _mode(region, matches, settings)
        self._inside = {n for m in matches for n in (*m.chain.nodes, *m.loss.inner, m.loss.node)}
        self._losses = {m.loss.node for m in matches}
        self._roots = self._losses | {n for m in matches for n in m.loss.inner}
        self._below = {m.chain.linear.node: self._reached(m.chain.linear.node) for m in matches}
        computed = set().union(*self._below.values()) if matches else set()
        output = region.module.graph.output_node()
        self.deferred: dict[Node, tuple[Node, ...]] = {}
        if self._mode != "keep":
            drop = self._mode == "drop"
            modes = modes_of(region.module.graph)
            for node in output.all_input_nodes:
                nodes = _between(node, computed, drop) if node in computed else ()
                if nodes and (drop or _computable_at(output, node, nodes, modes)):
                    casts = [n for n in _weight_casts(nodes) if drop or _movable(n, output)]
                    self.deferred[node] = tuple(sorted((*casts, *nodes)))
        while needed := {n for node in self.deferred if (n := self._needed_with(node)) is not None}:
            self.deferred = {k: v for k, v in self.deferred.items() if k not in needed}

    def logits_mode(self, match: Match) -> str:
        """``never``, ``keep``, ``defer`` or ``drop``: the mode of one match's logits."""
        linear = match.chain.linear.node
        if self._reader(linear) is not None:
            return "keep"
        return self._mode if any(linear in nodes for nodes in self.deferred.values()) else "never"

    def check_inner(self, match: Match) -> None:
        """``NoMatch`` if a node outside the loss reads its log-probabilities."""
        chain = match.chain.nodes
        starts = (i for i, n in enumerate(chain) if function_of(n) in LOG_SOFTMAXES)
        start = next(starts, len(chain))
        inner = [node for node in match.loss.inner if node not in self._losses]
        for node in (*chain[start:], *inner):
            for user in node.users:
                if user not in self._inside and reads_values(user, node):
                    raise NoMatch(
                        user,
                        f"%{node.name} ({call_name(node)}) is also read by %{user.name} "
                        f"({call_name(user)}, {source_line(user)}), so it has to exist",
                    )

    def _reached(self, linear: Node) -> set[Node]:
        """The linear and all nodes computed from it, except through a loss."""
        reached, todo = {linear}, [linear]
        while todo:
            node = todo.pop()
            for user in node.users:
                ends = user in self._roots or user.op == "output" or not reads_values(user, node)
                if user not in reached and not ends:
                    reached.add(user)
                    todo.append(user)
        return reached

    def _reader(self, linear: Node) -> Node | None:
        """A user for which the logits of ``linear`` have to exist, or None."""
        lazy = {n for nodes in self.deferred.values() for n in nodes}
        allowed = self._inside | lazy
        for node in self._below[linear]:
            if node not in allowed:
                continue  # the loop finds the user at its producer
            for user in node.users:
                if user in allowed or not reads_values(user, node):
                    continue
                if user.op != "output" or node not in self.deferred:
                    return user
        return None

    def _needed_with(self, output: Node) -> Node | None:
        """``output`` if the logits of one of its linears have to exist anyway, else None."""
        linears = [n for n in self.deferred[output] if n in self._below]
        return output if any(self._reader(linear) is not None for linear in linears) else None


def _mode(region: Region, matches: Iterable[Match], settings: Settings) -> str:
    if region.outer is not None:
        return "keep"  # nodes of the outer graph read the outputs of a checkpoint
    if settings.logits != "auto":
        return settings.logits
    return "defer" if any(m.spec.gradients for m in matches) else "keep"


def _between(output: Node, computed: set[Node], drop: bool) -> tuple[Node, ...]:
    """The nodes from the linears to an output in the graph's order; empty if it is not deferred.

    DTensors are not deferred: recomputing them may need all ranks. An output can be dropped, which
    recomputes nothing, if its DTensors are gathered to plain tensors.
    """
    found, todo = {output}, [output]
    while todo:
        node = todo.pop()
        if not is_tensor(node) or not value(node).is_floating_point():
            return ()
        if is_dtensor(value(node)) and (not drop or node is output):
            return ()
        function, changed = function_of(node), written(node)
        if not _is_computable(function) and not (drop and is_gathered(node)):
            return ()
        if changed and not (is_in_place(function) and computed.issuperset(changed)):
            return ()
        for operand in node.all_input_nodes:
            if operand in computed and operand not in found:
                found.add(operand)
                todo.append(operand)
    return tuple(sorted(found))


def _is_computable(function: str) -> bool:
    return function in _COMPUTABLE or out_of_place(function) in POINTWISE


# ---------------------------------------------------------------- recomputed later, the same?


def _computable_at(
    end: Node, output: Node, nodes: tuple[Node, ...], modes: dict[Node, Mode]
) -> bool:
    """Whether ``nodes``, recomputed at the graph's end without autocast, give the same values and
    gradients as ``output``."""
    memory = storage(output)
    if any(storage(n) == memory for n in end.all_input_nodes if is_tensor(n) and n is not output):
        return False  # the outputs are aliases: a write to one changes the other
    return (
        memory is not None
        and hazards.hazard(nodes, end) is None
        and all(_has_dtype_of_an_operand(node) for node in nodes)
        and not (value(output).requires_grad and any(cuts_gradients(n, modes) for n in nodes))
    )


def _has_dtype_of_an_operand(node: Node) -> bool:
    """False where autocast up-casts a pointwise function, for which the graph has no node."""
    if function_of(node) in CASTS or function_of(node) in LINEARS:
        return True
    return value(node).dtype in {value(n).dtype for n in node.all_input_nodes if is_tensor(n)}


def _weight_casts(nodes: Iterable[Node]) -> list[Node]:
    """Casts of weights and biases that are inputs: recomputed later, they save memory."""
    linears = [linear_of(node) for node in nodes]
    weights = [n for linear in linears if linear for n in (linear.weight, linear.bias) if n]
    casts = [weight for weight in dict.fromkeys(weights) if function_of(weight) in CASTS]
    return [c for c in casts if [n.op for n in c.all_input_nodes] == ["placeholder"]]


def _movable(cast: Node, end: Node) -> bool:
    """Whether a cast of an input has the same result at the graph's end."""
    return hazards.hazard((cast,), end) is None
