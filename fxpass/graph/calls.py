"""Reads a call: the operands that it writes, whatever the mix of positional and keyword arguments.

In: a node of a Dynamo graph. Out: the tensor operands that the call may write::

    torch.matmul(other=%w, input=%x)    ->    nothing
    F.relu(%h, True)                    ->    %h

The names come from the schema of an ATen operation or the signature of a Python function. A schema
that declares no write, or a row of the tables below, proves that a call is pure. An unknown call
may write every tensor operand.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.operator_schemas import get_signature_for_torch_op

from fxpass import messages
from fxpass.graph.functions import (
    CASTS,
    GET_DATA,
    function_of,
    function_of_method,
)
from fxpass.graph.nodes import (
    REQUIRED,
    NoMatch,
    Target,
    is_tensor,
    needs_gradient,
    nested_graph,
    value,
)
from fxpass.graph.placements import is_dtensor, placement_name
from fxpass.graph.source import call_name


@dataclass(frozen=True)
class Overload:
    """One overload of a callee.

    Attributes:
        parameters: name → default (``REQUIRED`` without one), in order.
        positional: the number of parameters that may be positional.
        packs: whether all positional arguments after the first form a list (``z.view(2, 3)``).
        lists: the parameters that are lists of tensors.
        writes: the parameters that the schema declares as written.
    """

    parameters: Mapping[str, Any]
    positional: int
    packs: bool = False
    lists: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The given arguments by name; None if they do not fit this overload."""
        if self.packs and len(args) > 2:
            args = (args[0], args[1:])
        if len(args) > self.positional:
            return None
        given = dict(zip(self.parameters, args, strict=False))
        for name, argument in kwargs.items():
            if name not in self.parameters:
                name = _NUMPY_NAMES.get(name, name)
            if name in given or name not in self.parameters:
                return None
            given[name] = argument
        if any(is_tensor(given.get(name)) for name in self.lists):
            return None
        missing = (n for n, d in self.parameters.items() if d is REQUIRED and n not in given)
        return None if any(missing) else given


# A schema's name of a parameter → the one name that all spellings of a function have for it.
_NAMES = {"self": "input", "axis0": "dim0", "axis1": "dim1"}
# In calls, torch also accepts NumPy's names of some parameters.
_NUMPY_NAMES = {
    **_NAMES,
    **{"axis": "dim", "keepdims": "keepdim", "x2": "other"},
    **dict.fromkeys(("x", "a", "x1"), "input"),
}


def first_operand(node: Node) -> Node:
    """A call's first argument, positional or by name, which has to be a tensor of the graph.

    Raises:
        NoMatch: it is none.
    """
    names = (n for n in node.kwargs if _NUMPY_NAMES.get(n, n) == "input")
    operand = node.args[0] if node.args else node.kwargs.get(next(names, ""))
    if not isinstance(operand, Node) or not is_tensor(operand):
        raise NoMatch(node, messages.NO_TENSOR.format(name=node.name, call=call_name(node)))
    return operand


# ---------------------------------------------------------------- the overloads of a callee


def overloads(op: str, target: Target) -> tuple[Overload, ...]:
    """The overloads of a function or method; empty if they are unknown."""
    # torch.mm and torch.dsmm are equal, but only the name mm has schemas: the name is in the key
    return _overloads(op, target, getattr(target, "__name__", ""))


@functools.lru_cache(maxsize=4096)
def _overloads(op: str, target: Target, name: str) -> tuple[Overload, ...]:
    if op == "call_method":
        # a special method such as __mul__ has the schemas of the function that it calls
        schemas = _schemas(target) or _schemas(function_of_method(target))
        method = getattr(torch.Tensor, str(target), None)
        # norm and split are functions of Python, with parameters that no schema has
        in_python = isinstance(method, types.FunctionType) and not str(target).startswith("__")
        signature = _of_signature(method) if in_python or not schemas else ()
        return (*map(_of_schema, schemas), *signature)
    if isinstance(target, torch._ops.OpOverload):
        return (_of_schema(target._schema),)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return tuple(_of_schema(getattr(target, name)._schema) for name in target.overloads())
    if isinstance(target, types.BuiltinFunctionType) and target.__module__ != "_operator":
        _, schemas = get_signature_for_torch_op(target, return_schemas=True)
        return tuple(map(_of_schema, schemas or _schemas(name)))
    return _of_signature(target)


def _schemas(name: str) -> list[Any]:
    return torch._C._jit_get_schemas_for_operator(f"aten::{name}")


def _of_schema(schema: Any) -> Overload:
    parameters = {}
    writes = set()
    positional = 0
    for argument in schema.arguments:
        name = _NAMES.get(argument.name, argument.name)
        default = argument.default_value if argument.has_default_value() else REQUIRED
        parameters[name] = default
        positional += not argument.kwarg_only
        alias = argument.alias_info
        if alias is not None and alias.is_write and "Tensor" in str(argument.type):
            writes.add(name)
    second = schema.arguments[1] if positional == 2 else None
    packs = second is not None and str(second.type) in ("List[int]", "List[Tensor]")
    lists = {n for n, a in zip(parameters, schema.arguments, strict=True) if _is_list(a)}
    return Overload(parameters, positional, packs, frozenset(lists), frozenset(writes))


def _is_list(argument: Any) -> bool:
    return "List[Tensor]" in str(argument.type)


