"""Graphs in ATen's spelling, of torch.export and make_fx, and logits that enter nested graphs."""

from __future__ import annotations

from torch import Tensor

from tests.programs.row import NOTHING, REGION, Row

KIND = "traced"
# Those of make_fx are in tests/unit/rewrite/test_tracers.py, with what they become.
BOTH_WAYS = ("exported", "decomposed")


def entropy(z: Tensor) -> Tensor:
    return z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)


# fmt: off
ROWS = (
    Row("cross_entropy", "F.cross_entropy(z, labels)", ways=("exported",)),
    Row("one loss for each row", "F.cross_entropy(z, labels, reduction='none').square().sum()",
        ways=BOTH_WAYS),
    Row("operands cast, logits in float32",
        "F.cross_entropy(F.linear(x.bfloat16(), weight.bfloat16()).float(), labels)",
        ways=("exported",)),
    Row("shifted", "F.cross_entropy(s[:, :-1].reshape(-1, V), tokens[:, 1:].reshape(-1))",
        ways=BOTH_WAYS),
    Row("soft-cap with a bias",
        "F.cross_entropy(30 * torch.tanh(F.linear(x, weight, bias) / 30), labels)", ways=BOTH_WAYS),
    Row("a temperature that is computed",
        "F.cross_entropy(z * bias.mean().exp(), labels)", REGION, ways=("exported",)),
    Row("in place", "F.cross_entropy(z.div_(2).add_(bias), labels)", REGION, ways=("exported",),
        never=("checkpointed",)),
    Row("rows by a tensor",
        "F.cross_entropy(z[torch.tensor([1, 0, 3])], labels[:3])", ways=("exported",)),
    Row("sequences permuted",
        "F.cross_entropy(s.permute(1, 0, 2).flatten(0, 1), tokens.T.flatten())",
        ways=("exported",)),
    Row("nll_loss", "F.nll_loss(z.log_softmax(-1), labels)", ways=BOTH_WAYS),
    Row("gather",
        "-s.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1).mean()",
        ways=("exported",)),
    Row("classes in the middle", "F.cross_entropy(s.transpose(1, 2), tokens)", ways=("exported",)),
    Row("z-loss beside it",
        "F.cross_entropy(z, labels) + z.logsumexp(-1).square().mean()", ways=("exported",)),
    # of which the tracers that decompose losses leave nothing
    Row("label smoothing",
        "F.cross_entropy(F.linear(x, weight, bias), labels, label_smoothing=0.1, ignore_index=3)",
        ways=("exported",)),
    Row("probabilities", "F.cross_entropy(z, 0.9 * soft.detach())", ways=("exported",)),
    Row("logsumexp",
        "(s.logsumexp(-1) - s.gather(-1, tokens[..., None]).squeeze(-1)).mean()",
        ways=("exported",)),
    Row("einsum as the head",
        "y = torch.einsum('btd,vd->btv', x.view(B, T, D), weight); "
        "F.cross_entropy(y.flatten(0, 1), labels)", REGION, ways=("exported",)),
    # contexts: nested graphs of torch.export, casts of the other tracers
    Row("rows that were written",
        "rows = torch.arange(N); rows[0] = 1; -z.log_softmax(-1)[rows, labels].mean()",
        ways=BOTH_WAYS),
    Row("under autocast",
        "with torch.autocast('cpu', torch.bfloat16):\n"
        "    return F.cross_entropy(F.linear(x, weight, bias), labels)", ways=BOTH_WAYS),
    # make_fx forgets no_grad
    Row("under no_grad",
        "with torch.no_grad():\n"
        "    return F.cross_entropy(F.linear(x, weight, bias), labels)", ways=("exported",),
        never=("decomposed", "made")),
    Row("logits that are returned",
        "z = z / 2; (F.cross_entropy(z, labels), z)", ways=("exported",)),
    Row("a metric, and gradients on again inside of no_grad",
        "with torch.no_grad():\n"
        "    accuracy = (z.argmax(-1) == labels).float().mean()\n"
        "    with torch.enable_grad():\n"
        "        z_loss = z.logsumexp(-1).square().mean()\n"
        "F.cross_entropy(z, labels) * (1 + accuracy) + z_loss", ways=("exported",)),
    Row("half of it under autocast",
        "with torch.autocast('cpu', torch.bfloat16):\n"
        "    z = F.linear(x, weight)\n"
        "F.cross_entropy(z.float(), labels)", ways=("exported",)),
    Row("autocast off in the middle",
        "with torch.autocast('cpu', torch.bfloat16):\n"
        "    z = F.linear(x, weight)\n"
        "    with torch.autocast('cpu', enabled=False):\n"
        "        loss = F.cross_entropy(z.float() / 2, labels)\n"
        "    hidden = x.view(B, T, D) @ x.view(B, T, D).mT\n"
        "loss + hidden.sum().float()", ways=("exported",)),
    Row("logits that a context changes",
        "with torch.no_grad():\n"
        "    z.mul_(0.5)\n"
        "    best = z.argmax(-1)\n"
        "F.cross_entropy(z, labels) * (1 + best.float().mean())", ways=("exported",)),
    Row("the modes that a context leaves",
        "h = x.view(B, T, D)\n"
        "with torch.no_grad():\n"
        "    with torch.autocast('cpu', torch.bfloat16):\n"
        "        nested = h @ h.mT\n"
        "    after = h @ h.mT\n"
        "(F.cross_entropy(z, labels), nested, after, h @ h.mT)", ways=("exported",)),
    # a checkpoint reads logits
    Row("a checkpoint of the entropy beside ratios",
        "chosen = z.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1); "
        "(chosen.exp() - 0.1 * checkpoint(entropy, z, use_reentrant=False)).mean()",
        REGION, of="verl's entropy_checkpointing", never=("checkpointed",)),
    Row("one checkpoint in another",
        "def policy(x):\n"
        "    z = F.linear(x, weight)\n"
        "    chosen = z.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)\n"
        "    return (chosen.exp() - 0.1 * checkpoint(entropy, z, use_reentrant=False)).mean()\n"
        "checkpoint(policy, x, use_reentrant=False)", REGION),
    Row("two checkpoints of other rows",
        "z = s / 2; "
        "loss = checkpoint(F.cross_entropy, z[1:].flatten(0, 1), tokens[1:].flatten(), "
        "use_reentrant=False); "
        "checkpoint(entropy, z[:1], use_reentrant=False).mean() + loss", REGION,
        never=("checkpointed",)),
    Row("a checkpoint that reads columns",
        "checkpoint(lambda z: z.cumsum(0).square().mean() + z.logsumexp(-1).mean(), z, "
        "use_reentrant=False)", NOTHING),
    # backward computes more again than the logits
    Row("a checkpoint of more than the logits",
        "checkpoint(lambda z: z.logsumexp(-1).mean() * (x[..., None] + weight[0]).tanh().norm(), "
        "z, "
        "use_reentrant=False)", left="add, tanh, pow"),
    # graphs of one kind of rewrite each
    Row("a loss that has no logits beside other logits",
        "z.cumsum(0).sum() + F.nll_loss(x, labels % D)", REGION),
    Row("other logits of which columns are read",
        "F.cross_entropy(z, labels) + F.linear(x, weight * 2).cumsum(0).mean()",
        left="mm, cumsum"),
    # heads over one weight, as those that are chunked by hand
    Row("six chunks by hand",
        "total = 0.0\n"
        "for some, labels in zip(x.chunk(6), labels.chunk(6), strict=True):\n"
        "    total = total + F.cross_entropy(F.linear(some, weight).float(), labels, "
        "reduction='sum')\n"
        "total / N", ways=("bf16",)),
    Row("a bias in float32 beside 16 bits",
        "z = F.linear(x.bfloat16(), weight.bfloat16()).float() + (40 + 0.3 * bias); "
        "F.cross_entropy(z, ignored, reduction='none')", ways=("chunks",)),
)
