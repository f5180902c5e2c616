"""The statements of row-wise programs; see :mod:`tests.fuzz.rowwise`.

Names: hidden states ``x`` and ``y`` of two sizes, weights ``w`` and ``w3`` of the first and ``w2`` of
the second, one for each position ``wp``, a bias ``b``, a low-rank pair ``la`` and ``lb``, a quantised
weight ``i8`` with scales ``sc``, labels ``t``, a mask ``m``, a factor of each row ``s``, class vectors
``c`` and ``cw``, given values like the logits ``g``, a temperature ``tem``, an order of the classes
``order``.

Holes: ``{z}`` a tensor with classes, ``{d}`` their dimension, ``{v}`` their number, ``{o}`` another one
of the same shape, ``{lab}``, ``{row}`` and ``{mask}`` labels, factors and mask of its rows, ``{lab1}``,
``{row1}`` and ``{mask1}`` with a dimension of one where the classes are, ``{c}``, ``{cw}`` and ``{order}``
the class vectors, ``{g}`` given values like it, ``{f}`` a number, ``{r}`` and ``{q}`` rows, ``{last}``
the tensor with its classes last.
"""

from __future__ import annotations

T, D, D2, V = 5, 6, 4, 13

INPUTS: dict[str, str] = {
    "x": f"torch.randn(n, {T}, {D}){{dtype}}{{grad}}",
    "y": f"torch.randn(n, {T}, {D2}){{dtype}}{{grad}}",
    "w": f"(torch.randn({V}, {D}) * 0.6){{other}}{{grad}}",
    "w2": f"(torch.randn({V}, {D2}) * 0.8){{other}}{{grad}}",
    "w3": f"(torch.randn({V}, {D}) * 0.6){{other}}{{grad}}",
    "wp": f"(torch.randn({T}, {V}, {D}) * 0.6){{other}}{{grad}}",
    "b": f"torch.randn({V}){{other}}{{grad}}",
    "la": f"(torch.randn(3, {D}) * 0.5){{other}}{{grad}}",
    "lb": f"torch.randn({V}, 3){{other}}{{grad}}",
    "i8": f"torch.randint(-127, 128, ({V}, {D})).to(torch.int8)",
    "sc": f"(torch.rand({V}, 1) * 0.01 + 0.01){{other}}{{grad}}",
    "t": f"torch.randint({V - 4}, (n, {T}))",
    "m": f"torch.rand(n, {T}) > 0.3",
    "s": f"(torch.rand(n, {T}) + 0.5){{other}}{{grad}}",
    "c": f"torch.randn({V}){{other}}{{grad}}",
    "cw": f"(torch.rand({V}) + 0.5){{other}}{{grad}}",
    "g": f"torch.randn(n, {T}, {V}){{other}}{{grad}}",
    "tem": "(torch.rand(()) + 0.5){other}{grad}",
    "order": f"torch.randperm({V})",
}

