"""A row function and its gradients as one graph, and the graph in two parts.

In: a Python function of logits, row operands and shared operands. Out: a graph for ``RowRegion``::

    >>> def loss(z, label):
    ...     return [torch.nn.functional.cross_entropy(z, label, reduction="none")]
    >>> inputs = [Input(torch.float32, ("n", 50)), Input(torch.int64, ("n",))]
    >>> joint = trace(loss, inputs, {"n": 8}, [True, False], torch.device("cpu"))
    >>> region = RowRegion((2,), 1, 0, (0, 1), 1, joint.tangents, False, 0, True, joint.graph)
    >>> parts = cut(RowRegion.parse(region.text()))
    >>> [str(value) for value in parts.saved]
    ['float32[n, 1]', 'float32[n, 1]']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import compiled_autograd
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx import _symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen

from fxpass.region.run import Fakes, Interpreter, Values, apart, is_view
from fxpass.region.text import Input, RowRegion, results_of

aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Joint:
    """A graph with the inputs and results that ``RowRegion`` describes."""

    graph: fx.Graph
    outputs: tuple[Input, ...]
    tangents: tuple[int, ...]  # the outputs that have a gradient
    reached: tuple[bool, ...]  # the inputs that gradients reach


def trace(
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[Input],
    hints: Mapping[str, int],
    trained: Sequence[bool],
    device: torch.device,
) -> Joint:
    """Traces a function of rows, with its gradients.

    Args:
        function: takes a tensor for each input and returns the outputs [n, ...].
        inputs: logits of each head, row operands, shared operands.
        hints: a size, at least 2, for each symbol of ``inputs``.
        trained: whether each input gets a gradient.
        device: of the tensors that are traced.

    Raises:
        ValueError: the function holds for some numbers of rows alone, has a constant tensor, or
            runs an operation that a region may not have.
    """
    try:
        return apart(lambda: _trace(function, inputs, hints, trained, device))
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise ValueError(f"{error} depends on values") from error


def _trace(function: Any, inputs: Any, hints: Any, trained: Any, device: torch.device) -> Joint:
    fakes = Fakes(inputs, hints, device)
    reached: list[bool] = []

    def forward(given: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        leaves = [t.detach().requires_grad_(flag) for t, flag in zip(given, trained, strict=True)]
        return leaves, list(function(*leaves))

    def joint(*given: torch.Tensor) -> list[torch.Tensor]:
        leaves, outputs = forward(given[: len(inputs)])
        wrt = [leaf for leaf, flag in zip(leaves, trained, strict=True) if flag]
        roots = [outputs[k] for k in tangents]
        found: Sequence[torch.Tensor | None] = [None] * len(wrt)
        if roots and wrt:
            found = torch.autograd.grad(roots, wrt, given[len(inputs) :], allow_unused=True)
        of_wrt = iter(found)
        reached[:] = [flag and next(of_wrt) is not None for flag in trained]
        gradients = [
            torch.zeros_like(t) if g is None else g for t, g in zip(wrt, found, strict=True)
        ]
        return [t.detach() for t in (*outputs, *gradients)]

    with fakes.mode, enable_python_dispatcher():
        _, outputs = forward(fakes.tensors)
    fakes.check()
    tangents = tuple(k for k, o in enumerate(outputs) if o.requires_grad)
    described = tuple(fakes.described(o) for o in outputs)
    for output in described:
        if output.shape[:1] != ("n",):
            raise ValueError(f"an output {output} does not have the rows first")
    given = (*inputs, *(described[k] for k in tangents))
    fakes.tensors += [fakes.tensor(i) for i in given[len(inputs) :]]
    with compiled_autograd._disable():  # it would compile this, and wait for the caller's lock
        eager = traced(joint, fakes, {})
    table = decompositions()
    run = Interpreter(eager, device)
    pure = torch.func.functionalize(lambda *tensors: run(list(tensors)), remove="mutations")
    graph = tidy(traced(pure, fakes, table))
    fakes.check()
    for node, of in zip(graph.find_nodes(op="placeholder"), given, strict=True):
        node.meta["input"] = of
    return Joint(graph, described, tangents, tuple(reached))


def traced(function: Callable[..., Any], fakes: Fakes, table: Mapping[Any, Any]) -> fx.Graph:
    """The graph of what a function of ``fakes.tensors`` runs, with flat results.

    Raises:
        ValueError: the function reads another tensor; of one element, it becomes a number.
    """

    def unmarked(*tensors: torch.Tensor) -> Any:
        # the mark is one for all threads: compiled functions of another one would raise
        _symbolic_trace._is_fx_tracing_flag = False
        return function(*tensors)

    with fakes.mode, enable_python_dispatcher():
        made = make_fx(unmarked, decomposition_table=dict(table))(*fakes.tensors)
    for node in made.graph.find_nodes(op="get_attr"):
        value = getattr(made, str(node.target))
        value = value.constant if isinstance(value, FakeTensor) else value
        if value is None or value.numel() != 1:
            raise ValueError(f"a tensor is read that is no input, {node.target}")
        with made.graph.inserting_before(node):
            args, more = ([*value.shape], value.item()), {"dtype": value.dtype}
            number = made.graph.call_function(aten.full.default, args, more)
        node.replace_all_uses_with(number)
        made.graph.erase_node(node)
    made.graph.set_codegen(CodeGen())
    return made.graph


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's, but for those that make operations which are not in ATen."""
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    for name in ("arange", "flip", "_softmax_backward_data", "_to_copy"):
        for overload in getattr(aten, name).overloads():
            table.pop(getattr(getattr(aten, name), overload), None)
    return table


