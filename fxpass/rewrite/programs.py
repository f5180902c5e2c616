"""Programs of rows of deferred logits: a graph of a head and of what reduces it, rewritten.

In: the rows that a program reads of deferred logits, and the recipes of the logits. Out: a function
of hidden states, weights and operands, whose graph has gone through the same rewrite as a graph of
Dynamo; or why that leaves logits in it::

    run = program(rows, {id(logits): (recipe, inputs)})
    run([hidden[:, :-1].flatten(0, 1), weight, labels[:, 1:].flatten()])       [rows [n]]

It runs for any number of rows, with gradients if its inputs have some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch.fx import Graph, GraphModule
from torch.fx.node import map_arg

from fxpass.capture.function import dtype_of, function_of, shape_of
from fxpass.capture.values import PRODUCTS, Leaf, Stop, Value
from fxpass.deferred.recording import Rows
from fxpass.deferred.run import Recipe, with_dims
from fxpass.graph.functions import function_of as function_of_node
from fxpass.graph.names import name_of
from fxpass.plan.plan import MIB
from fxpass.region.run import Fakes, apart
from fxpass.region.text import Input
from fxpass.region.trace import traced
from fxpass.rows.backend import RowsPass
from fxpass.settings import Settings

LEAST = 64  # a program is worth its logits if they take this part of what a head's have to take
MOST = 256  # programs of a graph that are known; lists of dynamic sizes would add more without end
Program = Callable[..., Sequence[Tensor]]
# By the identity of logits: the recipe, its inputs, and which of them have a gradient.
Sources = Mapping[int, tuple[Recipe, Sequence[Tensor], Sequence[bool]]]


def programs_with(settings: Settings) -> Callable[[Rows, Sources, int, str], Program | str]:
    """What makes programs, with the settings of the graph that returns the logits."""
    # which make recipes, and these programs
    from fxpass.rewrite.settled import names_in, rows_pass, settled, tell
    from fxpass.rewrite.transform import transform

    least = settings.min_logits_mb * MIB / LEAST
    settings = replace(settings, min_logits_mb=0.0, logits="keep")
    known: dict[Any, Program | str] = {}

    def program(rows: Rows, sources: Sources, n: int, line: str) -> Program | str:
        """The program of some rows, or why there is none.

        Args:
            rows: what it computes.
            sources: for each logits among the leaves their recipe, and its inputs.
            n: an example of the number of rows.
            line: the user's line, for what is logged.
        """
        taken = n * sum(value.shape[-1] * value.fake.dtype.itemsize for value in _roots(rows))
        if n < 2 or taken < least:
            return "reads few rows"
        try:
            module, fakes = apart(lambda: _graph(rows, sources, n))
        except (ValueError, Stop) as no:
            return f"is not traced: {no}"
        key = _text(module.graph)  # the same for other numbers of rows
        if key not in known:
            if len(known) >= MOST:
                known.clear()
            known[key] = rewritten(module, fakes, line)
        return known[key]

    def rewritten(module: GraphModule, fakes: Fakes, line: str) -> Program | str:
        for node in module.graph.nodes:
            file, _, code = line.partition(" ")
            name, _, number = file.rpartition(":")
            node.meta["stack_trace"] = f'File "{name}", line {number or 0}, in f\n    {code}'
        outcome, rows = transform(module, settings), rows_pass(settings)
        module.recompile()
        run: Any = module.forward
        if outcome.later:
            run = apart(lambda: _compiled(module, fakes, rows))
        outcome = settled(outcome, rows.made)
        tell(outcome, module, rows.made, settings)
        fakes.check()
        if not outcome.heads or not _products(module.graph) <= names_in(rows.made):
            return "; ".join(["is not fused", *(r.reason for r in outcome.rejections[:1])])
        return outcome.restore(run)

    return program


def _graph(rows: Rows, sources: Sources, n: int) -> tuple[GraphModule, Fakes]:
    """The graph of recipes and of the function of their rows, with example values."""
    inputs: list[Input] = []
    flags: list[bool] = []
    for leaf in rows.leaves:
        found = _inputs_of(leaf, sources)
        inputs += [of for of, _ in found]
        flags += [flag for _, flag in found]
    function = function_of(rows.leaves, rows.outputs)

    def run(*tensors: Tensor) -> list[Tensor]:
        todo = list(tensors)
        given = [_given(leaf, sources, todo) for leaf in rows.leaves]
        return function(*given)

    fakes = Fakes(inputs, {"n": max(2, n)}, rows.outputs[0].fake.device)
    with torch.enable_grad():
        graph = traced(run, fakes, {})
    module = GraphModule({}, graph)
    module.graph.eliminate_dead_code()
    examples: dict[Any, Any] = {}
    with fakes.mode, enable_python_dispatcher(), torch.enable_grad():
        for tensor, flag in zip(fakes.tensors, flags, strict=True):
            tensor.requires_grad_(flag)
        todo = list(fakes.tensors)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                examples[node] = todo.pop(0)
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), examples.__getitem__)
                examples[node] = node.target(*args, **kwargs)
            else:
                continue
            node.meta["example_value"] = examples[node]
    output = module.graph.output_node()
    output.args = (tuple(output.args[0]),)  # type: ignore[arg-type]
    return module, fakes


def _inputs_of(leaf: Leaf, sources: Sources) -> list[tuple[Input, bool]]:
    """The inputs that a leaf is made of, and whether they need a gradient."""
    value = leaf.value
    assert value is not None
    if id(value) not in sources:
        shape = tuple(s if isinstance(s, str) else int(s) for s in shape_of(leaf))
        return [(Input(dtype_of(leaf), shape), value.trained)]
    recipe, tensors, trained = sources[id(value)]
    found = []
    for i, tensor in enumerate(tensors):
        shape = ("n", tensor.shape[-1]) if i in recipe.rows else tuple(tensor.shape)
        found.append((Input(tensor.dtype, shape), value.trained and trained[i]))
    return found


def _given(leaf: Leaf, sources: Sources, todo: list[Tensor]) -> Tensor:
    """What a leaf is, from the first of the tensors, which are taken."""
    if id(leaf.value) not in sources:
        return todo.pop(0)
    recipe, tensors, _ = sources[id(leaf.value)]
    taken = [todo.pop(0) for _ in tensors]
    for i in recipe.rows:
        taken[i] = with_dims(taken[i], tensors[i].dim())
    logits = recipe(*taken)
    return logits.reshape(-1, logits.shape[-1])


def _text(graph: Graph) -> str:
    """Equal for graphs that compute the same, for any number of rows."""
    lines = []
    for node in graph.nodes:
        example = node.meta.get("example_value")
        shape = ""
        if isinstance(example, Tensor):
            sizes = ",".join(str(s) if isinstance(s, int) else "n" for s in example.shape)
            shape = f"{example.dtype}[{sizes}]{example.device}{example.requires_grad}"
        lines.append(f"{node.name} = {node.target} {node.args} {node.kwargs} {shape}")
    return "\n".join(lines)


def _compiled(module: GraphModule, fakes: Fakes, rows: RowsPass) -> Program:
    """A graph with the calls of its joint graph."""
    context = TracingContext(fakes.mode)
    with torch.enable_grad(), tracing(context):
        run = rows.backend()(module, fakes.tensors)
    if context.fw_metadata is not None:  # backward may run twice, and overwrites nothing
        context.fw_metadata.bw_donated_idxs = []
    return run


def _products(graph: Graph) -> set[str | None]:
    """The names of the products that are left: what is not fused makes logits."""
    return {name_of(node) for node in graph.nodes if function_of_node(node) in PRODUCTS}


def _roots(rows: Rows) -> list[Value]:
    return [leaf.value for leaf in rows.leaves if leaf.value is not None and leaf.value.tag]