# Logits: an expression, the dimension of their classes, and how a row operand [n, T] follows.
HEADS: tuple[tuple[str, int, str], ...] = (
    *(("F.linear({x}, {w})", 2, "{}"),) * 6,
    *(("F.linear({x}, {w}, b)", 2, "{}"), ("{x} @ {w}.t()", 2, "{}")) * 2,
    ("torch.matmul({x}, {w}.T)", 2, "{}"),
    *(("F.linear(y, w2)", 2, "{}"),) * 4,
    *(("F.linear({x}, w3)", 2, "{}"),) * 2,
    ('torch.einsum("btd,vd->btv", {x}, {w})', 2, "{}"),
    ('torch.einsum("btd,tvd->btv", {x}, wp)', 2, "{}"),
    *(("F.linear({x}, {w}) + 0.5 * F.linear(F.linear({x}, la), lb)", 2, "{}"),) * 2,
    ("F.linear({x}, {w}.detach()) + ({x} @ la.t()) @ lb.t() * 2", 2, "{}"),
    *(("torch.cat([F.linear({x}, p) for p in {w}.chunk(3)], -1)", 2, "{}"),) * 2,
    ("torch.cat([F.linear({x}, {w}), F.linear(y, w2)], 2)", 2, "{}"),
    ("F.linear({x}, i8.to({x}.dtype) * sc.to({x}.dtype))", 2, "{}"),
    ("F.linear({x}, i8.to({x}.dtype)) * sc.t()", 2, "{}"),
    ("checkpoint(F.linear, {x}, {w}, use_reentrant=False)", 2, "{}"),
    ("F.linear({x}.flatten(0, 1), {w})", 1, "{}.flatten(0, 1)"),
    (f"F.linear({{x}}.reshape(-1, {D}), {{w}}, b)", 1, "{}.reshape(-1)"),
    ("F.linear({x}[:, :-1], {w})", 2, "{}[:, :-1]"),
    ("F.linear({x}[:, 1:], {w})", 2, "{}[:, 1:]"),
    ("F.linear({x}[0], {w})", 1, "{}[0]"),
    ("F.linear({x}.flip(1), {w})", 2, "{}.flip(1)"),
    ("F.linear({x}.transpose(0, 1), {w})", 2, "{}.transpose(0, 1)"),
    ("{w} @ {x}.flatten(0, 1).t()", 0, "{}.flatten(0, 1)"),
    ("{w} @ {x}.transpose(1, 2)", 1, "{}"),
)
HIDDEN = ("x",) * 8 + ("(x * 0.5).tanh()", "x.detach()", "(x + 0.1)")
WEIGHTS = ("w",) * 12 + ("w.detach()", "w * cw[:, None]", "(w * 0.5)", "w.to({x}.dtype)")

# By rank and class dimension: what follows a tensor with classes, the dimension of the classes
# then, and what follows a row operand.
VIEWS: dict[tuple[int, int], tuple[tuple[str, int, str], ...]] = {
    (3, 2): (
        *((".flatten(0, 1)", 1, ".flatten(0, 1)"), (".reshape(-1, {v})", 1, ".reshape(-1)")) * 2,
        (".view(-1, {v})", 1, ".reshape(-1)"),
        (".contiguous().view(-1, {v})", 1, ".reshape(-1)"),
        *((text, 2, text) for text in ("[:, :-1]", "[:, 1:]", "[:, ::2]", "[1:]", "[:1]")),
        *((text, 2, text) for text in (".flip(0)", ".flip(1)", ".transpose(0, 1)")),
        *((text, 2, text) for text in ("[:, [2, 0, 1]]", "[torch.tensor([1, 0, 1])]")),
        *((text, 2, text) for text in (".index_select(1, torch.tensor([2, 0]))", ".roll(1, 1)")),
        *((text, 2, text) for text in (".narrow(1, 1, 2)", ".split(2, 1)[0]", ".chunk(2, 1)[1]")),
        *((text, 1, text) for text in ("[0]", "[:, -1]", "[:, 1]", ".select(1, 0)")),
        (".unbind(0)[1]", 1, ".unbind(0)[1]"),
        ("[..., :-1, :]", 2, "[..., :-1]"),
        *((".transpose(1, 2)", 1, ""), (".movedim(-1, 1)", 1, ""), (".permute(2, 0, 1)", 0, "")),
    ),
    (2, 1): (
        *((text, 1, text) for text in ("[::2]", "[1:]", "[:-1]", ".flip(0)", "[[2, 0, 1]]")),
        *((text, 1, text) for text in (".chunk(2)[0]", ".split(2)[1]", ".roll(1, 0)")),
        *((text, 2, text) for text in (".unsqueeze(0)", ".unsqueeze(1)")),
        *((text, 2, text) for text in (f".unflatten(0, (-1, {T}))",) * 2),
        ("[0]", 0, "[0]"),
        (".t()", 0, ""),
    ),
    (3, 1): (
        (".transpose(1, 2)", 2, ""),
        ("[..., 1:]", 1, "[..., 1:]"),
        (".flip(0)", 1, ".flip(0)"),
    ),
    (3, 0): ((".movedim(0, -1)", 2, ""), ("[..., ::2]", 0, "[..., ::2]")),
    (2, 0): ((".t()", 1, ""), ("[:, 1:]", 0, "[1:]"), (".T.contiguous()", 1, "")),
}

