"""Reductions over the rows of each class: contrastive losses in both directions, softmaxes of a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass import messages
from tests.programs.operands import Sizes
from tests.programs.row import BOTH, NOTHING, RAISES, REGION, Row

KIND = "columns"
PAIRS = Sizes(b=2, t=24, d=16, v=48)  # as many texts as images


def similarities(x: Tensor, weight: Tensor, scale: float = 5.0) -> Tensor:
    """Of each text and each image."""
    return scale * F.normalize(x) @ F.normalize(weight).t()


def own(z: Tensor) -> Tensor:
    """The image of each text."""
    return torch.arange(len(z), device=z.device)


# fmt: off
ROWS = (
    Row("both directions",
        "z = similarities(x, weight); (F.cross_entropy(z, own(z)) + F.cross_entropy(z.t(), own(z))) / 2",
        REGION, of="CLIP, transformers", sizes=PAIRS, ways=("bf16", "chunks", "inductor", "outside")),
    Row("both directions, a product for each",
        "a, b = F.normalize(x), F.normalize(weight); k = own(x); "
        "F.cross_entropy(4 * a @ b.t(), k) + F.cross_entropy(4 * b @ a.t(), k)",
        of="open_clip", sizes=PAIRS, ways=("bf16",)),
    Row("both directions, the scale trained",
        "z = bias.mean().exp() * F.normalize(x) @ F.normalize(weight).t(); k = own(z); "
        "(F.cross_entropy(z, k) + F.cross_entropy(z.t(), k)) / 2",
        REGION, of="open_clip", sizes=PAIRS, ways=("chunks",)),
    Row("symmetric ranking loss of shuffled pairs",
        "z = similarities(x, weight); k = own(z); "
        "(F.cross_entropy(z, k * 5 % N) + F.cross_entropy(z.t(), k * 29 % N)) / 2",
        REGION, of="sentence-transformers, MultipleNegativesSymmetricRankingLoss", sizes=PAIRS,
        ways=("chunks", "dynamic")),
    Row("both directions, smoothed and ignored",
        "F.cross_entropy(z, ignored, label_smoothing=0.1) + F.cross_entropy(z.t(), labels % N, "
        "label_smoothing=0.1, reduction='sum')",
        REGION, sizes=PAIRS, ways=("bf16", "chunks")),
    Row("in-batch negatives with a mask",
        "same = (labels[:, None] % 7 == labels % 7) & ~torch.eye(N, dtype=torch.bool); "
        "z = similarities(x, weight).masked_fill(same, -torch.inf); "
        "F.cross_entropy(z, own(z)) + F.cross_entropy(z.t(), own(z))",
        REGION, sizes=PAIRS, ways=("bf16", "chunks", "outside")),
    Row("a column of masked logits alone",
        "z = z.masked_fill(torch.arange(V) == 5, -torch.inf); z.logsumexp(0)[6:].sum() + z.logsumexp(-1).mean()",
        REGION, ways=("chunks",)),
    Row("log-sum-exps of columns beside a loss",
        "F.cross_entropy(z, labels) + z.logsumexp(0).mean()", REGION, ways=("bf16", "chunks", "outside")),
    Row("log-sum-exps of columns, kept",
        "F.cross_entropy(z, labels) + z.logsumexp(0, True).square().mean()", REGION, ways=("f16",)),
    Row("a softmax of the batch",
        "p = z.softmax(0); (p * z.softmax(-1)).sum().square()", REGION, ways=("bf16", "chunks")),
    Row("a softmax of the batch, masked in part",
        "z = torch.where(teacher > 1, -torch.inf, z); (z.softmax(0) * z.softmax(-1)).sum(-1)",
        REGION, ways=("chunks",)),
    Row("one step of Sinkhorn, and a loss",
        "z = z.log_softmax(1).log_softmax(0); F.cross_entropy(z, labels)", REGION, ways=("bf16", "chunks")),
    Row("three steps of Sinkhorn",
        "p = z.log_softmax(0).log_softmax(1).log_softmax(0); -p.gather(1, labels[:, None]).mean()",
        REGION, ways=("chunks",)),
    Row("one step of Sinkhorn of probabilities",
        "p = z.softmax(-1); p = p / p.sum(0, keepdim=True); p = p / p.sum(1, keepdim=True); "
        "-(p + 1e-6).log().gather(1, labels[:, None]).mean()",
        BOTH, ways=("chunks",)),
    Row("recall in both directions",
        "z = similarities(x, weight); k = own(z); "
        "(F.cross_entropy(z, k), (z.argmax(1) == k).float().mean(), (z.argmax(0) == k).float().mean())",
        REGION, sizes=PAIRS, ways=("bf16", "chunks", "outside", "no_grad")),
    Row("largest and smallest of columns",
        "z = z.detach(); (z.max(0).values, z.max(0).indices, z.amin(0), z.argmin(0, keepdim=True), (z > 1).any(0), (z > -9).all(0))",
        REGION, trained=(), ways=("bf16", "chunks", "f16")),
    Row("the largest of columns of several heads",
        "(z.amax(0) - q.amax(0)).square().mean()", trained=(), ways=("chunks",)),
    Row("columns' losses without a reduction",
        "F.cross_entropy(z.t(), labels % N, reduction='none') * torch.arange(N) + F.cross_entropy(z, labels)",
        REGION, sizes=PAIRS, ways=("chunks",)),
    Row("columns' losses with weights that depend on the output",
        "(F.cross_entropy(z.t(), labels % N, reduction='none').tanh() * F.cross_entropy(z, labels)).sum()",
        REGION, sizes=PAIRS, ways=("chunks",)),
    Row("the diagonal of both directions",
        "z = similarities(x, weight); -(z.log_softmax(0).diagonal() + z.log_softmax(1).diagonal()).mean()",
        REGION, of="InfoNCE", sizes=PAIRS, ways=("bf16", "chunks", "dynamic", "outside")),
    Row("log-sum-exps less the diagonal",
        "z = similarities(x, weight); (z.logsumexp(0) + z.logsumexp(1) - 2 * torch.diag(z)).mean()",
        REGION, of="InfoNCE", sizes=PAIRS, ways=("chunks",)),
    Row("the diagonal of a row's softmax", "-torch.diag(z.log_softmax(-1)).mean()",
        sizes=PAIRS, of="InfoNCE", ways=("bf16", "chunks", "inductor")),
    Row("a sigmoid of each pair",
        "z = similarities(x, weight) - 2; -F.logsigmoid((2 * torch.eye(N) - 1) * z).sum() / N",
        REGION, sizes=PAIRS, of="SigLIP", ways=("chunks", "inductor")),
    Row("soft targets of both directions",
        "z = similarities(x, weight); t = (teacher @ teacher.T).softmax(-1)[:N, :N]; "
        "(F.cross_entropy(z, t) + F.cross_entropy(z.t(), t.t())) / 2",
        REGION, sizes=PAIRS, of="simple CLIP", ways=("chunks",)),
    Row("several positives in both directions",
        "z = similarities(x, weight); t = (labels[:, None] % 5 == labels % 5).float(); "
        "-(t / t.sum(1, True) * z.log_softmax(1)).sum(1).mean() - (t / t.sum(0, True) * z.log_softmax(0)).sum(0).mean()",
        REGION, sizes=PAIRS, of="SupCon", ways=("bf16", "chunks")),
    Row("entries of columns whose rows are a product of two sizes",
        "z = F.linear(x.view(N, D), weight); y = z.masked_fill(mask.flatten()[:, None], -9.0); "
        "(y.gather(0, torch.full((1, V), 3)).detach(), F.cross_entropy(z, labels))",
        REGION, ways=("dynamic",)),
    Row("the largest of each class, rows of two sizes that vary",
        "F.linear(x.view(*tokens.shape, D), weight).amax((0, 1)).square().sum()",
        NOTHING, left="mm, eq", dynamo={"assume_static_by_default": False}),
    Row("one-hot values of some rows",
        "some = torch.zeros(N, V).scatter(1, labels[:9, None], -1.0); "
        "(some * z.logsumexp(1)[:, None]).sum(1, True).square().sum() + z.logsumexp(0).mean()",
        REGION, left="full, scatter", ways=("chunks",)),
    Row("an entry of one column, replaced and added",
        "z = z.log_softmax(0).scatter(0, labels[:1, None] % N, 7.0); "
        "z.scatter_add(0, labels[1:2, None] % N, torch.full((1, 1), 5.0)).square().sum() + z.logsumexp(1).sum()",
        NOTHING, messages.SOFTMAX_ALONG_ROWS),
    Row("an entry of each column, multiplied",
        "p = z.detach().log_softmax(0).scatter(0, labels[:1].expand(1, V) % N, 2.0, reduce='multiply'); "
        "p.square().sum() + F.cross_entropy(z, labels) + z.logsumexp(0).sum()",
        NOTHING, "along rows"),
    Row("labels of columns that are no rows", "F.cross_entropy(z, labels) + F.cross_entropy(z.t(), labels[:1].expand(V))",
        RAISES, ways=("inductor",)),
    Row("the gradient of a column's maximum", "F.cross_entropy(z, labels) + z.amax(0).mean()",
        NOTHING, reason=messages.ALONG_ROWS),
    Row("logits that are the largest of their column",
        "F.cross_entropy(z, labels) + (z.detach() >= z.detach().amax(0)).sum(-1).float().mean()", NOTHING),
    Row("logits close to the largest of their column",
        "F.cross_entropy(z, labels) + (z > (z.detach().amax(0) - 0.7)).sum(-1).float().mean()",
        REGION, ways=("chunks",)),
    Row("focal losses of columns",
        "y = z.log_softmax(0).gather(0, (labels[:1] % N).expand(1, V)); -((1 - y.exp()) ** 0.5 * y).mean() + F.cross_entropy(z, labels)",
        REGION, ways=("chunks",)),
    Row("columns of some rows", "F.cross_entropy(z, labels) + z[3:].logsumexp(0).mean()",
        NOTHING, reason=messages.ALONG_ROWS),
)
