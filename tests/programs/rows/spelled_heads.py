"""Ways to write the product of a head, and functions of its logits, before a cross-entropy."""

from __future__ import annotations

from tests.programs.row import NOTHING, REGION, Row, becoming

KIND = "spelled heads"

OF_HIDDEN = "x = x.view(B, T, D); y = {}; F.cross_entropy(y.view(-1, V), labels)"
OF_LOGITS = "y = {}; F.cross_entropy(y.view(-1, V), labels)"

# of ``x`` [B, T, D] and ``weight``
LINEARS = {
    "with a bias": "F.linear(x, weight, prior)",
    "@ T": "x @ weight.T",
    "matmul transpose by the end": "x.matmul(weight.transpose(-1, -2))",
    "a weight [D, V]": "x @ weight.T.contiguous()",
    "addmm": "torch.addmm(prior, x.view(-1, D), weight.t())",
    "addmm of a weight [D, V]": "torch.addmm(prior, x.view(-1, D), weight.T.clone())",
    "of strided hidden states": "F.linear(torch.cat([x, x], 1)[:, :T], weight)",
    "of strided hidden states, bias": "F.linear(torch.cat([x, x], 1)[:, :T], weight, prior)",
    "@ of transposed hidden states": "(x.transpose(0, 1) @ weight.T).transpose(0, 1).contiguous()",
    "einsum": "torch.einsum('bsd,vd->bsv', x, weight)",
    "einsum, weight [D, V]": "torch.einsum('bsd, dv -> bsv', x, weight.T.clone())",
    "einsum, weight first": "torch.einsum('vd,bsd->bsv', weight, x)",
    "einsum with dots": "torch.einsum('...d,vd->...v', x, weight)",
    "einsum in another order": (
        "torch.einsum('bsd,vd->vbs', x, weight).permute(1, 2, 0).reshape(N, V)"
    ),
    "einsum of three": "torch.einsum('bsd,vd,v->bsv', x, weight, prior)",
    "weight of several": "x.matmul(torch.cat([weight[:4], weight[4:]]).t())",
}
# of ``s``
TRANSFORMS = {
    "view with the rows spelled out": "s.view(B * T, -1)",
    "flatten by keyword": "s.flatten(start_dim=0, end_dim=-2)",
    "float twice": "s.float().view(-1, V).float().to(s.dtype)",
    "index of everything": "s[:, :, :]",
    "scale from the left": "0.125 * s",
    "shift": "s - 1 + 3",
    "square": "s * s",
    "subtraction from a number": "1 - s",
    "methods": "s.mul(2).add(1).sub(3).div(4).neg()",
    "torch functions": "torch.neg(torch.div(torch.sub(torch.mul(s, 2), 3), 4))",
    "soft-cap": "30 * torch.tanh(s / 30)",
    "clamp": "s.clamp(-1, 1)",
    "square root of a softplus": "F.softplus(s).sqrt()",
}
IN_PLACE = {
    "in place": "s.mul_(2).add_(1)",
    "in place by operator": "operator.itruediv(s, 2)",
    "in place on a view": "s.view(-1, V).mul_(2)",
    "in place, its result thrown away": "(F.relu(s, inplace=True), s)[1]",
    "in place on logits, and a copy before": "(lambda a: s.mul_(2) + a)(s * 1)",
}
ROW_FUNCTIONS = {
    "a softmax": "s.softmax(-1)",
    "running sums": "torch.cumsum(s, -1)",
    "rounding division": "s.div(2, rounding_mode='floor') + s",
    "classes in reverse": "s.flip(-1)",
    "float64": "s.double()",
}

# fmt: off
ROWS = becoming((
    *(Row(name, OF_HIDDEN.format(text)) for name, text in LINEARS.items()),
    Row("addmm with beta",
        "F.cross_entropy(torch.addmm(prior, x, weight.t(), beta=2), labels)", NOTHING),
    *(Row(name, OF_LOGITS.format(text)) for name, text in TRANSFORMS.items()),
    # A checkpoint that writes to what it is given is not fused.
    *(Row(name, OF_LOGITS.format(text), computes=("outside",), never=("checkpointed",))
      for name, text in IN_PLACE.items()),
    *(Row(name, OF_LOGITS.format(text), REGION) for name, text in ROW_FUNCTIONS.items()),
), {
    REGION: ("einsum", "einsum in another order", "einsum, weight [D, V]", "einsum, weight first", "einsum with dots", "einsum of three",
             "clamp", "square root of a softplus", "in place, its result thrown away"),
})
