"""What was recorded before: a training step finds what the step before it has recorded.

In: a call of a torch function of deferred logits. Out: its record, one for each layout of the
arguments. Floats that differ from call to call (an annealed temperature, a schedule) are operands
of the record from the second one on, so that one program serves all of them::

    logits / 0.9    a record, and a program
    logits / 0.8    another record, of logits and of a number, and a program
    logits / 0.7    the same record and program

The numbers are those that reach ATen calls of elements, after what C++ computes of them: a smoothed
cross-entropy has ``1 - label_smoothing`` and ``label_smoothing / V``.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch

from fxpass.capture.values import Stop
from fxpass.deferred.inputs import quiet
from fxpass.deferred.jobs import Operand
from fxpass.deferred.recording import LOCK, Call, Recorded, record

_MOST = 512  # recorded functions; those of dynamic shapes would add more without end
_KNOWN: OrderedDict[Any, Any] = OrderedDict()  # by all arguments
_ALIKE: OrderedDict[Any, _Alike] = OrderedDict()  # by all arguments but floats
_OF_NUMBERS = "has a number that is no operand"


def recorded(call: Call) -> tuple[Recorded, tuple[Operand, ...]]:
    """What a function makes of logits, and the numbers among its operands.

    Raises:
        Stop: it has no row rule, or it has other effects than its results.
    """
    with LOCK:
        key = call.key(floats=True)
        found = _KNOWN.get(key)
        if found is None or (isinstance(found, _Varied) and found.is_old):
            found = _new(call)
        _put(_KNOWN, key, found)
        if isinstance(found, _Varied):
            try:
                return found.alike.record_for(found.numbers, call)
            except Stop:
                found.alike.varies = False
                found = _new(call)
                _put(_KNOWN, key, found)
    if isinstance(found, Stop):
        raise Stop(*found.args)
    return found, ()


def _new(call: Call) -> Any:
    """A record, how it varies, or why there is none."""
    try:
        found = record(call)
    except Stop as stop:
        return Stop(*stop.args)  # without its frames, which have tensors
    if not found.floats:
        return found
    key = call.key(floats=False)
    alike = _ALIKE.get(key) or _Alike(found)
    _put(_ALIKE, key, alike)
    return alike.numbers_of(found) or found


def _put(known: OrderedDict[Any, Any], key: Any, found: Any) -> None:
    known[key] = found
    known.move_to_end(key)
    if len(known) > _MOST:
        known.popitem(last=False)


@dataclass(eq=False)
class _Slot:
    """A record with operands for numbers, and the operands that its results read."""

    found: Recorded
    numbers: tuple[float, ...] = ()
    operands: tuple[weakref.ref[Operand], ...] = ()

    def operands_for(self, numbers: tuple[float, ...]) -> tuple[Operand, ...] | None:
        """The operands with these numbers; None while results with other numbers are alive."""
        known = tuple(o for o in (ref() for ref in self.operands) if o is not None)
        if known and (numbers != self.numbers or len(known) < len(numbers)):
            return None
        if not known:
            fakes = [value.fake for value in self.found.numbers]
            layouts = [(fake.dtype, fake.device) for fake in fakes]
            with quiet():
                tensors = [
                    torch.full((), number, dtype=dtype, device=device)
                    for number, (dtype, device) in zip(numbers, layouts, strict=True)
                ]
            known = tuple(Operand(t, copy=t) for t in tensors)
            self.numbers, self.operands = numbers, tuple(map(weakref.ref, known))
        return known


@dataclass(eq=False)
class _Alike:
    """The records of a function with arguments that differ in floats alone.

    Attributes:
        first: the first of them.
        varying: the positions of the numbers that differ.
        varies: whether these numbers can be operands.
    """

    first: Recorded
    varying: frozenset[int] = frozenset()
    varies: bool = True
    slots: list[_Slot] = field(default_factory=list)

    def numbers_of(self, other: Recorded) -> _Varied | None:
        """How another record differs from the first; None if it does so in more than numbers."""
        pairs = zip(self.first.floats, other.floats, strict=False)
        same = len(self.first.floats) == len(other.floats) and self.first.calls == other.calls
        differ = self.varying | {i for i, (a, b) in enumerate(pairs) if a != b}
        if not (self.varies and same and differ):
            return None
        if differ != self.varying:
            self.varying, self.slots = differ, []
        return _Varied(self, tuple(other.floats[i] for i in sorted(differ)), self.varying)

    def record_for(
        self, numbers: tuple[float, ...], call: Call
    ) -> tuple[Recorded, tuple[Operand, ...]]:
        """A record that results with other numbers do not read now, and its operands.

        Raises:
            Stop: a call takes no tensor in the place of a number, or has another result then.
        """
        for slot in self.slots:
            if (operands := slot.operands_for(numbers)) is not None:
                return slot.found, operands
        found = record(call, self.varying)
        if len(found.numbers) != len(self.varying) or found.calls != self.first.calls:
            raise Stop(_OF_NUMBERS)
        slot = _Slot(found)
        self.slots.append(slot)
        return found, slot.operands_for(numbers) or ()


@dataclass(frozen=True, eq=False)
class _Varied:
    """The numbers of a call, and of which positions they are."""

    alike: _Alike
    numbers: tuple[float, ...]
    varying: frozenset[int]

    @property
    def is_old(self) -> bool:
        """Whether the function varies in more numbers now, or in none."""
        return self.varying != self.alike.varying or not self.alike.varies
