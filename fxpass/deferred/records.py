"""Records of deferred logits: calls of torch functions, of the logits of models and operands.

In: a torch function and its arguments. Out: a :class:`Call`, a small graph: its arguments are runs
of models, results of other calls, plain operands, and numbers::

    logits / 2                 Call(div, (run, 2))
    (logits / 2).softmax(-1)   Call(softmax, (CallResult(that call, 0), -1))

:func:`evaluated` computes results of calls, on tensors or as the nodes of another graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.utils import _pytree as pytree

from fxpass import messages
from fxpass.deferred.inputs import RecordedInput
from fxpass.deferred.run import Run
from fxpass.rows.tags import Stop

# An operand is copied if it takes at most 1/SMALL of the memory of the logits.
SMALL = 8


@dataclass(frozen=True, eq=False)
class PlainOperand:
    """A plain tensor among the arguments of calls.

    Attributes:
        tensor: the tensor, with its history.
        input: the check that a large saved tensor is unchanged.
        copy: the copy of a small saved tensor.
    """

    tensor: Tensor
    input: RecordedInput | None = None
    copy: Tensor | None = None

    def saved(self, logits_bytes: int) -> PlainOperand:
        """The operand for a computation at any later time: a copy or a check of its values."""
        if self.input is not None or self.copy is not None:
            return self
        if self.tensor.nbytes * SMALL <= logits_bytes:
            return PlainOperand(self.tensor, copy=self.tensor.detach().clone())
        return PlainOperand(self.tensor, RecordedInput(self.tensor, is_row=False))

    def value(self, source: str) -> Tensor:
        """The values at the time of the call.

        Raises:
            StaleLogitsError: the program has changed them.
        """
        if self.input is not None:
            return self.input.checked(source)
        return self.tensor.detach() if self.copy is None else self.copy


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a torch function.

    Attributes:
        function: the function.
        args, kwargs: its arguments; an :data:`Operand` is in the place of a tensor.
        grad: whether gradients are enabled.
        autocast: the dtype of autocast, or None.
        writes: the operand that it writes to, or None.
    """

    function: Any
    args: Any
    kwargs: Any
    grad: bool
    autocast: torch.dtype | None
    writes: Operand | None = None

    @property
    def operands(self) -> list[Operand]:
        """The tensors among its arguments, each once."""
        leaves = pytree.tree_leaves((self.args, self.kwargs), is_leaf=is_operand)
        return list({id(leaf): leaf for leaf in leaves if is_operand(leaf)}.values())

    def function_in_modes(self) -> Callable[..., list[Tensor]]:
        """The function, in the modes of the call; it returns the tensors of the results, and refers
        to none of the arguments."""
        function = self.function
        grad = self.grad
        dtype = self.autocast

        def in_modes(*args: Any, **kwargs: Any) -> list[Tensor]:
            given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            kind = given[0].device.type
            autocast = torch.autocast(kind, dtype, dtype is not None, cache_enabled=False)
            with torch.set_grad_enabled(grad and torch.is_grad_enabled()), autocast:
                result = function(*args, **kwargs)
            return [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]

        in_modes.__name__ = getattr(function, "__name__", "call").strip("_")
        in_modes.function = function  # type: ignore[attr-defined]
        return in_modes


@dataclass(frozen=True, eq=False)
class CallResult:
    """A tensor that a call makes: one of its results, or, without an index, the written operand."""

    call: Call
    index: int | None


Origin: TypeAlias = "Run | PlainOperand"
Operand: TypeAlias = "Run | PlainOperand | CallResult"


def is_operand(leaf: Any) -> bool:
    """Is true for a leaf of arguments that stands for a tensor."""
    return isinstance(leaf, Run | PlainOperand | CallResult)


