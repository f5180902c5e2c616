"""Functions of Liger Kernel's losses that compute logits in torch. Out: ``KINDS``, the programs."""

from __future__ import annotations

from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction
from liger_kernel.chunked_loss.orpo_loss import LigerFusedLinearORPOFunction

from benchmarks.programs.operands import SIZES
from benchmarks.programs.program import Kind

policies = Kind("losses of log-probabilities")
several = Kind("several reductions of one head")
KINDS = (policies, several)


@policies("LigerFusedLinearGRPOFunction.ppo_loss_fn()", "Liger, its own", "scalar")
def _(sequences, tokens, old_tokens, mask):
    log_probs = sequences.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    advantages = old_tokens[:, 0]
    made = LigerFusedLinearGRPOFunction.ppo_loss_fn(
        log_probs, mask, advantages, mask, old_per_token_logps=old_tokens, loss_type="grpo"
    )
    return made[0]


@several("LigerFusedLinearPreferenceBase.chunk_forward()", "Liger, its own", "scalar, 2 scalars")
def _(x, weight, ignored_tokens):
    hidden = x.view(SIZES.b, SIZES.t, SIZES.d)
    made = LigerFusedLinearPreferenceBase.chunk_forward(hidden, weight, ignored_tokens)
    chosen, rejected, chosen_logits, rejected_logits, nll = made
    loss = LigerFusedLinearORPOFunction.preference_loss_fn(chosen, rejected, ignored_tokens)[0]
    return loss + nll, chosen_logits.detach().mean(), rejected_logits.detach().mean()
