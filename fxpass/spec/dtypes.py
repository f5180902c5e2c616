"""Which dtype operands of unlike dtypes are computed in, and the error for those who want none.

In: the dtypes that meet at one operation. Out: one dtype, or None where PyTorch's own error is the
right answer::

    {bfloat16, float32} -> bfloat16        {float16, bfloat16} -> float32, with a warning
"""

from __future__ import annotations

import logging
from collections.abc import Set

import torch

log = logging.getLogger(__name__)

LOW_PRECISION = {torch.float16, torch.bfloat16}

INDEX_DTYPES = (torch.int64, torch.uint8)  # what F.cross_entropy takes as class indices


class MixedDtypeError(RuntimeError):
    """Operands of unlike dtypes that no autocast makes alike, under FUSEDCE_MIXED_DTYPES=error."""


def short(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def agreed(dtypes: Set[torch.dtype], mixed_dtypes: str, what: str) -> torch.dtype | None:
    """The dtype for operands that no autocast has made alike.

    Low precision with float32 gives the low precision, as under autocast. Float16 with bfloat16
    gives float32, since neither holds the other, and a warning. Everything else (float64, complex,
    integers) is nothing that autocast leaves behind: it stays as it is and raises as in eager.

    Args:
        dtypes: of the operands, two or more.
        mixed_dtypes: the setting, ``cast`` or ``error``.
        what: the operation and where it stands, ``linear, at train.py:7 y = self.head(h)``.

    Raises:
        MixedDtypeError: the setting is ``error`` and there is a dtype that they could agree on.
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