POINTWISE = (
    *("{z} * {f}", "{z} / {f}", "{z} + {f}", "{f} - {z}", "-{z}", "{z} / tem", "{z} * tem"),
    *("{z}.tanh()", "15 * torch.tanh({z} / 15)", "{z}.sigmoid()", "F.softplus({z})", "{z}.abs()"),
    *("F.relu({z})", "F.gelu({z})", "F.silu({z})", "F.leaky_relu({z}, 0.1)", "F.elu({z})"),
    *("{z}.clamp(-2, 2)", "{z}.clamp_min(-1.5)", "{z}.clamp(max=2.5)", "F.hardtanh({z})"),
    *("{z}.nan_to_num()", "torch.nan_to_num({z}, 0.0, 9.0, -9.0)", "{z}.square() * 0.1"),
    *("{z}.sin()", "{z}.cos()", "torch.erf({z})", "torch.atan({z})", "{z}.clamp(-3, 3).exp()"),
    *("torch.log1p({z}.abs())", "({z}.square() + 0.5).sqrt()", "({z}.square() + 1).rsqrt()"),
    *("torch.sign({z}) + {z}", "torch.where({z} > 0, {z}, 0.5 * {z})", "{z}.pow(2) / 8"),
    *("({z} > 0.1).to({z}.dtype) * {z}", "F.logsigmoid({z})", "torch.expm1({z}.clamp(-2, 2))"),
    *("{z}.masked_fill({z} < -1, -1.5)", "torch.addcmul({z}, {z}, {z}, value=0.05)"),
    *("Capped.apply({z}, 3.0)", "Capped.apply({z}, 1.5)", "Clipped.apply({z})"),
    *("{z}.clone()", "{z}.contiguous()", "{z}.float()", "{z}.double()", "{z}.to(torch.bfloat16)"),
    *(
        "{z}.to(c.dtype)",
        "{z}.detach()",
        "0.5 * {z} + 0.5 * {z}.detach()",
        "{z}.lerp({z}.tanh(), 0.3)",
    ),
)

