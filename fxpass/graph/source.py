"""The user's source line: ``train.py:12 loss = F.cross_entropy(logits, labels)``.

In: a node of a Dynamo graph, of which Dynamo recorded the stack trace, or a running program. Out:
one line of text; warnings with such a line are logged once a process.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from traceback import FrameSummary

import torch
from torch.fx import Node

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*\n?(?P<code>[^\n]*)')


def source_line(node: Node) -> str:
    """``file:line code`` of the innermost frame; the node's name where Dynamo recorded none."""
    place, code = _recorded(node)
    return f"{place} {code}".rstrip()


def source_place(node: Node) -> str:
    """``file:line`` of the innermost frame; the node's name where Dynamo recorded none."""
    return _recorded(node)[0]


def _recorded(node: Node) -> tuple[str, str]:
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return f"%{node.name}", ""
    file, line, code = frames[-1]
    return f"{_short(file)}:{line}", code.strip()


def source_of(frame: FrameSummary) -> str:
    """``file:line code`` of a stack frame."""
    return f"{_short(frame.filename)}:{frame.lineno} {(frame.line or '').strip()}".rstrip()


def calling_line() -> str:
    """``file:line code`` of the innermost frame that is neither torch's nor fxpass's."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_NOT_USERS) and frame.f_back is not None:
        frame = frame.f_back
    return source_of(FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))


_NOT_USERS = tuple(
    os.path.join(os.path.dirname(file), "") for file in (torch.__file__, os.path.dirname(__file__))
)

# The kinds of warnings logged in this process: a training loop would repeat them.
warned: set[str] = set()


def warn_once(log: logging.Logger, kind: str, text: str) -> None:
    """Logs a warning, unless this process has logged one of its kind."""
    if kind not in warned:
        warned.add(kind)
        log.warning("%s", text)


def call_name(node: Node) -> str:
    """The function or method that a node calls, as the user wrote it."""
    return str(getattr(node.target, "__name__", node.target))


def _short(file: str) -> str:
    """Relative to the package folder for installed code, else to the working directory."""
    file = file.partition(" from ")[0] if file.startswith("<") else file  # generated code
    _, installed, inside = file.rpartition("site-packages" + os.sep)
    if installed:
        return inside
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative
