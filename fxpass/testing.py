"""For users' own tests: what a function's graph looks like before and after the rewrite.

The text is stable (no paths, no addresses), so it can be an ``expecttest`` snapshot::

    class TestModel(expecttest.TestCase):
        def test_loss_is_fused(self):
            self.assertExpectedInline(fxpass.testing.rewritten(model, **batch), "...")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxpass.report import Report, explain

__all__ = ["assert_fused", "original", "rewritten"]


def original(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The graphs of ``fn(*args, **kwargs)`` as Dynamo made them, one line per node."""
    return "\n\n".join(explain(fn, *args, **kwargs).before)


def rewritten(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The graphs of ``fn(*args, **kwargs)`` after the rewrite, one line per node."""
    return "\n\n".join(explain(fn, *args, **kwargs).after)


def assert_fused(fn: Callable[..., Any], *args: Any, losses: int = 1, **kwargs: Any) -> Report:
    """Asserts that exactly ``losses`` losses of ``fn(*args, **kwargs)`` are fused.

    Returns the report. The ``AssertionError`` of a miss holds every rejection with its reason.
    """
    report = explain(fn, *args, **kwargs)
    if len(report.matches) != losses:
        raise AssertionError(f"expected {losses} fused losses\n{report}")
    return report
