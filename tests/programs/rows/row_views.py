"""Rows that are shifted, masked, moved or put together before or after row-wise operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass import messages
from tests.programs.row import IN_BF16, NOTHING, REGION, Row

KIND = "rows moved and masked"
CAPTURED = {"capture_dynamic_output_shape_ops": True}


def _top_mass(z: Tensor) -> Tensor:
    """How much probability the top classes have: row-wise, and no formula of moments."""
    return z.softmax(-1).topk(5, -1).values.sum(-1)


# fmt: off
ROWS = (
    Row("shifted loss, top mass of all tokens",
        "z = s.nan_to_num(); "
        "loss = F.cross_entropy(z[:, :-1].reshape(-1, V), tokens[:, 1:].reshape(-1)); "
        "(loss, _top_mass(z.detach()))", REGION,
        of="supervised trainers", ways=IN_BF16),
    Row("shifted, contiguous, flattened, sorted",
        "z = s[..., :-1, :].contiguous().view(-1, V); "
        "loss = F.cross_entropy(z.float(), tokens[..., 1:].contiguous().view(-1), "
        "reduction='none'); "
        "(loss * (1 - _top_mass(z))).mean()", REGION,
        of="supervised trainers"),
    Row("two halves, each with its own function",
        "first, second = z.chunk(2); "
        "hinge = F.multi_margin_loss(first.float(), labels[:len(first)]); "
        "hinge - second.float().std(-1).mean()", REGION,
        of="multi-task heads", ways=IN_BF16),
    Row("chosen and rejected halves, top mass",
        "chosen, rejected = s.logaddexp(torch.zeros(())).log_softmax(-1).split(1); "
        "one = (chosen[0].gather(-1, tokens[0, :, None])[:, 0] * mask[0]).sum(); "
        "other = (rejected[0].gather(-1, tokens[1, :, None])[:, 0] * mask[1]).sum(); "
        "(-F.logsigmoid(one - other), _top_mass(rejected).mean())", REGION,
        of="preference losses"),
    Row("next and second-next token at once",
        "z = s.nan_to_num(); "
        "one = F.cross_entropy(z[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()); "
        "one + F.cross_entropy(z[:, :-2].flatten(0, 1), tokens[:, 2:].flatten())", REGION,
        of="multi-token prediction"),
    Row("tokens one by one, stacked", "torch.stack([_top_mass(s[:, i]) for i in range(4)], 1)",
        REGION, of="decoding loops"),
    Row("top mass of the last tokens", "_top_mass(s[:, -1])", REGION, of="rerankers"),
    Row("log-ratio of neighbouring tokens' logits",
        "hidden = x.view(B, T, D); "
        "now, later = (F.linear(hidden[:, :-1], weight), F.linear(hidden[:, 1:], weight)); "
        "p, q = (now.log_softmax(-1), later.log_softmax(-1)); "
        "F.kl_div(p, q, log_target=True, reduction='none').sum(-1).mean()", REGION,
        of="smoothness penalties"),
    Row("transposed cross-entropy and top mass",
        "z = s.nan_to_num().transpose(1, 2); "
        "(F.cross_entropy(z, tokens), _top_mass(z.detach().transpose(1, 2)))", REGION,
        of="torch", ways=IN_BF16),
    Row("transposed, sorted along dimension 1",
        "ordered = s.transpose(1, 2).sort(1, descending=True).values; "
        "ordered[:, :5].logsumexp(1) - ordered.logsumexp(1)", REGION,
        of="torch"),
    Row("transposed cross-entropy of ignored tokens, weighted",
        "z = s.movedim(-1, 1); per_token = F.cross_entropy(z, ignored_tokens, reduction='none'); "
        "spread = z.std(1); (per_token * spread.detach()).sum() / (ignored_tokens != -100).sum()",
        REGION, of="torch"),
    Row("time first",
        "z = s.permute(1, 0, 2).nan_to_num(); "
        "F.cross_entropy(z.reshape(-1, V), tokens.t().reshape(-1))", REGION,
        of="speech"),
    Row("classes first", "z = weight @ x.t(); F.cross_entropy(z.cumsum(0).t(), labels)", REGION,
        of="image heads"),
    Row("means over the batch, with a bias",
        "F.linear(x.view(B, T, D), weight, bias).mean((0, -1)).square().mean()", REGION,
        of="probes", ways=IN_BF16),
    Row("rows reversed and put together", "_top_mass(torch.cat([s, s.flip(1)]))",
        NOTHING, reason=messages.JOINED, of="bidirectional models"),
    Row("rows repeated for each candidate",
        "y = z[:, None].expand(-1, 5, -1).log_softmax(-1); "
        "y.gather(-1, candidates[..., None])[..., 0]", REGION,
        of="candidate scoring"),
    Row("boolean mask of rows, top mass, captured", "_top_mass(z[rows]).mean()", REGION,
        of="trainers", ways=IN_BF16, dynamo=CAPTURED),
    Row("boolean mask after the softmax, captured",
        "log_probs = s.nan_to_num().log_softmax(-1); F.nll_loss(log_probs[mask], tokens[mask])",
        REGION, of="trainers", dynamo=CAPTURED),
    Row("boolean mask of hidden states, sorted, captured",
        "z = F.linear(x[rows], weight); ordered = z.sort(-1, descending=True).values[:, 0]; "
        "(ordered - z.gather(-1, labels[rows][:, None])[:, 0]).mean()", REGION,
        of="trainers", dynamo=CAPTURED),
    Row("rows that nonzero finds, captured",
        "index = (ignored != -100).nonzero()[:, 0]; F.multi_margin_loss(z[index], ignored[index])",
        REGION, of="trainers", dynamo=CAPTURED),
    Row("boolean mask, evaluation, captured", "_top_mass(s[mask]).mean()", REGION,
        of="evaluation", trained=(), dynamo=CAPTURED),
    Row("index_select of rows, top mass", "_top_mass(z.index_select(0, torch.tensor([3, 7, 30])))",
        REGION, of="trainers"),
    Row("every second row, standard deviation", "z[::2].std(-1)", REGION, of="trainers"),
    Row("last turn's tokens only",
        "z = s[:, :-1].nan_to_num(); "
        "per_token = F.cross_entropy(z.transpose(1, 2), tokens[:, 1:], reduction='none'); "
        "answer = (roles[:, 1:] == 2).to(z.dtype); (per_token * answer).sum() / answer.sum()",
        REGION, of="multi-turn chats", ways=IN_BF16),
    Row("a mean for each turn",
        "per_token = _top_mass(s) * tokens.ne(0); "
        "member = F.one_hot(roles, 3).to(per_token.dtype); "
        "(per_token[..., None] * member).sum(1) / member.sum(1)", REGION,
        of="multi-turn chats"),
    Row("turns as ignored labels, two weights",
        "z = s.logaddexp(torch.full((), -4.0)); "
        "asked = tokens.masked_fill(roles != 1, -100).flatten(); "
        "answered = tokens.masked_fill(roles != 2, -100).flatten(); "
        "0.1 * F.cross_entropy(z.flatten(0, 1), asked) + F.cross_entropy(z.flatten(0, 1), "
        "answered)", REGION,
        of="multi-turn chats"),
    Row("rows of one class set to zero",
        "_top_mass(torch.where(rows[:, None], z, torch.zeros(())))", REGION, of="trainers"),
)