# Along the classes, and classes again.
SCANS = (
    *("{z}.softmax({d})", "{z}.log_softmax({d})", "F.softmax({z}, dim={d})") * 2,
    *("F.log_softmax({z}, {d}, dtype=torch.float32)", "F.softmin({z}, {d})"),
    *("{z}.cumsum({d}) * 0.3", "{z}.logcumsumexp({d})", "{z}.flip({d})", "{z}.roll(2, {d})"),
    *("{z} - {z}.mean({d}, keepdim=True)", "{z} - {z}.logsumexp({d}, keepdim=True)"),
    *("{z} / ({z}.square().sum({d}, keepdim=True) + 0.5).sqrt()", "F.normalize({z}, dim={d})"),
    *("{z} - {z}.amax({d}, keepdim=True).detach()", "{z}.softmax({d}).cumsum({d})"),
    *("({z} - {z}.mean({d}, keepdim=True)) / ({z}.std({d}, keepdim=True) + 0.3)",),
    *("{z} * {z}.softmax({d}).detach()", "{z}.diff(dim={d}, prepend={z}.narrow({d}, 0, 1))"),
    *("torch.cat([{z}.narrow({d}, 0, 4), {z}.narrow({d}, 4, {v} - 4) * 0.5], {d})",),
    *("torch.cat([{z}.narrow({d}, 5, {v} - 5), {z}.narrow({d}, 0, 5)], {d})",),
    *(
        "{z}.index_select({d}, {order})",
        "{z}.gather({d}, ({lab1} + torch.arange(3).view({class1})) % 7)",
    ),
    *("{z}.narrow({d}, 1, {v} - 3)", "{z}.narrow({d}, 0, {v} - 1)"),
)
# Those whose answer a tie would leave to chance.
ORDERED_SCANS = (
    *("{z}.sort({d}).values", "{z}.sort({d}, descending=True).values", "{z}.cummax({d}).values"),
    *("{z}.topk(4, {d}).values", "{z}.topk(3, {d}, largest=False).values * 0.5"),
    "{z}.gather({d}, {z}.detach().topk(3, {d}).indices)",
    "{z}.gather({d}, {z}.argsort({d}))",
    "{z}.masked_fill({z} < {z}.topk(5, {d}).values.narrow({d}, 4, 1), -4.0)",
    "{z}.masked_fill({z}.sort({d}, descending=True).values.softmax({d}).cumsum({d}) > 0.95, -4.0)",
    "torch.maximum({z}, {z}.kthvalue(3, {d}, keepdim=True).values)",
    "{z} - {z}.max({d}, keepdim=True).values",
    "torch.where({z} >= {z}.amax({d}, keepdim=True), 0.5 * {z}, {z})",
)
# With operands of rows, of classes, or of both.
OPERANDS = (
    *("{z} + {c}", "{z} * {cw}", "{z} / {cw}", "{z} - {c} * 0.5", "{z} + {row1}", "{z} * {row1}"),
    *(
        "{z} / {row1}",
        "{z} + {g}",
        "{z} * {g}",
        "torch.logaddexp({z}, {g})",
        "{z} + 0.5 * {g}.tanh()",
    ),
    *("{z}.masked_fill({cw} > 1.2, -3.0)", "torch.where({cw} > 0.8, {z}, {z}.detach() - 1)"),
    *("{z}.masked_fill({mask1}, 0.25)", "torch.where({mask1}, {z}, -{z})", "{z} * {mask1}"),
    *("torch.where({g} > 0, {z}, 0.5 * {z})", "{z}.masked_fill({g} > 1.5, -2.0)"),
    *("{z}.scatter({d}, {lab1}, -1.0)", "{z}.scatter_add({d}, {lab1}, {row1}.to({z}.dtype))"),
    *("{z} - 0.3 * F.one_hot({lab}, {v}).movedim(-1, {d})", "{z} - {z}.gather({d}, {lab1})"),
    # tensors that the program makes and writes itself
    "{z} - 0.3 * torch.zeros_like({z}).scatter_({d}, {lab1}, 1.0)",
    "{z} * torch.empty_like({z}).fill_(0.1).scatter_({d}, {lab1}, 0.9)",
    "{z}.masked_fill(torch.zeros({v}, dtype=torch.bool).index_fill_(0, torch.arange(3), True)"
    ".view({class1}), -3.0)",
    *("torch.where(torch.arange({v}).view({class1}) == {lab1}, {z} - 0.4, {z})",),
    *(
        "torch.maximum({z}, {c})",
        "torch.minimum({z}, {row1} * 2)",
        "{z}.clamp(-{row1} * 3, {row1} * 3)",
    ),
)
PAIRS = (
    *("{z} + {o}", "{z} - 0.5 * {o}", "{z} * {o}.tanh()", "torch.maximum({z}, {o})"),
    *(
        "torch.logaddexp({z}, {o})",
        "torch.stack([{z}, {o}]).logsumexp(0)",
        "{z}.softmax({d}) * {o}",
    ),
    *("torch.where({z} > {o}, {z}, 0.5 * {o})", "torch.lerp({z}, {o}, 0.3)", "{z} + {o}.detach()"),
    *("0.5 * ({z}.softmax({d}) + {o}.softmax({d}))", "{z}.log_softmax({d}) - {o}.log_softmax({d})"),
    "F.kl_div({z}.log_softmax({d}), {o}.log_softmax({d}), reduction='none', log_target=True)",
    "torch.cat([{z}, {o}], {d})",
)
IN_PLACE = (
    *("{z}.mul_({f})", "{z}.add_({f})", "{z}.div_(tem)", "{z} /= {f}", "{z}.tanh_()", "{z} += {c}"),
    *(
        "{z}.clamp_(-3, 3)",
        "{z}.masked_fill_({cw} > 1.2, -3.0)",
        "{z}.sub_({row1})",
        "{z} *= {row1}",
    ),
    *("{z}.narrow({d}, 0, 2).fill_(-1.0)", "{z}.narrow({d}, 3, 2).mul_(0.5)", "{z}.neg_()"),
    *("{z}.scatter_({d}, {lab1}, -1.0)", "{z}.nan_to_num_()", "{z}.copy_({z} * 0.5)"),
)
# Another number of rows at a time changes these, so that they must stay as they are.
MIXING = (
    *("{z}.softmax({e})", "{z}.cumsum({e}) * 0.3", "{z} - {z}.mean({e}, keepdim=True)"),
    *("{z} / {z}.norm()", "{z} - {z}.max()", "F.dropout({z}, 0.0)"),
)

