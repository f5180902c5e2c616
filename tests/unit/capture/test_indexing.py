"""Advanced indexing: masks and selections of rows and of classes, one class of each row.

Each accepted program's tags are held against its values, too (:mod:`tests.support.row_tags`).
"""

from __future__ import annotations

import pytest

from tests.support.row_programs import accepted, refused

# The program, and tags among its own.
ACCEPTED = (
    ("z[rows].sum(-1)", "index rc", "sum r"),
    ("s[mask].sum(-1)", "index rc", "sum r"),
    ("s[:, :-1][mask[:, 1:]].sum(-1)", "slice rrc", "index rc"),
    ("z[rows].gather(1, labels[rows][:, None])", "index rc", "gather rk"),
    ("z[order].logsumexp(-1)", "index rc"),
    ("z[order.view(3, 3)].logsumexp(-1)", "index rrc", "logsumexp rr"),
    ("s.index_select(1, order % T).logsumexp(-1)", "index_select rrc"),
    ("s[:, order % T - 2].logsumexp(-1)", "index_select rrc"),
    ("z.index_select(0, order).logsumexp(-1)", "index_select rc"),
    ("z[:, chosen].logsumexp(-1)", "index rc"),
    ("z[..., chosen].logsumexp(-1)", "index rc"),
    ("z[rows][:, chosen].sum(-1)", "index rc"),
    ("s[0, :, labels].sum()", "select rc", "index rc", "sum rk"),
    ("z[:, 5]", "select r"),
    ("z[0, 5]", "select "),
    ("z[torch.arange(N), labels]", "index r"),
    ("s[torch.arange(B)[:, None], torch.arange(T), tokens]", "index rr"),
    ("z[torch.arange(N), z.argmax(-1)]", "argmax r", "index r"),
    ("z[order, labels[order]]", "index r"),
    ("z[labels % N, labels]", "index r"),
    ("z.log_softmax(-1)[torch.arange(N), -1 - labels % 4]", "index r"),
    ("z[:, banned] = -9.0; z.logsumexp(-1)", "index_put rc"),
    ("z[:, chosen] = -9.0; z.logsumexp(-1)", "index_put rc"),
    ("z[torch.arange(N), labels] -= 2.0; z.logsumexp(-1)", "index r", "index_put rc"),
    ("z[torch.arange(N), labels] = row; z.logsumexp(-1)", "index_put rc"),
    ("z[rows] = 0.5; z.logsumexp(-1)", "index_put rc"),
    ("z[z < 0] = 0.5; z.logsumexp(-1)", "lt rc", "index_put rc"),
    ("z[given < 0] = 0.5; z.logsumexp(-1)", "index_put rc"),
)
REFUSED = (
    ("z[z > 0].sum()", "indexed by what is made of the logits"),
    ("z[given > 0].sum()", "whose number differs from row to row"),
    ("z[z.argmax(-1) % N].sum(-1)", ""),
    ("z[z.argmax(-1) % N, labels]", ""),
    ("z[order] = 1.0; z.logsumexp(-1)", "assigns"),
    ("z[order, labels[order]] = 1.0; z.logsumexp(-1)", "assigns to rows"),
    ("z[z.amax(-1) > 1].sum(-1)", ""),
    ("z.masked_select(z > 0).sum()", ""),
    ("z.nonzero().sum()", ""),
)


def _ids(table):
    return [row[0] for row in table]


@pytest.mark.parametrize("row", ACCEPTED, ids=_ids(ACCEPTED))
def test_accepted(row):
    accepted(*row)


@pytest.mark.parametrize(("text", "reason"), REFUSED, ids=_ids(REFUSED))
def test_refused(text, reason):
    refused(text, reason)
