"""Log-probabilities of given classes, in the spellings of trainers and evaluation harnesses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint

from tests.programs.row import BF16, BOTH, IN_BF16, NOTHING, OUTSIDE, Row

KIND = "log-probabilities"

# fmt: off
ROWS = (
    Row("log_softmax().gather()", "z.log_softmax(-1).gather(-1, labels[:, None])[:, 0]",
        of="DPO trainers", ways=IN_BF16),
    Row("gather(log_softmax()), keywords",
        "log_probs = F.log_softmax(input=z, dim=1); "
        "torch.gather(index=labels.unsqueeze(1), dim=1, input=log_probs)",
        of="DPO trainers"),
    Row("gather of [B, T, V]",
        "log_probs = torch.log_softmax(s, dim=-1); "
        "torch.gather(log_probs, dim=-1, index=tokens.unsqueeze(-1)).squeeze(-1)",
        of="TRL before its own kernels", ways=(*IN_BF16, *OUTSIDE)),
    Row("take_along_dim()",
        "z.log_softmax(dim=-1).take_along_dim(labels[:, None], dim=-1).squeeze(-1)",
        of="RL scripts"),
    Row("-take_along_dim(), keywords",
        "log_probs = torch.log_softmax(dim=-1, input=z); "
        "torch.neg(torch.take_along_dim(input=log_probs, indices=labels[:, None], dim=1))",
        of="RL scripts"),
    Row("torch.take_along_dim, [B, T, V]",
        "torch.take_along_dim(s.log_softmax(dim=-1), tokens[..., None], dim=2).squeeze(2)",
        of="TRL's online DPO"),
    Row("[arange, labels]", "F.log_softmax(z, -1)[torch.arange(len(labels)), labels]",
        of="tutorials"),
    Row("[arange[:, None], arange, tokens] of [B, T, V]",
        "b, t, _ = s.shape; s.log_softmax(-1)[torch.arange(b)[:, None], torch.arange(t), tokens]",
        of="RL scripts"),
    Row("-[arange, labels]", "-z.log_softmax(dim=-1)[torch.arange(z.shape[0]), labels]",
        of="tutorials"),
    Row("-[range, labels].mean()", "-F.log_softmax(z, dim=1)[range(len(labels)), labels].mean()",
        of="tutorials"),
    Row("negated before the gather",
        "(-F.log_softmax(z, dim=-1)).gather(dim=-1, index=labels.view(-1, 1))", of="fairseq"),
    Row("nll_loss of log_softmax", "F.nll_loss(F.log_softmax(z, dim=-1), labels)",
        of="torch's documentation"),
    Row("LogSoftmax and NLLLoss modules",
        "torch.nn.NLLLoss(reduction='none')(torch.nn.LogSoftmax(dim=-1)(z), labels)",
        of="torch's documentation"),
    Row("-cross_entropy(reduction='none')", "-F.cross_entropy(z, labels, reduction='none')",
        of="OpenRLHF, verl", ways=IN_BF16),
    Row("log_softmax(dtype=float32)",
        "F.log_softmax(z, dim=-1, dtype=torch.float32).gather(-1, labels[:, None])[:, 0]",
        of="Megatron-style recipes", dtype=BF16),
    Row("logits.float(), gather", "z.float().log_softmax(-1).gather(1, labels[:, None]).squeeze(1)",
        of="GRPO recipes", dtype=BF16),
    Row("K targets a row", "z.log_softmax(-1).gather(-1, candidates)",
        of="distillation on a teacher's top k"),
    Row("K targets a row, logits minus lse",
        "z.gather(-1, candidates) - torch.logsumexp(z, dim=-1, keepdim=True)", of="NeMo-RL"),
    Row("(z - logsumexp(keepdim)).gather()",
        "log_probs = z - z.logsumexp(dim=-1, keepdim=True); "
        "log_probs.gather(-1, labels[:, None]).squeeze(-1)",
        of="JAX ports"),
    Row("z - logsumexp[:, None]",
        "log_probs = torch.sub(z, torch.logsumexp(z, 1)[:, None]); "
        "log_probs[torch.arange(log_probs.shape[0]), labels]",
        of="JAX ports"),
    Row("gather(z) - logsumexp",
        "picked = z.gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1); "
        "picked - torch.logsumexp(z, dim=-1)",
        of="TRL, verl", ways=IN_BF16),
    Row("logsumexp - gather(z), keepdim",
        "z.logsumexp(-1, True) - torch.gather(z, -1, labels[:, None])",
        of="cut-cross-entropy's reference"),
    Row("lse by max, exp, sum, log",
        "largest = z.max(dim=-1, keepdim=True).values; "
        "lse = largest + (z - largest).exp().sum(dim=-1, keepdim=True).log(); "
        "(z - lse).gather(-1, labels[:, None])[:, 0]", BOTH,
        of="from scratch"),
    Row("lse by detached amax",
        "shifted = z - torch.amax(z, dim=-1, keepdim=True).detach(); "
        "lse = torch.log(torch.sum(torch.exp(shifted), dim=-1)); "
        "shifted[torch.arange(len(labels)), labels] - lse",
        of="JAX ports"),
    Row("lse as log(sum(exp(z)))",
        "z.gather(1, labels.view(-1, 1)).view(-1) - z.exp().sum(1).log()", of="from scratch"),
    Row("log(softmax()).gather()", "z.softmax(-1).log().gather(-1, labels[:, None])[:, 0]",
        of="tutorials"),
    Row("log(softmax().gather())",
        "torch.log(F.softmax(z, dim=-1).gather(-1, labels[:, None])).squeeze(-1)", of="tutorials"),
    Row("softmax()[arange, labels].log()",
        "probs = torch.softmax(z, dim=1)[torch.arange(labels.numel()), labels]; "
        "probs.log().sum().neg().div(labels.numel()).exp()",
        of="torchmetrics' perplexity, restated"),
    Row("Categorical(logits).log_prob()",
        "Categorical(logits=z, validate_args=False).log_prob(labels)",
        of="torch.distributions", ways=IN_BF16),
    Row("Categorical(logits).log_prob(), validated",
        "Categorical(logits=z, validate_args=True).log_prob(labels)",
        NOTHING, reason="Attempted to call function marked as skipped at to",
        of="torch.distributions", ways=OUTSIDE),
    Row("Categorical(probs).log_prob()",
        "Categorical(probs=z.softmax(-1), validate_args=False).log_prob(labels)", BOTH,
        of="torch.distributions"),
    Row("log_softmax row by row, stack",
        "rows = []\n"
        "for row, index in zip(s, tokens, strict=True):\n"
        "    rows.append(F.log_softmax(row, dim=-1).gather(dim=-1, index=index[:, "
        "None]).squeeze(-1))\n"
        "torch.stack(rows)",
        of="verl", ways=IN_BF16),
    Row("lse row by row, gather at once",
        "picked = s.gather(-1, tokens[..., None]).squeeze(-1); "
        "picked - torch.stack([torch.logsumexp(row, dim=-1) for row in s])",
        of="verl"),
    Row("chunks of rows, cat",
        "parts = zip(z.chunk(2), labels.chunk(2), strict=True); "
        "torch.cat([p.log_softmax(-1).gather(-1, c[:, None]).squeeze(-1) for p, c in parts])",
        of="torchtune"),
    Row("cross_entropy of split rows, cat",
        "parts = zip(z.split(20), labels.split(20), strict=True); "
        "torch.cat([F.cross_entropy(p, c, reduction='none') for p, c in parts])",
        BOTH, of="torchtune"),
    Row("shifted sequences",
        "log_probs = s[:, :-1].log_softmax(-1); "
        "log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1)",
        of="DPO trainers"),
    Row("ignored tokens as class 0, masked sum",
        "logits, labels = (s[:, :-1, :], ignored_tokens[:, 1:].clone()); "
        "counted = labels != -100; labels[labels == -100] = 0; "
        "log_probs = torch.gather(logits.log_softmax(-1), dim=2, "
        "index=labels.unsqueeze(2)).squeeze(2); "
        "(log_probs * counted).sum(-1)",
        of="DPO trainers"),
    Row("logits / temperature",
        "(z / temperature).log_softmax(-1).gather(-1, labels[:, None])[:, 0]", BOTH,
        of="RL trainers", ways=IN_BF16),
    Row("logits.div_(temperature), a number",
        "s.div_(0.7); s.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)",
        of="verl", ways=IN_BF16),
    Row("logits /= temperature, a tensor",
        "z /= temperature; z.gather(-1, labels[:, None]).squeeze(-1) - torch.logsumexp(z, dim=-1)", BOTH,
        of="OpenRLHF"),
    Row("logits.div_(temperatures of rows)",
        "z.div_(temperatures); F.log_softmax(z, dim=-1).gather(-1, labels[:, None])[:, 0]", BOTH,
        of="verl"),
    Row("in place, then row by row",
        "s.div_(0.7)\n"
        "if s.dtype in (torch.float32, torch.float64):\n"
        "    picked = torch.gather(s, dim=-1, index=tokens.unsqueeze(-1)).squeeze(-1)\n"
        "    return picked - torch.stack([torch.logsumexp(row, dim=-1) for row in s])\n"
        "rows = [F.log_softmax(row, dim=-1).gather(dim=-1, "
        "index=index.unsqueeze(-1)).squeeze(-1) for row, index in zip(s, tokens, strict=True)]\n"
        "torch.stack(rows)",
        of="OpenRLHF", ways=IN_BF16),
    Row("a head with a bias",
        "F.linear(x, weight, bias).log_softmax(-1).gather(-1, labels[:, None])[:, 0]", of="GPT-J"),
    Row("a frozen head", "z.log_softmax(-1).gather(-1, labels[:, None])[:, 0]",
        of="LoRA RL", trained=("x",)),
    Row("evaluation", "z.log_softmax(-1).gather(-1, labels[:, None])[:, 0]",
        of="reference models", trained=()),
    Row("evaluation, with the greedy answer",
        "log_probs = F.log_softmax(s, dim=-1); "
        "greedy = (log_probs.argmax(dim=-1) == tokens).all(-1); "
        "(log_probs.gather(2, tokens.unsqueeze(-1)).squeeze(-1).sum(-1), greedy)",
        of="lm-evaluation-harness", trained=()),
    Row("a checkpointed head",
        "def picked(x, labels):\n"
        "    return F.linear(x, weight).log_softmax(-1).gather(-1, labels[:, None])[:, 0]\n"
        "checkpoint(picked, x, labels, use_reentrant=False)",
        of="long-context RL"),
    Row("checkpointed chunks of rows",
        "def picked(x, labels):\n"
        "    logits = F.linear(x, weight)\n"
        "    return logits.gather(-1, labels[:, None])[:, 0] - logits.logsumexp(-1)\n"
        "parts = zip(x.chunk(2), labels.chunk(2), strict=True)\n"
        "torch.cat([checkpoint(picked, *part, use_reentrant=False) for part in parts])",
        of="long-context RL"),
    Row("autocast, log_softmax in f32",
        "with torch.autocast('cpu', torch.bfloat16):\n"
        "    logits = x @ weight.t()\n"
        "logits.float().log_softmax(-1).gather(-1, labels[:, None])[:, 0]",
        of="mixed precision"),
)
