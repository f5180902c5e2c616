"""The statements of programs that reduce logits over their classes; see :mod:`tests.fuzz.heads`.

Names: those of :mod:`tests.fuzz.grammar`, a temperature ``tem``, a factor of each row ``s``, a class
vector ``u``. ``%`` is a number of the statement, so that ``r%`` is a new name. Holes: ``{z}`` logits,
``{d}`` the dimension of their ``{V}`` classes, ``{y}`` other logits of the same shape, ``{lab}``
labels of their rows, ``{lab1}`` and ``{labk}`` with a dimension of one or of two where the classes
are, ``{keep}`` rows with a dimension of one there, ``{row}`` rows without, ``{given}`` values like
the logits.
"""

from __future__ import annotations

from .grammar import CASTS, CLASS_SLICES, MOVES, V
from .grammar import INPUTS as _INPUTS

INPUTS: dict[str, str] = {
    **{name: _INPUTS[name] for name in ("x", "w", "w2", "wt")},
    "b": f"torch.randn({V}){{dtype}}{{grad}}",
    "u": f"torch.randn({V}){{other}}{{grad}}",
    "cw": f"torch.rand({V}){{dtype}}",
    "q": f"torch.rand(n, 3, {V}).softmax(-1){{other}}{{grad}}",
    "s": "(torch.rand(n, 3, 1) + 0.5){other}{grad}",
    "tem": "(torch.rand(()) + 0.5){other}{grad}",
    "t": _INPUTS["t"],
    "bits": f"{_INPUTS['t']}.view(torch.int32)",
    "m": _INPUTS["m"],
    "mean": _INPUTS["mean"],
    "e": _INPUTS["e"],
    "ids": _INPUTS["ids"],
    "k": "1",
    "i": "torch.tensor(1)",
    "tau": "0.4 * n",
}

HEADS = (
    *["F.linear(x, w)"] * 6,
    *["F.linear(x, w, b)"] * 4,
    "x @ w.T",
    "F.linear(x + F.embedding(ids, w), w)",
    "F.linear(x.bfloat16(), w)",
    "F.linear(x, w.bfloat16())",
    "F.linear(x.reshape(-1, 4), w)",
    "F.linear(x.reshape(-1, 4), w, b)",
    "F.linear(x.detach(), w)",
    "F.linear(x, w.detach())",
    "F.linear(x, w).float()",
    "F.linear(x, w, b).float()",
    "F.linear(x[:, :-1], w)",
    # as many rows, or hidden values, as classes
    f"F.linear(x[:, torch.arange({V}) % 3], w)",
    f"F.linear(x[:, torch.arange({V}) % 3].repeat(1, 1, 3)[..., 1:], w.repeat(1, 3)[:, 1:])",
)

# ---------------------------------------------------------------- from logits to logits

