"""The logits among a call's arguments, and views and edits of tensors with classes.

In: a node that reads a tensor with classes. Out: the :class:`fxpass.match.classes.Classes` of its
operand; or of its result, if the node rearranges rows, selects classes, or adds a bias::

    getitem(%z, (slice(None), %chosen))    ->    edits = (Taken(%chosen),)
    add(%z, %bias)                         ->    edits = (Added(class_bias, 1),)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxpass.graph.calls import arguments, first_operand
from fxpass.graph.functions import CASTS, function_of, reads_values
from fxpass.graph.nodes import REQUIRED, NoMatch, is_tensor, value
from fxpass.graph.placements import is_dtensor
from fxpass.match.classes import Classes, Flow, has_classes
from fxpass.match.edits import (
    Added,
    Step,
    Taken,
    keeps_rows,
    symbols_of,
)
from fxpass.match.views import index_of
from fxpass.spec.dtypes import short
from fxpass.spec.expression import Z


def operand_of(flow: Flow, node: Node) -> Classes:
    operand = first_operand(node)
    if operand not in flow.classes:
        raise NoMatch.at(node, "reads logits in another place")
    others = [n for n in node.all_input_nodes if n is not operand and n in flow.classes]
    if any(reads_values(node, n) for n in others):
        raise NoMatch.at(node, "reads logits in two places")
    return flow.classes[operand]


def check_dim(node: Node, like: Classes, dim: Any) -> None:
    if isinstance(dim, tuple | list) and len(dim) == 1:
        (dim,) = dim
    rank = len(value(first_operand(node)).shape)
    if not isinstance(dim, int) or dim % rank != like.dim:
        raise NoMatch.at(node, "is not over the classes alone")


def check_dtype(node: Node, given: dict[str, Any]) -> None:
    old, new = value(first_operand(node)).dtype, given.get("dtype")
    if new is not None and (new == torch.float64) != (old == torch.float64):
        raise NoMatch.at(node, "casts to or from float64")
    if new is not None and old.is_floating_point and not new.is_floating_point:
        raise NoMatch.at(node, f"rounds the logits to {short(new)}")


def picks_rows_and_classes(node: Node) -> bool:
    """Whether a node is ``z[arange(N), index]`` of logits ``[N, V]``, or of other ranges; or of
    logits ``[B, S, V]`` ``z[arange(B)[:, None], arange(S), index]``."""
    index = index_of(node) if function_of(node) in ("getitem", "index") else ()
    if len(index) != value(first_operand(node)).dim() or len(index) < 2 or not is_tensor(index[-1]):
        return False
    return all(isinstance(rows, _NUMBERS) or _range_of(rows) for rows in index[:-1])


_NUMBERS = (range, list, tuple)


def whole_range(flow: Flow, entry: Any, rows: Sequence[Any], axis: int = 0) -> bool:
    """Whether an entry of an index is, along one dimension of ``rows``, all numbers of this
    dimension: ``arange``, which nothing has changed, or a list of numbers."""
    count = rows[axis]
    if isinstance(entry, _NUMBERS):
        return len(rows) == 1 and isinstance(count, int) and [*entry] == [*range(count)]
    if (source := _range_of(entry)) is None:
        return False
    given = arguments(source, _ARANGE)
    whole = given["start"] == 0 and given["step"] == 1 and value(source).shape[0] == count
    shape = [1] * (len(rows) - value(entry).dim()) + list(value(entry).shape)
    along = shape == [count if i == axis else 1 for i in range(len(rows))]
    return whole and along and not flow.writes([source])


def _range_of(entry: Any) -> Node | None:
    """The ``arange`` whose elements an entry of an index has, in their order."""
    while is_tensor(entry) and value(entry).dtype in (torch.int32, torch.int64):  # others round
        if function_of(entry) == "arange":
            return entry
        entry = first_operand(entry) if keeps_order(entry) else None
    return None


def keeps_order(node: Node) -> bool:
    """Whether a node has the elements of its operand in their order."""
    function = function_of(node)
    if function == "getitem" and is_tensor(node.args[0]):  # rows[:, None]
        return all(entry in (None, ..., slice(None)) for entry in index_of(node))
    same = function in ("unsqueeze", "squeeze", "view", "reshape", "flatten", "contiguous")
    return function in CASTS or (same and value(node).dtype == value(first_operand(node)).dtype)


_ARANGE = {
    **{"start": 0, "end": REQUIRED, "step": 1, "dtype": None, "device": None},
    **{"layout": None, "pin_memory": None, "requires_grad": False},
}


def check_cast(node: Node) -> None:
    old, new = value(first_operand(node)), value(node)
    if old.device != new.device:
        raise NoMatch(
            node,
            f"%{node.name} moves the logits from {old.device} to {new.device}; move the labels to "
            f"{old.device} instead, and the loss afterwards",
        )
    if new.dtype.itemsize < 2:
        raise NoMatch.at(node, f"rounds the logits to {new.dtype}")
    if new.dtype == torch.float64 and old.dtype != torch.float64:
        raise NoMatch.at(node, f"casts {old.dtype} logits to float64; the fused loss is f32")


def check_plain(node: Node) -> None:
    """``NoMatch`` unless a node's value is a floating-point tensor, plain or a DTensor."""
    example = value(node)
    if not example.is_floating_point():
        raise NoMatch(node, f"%{node.name} is {example.dtype}, not floating point")
    if example.dtype.itemsize < 2:
        raise NoMatch(node, f"%{node.name} is {example.dtype}, which the fused loss does not take")
    if is_functorch_wrapped_tensor(example):
        raise NoMatch(node, f"%{node.name} is inside a torch.func transform (vmap, grad, ...)")
    # a parameter of any class, such as a quantized weight, is an instance of Parameter
    plain = (torch._subclasses.FakeTensor, torch.nn.Parameter)
    plain = isinstance(example, plain) and not is_traceable_wrapper_subclass(example)
    if not (type(example) is torch.Tensor or plain or is_dtensor(example)):
        raise NoMatch(node, f"%{node.name} is a {type(example).__name__}, not a plain tensor")


