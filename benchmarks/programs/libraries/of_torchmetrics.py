"""torchmetrics' own functions, as Lightning modules call them. Out: ``KINDS``, the programs."""

from __future__ import annotations

import torch.nn.functional as F
from torchmetrics.functional.classification import multiclass_accuracy
from torchmetrics.functional.text import perplexity

from benchmarks.programs.program import Kind

log_probabilities = Kind("log-probabilities")
metrics = Kind("metrics")
KINDS = (log_probabilities, metrics)


@log_probabilities("perplexity()", "torchmetrics, its own", "scalar", gradients=())
def _(sequences, ignored_tokens):
    return perplexity(sequences, ignored_tokens, ignore_index=-100)


@metrics("multiclass_accuracy()", "torchmetrics, its own", "scalar, scalar")
def _(logits, labels):
    accuracy = multiclass_accuracy(
        logits.detach(), labels, logits.shape[-1], average="micro", validate_args=False
    )
    return F.cross_entropy(logits, labels), accuracy


@metrics(
    "multiclass_accuracy(top_k=5), evaluation", "torchmetrics, its own", "scalar", gradients=()
)
def _(logits, labels):
    return multiclass_accuracy(
        logits, labels, logits.shape[-1], average="micro", top_k=5, validate_args=False
    )