def call_of(function: Any, args: Any, kwargs: Any, device: torch.device) -> Call:
    """A call in the modes that are set now, with an operand for each plain tensor.

    Raises:
        Stop: calls in these modes, or with these arguments, are not recorded.
    """
    if _len_torch_dispatch_stack() or peek_interpreter_stack() is not None:
        raise Stop(messages.MODE)
    operands: dict[int, PlainOperand] = {}  # by the tensor's identity

    def recorded(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if type(leaf) not in (Tensor, torch.nn.Parameter):
                raise Stop(messages.READS_TYPE.format(kind=type(leaf).__name__))
            return operands.setdefault(id(leaf), PlainOperand(leaf))
        if isinstance(leaf, slice) and any(
            isinstance(part, Tensor) for part in (leaf.start, leaf.stop, leaf.step)
        ):
            raise Stop(messages.SLICE_OF_TENSORS)
        if leaf is None or leaf is Ellipsis or is_operand(leaf) or isinstance(leaf, _PLAIN):
            return leaf
        raise Stop(messages.ARGUMENT_TYPE.format(kind=type(leaf).__name__))

    args, kwargs = pytree.tree_map(recorded, (args, kwargs), is_leaf=is_operand)
    kind = device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return Call(function, args, kwargs, torch.is_grad_enabled(), dtype)


_PLAIN = (bool, int, float, str, slice, torch.dtype, torch.device)
_PLAIN = (*_PLAIN, torch.memory_format, torch.layout)


def calls_of(wanted: Iterable[Operand]) -> list[Call]:
    """The calls that compute some tensors, in an order in which they can run."""
    found: dict[Call, None] = {}
    todo = [(x.call, False) for x in wanted if isinstance(x, CallResult)][::-1]
    while todo:
        call, ready = todo.pop()
        if ready or call in found:
            found[call] = None
            continue
        todo.append((call, True))
        todo += [(x.call, False) for x in reversed(call.operands) if isinstance(x, CallResult)]
    return [*found]


def origins_of(calls: Iterable[Call]) -> list[Origin]:
    """The runs and operands that calls read, each once."""
    operands = (operand for call in calls for operand in call.operands)
    return list({id(x): x for x in operands if not isinstance(x, CallResult)}.values())


Apply: TypeAlias = Callable[[Call, Any, Any], Any]


def evaluated(
    wanted: Sequence[CallResult],
    values: Mapping[Origin, Any],
    apply: Apply,
    clone: Callable[[Any], Any],
) -> list[Any]:
    """The values of results of calls.

    Args:
        wanted: the results.
        values: for each run the logits, for each plain operand the tensor.
        apply: maps a call and the values of its arguments to the sequence of its results.
        clone: copies the operand of a call that writes to it.
    """
    results: dict[Call, Any] = {}
    copies: dict[Call, Any] = {}  # of operands that are written to

    def value_of(operand: Operand) -> Any:
        if not isinstance(operand, CallResult):
            return values[operand]
        call = operand.call
        return copies[call] if operand.index is None else results[call][operand.index]

    for call in calls_of(wanted):
        if call.writes is not None:
            copies[call] = clone(value_of(call.writes))

        def argument(leaf: Any, call: Call = call) -> Any:
            if not is_operand(leaf):
                return leaf
            return copies[call] if leaf is call.writes else value_of(leaf)

        args, kwargs = pytree.tree_map(argument, (call.args, call.kwargs), is_leaf=is_operand)
        results[call] = apply(call, args, kwargs)
    return [value_of(result) for result in wanted]


class Numbering:
    """Calls as text: equal for calls of the same functions with arguments of the same kinds.

    Attributes:
        origins: the runs and plain operands that the calls read, in order.
        key: the text; numbers that may differ from call to call are not in it.
        numbers: these numbers, in order: floats, and ints of 2 and more.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.origins = origins_of(calls)
        self.numbers = list[float]()
        self._origin = {id(origin): i for i, origin in enumerate(self.origins)}
        self._call = {call: i for i, call in enumerate(calls)}
        lines = [tuple(self._line(call)) for call in calls]
        self.key = (*lines, torch.get_default_dtype())

    def _line(self, call: Call) -> Iterator[Any]:
        leaves, spec = pytree.tree_flatten((call.args, call.kwargs), is_leaf=is_operand)
        yield from (call.function, call.grad, call.autocast, str(spec))
        yield None if call.writes is None else self._name(call.writes)
        yield from map(self._name, leaves)

    def _name(self, leaf: Any) -> Any:
        if isinstance(leaf, CallResult):
            return "result", self._call[leaf.call], leaf.index
        if is_operand(leaf):
            return "origin", self._origin[id(leaf)]
        if isinstance(leaf, slice):
            return slice, *map(self._name, (leaf.start, leaf.stop, leaf.step))
        if may_differ(leaf):
            self.numbers.append(leaf)
            return type(leaf)
        return type(leaf), repr(leaf)


def may_differ(leaf: Any) -> bool:
    """Is true for a number that can be an input of a program."""
    return type(leaf) is float or (type(leaf) is int and leaf > 1)


def with_numbers(
    arguments: Any, replace: Callable[[Any], Any], is_leaf: Callable[..., bool]
) -> Any:
    """Arguments with replaced numbers that may differ, in the order of a :class:`Numbering`."""

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(replaced(leaf.start), replaced(leaf.stop), replaced(leaf.step))
        return replace(leaf) if may_differ(leaf) else leaf

    return pytree.tree_map(replaced, arguments, is_leaf=is_leaf)
