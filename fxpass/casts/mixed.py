"""Chooses the dtype in which an operation computes operands of different dtypes.

In: the dtypes of an operation's operands. Out: one dtype, or None where the operation should raise
PyTorch's error::

    {bfloat16, float32} -> bfloat16        {float16, bfloat16} -> float32, with a warning
"""

from __future__ import annotations

import logging
from collections.abc import Set

import torch

from fxpass.spec.dtypes import LOW_PRECISION, short

log = logging.getLogger(__name__)


class MixedDtypeError(RuntimeError):
    """Operands have different dtypes outside autocast, under FUSEDCE_MIXED_DTYPES=error."""


def agreed(dtypes: Set[torch.dtype], mixed_dtypes: str, what: str) -> torch.dtype | None:
    """The common dtype for operands that autocast does not cast.

    Low precision with float32 gives the low precision, as under autocast. float16 with bfloat16
    gives float32, since neither can represent all values of the other, and logs a warning. Other
    dtypes (float64, complex, integers) give None: they are not autocast's to mix, and the operation
    raises as in eager.

    Args:
        dtypes: of the operands, two or more.
        mixed_dtypes: the setting, ``cast`` or ``error``.
        what: the operation and its source line, ``linear, at train.py:7 y = self.head(h)``.

    Raises:
        MixedDtypeError: the setting is ``error``, and casts could make the dtypes equal.
    """
    if not dtypes <= LOW_PRECISION | {torch.float32}:
        return None
    if mixed_dtypes == "error":
        names = " and ".join(sorted(map(short, dtypes)))
        raise MixedDtypeError(
            f"operands of {names} meet outside autocast in {what}: cast one of them, put the call "
            "under torch.autocast, or let fxpass cast with FUSEDCE_MIXED_DTYPES=cast"
        )
    if dtypes >= LOW_PRECISION:
        log.warning(
            "float16 meets bfloat16 in %s: computed in float32. A weight was probably read with "
            "the wrong dtype, and then its values are wrong too: check how it was loaded",
            what,
        )
        return torch.float32
    (low,) = dtypes & LOW_PRECISION
    return low
