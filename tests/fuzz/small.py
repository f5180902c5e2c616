"""The sizes by which fxpass divides its work, for tensors of a few rows and classes.

In: nothing. Out: patches under which a program of a dozen rows runs as one of thousands: in several
chunks or tiles, within budgets that bind, and with operators for large gradients; and a dozen classes
are as many as a vocabulary has.
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any
from unittest import mock

from fxpass.op import saved
from fxpass.plan import budget, parts, plan, regions, worth
from fxpass.rewrite import defer

ALIGNMENT = dict.fromkeys(parts.ALIGNMENT, 1)
SIZES: dict[ModuleType, dict[str, Any]] = {
    budget: {"MIB": 256, "CPU_LEAST": 256},
    parts: {"BLOCK": 1, "OPERAND": 1, "LEAST": 2, "EFFICIENT": 2, "ALIGNMENT": ALIGNMENT},
    plan: {
        **{"CPU_TILE": 256, "CACHED": 64, "FEW_BYTES": 0, "SLICE_CLASSES": 16},
        **{"BLOCK": 1, "LEAST": 2, "LEAST_ROWS": 2, "ALIGNMENT": ALIGNMENT},
    },
    regions: {"LEAST": 2, "LEAST_ROWS": 2, "CPU_TILE": 256, "FEW_BYTES": 0},
    worth: {"LEAST_CLASSES": 8},
    defer: {"_CLASSES_PER_HIDDEN": 1},
    saved: {"_LARGE": 1, "_ROUNDED_AT_A_TIME": 16},
}


def small() -> contextlib.ExitStack:
    """Patches fxpass until the stack is closed."""
    stack = contextlib.ExitStack()
    for module, sizes in SIZES.items():
        stack.enter_context(mock.patch.multiple(module, **sizes))
    plan._plan.cache_clear()
    stack.callback(plan._plan.cache_clear)
    return stack
