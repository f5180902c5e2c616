"""fxpass: a ``torch.compile`` backend that fuses linear + cross-entropy in any model.

``torch.compile(model, backend="fusedce")`` needs no import of this package. It has
:func:`explain`, which reports the rewrite, :mod:`fxpass.testing`, for tests, and two fused losses
by name, for code that is not compiled.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpass.functional import linear_cross_entropy, linear_log_probs
    from fxpass.report import Report, explain

__all__ = ["Report", "__version__", "explain", "linear_cross_entropy", "linear_log_probs"]
_MODULES = {"functional": ("linear_cross_entropy", "linear_log_probs")}
_MODULES |= {"report": ("Report", "explain")}
try:
    __version__ = version("fxpass")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0"


def __getattr__(name: str) -> Any:
    # imports torch only on first use, so that `fxpass --help` answers at once
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"fxpass.{module}"), name)
    raise AttributeError(f"module 'fxpass' has no attribute {name!r}")
