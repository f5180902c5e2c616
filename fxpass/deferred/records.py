"""Records of deferred logits: calls of torch functions, of the logits of models and operands.

In: a torch function and its arguments. Out: a :class:`Call`, a small graph: its arguments are runs
of models, what other calls made, operands, and numbers::

    logits / 2                 Call(div, (run, 2))
    (logits / 2).softmax(-1)   Call(softmax, (Made(that call, 0), -1))

:func:`evaluated` computes what calls make, on tensors or as the nodes of another graph.
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

from fxpass.deferred.inputs import RecordedInput
from fxpass.deferred.run import Run
from fxpass.rows.tags import Stop

# An operand that takes this part of the logits, or less, is copied where it is read later.
SMALL = 8


@dataclass(frozen=True, eq=False)
class PlainOperand:
    """A plain tensor among the arguments of calls.

    Attributes:
        tensor: the tensor, with its history.
        input: where it is read later, the check that it is unchanged; or else
        copy: a copy, of one that is small.
    """

    tensor: Tensor
    input: RecordedInput | None = None
    copy: Tensor | None = None

    def kept(self, logits: int) -> PlainOperand:
        """The operand as it is read later, if logits take so many bytes."""
        if self.input is not None or self.copy is not None:
            return self
        if self.tensor.nbytes * SMALL <= logits:
            return PlainOperand(self.tensor, copy=self.tensor.detach().clone())
        return PlainOperand(self.tensor, RecordedInput(self.tensor, is_row=False))

    def value(self, source: str) -> Tensor:
        """The values, as they were.

        Raises:
            StaleLogitsError: they were changed.
        """
        if self.input is not None:
            return self.input.checked(source)
        return self.tensor.detach() if self.copy is None else self.copy


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a torch function.

    Attributes:
        function: the function.
        args, kwargs: its arguments; a :data:`Leaf` or a :class:`Made` is in the place of a tensor.
        grad: whether gradients are enabled.
        autocast: the dtype of autocast, or None.
        writes: the argument that it writes to, or None.
    """

    function: Any
    args: Any
    kwargs: Any
    grad: bool
    autocast: torch.dtype | None
    writes: Source | None = None

    @property
    def sources(self) -> list[Source]:
        """The tensors among its arguments, each once."""
        leaves = pytree.tree_leaves((self.args, self.kwargs), is_leaf=is_source)
        return list({id(leaf): leaf for leaf in leaves if is_source(leaf)}.values())

    def applied(self) -> Callable[..., list[Tensor]]:
        """The function, in the modes of the call; it returns the tensors of the results, and refers
        to none of the arguments."""
        function = self.function
        grad = self.grad
        dtype = self.autocast

        def run(*args: Any, **kwargs: Any) -> list[Tensor]:
            given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            kind = given[0].device.type
            autocast = torch.autocast(kind, dtype, dtype is not None, cache_enabled=False)
            with torch.set_grad_enabled(grad and torch.is_grad_enabled()), autocast:
                made = function(*args, **kwargs)
            return [t for t in pytree.tree_leaves(made) if isinstance(t, Tensor)]

        run.__name__ = getattr(function, "__name__", "call").strip("_")
        run.function = function  # type: ignore[attr-defined]
        return run


@dataclass(frozen=True, eq=False)
class Made:
    """A tensor that a call makes: one of its results, or, without an index, what it writes to."""

    call: Call
    index: int | None


Leaf: TypeAlias = "Run | PlainOperand"
Source: TypeAlias = "Run | PlainOperand | Made"


def is_source(leaf: Any) -> bool:
    """Whether a leaf of arguments stands for a tensor."""
    return isinstance(leaf, Run | PlainOperand | Made)


