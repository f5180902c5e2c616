"""Views of the logits, and some rows and classes of them, in front of a cross-entropy."""

from __future__ import annotations

import torch

from tests.programs.row import REGION, Row, becoming

KIND = "views"

SOME = torch.tensor([3, 0, 5])
# of ``s`` and ``t`` [B, T], or ``z`` and ``labels``: what the loss is given
VIEWS = {
    "transpose": "s.transpose(1, 2), t",
    "mT, as Dynamo of torch 2.14 writes it": "aten.mT(s), t",
    "H": "s[0].H.H, t[0]",
    "permute, another order": "s.permute((1, 2, 0)), t.T",
    "a dimension of one flattened with the classes":
        "s.unsqueeze(2).flatten(2).transpose(1, 2), t",
    "there and back": "s.transpose(0, 1).contiguous().view(-1, V), t.T.reshape(-1)",
    "unsqueeze": "z.unsqueeze(-1), labels.view(-1, 1)",
    "squeeze": "s.unsqueeze(1).view(-1, V).unsqueeze(2).squeeze(2), labels",
    "squeeze of nothing": "z.squeeze(), labels",
    "classes split": "z.unflatten(1, (V, 1)), labels.view(-1, 1)",
    "new dimension by index": "s[:, None].view(-1, V), labels",
    "view behind the classes": "s.transpose(1, 2).reshape(B, V, T), t",
    "number by index": "s[:, -1], t[:, -1]",
    "rows by two tensors": "s[SOME % B, SOME], t[SOME % B, SOME]",
    "rows by a number and a tensor": "s[0, SOME], t[0, SOME]",
    "a slice of the classes, then rows":
        "s[:, 1:, 2:90].flatten(0, 1), t[:, 1:].flatten() % 88",
    "classes by a tensor, then rows":
        "s[..., chosen][:, 1:].flatten(0, 1), t[:, 1:].flatten() % 60",
    "a class twice": "z[:, chosen % 3], labels % 60",
    "every other class": "s[..., ::2].reshape(N, -1), labels % 48",
    "rows by a tensor, batch first": "s[:, t[0] % T - 2].mT, t",
}  # fmt: skip

OF = "s = s.tanh() * 3; z = s.view(-1, V); t = tokens; F.cross_entropy(*({}))"

# fmt: off
ROWS = becoming((
    *(Row(name, OF.format(text)) for name, text in VIEWS.items()),
    Row("one row", OF.format("s[0, 0], t[0, 0]"), computes=("outside",)),
), {
    REGION: ("number by index", "a slice of the classes, then rows",
             "classes by a tensor, then rows", "a class twice", "every other class"),
})
