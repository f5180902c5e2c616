"""TRL's own functions. Out: ``KINDS``, the programs."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from trl.trainer.utils import (
    entropy_from_logits,
    selective_log_softmax,
    selective_log_softmax_and_entropy,
)

from tests.programs.operands import SIZES
from tests.programs.row import BOTH, IN_BF16, REGION, Row

KIND = "TRL's own functions"
CAPTURED = {"capture_dynamic_output_shape_ops": True}


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # trl.experimental warns that it may change
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer
    from trl.experimental.sdpo.loss_utils import (
        compute_full_logit_self_distillation_loss,
        compute_sampled_token_self_distillation_loss,
    )


def _jsd(x, weight, teacher_x, teacher_weight, *labels, **options):
    b, t = SIZES.b, SIZES.t
    student = F.linear(x.view(b, t, -1), weight)
    teacher = F.linear(teacher_x.view(b, t, -1), teacher_weight)
    return GKDTrainer.generalized_jsd_loss(student, teacher, *labels, **options)


# fmt: off
ROWS = (
    Row("selective_log_softmax()", "selective_log_softmax(s, tokens)",
        of="TRL, its own", ways=IN_BF16),
    Row("selective_log_softmax() of [N, V]", "selective_log_softmax(z[None], labels[None])[0]",
        REGION, of="TRL, its own"),
    Row("selective_log_softmax(temperature)", "selective_log_softmax(s, tokens, temperature=0.7)",
        of="TRL, its own", ways=IN_BF16),
    Row("selective_log_softmax(row_mask)", "selective_log_softmax(s, tokens, row_mask=mask)",
        of="TRL, its own"),
    Row("selective_log_softmax() of K targets",
        "selective_log_softmax(s, candidates.view(*s.shape[:2], -1))", of="TRL, its own"),
    Row("ORPOTrainer.get_batch_logps()",
        "ORPOTrainer.get_batch_logps(s, ignored_tokens, average_log_prob=True)",
        of="TRL, its own", ways=IN_BF16),
    Row("GRPO loss by selective_log_softmax()",
        "log_probs = selective_log_softmax(s, tokens); ratio = (log_probs - old_tokens).exp(); "
        "loss = -torch.min(ratio, ratio.clamp(0.8, 1.2)); "
        "((loss * mask).sum(-1) / mask.sum(-1)).mean()",
        of="TRL, its own", ways=IN_BF16),
    Row("sampled self-distillation",
        "compute_sampled_token_self_distillation_loss(s, s.detach() * 0.5, tokens, "
        "distillation_alpha=1.0)", BOTH,
        of="TRL, its own"),
    Row("entropy_from_logits()", "entropy_from_logits(s)", of="TRL, its own", ways=IN_BF16),
    Row("entropy_from_logits(chunk_size=24)", "entropy_from_logits(s, chunk_size=24)", BOTH,
        of="TRL, its own"),
    Row("entropy_from_logits(), evaluation", "entropy_from_logits(s)",
        of="TRL, its own", trained=()),
    Row("selective_log_softmax_and_entropy()", "selective_log_softmax_and_entropy(s, tokens)",
        of="TRL, its own", ways=IN_BF16),
    Row("selective_log_softmax_and_entropy(), no gradient",
        "selective_log_softmax_and_entropy(s, tokens, entropy_requires_grad=False)",
        of="TRL, its own"),
    Row("generalized_jsd_loss()", "_jsd(x, weight, teacher_x, teacher_weight)", REGION,
        of="TRL, its own", ways=IN_BF16),
    Row("generalized_jsd_loss(labels), captured",
        "_jsd(x, weight, teacher_x, teacher_weight, ignored_tokens, beta=0.1, temperature=0.9)",
        REGION, of="TRL, its own", dynamo=CAPTURED),
    Row("generalized_jsd_loss(beta=0)",
        "_jsd(x, weight, teacher_x, teacher_weight, beta=0, reduction='sum')",
        REGION, of="TRL, its own"),
    Row("generalized_jsd_loss(beta=1)",
        "_jsd(x, weight, teacher_x, teacher_weight, beta=1, num_items_in_batch=40)", REGION,
        of="TRL, its own"),
    Row("generalized_jsd_loss() of given logits",
        "GKDTrainer.generalized_jsd_loss(s, teacher.view(s.shape), beta=0.3)",
        REGION, of="TRL, its own"),
    Row("full-logit self-distillation",
        "student = F.linear(x.view(B, T, -1), weight); "
        "teacher = F.linear(teacher_x.view(B, T, -1), teacher_weight); "
        "compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=0.5)",
        REGION, of="TRL, its own"),
)
