"""Logits and views of them, and what else a program does: writes, reads, contexts.

In: nothing. Out: tables of templates. A head is a text, the dimension of its classes, and how an
operand of rows ``[B, T]`` follows; so is what a view does.
"""

from __future__ import annotations

from tests.fuzz.steps import lines
from tests.programs.row import HEADS as ROW_HEADS

# hidden states [B, T, D] and [N, D], and weights [V, D]
HIDDEN = (*("h",) * 8, "(h * 0.5).tanh()", "h.detach()", "F.layer_norm(h, (D,))", "h * 300")
WEIGHTS = (
    *("weight",) * 8,
    *("second_weight",) * 2,
    *("weight.detach()", "weight * class_weight[:, None]", "weight * 0.5", "weight / 300"),
    *("weight.to({x}.dtype)", "torch.cat([weight[:5], weight[5:]])", "weight + 0.5 * up @ down"),
    *("F.normalize(weight, dim=1) * factor.unsqueeze(1)", "quantised.to({x}.dtype) * scales"),
)
# [B, T, V] of {x} [B, T, D] and {w} [V, D]: how a product is written
PRODUCTS = lines("""
F.linear({x}, {w})
F.linear({x}, {w}, bias)
F.linear({x}, {w}, bias.to({x}.dtype))
F.linear(bias=bias, weight={w}, input={x})
{x} @ {w}.t()
{x} @ {w}.permute(1, 0)
torch.matmul({x}, {w}.T)
torch.matmul(other={w}.T, input={x})
{x}.matmul(other={w}.transpose(-1, 0))
operator.matmul({x}, {w}.swapaxes(0, 1))
{x} @ {w}.t().contiguous()
torch.einsum("btd,vd->btv", {x}, {w})
torch.einsum("...d,vd->...v", {x}, {w})
torch.einsum("vd,btd->btv", {w}, {x})
torch.einsum("btd,dv->btv", [{x}, {w}.t()])
torch.addmm(bias, {x}.flatten(0, 1), {w}.t()).view(B, T, -1)
torch.addmm(input=bias, mat1={x}.flatten(0, 1), mat2={w}.t(), beta=0.5).view(B, T, -1)
torch.addmm(bias.repeat(B * T, 1), {x}.flatten(0, 1), {w}.t()).view(B, T, -1)
torch.mm({x}.reshape(-1, D), {w}.t()).view(B, T, -1)
torch.stack([F.linear({x}, {w}), F.linear({x}, second_weight)])[1]
torch.stack((F.linear({x}, {w}), F.linear({x}, {w})), 1)[:, 0]
torch.cat([F.linear({x}, p) for p in {w}.chunk(3)], -1)
F.linear({x}, {w}) + 0.5 * F.linear(F.linear({x}, down), up)
F.linear({x}, {w}.detach()) + ({x} @ down.t()) @ up.t() * 2
F.linear({x}, {w}).float()
F.linear({x}, {w}).float() * torch.tensor(200.0)
F.linear({x}, {w}).float() / torch.tensor(0.04)
F.linear({x}.bfloat16(), {w}.bfloat16())
checkpoint(F.linear, {x}, {w}, use_reentrant=False)
""")
HEADS: tuple[tuple[str, int, str], ...] = (
    *((text, 2, "{}") for text in PRODUCTS),
    *(("F.linear(teacher_x.view(B, T, -1), teacher_weight)", 2, "{}"),) * 4,
    ('torch.einsum("btd,tdv->btv", {x}, position_weight)', 2, "{}"),
    ("torch.cat([F.linear({x}, {w}), F.linear({x}, added_weight)], 2)", 2, "{}"),
    ("F.linear({x}, quantised.to({x}.dtype)) * scales.t()", 2, "{}"),
    ("F.linear({x}.flatten(0, 1), {w})", 1, "{}.flatten(0, 1)"),
    ("F.linear({x}.reshape(-1, D), {w}, bias)", 1, "{}.reshape(-1)"),
    ("F.linear({x}[:, :-1], {w})", 2, "{}[:, :-1]"),
    ("F.linear({x}[:, 1:], {w})", 2, "{}[:, 1:]"),
    ("F.linear({x}[0], {w})", 1, "{}[0]"),
    ("F.linear({x}.flip(1), {w})", 2, "{}.flip(1)"),
    ("F.linear({x}.transpose(0, 1), {w})", 2, "{}.transpose(0, 1)"),
    ("{w} @ {x}.flatten(0, 1).t()", 0, "{}.flatten(0, 1)"),
    ("{w} @ {x}.transpose(1, 2)", 1, "{}"),
)
# The heads of a row: the compiled function of programs whose rest is outside.
GIVEN = {name: text for name, (_, text) in ROW_HEADS.items()}


def _same(dim: int, text: str) -> list[tuple[str, int, str]]:
    return [(one, dim, one) for one in lines(text)]


