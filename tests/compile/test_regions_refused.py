"""What must not run as a region, since another number of rows at a time would change it.

Rows mix, random numbers are drawn for all classes, logits or operands are written, data decides
what runs. Each program computes what eager computes, no ``row_region`` is in its graph, and a
rejection says why.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxpass

B, T, D, V = 2, 12, 8, 67
N = B * T
# torch warns of calls that are legal and odd
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states ``[N, D]``, weight ``[V, D]`` and labels ``[N]``, the same at every call."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=random).requires_grad_()
    weight = torch.randn(V, D, generator=random).requires_grad_()
    return x, weight, torch.randint(V, (N,), generator=random)


def spread(z: Tensor) -> Tensor:
    """A function of each row that no formula of moments covers."""
    return z.sort(-1, descending=True).values[..., :5].logsumexp(-1)


# ---------------------------------------------------------------- rows mix


def softmax_over_rows(x, weight, labels):
    return spread(F.linear(x, weight).softmax(0))


def softmax_over_tokens(x, weight, labels):
    return spread(F.linear(x.view(B, T, D), weight).log_softmax(1))


def softmax_of_everything(x, weight, labels):
    return spread(F.linear(x, weight).flatten().softmax(0).view(N, V))


def sorted_along_rows(x, weight, labels):
    return F.linear(x, weight).sort(0).values.logsumexp(-1)


def top_rows(x, weight, labels):
    return F.linear(x, weight).topk(3, dim=0).values.logsumexp(-1)


def cumulative_over_tokens(x, weight, labels):
    z = F.linear(x.view(B, T, D), weight).cumsum(1)
    return F.cross_entropy(z.flatten(0, 1), labels)


def logcumsumexp_over_rows(x, weight, labels):
    return F.linear(x, weight).logcumsumexp(0).std(-1)


def batch_norm(x, weight, labels):
    z = F.batch_norm(F.linear(x, weight), None, None, training=True)
    return F.cross_entropy(z, labels)


def standardised_over_rows(x, weight, labels):
    z = F.linear(x, weight)
    return spread((z - z.mean(0)) / z.std(0))


def normalised_over_rows(x, weight, labels):
    return spread(F.normalize(F.linear(x, weight), dim=0))


def divided_by_the_norm_of_all(x, weight, labels):
    z = F.linear(x, weight)
    return spread(z / z.norm())


def without_the_largest_of_all(x, weight, labels):
    z = F.linear(x, weight)
    return (z - z.max()).exp().sort(-1).values.sum(-1)


def above_a_quantile_of_all(x, weight, labels):
    z = F.linear(x, weight)
    return spread(torch.where(z > z.detach().quantile(0.2), z, -30.0))


def top_of_everything(x, weight, labels):
    return F.linear(x, weight).flatten().topk(9).values.logsumexp(0)


def entropy_of_the_mean(x, weight, labels):
    return torch.special.entr(F.linear(x, weight).softmax(-1).mean(0)).sum()


def dice_of_classes(x, weight, labels):
    p = F.linear(x, weight).softmax(-1)
    y = F.one_hot(labels, V).float()
    return (1 - (2 * (p * y).sum(0) + 1) / (p.sum(0) + y.sum(0) + 1)).mean()


def contrastive(x, weight, labels):
    z = F.normalize(x) @ F.normalize(weight[:N]).t() * 10
    own = torch.arange(N)
    return (F.cross_entropy(z.nan_to_num(), own) + F.cross_entropy(z.nan_to_num().t(), own)) / 2


def products_of_rows(x, weight, labels):
    p = F.linear(x, weight).softmax(-1)
    return (p @ p.t()).logsumexp(-1)


def pairs_of_rows_averaged(x, weight, labels):
    return spread(F.linear(x, weight).view(N // 2, 2, V).mean(1))


def pairs_of_rows_as_classes(x, weight, labels):
    return spread(F.linear(x, weight).reshape(N // 2, 2 * V))


def pooled_over_tokens(x, weight, labels):
    z = F.linear(x.view(B, T, D), weight).transpose(1, 2)
    return F.avg_pool1d(z, 3, 1, 1).std(1)


def sums_of_segments(x, weight, labels):
    z = F.linear(x, weight)
    return spread(z.new_zeros(3, V).index_add(0, torch.arange(N) % 3, z))


def connectionist_temporal(x, weight, labels):
    log_probs = F.linear(x.view(T, B, D), weight).log_softmax(-1)
    lengths = torch.tensor([T, T]), torch.tensor([4, 3])
    return F.ctc_loss(log_probs, labels[: 2 * 4].view(2, 4).clamp_min(1), *lengths)


class Global(torch.autograd.Function):
    """The identity, whose gradient is divided by the norm of all rows'."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