def tidy(graph: fx.Graph) -> fx.Graph:
    """Without copies of values, with ATen's casts, without what is computed twice or unread."""
    same = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
    same |= {aten.lift_fresh_copy.default}
    checks = {aten._assert_async.msg, aten._assert_async.default, aten._assert_scalar.default}
    for node in list(graph.nodes):
        if node.target in same:
            node.replace_all_uses_with(node.args[0])
        if node.target in same | checks:  # the checks would wait for a GPU
            graph.erase_node(node)
        elif node.target is torch.ops.prims.convert_element_type.default:
            node.target, dtype = aten._to_copy.default, node.args[1]
            node.args, node.kwargs = node.args[:1], {"dtype": dtype}
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "device"}  # the logits'
        _count_dims_from_the_front(node)
    graph.eliminate_dead_code()
    return fx_graph_cse(graph)


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


@dataclass(frozen=True)
class Parts:
    """What runs in forward and in backward; ``both`` where forward computes the gradients.

    ``forward`` takes the inputs without tangents and returns the outputs, then what is saved.
    ``backward`` takes these inputs, what is saved and the tangents, and returns the gradients.
    ``both`` takes the inputs and the coefficients, and returns the outputs and the gradients.
    Results may be an input, or the same tensor twice.
    """

    forward: fx.Graph
    backward: fx.Graph | None
    both: fx.Graph | None
    outputs: tuple[Input, ...]
    saved: tuple[Input, ...]
    gradients: tuple[Input, ...]


# Classes of which the logit is the largest: forward and backward must round it in the same way.
EQUAL = {aten.eq.Tensor, aten.ne.Tensor}


@lru_cache(maxsize=1024)
def cut(region: RowRegion) -> Parts:
    """Cuts the graph of a region by shape.

    Backward gets what forward knows of a row if it is small, at most an eighth of the classes;
    it computes again what has a value for each class.
    """
    values = apart(lambda: Values(region.graph))
    places = region.graph.find_nodes(op="placeholder")
    count = len(places) - len(region.tangents)
    given, tangents = places[:count], places[count:]
    results = results_of(region.graph)
    outputs, gradients = results[: region.outputs], results[region.outputs :]
    widest = max(values.width(z) for z in places[: len(region.heads)])
    small = {n for n in values.rows if values.width(n) <= max(1, widest // 8)}
    separate = bool(gradients) and not region.total
    saved = _saved(values, gradients, tangents, small) if separate else []

    def part(given: list[fx.Node], results: list[fx.Node]) -> fx.Graph:
        return _part(region.graph, {node: values.described(node) for node in given}, results)

    return Parts(
        forward=part(given, [*outputs, *saved]),
        backward=part([*given, *saved, *tangents], gradients) if separate else None,
        both=part(places, results) if gradients and region.total else None,
        outputs=tuple(map(values.described, outputs)),
        saved=tuple(map(values.described, saved)),
        gradients=tuple(map(values.described, gradients)),
    )


def _saved(
    values: Values, gradients: list[fx.Node], tangents: list[fx.Node], small: set[fx.Node]
) -> list[fx.Node]:
    """The values of forward that the gradients read, and that forward saves; in order."""
    late = set(tangents)  # known in backward alone
    of_classes: set[fx.Node] = set()
    for node in values.graph.nodes:
        late |= {node} if late & set(node.all_input_nodes) else set()
        wide = node.op == "placeholder" and node in values.rows and node not in small
        if wide or of_classes & set(node.all_input_nodes):
            of_classes.add(node)
    found: set[fx.Node] = set()
    again: set[fx.Node] = set()
    seen: set[tuple[fx.Node, bool]] = set()
    todo = [(node, False) for node in gradients]
    while todo:
        node, compared = todo.pop()
        if (node, compared) in seen or node.op == "placeholder":
            continue
        seen.add((node, compared))
        view = is_view(node) and (node in small) == (node.args[0] in small)
        compared = compared and values.is_floating(node) and (view or node in small)
        if node in small and node in of_classes and not (node in late or view or compared):
            found.add(node)
            continue
        if compared:
            again.add(node)
        compared |= node.target in EQUAL
        todo += [(n, compared) for n in node.all_input_nodes]
    return [node for node in values.graph.nodes if node in found - again]


def _part(graph: fx.Graph, given: Mapping[fx.Node, Input], results: Sequence[fx.Node]) -> fx.Graph:
    """The graph from ``given`` to ``results``."""
    needed, todo = set(given), list(results)
    while todo:
        if (node := todo.pop()) not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    part, made = fx.Graph(), {}
    for node, of in given.items():
        made[node] = part.placeholder(f"input_{len(made)}")
        made[node].meta["input"] = of
    for node in graph.nodes:
        if node in needed and node not in made:
            made[node] = part.node_copy(node, made.__getitem__)
    part.output([made[node] for node in results])
    return part
