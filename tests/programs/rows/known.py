"""Totals of row regions: forward knows the coefficients of rows, or backward waits for them."""

from __future__ import annotations

from torch import Tensor

from tests.programs.row import REGION, Row

KIND = "totals of row regions"


def spread(z: Tensor) -> Tensor:
    """Rows of logits by no known formula."""
    return z.sort(-1, descending=True).values[..., :40].logsumexp(-1)


# fmt: off
KNOWN = (
    Row("mean", "spread(z).mean()", REGION),
    Row("a weighted sum", "(spread(z) * advantages).sum()", REGION, ways=("aot_eager",)),
    Row("over a mask's sum", "(spread(z) * rows).sum() / rows.sum().clamp_min(1)", REGION),
    Row("masked rows", "spread(z).masked_fill(rows, 0.0).sum() * 0.5", REGION),
    Row("halves",
        "y = spread(z); y[:6].mean() + 2 * y[6:].sum() - y[::2].sum() / 3", REGION),
    Row("tokens", "(spread(s)[:, 1:] * advantages.view(B, T)[:, :-1]).mean()", REGION),
    Row("two outputs",
        "(spread(z) * advantages).sum() + 0.1 * z.sort(-1).values[:, :40].std(-1).mean()",
        REGION, ways=("aot_eager",)),
    Row("with a constant", "spread(z).sum() + advantages.square().sum()", REGION),
    Row("scaled after the total", "spread(z).sum().tanh()", REGION),
    # The scalar before the sum is the total: the other term has a gradient of its own.
    Row("with a regulariser", "spread(z).mean() + 0.1 * x.square().sum()", REGION),
    Row("logged", "y = spread(z); ((y * advantages).sum(), y.detach())", REGION),
    Row("a logged mean",
        "y = spread(z)\nwith torch.no_grad():\n    said = y.max()\n((y * advantages).sum(), said)",
        REGION),
    Row("in another dtype", "(spread(z).float() * advantages.float()).sum()", REGION),
    Row("beside rows without a gradient",
        "both = (spread(z) + z.detach().cumsum(-1).amax(-1)).sum() * 2; "
        "both + z.detach().sort(-1).values[:, 3].square().mean()", REGION),
    Row("of a student and a teacher",
        "p = z.softmax(-1); q = F.linear(x.detach() * 2, weight.detach()).softmax(-1); "
        "mixed, own, others = (torch.special.entr(p).sum(-1) for p in ((p + q) / 2, p, q)); "
        "(mixed - (own + others) / 2).mean()", REGION),
)
UNKNOWN = (
    Row("squared", "spread(z).square().mean()", REGION, ways=("aot_eager",)),
    Row("focal", "y = spread(z); ((1 - (-y.abs()).exp()) * y).mean()", REGION),
    Row("weighted by themselves", "y = spread(z); (y * y.detach()).sum()", REGION),
    Row("a product of outputs",
        "(spread(z) * z.sort(-1).values[:, :40].std(-1)).sum()", REGION),
    Row("rows of a policy", "torch.min(spread(z).exp() * advantages, advantages).mean()", REGION),
    Row("no scalar", "spread(z) * advantages", REGION),
    Row("two scalars", "y = spread(z); (y.sum(), (y * advantages).sum())", REGION),
    # Another call would draw other numbers.
    Row("dropped rows", "F.dropout(spread(z), 0.5).sum()", REGION, drawn=True),
    # They have a gradient, which needs the rows.
    Row("trained factors", "(spread(z) * (x[:, 0] * 2)).sum()", REGION),
    Row("read elsewhere with a gradient", "y = spread(z); (y.sum(), y * 2)", REGION),
)
# They are a call of their own, in the place where gradients are off.
METRICS_BEFORE = Row("metrics before the loss",
    "with torch.no_grad():\n"
    "    found = z.topk(3).indices.eq(4).any(-1).float().mean()\n"
    "((spread(z) * advantages).sum(), found)", REGION)
ROWS = (*KNOWN, *UNKNOWN, METRICS_BEFORE)
