"""All rows: the programs of torch alone, and those that call a library's own functions.

In: which. Out: a list, in the order of the tables::

    >>> [row.name for row in catalog(only="^nll_loss of log_softmax$", libraries=False)]
    ['nll_loss of log_softmax']
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.programs.row import Row

# module of tests.programs.rows → the packages that it imports
LIBRARIES = {
    "of_trl": ("trl",),
    "of_transformers": ("transformers",),
    "of_liger": ("liger_kernel", "triton"),
    "of_torchmetrics": ("torchmetrics",),
    "of_peft": ("peft",),
}
MODULES = tuple(sorted(file.stem for file in Path(__file__).with_name("rows").glob("*.py")))


def catalog(only: str = "", kinds: Sequence[str] = (), libraries: bool = True) -> list[Row]:
    """The rows whose names match ``only``, of ``kinds`` (all by default).

    Args:
        libraries: whether to import the libraries that are installed.
    """
    skipped = {name for name in LIBRARIES if not libraries or missing(name)}
    found = [row for name in MODULES if name not in skipped for row in of(name)]
    return [row for row in found if re.search(only, row.name) and row.kind in (kinds or [row.kind])]


def of(name: str) -> list[Row]:
    """The rows of a module."""
    module = importlib.import_module(f"tests.programs.rows.{name}")
    return [replace(row, kind=module.KIND, scope=vars(module)) for row in module.ROWS]


def missing(*libraries: str) -> set[str]:
    """The packages of keys of ``LIBRARIES`` (all by default) that are not installed."""
    packages = {p for library in libraries or LIBRARIES for p in LIBRARIES[library]}
    return {p for p in packages if importlib.util.find_spec(p) is None}
