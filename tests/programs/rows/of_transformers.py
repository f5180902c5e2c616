"""transformers' own losses. Out: ``KINDS``, the programs."""

from __future__ import annotations

import torch
from transformers.loss.loss_for_object_detection import sigmoid_focal_loss
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.trainer_pt_utils import LabelSmoother

from tests.programs.row import IN_BF16, REGION, Row

KIND = "transformers' own functions"

# fmt: off
ROWS = (
    Row("LabelSmoother()", "LabelSmoother(epsilon=0.1)({'logits': s}, ignored_tokens)",
        of="transformers, its own", ways=IN_BF16),
    Row("LabelSmoother(), shifted, num_items",
        "count = (ignored_tokens[:, 1:] != -100).sum(); smoother = LabelSmoother(); "
        "smoother({'logits': s}, ignored_tokens, True, num_items_in_batch=count)",
        of="transformers, its own"),
    Row("ForCausalLMLoss(), argmax for the metrics",
        "loss = ForCausalLMLoss(s, ignored_tokens, s.shape[-1]); "
        "(loss, s.detach().argmax(dim=-1))",
        of="transformers, its own"),
    Row("ForMaskedLMLoss(), accuracy",
        "loss = ForMaskedLMLoss(s, ignored_tokens, s.shape[-1])\n"
        "with torch.no_grad():\n"
        "    counted = ignored_tokens != -100\n"
        "    accuracy = ((s.argmax(-1) == ignored_tokens) & counted).sum() / counted.sum()\n"
        "(loss, accuracy)",
        of="transformers, its own"),
    Row("sigmoid_focal_loss()", "sigmoid_focal_loss(z, binary, num_boxes=4)", REGION,
        of="transformers, its own"),
)