VIEWS = (
    *["{z}.view(-1, {V})", "{z}.reshape(-1, {V})", "{z}.flatten(0, 1)"] * 4,
    *["{z}.transpose(1, -1)", "{z}.transpose(0, 1)", "{z}[:, :-1]", "{z}[..., :-1, :]"] * 2,
    *["{z}[:, -1]", "{z}[0]", "{z}.select(0, 1)", "{z}.select(1, -1)", "{z}[1:]"] * 2,
    *["{z}.unbind(0)[{j}]", "{z}.chunk(2)[{j}]", "{z}.split(1)[{j}]", "{z}.contiguous()"],
    *["{z}.split([1, 2], 1)[1]", "{z}.squeeze(0)", "{z}.unsqueeze(0)", "{z}[m]", "{z}[:, m[0]]"],
    *["torch.split({z}, 1)[{j}]", "torch.split({z}, [1, 2], 1)[1]"],
    *["{z}[True]", "{z}[:, True]", "{z}.mT", "{z}.mT.flatten(0, 1)", "{z}.transpose(0, -1)"],
)
TEMPERATURES = (
    *("{z} / tem", "{z} * tem", "{z} / s", "s * {z}", "{z} / 0.7", "{z} * 1.5", "{z} / tem.item()"),
    *("{z} / {keep}.detach().abs().clamp(min=0.5)", "{z} / {keep}.exp().clamp(0.5, 2)"),
    *("{z}.float() / tem", "{z}.float() / s", "{z} / (tem * 2)", "torch.div({z}, tem)"),
)
SOFTCAPS = (
    *("15 * torch.tanh({z} / 15)", "{z}.tanh() * 3", "{z}.clamp(-2, 2)", "{z} + 1", "-{z}"),
    *("F.logsigmoid({z})", "{z}.sigmoid()", "F.softplus({z})", "{z} * 0.5 - 1", "{z}.abs()"),
    *("halved({z}, 2)", "halved({z}, 24)", "{z} * 1e10", "{z} * 1e-3"),
)
# Edits of the linear's operands: biases, classes in another order, factors before a function.
EDITS = (
    *("{z} + u", "{z} - u", "u - {z}", "{z} * 0.7 + u", "({z} + 1) + cw", "{z} / tem + u"),
    *("{z}.float() + u", "{z}.index_select({d}, torch.arange({V}).flip(0))", "{z} + b + u"),
    *("{z}[..., torch.arange({V} - 1, -1, -1)]", "{z}.narrow({d}, 0, {V})", "{z} / s[:1, :1]"),
    *("torch.tanh({z} * tem)", "torch.tanh({z} / s) * 2", "F.softplus({z} / tem)"),
    *(
        "{z} - {lab1}.to(torch.uint8)",
        "{z} / ({lab1} + 2)",
        "{z} * ({lab1} > 2)",
        "{z} * (tem * 0) + u",
    ),
    *("torch.stack([{z}, {z}], 1)[:, 1]", "{z} * (1 + tem).detach() - cw"),
    "torch.stack([{z}, {z}], 1)[..., torch.arange({V}).flip(0)][:, 0]",
    "torch.stack([{z}, {z}], 0).index_select(-1, torch.arange({V} - 1, -1, -1))[1]",
)
# What is given at a class: masks, factors, margins at a target, values of all classes.
MASKS = (
    *("{z}.masked_fill(u > 0.4, -9)", "{z}.masked_fill({given} > 0.3, -5.0)", "{z} * cw"),
    *("torch.where(cw > 0.7, -6.0, {z})", "torch.where({given} > 0.2, {z}, {z} * 0.5)"),
    *("torch.where({z} > 0.3, {z}, 0.2 * {z} + 0.24)", "{z} / (cw + 0.5)", "{z} * u.detach()"),
    *("torch.tanh({z} * cw)", "{z} + {given}.detach()", "{z} - 0.35 * F.one_hot({lab}, {V})"),
    *("2 * ({z} - F.one_hot({lab}, {V}).to({z}.dtype) * 0.5)", "{z} * (1 + F.one_hot({lab}, {V}))"),
    *("{z} - torch.zeros_like({z}).scatter({d}, {lab1}, 0.4)", "{z}.clamp(-0.9, 0.9).acos()"),
    *(
        "{z}.masked_fill(F.one_hot({lab}, {V}).bool(), -4)",
        "torch.where({z}.detach() > 0, {z}, {z} * 0.7)",
    ),
    *("torch.where(torch.arange({V}) == {lab}.unsqueeze(-1), {z} - 0.4, {z})", "{z} * {given}"),
    *("{z} - F.one_hot({lab}, {V}) * {keep}.detach()", "torch.sigmoid({z} - {keep}.detach())"),
    *("torch.sin({z} - F.one_hot({lab}, {V}) * u.detach())", "{z}.masked_fill(cw > 0.9, {f})"),
    *("{z}.scatter({d}, {lab1}, {z}.gather({d}, {lab1}) - 0.35)", "{z}.scatter({d}, {lab1}, -3.0)"),
    *(
        "{z}.scatter({d}, {lab1}, 0.8 * ({z}.gather({d}, {lab1}) / 9).square())",
        "{z}.scatter_add({d}, {lab1}, {z}.gather({d}, {lab1}) * 0.3)",
    ),
    "{z}.index_fill({d}, torch.tensor([0, {V} - 1]), -6.0)",
    "{z} + ({keep} > 0.4) * -1e9",
    # compared with what is given, and with rows of themselves
    *("torch.where({z} > {given}, {z}, -{z})", "torch.where({z} > 0.2, {z}, {given}.detach())"),
    *(
        "{z}.masked_fill({z} < {keep}.detach(), -9)",
        "F.relu({z} - {z}.gather({d}, {lab1}).detach())",
    ),
    "{z}.masked_fill({z} < {z}.detach().topk(3, {d}).values.amin({d}, True), -9)",
    *("torch.where({keep} > 0.4, {z}, 2.0)", "{z}.masked_fill({keep} > 0.5, 0.0).tanh()"),
    "{z}.masked_fill(({keep} > 0.7) & (cw > 0.5), -torch.inf)",
    "{z}.masked_fill(cw > 0.7, torch.finfo({z}.dtype).min)",
    *("torch.where(cw > 0.7, {z} - 0.4, {z})", "torch.where(u > 0.3, {z} * 2, {z} * 2 + cw)"),
    *("{z} - halved({given}, 24)", "{z} - 0.3 * halved(F.one_hot({lab}, {V}).float(), 24)"),
    "{z}.scatter({d}, {lab1}, halved({z}.gather({d}, {lab1}), 24))",
    "{z} + (F.one_hot({lab}, {V}) * 0.3).where(F.one_hot({lab}, {V}).bool(), -1.0)",
    "{z} + F.one_hot({lab}, {V}).masked_fill(F.one_hot({lab}, {V}).bool(), 1.7)",
    *("torch.where({keep} > 0.1, {z}, 0.0)", "{z}.masked_fill({keep} > 0.1, -3.0)"),
)
IN_PLACE = (
    *("{z} /= tem", "{z}.div_(tem)", "{z} *= 0.5", "{z}.div_(s)", "{z} -= {keep}", "{z}.tanh_()"),
    *("{z} += u", "{z}.mul_(1.5)", "{z}.sub_({keep})", "{z}.masked_fill_(cw > 0.6, -7)"),
    *("{z} *= cw", "{z} -= 0.3 * F.one_hot({lab}, {V})"),
    *("{z}[..., {V} - 1:] = -7", "{z}[..., 0] = -4.0", "{z}[..., cw > 0.8] = -6"),
    *("{z}[{given} > 0.5] = -5", "{z}.scatter_({d}, {lab1}, -2.0)", "{z}[0] = 0.5"),
    *(
        "{z}.scatter_({d}, {lab1}, {z}.gather({d}, {lab1}) - 0.35)",
        "{z}.index_fill_({d}, torch.tensor([0]), -6.0)",
    ),
)
# Tensors that are read before, and perhaps after.
CHANGES = ("t.copy_((t + 1) % 7)", "cw.mul_(0.5)", "t[0] = 2", "cw[2] = 0.1", "{row}[:1] = 0")
NORMAL = (
    *["{z}.log_softmax({d})", "F.log_softmax({z}, dim={d})", "{z}.softmax({d})"] * 3,
    *("F.log_softmax({z}.float(), {d})", "F.softmax({z}, {d}, dtype=torch.float32)"),
    *("{z} - {z}.logsumexp({d}, keepdim=True)", "{z} - {keep}", "{z} - {keep}", "{z} + {keep}"),
    *("{z} - {z}.amax({d}, keepdim=True)", "{z} - {z}.max({d}, keepdim=True).values.detach()"),
    *("{z} - {z}.detach().amax({d}, True)", "{z}.softmax({d}).log()", "{z}.exp()", "{z} * {keep}"),
)
PRODUCTS = (
    *("{y} * {z}", "{y} - {z}", "{y} + {z}", "{z} * {z}", "{z} ** 2", "{z}.square()", "{z} * u"),
    *("{z} * {given}", "{given} * {z}", "{z} + u", "{z} - {given}", "{y}.exp() * {z}", "-{z}"),
    *("{z} * F.one_hot({lab}, {V})", "torch.special.entr({z})", "{z} * {f}", "{z} - {f}"),
    *("{z} * -{given}", "(0.5 * {given}).float() * {z}", "{z} * (1 - {given})"),
    *("{z} * cw", "{z} / {keep}", "{z}.exp()", "{z}.detach() * {y}", "{z} * {z}.detach()"),
)
DETACHED = ("{z}.detach()", "{z}.data", "{z}.clone()", "{z}.double()", "{z} * 1")

