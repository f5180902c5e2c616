"""Explicit casts: the dtypes that autocast would have used, written into the graph.

In: a graph, Dynamo's or AOTAutograd's. Out: a :class:`Cast` for each inserted cast. An operation of
:mod:`fxpass.casts.rules` raises at run time if its operands have different dtypes and autocast does
not cover it. The pass inserts casts before such an operation::

    %y: bf16 = matmul(%h, %w)     ->     %to: bf16 = to(%w, bfloat16)
                                         %y: bf16 = matmul(%h, %to)

The result keeps the dtype with which the graph was traced, so its users compute what they did. A
graph without such an operation does not change.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._dynamo.utils import counters
from torch.fx import Graph, Node

from fxpass.casts.mixed import agreed
from fxpass.casts.rules import Rule, rule_of
from fxpass.graph.autocast import autocast_dtype, covers
from fxpass.graph.region import Region
from fxpass.graph.source import call_name, source_line
from fxpass.spec.dtypes import short

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cast:
    """One inserted cast: the operand, its dtype before and after, and the user's line."""

    operand: str
    old: torch.dtype
    new: torch.dtype
    source: str


def cast_lines(casts: Sequence[Cast]) -> list[str]:
    """Casts as text: one line for each line of the user's program and pair of dtypes."""
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

# The lines logged in this process: recompiling a graph makes the same casts.
logged: set[str] = set()


def note(casts: Sequence[Cast]) -> None:
    """Counts and logs casts: a line at INFO the first time, later at DEBUG."""
    counters["fusedce"]["casts"] += len(casts)
    for line in cast_lines(casts):
        log.log(logging.DEBUG if line in logged else logging.INFO, "%s", line)
        logged.add(line)


@dataclass(frozen=True)
class Dialect:
    """The form of a cast in Dynamo's or in AOTAutograd's graphs.

    Attributes:
        key: the key of example values in ``node.meta``.
        cast: makes a cast node, of graph, operand and dtype.
    """

    key: str
    cast: Callable[[Graph, Node, torch.dtype], Node]

    def make(self, graph: Graph, operand: Node, dtype: torch.dtype, site: Node) -> Node:
        """Casts ``operand`` at the graph's insertion point; the node has the meta of ``site``."""
        node = self.cast(graph, operand, dtype)
        # AOT's partitioner reads its notes on the site: forward or backward, recompute or not
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
    """Casts ``operand`` of a Dynamo graph to ``dtype``, at the graph's insertion point.

    Returns the operand itself and None if it has this dtype already; else a ``.to`` node with the
    stack trace of ``site``. Autograd casts its gradient back to the operand's dtype.
    """
    old = operand.meta[DYNAMO.key].dtype
    if old == dtype:
        return operand, None
    node = DYNAMO.make(graph, operand, dtype, site)
    return node, Cast(operand.name, old, dtype, source_line(site))


def cast_region(region: Region, mixed_dtypes: str) -> list[Cast]:
    """Inserts casts into one region of a Dynamo graph.

    Raises:
        MixedDtypeError: see :func:`fxpass.casts.mixed.agreed`.
    """

    def autocast(node: Node, rule: Rule, device: torch.device) -> bool:
        enabled = autocast_dtype(region, node, device) is not None
        return enabled and covers(rule.overload(node), device)

    casts = _cast_graph(region.module.graph, DYNAMO, autocast, mixed_dtypes)
    if casts:
        region.module.recompile()
    return casts


def cast_aot_graph(graph: Graph, mixed_dtypes: str) -> list[Cast]:
    """Inserts casts into a joint or inference graph of AOTAutograd, where autocast has ended.

    Raises:
        MixedDtypeError: see :func:`fxpass.casts.mixed.agreed`.
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
            dtype = torch.float32  # an addend does not lower the precision of a product
        if written is None:
            casts += site.cast_operands(dtype)
            site.cast_results(dtype)
        elif site.dtype_of(written) == torch.float32:
            # a float32 accumulator is not rounded to the dtype of a product
            casts += site.cast_operands(torch.float32)
        else:
            if site.dtype_of(written) != dtype:
                site.write_by_copy(written, dtype)
            casts += site.cast_operands(dtype)
    return casts


class _Site:
    """One call whose operands have different dtypes."""

    def __init__(
        self, graph: Graph, dialect: Dialect, node: Node, operands: dict[int | str, Node]
    ) -> None:
        self.graph, self.dialect = graph, dialect
        self.node, self.operands = node, operands

    def dtype_of(self, node: Node) -> torch.dtype:
        return node.meta[self.dialect.key].dtype

    def write_by_copy(self, written: Node, dtype: torch.dtype) -> None:
        """Computes a new tensor in ``dtype`` and copies it to ``written``, of another dtype."""
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
        """Casts every operand to ``dtype``."""
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
        """Casts the results, computed in ``dtype``, back to the dtypes that their users expect."""
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
