"""Row functions of operator calls, traced: what :mod:`fxpass.lower` reads.

In: a :class:`fxpass.capture.capture.RowCall`. Out: the graph of its row function::

    %top = topk(%z, 5);  sum(%top[0], -1)    ->    %1 = aten.topk.default(%0, 5)
                                                   %2 = aten.sum.dim_IntList(%1[0], [-1])
"""

from __future__ import annotations

import logging

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx import Graph

from fxpass.capture.capture import RowCall
from fxpass.capture.function import dtype_of, function_of, shape_of
from fxpass.capture.values import Size, Stop
from fxpass.graph.nodes import NoMatch, hint
from fxpass.graph.source import source_line
from fxpass.region.run import Fakes, apart
from fxpass.region.text import Input
from fxpass.region.trace import traced as trace_calls

log = logging.getLogger(__name__)
# Rows of the traced example: another size than those of a few classes.
ROWS = 251


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
