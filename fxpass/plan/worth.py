"""Which heads are worth a loop over chunks of rows.

In: the sizes of a head's logits, and the size that is worth a loop (``FUSEDCE_MIN_LOGITS_MB``; 0
fuses all). Out: why they are not, or None::

    >>> too_small(4096 * 2048 * 4, 2048, 1024, 64)
    'its logits take 32 MiB, fewer than 64 MiB (FUSEDCE_MIN_LOGITS_MB=0 fuses all)'
"""

from __future__ import annotations

from fxpass.plan.plan import MIB, size

# With fewer classes, target, sums and gradients of a row take as much memory as its logits.
LEAST_CLASSES = 256
FUSES_ALL = "FUSEDCE_MIN_LOGITS_MB=0 fuses all"


def too_small(taken: int, classes: int, hidden: int, least: float) -> str | None:
    """Why logits are not worth a loop: they are small, have few classes, or take less memory than
    their hidden states, of which views of rows, rows that are left out, and f32 sums are copies.

    Args:
        taken: the bytes of the logits.
        classes: of a row, of all heads of a region.
        hidden: the hidden values of a row.
        least: the size of logits, in MiB, that are worth a loop; 0: all are.
    """
    if least and taken < least * MIB:
        return f"its logits take {size(taken)}, fewer than {least:g} MiB ({FUSES_ALL})"
    if least and classes < LEAST_CLASSES:
        what = f"rows of {classes} logits take hardly more memory than the other values of a row"
        return f"{what} ({FUSES_ALL})"
    if least and hidden > classes:
        what = f"rows of {classes} logits take less memory than their {hidden} hidden values"
        return f"{what} ({FUSES_ALL})"
    return None
