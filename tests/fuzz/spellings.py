"""Every way to write a call: from signatures, not by hand.

In: one of the matcher's tables. Out: the spellings of its functions, their signatures as torch itself
knows them, and from values for their parameters the calls, by position, by keyword and by keyword in
another order::

    >>> list(calls(torch.clamp_min, {"input": "z", "min": "0"}))
    ['torch.clamp_min(z, 0)', 'torch.clamp_min(z, min=0)', 'torch.clamp_min(input=z, min=0)',
     'torch.clamp_min(min=0, input=z)']
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Graph
from torch.fx.operator_schemas import get_signature_for_torch_op

from fxpass.graph.functions import function_of, out_of_place
from fxpass.lower.pointwise import POINTWISE

PLACES = {"torch": torch, "F": F, "torch.special": torch.special, "operator": operator}


def name_of(target: Any) -> str:
    """The name of the ATen function that a target calls."""
    op = "call_method" if isinstance(target, str) else "call_function"
    return function_of(Graph().create_node(op, target, (None, "")))


@cache
def _named() -> dict[str, list[Any]]:
    """ATen function → all functions, methods and overloads of tensors that call it."""
    functions = (f for place in PLACES.values() for f in vars(place).values() if callable(f))
    # functorch's dimensions add another index
    names = (name for name in dir(torch.Tensor) if name != "index")
    methods = (name for name in names if callable(getattr(torch.Tensor, name)))
    found: dict[str, list[Any]] = {}
    # torch.dsmm is equal to torch.mm, but has no signature
    ordered = sorted(functions, key=lambda f: getattr(f, "__name__", "") != name_of(f))
    for target in dict.fromkeys((*ordered, *methods, *_overloads())):
        if not isinstance(target, type) and target is not getattr:
            found.setdefault(name_of(target), []).append(target)
    return found


def _overloads() -> Iterator[Any]:
    for name in sorted({s.name.removeprefix("aten::") for s in torch._C._jit_get_all_schemas()}):
        packet = getattr(torch.ops.aten, name, None) if "::" not in name else None
        for overload in packet.overloads() if packet is not None else ():
            arguments = getattr(packet, overload)._schema.arguments
            takes_tensors = any("Tensor" in str(a.type) for a in arguments)
            if takes_tensors and not any(a.is_out for a in arguments):
                yield getattr(packet, overload)


def spellings(table: Collection[str], in_place: bool = False) -> list[Any]:
    """All spellings of the functions of a table; or all of their in-place spellings."""
    chosen = [n for n in _named() if out_of_place(n) in table and (n not in table) == in_place]
    return [target for name in chosen for target in _named()[name]]


class Parameter(NamedTuple):
    """One parameter of a call: its name, whether it must be given, and how it may be."""

    name: str
    required: bool
    by_position: bool = True
    by_keyword: bool = True


def spelled(target: Any) -> str:
    """How a target is written: ``F.relu``, or ``.relu`` for a method."""
    if isinstance(target, str):
        return f".{target}"
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target}"
    name = target.__name__
    for place, module in PLACES.items():
        for candidate in (name, name.removeprefix("special_"), f"{name}_"):
            if getattr(module, candidate, None) is target:
                return f"{place}.{candidate}"
    for module in (torch, F):  # hidden names, of boolean dispatch for example
        for candidate in dir(module):
            if getattr(module, candidate) is target:
                return f"{'F' if module is F else 'torch'}.{candidate}"
    return str(target)


def signatures(target: Any) -> list[tuple[Parameter, ...]]:
    """The parameters of each overload of a target; of a method, the tensor is the first one."""
    if isinstance(target, str):
        found = [_of_schema(schema) for schema in _schemas(target)]
        return found or _inspected(getattr(torch.Tensor, target)) or [_SPECIAL, _SPECIAL[:1]]
    if isinstance(target, torch._ops.OpOverload):
        return [_of_schema(target._schema)]
    known = get_signature_for_torch_op(target) or []
    return [*map(_of_python, known), *_inspected(target)]


# __radd__, __neg__ and their like have no signature that one could ask for
_SPECIAL = (Parameter("self", True), Parameter("other", True, by_keyword=False))


def _inspected(function: Any) -> list[tuple[Parameter, ...]]:
    try:
        return [_of_python(inspect.signature(function))]
    except (TypeError, ValueError):  # not written in Python
        return []


def _of_python(signature: inspect.Signature) -> tuple[Parameter, ...]:
    kinds = inspect.Parameter
    return tuple(
        Parameter(
            p.name,
            p.default is kinds.empty,
            p.kind is not kinds.KEYWORD_ONLY,
            p.kind is not kinds.POSITIONAL_ONLY,
        )
        for p in signature.parameters.values()
        if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    )


def _schemas(method: str) -> list[torch.FunctionSchema]:
    packet = getattr(torch.ops.aten, method, None)
    names = packet.overloads() if packet is not None else ()
    return [getattr(packet, name)._schema for name in names]


def _of_schema(schema: torch.FunctionSchema) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(a.name, not a.has_default_value(), not a.kwarg_only, i > 0)
        for i, a in enumerate(schema.arguments)
        if not a.is_out
    )


def calls(target: Any, values: Mapping[str, str], first: str = "z") -> Iterator[str]:
    """The calls of a target on the logits ``first`` with every parameter that has a value here.

    Args:
        target: a function, or a method's name.
        values: what stands for each parameter; the first parameter of a signature is ``first``
            whatever its name.
    """
    seen = set()
    for signature in signatures(target):
        if not signature:
            continue
        tensor, *rest = signature
        given = [p for p in rest if p.name in values]
        if any(p.required and p.name not in values for p in rest):
            continue
        for some in _selections(given):
            for call in _ways(spelled(target), tensor, some, values, first):
                if call not in seen:
                    seen.add(call)
                    yield call


def _selections(given: Sequence[Parameter]) -> list[list[Parameter]]:
    """Only what has to be given, and everything."""
    return [[p for p in given if p.required], list(given)]


def _ways(
    name: str, tensor: Parameter, some: list[Parameter], values: Mapping[str, str], first: str
) -> Iterator[str]:
    method = name.startswith(".")

    def call(positional: Sequence[str], keywords: Sequence[str], tensor_first: bool = True) -> str:
        positional = [first, *positional] if tensor_first and not method else positional
        inside = ", ".join((*positional, *keywords))
        return f"{first}{name}({inside})" if method else f"{name}({inside})"

    def keyword(p: Parameter) -> str:
        return f"{p.name}={values[p.name]}"

    leading = []
    for p in some:
        if not p.by_position:
            break
        leading.append(p)
    after = some[len(leading) :]
    yield call([values[p.name] for p in leading], [keyword(p) for p in after])
    if not all(p.by_keyword for p in some):
        return
    named = [keyword(p) for p in some]
    yield call([], named)
    yield call([], named[::-1])
    if leading:
        yield call([values[leading[0].name]], [keyword(p) for p in some[1:]][::-1])
    if not method and tensor.by_keyword:
        yield call([], [f"{tensor.name}={first}", *named], tensor_first=False)
        yield call([], [*named[::-1], f"{tensor.name}={first}"], tensor_first=False)


# What the parameters besides the logits may be; the same for whatever has that name.
NUMBERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("other", "b", "y"), ("2.0", "0.5", "-3")),
    "alpha": ("1", "2"),
    "exponent": ("2", "3", "0.5"),
    "min": ("-1.0", "-0.5"),
    "max": ("0.5", "2"),
    "inplace": ("True", "False"),
    "rounding_mode": ("None",),
}


def pointwise_calls(target: Any, first: str = "z") -> Iterator[str]:
    """Calls of a function of one logit: every way with the first of the numbers, the plainest ways
    with the others."""
    seen = set()
    for i in range(max(map(len, NUMBERS.values()))):
        numbers = {name: options[i % len(options)] for name, options in NUMBERS.items()}
        for call in islice(calls(target, numbers, first), 2 if i else None):
            if call not in seen:
                seen.add(call)
                yield call


def all_pointwise_calls() -> list[str]:
    """Those of every row, with the logits as the hole ``{z}``."""
    targets = (*spellings(POINTWISE), *spellings(POINTWISE, in_place=True))
    return sorted({c for t in targets for c in pointwise_calls(t, "{z}")})
