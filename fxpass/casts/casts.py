"""Explicit casts: the dtypes that autocast would have used, written into the graph.

In: a graph, Dynamo's or AOTAutograd's. Out: a :class:`Cast` for each cast that was put in. An
operation of :mod:`fxpass.casts.rules` whose operands are of unlike dtypes, and which no autocast
covers, would raise when it runs. It gets visible casts instead::

    %y: bf16 = matmul(%h, %w)     ->     %to: bf16 = to(%w, bfloat16)
                                         %y: bf16 = matmul(%h, %to)

The result has the dtype that the graph was traced with, so that whatever comes after it means what
it meant before. A graph without such a node is not touched.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._dynamo.utils import counters
from torch.fx import Graph, Node

from fxpass.casts.autocast import autocast_dtype, covers
from fxpass.casts.rules import Rule, rule_of
from fxpass.graph.region import Region
from fxpass.graph.source import call_name, source_line
from fxpass.spec.dtypes import agreed, short

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cast:
    """One cast that was put in: which value, from and to which dtype, and the user's line."""

    operand: str
    old: torch.dtype
    new: torch.dtype
    source: str


def cast_lines(casts: Sequence[Cast]) -> list[str]:
    """Casts as text, one line for each place of the user's program and pair of dtypes."""
    places: dict[tuple[str, str], list[str]] = {}
    for made in casts:
        change = f"{short(made.old)} -> {short(made.new)}"
        places.setdefault((change, made.source), []).append(f"%{made.operand}")
    return [
        f"cast: {_some(operands)} {change}: {source}"
        for (change, source), operands in places.items()
    ]


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


_SHOWN = 3  # an encoder layer has twelve parameters

# What was logged in this process: a graph that is compiled again has the same casts again.
_logged: set[str] = set()


def note(casts: Sequence[Cast]) -> None:
    """Counts casts and logs them: at INFO the first time, at DEBUG when they come again."""
    counters["fusedce"]["casts"] += len(casts)
    for line in cast_lines(casts):
        log.log(logging.DEBUG if line in _logged else logging.INFO, "%s", line)
        _logged.add(line)


@dataclass(frozen=True)
class Dialect:
    """How a kind of graph writes a cast.

    Attributes:
        key: of ``node.meta``, where example values are.
        cast: makes the node in a graph: graph, operand, dtype.
    """

    key: str
    cast: Callable[[Graph, Node, torch.dtype], Node]

    def make(self, graph: Graph, operand: Node, dtype: torch.dtype, site: Node) -> Node:
        """``operand`` in ``dtype``, at the graph's insertion point, with the meta of ``site``."""
        node = self.cast(graph, operand, dtype)
        # AOT's partitioner wants what it noted on the site: forward or backward, recompute or not
        node.meta = {k: v for k, v in site.meta.items() if k != "tensor_meta"}
        node.meta[self.key] = operand.meta[self.key].to(dtype)
        return node


DYNAMO = Dialect("example_value", lambda graph, x, dtype: graph.call_method("to", (x, dtype)))
AOT = Dialect(
    "val",
    lambda graph, x, dtype: graph.call_function(
        torch.ops.prims.convert_element_type.default, (x, dtype)
    ),
)


def cast(graph: Graph, operand: Node, dtype: torch.dtype, site: Node) -> tuple[Node, Cast | None]:
    """``operand`` of a Dynamo graph in ``dtype``, for use at the graph's insertion point.

    Returns the operand itself and no record where it has the dtype already; else a visible ``.to``
    node with the stack trace of ``site``, whose gradient comes back in the operand's own dtype.
    """
    old = operand.meta[DYNAMO.key].dtype
    if old == dtype:
        return operand, None
    node = DYNAMO.make(graph, operand, dtype, site)
    return node, Cast(operand.name, old, dtype, source_line(site))


def cast_region(region: Region, mixed_dtypes: str) -> list[Cast]:
    """Puts casts into one region of a Dynamo graph.

    Raises:
        MixedDtypeError: see :func:`fxpass.spec.dtypes.agreed`.
    """

    def autocast(node: Node, rule: Rule, device: torch.device) -> bool:
        in_force = autocast_dtype(region, node, device) is not None
        return in_force and covers(rule.overload(node), device)

    casts = _cast_graph(region.module.graph, DYNAMO, autocast, mixed_dtypes)
    if casts:
        region.module.recompile()
    return casts