def gradient_over_the_norm_of_all(x, weight, labels):
    return spread(Global.apply(F.linear(x, weight)))


def hook_that_mixes_rows(x, weight, labels):
    z = F.linear(x, weight)
    z.register_hook(lambda gradient: gradient - gradient.mean(0))
    return spread(z)


# ---------------------------------------------------------------- random numbers


def dropout(x, weight, labels):
    return F.cross_entropy(F.dropout(F.linear(x, weight), 0.2), labels)


def noise_of_its_own(x, weight, labels):
    z = F.linear(x, weight)
    return spread(z + torch.rand_like(z))


def gumbel_softmax(x, weight, labels):
    return (F.gumbel_softmax(F.linear(x, weight)) * torch.arange(V)).sum(-1)


def sampled(x, weight, labels):
    z = F.linear(x, weight)
    chosen = torch.multinomial(z.detach().softmax(-1), 1)
    return z.log_softmax(-1).gather(-1, chosen)


# ---------------------------------------------------------------- writes


def written_logits_that_leave(x, weight, labels):
    z = F.linear(x, weight)
    rows = spread(z)
    z.mul_(2)
    return rows, z


def slice_written_after_it_was_read(x, weight, labels):
    z = F.linear(x, weight)
    view = z[:, :5]
    rows = spread(z.tanh())
    view.zero_()
    return rows, z, view


def hidden_states_written_after_the_head(x, weight, labels):
    hidden = x * 1
    z = F.linear(hidden, weight.detach())  # whose gradient would need what is written
    hidden.zero_()
    return spread(z), hidden


# ---------------------------------------------------------------- data decides


def branch_on_a_logit(x, weight, labels):
    z = F.linear(x, weight)
    if z.max() > 3:
        z = z * 0.5
    return spread(z)


def number_of_a_logit(x, weight, labels):
    z = F.linear(x, weight)
    return spread(z / z.detach().std().item())


def conditional(x, weight, labels):
    z = F.linear(x.detach(), weight.detach())
    return torch.cond(z.sum() > 0, lambda z: z.sort(0).values, lambda z: z.cumsum(0), (z,))[:, 0]


# ---------------------------------------------------------------- an operation that nobody knows


@torch.library.custom_op("fxpass_tests::ranks_of_rows", mutates_args=())
def ranks_of_rows(z: Tensor) -> Tensor:
    """An opaque operation that mixes rows."""
    return z.argsort(0).float()


@ranks_of_rows.register_fake
def _(z: Tensor) -> Tensor:
    return torch.empty_like(z, dtype=torch.float32)


def opaque_operation(x, weight, labels):
    return ranks_of_rows(F.linear(x, weight).detach()).sort(-1).values[:, 0]