def _of_signature(function: Any) -> tuple[Overload, ...]:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    parameters = {}
    positional = 0
    for parameter in found:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return ()
        # no caller can use the name of a positional-only parameter
        hidden = "_" if parameter.kind is parameter.POSITIONAL_ONLY else ""
        default = REQUIRED if parameter.default is parameter.empty else parameter.default
        parameters[hidden + _NAMES.get(parameter.name, parameter.name)] = default
        positional += parameter.kind is not parameter.KEYWORD_ONLY
    return (Overload(parameters, positional),)


# ---------------------------------------------------------------- what a call writes

_OPERATORS_THAT_WRITE = {
    getattr(operator, name)
    for name in ("setitem", "delitem", *(n for n in operator.__all__ if n[:1] == "i"))
    # tensors have no product in place
    if name not in ("index", "indexOf", "inv", "invert", "is_", "is_not", "itemgetter", "imatmul")
}
_PURE_FUNCTIONS: set[Target] = {
    *({getattr(operator, name) for name in operator.__all__} - _OPERATORS_THAT_WRITE),
    *(getattr, len, GET_DATA),
    # variadic functions, whose signatures name no parameters
    *(torch.einsum, torch.meshgrid, torch.broadcast_tensors, torch.block_diag),
}
# Methods without a schema.
_PURE_METHODS = {
    *("float", "double", "half", "bfloat16", "long", "int", "bool", "short", "char", "byte"),
    *("type", "where", "cpu", "cuda", "new_tensor", "ndimension", "tolist"),
    *(f"__{name}__" for name in ("eq", "ne", "len", "getitem")),
}
# Modules whose Python functions write only if one of their parameters asks for it.
_MODULES = ("torch.nn.functional", "torch.functional", "torch")
# Modules of the functions by which torch.func.vmap and grad wrap and unwrap tensors.
_TRANSFORMS = (
    *("torch._functorch.predispatch", "torch._functorch.eager_transforms"),
    "torch._C._functorch",
)
# Parameter that asks for a write unless it is None or False → the parameters that are written then.
# No schema declares that a normalisation writes its running statistics.
_WRITES_IF = {
    "out": ("out",),
    "inplace": ("input",),
    "max_norm": ("weight",),
    **dict.fromkeys(("training", "use_input_stats"), ("running_mean", "running_var")),
}


def written(node: Node) -> list[Node]:
    """The tensor operands whose memory a node may change; all operands of an unknown call."""
    operands = [n for n in node.all_input_nodes if is_tensor(n)]
    target: Any = node.target
    if not operands or node.op == "output" or placement_name(target):
        return []
    if getattr(target, "__module__", "") in _TRANSFORMS:
        return []
    if isinstance(target, torch._ops.HigherOrderOperator):
        bodies = list(filter(None, map(nested_graph, node.all_input_nodes)))
        return [] if bodies and not any(map(_writes_outside, bodies)) else operands
    if node.op == "call_method":
        if target in _PURE_METHODS:
            return []
        declared = bool(_schemas(function_of_method(target)))
    else:
        if target in _PURE_FUNCTIONS:
            return []
        if target in _OPERATORS_THAT_WRITE:
            return operands[:1]
        declared = not isinstance(target, types.FunctionType) or target.__module__ in _MODULES
    forms = overloads(node.op, target) if declared else ()
    bound = [(form, form.bind(node.args, node.kwargs)) for form in forms]
    fitting = [(form, given) for form, given in bound if given is not None]
    if not fitting:
        return operands
    found: dict[Node, None] = {}
    for form, given in fitting:
        given = {**form.parameters, **given}
        asked = [n for n in _WRITES_IF if given.get(n) not in (None, False, REQUIRED)]
        for name in (*form.writes, *(n for switch in asked for n in _WRITES_IF[switch])):
            torch.fx.map_arg((given.get(name),), found.setdefault)
    return [n for n in found if is_tensor(n)]


def _writes_outside(body: GraphModule) -> bool:
    """True if a nested graph may write to one of its inputs."""
    outside = {storage(n) for n in body.graph.find_nodes(op="placeholder") if is_tensor(n)}
    return any(
        storage(operand) in (None, *outside)
        for node in body.graph.nodes
        for operand in written(node)
    )


def storage(node: Node) -> int | None:
    """The identity of a node's memory, equal for aliases; None in a transform of torch.func, which
    hides it; 0 for a number, which has no memory."""
    example: Any = node.meta["example_value"]
    if not is_tensor(node):
        return 0
    if is_dtensor(example):
        example = example._local_tensor  # to_local and from_local share it
    try:
        return example.untyped_storage()._cdata
    except NotImplementedError:
        return None


def has_history(node: Node) -> bool:
    """True if autograd passes a node's gradient on to the operands of the node."""
    try:
        return value(node).grad_fn is not None
    except RuntimeError:  # a view made under no_grad, of a tensor that was written to since
        return False


def is_cut(node: Node) -> bool:
    """True for a view that was made under ``no_grad``: it needs a gradient, as a leaf of autograd
    does, and passes no gradient on to its base."""
    calls = node.op in ("call_function", "call_method")
    if not (calls and needs_gradient(node)) or has_history(node):
        return False
    sources = [n for n in node.all_input_nodes if needs_gradient(n) and storage(n) == storage(node)]
    if any(map(has_history, sources)):
        return True
    function = function_of(node)
    itself = function in (*CASTS, "contiguous", "flatten") or function.endswith("_")
    return bool(sources) and not itself  # else the call has returned a leaf