def cast_aot_graph(graph: Graph, mixed_dtypes: str) -> list[Cast]:
    """The same for a joint, forward or backward graph of AOTAutograd, where autocast is no more.

    Raises:
        MixedDtypeError: see :func:`fxpass.spec.dtypes.agreed`.
    """
    return _cast_graph(graph, AOT, lambda node, rule, device: False, mixed_dtypes)


def _cast_graph(
    graph: Graph,
    dialect: Dialect,
    autocast: Callable[[Node, Rule, torch.device], bool],
    mixed_dtypes: str,
) -> list[Cast]:
    casts: list[Cast] = []
    for node in list(graph.nodes):
        rule = rule_of(node)
        if rule is None:
            continue
        operands = rule.operands(node, dialect.key)
        examples = [operand.meta[dialect.key] for operand in operands.values()]
        dtypes = {example.dtype for example in examples}
        if len(dtypes) < 2 or autocast(node, rule, examples[0].device):
            continue
        site = _Site(graph, dialect, node, operands)
        written = rule.written(node)
        if written is not None:
            dtypes.add(site.dtype_of(written))
        dtype = agreed(dtypes, mixed_dtypes, f"{call_name(node)}, at {source_line(node)}")
        if dtype is None:
            continue
        factors = {operands[slot].meta[dialect.key].dtype for slot in rule.factors(operands)}
        if factors == {torch.float32}:
            dtype = torch.float32  # what is added does not lower the precision of a product
        if written is None:
            casts += site.cast_operands(dtype)
            site.cast_results(dtype)
        elif site.dtype_of(written) == torch.float32:
            # an accumulator is not rounded to what is added to it
            casts += site.cast_operands(torch.float32)
        else:
            if site.dtype_of(written) != dtype:
                site.write_by_copy(written, dtype)
            casts += site.cast_operands(dtype)
    return casts


class _Site:
    """One call with operands of unlike dtypes."""

    def __init__(
        self, graph: Graph, dialect: Dialect, node: Node, operands: dict[int | str, Node]
    ) -> None:
        self.graph, self.dialect = graph, dialect
        self.node, self.operands = node, operands

    def dtype_of(self, node: Node) -> torch.dtype:
        return node.meta[self.dialect.key].dtype

    def write_by_copy(self, written: Node, dtype: torch.dtype) -> None:
        """Computes a new tensor in ``dtype`` and copies it to ``written``, which cannot hold it."""
        node = self.node
        with self.graph.inserting_before(node):
            if node.kwargs.get("out") is written:
                kwargs = {k: v for k, v in node.kwargs.items() if k != "out"}
                fresh = self.graph.create_node(node.op, node.target, node.args, kwargs)
            else:
                name = call_name(node).removesuffix("_")
                fresh = self.graph.create_node("call_method", name, node.args, dict(node.kwargs))
            fresh.meta = dict(node.meta)
            fresh.meta[self.dialect.key] = node.meta[self.dialect.key].to(dtype)
            copied = self.graph.call_method("copy_", (written, fresh))
            copied.meta = dict(node.meta)
        node.replace_all_uses_with(copied)
        self.graph.erase_node(node)
        self.node = fresh

    def cast_operands(self, dtype: torch.dtype) -> list[Cast]:
        """Every operand in ``dtype``."""
        casts = []
        with self.graph.inserting_before(self.node):
            for slot, operand in self.operands.items():
                if self.dtype_of(operand) == dtype:
                    continue
                new = self.dialect.make(self.graph, operand, dtype, self.node)
                if isinstance(slot, int):
                    self.node.update_arg(slot, new)
                else:
                    self.node.update_kwarg(slot, new)
                record = Cast(operand.name, self.dtype_of(operand), dtype, source_line(self.node))
                casts.append(record)
        return casts

    def cast_results(self, dtype: torch.dtype) -> None:
        """What is computed in ``dtype`` now, in the dtype that whoever reads it counts on."""
        example = self.node.meta[self.dialect.key]
        parts = [user for user in self.node.users if user.target is operator.getitem]
        for result in [self.node] if isinstance(example, torch.Tensor) else parts:
            traced = result.meta[self.dialect.key]
            if not traced.is_floating_point() or traced.dtype == dtype:
                continue
            with self.graph.inserting_after(result):
                back = self.dialect.cast(self.graph, result, traced.dtype)
            back.meta = dict(result.meta)
            result.meta[self.dialect.key] = traced.to(dtype)
            result.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user != back)
