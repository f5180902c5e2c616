"""The regions of operator calls: their row functions, traced, as text.

In: a :class:`fxpass.capture.capture.RowCall`. Out: a :class:`Made`, whose region has the graph of
the row function and of its gradients::

    %top = topk(%z, 5);  sum(%top[0], -1)    ->    row_region heads=2 ... outputs=1 ...
                                                   %1 = aten.topk.default(%0, 5)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx import Graph

from fxpass.capture.capture import RowCall
from fxpass.capture.function import dtype_of, function_of, shape_of, trained
from fxpass.capture.values import Leaf, Size, Stop
from fxpass.graph.nodes import NoMatch, hint
from fxpass.graph.source import source_line
from fxpass.region.joint import cut, trace
from fxpass.region.joint import traced as trace_calls
from fxpass.region.run import Fakes, apart
from fxpass.region.text import Input, RowRegion

log = logging.getLogger(__name__)
# Rows of the traced example: another size than those of a few classes.
ROWS = 251


@dataclass(frozen=True)
class Made:
    """An operator call that is to be inserted.

    Attributes:
        call: what it computes.
        region: the text of its region, and what that says.
    """

    call: RowCall
    region: RowRegion


def traced(call: RowCall, memory_mb: int, compiled: bool) -> Made:
    """The region of a call, with its gradients.

    Raises:
        NoMatch: the function of a chunk of rows cannot be traced, or its text is not allowed.
    """
    inputs, hints = _inputs(call)
    function = function_of(call.leaves, call.outputs)
    device = call.outputs[0].fake.device
    flags = [trained(leaf) for leaf in call.leaves]
    if not any(output.trained for output in call.outputs):
        flags = [False] * len(flags)
    heads = [leaf.head for leaf in call.leaves if leaf.head is not None]
    rows = sum(leaf.kind == "row" for leaf in call.leaves)
    try:
        joint = trace(function, inputs, hints, flags, device)
        if flags != list(joint.reached):  # a detached operand gets no gradient, not one of zeros
            flags = list(joint.reached)
            joint = trace(function, inputs, hints, flags, device)
        made = Made(
            call,
            RowRegion(
                heads=tuple(2 + (head.bias is not None) for head in heads),
                rows=rows,
                shared=len(call.leaves) - len(heads) - rows,
                trained=_trained(call.leaves, flags),
                outputs=len(call.outputs),
                tangents=tuple(joint.tangents),
                total=False,
                memory_mb=memory_mb,
                compiled=compiled,
                graph=joint.graph,
            ),
        )
        cut(RowRegion.parse(made.region.text()))  # raises for what no text has
        return made
    except Exception as error:
        raise _untraced(call, error) from error


def forward(call: RowCall) -> Graph:
    """The row function of a call alone, with ``detach`` where the program has no gradients.

    Raises:
        NoMatch: it cannot be traced.
    """
    inputs, hints = _inputs(call)
    function = function_of(call.leaves, call.outputs)

    def run() -> Graph:
        fakes = Fakes(inputs, hints, call.outputs[0].fake.device)
        with torch.enable_grad():
            return fx_graph_cse(trace_calls(lambda *t: list(function(*t)), fakes, {}))

    try:
        return apart(run)
    except Exception as error:
        raise _untraced(call, error) from error


def _untraced(call: RowCall, error: Exception) -> NoMatch:
    """Why there is no graph for any number of rows: the program's own calls run in it."""
    log.debug("%s: its rows cannot be traced", source_line(call.place), exc_info=error)
    known = (ValueError, Stop, DynamicOutputShapeException, DataDependentOutputException)
    kind = "" if isinstance(error, known) else f"{type(error).__name__}: "
    text = " ".join(str(error).split())[:200]
    return NoMatch(call.place, f"its rows cannot be traced: {kind}{text}")


def _inputs(call: RowCall) -> tuple[list[Input], dict[str, int]]:
    """The inputs of a call's row function, and an example of each size."""
    names: dict[str, str] = {}
    hints = {"n": ROWS}

    def named(size: Size | str) -> int | str:
        if not isinstance(size, torch.SymInt):
            return size
        name = names.setdefault(str(size.node.expr), f"v{len(names)}")
        hints[name] = max(2, hint(size))
        return name

    return [Input(dtype_of(leaf), tuple(map(named, shape_of(leaf)))) for leaf in call.leaves], hints


def _trained(leaves: Sequence[Leaf], flags: Sequence[bool]) -> tuple[int, ...]:
    """The positions of the operator's tensors that get a gradient."""
    found: list[bool] = []
    for leaf, flag in zip(leaves, flags, strict=True):
        if leaf.head is None:
            found.append(flag)
            continue
        head = leaf.head
        operands = (head.x, head.weight, head.bias)
        found += [flag and t.trained for t in operands if t is not None]
    return tuple(i for i, flag in enumerate(found) if flag)
