"""The forward flow from a head: what each node behind a linear computes of its logits.

In: a region. Out: for each linear, the reductions over the classes that the program computes, and
the nodes at which the reading stopped. A node has one of two values:

- :class:`Classes`, a tensor with a class dimension: an expression of the raw logit ``z``, of the
  log-softmax ``log_k`` and the lse of a *base* (what a softmax was taken of), of symbols of tensors
  with one value per row or per class, and of given values.
- rows: an expression of outputs of :mod:`fxpass.spec.reductions`. Everything after it stays in the
  graph.

For example, ``p = z.softmax(-1)`` is exp(log_0), and the sum of ``p * z`` over the classes is that
of the function exp(l) * z::

    %p = softmax(%z, -1);  %lse = logsumexp(%z, -1);  %e = %lse - (%p * %z).sum(-1)
    ->  lse_0 - sum(z*exp(l)): the entropy
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpass.graph.calls import first_operand, is_cut, written
from fxpass.graph.functions import CASTS, function_of, is_in_place, out_of_place, reads_values
from fxpass.graph.hazards import Writers
from fxpass.graph.nodes import NoMatch, is_tensor, value
from fxpass.graph.region import Region
from fxpass.lower.pointwise import POINTWISE
from fxpass.match.classes import Classes, Flow
from fxpass.match.elementwise import classes_of, note_write, pointwise
from fxpass.match.linears import Linear
from fxpass.match.maxima import of_pair
from fxpass.match.modes import Mode, cuts_gradients
from fxpass.match.operands import keeps_order, operand_of
from fxpass.match.reductions import REDUCTIONS, of_loss
from fxpass.spec.expression import Z


def flow_of(
    linear: Linear,
    region: Region,
    modes: dict[Node, Mode],
    writers: Writers,
    trained: Collection[Node],
) -> Flow:
    """Reads all that a region computes of a linear's output. The others are those of its nodes:
    their modes, those that write, and those that gradients may reach.

    A reader that is not understood needs the logits: it is one of the flow's ``stops``.

    Raises:
        NoMatch: it may also write to them, and another node reads them after that.
    """
    flow = Flow(linear, region, writers, trained)
    flow.classes[linear.node] = Classes((), linear.dim, Z)
    end: NoMatch | None = None
    noted = (flow.classes, flow.pairs, flow.rows, flow.cut)
    readers = set(linear.node.users)
    for node in linear.node.graph.nodes:
        if node not in readers:
            continue
        try:
            if _follow(flow, node, modes) and end is not None:
                raise end
        except (NoMatch, GuardOnDataDependentSymNode) as error:
            if error is end:
                raise
            no = error if isinstance(error, NoMatch) else _of_data(node)
            flow.stops.append(no)
            end = no if written(node) else end
        if any(node in table for table in noted):
            readers.update(node.users)
    _drop_unread(flow)
    return flow


def _of_data(node: Node) -> NoMatch:
    """Why a node is not read whose sizes are those of ``nonzero``, or of a mask."""
    return NoMatch.at(node, "has sizes that depend on data")


def _follow(flow: Flow, node: Node, modes: dict[Node, Mode]) -> bool:
    """Notes what a node computes; whether it reads logits that were noted before."""
    read = [n for n in node.all_input_nodes if n in flow.classes and reads_values(node, n)]
    pairs = [n for n in node.all_input_nodes if n in flow.pairs]
    if node.op == "output":
        flow.left = tuple(read)
        return False
    if read:
        _read(flow, node, modes)
    elif pairs and function_of(pairs[0]) == "nll_loss_forward":
        of_loss(flow, node)
    elif pairs:
        of_pair(flow, node)
    elif any(n in flow.rows or n in flow.cut for n in node.all_input_nodes):
        _same_row(flow, node)
    return bool(read or pairs)


def _drop_unread(flow: Flow) -> None:
    """Notes the reductions that only tensors with classes read: the lse in ``z - lse``."""
    operands = set(flow.tensors.values())
    nodes = {*flow.rows, *flow.cut, *(r.node for r in flow.reductions)} - operands
    readers = set(flow.classes)
    for node in sorted(nodes, reverse=True):
        if node.users and readers.issuperset(node.users):
            flow.unread.add(node)
            readers.add(node)
    flow.reductions = [r for r in flow.reductions if r.node not in flow.unread]


def _read(flow: Flow, node: Node, modes: dict[Node, Mode]) -> None:
    function = function_of(node)
    if is_in_place(function) or (written(node) and function in POINTWISE):
        if cuts_gradients(node, modes):
            raise NoMatch.at(node, "writes without gradients")
        found = pointwise(flow, node, out_of_place(function))
        note_write(flow, node, found)
        flow.classes[node] = found
        return
    if written(node):
        raise NoMatch.at(node, "may write to the logits")
    if function == "nll_loss_forward":
        flow.pairs[node] = operand_of(flow, node)
        return
    reader = REDUCTIONS.get(function)
    if reader is not None:
        reader(flow, node)
        if node not in flow.classes:  # else it is a view
            return
    found = flow.classes[node] if reader is not None else classes_of(flow, node, function)
    if cuts_gradients(node, modes) and not _is_operand(node, function):
        found = replace(found, detached=True)
    elif value(node).requires_grad and found.detached:
        raise NoMatch.at(node, "has a gradient that its operands do not have")
    flow.classes[node] = found


def _is_operand(node: Node, function: str) -> bool:
    """Whether a cast returns its operand, with the gradients that it has."""
    same = value(node).dtype == value(first_operand(node)).dtype
    return same and (function in CASTS or function == "contiguous") and value(node).requires_grad


# ---------------------------------------------------------------- rows that stay rows


def _same_row(flow: Flow, node: Node) -> None:
    """A reshaped row has the value of the row."""
    if keeps_order(node) and is_tensor(node) and value(node).is_floating_point():
        operand = first_operand(node)
        same = value(node).requires_grad == value(operand).requires_grad
        same = same and not flow.writes([operand], operand, node)
        for known in (flow.rows, flow.cut):
            if operand in known and same:
                (flow.cut if is_cut(node) else known)[node] = known[operand]
