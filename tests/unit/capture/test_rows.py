"""Pointwise calls, calls along dimensions and products: which keep rows apart, and their tags.

Each accepted program's tags are held against its values, too (:mod:`tests.support.row_tags`).
"""

from __future__ import annotations

import pytest

from tests.support.row_programs import accepted, refused

# The program, and tags among its own.
POINTWISE = (
    ("(z * 2 + 1).tanh().logsumexp(-1)", "mul rc", "tanh rc", "logsumexp r"),
    ("(z + row[:, None]).logsumexp(-1)", "add rc"),
    ("(z * classes + number).logsumexp(-1)", "mul rc", "add rc"),
    ("torch.where(z > 0, z, given).logsumexp(-1)", "gt rc", "where rc"),
    ("(s + row.view(B, T, 1)).logsumexp(-1)", "add rrc", "logsumexp rr"),
    ("(s.transpose(1, 2) + row.view(B, 1, T)).logsumexp(1)", "add rcr", "logsumexp rr"),
    ("(z[:, None] + given.view(N, 1, V)).logsumexp(-1)", "add rkc", "logsumexp rk"),
    ("z.masked_fill(rows[:, None], -3.0).logsumexp(-1)", "masked_fill rc"),
    ("z.masked_fill(banned, -3.0).logsumexp(-1)", "masked_fill rc"),
    (
        "z.masked_fill(labels[:, None] == torch.arange(V), -3.0).logsumexp(-1)",
        "masked_fill rc",
    ),
    ("(z - z.logsumexp(-1, keepdim=True)).amax(-1)", "logsumexp rk", "sub rc"),
    ("(z - z.logsumexp(-1)[:, None]).amax(-1)", "sub rc"),
    ("z.nan_to_num().logaddexp(given).sum(-1)", "nan_to_num rc", "logaddexp rc"),
    ("z.double().sum(-1)", "_to_copy rc"),
    ("torch.isin(z, classes).sum(-1)", "isin rc"),
    ("z.detach().abs().log().mean(-1)", "detach rc"),
    ("(z + z.new_zeros(V)).sum(-1)", "add rc"),
    ("F.logsigmoid(z).sum(-1)", "log_sigmoid_forward rc"),
    ("torch.ops.aten.alias(z).sum(-1)", "alias rc"),
    ("torch.ones_like(z).mul(z).sum(-1)", "ones_like rc"),
    ("torch.full_like(z, 2.0).mul(z).sum(-1)", "full_like rc"),
    ("z.new_ones(N, V).mul(z).sum(-1)", "new_ones rc"),
    ("z.new_zeros(N, V).add(z).sum(-1)", "new_zeros rc"),
    ("z.new_full((N, V), 2.0).mul(z).sum(-1)", "new_full rc"),
    ("z.new_empty(N, V).fill_(2.0).mul(z).sum(-1)", "new_empty rc", "fill rc"),
    ("torch.zeros_like(z).copy_(row[:, None]).mul(z).sum(-1)", "copy rc", "mul rc"),
    # as many temperatures, classes or pairs as rows
    (
        "t = z[:, None] * torch.arange(1.0, N + 1)[:, None]; "
        "(t - z.logsumexp(-1)[:, None, None]).sigmoid().mean(-1)",
        "mul rkc",
        "sub rkc",
        "mean rk",
    ),
    ("(z[:, :N] * classes[:N] - z.amax(-1, keepdim=True)).exp().sum(-1)", "sub rc", "sum r"),
    ("(z[:, None] - z[None]).abs().mean(-1)", "sub rrc", "mean rr"),
    ("(z[:1] * row[:, None]).logsumexp(-1)", "mul rc", "logsumexp r"),
    # in place, on all of the logits or on a part of them
    ("z.mul_(2); z.logsumexp(-1)", "mul rc", "logsumexp r"),
    ("z[:, 3:9] = 0.0; z.logsumexp(-1)", "slice_scatter rc"),
    ("z[..., 0] = row; z.logsumexp(-1)", "select_scatter rc"),
    ("z[:, 3:60].mul_(row[:, None]); z.logsumexp(-1)", "slice_scatter rc"),
    # two heads
    ("(z - q.flip(0)).square().mean(-1)", "flip rc", "sub rc", "mean r"),
    ("torch.lerp(z, q, 0.3).logsumexp(-1)", "lerp rc"),
    (
        "F.kl_div(z.log_softmax(-1), q.softmax(-1), reduction='none').sum(-1)",
        "_log_softmax rc",
        "_softmax rc",
        "xlogy rc",
    ),
)
ALONG = (
    ("z.softmax(1).sort(1).values.sum(-1)", "_softmax rc", "sort rc", "sum r"),
    ("s.transpose(1, 2).softmax(1).cumsum(1).amax(1)", "_softmax rcr", "cumsum rcr", "amax rr"),
    ("z.topk(5).values.sum(-1)", "topk rk"),
    ("z.topk(60).values.logsumexp(-1)", "topk rc"),
    ("z.topk(5).indices.eq(labels[:, None]).any(-1)", "topk rk"),
    ("(z > 0).all(-1)", "all r"),
    ("(z > 0).any(-1)", "any r"),
    ("z.aminmax(dim=-1).max", "aminmax r"),
    ("z.argmin(-1)", "argmin r"),
    ("z.count_nonzero(-1)", "count_nonzero r"),
    ("z.kthvalue(3, -1).values", "kthvalue r"),
    ("z.max(-1).values", "max r"),
    ("z.min(-1).values", "min r"),
    ("z.median(-1).values", "median r"),
    ("z.mode(-1).values", "mode r"),
    ("z.nanmedian(-1).values", "nanmedian r"),
    ("z.nansum(-1)", "nansum r"),
    ("z.prod(-1)", "prod r"),
    ("z.std(-1)", "std r"),
    ("torch.std_mean(z, -1)[0]", "std_mean r"),
    ("z.var(-1)", "var r"),
    ("torch.ops.aten.norm(z, 2, [-1])", "norm r"),
    ("z.cummax(-1).values.sum(-1)", "cummax rc"),
    ("z.cummin(-1).values.sum(-1)", "cummin rc"),
    ("z.cumprod(-1).sum(-1)", "cumprod rc"),
    ("torch.ops.aten._safe_softmax(z, -1).amax(-1)", "_safe_softmax rc"),
    ("z.scatter_reduce(1, some, given[:, :5], 'amax').sum(-1)", "scatter_reduce rc"),
    ("z.index_copy(1, chosen, given[:, :40]).sum(-1)", "index_copy rc"),
    ("z.flip(1).cumsum(-1).amax(-1)", "flip rc", "cumsum rc"),
    ("z.roll(3, -1).logcumsumexp(-1).amin(-1)", "roll rc", "logcumsumexp rc"),
    ("z.argsort(-1).argmax(-1)", "sort rc", "argmax r"),
    ("z.gather(1, labels[:, None])", "gather rk"),
    ("z.gather(1, some).sum(-1)", "gather rk"),
    ("s.gather(2, some.view(B, T, 5)).mean(-1)", "gather rrk"),
    ("z.scatter(1, some, -1.0).logsumexp(-1)", "scatter rc"),
    ("z.scatter_add(1, some, row[:, None].expand(N, 5)).logsumexp(-1)", "scatter_add rc"),
    ("torch.zeros_like(z).scatter(1, some, 1.0).mul(z).sum(-1)", "zeros_like rc", "scatter rc"),
    ("z.index_select(1, chosen).logsumexp(-1)", "index_select rc"),
    ("z.index_add(1, chosen, given[:, :40]).logsumexp(-1)", "index_add rc"),
    ("z.index_fill(1, chosen, -4.0).logsumexp(-1)", "index_fill rc"),
    ("torch.cat([z, given], -1).logsumexp(-1)", "cat rc"),
    ("torch.cat([z, row[:, None]], -1).logsumexp(-1)", "cat rc"),
    ("torch.stack([z, given]).logsumexp(0).sum(-1)", "stack krc", "logsumexp rc"),
    ("torch.stack([z, given], -1).sum((1, 2))", "stack rck", "sum r"),
    ("F.pad(z, (1, 2)).logsumexp(-1)", "constant_pad_nd rc"),
    ("F.glu(z[:, :-1]).sum(-1)", "glu rc"),
    ("F.layer_norm(z, (V,)).square().amax(-1)", "var_mean rk", "sub rc"),
    ("F.normalize(z).amax(-1)", "linalg_vector_norm rk", "div rc"),
    ("F.cross_entropy(z, labels)", "_log_softmax rc", "gather rk", "where r"),
    ("F.cross_entropy(s.transpose(1, 2), tokens, reduction='none')", "_log_softmax rcr"),
    ("F.cross_entropy(s.flatten(0, 1), tokens.flatten(), label_smoothing=0.1)", "gather rk"),
    ("F.multi_margin_loss(z, labels)", "gather rk"),
    # of everything: of each row, then of the rows
    ("z.sum()", "sum rk"),
    ("z.norm()", "linalg_vector_norm rk"),
    ("z.max()", "amax rk"),
    ("s.mean((1, 2), keepdim=True)", "mean rrk"),
    ("s.amax((0, 2))", "amax rrk"),
)
# Tensors that the program makes and writes itself.
WRITTEN = (
    ("bad = torch.zeros(V, dtype=torch.bool); bad[60:] = True; z.masked_fill(bad, -9.0).sum(-1)",),
    ("bad = torch.zeros(V); bad[chosen] = -9.0; (z + bad).logsumexp(-1) + bad[:3].sum()",),
    ("odd = torch.ones(N); odd[::2] = 0.5; odd.add_(1); (z * odd[:, None]).logsumexp(-1)",),
    ("hot = torch.zeros(N, V); hot.scatter_(1, some, 1.0); (z * hot).sum(-1)", "mul rc"),
    (
        "d = torch.full((N, V), 0.5); d.fill_(0.1); d.scatter_(1, some, 0.9); "
        "(d * z.log_softmax(-1)).sum(-1)",
        "mul rc",
    ),
    ("d = torch.zeros_like(z); d.fill_(0.1); d.scatter_(1, some, 0.9); (d * z).sum(-1)", "mul rc"),
    ("c = z.clone(); c[:, 3] = -9.0; c /= 2; c.logsumexp(-1)", "select_scatter rc", "div rc"),
    ("m = torch.zeros(V); t = z + m; m[3] = 1.0; t.logsumexp(-1)", "add rc"),
    ("at = torch.zeros_like(labels); at.copy_(labels); at %= V; z.gather(1, at[:, None])",),
)
PRODUCTS = (
    ("z.softmax(-1) @ matrix[:, 0]", "mv r"),
    ("(z @ classes)", "mv r"),
    ("torch.einsum('btd,vd->btv', x.view(B, T, D), weight).amax(-1)", "amax rr"),
    ("torch.einsum('nv,nv->n', z, given)", "mul rc", "sum r"),
    ("zt.logsumexp(0)", "mm cr", "logsumexp r"),
    ("F.cross_entropy(zt.t(), labels)", "mm cr", "t rc", "gather rk"),
)
REFUSED = (
    ("z.softmax(0).sum(-1)", "_softmax works along rows"),
    ("s.log_softmax(1).sum(-1)", "_log_softmax works along rows"),
    ("z.sort(0).values.sum(-1)", "sort works along rows"),
    ("s.cumsum(1).sum(-1)", "cumsum works along rows"),
    ("(z - z.mean(0)).sum(-1)", "mean reduces rows"),
    ("z.mean(0).sum()", "mean reduces rows"),
    ("(z / z.norm()).sum(-1)", "reads a number that mixes rows"),
    ("z.median()", "median reduces rows"),
    ("z.prod()", "prod reduces rows"),
    ("F.multilabel_margin_loss(z, F.pad(some, (0, V - 5), value=-1))", "has no row rule"),
    ("z.view(torch.int32).sum(-1)", "reads the bits of float32 as int32"),
    ("z.bfloat16().view(torch.int16).sum(-1)", "reads the bits of bfloat16 as int16"),
    ("z.gather(0, labels[:, None] % N).sum(-1)", "gather works along rows"),
    ("z.gather(1, labels[:5, None])", "gather has an index of other rows"),
    ("z.scatter(0, labels[None] % N, 0.0).sum(-1)", "scatter works along rows"),
    ("z.new_zeros(3, V).index_add(0, torch.arange(N) % 3, z).amax(-1)", "assigns to rows"),
    ("torch.cat([z, given], 0).logsumexp(-1)", "joins rows of several tensors"),
    ("F.pad(z, (0, 0, 1, 0)).logsumexp(-1)", "pads rows"),
    ("(z[:, :24] + z[:, :24].t()).sum(-1)", "meets rows with classes"),
    (
        "t = z[:, None] * torch.arange(1.0, N + 1)[:, None]; "
        "(t - z.logsumexp(-1, keepdim=True)).sigmoid().mean(-1)",
        "meets rows with classes, or with another dimension",
    ),
    (
        "t = z[:, None] * torch.arange(1.0, N + 1)[:, None]; "
        "(z.logsumexp(-1, keepdim=True) + t).amax(-1)",
        "meets rows with classes, or with another dimension",
    ),
    ("(z[:1, None] * row[:, None] + z.amax(-1)[:, None]).amax(-1)", "or with another dimension"),
    ("(z[:, None].expand(N, N, V) + z[:1, :1]).sum(-1) + z.amax(-1)", "or with another dimension"),
    ("(z + torch.rand_like(z)).sum(-1)", "draws random numbers"),
    ("F.dropout(z, 0.5).sum(-1)", "draws random numbers"),
    ("torch.bernoulli(z.sigmoid()).sum(-1)", "draws random numbers"),
    ("torch.multinomial(z.softmax(-1), 1)", "draws random numbers"),
    ("given.copy_(z); given.logsumexp(-1)", "writes to"),
    (
        "m = torch.zeros(V); m[5] = 2.0; y = z + m; m[3] = 1.0; y.logsumexp(-1)",
        "in place between the linear and the loss",
    ),
    ("z[0] = 0.0; z.logsumexp(-1)", "assigns to rows"),
    ("z.t() @ z", ""),
    ("z @ z.t()", ""),
    ("torch.bucketize(z, classes).sum(-1)", "has no row rule"),
    ("torch.addmm(row[:, None], z, matrix)", ""),
    ("torch.bmm(s, matrix.expand(B, V, 3))", ""),
    ("F.batch_norm(z, None, None, training=True).sum(-1)", "batch_norm"),
    ("F.avg_pool1d(s, 3, 1, 1).sum(-1)", ""),
    ("z.argsort(0).sum(-1)", "works along rows"),
)


def _ids(table):
    return [row[0] for row in table]


@pytest.mark.parametrize("row", POINTWISE, ids=_ids(POINTWISE))
def test_pointwise(row):
    accepted(*row)


@pytest.mark.parametrize("row", ALONG, ids=_ids(ALONG))
def test_along_classes(row):
    accepted(*row)


@pytest.mark.parametrize("row", WRITTEN, ids=_ids(WRITTEN))
def test_what_the_program_writes_itself(row):
    accepted(*row)


@pytest.mark.parametrize("row", PRODUCTS, ids=_ids(PRODUCTS))
def test_products(row):
    accepted(*row)


@pytest.mark.parametrize(("text", "reason"), REFUSED, ids=_ids(REFUSED))
def test_refused(text, reason):
    refused(text, reason)
