"""Records what a program makes of deferred logits, on fake tensors.

In: a torch function and its arguments, with a :class:`fxpass.capture.values.Value` in the place of
deferred logits. Out: a :class:`Recorded`: its results, and the rows that results without classes
are computed from. The rules are those of :mod:`fxpass.capture`::

    F.log_softmax(logits, -1)       a tensor with classes, "rrc"
    logp.gather(-1, index)          rows, "rrk": a program of logits and index

:mod:`fxpass.deferred.known` keeps what was recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from fxpass.capture.function import leaves_of
from fxpass.capture.record import Recorder
from fxpass.capture.values import Leaf, Stop, Value

__all__ = ["Call", "Recorded", "Rows", "Stop", "operands_in", "record", "root"]

_TORCH: Any = torch
_FAKE = FakeTensorMode(allow_non_fake_inputs=True)
LOCK = threading.RLock()  # of the fake mode: its tensors have no device while one of them is used


@dataclass(eq=False)
class Rows:
    """Rows of logits that are computed together.

    Attributes:
        outputs: tensors of the record with the same rows.
        leaves: what they are computed from.
        program: computes them, or why there is none; made when it first runs.
    """

    outputs: tuple[Value, ...]
    leaves: tuple[Leaf, ...]
    program: Any = None


@dataclass(eq=False)
class Recorded:
    """What a function makes of deferred logits.

    Attributes:
        results: nested results, with a Value in the place of each tensor.
        operands: the plain tensors among the arguments, in their order.
        rows: what results without classes are computed from.
        shown: whether the results are views, or arguments.
        written: deferred logits that the function writes to, before and after it; or None.
        floats: the numbers that its calls of elements read, in order.
        numbers: those of them that are operands.
        calls: the dtypes of the results of each ATen call, in order.
    """

    results: Any
    operands: tuple[Value, ...]
    rows: tuple[Rows, ...] = ()
    shown: bool = False
    written: tuple[Value, Value] | None = None
    floats: tuple[float, ...] = ()
    numbers: tuple[Value, ...] = ()
    calls: tuple[Any, ...] = ()
    arguments: Sequence[Value] = ()  # keeps the identities in its key alive

    @property
    def values(self) -> list[Value]:
        """The tensors among the results."""
        leaves = pytree.tree_leaves(self.results, is_leaf=is_value)
        return [leaf for leaf in leaves if isinstance(leaf, Value)]


def root(like: Tensor, device: torch.device, trained: bool) -> Value:
    """Logits that no function of the program made."""
    with LOCK, torch._C._DisableAutocast(), _FAKE:
        fake = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return Value(fake, "r" * (like.dim() - 1) + "c", trained=trained)


def operands_in(arguments: Any) -> list[Tensor]:
    """The plain tensors among arguments, each once."""
    leaves = pytree.tree_leaves(arguments, is_leaf=is_value)
    found = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    return list(found.values())


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a torch function.

    Attributes:
        function, args, kwargs: with a Value in the place of deferred logits.
        classes: the least number of classes of these.
        grad: whether gradients are enabled.
        autocast: the dtype of autocast, or None.
        tensors: the plain tensors among the arguments, each once.
    """

    function: Any
    args: Any
    kwargs: Any
    classes: int
    grad: bool
    autocast: torch.dtype | None
    tensors: Sequence[Tensor]

    @classmethod
    def now(cls, function: Any, args: Any, kwargs: Any, classes: int) -> Call:
        """A call in the modes that are set now.

        Raises:
            Stop: in these, or with these arguments, nothing is recorded.
        """
        tensors = operands_in((args, kwargs))
        for tensor in tensors:
            if type(tensor) not in (Tensor, torch.nn.Parameter):
                raise Stop(f"reads a {type(tensor).__name__}")
        if _len_torch_dispatch_stack() or peek_interpreter_stack() is not None:
            raise Stop("runs in a mode of torch, or in a transform of torch.func")
        values = [v for v in pytree.tree_leaves((args, kwargs), is_leaf=is_value) if is_value(v)]
        with LOCK:
            device = values[0].fake.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return cls(function, args, kwargs, classes, torch.is_grad_enabled(), dtype, tensors)

    def key(self, floats: bool) -> Any:
        """Equal for calls with the same layout of arguments, and with the same ``floats``."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs), is_leaf=is_value)
        places = {id(tensor): i for i, tensor in enumerate(self.tensors)}
        each = (
            float if type(leaf) is float and not floats else _key_of(leaf, places)
            for leaf in leaves
        )
        modes = self.grad, self.autocast, torch.get_default_dtype()
        return (self.function, *modes, *each, str(spec))


def record(call: Call, varying: Collection[int] = ()) -> Recorded:
    """What a function makes of logits.

    Args:
        call: its call.
        varying: the positions of numbers that are operands of the record.

    Raises:
        Stop: it has no row rule, or it has other effects than its results.
    """
    recorder = Recorder({}, varying)
    recorder.classes = call.classes
    given: dict[int, tuple[Value, Tensor]] = {}

    def functional(argument: Any) -> Any:
        if not isinstance(argument, Value | Tensor):
            return argument
        if id(argument) not in given:
            value = argument if isinstance(argument, Value) else _operand(argument)
            given[id(argument)] = value, recorder.given(value)
        return given[id(argument)][1]

    try:
        with torch._C._DisableAutocast():
            arguments: Any = pytree.tree_map(functional, (call.args, call.kwargs), is_leaf=is_value)
        args, kwargs = arguments
        made = recorder.call(call.function, args, kwargs, call.grad, call.autocast, None)
        written = _written(recorder, given.values())
        results = pytree.tree_map_only(Tensor, recorder.value, made)
    except (DynamicOutputShapeException, DataDependentOutputException):
        raise Stop("makes a tensor whose shape depends on values") from None
    except Stop:
        raise
    except Exception as error:
        raise Stop(f"fails on fake tensors ({type(error).__name__}: {error})") from None
    operands = tuple([given[id(tensor)][0] for tensor in call.tensors])
    arguments = [value for value, _ in given.values()]
    found = Recorded(results, operands, written=written, arguments=arguments)
    found.numbers, found.floats = tuple(recorder.varied), tuple(recorder.numbers)
    found.calls = tuple(recorder.dtypes)
    if written is not None:
        if any(value is not written[1] for value in found.values):
            raise Stop("writes to its arguments, and returns others")
        return found
    memory = {v.fake.untyped_storage()._cdata for v, _ in given.values()}
    shown = [v.fake.untyped_storage()._cdata in memory for v in found.values]
    found.shown = any(shown)
    if not found.shown and not all(value.of_classes for value in found.values):
        found.rows = tuple(_rows(found.values))
    return found


def _written(
    recorder: Recorder, given: Iterable[tuple[Value, Tensor]]
) -> tuple[Value, Value] | None:
    """The deferred logits that a function writes to, before and after it."""
    found = None
    for value, tensor in given:
        data = _TORCH._functionalize_has_data_mutation(tensor)
        if not data and tuple(tensor.shape) == value.shape:
            continue
        if value.tag is None or found is not None:
            raise Stop("writes to its arguments")
        new = recorder.value(tensor)
        if not new.of_classes or new.fake.dtype != value.fake.dtype:
            raise Stop("writes to its arguments")
        found = value, new
    return found


def without_masks(name: str, args: Any, kwargs: Any) -> Any:
    """Arguments with the numbers of the elements that masks take, in the place of masks."""
    if name != "__getitem__" or len(args) != 2:
        return args, kwargs

    def numbers(index: Any) -> tuple[Any, ...]:
        if isinstance(index, Tensor) and index.dtype == torch.bool and index.dim():
            return index.nonzero(as_tuple=True)
        return (index,)

    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    taken: list[Any] = [number for one in index for number in numbers(one)]
    return (args[0], tuple(taken) if len(taken) > 1 else taken[0]), kwargs


def _operand(tensor: Tensor) -> Value:
    with _FAKE, torch.no_grad():
        fake = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
    return Value(fake, trained=tensor.requires_grad)


def _rows(results: Iterable[Value]) -> Iterator[Rows]:
    """The rows that results without classes are made of, by their number."""
    groups: dict[int, dict[int, Value]] = {}
    for value in _frontier(results):
        number = 1
        for size in value.rows:
            number *= int(size)
        if number == 0 or 0 in value.shape:
            raise Stop("has no rows")
        groups.setdefault(number, {})[id(value)] = value
    for group in groups.values():
        outputs = tuple(group.values())
        with torch._C._DisableAutocast():
            leaves = leaves_of(outputs, outputs[0].fake.device)
        yield Rows(outputs, tuple(leaves))


def _frontier(values: Iterable[Value]) -> Iterator[Value]:
    for value in values:
        if value.tag is not None:
            if not value.of_classes:
                yield value
        elif value.late and value.step is not None:
            for argument in value.step.values:
                if argument.of_classes:
                    raise Stop("mixes rows and classes")
                yield from _frontier([argument])


def is_value(leaf: Any) -> bool:
    """Whether a leaf of arguments stands for deferred logits."""
    return isinstance(leaf, Value)


def _key_of(leaf: Any, places: dict[int, int]) -> Any:
    if isinstance(leaf, Value):
        return "value", id(leaf)
    if isinstance(leaf, Tensor):
        layout = tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
        return "tensor", places[id(leaf)], *layout
    if isinstance(leaf, slice):
        parts = leaf.start, leaf.stop, leaf.step
        if any(isinstance(part, Tensor) for part in parts):
            raise Stop("has an argument that is a slice of tensors")
        return "slice", *(_key_of(part, places) for part in parts)
    if leaf is None or leaf is Ellipsis or isinstance(leaf, _PLAIN):
        return type(leaf), repr(leaf)
    raise Stop(f"has an argument of type {type(leaf).__name__}")


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.memory_format, torch.layout)
