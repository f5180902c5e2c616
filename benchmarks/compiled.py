"""What fxpass and Dynamo say while a function is compiled.

Out: :class:`Records`, the matches, rejections and casts, and :func:`break_reason`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class Records(logging.Handler):
    """Adds the matches, rejections and casts that fxpass logs to a list, for a ``with`` block."""

    def __init__(self, records: list[Any]) -> None:
        super().__init__(logging.INFO)
        self.records, self.logger = records, logging.getLogger("fxpass")

    def emit(self, record: logging.LogRecord) -> None:
        self.records += [a for a in record.args or () if not isinstance(a, str)]

    def __enter__(self) -> None:
        self.level_before = self.logger.level
        self.logger.setLevel(logging.INFO)
        self.logger.addHandler(self)

    def __exit__(self, *error: object) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(self.level_before)


def break_reason(ended: Any) -> str:
    """The first line of a graph break's reason, and its place; empty if there was no break.

    Args:
        ended: Dynamo's ``compile_subgraph_reason`` of a graph.
    """
    if ended is None or not ended.graph_break:
        return ""
    text = str(ended.reason).strip().splitlines()[0]
    stack = ended.user_stack or []
    where = f" at {short_path(stack[-1].filename)}:{stack[-1].lineno}" if stack else ""
    return text[:120] + where


def short_path(file: str) -> str:
    """The path below site-packages or the checkout."""
    return file.rpartition("site-packages/")[2].removeprefix(f"{ROOT}/")
