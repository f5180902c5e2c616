"""Custom ``autograd.Function``s on rows: forward's calls, and the gradients that backward makes.

In: the node of a custom function, whose bodies are nested graphs, and its arguments. Out: its
outputs, as tensors of the record::

    %loss = autograd_function_apply(forward, backward, %z, %labels)    a region, with this backward

A chunk of rows runs forward's calls inside of an ``autograd.Function`` that runs backward's calls.
Backward has to be linear in the gradients that it is given: a region calls it for some rows, for
each view of rows apart, and for gradients that are multiplied by a factor later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxpass.capture.function import Environment
from fxpass.capture.record import Recorder
from fxpass.capture.rows import A
from fxpass.capture.values import Chain, Step, Stop, Value, same
from fxpass.graph.autocast import AutocastDtypes
from fxpass.graph.calls import storage, written
from fxpass.graph.nodes import is_tensor, nested_graph
from fxpass.graph.region import Region

# Calls that give the mode of the nodes after them, which is known from the graph.
_MODES = {
    torch._C._set_grad_enabled,
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
}
# Calls that are linear in their first tensor, where the others do not depend on the gradient.
_LINEAR = {
    *(A.neg, A._to_copy, A.clone, A.sum, A.mean, A.cumsum, A.gather, A.index, A.index_select),
    *(A.flip, A.roll, A.tril, A.triu, A.mul, A.div),
}


def recorded(
    recorder: Recorder, region: Region, node: Node, arguments: Sequence[Any], grad: bool
) -> list[Any]:
    """Records a custom function.

    Args:
        recorder: gets its calls.
        region: in which the node stands.
        node: the call of the function.
        arguments: functional tensors and numbers.
        grad: whether gradients are enabled.

    Raises:
        Stop: a call has no rule, or the gradient is none of rows.
    """
    forward, backward = (nested_graph(body) for body in node.args[:2])
    if forward is None or backward is None:
        raise Stop("has no bodies")
    returned = _run(recorder, Region(forward, region, node), arguments)
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise Stop("saves no tensors for backward")
    outputs, saved = map(list, returned)
    examples = node.meta["example_value"]
    trained = [bool(getattr(e, "requires_grad", False)) for e in examples]
    if not grad or not any(trained):
        return outputs
    made = [recorder.value(o) if isinstance(o, Tensor) else None for o in outputs]
    given = [recorder.value(a) if isinstance(a, Tensor) else None for a in arguments]
    incoming = [
        recorder.tensor(v.fake, v.tag, False) if v and v.tag and flag else None
        for v, flag in zip(made, trained, strict=True)
    ]
    _check_read(backward, incoming)
    gradients = _run(recorder, Region(backward, region, node, backward=True), [*incoming, *saved])
    if not isinstance(gradients, tuple | list) or len(gradients) != len(given):
        raise Stop("has another number of gradients than arguments")
    custom = Custom([], [], [], [])
    for argument, gradient in zip(given, gradients, strict=True):
        if argument is not None and argument.trained and isinstance(gradient, Tensor):
            custom.gradients.append(recorder.value(gradient))
            custom.inputs.append((argument, _letters(argument, custom.gradients[-1])))
    step = Step(A.alias.default, (*filter(None, given), *filter(None, made)), {}, grad, node)
    results = []
    for k, value in enumerate(made):
        if value is None or value.tag is None:
            if value is not None and (value.late or trained[k]):
                raise Stop("returns a tensor that mixes rows")
            continue
        index, gradient = len(custom.outputs), incoming[k]
        outputs[k] = recorder.tensor(value.fake, value.tag, trained[k], step=step, index=index)
        results.append(recorder.value(outputs[k]))
        custom.outputs.append(value)
        custom.incoming.append(None if gradient is None else recorder.value(gradient))
    _check_linear(recorder, [v for v in custom.incoming if v is not None], custom.gradients)
    step.results, step.run = tuple(results), custom
    recorder.steps.append(step)
    return outputs


def _check_read(backward: GraphModule, incoming: Sequence[Any]) -> None:
    places = backward.graph.find_nodes(op="placeholder")
    for place, tensor in zip(places, incoming, strict=False):
        if tensor is None and place.users:
            raise Stop("reads the gradient of a result that mixes rows")


def _run(recorder: Recorder, region: Region, given: Sequence[Any]) -> Any:
    """What the nodes of a body return."""
    graph = region.module.graph
    inputs, autocast = graph.find_nodes(op="placeholder"), AutocastDtypes(region)
    if len(inputs) != len(given):
        raise Stop("has other arguments than its body")
    values: dict[Node, Any] = dict(zip(inputs, given, strict=True))
    memory = {storage(n) for n in inputs if is_tensor(n)}
    for node in graph.nodes:
        if node.op == "output":
            return map_arg(node.args[0], values.__getitem__)
        if node.op == "placeholder" or node.target in _MODES:
            continue
        nested = any(nested_graph(a) is not None for a in node.args)
        if nested or node.op not in ("call_function", "call_method"):
            raise Stop(f"has a {node.op} in its body, %{node.name}")
        if any(storage(n) in memory for n in written(node)):
            raise Stop("writes to its arguments, or to what it saved")
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        count = len(recorder.steps)
        values[node] = recorder.run(node, args, kwargs, False, autocast(node))
        if any(torch.Tag.nondeterministic_seeded in s.op.tags for s in recorder.steps[count:]):
            raise Stop("draws random numbers")  # a region would draw backward's in forward
    raise Stop("returns nothing")


def _letters(argument: Value, gradient: Value) -> str:
    """The tag of an argument that gets a gradient, or what the dimensions of an operand are."""
    if argument.late or gradient.late or gradient.tag is None or "r" not in gradient.tag:
        raise Stop("has a gradient that mixes rows")
    alike = len(argument.shape) == len(gradient.shape)
    alike = alike and all(map(same, argument.shape, gradient.shape))
    if not alike or argument.tag not in (None, gradient.tag):
        raise Stop("has a gradient with other rows than its argument")
    return gradient.tag


def _check_linear(recorder: Recorder, incoming: list[Value], gradients: list[Value]) -> None:
    """Raises if the gradients are not linear in the incoming ones."""
    depend = {id(v) for v in incoming}
    for step in recorder.steps:
        here = [id(v) in depend for v in step.values]
        if any(here):
            if not _is_linear(step, here):
                name = step.op.overloadpacket.__name__
                raise Stop(f"has a backward that is not linear in its gradient (aten.{name})")
            depend |= {id(v) for v in step.results}
    if any(id(g) not in depend for g in gradients):
        raise Stop("has a backward that does not read its gradient")


def _is_linear(step: Step, depend: list[bool]) -> bool:
    packet, first = step.op.overloadpacket, depend[0] and not any(depend[1:])
    if packet in (A.add, A.sub):
        return all(depend) and len(depend) == 2
    if packet is A.mul:
        return sum(depend) == 1
    return first and (packet in _LINEAR or any(r.alias_info for r in step.op._schema.returns))


@dataclass
class Custom:
    """Runs a custom function in the canonical layout.

    Attributes:
        inputs: the arguments that get a gradient, and what their dimensions are.
        gradients: of the inputs, in terms of ``incoming``.
        outputs: what forward's calls make.
        incoming: the gradients of outputs; None for one that has none.
    """

    inputs: list[tuple[Value, str]]
    gradients: list[Value]
    outputs: list[Value]
    incoming: list[Value | None]

    def __call__(self, environment: Environment) -> list[Tensor]:
        given = [environment.value(*argument, environment.chain) for argument in self.inputs]
        if not environment.grad:  # what backward reads is an input, too
            outputs = [*environment.each(self.outputs)]
            list(self.backward(environment, environment.chain, outputs))
        return list(_Function.apply(environment, self, *given))

    def backward(
        self, environment: Environment, chain: Chain, grads: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        for value, grad in zip(self.incoming, grads, strict=True):
            if value is not None:
                environment.set(value, chain, grad)
        return environment.each(self.gradients, chain)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, environment: Environment, custom: Custom, *_: Tensor) -> Any:
        ctx.environment, ctx.custom, ctx.chain = environment, custom, environment.chain
        # an alias, since an output may be an argument
        made = [A.alias(o) for o in environment.each(custom.outputs)]
        pairs = zip(made, custom.incoming, strict=True)
        ctx.mark_non_differentiable(*(o for o, value in pairs if value is None))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore
        return None, None, *ctx.custom.backward(ctx.environment, ctx.chain, grads)
