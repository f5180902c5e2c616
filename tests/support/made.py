"""Counts what a program runs, compiled code too."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Made(TorchDispatchMode):
    """Counts operations, and notes how large their results are."""

    def __enter__(self):
        self.names, self.sizes = Counter(), []
        return super().__enter__()

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def large(self, least):
        """The operations with results of so many elements."""
        return [name for name, size in self.sizes if size >= least]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func._schema.name
        self.names[name] += 1
        tensors = [t for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
        self.sizes += [(name, t.numel()) for t in tensors]
        return made