# By rank and class dimension: what follows a tensor with classes, the dimension of the classes
# then, and what follows a row operand.
VIEWS: dict[tuple[int, int], list[tuple[str, int, str]]] = {
    (3, 2): [
        *[(".flatten(0, 1)", 1, ".flatten(0, 1)"), (".reshape(-1, {v})", 1, ".reshape(-1)")] * 2,
        (".view(-1, {v})", 1, ".reshape(-1)"),
        (".contiguous().view(-1, {v})", 1, ".reshape(-1)"),
        *_same(2, "[:, :-1]\n[:, 1:]\n[:, ::2]\n[1:]\n[:1]\n.flip(0)\n.flip(1)\n.transpose(0, 1)"),
        *_same(2, "[:, [2, 0, 1]]\n[torch.tensor([1, 0, 1])]\n.roll(1, 1)\n.narrow(1, 1, 2)"),
        *_same(2, ".index_select(1, torch.tensor([2, 0]))\n.split(2, 1)[0]\n.chunk(2, 1)[1]"),
        *_same(1, "[0]\n[:, -1]\n[:, 1]\n.select(1, 0)\n.unbind(0)[1]"),
        ("[..., :-1, :]", 2, "[..., :-1]"),
        *[(".transpose(1, 2)", 1, ""), (".movedim(-1, 1)", 1, ""), (".permute(2, 0, 1)", 0, "")],
    ],
    (2, 1): [
        *_same(1, "[::2]\n[1:]\n[:-1]\n.flip(0)\n[[2, 0, 1]]\n.chunk(2)[0]\n.split(2)[1]"),
        *_same(1, ".roll(1, 0)"),
        *_same(2, ".unsqueeze(0)\n.unsqueeze(1)\n.unflatten(0, (-1, T))"),
        *[("[0]", 0, "[0]"), (".t()", 0, "")],
    ],
    (3, 1): [
        (".transpose(1, 2)", 2, ""),
        ("[..., 1:]", 1, "[..., 1:]"),
        (".flip(0)", 1, ".flip(0)"),
    ],
    (3, 0): [(".movedim(0, -1)", 2, ""), ("[..., ::2]", 0, "[..., ::2]")],
    (2, 0): [(".t()", 1, ""), ("[:, 1:]", 0, "[1:]"), (".T.contiguous()", 1, "")],
}

# ---------------------------------------------------------------- beside the way to the loss

CONTEXTS = lines("""
torch.no_grad()
torch.no_grad()
torch.enable_grad()
torch.set_grad_enabled(True)
torch.inference_mode()
torch.inference_mode(False)
torch.autocast("cpu", torch.bfloat16)
torch.autocast("cpu", enabled=False)
""")
# Of {a}, an operand, hidden states, or a tensor with classes.
WRITES = lines("""
{a}.mul_({f})
{a}.detach().mul_({f})
{a}.data.zero_()
{a}.detach().view(-1)[0] = 0.5
{a}.detach()[0] = {f}
{a}.detach().T.neg_()
{a}.add_(other={a}, alpha=2)
{a}.clamp_(max=0.5, min=-0.5)
{a}.copy_({a}.flip(0))
{a}.lerp_(torch.ones_like({a}), 0.5)
{a}.masked_fill_({a} > 0.5, {f})
{a} *= {f}
{a} -= {a}.mean()
{a}[{a} > 0.5] = {f}
{a}.__imul__({f})
F.relu({a}, True)
F.relu_({a})
F.hardtanh({a}, inplace=True, min_val=-0.5)
F.dropout({a}, 0.0, True, True)
torch.mul({a}, {f}, out={a})
torch._foreach_mul_([{a}], {f})
torch._foreach_add_([{a}, {a}], 1.0)
operator.imul({a}, {f})
torch.ops.aten.mul_.Scalar({a}, {f})
F.embedding(tokens, {a}, max_norm=0.5)
""")
WRITABLE = ("h", "x", "weight", "bias", "factor", "class_weight", "soft", "temperatures")
INTEGER_WRITES = lines("""
tokens[0] = 1
tokens.clamp_(max=2)
tokens.add_(1).remainder_(7)
tokens.data.fill_(3)
mask[0] = False
mask.logical_not_()
class_weight[tokens.view(-1)] = 0.5
""")
READS = lines("""
{z}.argmax(-1)
{z}.detach().softmax(-1)
{z}.max(-1).values.detach()
torch.isfinite({z}).all()
{z}.shape[0] * torch.ones(())
torch.rand(2)
F.linear(h, weight.detach()).mean()
F.cross_entropy(F.linear(h, second_weight).flatten(0, 1), tokens.flatten())
{z}.cumsum(0).mean()
{z}.numpy(force=True).sum()
""")
# What a user does with logits that a compiled function has returned.
USES = lines("""
seen({z}.detach().clone())
seen({z}.tolist()[0])
seen({z}.detach().view(-1)[0])
seen({z}.detach().numpy().sum())
seen({z}[0].float().softmax(-1))
seen({z}.requires_grad)
seen(torch.zeros_like({z}))
{z}.register_hook(lambda g: g * 0.5)
{z}.retain_grad()
torch.optim.SGD([bias, second_weight], lr=0.1).step()
torch.optim.AdamW([weight], lr=0.1).step()
weight.grad = torch.ones_like(weight); torch.optim.SGD([weight], lr=0.1).step()
seen(torch.compile(lambda v: v.float().sum(-1), backend="aot_eager")({z}))
{z}.mul_(2)
{z}[0] = 0.5
{z} = {z} * 2
{z}.detach().zero_()
""")