BEFORE = {
    VIEWS: 30,
    CASTS: 15,
    ("{z}.float()",): 15,
    TEMPERATURES: 20,
    SOFTCAPS: 10,
    EDITS: 15,
    MASKS: 15,
    IN_PLACE: 10,
    MOVES: 5,
    CLASS_SLICES: 1,
    ("{pointwise}",): 2,
}
BETWEEN = {
    NORMAL: 30,
    PRODUCTS: 20,
    VIEWS: 20,
    ("{z}.float()",): 8,
    DETACHED: 8,
    TEMPERATURES: 8,
    IN_PLACE: 4,
    SOFTCAPS: 3,
    EDITS: 4,
    MASKS: 6,
}

# ---------------------------------------------------------------- from logits to rows

Recipes = tuple[tuple[str, ...], ...]

SUMS: Recipes = (
    ("r% = (({z} > 0) + ({z} < 1)).sum({d})",),
    ("r% = (({z} > 0.2) + F.one_hot({lab}, {V}).bool()).sum({d}).float()",),
    ("r% = (({z} > 0).to(torch.uint8) - 1).sum({d})",),
    ("r% = {z}.sum({d})",),
    ("r% = ({z} >= {z}.gather({d}, {lab1}).detach()).sum({d})",),
    ("r% = ({z} >= {z}.amax({d}, True).detach()).sum({d})",),
    ("r% = {z}.sum({d}, keepdim=True)",),
    ("r% = {z}.mean({d})",),
    ("r% = {z}.mean({d}, True)",),
    ("r% = torch.sum({z}, dim=({d},))",),
    ("r% = {z}.sum()",),
    ("r% = {z}.mean()",),
    ("r% = {z}.mean(dim={d}, dtype=torch.float32)",),
    ("r% = ({z} * u).sum({d})",),
    ("r% = ({z}.softmax({d}) * u).sum({d})",),
    ("r% = ({z} * {given}).sum({d})",),
    ("r% = -({given} * {z}.log_softmax({d})).sum({d})",),
    ("r% = {z}.softmax({d}).square().sum({d})",),
    ("p% = {z}.softmax({d})", "r% = (p% * p%).sum({d})"),
    ("lp% = {z}.log_softmax({d})", "r% = -lp%.mean({d})"),
    ("lp% = {z}.log_softmax({d})", "r% = -(F.one_hot({lab}, {V}) * lp%).sum({d})"),
    ("r% = (F.one_hot({lab}, {V}).to({z}.dtype) * {z}).sum({d})",),
    ("r% = (F.one_hot({lab}, {V}) * {z}).sum({d}) - {z}.logsumexp({d})",),
    ("r% = ({y} * {z}).sum({d})",),
    ("r% = {z}.float().softmax({d}) @ u.float()",),
    ("r% = torch.matmul({z}.softmax({d}), u.to({z}.dtype).unsqueeze(-1))",),
    ("r% = torch.einsum('...v,v->...', {z}.float().log_softmax({d}), u.float())",),
    ("p% = {z}.softmax({d})", "r% = torch.einsum('...v,...v->...', p%, {z}.log_softmax({d}))"),
    ("r% = F.kl_div({z}.log_softmax({d}), {given}, reduction='none').sum({d})",),
    ("r% = F.kl_div({z}.log_softmax({d}), {given}.log(), reduction='sum', log_target=True)",),
    ("r% = F.kl_div({given}.log(), {z}.softmax({d}), reduction='none').sum({d})",),
    ("r% = F.kl_div({z}.log_softmax({d}), {given}, reduction='batchmean')",),
    ("lp% = {z}.log_softmax({d})", "r% = ({given} * ({given}.log() - lp%)).sum({d})"),
    ("lp% = {z}.log_softmax({d})", "r% = (lp%.exp() * (lp% - {given})).sum({d})"),
    (
        "q% = (F.one_hot({lab}, {V}) + F.one_hot({lab}, {V})) * 0.5",
        "r% = F.kl_div({z}.log_softmax({d}), q%, reduction='sum')",
    ),
    ("r% = F.mse_loss({z}.softmax({d}), {given}, weight={given} + 0.5)",),
    ("with torch.no_grad(): k% = s * 2", "r% = ({z} / k%).logsumexp({d})"),
    (
        "k% = {z}.gather({d}, {lab1})",
        "with torch.no_grad(): v% = k%.view(k%.shape)",
        "r% = F.relu(1 + {z} - v%).sum({d})",
    ),
)
BINARIES: Recipes = (
    (
        "r% = F.binary_cross_entropy_with_logits({z}, {given}.to({z}.dtype), reduction='none').sum({d})",
    ),
    ("r% = F.binary_cross_entropy_with_logits({z}, {given}, pos_weight=cw, reduction='sum')",),
    ("r% = F.binary_cross_entropy_with_logits({z}, {given}.detach(), weight=cw)",),
    (
        "r% = F.binary_cross_entropy_with_logits({z}, {given}.detach().to({z}.dtype), "
        "weight={z}.sigmoid().detach(), reduction='sum')",
    ),
    ("r% = (F.softplus({z}) - {given} * {z}).sum({d})",),
    ("r% = -({given} * F.logsigmoid({z}) + (1 - {given}) * F.logsigmoid(-{z})).sum({d})",),
    ("r% = (F.one_hot({lab}, {V}) * {z}.tanh()).sum({d})",),
    ("p% = {z}.sigmoid()", "r% = ((1 - p%) ** 2 * {given} * F.softplus(-{z})).sum({d})"),
    ("r% = ({z}.tanh() * cw + {z}.sigmoid() * {given}).mean({d})",),
    ("r% = ({z}.clamp(min=0) - {z} * {given} + torch.exp(-{z}.abs()).log1p()).mean({d})",),
    ("r% = ({given} / (1 + torch.exp(-{z}))).sum({d})",),
)
# Losses of each element.
ELEMENTS: Recipes = tuple(
    (f"r% = F.{loss}, reduction={reduction}",)
    for loss in (
        "mse_loss({z}.softmax({d}), {given}",
        "l1_loss({z}.sigmoid(), {given}",
        "smooth_l1_loss({z}, {given}, beta=0.3",
        "huber_loss({z}.softmax({d}), F.one_hot({lab}, {V}).to({z}.dtype), delta=0.2",
        "soft_margin_loss({z}, {given} - 0.5",
        "mse_loss({z}.log_softmax({d}), {y}.detach()",
    )
    for reduction in ("'none').sum({d})", "'mean')", "'sum')")
)
# Functions of the softmax, of the logit and of the target's logit.
FUNCTIONS: Recipes = (
    ("p% = {z}.softmax({d})", "r% = -(p% * (p% + 0.01).log()).sum({d})"),
    ("p% = {z}.softmax({d})", "r% = (p% - F.one_hot({lab}, {V})).square().sum({d})"),
    ("p% = {z}.softmax({d})", "r% = (p% - {given}).square().mean({d})"),
    ("p% = {z}.softmax({d})", "r% = ((1 - p%) ** 2 * p%.log() * F.one_hot({lab}, {V})).sum({d})"),
    ("p% = {z}.softmax({d})", "r% = torch.where(p% > 0.2, p% * {z}, 0.0).sum({d})"),
    ("r% = F.relu(1 + {z} - {z}.gather({d}, {lab1})).sum({d})",),
    ("r% = ({z} - {z}.gather({d}, {lab1})).exp().log1p().mean({d})",),
    ("r% = ({z}.softmax({d}).clamp(0.05, 0.5).log() * u).sum({d})",),
    ("r% = ({z}.softmax({d}).sqrt() * {given}).sum()",),
    ("lp% = {z}.log_softmax({d})", "r% = (lp% >= lp%.gather({d}, {lab1})).float().mean({d})"),
    ("lp% = {z}.log_softmax({d})", "r% = torch.tanh(lp% - lp%.gather({d}, {lab1})).sum({d})"),
    ("r% = ({z}.sigmoid() - {given}).square().sum({d})",),
    (
        "v% = {z}.gather({d}, {lab1})",
        "t.copy_((t + 1) % 7)",
        "r% = F.relu(1 + {z} - v%).sum({d})",
    ),
    (
        "v% = {z}.gather({d}, {lab1})",
        "v%.detach().mul_(0.5)",
        "r% = ({z} > v%).float().sum({d}) * {z}.logsumexp({d})",
    ),
    (
        "v% = {z}.gather({d}, {lab1}).squeeze({d})",
        "k% = v%.unsqueeze({d})",
        "v%.detach().mul_(0.5)",
        "r% = F.relu(1 + {z} - k%).sum({d})",
    ),
    ("lp% = {z} - {z}.logsumexp({d}, True)", "r% = (lp% > lp%.gather({d}, {lab1})).sum({d})"),
    ("p% = {z} + {z}.logsumexp({d}, True)", "r% = (p% > p%.gather({d}, {lab1})).sum({d})"),
    (
        "m% = {z}.softmax({d}).max({d})",  # pseudo-labels
        "lp% = {z}.log_softmax({d}).gather({d}, m%.indices.unsqueeze({d})).squeeze({d})",
        "r% = m%.values + lp% * (m%.values > 0.3)",
    ),
    ("e% = {z}.logsumexp({d})", "r% = torch.zeros(e%.shape)", "r%.copy_(e%)"),
    (
        "y% = {z}.detach().topk(2, {d}).indices",
        "r% = {z}.log_softmax({d}).gather({d}, y%).sum({d})",
    ),
    (
        "lp% = {z}.float().log_softmax({d}).detach()",
        "r% = (lp%.topk(2, {d})[0] == lp%.gather({d}, {lab1})).float().sum({d})",
    ),
    (
        "v% = {z}.mean({d})",
        "v%.detach().sub_(1)",
        "r% = F.softplus({z} - v%.unsqueeze({d})).sum({d})",
    ),
    (
        "lp% = {z}.log_softmax({d})",
        "v% = lp%.gather({d}, {lab1}).squeeze({d})",
        "c% = (lp% > v%.unsqueeze({d})).sum({d})",
        "o% = torch.zeros({V}).add_(0.5)",
        "r% = v% * (1 + c%) + (lp%.exp() * o%).detach().sum({d})",
    ),
)
ENTROPIES: Recipes = (
    (
        "with torch.no_grad(): e% = {z}.logsumexp({d}, keepdim=True)",
        "r% = ({z}.softmax({d}) * {z} * e%.sigmoid()).sum({d})",
    ),
    ("lp% = {z}.log_softmax({d})", "p% = lp%.exp()", "r% = -(p% * lp%).sum({d})"),
    ("p% = {z}.softmax({d})", "lp% = {z}.log_softmax({d})", "r% = -(p% * lp%).sum({d})"),
    ("p% = {z}.softmax({d})", "r% = {z}.logsumexp({d}) - (p% * {z}).sum({d})"),
    ("p% = F.softmax({z}, dim={d})", "r% = -(p% * p%.log()).sum({d}, keepdim=True)"),
    ("p% = {z}.softmax({d})", "r% = torch.special.entr(p%).sum({d})"),
    ("lp% = {z}.log_softmax({d})", "r% = -(lp%.exp() * lp%.detach()).sum({d})"),
    ("lp% = {z}.float().log_softmax({d})", "r% = (lp%.exp() * lp% ** 2).sum({d})"),
    (
        "lp% = {z} - {z}.logsumexp({d}, keepdim=True)",
        "p% = F.softmax(lp%, {d})",
        "lp% = torch.clamp(lp%, min=torch.finfo(lp%.dtype).min)",
        "r% = -(lp% * p%).sum({d})",
    ),
    ("r% = torch.distributions.Categorical(logits={z}, validate_args=False).entropy()",),
    ("r% = ({z}.softmax({d}) * ({z}.logsumexp({d}, keepdim=True) - {z})).sum({d})",),
    ("p% = {z}.softmax({d})", "r% = -torch.xlogy(p%, p%).sum({d})"),
    ("p% = ({z} / 2).softmax({d})", "r% = (p% * {z}).sum({d}) - ({z} / 2).logsumexp({d})"),
    ("lp% = {z}.log_softmax({d})", "r% = (({f} - lp%) * {given}).sum({d})"),
    ("r% = torch.cat([-(c.softmax(-1) * c.log_softmax(-1)).sum(-1) for c in {z}.split(2)])",),
    ("r% = torch.cat([torch.special.entr(c.softmax(-1)).sum(-1) for c in ({z}[:1], {z}[1:])])",),
    (
        "k% = {given}[:1].detach()",  # of each piece
        "r% = torch.cat([torch.special.entr((c * k%).softmax(-1)).sum(-1) for c in {z}.split(1)])",
    ),
)
LSES: Recipes = (
    ("r% = {z}.logsumexp({d})",),
    ("r% = torch.logsumexp({z}, dim={d}, keepdim=True)",),
    ("r% = {z}.logsumexp(({d},)).square()",),
    ("r% = {z}.exp().sum({d}).log()",),
    ("k% = {z}.amax({d}, keepdim=True)", "r% = k% + ({z} - k%).exp().sum({d}, True).log()"),
    (
        "k% = {z}.max({d}, keepdim=True).values.detach()",
        "r% = (k% + ({z} - k%).exp().sum({d}, keepdim=True).log()).squeeze({d})",
    ),
    (
        "k%, i% = {z}.max({d}, keepdim=True)",
        "e% = torch.exp({z} - k%)",
        "r% = torch.log(e%.sum({d})) + k%.squeeze({d})",
    ),
    (
        "k% = {z}.detach().amax({d}, keepdim=True)",
        "e% = torch.exp({z} - k%)",
        "p% = e% / e%.sum({d}, keepdim=True)",
        "r% = p%.gather({d}, {lab1})",
    ),
)
PICKS: Recipes = (
    ("r% = {z}.gather({d}, {lab1})",),
    ("r% = {z}.gather({d}, {lab1}).squeeze({d})",),
    ("r% = torch.gather({z}, {d}, {labk})",),
    ("r% = {z}.take_along_dim({lab1}, {d})",),
    ("r% = {z}.take_along_dim({labk} - 3, dim={d})",),
    ("r% = {z2}[torch.arange({N}), {lab}]",),
    ("r% = {z2}[torch.arange({N}), {lab} - 3]",),
    ("r% = {z2}[range({N}), {lab}]",),
    *(
        (f"b% = torch.arange({{z}}.shape[0]){of_b}", f"r% = {{z}}[b%, {of_s}, {{lab}}{less}]")
        for of_b in ("[:, None]", ".unsqueeze(1)", ".view(-1, 1)")
        for of_s in ("torch.arange({z}.shape[1])", "torch.arange({z}.shape[1])[None]")
        for less in ("", " - 3")
    ),
    *(
        (f"i% = torch.arange({{N}}){cast}.to(torch.int64)", "r% = {z2}[i%, {lab}]")
        for cast in (".to(torch.bool)", ".bfloat16()", ".to(torch.int32)")
    ),
    ("k% = torch.vmap(lambda i: i // 2)({lab})", "r% = {z2}[torch.arange({N}), k%]"),
    ("r% = {z2}.log_softmax(-1)[list(range({N})), {lab} - 1]",),
    ("r% = {z2}.log_softmax(-1)[[*range(1, {N}), 0], {lab}]",),
    ("lp% = {z}.log_softmax({d})", "r% = lp%.gather({d}, {lab1})"),
    ("lp% = F.log_softmax({z}.float(), {d})", "r% = -lp%.gather({d}, {lab1}).squeeze({d})"),
    ("lp% = {z}.log_softmax({d})", "r% = lp%.gather({d}, {labk})"),
    ("r% = ({z}.softmax({d}) + 0.01).log().gather({d}, {lab1})",),
    ("r% = {z}.softmax({d}).clamp(0.05, 0.6).sqrt().gather({d}, {labk})",),
    (
        "lp% = {z}.log_softmax({d})",
        "r% = torch.where(lp% < -2, lp%, -lp%.square()).gather({d}, {lab1})",
    ),
    ("r% = F.nll_loss(({z2}.softmax(-1) + 0.01).log(), {lab}, reduction='none')",),
    ("r% = F.nll_loss({z2}.sigmoid() - 2, {lab})",),
    ("lp% = {z}.log_softmax({d})", "r% = lp%.take_along_dim({labk}, {d}).sum({d})"),
    ("lp% = {z2}.log_softmax(-1)", "r% = lp%[torch.arange({N}), {lab}]"),
    ("p% = {z}.softmax({d})", "r% = (1 - p%.gather({d}, {lab1})) ** 2"),
    ("r% = {z}.gather({d}, {lab1}).squeeze({d}) - {z}.logsumexp({d})",),
    ("r% = {z}.gather({d}, {labk}) - {z}.logsumexp({d}, keepdim=True)",),
    ("r% = ({z} - {z}.logsumexp({d}, keepdim=True)).gather({d}, {lab1})",),
    ("r% = torch.distributions.Categorical(logits={z}, validate_args=False).log_prob({lab})",),
    (
        "r% = torch.cat([p.log_softmax(-1).gather(-1, i.unsqueeze(-1)).squeeze(-1) "
        "for p, i in zip({z}.unbind(0), {lab}.unbind(0))])",
    ),
    (
        "r% = torch.stack([F.log_softmax(p, -1).gather(-1, i.unsqueeze(-1)).squeeze(-1) "
        "for p, i in zip({z}, {lab})])",
    ),
    (
        "r% = torch.stack([p.gather(-1, i.unsqueeze(-1)).squeeze(-1) - p.logsumexp(-1) "
        "for p, i in zip({z}.unbind(0), {lab}.unbind(0))])",
    ),
    ("r% = torch.cat([(c.softmax(-1) * c.log_softmax(-1)).sum(-1) for c in {z}.split(2)])",),
    ("r% = torch.cat([c.logsumexp({d}) for c in {z}.chunk(2)])",),
    (
        "r% = torch.stack([p.softmax(-1).gather(-1, i.unsqueeze(-1)).squeeze(-1) "
        "for p, i in zip({z}, {lab})])",
    ),
    (
        "i%, z% = torch.broadcast_tensors({lab1}, {z})",
        "r% = z%.softmax({d}).gather({d}, i%.narrow({d}, 0, 1))",
    ),
    (
        "i%, z% = torch.broadcast_tensors({lab}.unsqueeze(-1), {z})",
        "r% = z%.log_softmax(-1).exp().gather(-1, i%[..., :1]).squeeze(-1)",
    ),
)
MAXIMA: Recipes = (
    ("r% = {z}.argmax({d})",),
    ("r% = {z}.argmax({d}) == {lab}",),
    ("r% = ({z}.argmax(dim={d}, keepdim=True) == {lab1}).float()",),
    ("r% = {z}.amax({d})",),
    ("r% = {z}.max({d}).values",),
    ("r% = {z}.max({d})[1]",),
    ("v%, r% = {z}.max({d})",),
    ("r%, i% = torch.max({z}, {d}, keepdim=True)",),
    ("r% = {z}.softmax({d}).amax({d})",),
    ("r% = {z}.softmax({d}).max({d}).values",),
    ("r% = {z}.detach().argmax({d})",),
    ("r% = {z}.amax({d}, keepdim=True) <= {z}.gather({d}, {lab1})",),
    ("r% = {z}.gather({d}, {lab1}) >= {z}.max({d}, keepdim=True).values",),
    ("r% = ({z} > {z}.gather({d}, {lab1})).sum({d})",),
    ("r% = ({z}.detach().topk(2, {d}).indices == {lab1}).any({d})",),
    ("r% = {z}.detach().softmax({d}).topk(2, dim={d}).values.sum({d})",),
    ("v%, r% = torch.topk({z}, 1, {d})",),
    ("i% = {z}.argmax({d}, keepdim=True)", "r% = {z}.log_softmax({d}).gather({d}, i%)"),
)
LOSSES: Recipes = (
    *[("r% = F.cross_entropy({c}, {l}{args})",)] * 5,
    ("r% = F.cross_entropy({c}, {l}, label_smoothing=0.1, reduction={reduction})",),
    ("r% = F.cross_entropy({c}, {l}, reduction={reduction}, ignore_index=2)",),
    ("r% = F.cross_entropy({c}, torch.full_like({l}, -100){args})",),
    ("r% = F.cross_entropy({c}, torch.where({lm}, {l}, -100), reduction={reduction})",),
    ("r% = F.cross_entropy({c}, {q}, reduction={reduction})",),
    (
        "r% = F.cross_entropy({c}, {l}, reduction={reduction})"
        " - 2 * F.cross_entropy({c}, {l}, reduction={reduction}, ignore_index=2)",
    ),
    (
        "l% = {l}.clone()",
        "with torch.no_grad(): e% = F.cross_entropy({c}, l%, reduction='none')",
        "l%.masked_fill_(e% < 2, -100)",
        "r% = F.cross_entropy({c}, l%, reduction={reduction})",
    ),
    (
        "q% = {q}.detach().clone()",
        "with torch.no_grad(): e% = F.cross_entropy({c}, q%, reduction='none')",
        "q%.mul_(0.5)",
        "r% = F.cross_entropy({c}, q%, reduction='none') * e%.float()",
    ),
    ("r% = F.nll_loss(F.log_softmax({c}, {cd}), {l}{nll})",),
    ("r% = F.nll_loss({c}, {l}{nll})",),
)
REDUCTIONS: dict[Recipes, int] = {
    SUMS: 20,
    BINARIES: 8,
    ELEMENTS: 6,
    FUNCTIONS: 12,
    ENTROPIES: 16,
    LSES: 14,
    PICKS: 24,
    MAXIMA: 14,
    LOSSES: 12,
}

