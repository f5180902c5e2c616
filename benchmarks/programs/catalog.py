"""All programs: those of torch alone, and those that call a library's own functions.

In: which. Out: a list, in the order of the table::

    >>> [program.name for program in catalog(only="^nll_loss of log_softmax$", libraries=False)]
    ['nll_loss of log_softmax']
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Sequence

from benchmarks.programs.program import Program

# module of benchmarks.programs.kinds → the kind of its programs
KINDS = {
    "log_probabilities": "log-probabilities",
    "policies": "losses of log-probabilities",
    "entropies": "entropies",
    "smoothing": "label smoothing and soft targets",
    "focal": "poly, focal and importance losses",
    "z_losses": "z-losses",
    "expectations": "expectations",
    "binary": "binary cross-entropy over classes",
    "metrics": "metrics",
    "transforms": "transforms, masks and selections",
    "margins": "margins at the target",
    "spelled": "ATen's spellings",
    "several": "several reductions of one head",
    "divergences": "divergences of two heads",
    "composed": "heads of several products",
    "selections": "sorted, cumulative and perturbed logits",
    "row_losses": "row-wise losses of papers",
    "row_views": "rows moved and masked",
}
# module of benchmarks.programs.libraries → the packages that it imports
LIBRARIES = {
    "of_trl": ("trl",),
    "of_transformers": ("transformers",),
    "of_liger": ("liger_kernel", "triton"),
    "of_torchmetrics": ("torchmetrics",),
    "of_peft": ("peft",),
}


def catalog(only: str = "", kinds: Sequence[str] = (), libraries: bool = True) -> list[Program]:
    """The programs whose names match ``only``, of ``kinds`` (all by default).

    Args:
        libraries: whether to import the libraries that are installed.
    """
    found = [p for name in KINDS for p in _of(f"kinds.{name}")]
    if libraries:
        found += [p for name in LIBRARIES if not missing(name) for p in _of(f"libraries.{name}")]
    order = list(KINDS.values())
    found.sort(key=lambda program: order.index(program.kind))  # stable
    wanted = kinds or order
    return [p for p in found if p.kind in wanted and re.search(only, p.name)]


def missing(*libraries: str) -> set[str]:
    """The packages of keys of ``LIBRARIES`` (all by default) that are not installed."""
    packages = {p for library in libraries or LIBRARIES for p in LIBRARIES[library]}
    return {p for p in packages if importlib.util.find_spec(p) is None}


def _of(module: str) -> list[Program]:
    kinds = importlib.import_module(f"benchmarks.programs.{module}").KINDS
    return [program for kind in kinds for program in kind.programs]
