"""torchmetrics' own functions, as Lightning modules call them. Out: ``KINDS``, the programs."""

from __future__ import annotations

import torch.nn.functional as F
from torchmetrics.functional.classification import multiclass_accuracy
from torchmetrics.functional.text import perplexity

from tests.programs.row import NOTHING, REGION, Row

KIND = "torchmetrics' own functions"

# fmt: off
ROWS = (
    Row("perplexity()", "perplexity(s, ignored_tokens, ignore_index=-100)",
        NOTHING, reason="Dynamic shape operator at torchmetrics/functional/",
        of="torchmetrics, its own", trained=()),
    Row("multiclass_accuracy()",
        "accuracy = multiclass_accuracy(z.detach(), labels, z.shape[-1], average='micro', "
        "validate_args=False); "
        "(F.cross_entropy(z, labels), accuracy)",
        of="torchmetrics, its own"),
    Row("multiclass_accuracy(top_k=5), evaluation",
        "multiclass_accuracy(z, labels, z.shape[-1], average='micro', top_k=5, "
        "validate_args=False)", REGION,
        of="torchmetrics, its own", trained=()),
)
