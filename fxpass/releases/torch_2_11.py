"""Workarounds for torch 2.11.

In: graphs, settings and objects of torch 2.11. Out: the same as in later releases, in which these
functions change nothing.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node


def return_once(module: GraphModule) -> None:
    """Makes the forward of every ``autograd.Function`` in a graph return each tensor once.

    Dynamo returns all intermediates beside the function's outputs, and nothing reads the gradients
    of intermediates. If an intermediate is also an output (``return y.mul_(2)``, or a cast without
    effect), autograd gives the gradient to the later of the two, and with any backend all gradients
    of the function are silently zero (pytorch issue 180642). Later releases omit such
    intermediates. This function replaces them by None.
    """
    target = torch.ops.higher_order.autograd_function_apply
    for node in module.graph.find_nodes(op="call_function", target=target):
        forward, backward = (_body(module, argument) for argument in node.args[:2])
        if forward is None or backward is None:
            continue
        returns = forward.graph.output_node()
        given: Any = returns.args[0]  # (outputs, tensors saved for backward)
        if not isinstance(given, tuple | list) or not isinstance(given[0], tuple | list):
            continue
        outputs = list(given[0])
        # in a checkpoint, every output has a getitem node, read or not
        read = {u.args[1] for u in node.users if u.target is operator.getitem and u.users}
        gradients = backward.graph.find_nodes(op="placeholder")
        read |= {i for i, gradient in enumerate(gradients) if gradient.users}
        returned = {id(_example(output)) for i, output in enumerate(outputs) if i in read}
        for i, output in enumerate(outputs):
            if i not in read and id(_example(output)) in returned:
                outputs[i] = None
        if outputs != list(given[0]):
            returns.args = ((tuple(outputs), *given[1:]),)
            forward.recompile()


def _body(module: GraphModule, argument: Any) -> GraphModule | None:
    body = getattr(module, str(argument.target), None) if isinstance(argument, Node) else None
    return body if isinstance(body, GraphModule) else None


def _example(output: object) -> object:
    return output.meta.get("example_value", output) if isinstance(output, Node) else output


def describe_encoder_layers() -> None:
    """Adds a meta kernel for encoder layers where torch has none: like the input. Idempotent.

    An encoder layer in evaluation is one operation, which autocast does not cover. torch 2.11
    infers the shape of its result by running it, which raises for bfloat16 activations and float32
    parameters before any backend sees the graph.
    """
    name = "_transformer_encoder_layer_fwd"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
        _library().impl(name, _like_the_input, "Meta")


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library("aten", "IMPL")  # deleting it removes its kernels


def _like_the_input(src: torch.Tensor, *parameters: Any) -> torch.Tensor:
    return torch.empty_like(src)


class CopiedAsNames(set[Any]):
    """A set of functions, in a setting of Dynamo. Its deep copy has the functions' names.

    torch 2.11 logs a copy of its settings whenever it compiles, and warns of functions, which it
    can neither sort nor write as JSON.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> set[str]:
        return {getattr(function, "__qualname__", repr(function)) for function in self}


def region_name(name: str | None) -> dict[str, str]:
    """The keyword argument of Inductor's backend for a compiled region's name; torch 2.11 has
    neither the argument nor such names."""
    return {} if name is None else {"name": name}


def parameter_groups(state: Any) -> list[Any]:
    """The parameter groups of a module's FSDP2 state: in torch 2.11 one at most, in another
    attribute; none for the state of another wrapper."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    group = getattr(state, "_fsdp_param_group", None)
    return [group] if group else []
