"""Which heads are worth a loop over chunks of rows.

In: the sizes of a head's logits, and the size that is worth a loop (``FUSEDCE_MIN_LOGITS_MB``; 0
fuses all). Out: why they are not, or None::

    >>> too_small(4096 * 2048 * 4, 2048, 1024, 64)
    'its logits take 32 MiB, fewer than 64 MiB (FUSEDCE_MIN_LOGITS_MB=0 fuses all)'
"""

from __future__ import annotations

from fxpass import messages
from fxpass.plan.budget import MIB, size_text

# With fewer classes, target, sums and gradients of a row take as much memory as its logits.
LEAST_CLASSES = 256


def too_small(logits_bytes: int, classes: int, hidden: int, least: float) -> str | None:
    """Why logits are not worth a loop: they are small, have few classes, or take less memory than
    their hidden states, of which views of rows, rows that are left out, and f32 sums are copies.

    Args:
        logits_bytes: of all logits.
        classes: of a row, of all heads of a region.
        hidden: the hidden values of a row.
        least: the size of logits, in MiB, that are worth a loop; 0: all are.
    """
    if least and logits_bytes < least * MIB:
        return messages.FEW_MIB.format(size=size_text(logits_bytes), least=least)
    if least and classes < LEAST_CLASSES:
        return messages.FEW_CLASSES.format(classes=classes)
    if least and hidden > classes:
        return messages.MORE_HIDDEN.format(classes=classes, hidden=hidden)
    return None
