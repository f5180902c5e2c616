"""Explicit casts: the dtypes that autocast would have used, written into the graph.

In: a graph, Dynamo's or AOTAutograd's. Out: a :class:`Cast` for each inserted cast. An operation of
:mod:`fxpass.casts.rules` raises at run time if its operands have different dtypes and autocast does
not cover it. The pass inserts casts before such an operation::

    %y: bf16 = matmul(%h, %w)     ->     %to: bf16 = to(%w, bfloat16)
                                         %y: bf16 = matmul(%h, %to)

The result has the dtype with which the graph was traced, so its users do not change. Nor does a
graph without such an operation.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch
from torch._dynamo.utils import counters
from torch.fx import Graph, Node

from fxpass import messages
from fxpass.casts.rules import Rule, rule_of
from fxpass.formula.dtypes import LOW_PRECISION, dtype_name
from fxpass.graph.autocast import autocast_dtype, covers
from fxpass.graph.region import Region
from fxpass.graph.source import call_name, source_line

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
    for cast in casts:
        change = f"{dtype_name(cast.old)} -> {dtype_name(cast.new)}"
        places.setdefault((change, cast.source), []).append(f"%{cast.operand}")
    lines = []
    for (change, source), names in places.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        lines.append(f"cast: {', '.join(names[:_SHOWN])}{more} {change}: {source}")
    return lines


_SHOWN = 3  # an encoder layer has twelve parameters

# The lines logged in this process: a recompiled graph has the same casts.
logged: set[str] = set()


def note(casts: Sequence[Cast]) -> None:
    """Counts and logs casts: a line at INFO the first time, later at DEBUG."""
    counters["fusedce"]["casts"] += len(casts)
    for line in cast_lines(casts):
        log.log(logging.DEBUG if line in logged else logging.INFO, "%s", line)
        logged.add(line)


class MixedDtypeError(RuntimeError):
    """Operands have different dtypes outside autocast, under FUSEDCE_MIXED_DTYPES=error."""


def common_dtype(dtypes: Set[torch.dtype], mixed_dtypes: str, call: str) -> torch.dtype | None:
    """The common dtype for two or more ``dtypes`` of operands that autocast does not cast.

    Low precision with float32 gives the low precision, as under autocast. float16 with bfloat16
    gives float32, since neither can represent all values of the other, and logs a warning. Other
    dtypes (float64, complex, integers) give None: autocast does not cast them, and the operation
    raises as in eager.

    Args:
        mixed_dtypes: the setting, ``cast`` or ``error``.
        call: the operation and its source line, ``linear, at train.py:7 y = self.head(h)``.

    Raises:
        MixedDtypeError: the setting is ``error``, and casts could make the dtypes equal.
    """
    if not dtypes <= LOW_PRECISION | {torch.float32}:
        return None
    if mixed_dtypes == "error":
        names = " and ".join(sorted(map(dtype_name, dtypes)))
        raise MixedDtypeError(messages.MIXED_DTYPES.format(dtypes=names, call=call))
    if dtypes >= LOW_PRECISION:
        log.warning(messages.HALF_MEETS_BFLOAT16.format(call=call))
        return torch.float32
    (low,) = dtypes & LOW_PRECISION
    return low


@dataclass(frozen=True)
class Dialect:
    """The form of a cast in Dynamo's or in AOTAutograd's graphs."""

    key: str  # the key of example values in ``node.meta``
    cast: Callable[[Graph, Node, torch.dtype], Node]  # makes a cast node of an operand

    def dtype(self, node: Node) -> torch.dtype:
        """The dtype of a node's example value."""
        return node.meta[self.key].dtype

    def insert_cast(
        self, graph: Graph, operand: Node, dtype: torch.dtype, site: Node
    ) -> tuple[Node, Cast]:
        """Inserts a cast of ``operand`` at the graph's insertion point, with the meta of ``site``;
        autograd casts the gradient back to the operand's dtype."""
        node = self.cast(graph, operand, dtype)
        # AOTAutograd's partitioner reads from the meta: forward or backward, recompute or not
        node.meta = {k: v for k, v in site.meta.items() if k != "tensor_meta"}
        node.meta[self.key] = operand.meta[self.key].to(dtype)
        return node, Cast(operand.name, self.dtype(operand), dtype, source_line(site))


