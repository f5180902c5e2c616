"""Cross-entropies with a penalty on the log-sum-exp."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.programs.row import BF16, IN_BF16, REGION, Row

KIND = "z-losses"

# fmt: off
ROWS = (
    Row("cross_entropy + logsumexp**2",
        "F.cross_entropy(z, labels) + 0.01 * z.logsumexp(-1).pow(2).mean()",
        of="OLMo", ways=IN_BF16),
    Row("logsumexp first",
        "lse = torch.logsumexp(z, dim=-1); loss = F.cross_entropy(z, labels, reduction='none'); "
        "(loss + 0.01 * lse * lse).mean()",
        of="PaLM ports"),
    Row("one lse for both",
        "lse = z.logsumexp(-1, keepdim=True); log_probs = z - lse; "
        "loss = -log_probs.gather(-1, labels[:, None])[:, 0]; "
        "z_loss = 0.01 * lse.squeeze(-1) ** 2; ((loss + z_loss).mean(), z_loss.detach().mean())",
        of="T5X ports"),
    Row("one lse, one_hot",
        "lse = torch.logsumexp(z, dim=-1, keepdim=True); "
        "one_hot = F.one_hot(labels, z.shape[-1]).to(z.dtype); "
        "loss = -torch.sum(one_hot * (z - lse), dim=-1); "
        "(loss + 0.01 * torch.square(lse[:, 0])).sum() / len(labels)",
        of="T5X ports"),
    Row("log(sum(exp(z)))**2",
        "lse = torch.log(torch.sum(torch.exp(z), dim=-1)); "
        "F.cross_entropy(z, labels) + 0.01 * (lse ** 2).mean()", REGION,
        of="Mesh TensorFlow ports"),
    Row("ignored tokens masked in both",
        "counted = ignored != -100; "
        "y = (z.logsumexp(-1).square() * counted).sum() / counted.sum(); "
        "F.cross_entropy(z, ignored, ignore_index=-100) + 0.01 * y",
        of="OLMo"),
    Row("shifted loss, unshifted z-loss",
        "logits = s[:, :-1].reshape(-1, s.shape[-1]); "
        "loss = F.cross_entropy(logits, tokens[:, 1:].reshape(-1)); "
        "loss + 0.01 * s.logsumexp(-1).square().mean()",
        of="language-model recipes"),
    Row("soft-capped logits",
        "capped = 30 * torch.tanh(z / 30); "
        "F.cross_entropy(capped, labels) + 0.01 * capped.logsumexp(-1).square().mean()",
        of="Gemma recipes"),
    Row("z-loss alone", "torch.logsumexp(z, dim=-1).square().mean()", of="router regularisers"),
    Row("logsumexp(dim=(-1,), keepdim=True)",
        "lse = torch.logsumexp(input=z, dim=(-1,), keepdim=True); "
        "F.cross_entropy(input=z, target=labels) + 0.01 * torch.mean(lse * lse)",
        of="PaLM ports"),
    Row("z-loss in f32",
        "y = z.float().logsumexp(-1).square().mean(); "
        "F.cross_entropy(z.float(), labels) + 0.01 * y",
        of="OLMo", dtype=BF16),
)
