"""Launches of kernels, taken down in place of being run on a GPU that this machine need not have."""

from __future__ import annotations

from typing import Any

import pytest
from triton import JITFunction

from fxpass.kernels import chunked, tiled
from fxpass.kernels.source import Kernel


class Launches(list[dict[str, Any]]):
    """The arguments and options of each launch, by name, and ``current``: what ``current()`` said
    when it was launched."""

    def __init__(self, patch: pytest.MonkeyPatch, runs: bool = False, current=lambda: None):
        super().__init__()
        load = chunked.load

        class Taken:
            def __init__(self, kernel: Kernel):
                self.function: JITFunction = load(kernel)
                self.arg_names = self.function.arg_names

            def __getitem__(self, grid):
                return lambda **arguments: launched(self.function, grid, arguments)

        def launched(function, grid, arguments) -> None:
            self.append(arguments | {"current": current()})
            if runs:
                function[grid](**arguments)

        for module in (chunked, tiled):
            patch.setattr(module, "load", Taken)
