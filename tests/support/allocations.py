"""Counts what operators allocate, to the byte: the peak beside given outputs."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """While this is entered, every storage that an operator returns, from its birth to its end.

    What a kernel allocates and frees within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, list[int]] = {}  # storage -> its number, bytes and tensors
        self._events: list[tuple[int, int]] = []  # number, bytes: more or less

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        before = {_storage(t) for t in given}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, before)
        return out

    def _note(self, tensor: torch.Tensor, before: set[int]) -> None:
        key = _storage(tensor)
        entry = self._tensors.get(key)
        if entry is None:
            if key in before:
                return  # a view of what was there from the beginning
            size = tensor.untyped_storage().nbytes()
            entry = self._tensors[key] = [len(self._events), size, 0]
            self._events.append((entry[0], size))
        entry[2] += 1
        weakref.finalize(tensor, self._forget, key)

    def _forget(self, key: int) -> None:
        entry = self._tensors[key]
        entry[2] -= 1
        if not entry[2]:
            self._events.append((entry[0], -entry[1]))
            del self._tensors[key]

    def peak(self, outputs) -> int:
        """The most bytes at a time, ``outputs`` not counted."""
        keys = {_storage(t) for t in outputs if isinstance(t, torch.Tensor)}
        own = {self._tensors[key][0] for key in keys if key in self._tensors}
        now = highest = 0
        for number, size in self._events:
            now += 0 if number in own else size
            highest = max(highest, now)
        return highest


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