# From classes to rows and another dimension, which is as large as one of the rows: of temperatures,
# of pairs of rows. In some of them rows meet that dimension, so that they must stay as they are.
COINCIDING = (
    "({last}.unsqueeze(-2) * torch.linspace(0.5, 1.5, {last}.shape[-2]).view(-1, 1)"
    " - {last}.logsumexp(-1)[..., None, None]).sigmoid().mean(-1)",
    "({last}.unsqueeze(-2) * torch.linspace(0.5, 1.5, {last}.shape[-2]).view(-1, 1)"
    " - {last}.logsumexp(-1, keepdim=True)).sigmoid().mean(-1)",
    "({last}.unsqueeze(-2) + torch.arange({last}.shape[0]).view(-1, 1)"
    " * {last}.mean(-1, keepdim=True)).tanh().sum(-1)",
    "({last}.unsqueeze(0) - {last}.unsqueeze(1)).abs().mean(-1)",
    "({last}[:1].unsqueeze(-2) * torch.linspace(0.5, 1.5, {last}.shape[-2]).view(-1, 1)"
    " - {last}.logsumexp(-1, keepdim=True)).tanh().mean(-1)",
)
# Of rows and classes at once.
WHOLE = (
    *(f"torch.linalg.vector_norm({{z}}, {order})" for order in (1, 2, 3, "0.5")),
    *("{z}.norm()", "{z}.mean()", "{z}.sum() / 9", "{z}.nansum() / 9", "({z} > 1).any()"),
    *("torch.linalg.vector_norm({z}, 2, dtype=torch.float64)", "{z}.round().count_nonzero()"),
    *("torch.linalg.vector_norm(({z}.detach() > 0.5).float(), 0)", "{z}.detach().amax()"),
    *("{z}.sum((0, 1))", "{z}.mean((0, -1))", "{z}.square().sum((-2, -1), keepdim=True)"),
    "({z}.detach().float().view(torch.int32) > 1065353216).sum()",
)
# From classes to rows.
REDUCTIONS = (
    *("{z}.sum({d})", "{z}.mean({d})", "{z}.logsumexp({d})", "{z}.std({d})", "{z}.var({d})") * 2,
    *("{z}.norm(dim={d})", "{z}.abs().sum({d})", "{z}.square().mean({d})", "({z} > 0).sum({d})"),
    *("{z}.gather({d}, {lab1}).squeeze({d})", "({z} * {c}).sum({d})", "({z} * {g}).sum({d})") * 2,
    *("{z}.log_softmax({d}).gather({d}, {lab1}).squeeze({d})",) * 2,
    *("{z}.logsumexp({d}) - {z}.gather({d}, {lab1}).squeeze({d})",),
    *("-({z}.softmax({d}) * {z}.log_softmax({d})).sum({d})",) * 2,
    *("torch.special.entr({z}.softmax({d})).sum({d})", "{z}.softmax({d}).square().sum({d})"),
    *("F.cross_entropy({first}, {lab}, reduction='none')", "F.cross_entropy({first}, {lab})") * 2,
    *(
        "F.cross_entropy({first}, {lab}, label_smoothing=0.1)",
        "F.nll_loss({first}.log_softmax(1), {lab})",
    ),
    "F.cross_entropy({first}, {lab}.masked_fill({mask}, -100))",
    *(
        "({z} > {z}.gather({d}, {lab1})).sum({d})",
        "({z} >= {row1}).any({d})",
        "{z}.softmax({d}).prod({d})",
    ),
    *("F.cosine_similarity({z}, {g}, {d})", "F.softplus({z} - {z}.gather({d}, {lab1})).sum({d})"),
    *("({z}.softmax({d}) - F.one_hot({lab}, {v}).movedim(-1, {d})).square().sum({d})",),
    *(
        "{z}.movedim({d}, -1) @ c[:{v}].to({z}.dtype)",
        "{z}.softmax({d}).movedim({d}, -1) @ c[:{v}].to({z}.dtype)",
    ),
    *("Picked.apply({z}, {lab1}, {d})[0]", "Picked.apply({z}, {lab1}, {d})[1]"),
    # rows without a gradient, beside others of the same head
    *(
        "{z}.logcumsumexp({d}).mean({d}) + {z}.detach().cumsum({d}).amax({d})",
        "{z}.tanh().std({d}) - {z}.detach().sort({d}).values.diff(dim={d}).amax({d})",
    )
    * 2,
    "{z}.softmax({d}).cumsum({d}).sub(0.5).abs().sum({d})",
    "(1 + {z} - {z}.gather({d}, {lab1})).clamp_min(0).sum({d})",
    "F.binary_cross_entropy_with_logits({z}, {g}.sigmoid().to({z}.dtype), reduction='none').mean({d})",
    # of probabilities that are 0 or 1, whose logarithms have a derivative of their own
    "F.binary_cross_entropy(({z} * 30).sigmoid(), {g}.sigmoid().to({z}.dtype), reduction='none').mean({d})",
    "F.huber_loss({z}, {g}.to({z}.dtype), reduction='none').mean({d})",
    "F.pad({last}, (0, 3), value=-9.0).logsumexp(-1)",
    "torch.lerp({z}, {g}.to({z}.dtype), tem.detach().to({z}.dtype)).logsumexp({d})",
    # the bits of floats
    "({z}.detach().float().view(torch.int32) > 1065353216).sum({d})",
    "({z}.detach().to(torch.bfloat16).view(torch.int16) > 16256).sum({d})",
)
ORDERED = (
    *(
        "{z}.amax({d})",
        "{z}.max({d}).values",
        "{z}.argmax({d})",
        "{z}.min({d}).values",
        "{z}.amin({d})",
    ),
    *("{z}.softmax({d}).amax({d})", "{z}.argmax({d}) == {lab}", "{z}.topk(3, {d}).values.sum({d})"),
    *("{z}.sort({d}).values.narrow({d}, 1, 2).sum({d})", "{z}.median({d}).values"),
    *(
        "{z}.kthvalue(2, {d}).values",
        "{z}.float().quantile(0.3, dim={d})",
        "{z}.topk(2, {d}).indices",
    ),
    *("{z}.aminmax(dim={d}).max", "{z}.topk(4, {d}).values.logsumexp({d}) - {z}.logsumexp({d})"),
    "({z}.topk(3, {d}).indices == {lab1}).any({d})",
    "({z}.sort({d}, descending=True).values * {cw}).sum({d})",
)
PAIR_REDUCTIONS = (
    *(
        "({z} * {o}).sum({d})",
        "({z} - {o}).square().mean({d})",
        "F.cosine_similarity({z}, {o}, {d})",
    ),
    "F.kl_div({z}.log_softmax({d}), {o}.softmax({d}), reduction='none').sum({d})",
    "({z}.softmax({d}) * ({z}.log_softmax({d}) - {o}.log_softmax({d}))).sum({d})",
    "(torch.logaddexp({z}.log_softmax({d}), {o}.log_softmax({d})) - {o}.log_softmax({d})).mean({d})",
    "({z}.softmax({d}) - {o}.softmax({d})).abs().sum({d})",
)

