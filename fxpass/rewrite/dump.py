"""Writes graphs and kernels to a directory, for ``FUSEDCE_DUMP``.

In: a directory, a graph before and after, the kernels of its matches. Out: files
``graph_<pid>_<n>_before.txt``, ``graph_<pid>_<n>_after.txt`` and ``<kernel name>.py``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path

from fxpass.kernels.source import Kernel

_number = itertools.count()


def write(directory: str, before: str, after: str, kernels: Iterable[Kernel]) -> None:
    """Writes one graph; the process number in the file names differs between ranks."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"graph_{os.getpid()}_{next(_number):03d}"
    (folder / f"{stem}_before.txt").write_text(before + "\n")
    (folder / f"{stem}_after.txt").write_text(after + "\n")
    for kernel in kernels:
        (folder / f"{kernel.name}.py").write_text(kernel.source)
