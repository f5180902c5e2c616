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

from benchmarks.programs.operands import SIZES
from benchmarks.programs.program import BF16, F32, Kind

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # trl.experimental warns that it may change
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer
    from trl.experimental.sdpo.loss_utils import (
        compute_full_logit_self_distillation_loss,
        compute_sampled_token_self_distillation_loss,
    )

log_probabilities = Kind("log-probabilities")
policies = Kind("losses of log-probabilities")
entropies = Kind("entropies")
several = Kind("several reductions of one head")
divergences = Kind("divergences of two heads")
KINDS = (log_probabilities, policies, entropies, several, divergences)
BOTH = (F32, BF16)
CAPTURED = {"capture_dynamic_output_shape_ops": True}


@log_probabilities("selective_log_softmax()", "TRL, its own", "[B, T]", dtypes=BOTH)
def _(sequences, tokens):
    return selective_log_softmax(sequences, tokens)


@log_probabilities("selective_log_softmax() of [N, V]", "TRL, its own", "[N]")
def _(logits, labels):
    return selective_log_softmax(logits[None], labels[None])[0]


@log_probabilities("selective_log_softmax(temperature)", "TRL, its own", "[B, T]", dtypes=BOTH)
def _(sequences, tokens):
    return selective_log_softmax(sequences, tokens, temperature=0.7)


@log_probabilities("selective_log_softmax(row_mask)", "TRL, its own", "[B, T]")
def _(sequences, tokens, mask):
    return selective_log_softmax(sequences, tokens, row_mask=mask)


@log_probabilities("selective_log_softmax() of K targets", "TRL, its own", "[B, T, K]")
def _(sequences, candidates):
    return selective_log_softmax(sequences, candidates.view(*sequences.shape[:2], -1))


@log_probabilities("ORPOTrainer.get_batch_logps()", "TRL, its own", "[B]", dtypes=BOTH)
def _(sequences, ignored_tokens):
    return ORPOTrainer.get_batch_logps(sequences, ignored_tokens, average_log_prob=True)


@policies("GRPO loss by selective_log_softmax()", "TRL, its own", "scalar", dtypes=BOTH)
def _(sequences, tokens, old_tokens, mask):
    log_probs = selective_log_softmax(sequences, tokens)
    ratio = (log_probs - old_tokens).exp()
    loss = -torch.min(ratio, ratio.clamp(0.8, 1.2))
    return ((loss * mask).sum(-1) / mask.sum(-1)).mean()


@policies("sampled self-distillation", "TRL, its own", "[B, T]")
def _(sequences, tokens):
    return compute_sampled_token_self_distillation_loss(
        sequences, sequences.detach() * 0.5, tokens, distillation_alpha=1.0
    )


@entropies("entropy_from_logits()", "TRL, its own", "[B, T]", dtypes=BOTH)
def _(sequences):
    return entropy_from_logits(sequences)


@entropies("entropy_from_logits(chunk_size=24)", "TRL, its own", "[B, T]")
def _(sequences):
    return entropy_from_logits(sequences, chunk_size=24)


@entropies("entropy_from_logits(), evaluation", "TRL, its own", "[B, T]", gradients=())
def _(sequences):
    return entropy_from_logits(sequences)


@several("selective_log_softmax_and_entropy()", "TRL, its own", "[B, T], [B, T]", dtypes=BOTH)
def _(sequences, tokens):
    return selective_log_softmax_and_entropy(sequences, tokens)


@several("selective_log_softmax_and_entropy(), no gradient", "TRL, its own", "[B, T], [B, T]")
def _(sequences, tokens):
    return selective_log_softmax_and_entropy(sequences, tokens, entropy_requires_grad=False)


def _jsd(x, weight, teacher_x, teacher_weight, *labels, **options):
    b, t = SIZES.b, SIZES.t
    student = F.linear(x.view(b, t, -1), weight)
    teacher = F.linear(teacher_x.view(b, t, -1), teacher_weight)
    return GKDTrainer.generalized_jsd_loss(student, teacher, *labels, **options)


@divergences("generalized_jsd_loss()", "TRL, its own", "scalar", dtypes=BOTH)
def _(x, weight, teacher_x, teacher_weight):
    return _jsd(x, weight, teacher_x, teacher_weight)


@divergences("generalized_jsd_loss(labels), captured", "TRL, its own", "scalar", dynamo=CAPTURED)
def _(x, weight, teacher_x, teacher_weight, ignored_tokens):
    return _jsd(x, weight, teacher_x, teacher_weight, ignored_tokens, beta=0.1, temperature=0.9)


@divergences("generalized_jsd_loss(beta=0)", "TRL, its own", "scalar")
def _(x, weight, teacher_x, teacher_weight):
    return _jsd(x, weight, teacher_x, teacher_weight, beta=0, reduction="sum")


@divergences("generalized_jsd_loss(beta=1)", "TRL, its own", "scalar")
def _(x, weight, teacher_x, teacher_weight):
    return _jsd(x, weight, teacher_x, teacher_weight, beta=1, num_items_in_batch=40)


@divergences("generalized_jsd_loss() of given logits", "TRL, its own", "scalar")
def _(sequences, teacher):
    return GKDTrainer.generalized_jsd_loss(sequences, teacher.view(sequences.shape), beta=0.3)


@divergences("full-logit self-distillation", "TRL, its own", "[B, T]")
def _(x, weight, teacher_x, teacher_weight):
    student = F.linear(x.view(SIZES.b, SIZES.t, -1), weight)
    teacher = F.linear(teacher_x.view(SIZES.b, SIZES.t, -1), teacher_weight)
    return compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=0.5)
