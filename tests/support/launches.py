"""Launches of kernels, taken down in place of being run on a GPU that this machine need not have."""

from __future__ import annotations

from typing import Any

import pytest

from fxpass.kernels import chunked, reductions
from fxpass.kernels.render import Kernel


class Launches(list[dict[str, Any]]):
    """The arguments and options of each launch, by name, its ``kernel``, and ``current``: what
    ``current()`` said when it was launched."""

    def __init__(self, patch: pytest.MonkeyPatch, runs: bool = False, current=lambda: None):
        super().__init__()
        load = chunked.jit_function

        class Taken:
            def __init__(self, kernel: Kernel):
                self.kernel, self.function = kernel, load(kernel)
                self.arg_names = self.function.arg_names

            def __getitem__(self, grid):
                return lambda **arguments: launched(self, grid, arguments)

        def launched(taken, grid, arguments) -> None:
            self.append(arguments | {"current": current(), "kernel": taken.kernel})
            if runs:
                taken.function[grid](**arguments)

        for module in (chunked, reductions):
            patch.setattr(module, "jit_function", Taken)
