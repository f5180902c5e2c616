"""The user's source line of a graph node: ``train.py:12 loss = F.cross_entropy(logits, labels)``.

In: a node of a Dynamo graph. Out: one line of text, from the stack trace that Dynamo recorded.
"""

from __future__ import annotations

import os
import re
from traceback import FrameSummary

from torch.fx import Node

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*\n?(?P<code>[^\n]*)')


def source_line(node: Node) -> str:
    """``file:line code`` of the innermost frame; the node's name where Dynamo recorded none."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return f"%{node.name}"
    file, line, code = frames[-1]
    return f"{_short(file)}:{line} {code.strip()}".rstrip()


def source_of(frame: FrameSummary) -> str:
    """``file:line code`` of a stack frame."""
    return f"{_short(frame.filename)}:{frame.lineno} {(frame.line or '').strip()}".rstrip()


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