DYNAMO = Dialect("example_value", lambda graph, x, dtype: graph.call_method("to", (x, dtype)))
AOT = Dialect(
    "val",
    lambda graph, x, dtype: graph.call_function(
        torch.ops.prims.convert_element_type.default, (x, dtype)
    ),
)


def cast_region(region: Region, mixed_dtypes: str) -> list[Cast]:
    """Inserts casts into one region of a Dynamo graph; raises as :func:`common_dtype`."""

    def autocast(node: Node, rule: Rule, device: torch.device) -> bool:
        enabled = autocast_dtype(region, node, device) is not None
        return enabled and covers(rule.overload(node), device)

    casts = _cast_graph(region.module.graph, DYNAMO, autocast, mixed_dtypes)
    if casts:
        region.module.recompile()
    return casts


def cast_aot_graph(graph: Graph, mixed_dtypes: str) -> list[Cast]:
    """Inserts casts into a joint or inference graph of AOTAutograd, where autocast has ended;
    raises as :func:`common_dtype`."""
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
        operands = rule.operands(node, dialect.key) if rule else {}
        dtypes = {slot: dialect.dtype(operand) for slot, operand in operands.items()}
        if rule is None or len(set(dtypes.values())) < 2:
            continue
        if autocast(node, rule, next(iter(operands.values())).meta[dialect.key].device):
            continue
        written = rule.written(node)
        all_dtypes = {*dtypes.values(), *([] if written is None else [dialect.dtype(written)])}
        call = f"{call_name(node)}, at {source_line(node)}"
        dtype = common_dtype(all_dtypes, mixed_dtypes, call)
        if dtype is None:
            continue
        if {dtypes[slot] for slot in rule.factors(operands)} == {torch.float32}:
            dtype = torch.float32  # an addend does not lower the precision of a product
        if written is None:
            _cast_results(node, dialect, dtype)
        elif dialect.dtype(written) == torch.float32:
            dtype = torch.float32  # an accumulator is not rounded to the dtype of a product
        elif dialect.dtype(written) != dtype:
            node = _write_by_copy(node, dialect, written, dtype)
        with graph.inserting_before(node):
            for slot, operand in operands.items():
                if dtypes[slot] != dtype:
                    new, cast = dialect.insert_cast(graph, operand, dtype, node)
                    change = node.update_arg if isinstance(slot, int) else node.update_kwarg
                    change(slot, new)  # pyright: ignore[reportArgumentType]
                    casts.append(cast)
    return casts


def _write_by_copy(node: Node, dialect: Dialect, written: Node, dtype: torch.dtype) -> Node:
    """Computes a new tensor in ``dtype`` and copies it to ``written``, of another dtype; returns
    the node of the new tensor."""
    graph = node.graph
    with graph.inserting_before(node):
        if node.kwargs.get("out") is written:
            kwargs = {k: v for k, v in node.kwargs.items() if k != "out"}
            fresh = graph.create_node(node.op, node.target, node.args, kwargs)
        else:
            name = call_name(node).removesuffix("_")
            fresh = graph.create_node("call_method", name, node.args, dict(node.kwargs))
        fresh.meta = {**node.meta, dialect.key: node.meta[dialect.key].to(dtype)}
        copied = graph.call_method("copy_", (written, fresh))
        copied.meta = dict(node.meta)
    node.replace_all_uses_with(copied)
    graph.erase_node(node)
    return fresh


def _cast_results(node: Node, dialect: Dialect, dtype: torch.dtype) -> None:
    """Casts the results, computed in ``dtype``, back to the dtypes that their users expect."""
    graph = node.graph
    parts = [user for user in node.users if user.target is operator.getitem]
    for result in [node] if isinstance(node.meta[dialect.key], torch.Tensor) else parts:
        traced = result.meta[dialect.key]
        if not traced.is_floating_point() or traced.dtype == dtype:
            continue
        with graph.inserting_after(result):
            back = dialect.cast(graph, result, traced.dtype)
        back.meta = dict(result.meta)
        result.meta[dialect.key] = traced.to(dtype)
        result.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user != back)
