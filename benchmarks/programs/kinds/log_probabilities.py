"""Log-probabilities of given classes, in the spellings of trainers and evaluation harnesses.

Out: ``KINDS``, the programs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint

from benchmarks.programs.program import BF16, F32, Kind

kind = Kind("log-probabilities")
KINDS = (kind,)

# ---------------------------------------------------------------- log_softmax and a pick


@kind("log_softmax().gather()", "DPO trainers", "[N]", dtypes=(F32, BF16))
def _(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


@kind("gather(log_softmax()), keywords", "DPO trainers", "[N, 1]")
def _(logits, labels):
    log_probs = F.log_softmax(input=logits, dim=1)
    return torch.gather(index=labels.unsqueeze(1), dim=1, input=log_probs)


@kind("gather of [B, T, V]", "TRL before its own kernels", "[B, T]", dtypes=(F32, BF16))
def _(sequences, tokens):
    log_probs = torch.log_softmax(sequences, dim=-1)
    return torch.gather(log_probs, dim=-1, index=tokens.unsqueeze(-1)).squeeze(-1)


@kind("take_along_dim()", "RL scripts", "[N]")
def _(logits, labels):
    return logits.log_softmax(dim=-1).take_along_dim(labels[:, None], dim=-1).squeeze(-1)


@kind("-take_along_dim(), keywords", "RL scripts", "[N, 1]")
def _(logits, labels):
    log_probs = torch.log_softmax(dim=-1, input=logits)
    return torch.neg(torch.take_along_dim(input=log_probs, indices=labels[:, None], dim=1))


@kind("torch.take_along_dim, [B, T, V]", "TRL's online DPO", "[B, T]")
def _(sequences, tokens):
    return torch.take_along_dim(sequences.log_softmax(dim=-1), tokens[..., None], dim=2).squeeze(2)


@kind("[arange, labels]", "tutorials", "[N]")
def _(logits, labels):
    return F.log_softmax(logits, -1)[torch.arange(len(labels)), labels]


@kind("[arange[:, None], arange, tokens] of [B, T, V]", "RL scripts", "[B, T]")
def _(sequences, tokens):
    b, t, _ = sequences.shape
    return sequences.log_softmax(-1)[torch.arange(b)[:, None], torch.arange(t), tokens]


@kind("-[arange, labels]", "tutorials", "[N]")
def _(logits, labels):
    return -logits.log_softmax(dim=-1)[torch.arange(logits.shape[0]), labels]


@kind("-[range, labels].mean()", "tutorials", "scalar")
def _(logits, labels):
    return -F.log_softmax(logits, dim=1)[range(len(labels)), labels].mean()


@kind("negated before the gather", "fairseq", "[N, 1]")
def _(logits, labels):
    return (-F.log_softmax(logits, dim=-1)).gather(dim=-1, index=labels.view(-1, 1))


@kind("nll_loss of log_softmax", "torch's documentation", "scalar")
def _(logits, labels):
    return F.nll_loss(F.log_softmax(logits, dim=-1), labels)


@kind("LogSoftmax and NLLLoss modules", "torch's documentation", "[N]")
def _(logits, labels):
    return torch.nn.NLLLoss(reduction="none")(torch.nn.LogSoftmax(dim=-1)(logits), labels)


@kind("-cross_entropy(reduction='none')", "OpenRLHF, verl", "[N]", dtypes=(F32, BF16))
def _(logits, labels):
    return -F.cross_entropy(logits, labels, reduction="none")


@kind("log_softmax(dtype=float32)", "Megatron-style recipes", "[N]", dtypes=(BF16,))
def _(logits, labels):
    return F.log_softmax(logits, dim=-1, dtype=torch.float32).gather(-1, labels[:, None])[:, 0]


@kind("logits.float(), gather", "GRPO recipes", "[N]", dtypes=(BF16,))
def _(logits, labels):
    return logits.float().log_softmax(-1).gather(1, labels[:, None]).squeeze(1)


@kind("K targets a row", "distillation on a teacher's top k", "[N, K]")
def _(logits, candidates):
    return logits.log_softmax(-1).gather(-1, candidates)


@kind("K targets a row, logits minus lse", "NeMo-RL", "[N, K]")
def _(logits, candidates):
    return logits.gather(-1, candidates) - torch.logsumexp(logits, dim=-1, keepdim=True)


# ---------------------------------------------------------------- log-sum-exps


@kind("(z - logsumexp(keepdim)).gather()", "JAX ports", "[N]")
def _(logits, labels):
    log_probs = logits - logits.logsumexp(dim=-1, keepdim=True)
    return log_probs.gather(-1, labels[:, None]).squeeze(-1)


@kind("z - logsumexp[:, None]", "JAX ports", "[N]")
def _(logits, labels):
    log_probs = torch.sub(logits, torch.logsumexp(logits, 1)[:, None])
    return log_probs[torch.arange(log_probs.shape[0]), labels]


@kind("gather(z) - logsumexp", "TRL, verl", "[N]", dtypes=(F32, BF16))
def _(logits, labels):
    picked = logits.gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)
    return picked - torch.logsumexp(logits, dim=-1)


@kind("logsumexp - gather(z), keepdim", "cut-cross-entropy's reference", "[N, 1]")
def _(logits, labels):
    return logits.logsumexp(-1, True) - torch.gather(logits, -1, labels[:, None])


@kind("lse by max, exp, sum, log", "from scratch", "[N]")
def _(logits, labels):
    largest = logits.max(dim=-1, keepdim=True).values
    lse = largest + (logits - largest).exp().sum(dim=-1, keepdim=True).log()
    return (logits - lse).gather(-1, labels[:, None])[:, 0]


@kind("lse by detached amax", "JAX ports", "[N]")
def _(logits, labels):
    shifted = logits - torch.amax(logits, dim=-1, keepdim=True).detach()
    lse = torch.log(torch.sum(torch.exp(shifted), dim=-1))
    return shifted[torch.arange(len(labels)), labels] - lse


@kind("lse as log(sum(exp(z)))", "from scratch", "[N]")
def _(logits, labels):
    return logits.gather(1, labels.view(-1, 1)).view(-1) - logits.exp().sum(1).log()


# ---------------------------------------------------------------- softmax first


@kind("log(softmax()).gather()", "tutorials", "[N]")
def _(logits, labels):
    return logits.softmax(-1).log().gather(-1, labels[:, None])[:, 0]


@kind("log(softmax().gather())", "tutorials", "[N]")
def _(logits, labels):
    return torch.log(F.softmax(logits, dim=-1).gather(-1, labels[:, None])).squeeze(-1)


@kind("softmax()[arange, labels].log()", "torchmetrics' perplexity, restated", "scalar")
def _(logits, labels):
    probs = torch.softmax(logits, dim=1)[torch.arange(labels.numel()), labels]
    return probs.log().sum().neg().div(labels.numel()).exp()


@kind("Categorical(logits).log_prob()", "torch.distributions", "[N]", dtypes=(F32, BF16))
def _(logits, labels):
    return Categorical(logits=logits, validate_args=False).log_prob(labels)


@kind("Categorical(logits).log_prob(), validated", "torch.distributions", "[N]")
def _(logits, labels):
    return Categorical(logits=logits, validate_args=True).log_prob(labels)


@kind("Categorical(probs).log_prob()", "torch.distributions", "[N]")
def _(logits, labels):
    return Categorical(probs=logits.softmax(-1), validate_args=False).log_prob(labels)


# ---------------------------------------------------------------- rows in parts


@kind("log_softmax row by row, stack", "verl", "[B, T]", dtypes=(F32, BF16))
def _(sequences, tokens):
    rows = []
    for row, index in zip(sequences, tokens, strict=True):
        rows.append(F.log_softmax(row, dim=-1).gather(dim=-1, index=index[:, None]).squeeze(-1))
    return torch.stack(rows)


@kind("lse row by row, gather at once", "verl", "[B, T]")
def _(sequences, tokens):
    picked = sequences.gather(-1, tokens[..., None]).squeeze(-1)
    return picked - torch.stack([torch.logsumexp(row, dim=-1) for row in sequences])


@kind("chunks of rows, cat", "torchtune", "[N]")
def _(logits, labels):
    parts = zip(logits.chunk(2), labels.chunk(2), strict=True)
    return torch.cat([p.log_softmax(-1).gather(-1, c[:, None]).squeeze(-1) for p, c in parts])


@kind("cross_entropy of split rows, cat", "torchtune", "[N]")
def _(logits, labels):
    parts = zip(logits.split(20), labels.split(20), strict=True)
    return torch.cat([F.cross_entropy(p, c, reduction="none") for p, c in parts])


@kind("shifted sequences", "DPO trainers", "[B, T - 1]")
def _(sequences, tokens):
    log_probs = sequences[:, :-1].log_softmax(-1)
    return log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1)


@kind("ignored tokens as class 0, masked sum", "DPO trainers", "[B]")
def _(sequences, ignored_tokens):
    logits, labels = sequences[:, :-1, :], ignored_tokens[:, 1:].clone()
    counted = labels != -100
    labels[labels == -100] = 0
    log_probs = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (log_probs * counted).sum(-1)


# ---------------------------------------------------------------- temperatures


@kind("logits / temperature", "RL trainers", "[N]", dtypes=(F32, BF16))
def _(logits, labels, temperature):
    return (logits / temperature).log_softmax(-1).gather(-1, labels[:, None])[:, 0]


@kind("logits.div_(temperature), a number", "verl", "[B, T]", dtypes=(F32, BF16))
def _(sequences, tokens):
    sequences.div_(0.7)
    return sequences.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


@kind("logits /= temperature, a tensor", "OpenRLHF", "[N]")
def _(logits, labels, temperature):
    logits /= temperature
    return logits.gather(-1, labels[:, None]).squeeze(-1) - torch.logsumexp(logits, dim=-1)


@kind("logits.div_(temperatures of rows)", "verl", "[N]")
def _(logits, labels, temperatures):
    logits.div_(temperatures)
    return F.log_softmax(logits, dim=-1).gather(-1, labels[:, None])[:, 0]


@kind("in place, then row by row", "OpenRLHF", "[B, T]", dtypes=(F32, BF16))
def _(sequences, tokens):
    sequences.div_(0.7)
    if sequences.dtype in (torch.float32, torch.float64):
        picked = torch.gather(sequences, dim=-1, index=tokens.unsqueeze(-1)).squeeze(-1)
        return picked - torch.stack([torch.logsumexp(row, dim=-1) for row in sequences])
    rows = [
        F.log_softmax(row, dim=-1).gather(dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
        for row, index in zip(sequences, tokens, strict=True)
    ]
    return torch.stack(rows)


# ---------------------------------------------------------------- heads


@kind("a head with a bias", "GPT-J", "[N]")
def _(x, weight, bias, labels):
    return F.linear(x, weight, bias).log_softmax(-1).gather(-1, labels[:, None])[:, 0]


@kind("a frozen head", "LoRA RL", "[N]", gradients=("x",))
def _(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


@kind("evaluation", "reference models", "[N]", gradients=())
def _(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


@kind("evaluation, with the greedy answer", "lm-evaluation-harness", "[B], [B]", gradients=())
def _(sequences, tokens):
    log_probs = F.log_softmax(sequences, dim=-1)
    greedy = (log_probs.argmax(dim=-1) == tokens).all(-1)
    return log_probs.gather(2, tokens.unsqueeze(-1)).squeeze(-1).sum(-1), greedy


@kind("a checkpointed head", "long-context RL", "[N]")
def _(x, weight, labels):
    def picked(x, labels):
        return F.linear(x, weight).log_softmax(-1).gather(-1, labels[:, None])[:, 0]

    return checkpoint(picked, x, labels, use_reentrant=False)


@kind("checkpointed chunks of rows", "long-context RL", "[N]")
def _(x, weight, labels):
    def picked(x, labels):
        logits = F.linear(x, weight)
        return logits.gather(-1, labels[:, None])[:, 0] - logits.logsumexp(-1)

    parts = zip(x.chunk(2), labels.chunk(2), strict=True)
    return torch.cat([checkpoint(picked, *part, use_reentrant=False) for part in parts])


@kind("autocast, log_softmax in f32", "mixed precision", "[N]")
def _(x, weight, labels):
    with torch.autocast("cpu", torch.bfloat16):
        logits = x @ weight.t()
    return logits.float().log_softmax(-1).gather(-1, labels[:, None])[:, 0]
