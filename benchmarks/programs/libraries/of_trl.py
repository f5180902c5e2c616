"""TRL's own functions. Out: ``KINDS``, the programs."""

from __future__ import annotations

import warnings

import torch
from trl.trainer.utils import (
    entropy_from_logits,
    selective_log_softmax,
    selective_log_softmax_and_entropy,
)

from benchmarks.programs.program import BF16, F32, Kind

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # trl.experimental warns that it may change
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer
    from trl.experimental.sdpo.loss_utils import compute_sampled_token_self_distillation_loss

log_probabilities = Kind("log-probabilities")
policies = Kind("losses of log-probabilities")
entropies = Kind("entropies")
several = Kind("several reductions of one head")
KINDS = (log_probabilities, policies, entropies, several)
BOTH = (F32, BF16)


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
