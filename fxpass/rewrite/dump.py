"""Writes graphs, kernels and reports: to a directory (``FUSEDCE_DUMP``), to torch's trace log.

In: a graph before and after, the launches of its matches, lines of its report. Out: files
``graph_<pid>_<n>_before.txt``, ``graph_<pid>_<n>_after.txt`` and ``<kernel name>.py``; with
``TORCH_TRACE``, artifacts that tlparse shows at the graph's compilation: ``fxpass_before``,
``fxpass_after`` and ``fxpass_report``.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from torch._logging._internal import trace_log, trace_structured_artifact

from fxpass.kernels.call import Launch

log = logging.getLogger(__name__)

_number = itertools.count()


def is_traced() -> bool:
    """True if torch writes a trace log."""
    return bool(trace_log.handlers)


def write_trace(before: str, after: str, report: Iterable[object]) -> None:
    """Adds one graph to torch's trace log.

    Args:
        before, after: the graph as text.
        report: the matches, rejections and casts, a line each.
    """
    lines = "\n".join(map(str, report))
    for name, text in {"before": before, "after": after, "report": lines}.items():
        trace_structured_artifact(f"fxpass_{name}", "string", lambda text=text: text)


def write_files(directory: str, before: str, after: str, kernels: Iterable[Launch]) -> None:
    """Writes one graph; the process number in the file names differs between ranks.

    A directory that cannot be written is a warning: the program runs without the files.
    """
    stem = f"graph_{os.getpid()}_{next(_number):03d}"
    texts = {f"{stem}_before.txt": before + "\n", f"{stem}_after.txt": after + "\n"}
    texts |= {f"{kernel.name}.py": kernel.source for kernel in kernels}
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        log.warning("FUSEDCE_DUMP=%s: %s", directory, error)