# The program, and what its rejection mentions ("" for anything); None where the graph breaks before the
# logits are read, so that there is nothing to reject.
REFUSED: tuple[tuple[Any, str | None], ...] = (
    (softmax_over_rows, "softmax"),
    (softmax_over_tokens, "log_softmax"),
    (softmax_of_everything, "softmax"),
    (sorted_along_rows, "sort"),
    (top_rows, "topk"),
    (cumulative_over_tokens, "cumsum"),
    (logcumsumexp_over_rows, "logcumsumexp"),
    (batch_norm, "batch_norm"),
    (standardised_over_rows, "mean"),
    (normalised_over_rows, "norm"),
    (divided_by_the_norm_of_all, "mixes rows"),
    (without_the_largest_of_all, "max"),
    (above_a_quantile_of_all, "quantile"),
    (top_of_everything, "topk"),
    (entropy_of_the_mean, "mean"),
    (dice_of_classes, "sum"),
    (contrastive, "cross_entropy"),
    (products_of_rows, ""),
    (pairs_of_rows_averaged, "mean"),
    (pairs_of_rows_as_classes, ""),
    (pooled_over_tokens, "pool"),
    (sums_of_segments, "index_add"),
    (connectionist_temporal, "nothing is computed"),
    (gradient_over_the_norm_of_all, ""),
    (hook_that_mixes_rows, ""),
    (dropout, "dropout"),
    (noise_of_its_own, "rand"),
    (gumbel_softmax, ""),
    (sampled, "multinomial"),
    (written_logits_that_leave, "leave"),
    (slice_written_after_it_was_read, "zero_"),
    (hidden_states_written_after_the_head, "zero_"),
    (branch_on_a_logit, None),
    (number_of_a_logit, None),
    (conditional, "cond"),
    (opaque_operation, "ranks_of_rows"),
)


def _values(function: Any) -> list[Tensor]:
    """Outputs, and the gradients of hidden states and weight."""
    torch.manual_seed(0)  # of what the program draws
    x, weight, labels = operands()
    made = function(x, weight, labels)
    outputs = [made] if isinstance(made, Tensor) else list(made)
    trained = [t for t in outputs if t.requires_grad]
    if trained:
        factors = [torch.linspace(0.5, 1.5, t.numel()).view(t.shape) for t in trained]
        torch.autograd.backward(trained, factors)
    return [t.detach() for t in outputs] + [t.grad for t in (x, weight) if t.grad is not None]


@pytest.mark.parametrize(("function", "reason"), REFUSED, ids=[f.__name__ for f, _ in REFUSED])
def test_what_is_not_row_wise_stays_as_it_is(function, reason):
    options = {"fusedce.min_logits_mb": 0, "fusedce.inner": "aot_eager"}
    eager = _values(function)
    compiled = _values(torch.compile(function, backend="fusedce", options=options))
    assert len(compiled) == len(eager)
    for ours, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    report = fxpass.explain(function, *operands())
    # rows of the condition, and what is behind the break reads deferred logits
    assert ("row_region" in "\n".join(report.after)) == (function is branch_on_a_logit)
    reasons = [str(rejection) for rejection in report.rejections]
    if reason is None or (not reasons and function.__name__ in SILENT):
        return
    assert any(reason in said for said in reasons), reasons


# Those of which fxpass says nothing today, since no loss is in sight. A capture that logs what
# becomes of each head empties this set.
SILENT = frozenset(
    f.__name__
    for f in (
        *(softmax_over_rows, softmax_over_tokens, softmax_of_everything, sorted_along_rows),
        *(top_rows, logcumsumexp_over_rows, standardised_over_rows, normalised_over_rows),
        *(divided_by_the_norm_of_all, above_a_quantile_of_all, top_of_everything),
        without_the_largest_of_all,
        *(products_of_rows, pairs_of_rows_averaged, pairs_of_rows_as_classes),
        *(pooled_over_tokens, sums_of_segments, connectionist_temporal),
        *(gradient_over_the_norm_of_all, hook_that_mixes_rows, noise_of_its_own, gumbel_softmax),
        *(written_logits_that_leave, slice_written_after_it_was_read),
        *(hidden_states_written_after_the_head, conditional, opaque_operation),
    )
)