ROWS = (
    *(
        "{r} * {f}",
        "{r} + {q}",
        "{r} * {q}",
        "{r} - {q}.detach()",
        "{r}.clamp(-2, 2)",
        "{r}.tanh()",
    ),
    *("{r}.clamp(-3, 3).exp()", "F.softplus({r})", "torch.maximum({r}, {q})", "{r}.float()"),
    *("{r}.masked_fill({r} > 2, 2.0)", "torch.where({r} > {q}, {r}, {q} * 0.5)", "{r}.detach()"),
)
# Whose gradients are known before: sums of the rows, and rows with factors.
LINEAR = (
    *(
        "{r}.sum()",
        "{r}.mean()",
        "{r}.float().mean() * 2",
        "({r} * {s}).sum()",
        "-({r} * {s}).mean()",
    ),
    *("({r} * {m}).sum() / {m}.sum().clamp_min(1)", "{r}.flatten()[::2].sum()"),
)
# Whose gradients depend on the rows.
NONLINEAR = (
    *("{r}.square().mean()", "{r}.clamp(-3, 3).exp().sum()", "{r}.sigmoid().mean()"),
    *(
        "((1 - (-{r}.abs()).exp()).square() * {r}).mean()",
        "{r}.sum().tanh()",
        "F.softplus({r}.mean())",
    ),
    *("({r} * {r}.detach()).sum()", "({r}.sum() * {s}.sum())"),
)
