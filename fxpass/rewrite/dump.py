"""Writes graphs and kernels to a directory, for ``FUSEDCE_DUMP``.

In: a directory, a graph before and after, the launches of its matches. Out: files
``graph_<pid>_<n>_before.txt``, ``graph_<pid>_<n>_after.txt`` and ``<kernel name>.py``.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from fxpass.kernels.call import Launch

log = logging.getLogger(__name__)

_number = itertools.count()


def write(directory: str, before: str, after: str, kernels: Iterable[Launch]) -> None:
    """Writes one graph; the process number in the file names differs between ranks.

    A directory that cannot be written is a warning: the program runs without the files.
    """
    stem = f"graph_{os.getpid()}_{next(_number):03d}"
    texts = {f"{stem}_before.txt": before + "\n", f"{stem}_after.txt": after + "\n"}
    candidates = (one for launch in kernels for one in launch.candidates)
    texts |= {f"{one.kernel.name}.py": one.kernel.source for one in candidates}
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        log.warning("FUSEDCE_DUMP=%s: %s", directory, error)
