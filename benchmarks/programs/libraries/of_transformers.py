"""transformers' own losses. Out: ``KINDS``, the programs."""

from __future__ import annotations

import torch
from transformers.loss.loss_for_object_detection import sigmoid_focal_loss
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.trainer_pt_utils import LabelSmoother

from benchmarks.programs.program import BF16, F32, Kind

smoothing = Kind("label smoothing and soft targets")
binary_losses = Kind("binary cross-entropy over classes")
metrics = Kind("metrics")
KINDS = (smoothing, binary_losses, metrics)


@smoothing("LabelSmoother()", "transformers, its own", "scalar", dtypes=(F32, BF16))
def _(sequences, ignored_tokens):
    return LabelSmoother(epsilon=0.1)({"logits": sequences}, ignored_tokens)


@smoothing("LabelSmoother(), shifted, num_items", "transformers, its own", "scalar")
def _(sequences, ignored_tokens):
    count = (ignored_tokens[:, 1:] != -100).sum()
    smoother = LabelSmoother()
    return smoother({"logits": sequences}, ignored_tokens, True, num_items_in_batch=count)


@metrics("ForCausalLMLoss(), argmax for the metrics", "transformers, its own", "scalar, [B, T]")
def _(sequences, ignored_tokens):
    loss = ForCausalLMLoss(sequences, ignored_tokens, sequences.shape[-1])
    return loss, sequences.detach().argmax(dim=-1)


@metrics("ForMaskedLMLoss(), accuracy", "transformers, its own", "scalar, scalar")
def _(sequences, ignored_tokens):
    loss = ForMaskedLMLoss(sequences, ignored_tokens, sequences.shape[-1])
    with torch.no_grad():
        counted = ignored_tokens != -100
        accuracy = ((sequences.argmax(-1) == ignored_tokens) & counted).sum() / counted.sum()
    return loss, accuracy


@binary_losses("sigmoid_focal_loss()", "transformers, its own", "scalar")
def _(logits, binary):
    return sigmoid_focal_loss(logits, binary, num_boxes=4)
