"""Views of rows and of classes: their tags, and what the operands of a region become.

Each accepted program's tags are held against its values, too (:mod:`tests.support.row_tags`).
"""

from __future__ import annotations

import pytest

from fxpass.capture.views import regrouped
from tests.support.row_programs import accepted, refused, run

# The program, and tags among its own.
ACCEPTED = (
    ("s[:, :-1].logsumexp(-1)", "slice rrc", "logsumexp rr"),
    ("s[:, 1:].flatten(0, 1).logsumexp(-1)", "slice rrc", "logsumexp r"),
    ("s[:, ::3].logsumexp(-1)", "slice rrc"),
    ("s[..., :-1, :].contiguous().view(-1, V).logsumexp(-1)", "clone rrc", "view rc"),
    ("s[:, -1].logsumexp(-1)", "select rc", "logsumexp r"),
    ("s[0].logsumexp(-1)", "select rc"),
    ("s[0, 3].logsumexp(-1)", "select c", "logsumexp "),
    ("s.narrow(1, 2, 5).logsumexp(-1)", "slice rrc"),
    ("s.view(N, V).logsumexp(-1)", "view rc"),
    ("z.view(B, T, V).transpose(0, 1).logsumexp(-1)", "view rrc", "transpose rrc"),
    ("z.view(B, T, V).transpose(0, 1).reshape(N, V).logsumexp(-1)", "transpose rrc"),
    ("z.view(2, 3, 4, V).permute(2, 3, 0, 1).logsumexp(1)", "permute rcrr", "logsumexp rrr"),
    ("z.t().logsumexp(0)", "t cr", "logsumexp r"),
    ("(z + z.t().contiguous().t()).sum(-1)", "t cr", "t rc", "add rc"),
    ("s.movedim(-1, 0).logsumexp(0)", "permute crr"),
    ("s.mT.logsumexp(1)", "transpose rcr"),
    ("s.flip(1).logsumexp(-1)", "flip rrc"),
    ("s.flip(0, 1).logsumexp(-1)", "flip rrc"),
    ("s.roll(1, 1).logsumexp(-1)", "roll rrc"),
    ("s.roll((1, 2), (0, 1)).logsumexp(-1)", "roll rrc"),
    ("s.unbind(0)[1].logsumexp(-1)", "unbind rc"),
    ("s.split(5, 1)[1].logsumexp(-1)", "split rrc"),
    ("sum(p.logsumexp(-1).sum() for p in s.split([5, 7], 1))", "logsumexp rr"),
    ("z.chunk(3, -1)[1].logsumexp(-1)", "split rc"),
    ("z.unsqueeze(1).expand(N, 4, V).logsumexp(-1)", "expand rkc", "logsumexp rk"),
    ("z.unsqueeze(0).logsumexp(-1)", "unsqueeze krc", "logsumexp kr"),
    ("z.view(N, V, 1).squeeze(2).logsumexp(-1)", "view rck", "squeeze rc"),
    ("z[:, :60].view(N, 6, 10).amax(-1).sum(-1)", "sum r"),
    ("z[None].expand(3, N, V).logsumexp(-1)", "logsumexp kr"),
    # rows of several views of one head
    ("(s[:, 1:] - s[:, :-1]).square().sum(-1)", "sub rrc"),
    ("(z.flip(0) + z).logsumexp(-1)", "flip rc", "add rc"),
    ("F.cross_entropy(s[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())", "gather rk"),
    ("F.cross_entropy(s[:, :-1].transpose(1, 2), tokens[:, 1:])", "_log_softmax rcr"),
)
REFUSED = (
    ("s.view(B, -1).logsumexp(-1)", "mixes rows and classes in one dimension"),
    ("z.view(N // 2, 2 * V).logsumexp(-1)", "mixes rows and classes in one dimension"),
    ("z.flatten().logsumexp(0)", "mixes rows and classes in one dimension"),
    ("s.roll(1).logsumexp(-1)", "works on all elements"),
    ("s.transpose(1, 2).reshape(B * V, T).amax(-1)", "mixes rows and classes"),
    ("s.transpose(1, 2).reshape(B, T, V).amax(-1)", ""),
    ("z.repeat(2, 1).logsumexp(-1)", ""),
    ("s.unfold(1, 3, 1).sum((-1, -2))", ""),
    ("z.as_strided((N, V), (1, N)).logsumexp(-1)", ""),
    ("z.view(torch.int32).sum(-1)", ""),
)
# The program, and the views of rows that the hidden states get.
CHAINS = (
    ("z.logsumexp(-1)", []),
    ("s.logsumexp(-1)", ["reshape((2,12))"]),
    ("s[:, :-1].logsumexp(-1)", ["reshape((2,12))", "slice(1,0,-1,1)"]),
    ("s[:, :-1].flatten(0, 1).logsumexp(-1)", ["reshape((2,12))", "slice(1,0,-1,1)"]),
    ("s.transpose(1, 2).logsumexp(1)", ["reshape((2,12))"]),
    ("s.transpose(0, 1).logsumexp(-1)", ["reshape((2,12))", "permute((1,0))"]),
    ("s[0].logsumexp(-1)", ["reshape((2,12))", "select(0,0)"]),
    ("s.roll(1, 1).logsumexp(-1)", ["reshape((2,12))", "roll((1),(1))"]),
    ("s.flip(1).logsumexp(-1)", ["reshape((2,12))", "flip((1))"]),
)


def _ids(table):
    return [row[0] for row in table]


@pytest.mark.parametrize("row", ACCEPTED, ids=_ids(ACCEPTED))
def test_accepted(row):
    accepted(*row)


@pytest.mark.parametrize(("text", "reason"), REFUSED, ids=_ids(REFUSED))
def test_refused(text, reason):
    refused(text, reason)


@pytest.mark.parametrize(("text", "chain"), CHAINS, ids=_ids(CHAINS))
def test_views_move_to_the_operands(text, chain):
    (captured,) = run(text).captured
    (call,) = captured.calls
    of_logits = [leaf for leaf in call.leaves if leaf.kind == "logits"]
    found = [op.key for op in of_logits[0].chain]
    while len(found) > len(chain) and found[-1].startswith("reshape"):
        found.pop()  # of rows that become one dimension anyway
    assert found == chain


def test_labels_follow_the_rows_of_the_logits():
    text = "F.cross_entropy(s[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction='none')"
    (captured,) = run(text).captured
    (call,) = captured.calls
    # labels, once as they are and once without those that are ignored
    assert [leaf.kind for leaf in call.leaves] == ["logits", "row", "row"]
    (output,) = call.outputs
    assert output.tag == "r"
    assert output.shape == (22,)


@pytest.mark.parametrize(
    ("old", "tag", "new", "expected"),
    [((2, 0, 16), "rrc", (0, 16), "rc"), ((0, 16), "rc", (2, 0, 16), "rrc")],
)
def test_no_rows(old, tag, new, expected):
    assert regrouped(old, tag, new) == expected