# ---------------------------------------------------------------- rows

ROWS = (
    *("-{r}", "{r}.exp()", "{r} * {o}", "{r} + {o}", "{r} - {o}", "{r}.square()", "{r} >= {o}"),
    *(
        "{r}.float()",
        "{r}.unsqueeze(-1)",
        "{r}.reshape(-1)",
        "{r}.detach()",
        "torch.cat([{r}, {o}])",
    ),
    *("torch.stack([{r}, {o}])", "({r} - {o}.detach()).exp()", "{r}.to(torch.float32)"),
    *("torch.minimum({r}, {o})", "{r}.view(-1)", "{r} * 0.5", "{r} + torch.sign({r} + 0.37)"),
)
TERMS = (
    "{r}.float().mean()",
    "0.3 * {r}.float().sum()",
    "{r}.float().square().mean()",
    "({r} * torch.linspace(-1, 1, {r}.numel()).reshape({s})).sum()",
    "0.1 * ({r}.float().sin() * {r}.float()).sum()",
    "torch.mul({r}, other={r}).float().mean()",
)
# Of which forward computes the gradients: their coefficients are known.
LINEAR = (
    *TERMS[:2],
    "({r} * torch.linspace(-1, 1, {r}.numel()).reshape({s})).sum()",
    "{r}.float().masked_fill(torch.linspace(-1, 1, {r}.numel()).reshape({s}) > 0, 0.25).sum() / 3",
    "torch.where(torch.linspace(-1, 1, {r}.numel()).reshape({s}) > 0, {r}.float(), 0.5).mean()",
    "torch.stack([{r}.float(), {r}.float() * 2]).sum()",
    "(1 - {r}.float()).flatten()[::2].sum()",
    "torch.dot({r}.flatten(), torch.linspace(-1, 1, {r}.numel()).to({r}.dtype))",
    "({r}.float() * (torch.arange({r}.numel()) != 1).reshape({s})).sum()",
    # linear in one part, and of a constant derivative in the other
    "({r}.float() + torch.sign({r}.float() + 0.37)).sum()",
    "({r}.float() + {r}.detach().float()).sum()",
    # what may be written to between the rows and the sum
    "({r}.float() * cw[1]).sum()",
    # a discount, down to the smallest numbers
    "({r}.float() * torch.logspace(0, -44, {r}.numel()).reshape({s})).sum()",
)

# ---------------------------------------------------------------- what is not read

UNKNOWN = (
    *("{z}.cumsum({d})", "{z}.sort({d}).values", "{z}.roll(1, {d})", "{z}.flip({d})"),
    *("{z}.topk(3, {d}).values", "{z}.norm(dim={d})", "{z}.var({d})", "{z} @ {z}.mT"),
    *("{z}.median({d}).values", "F.layer_norm({z}, ({V},))", "torch.cat([{z}, {z}], {d})"),
    *("{z}.max()", "{z}.numpy(force=True).sum()", "{z}.sum(0)", "{z}.std()"),
)
