"""Nested graphs that become part of the graph around them: logits are read across their borders.

In: a region. Out: the same region without nested graphs of torch.export's contexts, as Dynamo
writes a context; or without a checkpoint, or a call of a ``torch.compiler.nested_compile_region``::

    %wrap = wrap_with_set_grad_enabled(False, %body, %z)    ->    _set_grad_enabled(False)
    %best = getitem(%wrap, 0)                                     %best = argmax(%z, -1)
                                                                  _set_grad_enabled(True)
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxpass.graph.autocast import autocast_dtype
from fxpass.graph.calls import storage, written
from fxpass.graph.modes import Mode, modes_of
from fxpass.graph.nodes import NoMatch, is_tensor, nested_graph
from fxpass.graph.placements import is_dtensor
from fxpass.graph.region import NESTED_REGIONS, Region
from fxpass.graph.source import source_line

log = logging.getLogger(__name__)

_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled
_CONTEXTS = {_AUTOCAST, _GRAD_MODE}


def inline_contexts(region: Region) -> None:
    """Replaces the calls of torch.export's contexts (autocast, a grad mode) by their nodes.

    Not in a backward pass, which runs after the program's contexts have ended.
    """
    _inline(region, _CONTEXTS)


def inline_call(region: Region, call: Node) -> set[Node]:
    """Replaces the call of a checkpoint or of a nested region by its nodes, if that is safe.

    Returns:
        the new nodes; none if the call stays.
    """
    return _inline(region, {call.target}, [call])


def _inline(region: Region, targets: Collection[Any], calls: Collection[Node] = ()) -> set[Node]:
    graph = region.module.graph
    found = [n for n in graph.nodes if n.target in targets and (not calls or n in calls)]
    old, modes = set(graph.nodes), modes_of(region) if found else {}
    for call in found if not region.backward else ():
        examples = _examples(region, call, modes[call])
        if examples is None:
            continue
        with graph.inserting_before(call):
            results = _inlined(region.module, call, {}, modes[call].grad, examples)
        for result in list(call.users):
            result.replace_all_uses_with(results[result.args[1]])
            graph.erase_node(result)
        graph.erase_node(call)
    for node in graph.find_nodes(op="get_attr") if found else ():
        if not node.users and nested_graph(node) is not None:
            graph.erase_node(node)
    if found:
        region.module.recompile()
    return set(graph.nodes) - old


def _inlined(
    module: GraphModule,
    call: Node,
    known: dict[Node, Any],
    enabled: bool,
    examples: Mapping[Node, Any],
) -> Any:
    """The results of a nested graph, whose nodes are copied to the graph of ``module``.

    Args:
        known: the copies of the nodes beside ``call``, where it is nested itself.
        enabled: the grad mode around it.
        examples: the example values of the copies that do not keep those of the nested graph.
    """
    graph, (given, body, operands) = module.graph, _parts(call)
    copies: dict[Node, Any] = {}
    inputs = body.graph.find_nodes(op="placeholder")
    for node, operand in zip(inputs, operands, strict=True):
        copies[node] = known.get(operand, operand) if isinstance(operand, Node) else operand
    inside: Any = enabled
    entered = None
    if call.target is _AUTOCAST:
        entered = graph.call_function(_enter_autocast, given)
    elif call.target is _GRAD_MODE:
        (inside,) = given
        graph.call_function(torch._C._set_grad_enabled, given)
    results: Any = ()
    for node in body.graph.nodes:
        if node.op == "output":
            results = map_arg(node.args[0], copies.__getitem__)
        elif node.target in _CONTEXTS:
            copies[node] = _inlined(module, node, copies, inside, {})
        elif node.target is operator.getitem and isinstance(copies[node.args[0]], tuple | list):
            copies[node] = copies[node.args[0]][node.args[1]]
        elif node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                copies[node].target = _attribute(module, body, node)
            if node in examples:
                copies[node].meta["example_value"] = examples[node]
    if entered is not None:
        graph.call_function(_exit_autocast, (entered,))
    elif call.target is _GRAD_MODE:
        graph.call_function(torch._C._set_grad_enabled, (enabled,))
    return results


def _parts(call: Node) -> tuple[tuple[Any, ...], GraphModule, tuple[Any, ...]]:
    """What a call gives to a context, the nested graph, and what the call gives to the graph."""
    bodies = ((i, nested_graph(argument)) for i, argument in enumerate(call.args))
    position, body = next((i, body) for i, body in bodies if body is not None)
    named = call.target in NESTED_REGIONS  # the name of a nested region follows its graph
    return call.args[:position], body, call.args[position + 1 + named :]


def _attribute(module: GraphModule, body: GraphModule, node: Node) -> str:
    """The name in ``module`` of what ``node`` gets from ``body``."""
    name, count = f"{node.target}", 0
    while hasattr(module, name):
        count += 1
        name = f"{node.target}_{count}"
    setattr(module, name, getattr(body, str(node.target)))
    return name


def _is_seen_through(call: Node) -> bool:
    """Whether the inputs and results of a nested graph have the example values of what the graph
    around it gives and takes, so that a write to one of them is seen in both."""
    _, body, operands = _parts(call)
    inputs = body.graph.find_nodes(op="placeholder")
    pairs: list[tuple[Any, Any]] = [*zip(inputs, operands, strict=False)]
    if len(pairs) != len(inputs) or any(isinstance(v, Node) for v in call.kwargs.values()):
        return False
    returned: Any = body.graph.output_node().args[0]
    if any(user.target is not operator.getitem for user in call.users):
        return False
    pairs += [(returned[user.args[1]], user) for user in call.users]  # type: ignore[index]
    alike = all(isinstance(one, Node) and _are_alike(one, other) for one, other in pairs)
    return alike and all(_is_seen_through(n) for n in body.graph.nodes if n.target in _CONTEXTS)


def _are_alike(one: Node, other: Any) -> bool:
    """Whether two values are no tensors, or tensors of one memory."""
    tensors = is_tensor(one), is_tensor(other)
    return storage(one) == storage(other) if all(tensors) else not any(tensors)


# ---------------------------------------------------------------- nested regions


def _examples(region: Region, call: Node, mode: Mode) -> dict[Node, Any] | None:
    """The example values of the nodes of a nested graph that differ in this call; None if the call
    stays."""
    if call.target not in NESTED_REGIONS:
        return {} if _is_seen_through(call) else None
    try:
        _check(call, mode)
        return _examples_of_call(region, call, mode)
    except Exception as error:  # a call that stays is run as it is
        log.debug("%s: the nested region stays: %s", source_line(call), error)
        return None


def _check(call: Node, mode: Mode) -> None:
    """Raises NoMatch where the nodes of a nested region may not be part of the graph around it."""
    _, body, operands = _parts(call)
    if written(call):
        raise NoMatch(call, "it may write to its inputs")
    if mode.inference or mode.transforms:
        raise NoMatch(call, "it is in inference mode, or in a transform of torch.func")
    if body.meta.get("nested_region_config") is not None:
        raise NoMatch(call, "it is compiled with options of its own")
    if any(is_tensor(n) and is_dtensor(n.meta["example_value"]) for n in operands):
        raise NoMatch(call, "it is given a DTensor")
    if call.kwargs or any(user.target is not operator.getitem for user in call.users):
        raise NoMatch(call, "it is not called as Dynamo calls it")
    for node in body.graph.nodes:
        if node.op == "call_module" or nested_graph(node) is not None:
            raise NoMatch(node, f"%{node.name} calls another graph")
        valueless = "example_value" not in node.meta and node.op != "output"
        if valueless and node.target is not operator.setitem:  # it may switch a mode
            raise NoMatch(node, f"%{node.name} has no value")
        if any(map(free_unbacked_symbols, tree_leaves(node.meta.get("example_value")))):
            raise NoMatch(node, f"%{node.name} has a size that depends on data")


def _examples_of_call(region: Region, call: Node, mode: Mode) -> dict[Node, Any]:
    """What the nodes of a nested region compute in one of its calls, without data.

    All calls share one body, whose example values are the first call's: with them, the tensors of
    two calls would look like aliases.
    """
    _, body, operands = _parts(call)
    inputs = body.graph.find_nodes(op="placeholder")
    values = {
        node: operand.meta["example_value"] if isinstance(operand, Node) else operand
        for node, operand in zip(inputs, operands, strict=True)
    }
    given = _tensors(list(values.values()))
    calls = [n for n in body.graph.nodes if n.op in ("call_function", "call_method")]
    for node in body.graph.find_nodes(op="get_attr"):
        values[node] = node.meta["example_value"]
    outside = set(map(_memory, _tensors(list(values.values()))))
    with _as_called(region, call, mode, given):
        for node in calls:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            method = node.op == "call_method"
            function: Any = getattr(args[0], str(node.target)) if method else node.target
            values[node] = function(*(args[1:] if method else args), **kwargs)
            _check_alike(node, values[node], node.meta.get("example_value"))
        _share(call, values, outside)
    return {n: values[n] for n in calls if "example_value" in n.meta}


def _share(call: Node, values: Mapping[Node, Any], outside: set[int]) -> None:
    """Gives the results of a call, and their aliases in it, the memory of the results' old example
    values: of these, later nodes are views. No result may have the memory of what is ``outside``.
    """
    returned: Any = _parts(call)[1].graph.output_node().args[0]
    old: dict[int, Tensor] = {}
    for user in call.users:
        result = values[returned[user.args[1]]]
        _check_alike(user, result, expected := user.meta["example_value"])
        if not isinstance(result, Tensor):
            continue
        layout = [*result.shape, *result.stride()]
        memory = _memory(result)
        if layout != [*expected.shape, *expected.stride()] or memory in outside:
            raise NoMatch(user, f"%{user.name} has another layout, or is an alias of an input")
        if _memory(old.setdefault(memory, expected)) != _memory(expected):
            raise NoMatch(user, f"%{user.name} is an alias of another result")
    if len(set(map(_memory, old.values()))) < len(old):
        raise NoMatch(call, "two of its results share memory")
    made = _tensors(list(values.values()))
    shared = [(t, old[_memory(t)]) for t in made if _memory(t) in old]
    for tensor, expected in shared:
        layout = tensor.shape, tensor.stride(), tensor.storage_offset()
        tensor.data = expected.detach().as_strided(*layout)


@contextmanager
def _as_called(region: Region, call: Node, mode: Mode, given: list[Tensor]) -> Iterator[None]:
    """Functions run as they do in the call, without data."""
    # not that of the compilation: for the backend, Dynamo makes another one
    fake_modes = [t.fake_mode for t in given if isinstance(t, FakeTensor)]
    if not fake_modes:
        raise NoMatch(call, "no operand is a tensor")
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(mode.grad))
        for kind in {t.device.type for t in given}:
            if torch.amp.is_autocast_available(kind):
                dtype = autocast_dtype(region, call, torch.device(kind))
                # what is cached has no data
                autocast = torch.autocast(kind, dtype, dtype is not None, cache_enabled=False)
                stack.enter_context(autocast)
        stack.enter_context(fake_modes[0])
        stack.enter_context(_NoRandomNumbers(call))
        yield


class _NoRandomNumbers(TorchDispatchMode):
    """A function that draws random numbers raises NoMatch."""

    def __init__(self, call: Node) -> None:
        super().__init__()
        self._call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NoMatch(self._call, "it draws random numbers")
        return func(*args, **(kwargs or {}))


def _check_alike(node: Node, one: Any, other: Any) -> None:
    """Raises NoMatch unless two values differ in sizes at most."""
    if list(map(_kind, tree_leaves(one))) != list(map(_kind, tree_leaves(other))):
        raise NoMatch(node, f"%{node.name} is another in this call")


def _kind(example: Any) -> Any:
    if not isinstance(example, Tensor):
        return None
    return example.dtype, example.dim(), example.device, example.requires_grad


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
