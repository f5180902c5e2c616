"""For users' tests: the graphs of a function as text, before and after the rewrite.

Test models are tiny, so losses of any size are fused here, unless ``FUSEDCE_MIN_LOGITS_MB`` is set.
The text has no paths or addresses, so it can be an ``expecttest`` snapshot::

    class TestModel(expecttest.TestCase):
        def test_loss_is_fused(self):
            self.assertExpectedInline(fxpass.testing.rewritten(model, **batch), "...")
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from fxpass.report import Report, explain_with
from fxpass.settings import Settings

__all__ = ["assert_fused", "original", "rewritten"]


def original(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The graphs of ``fn(*args, **kwargs)`` from Dynamo, one line per node."""
    return "\n\n".join(_explain(fn, *args, **kwargs).before)


def rewritten(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The graphs of ``fn(*args, **kwargs)`` after the rewrite, one line per node."""
    return "\n\n".join(_explain(fn, *args, **kwargs).after)


def assert_fused(fn: Callable[..., Any], *args: Any, losses: int = 1, **kwargs: Any) -> Report:
    """Asserts that exactly ``losses`` losses of ``fn(*args, **kwargs)`` are fused.

    Returns the report. If it fails, the ``AssertionError`` lists every rejection with its reason.
    """
    report = _explain(fn, *args, **kwargs)
    found = sum(match.losses for match in report.matches)
    if found != losses:
        expected = f"{losses} fused loss{'es' if losses != 1 else ''}"
        raise AssertionError(f"expected {expected}, found {found}\n{report}")
    return report


def _explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    settings = Settings.read(environ={"FUSEDCE_MIN_LOGITS_MB": "0", **os.environ})
    return explain_with(settings, fn, *args, **kwargs)
