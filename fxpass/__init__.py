"""fxpass: a ``torch.compile`` backend that fuses linear + cross-entropy in any model.

``torch.compile(model, backend="fusedce")`` needs no import of this package. It has
:func:`explain`, which reports the rewrite, and :mod:`fxpass.testing`, for tests.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpass.report import Report, explain

__all__ = ["Report", "__version__", "explain"]
try:
    __version__ = version("fxpass")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0"


def __getattr__(name: str) -> Any:
    # imports torch only on first use, so that `fxpass --help` answers at once
    if name in ("Report", "explain"):
        from fxpass import report

        return getattr(report, name)
    raise AttributeError(f"module 'fxpass' has no attribute {name!r}")
