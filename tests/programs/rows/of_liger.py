"""Functions of Liger Kernel's losses that compute logits in torch. Out: ``KINDS``, the programs."""

from __future__ import annotations

from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction
from liger_kernel.chunked_loss.orpo_loss import LigerFusedLinearORPOFunction

from tests.programs.row import BOTH, Row

KIND = "Liger's own functions"

# fmt: off
ROWS = (
    Row("LigerFusedLinearGRPOFunction.ppo_loss_fn()",
        "log_probs = s.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1); "
        "advantages = old_tokens[:, 0]; "
        "made = LigerFusedLinearGRPOFunction.ppo_loss_fn(log_probs, mask, advantages, mask, "
        "old_per_token_logps=old_tokens, loss_type='grpo'); "
        "made[0]",
        of="Liger, its own"),
    Row("LigerFusedLinearPreferenceBase.chunk_forward()",
        "hidden = x.view(B, T, D); "
        "made = LigerFusedLinearPreferenceBase.chunk_forward(hidden, weight, ignored_tokens); "
        "chosen, rejected, chosen_logits, rejected_logits, nll = made; "
        "loss = LigerFusedLinearORPOFunction.preference_loss_fn(chosen, rejected, "
        "ignored_tokens)[0]; "
        "(loss + nll, chosen_logits.detach().mean(), rejected_logits.detach().mean())", BOTH,
        of="Liger, its own"),
)
