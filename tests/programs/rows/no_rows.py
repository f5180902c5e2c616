"""Means over no rows: nan, and gradients of 0.

Inductor knows that 0 * x is 0, which it is not for an infinity.
"""

from __future__ import annotations

from tests.programs.operands import Sizes
from tests.programs.row import NOTHING, Row

KIND = "no rows"
INNER = ("aot_eager", "inductor")

ROWS = (
    Row("every row is ignored", "F.cross_entropy(z, torch.full_like(labels, -100))", ways=INNER),
    Row("there is none", "F.cross_entropy(z, labels)", NOTHING, sizes=Sizes(b=0), ways=INNER),
)
