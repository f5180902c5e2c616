"""Graphs of functions of fake tensors, and subgraphs.

In: a function of fake tensors. Out: a graph of ATen operations that a text can have, without copies
and with casts of one kind::

    >>> fakes = Fakes([Input(torch.float32, ("n", 5))], {"n": 8}, torch.device("cpu"))
    >>> graph = in_own_thread(lambda: tidy(traced(lambda x: [x.exp().sum(-1)], fakes, {})))
    >>> [str(node.target) for node in graph.nodes]
    ['arg0_1', 'aten.exp.default', 'aten.sum.dim_IntList', 'output']
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses import FakeTensor
from torch.fx import _symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen

from fxpass.region.run import Fakes, in_own_thread
from fxpass.region.text import Input, is_collective

__all__ = ["EQUAL", "Fakes", "Input", "in_own_thread", "subgraph", "tidy", "traced"]

aten: Any = torch.ops.aten

# They tell which logit is the largest: forward and backward must round logits in the same way.
EQUAL = {aten.eq.Tensor, aten.ne.Tensor}


def traced(function: Callable[..., Any], fakes: Fakes, table: Mapping[Any, Any]) -> fx.Graph:
    """The graph of a function of ``fakes.tensors``, with flat results.

    Raises:
        ValueError: the function reads another tensor, of more than one element.
    """

    def unmarked(*tensors: torch.Tensor) -> Any:
        # a global flag: compiled functions of other threads would raise
        _symbolic_trace._is_fx_tracing_flag = False
        return function(*tensors)

    with fakes.mode, enable_python_dispatcher():
        module = make_fx(unmarked, decomposition_table=dict(table))(*fakes.tensors)
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target))
        value = value.constant if isinstance(value, FakeTensor) else value
        if value is None or value.numel() != 1:
            raise ValueError(f"a tensor is read that is no input, {node.target}")
        with module.graph.inserting_before(node):
            args = ([*value.shape], value.item())
            kwargs = {"dtype": value.dtype}
            number = module.graph.call_function(aten.full.default, args, kwargs)
        node.replace_all_uses_with(number)
        module.graph.erase_node(node)
    module.graph.set_codegen(CodeGen())
    return module.graph


def tidy(graph: fx.Graph) -> fx.Graph:
    """The graph with ATen's casts, without copies, and values that are unread or computed twice."""
    copies = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
    copies |= {aten.lift_fresh_copy.default}
    checks = {aten._assert_async.msg, aten._assert_async.default, aten._assert_scalar.default}
    for node in list(graph.nodes):
        whole = node.target is aten.slice.Tensor and node.args[2:] == (0, sys.maxsize)
        if node.target in copies or whole:
            node.replace_all_uses_with(node.args[0])
        if node.target in copies | checks or whole:  # the checks would wait for a GPU
            graph.erase_node(node)
        elif node.target is torch.ops.prims.convert_element_type.default:
            node.target = aten._to_copy.default
            dtype = node.args[1]
            node.args = node.args[:1]
            node.kwargs = {"dtype": dtype}
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "device"}  # the logits'
        _count_dims_from_the_front(node)
    graph.eliminate_dead_code()
    return _without_duplicates(graph)


def _without_duplicates(graph: fx.Graph) -> fx.Graph:
    """Merges equal values, but not collectives: numbers that are equal on one rank may differ on
    another, and all ranks have to exchange the same number of values."""
    for i, node in enumerate(filter(is_collective, graph.nodes)):
        node.kwargs = {**node.kwargs, "copy": i}
    merged = fx_graph_cse(graph)
    for node in filter(is_collective, merged.nodes):
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "copy"}
    return merged


def _count_dims_from_the_front(node: fx.Node) -> None:
    """-1 becomes the number of the last dimension, so that equal reductions merge."""
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments[: len(node.args)]] if schema else []
    if names[:1] != ["self"] or "dim" not in names or not isinstance(node.args[0], fx.Node):
        return
    at = names.index("dim")
    value = node.args[0].meta.get("val")
    count = value.dim() if isinstance(value, torch.Tensor) else 0
    count += node.target is aten.unsqueeze.default
    dims: Any = node.args[at]
    if isinstance(dims, int) and dims < 0 < count:
        node.update_arg(at, dims + count)
    elif isinstance(dims, (list, tuple)):
        node.update_arg(at, [d + count if d < 0 else d for d in dims])


def subgraph(
    graph: fx.Graph, given: Mapping[fx.Node, Input], results: Sequence[fx.Node]
) -> fx.Graph:
    """The operations from ``given`` to ``results``."""
    needed = set(given)
    todo = list(results)
    while todo:
        if (node := todo.pop()) not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    part = fx.Graph()
    copies = {}
    for node, described in given.items():
        copies[node] = part.placeholder(f"input_{len(copies)}")
        copies[node].meta["input"] = described
    for node in graph.nodes:
        if node in needed and node not in copies:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output([copies[node] for node in results])
    return part