def call_of(function: Any, args: Any, kwargs: Any, device: torch.device) -> Call:
    """A call in the modes that are set now, with an operand for each plain tensor.

    Raises:
        Stop: in these modes, or with these arguments, nothing is recorded.
    """
    if _len_torch_dispatch_stack() or peek_interpreter_stack() is not None:
        raise Stop("runs in a mode of torch, or in a transform of torch.func")
    known: dict[int, PlainOperand] = {}

    def operand(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if type(leaf) not in (Tensor, torch.nn.Parameter):
                raise Stop(f"reads a {type(leaf).__name__}")
            return known.setdefault(id(leaf), PlainOperand(leaf))
        if isinstance(leaf, slice) and any(
            isinstance(part, Tensor) for part in (leaf.start, leaf.stop, leaf.step)
        ):
            raise Stop("has an argument that is a slice of tensors")
        if leaf is None or leaf is Ellipsis or is_source(leaf) or isinstance(leaf, _PLAIN):
            return leaf
        raise Stop(f"has an argument of type {type(leaf).__name__}")

    args, kwargs = pytree.tree_map(operand, (args, kwargs), is_leaf=is_source)
    kind = device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return Call(function, args, kwargs, torch.is_grad_enabled(), dtype)


_PLAIN = (bool, int, float, str, slice, torch.dtype, torch.device)
_PLAIN = (*_PLAIN, torch.memory_format, torch.layout)


def calls_of(wanted: Iterable[Source]) -> list[Call]:
    """The calls that some tensors are made by, in an order in which they can run."""
    found: dict[Call, None] = {}
    todo = [(source.call, False) for source in wanted if isinstance(source, Made)][::-1]
    while todo:
        call, ready = todo.pop()
        if ready or call in found:
            found[call] = None
            continue
        todo.append((call, True))
        todo += [(s.call, False) for s in reversed(call.sources) if isinstance(s, Made)]
    return [*found]


def leaves_of(calls: Iterable[Call]) -> list[Leaf]:
    """The runs and operands that calls read, each once."""
    sources = (source for call in calls for source in call.sources)
    return list({id(s): s for s in sources if not isinstance(s, Made)}.values())


Apply: TypeAlias = Callable[[Call, Any, Any], Any]


def evaluated(
    wanted: Sequence[Made], known: Mapping[Leaf, Any], apply: Apply, clone: Callable[[Any], Any]
) -> list[Any]:
    """The results of calls.

    Args:
        wanted: of the calls' results.
        known: for each run the logits, for each operand the tensor.
        apply: makes what holds the results of a call, of its arguments.
        clone: makes a copy, for a call that writes to it.
    """
    made: dict[Call, tuple[Any, Any]] = {}  # the results, and what is written to

    def of(source: Any, copy: Any = None, writes: Any = None) -> Any:
        if source is writes and writes is not None:
            return copy
        if isinstance(source, Made):
            results, written = made[source.call]
            return written if source.index is None else results[source.index]
        return known[source] if is_source(source) else source

    for call in calls_of(wanted):
        copy = None if call.writes is None else clone(of(call.writes))
        args, kwargs = pytree.tree_map(
            lambda s, copy=copy, call=call: of(s, copy, call.writes),
            (call.args, call.kwargs),
            is_leaf=is_source,
        )
        made[call] = apply(call, args, kwargs), copy
    return [of(source) for source in wanted]


class Numbering:
    """Calls as text: equal for calls of the same functions with arguments of the same kinds.

    Attributes:
        leaves: what the calls read, in order.
        key: the text; numbers that may differ from call to call are not in it.
        numbers: these numbers, in order: floats, and ints of 2 and more.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.leaves = leaves_of(calls)
        self.numbers = list[float]()
        self._leaf = {id(leaf): i for i, leaf in enumerate(self.leaves)}
        self._call = {call: i for i, call in enumerate(calls)}
        lines = [tuple(self._line(call)) for call in calls]
        self.key = (*lines, torch.get_default_dtype())

    def _line(self, call: Call) -> Iterator[Any]:
        leaves, spec = pytree.tree_flatten((call.args, call.kwargs), is_leaf=is_source)
        yield from (call.function, call.grad, call.autocast, str(spec))
        yield None if call.writes is None else self._name(call.writes)
        yield from map(self._name, leaves)

    def _name(self, leaf: Any) -> Any:
        if isinstance(leaf, Made):
            return "made", self._call[leaf.call], leaf.index
        if is_source(leaf):
            return "leaf", self._leaf[id(leaf)]
        if isinstance(leaf, slice):
            return slice, *map(self._name, (leaf.start, leaf.stop, leaf.step))
        if may_differ(leaf):
            self.numbers.append(leaf)
            return type(leaf)
        return type(leaf), repr(leaf)


def may_differ(leaf: Any) -> bool:
    """Whether an argument is a number that a program takes as an input."""
    return type(leaf) is float or (type(leaf) is int and leaf > 1)


def with_numbers(arguments: Any, number: Callable[[Any], Any], is_leaf: Callable[..., bool]) -> Any:
    """Arguments with others in the place of such numbers, in the order of a :class:`Numbering`."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(of(leaf.start), of(leaf.stop), of(leaf.step))
        return number(leaf) if may_differ(leaf) else leaf

    return pytree.tree_map(of, arguments, is_leaf=is_leaf)
