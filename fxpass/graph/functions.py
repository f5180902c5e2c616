"""The ATen function that a node calls: one name for all of its spellings.

In: a node of a Dynamo graph. Out: the name of a function; with ``_`` at its end if the spelling is
in place, as ATen has it::

    torch.div(%z, 2)    %z / 2    %z.true_divide(2)    aten.div.Tensor(%z, 2)    ->    "div"
    %z /= 2             %z.div_(2)                                               ->    "div_"
"""

from __future__ import annotations

import functools
import operator
from types import BuiltinFunctionType, FunctionType

import torch
import torch.nn.functional as F
from torch.fx import Node

from fxpass.graph.nodes import Target

# Python's operators that are functions of ATen. Other names of the module "operator" have another
# meaning: "index" makes an int.
_OPERATORS = (
    *("abs", "add", "getitem", "matmul", "mul", "neg", "pos", "pow", "sub", "truediv"),
    *("ge", "gt", "le", "lt", "mod", "setitem"),
)

# Dynamo's spelling of z.data.
GET_DATA: Target = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]

# Methods that take their operands in the opposite order.
REFLECTED = {
    **{f"__r{name}__": name for name in ("add", "sub", "mul", "truediv", "pow", "matmul")},
    "__rdiv__": "div",
}

# Another name of a function → ATen's name. ATen's decompositions, and its variants for numbers of
# dimensions, have the name of the function that they compute.
_OTHER_NAMES = {
    **dict.fromkeys(("divide", "true_divide", "truediv"), "div"),
    **{"subtract": "sub", "multiply": "mul", "negative": "neg", "pos": "positive"},
    **{"mod": "remainder", "absolute": "abs", "clip": "clamp", "expit": "sigmoid"},
    **{"greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le"},
    **dict.fromkeys(("swapaxes", "swapdims"), "transpose"),
    **dict.fromkeys(("dsmm", "spmm"), "mm"),
    **{"moveaxis": "movedim", "_unsafe_view": "view", "_to_copy": "to"},
    **{"T": "numpy_T", "H": "matrix_H", "sym_size": "size", "sym_stride": "stride"},
    **{"cross_entropy": "cross_entropy_loss", "nll_loss2d_forward": "nll_loss_forward"},
    **dict.fromkeys(("nll_loss_nd", "nll_loss2d"), "nll_loss"),
}


def function_of(node: Node) -> str:
    """The name of the ATen function that a node calls; empty if the node calls another function.

    An attribute of a tensor (``z.mT``) is the function that computes it. A function of Python that
    is no operation of torch, such as ``F.cross_entropy``, has the name of the ATen function that
    computes the same.
    """
    if node.op == "call_method":
        return function_of_method(str(node.target))
    if node.op != "call_function":
        return ""
    if node.target is getattr:
        return _aten_name(str(node.args[1]))
    return function_of_target(node.target)


def is_in_place(function: str) -> bool:
    """True for the name of an in-place spelling."""
    return function.endswith("_")


def out_of_place(function: str) -> str:
    """The name of the function that an in-place spelling computes; other names as they are."""
    return function.removesuffix("_")


@functools.lru_cache(maxsize=4096)
def function_of_method(name: str) -> str:
    """The name of the ATen function that a method calls."""
    if name == "where":  # its operands are in another order
        return ""
    if name in REFLECTED:
        return _aten_name(REFLECTED[name])
    plain = name.removeprefix("__").removesuffix("__")
    return _aten_name(plain if plain in _OPERATORS else name)


@functools.lru_cache(maxsize=4096)
def function_of_target(target: Target) -> str:
    """The name of the ATen function that a function of torch, or an overload, computes."""
    packet = getattr(target, "overloadpacket", target)
    if isinstance(packet, torch._ops.OpOverloadPacket):
        namespace, _, name = packet._qualified_op_name.partition("::")
        return _aten_name(name) if namespace == "aten" else ""
    return _functions().get(target, "")


@functools.cache
def _functions() -> dict[Target, str]:
    """The functions of torch and Python's operators, by identity: a user's ``tanh`` is none."""
    found: dict[Target, str] = {}
    for place in (torch.special, F, torch):
        for name, function in vars(place).items():
            if isinstance(function, BuiltinFunctionType | FunctionType):
                found[function] = _aten_name(name)
    for name in _OPERATORS:
        found[getattr(operator, name)] = _aten_name(name)
        if hasattr(operator, f"i{name}"):
            found[getattr(operator, f"i{name}")] = f"{_aten_name(name)}_"
    found[operator.imatmul] = "matmul"  # a tensor has no product in place
    found[GET_DATA] = "detach"
    return found


def _aten_name(name: str) -> str:
    if is_in_place(name) and not name.endswith("__"):
        return f"{_aten_name(out_of_place(name))}_"
    name = name.removeprefix("special_")
    return _OTHER_NAMES.get(name, name)


# ---------------------------------------------------------------- casts and metadata

# The example values show dtypes and devices; nothing reads the arguments.
CASTS = frozenset(
    ("to", "float", "half", "bfloat16", "double", "type", "type_as", "cpu", "cuda"),
)

# Losses by name.
LOSSES = frozenset(("cross_entropy_loss", "nll_loss", "linear_cross_entropy"))

# Read a tensor's sizes, dtype or strides, not its values.
_METADATA = {
    *("size", "dim", "numel", "ndimension", "stride", "is_floating_point", "sym_numel"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "_assert_tensor_metadata"),
}

# Read only the sizes, the dtype or the device of their second operand.
_LIKE = {"to", "type_as", "view_as", "reshape_as", "expand_as"}

# Compute nothing: without users, they read nothing. Tracers leave them in a graph.
_ALIASES = {"detach", "alias"}


def reads_values(user: Node, node: Node) -> bool:
    """True if ``user`` reads the values of ``node``, not only its sizes or its dtype."""
    function = function_of(user)
    if function in _METADATA or (function in _ALIASES and not user.users):
        return False
    first = user.args[0] if user.args else None
    return not (function in _LIKE and first is not node)