# ---------------------------------------------------------------- views and edits


def viewed(flow: Flow, like: Classes, step: Step) -> Classes:
    """A view of a tensor with classes. The log-softmax of other rows is one of another base.

    Raises:
        NoMatch: it rearranges rows whose values depend on tensors or reductions of these rows.
    """
    found = like if step.view.classes is None else _taken(like, step)
    if not step.view.target:
        return found
    found = replace(found, steps=(*like.steps, step), dim=step.dim)
    if keeps_rows(step):
        return found
    logs = {base.log: base for base in flow.bases if like.expr.has(base.log)}
    read = symbols_of(like.expr).union(*(symbols_of(base.logit) for base in logs.values()))
    if any(map(flow.varies, read)):
        node = step.node
        raise NoMatch.at(node, f"rearranges `{like.expr}`")
    others: Any = {
        log: flow.base(found, base.transform, base.scale).log for log, base in logs.items()
    }
    return replace(found, expr=like.expr.xreplace(others))


def _taken(like: Classes, step: Step) -> Classes:
    """Some of the classes of a function of the logits alone."""
    if any(s != Z and has_classes(s) for s in symbols_of(like.expr)):
        node = step.node
        raise NoMatch.at(node, f"selects classes of `{like.expr}`")
    index: Any = step.view.classes
    if isinstance(index, slice):
        index = index.start, index.stop, index.step
    return replace(like, edits=(*like.edits, Taken(index)))


def with_bias(like: Classes) -> Classes:
    """An expression that is linear in the logit and in vectors ``[V]``, with these as biases."""
    vectors = sorted((s for s in symbols_of(like.expr) if s.name.startswith("class_")), key=str)
    if not vectors or not like.expr.has(Z):
        return like
    factor, factors = like.expr.diff(Z), [like.expr.diff(v) for v in vectors]
    if factor == 0 or not all(f.is_number for f in (factor, *factors)):
        return like
    rest = like.expr.subs(dict.fromkeys(vectors, 0))
    sums = rest + sum(v * f for v, f in zip(vectors, factors, strict=True))
    if sympy.expand(like.expr - sums) != 0:
        return like  # a mask has the derivative 0
    added = (Added(v, f / factor) for v, f in zip(vectors, factors, strict=True))
    return replace(like, expr=rest, edits=(*like.edits, *added))
