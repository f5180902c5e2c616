"""Rows that are shifted, masked, moved or put together before or after row-wise operations.

Out: ``KINDS``, the programs. Each contains an operation that no formula of the algebra knows, so
that it has to run as a region.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.programs.operands import SIZES
from benchmarks.programs.program import BF16, F32, Kind

kind = Kind("rows moved and masked")
KINDS = (kind,)
BOTH = (F32, BF16)
CAPTURED = {"capture_dynamic_output_shape_ops": True}


def _top_mass(z: Tensor) -> Tensor:
    """How much probability the top classes have: row-wise, and no formula of moments."""
    return z.softmax(-1).topk(5, -1).values.sum(-1)


# ---------------------------------------------------------------- shifts and splits


@kind("shifted loss, top mass of all tokens", "supervised trainers", "scalar, [B, T]", dtypes=BOTH)
def _(sequences, tokens):
    z = sequences.nan_to_num()
    loss = F.cross_entropy(z[:, :-1].reshape(-1, SIZES.v), tokens[:, 1:].reshape(-1))
    return loss, _top_mass(z.detach())


@kind("shifted, contiguous, flattened, sorted", "supervised trainers", "scalar")
def _(sequences, tokens):
    z = sequences[..., :-1, :].contiguous().view(-1, SIZES.v)
    loss = F.cross_entropy(z.float(), tokens[..., 1:].contiguous().view(-1), reduction="none")
    return (loss * (1 - _top_mass(z))).mean()


@kind("two halves, each with its own function", "multi-task heads", "scalar", dtypes=BOTH)
def _(logits, labels):
    first, second = logits.chunk(2)
    hinge = F.multi_margin_loss(first.float(), labels[: len(first)])
    return hinge - second.float().std(-1).mean()


@kind("chosen and rejected halves, top mass", "preference losses", "scalar, scalar")
def _(sequences, tokens, mask):
    chosen, rejected = (sequences.logaddexp(torch.zeros(()))).log_softmax(-1).split(1)
    one = (chosen[0].gather(-1, tokens[0, :, None])[:, 0] * mask[0]).sum()
    other = (rejected[0].gather(-1, tokens[1, :, None])[:, 0] * mask[1]).sum()
    return -F.logsigmoid(one - other), _top_mass(rejected).mean()


@kind("next and second-next token at once", "multi-token prediction", "scalar")
def _(sequences, tokens):
    z = sequences.nan_to_num()
    one = F.cross_entropy(z[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return one + F.cross_entropy(z[:, :-2].flatten(0, 1), tokens[:, 2:].flatten())


@kind("tokens one by one, stacked", "decoding loops", "[B, 4]")
def _(sequences):
    return torch.stack([_top_mass(sequences[:, i]) for i in range(4)], 1)


@kind("top mass of the last tokens", "rerankers", "[B]")
def _(sequences):
    return _top_mass(sequences[:, -1])


@kind("log-ratio of neighbouring tokens' logits", "smoothness penalties", "scalar")
def _(x, weight):
    hidden = x.view(SIZES.b, SIZES.t, SIZES.d)
    now, later = F.linear(hidden[:, :-1], weight), F.linear(hidden[:, 1:], weight)
    p, q = now.log_softmax(-1), later.log_softmax(-1)
    return F.kl_div(p, q, log_target=True, reduction="none").sum(-1).mean()


# ---------------------------------------------------------------- other orders of dimensions


@kind("transposed cross-entropy and top mass", "torch", "scalar, [B, T]", dtypes=BOTH)
def _(sequences, tokens):
    z = sequences.nan_to_num().transpose(1, 2)  # [B, V, T]
    return F.cross_entropy(z, tokens), _top_mass(z.detach().transpose(1, 2))


@kind("transposed, sorted along dimension 1", "torch", "[B, T]")
def _(sequences):
    ordered = sequences.transpose(1, 2).sort(1, descending=True).values
    return ordered[:, :5].logsumexp(1) - ordered.logsumexp(1)


@kind("transposed cross-entropy of ignored tokens, weighted", "torch", "scalar")
def _(sequences, ignored_tokens):
    z = sequences.movedim(-1, 1)
    per_token = F.cross_entropy(z, ignored_tokens, reduction="none")
    spread = z.std(1)
    return (per_token * spread.detach()).sum() / (ignored_tokens != -100).sum()


@kind("time first", "speech", "scalar")
def _(sequences, tokens):
    z = sequences.permute(1, 0, 2).nan_to_num()  # [T, B, V]
    return F.cross_entropy(z.reshape(-1, SIZES.v), tokens.t().reshape(-1))


@kind("classes first", "image heads", "scalar")
def _(x, weight, labels):
    z = weight @ x.t()  # [V, N]
    return F.cross_entropy(z.cumsum(0).t(), labels)


@kind("rows reversed and put together", "bidirectional models", "[2 B, T]")
def _(sequences):
    return _top_mass(torch.cat([sequences, sequences.flip(1)]))


@kind("rows repeated for each candidate", "candidate scoring", "[N, 5]")
def _(logits, candidates):
    z = logits[:, None].expand(-1, 5, -1).log_softmax(-1)
    return z.gather(-1, candidates[..., None])[..., 0]


# ---------------------------------------------------------------- masks and indices of rows


@kind(
    "boolean mask of rows, top mass, captured", "trainers", "scalar", dtypes=BOTH, dynamo=CAPTURED
)
def _(logits, rows):
    return _top_mass(logits[rows]).mean()


@kind("boolean mask after the softmax, captured", "trainers", "scalar", dynamo=CAPTURED)
def _(sequences, mask, tokens):
    log_probs = sequences.nan_to_num().log_softmax(-1)
    return F.nll_loss(log_probs[mask], tokens[mask])


@kind("boolean mask of hidden states, sorted, captured", "trainers", "scalar", dynamo=CAPTURED)
def _(x, weight, rows, labels):
    z = F.linear(x[rows], weight)
    ordered = z.sort(-1, descending=True).values[:, 0]
    return (ordered - z.gather(-1, labels[rows][:, None])[:, 0]).mean()


@kind("rows that nonzero finds, captured", "trainers", "scalar", dynamo=CAPTURED)
def _(logits, ignored):
    index = (ignored != -100).nonzero()[:, 0]
    return F.multi_margin_loss(logits[index], ignored[index])


@kind("boolean mask, evaluation, captured", "evaluation", "scalar", gradients=(), dynamo=CAPTURED)
def _(sequences, mask):
    return _top_mass(sequences[mask]).mean()


@kind("index_select of rows, top mass", "trainers", "[3]")
def _(logits):
    return _top_mass(logits.index_select(0, torch.tensor([3, 7, 30])))


@kind("every second row, standard deviation", "trainers", "[N / 2]")
def _(logits):
    return logits[::2].std(-1)


@kind("last turn's tokens only", "multi-turn chats", "scalar", dtypes=BOTH)
def _(sequences, tokens, roles):
    z = sequences[:, :-1].nan_to_num()
    per_token = F.cross_entropy(z.transpose(1, 2), tokens[:, 1:], reduction="none")
    answer = (roles[:, 1:] == 2).to(z.dtype)
    return (per_token * answer).sum() / answer.sum()


@kind("a mean for each turn", "multi-turn chats", "[B, 3]")
def _(sequences, tokens, roles):
    per_token = _top_mass(sequences) * tokens.ne(0)
    member = F.one_hot(roles, 3).to(per_token.dtype)  # [B, T, 3]
    return (per_token[..., None] * member).sum(1) / member.sum(1)


@kind("turns as ignored labels, two weights", "multi-turn chats", "scalar")
def _(sequences, tokens, roles):
    z = sequences.logaddexp(torch.full((), -4.0))
    asked = tokens.masked_fill(roles != 1, -100).flatten()
    answered = tokens.masked_fill(roles != 2, -100).flatten()
    return 0.1 * F.cross_entropy(z.flatten(0, 1), asked) + F.cross_entropy(
        z.flatten(0, 1), answered
    )


@kind("rows of one class set to zero", "trainers", "[N]")
def _(logits, rows):
    return _top_mass(torch.where(rows[:, None], logits, torch.zeros(())))
