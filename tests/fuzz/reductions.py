"""From logits to rows, and from rows to a loss: the reductions of random programs.

In: nothing. Out: tables of templates, with the holes of :mod:`tests.fuzz.steps`, ``{labk}`` for two
labels of each row, ``{n}`` for the rows of a matrix and ``{args}`` for what a loss may be told. A
template of several statements ends with one that assigns to ``r%``; ``%`` is a number of its own.
"""

from __future__ import annotations

from tests.fuzz.steps import lines

# From classes to rows.
REDUCTIONS = lines("""
{z}.sum({d})
{z}.mean({d})
{z}.logsumexp({d})
{z}.std({d})
{z}.var({d})
{z}.norm(dim={d})
{z}.abs().sum({d})
{z}.square().mean({d})
({z} > 0).sum({d})
{z}.gather({d}, {lab1}).squeeze({d})
({z} * {c}).sum({d})
({z} * {g}).sum({d})
{z}.log_softmax({d}).gather({d}, {lab1}).squeeze({d})
{z}.logsumexp({d}) - {z}.gather({d}, {lab1}).squeeze({d})
-({z}.softmax({d}) * {z}.log_softmax({d})).sum({d})
torch.special.entr({z}.softmax({d})).sum({d})
{z}.softmax({d}).square().sum({d})
F.cross_entropy({first}, {lab}, reduction='none')
F.cross_entropy({first}, {lab})
F.cross_entropy({first}, {lab}, label_smoothing=0.1)
F.nll_loss({first}.log_softmax(1), {lab})
F.cross_entropy({first}, {lab}.masked_fill({mask}, -100))
({z} > {z}.gather({d}, {lab1})).sum({d})
({z} >= {row1}).any({d})
{z}.softmax({d}).prod({d})
F.cosine_similarity({z}, {g}, {d})
F.softplus({z} - {z}.gather({d}, {lab1})).sum({d})
({z}.softmax({d}) - F.one_hot({lab}, {v}).movedim(-1, {d})).square().sum({d})
{z}.movedim({d}, -1) @ factor[:{v}].to({z}.dtype)
{z}.softmax({d}).movedim({d}, -1) @ factor[:{v}].to({z}.dtype)
Picked.apply({z}, {lab1}, {d})[0]
Picked.apply({z}, {lab1}, {d})[1]
{z}.logcumsumexp({d}).mean({d}) + {z}.detach().cumsum({d}).amax({d})
{z}.tanh().std({d}) - {z}.detach().sort({d}).values.diff(dim={d}).amax({d})
{z}.softmax({d}).cumsum({d}).sub(0.5).abs().sum({d})
(1 + {z} - {z}.gather({d}, {lab1})).clamp_min(0).sum({d})
F.binary_cross_entropy_with_logits({z}, {g}.sigmoid().to({z}.dtype), reduction='none').mean({d})
F.binary_cross_entropy(({z} * 30).sigmoid(), {g}.sigmoid().to({z}.dtype), reduction='none').mean({d})
F.huber_loss({z}, {g}.to({z}.dtype), reduction='none').mean({d})
F.pad({last}, (0, 3), value=-9.0).logsumexp(-1)
torch.lerp({z}, {g}.to({z}.dtype), temperature.detach().to({z}.dtype)).logsumexp({d})
({z}.detach().float().view(torch.int32) > 1065353216).sum({d})
({z}.detach().to(torch.bfloat16).view(torch.int16) > 16256).sum({d})
""")

SUMS = lines("""
(({z} > 0) + ({z} < 1)).sum({d})
(({z} > 0.2) + F.one_hot({lab}, {v}).bool()).sum({d}).float()
(({z} > 0).to(torch.uint8) - 1).sum({d})
{z}.sum({d})
({z} >= {z}.gather({d}, {lab1}).detach()).sum({d})
({z} >= {z}.amax({d}, True).detach()).sum({d})
{z}.sum({d}, keepdim=True)
{z}.mean({d})
{z}.mean({d}, True)
torch.sum({z}, dim=({d},))
{z}.sum()
{z}.mean()
{z}.mean(dim={d}, dtype=torch.float32)
({z} * {c}).sum({d})
({z}.softmax({d}) * {c}).sum({d})
({z} * {q}).sum({d})
-({q} * {z}.log_softmax({d})).sum({d})
{z}.softmax({d}).square().sum({d})
p% = {z}.softmax({d}); r% = (p% * p%).sum({d})
lp% = {z}.log_softmax({d}); r% = -lp%.mean({d})
lp% = {z}.log_softmax({d}); r% = -(F.one_hot({lab}, {v}) * lp%).sum({d})
(F.one_hot({lab}, {v}).to({z}.dtype) * {z}).sum({d})
(F.one_hot({lab}, {v}) * {z}).sum({d}) - {z}.logsumexp({d})
({o} * {z}).sum({d})
{z}.float().softmax({d}) @ {c}.float()
torch.matmul({z}.softmax({d}), {c}.to({z}.dtype).unsqueeze(-1))
torch.einsum('...v,v->...', {z}.float().log_softmax({d}), {c}.float())
p% = {z}.softmax({d}); r% = torch.einsum('...v,...v->...', p%, {z}.log_softmax({d}))
F.kl_div({z}.log_softmax({d}), {q}, reduction='none').sum({d})
F.kl_div({z}.log_softmax({d}), {q}.log(), reduction='sum', log_target=True)
F.kl_div({q}.log(), {z}.softmax({d}), reduction='none').sum({d})
F.kl_div({z}.log_softmax({d}), {q}, reduction='batchmean')
lp% = {z}.log_softmax({d}); r% = ({q} * ({q}.log() - lp%)).sum({d})
lp% = {z}.log_softmax({d}); r% = (lp%.exp() * (lp% - {q})).sum({d})
q% = (F.one_hot({lab}, {v}) + F.one_hot({lab}, {v})) * 0.5; r% = F.kl_div({z}.log_softmax({d}), q%, reduction='sum')
F.mse_loss({z}.softmax({d}), {q}, weight={q} + 0.5)
with torch.no_grad(): k% = {row1} * 2; r% = ({z} / k%).logsumexp({d})
k% = {z}.gather({d}, {lab1}); with torch.no_grad(): v% = k%.view(k%.shape); r% = F.relu(1 + {z} - v%).sum({d})
F.binary_cross_entropy_with_logits({z}, {q}.to({z}.dtype), reduction='none').sum({d})
F.binary_cross_entropy_with_logits({z}, {q}, pos_weight={cw}, reduction='sum')
F.binary_cross_entropy_with_logits({z}, {q}.detach(), weight={cw})
F.binary_cross_entropy_with_logits({z}, {q}.detach().to({z}.dtype), weight={z}.sigmoid().detach(), reduction='sum')
(F.softplus({z}) - {q} * {z}).sum({d})
-({q} * F.logsigmoid({z}) + (1 - {q}) * F.logsigmoid(-{z})).sum({d})
(F.one_hot({lab}, {v}) * {z}.tanh()).sum({d})
p% = {z}.sigmoid(); r% = ((1 - p%) ** 2 * {q} * F.softplus(-{z})).sum({d})
({z}.tanh() * {cw} + {z}.sigmoid() * {q}).mean({d})
({z}.clamp(min=0) - {z} * {q} + torch.exp(-{z}.abs()).log1p()).mean({d})
({q} / (1 + torch.exp(-{z}))).sum({d})
""")

# Losses of each element.
ELEMENTS = lines("""
F.mse_loss({z}.softmax({d}), {q}, reduction='none').sum({d})
F.mse_loss({z}.softmax({d}), {q}, reduction='mean')
F.mse_loss({z}.softmax({d}), {q}, reduction='sum')
F.l1_loss({z}.sigmoid(), {q}, reduction='none').sum({d})
F.l1_loss({z}.sigmoid(), {q}, reduction='mean')
F.l1_loss({z}.sigmoid(), {q}, reduction='sum')
F.smooth_l1_loss({z}, {q}, beta=0.3, reduction='none').sum({d})
F.smooth_l1_loss({z}, {q}, beta=0.3, reduction='mean')
F.smooth_l1_loss({z}, {q}, beta=0.3, reduction='sum')
F.huber_loss({z}.softmax({d}), F.one_hot({lab}, {v}).to({z}.dtype), delta=0.2, reduction='none').sum({d})
F.huber_loss({z}.softmax({d}), F.one_hot({lab}, {v}).to({z}.dtype), delta=0.2, reduction='mean')
F.huber_loss({z}.softmax({d}), F.one_hot({lab}, {v}).to({z}.dtype), delta=0.2, reduction='sum')
F.soft_margin_loss({z}, {q} - 0.5, reduction='none').sum({d})
F.soft_margin_loss({z}, {q} - 0.5, reduction='mean')
F.soft_margin_loss({z}, {q} - 0.5, reduction='sum')
F.mse_loss({z}.log_softmax({d}), {o}.detach(), reduction='none').sum({d})
F.mse_loss({z}.log_softmax({d}), {o}.detach(), reduction='mean')
F.mse_loss({z}.log_softmax({d}), {o}.detach(), reduction='sum')
""")

# Functions of the softmax, of the logit and of the target's logit.
FUNCTIONS = lines("""
p% = {z}.softmax({d}); r% = -(p% * (p% + 0.01).log()).sum({d})
p% = {z}.softmax({d}); r% = (p% - F.one_hot({lab}, {v})).square().sum({d})
p% = {z}.softmax({d}); r% = (p% - {q}).square().mean({d})
p% = {z}.softmax({d}); r% = ((1 - p%) ** 2 * p%.log() * F.one_hot({lab}, {v})).sum({d})
p% = {z}.softmax({d}); r% = torch.where(p% > 0.2, p% * {z}, 0.0).sum({d})
F.relu(1 + {z} - {z}.gather({d}, {lab1})).sum({d})
({z} - {z}.gather({d}, {lab1})).exp().log1p().mean({d})
({z}.softmax({d}).clamp(0.05, 0.5).log() * {c}).sum({d})
({z}.softmax({d}).sqrt() * {q}).sum()
lp% = {z}.log_softmax({d}); r% = (lp% >= lp%.gather({d}, {lab1})).float().mean({d})
lp% = {z}.log_softmax({d}); r% = torch.tanh(lp% - lp%.gather({d}, {lab1})).sum({d})
({z}.sigmoid() - {q}).square().sum({d})
v% = {z}.gather({d}, {lab1}); tokens.copy_((tokens + 1) % 7); r% = F.relu(1 + {z} - v%).sum({d})
v% = {z}.gather({d}, {lab1}); v%.detach().mul_(0.5); r% = ({z} > v%).float().sum({d}) * {z}.logsumexp({d})
v% = {z}.gather({d}, {lab1}).squeeze({d}); k% = v%.unsqueeze({d}); v%.detach().mul_(0.5); r% = F.relu(1 + {z} - k%).sum({d})
lp% = {z} - {z}.logsumexp({d}, True); r% = (lp% > lp%.gather({d}, {lab1})).sum({d})
p% = {z} + {z}.logsumexp({d}, True); r% = (p% > p%.gather({d}, {lab1})).sum({d})
m% = {z}.softmax({d}).max({d}); lp% = {z}.log_softmax({d}).gather({d}, m%.indices.unsqueeze({d})).squeeze({d}); r% = m%.values + lp% * (m%.values > 0.3)
e% = {z}.logsumexp({d}); r% = torch.zeros(e%.shape); r%.copy_(e%)
y% = {z}.detach().topk(2, {d}).indices; r% = {z}.log_softmax({d}).gather({d}, y%).sum({d})
lp% = {z}.float().log_softmax({d}).detach(); r% = (lp%.topk(2, {d})[0] == lp%.gather({d}, {lab1})).float().sum({d})
o% = torch.zeros_like({z}.detach()); o%[1:].fill_(0.3); r% = (o%.add_(0.5) * {z}.log_softmax({d})).sum({d})
o% = torch.ones_like({z}.detach()); o%.add_(0.5).view(-1)[:3].mul_(2); r% = (o%.mul_(0.5) * {z}.softmax({d})).sum({d})
v% = {z}.mean({d}); v%.detach().sub_(1); r% = F.softplus({z} - v%.unsqueeze({d})).sum({d})
lp% = {z}.log_softmax({d}); v% = lp%.gather({d}, {lab1}).squeeze({d}); c% = (lp% > v%.unsqueeze({d})).sum({d}); o% = torch.zeros({v}).add_(0.5); r% = v% * (1 + c%) + (lp%.exp() * o%).detach().sum({d})
with torch.no_grad(): e% = {z}.logsumexp({d}, keepdim=True); r% = ({z}.softmax({d}) * {z} * e%.sigmoid()).sum({d})
lp% = {z}.log_softmax({d}); p% = lp%.exp(); r% = -(p% * lp%).sum({d})
p% = {z}.softmax({d}); lp% = {z}.log_softmax({d}); r% = -(p% * lp%).sum({d})
p% = {z}.softmax({d}); r% = {z}.logsumexp({d}) - (p% * {z}).sum({d})
p% = F.softmax({z}, dim={d}); r% = -(p% * p%.log()).sum({d}, keepdim=True)
p% = {z}.softmax({d}); r% = torch.special.entr(p%).sum({d})
lp% = {z}.log_softmax({d}); r% = -(lp%.exp() * lp%.detach()).sum({d})
lp% = {z}.float().log_softmax({d}); r% = (lp%.exp() * lp% ** 2).sum({d})
lp% = {z} - {z}.logsumexp({d}, keepdim=True); p% = F.softmax(lp%, {d}); lp% = torch.clamp(lp%, min=torch.finfo(lp%.dtype).min); r% = -(lp% * p%).sum({d})
torch.distributions.Categorical(logits={z}, validate_args=False).entropy()
({z}.softmax({d}) * ({z}.logsumexp({d}, keepdim=True) - {z})).sum({d})
p% = {z}.softmax({d}); r% = -torch.xlogy(p%, p%).sum({d})
p% = ({z} / 2).softmax({d}); r% = (p% * {z}).sum({d}) - ({z} / 2).logsumexp({d})
lp% = {z}.log_softmax({d}); r% = (({f} - lp%) * {q}).sum({d})
torch.cat([-(c.softmax(-1) * c.log_softmax(-1)).sum(-1) for c in {z}.split(2)])
torch.cat([torch.special.entr(c.softmax(-1)).sum(-1) for c in ({z}[:1], {z}[1:])])
k% = {q}[:1].detach(); r% = torch.cat([torch.special.entr((c * k%).softmax(-1)).sum(-1) for c in {z}.split(1)])
{z}.logsumexp({d})
torch.logsumexp({z}, dim={d}, keepdim=True)
{z}.logsumexp(({d},)).square()
{z}.exp().sum({d}).log()
k% = {z}.amax({d}, keepdim=True); r% = k% + ({z} - k%).exp().sum({d}, True).log()
k% = {z}.max({d}, keepdim=True).values.detach(); r% = (k% + ({z} - k%).exp().sum({d}, keepdim=True).log()).squeeze({d})
k%, i% = {z}.max({d}, keepdim=True); e% = torch.exp({z} - k%); r% = torch.log(e%.sum({d})) + k%.squeeze({d})
k% = {z}.detach().amax({d}, keepdim=True); e% = torch.exp({z} - k%); p% = e% / e%.sum({d}, keepdim=True); r% = p%.gather({d}, {lab1})
""")

# Given classes.
PICKS = lines("""
{z}.gather({d}, {lab1})
{z}.gather({d}, {lab1}).squeeze({d})
torch.gather({z}, {d}, {labk})
{z}.take_along_dim({lab1}, {d})
{z}.take_along_dim({labk} - 3, dim={d})
{flat}[torch.arange({n}), {lab}]
{flat}[torch.arange({n}), {lab} - 3]
{flat}[range({n}), {lab}]
i% = torch.arange({n}).to(torch.bool).to(torch.int64); r% = {flat}[i%, {lab}]
i% = torch.arange({n}).bfloat16().to(torch.int64); r% = {flat}[i%, {lab}]
i% = torch.arange({n}).to(torch.int32).to(torch.int64); r% = {flat}[i%, {lab}]
k% = torch.vmap(lambda i: i // 2)({lab}); r% = {flat}[torch.arange({n}), k%]
{flat}.log_softmax(-1)[list(range({n})), {lab} - 1]
{flat}.log_softmax(-1)[[*range(1, {n}), 0], {lab}]
lp% = {z}.log_softmax({d}); r% = lp%.gather({d}, {lab1})
lp% = F.log_softmax({z}.float(), {d}); r% = -lp%.gather({d}, {lab1}).squeeze({d})
lp% = {z}.log_softmax({d}); r% = lp%.gather({d}, {labk})
({z}.softmax({d}) + 0.01).log().gather({d}, {lab1})
{z}.softmax({d}).clamp(0.05, 0.6).sqrt().gather({d}, {labk})
lp% = {z}.log_softmax({d}); r% = torch.where(lp% < -2, lp%, -lp%.square()).gather({d}, {lab1})
F.nll_loss(({flat}.softmax(-1) + 0.01).log(), {lab}, reduction='none')
F.nll_loss({flat}.sigmoid() - 2, {lab})
lp% = {z}.log_softmax({d}); r% = lp%.take_along_dim({labk}, {d}).sum({d})
lp% = {flat}.log_softmax(-1); r% = lp%[torch.arange({n}), {lab}]
p% = {z}.softmax({d}); r% = (1 - p%.gather({d}, {lab1})) ** 2
{z}.gather({d}, {lab1}).squeeze({d}) - {z}.logsumexp({d})
{z}.gather({d}, {labk}) - {z}.logsumexp({d}, keepdim=True)
({z} - {z}.logsumexp({d}, keepdim=True)).gather({d}, {lab1})
torch.distributions.Categorical(logits={z}, validate_args=False).log_prob({lab})
torch.cat([p.log_softmax(-1).gather(-1, i.unsqueeze(-1)).squeeze(-1) for p, i in zip({z}.unbind(0), {lab}.unbind(0))])
torch.stack([F.log_softmax(p, -1).gather(-1, i.unsqueeze(-1)).squeeze(-1) for p, i in zip({z}, {lab})])
torch.stack([p.gather(-1, i.unsqueeze(-1)).squeeze(-1) - p.logsumexp(-1) for p, i in zip({z}.unbind(0), {lab}.unbind(0))])
torch.cat([(c.softmax(-1) * c.log_softmax(-1)).sum(-1) for c in {z}.split(2)])
torch.cat([c.logsumexp({d}) for c in {z}.chunk(2)])
torch.stack([p.softmax(-1).gather(-1, i.unsqueeze(-1)).squeeze(-1) for p, i in zip({z}, {lab})])
i%, z% = torch.broadcast_tensors({lab1}, {z}); r% = z%.softmax({d}).gather({d}, i%.narrow({d}, 0, 1))
i%, z% = torch.broadcast_tensors({lab}.unsqueeze(-1), {z}); r% = z%.log_softmax(-1).exp().gather(-1, i%[..., :1]).squeeze(-1)
b% = torch.arange({z}.shape[0])[:, None]; r% = {z}[b%, torch.arange({z}.shape[1])[None], {lab} - 3]
b% = torch.arange({z}.shape[0]).unsqueeze(1); r% = {z}[b%, torch.arange({z}.shape[1]), {lab}]
b% = torch.arange({z}.shape[0]).view(-1, 1); r% = {z}[b%, torch.arange({z}.shape[1]), {lab}]
""")

# Losses of torch.
LOSSES = lines("""
F.cross_entropy({first}, {lab}{args})
F.cross_entropy({first}, {lab}, label_smoothing=0.1, reduction={reduction})
F.cross_entropy({first}, {lab}, reduction={reduction}, ignore_index=2)
F.cross_entropy({first}, torch.full_like({lab}, -100){args})
F.cross_entropy({first}, torch.where({mask}, {lab}, -100), reduction={reduction})
F.cross_entropy({first}, {q}, reduction={reduction})
F.cross_entropy({first}, {lab}, reduction={reduction}) - 2 * F.cross_entropy({first}, {lab}, reduction={reduction}, ignore_index=2)
l% = {lab}.clone(); with torch.no_grad(): e% = F.cross_entropy({first}, l%, reduction='none'); l%.masked_fill_(e% < 2, -100); r% = F.cross_entropy({first}, l%, reduction={reduction})
q% = {q}.detach().clone(); with torch.no_grad(): e% = F.cross_entropy({first}, q%, reduction='none'); q%.mul_(0.5); r% = F.cross_entropy({first}, q%, reduction='none') * e%.float()
F.nll_loss(F.log_softmax({first}, 1), {lab}{args})
F.nll_loss({first}, {lab}{args})
F.multi_margin_loss({flat}.float(), {lab})
F.cross_entropy(target={lab}, input={first}{args})
torch.nn.CrossEntropyLoss(label_smoothing=0.1)({first}, {lab})
F.cross_entropy({first}, {lab}, class_weight[:{v}]{args})
F.kl_div(F.log_softmax({z}, {d}), {q}, reduction='batchmean')
""")

# Those whose answer a tie would leave to chance.
ORDERED = lines("""
{z}.amax({d})
{z}.max({d}).values
{z}.argmax({d})
{z}.min({d}).values
{z}.amin({d})
{z}.softmax({d}).amax({d})
{z}.argmax({d}) == {lab}
{z}.topk(3, {d}).values.sum({d})
{z}.movedim({d}, -1)[..., ::2].unsqueeze(-2).amax(-1).logsumexp(-1)
{z}.movedim({d}, -1)[..., 1::3].relu().sum(-1)
{z}.sort({d}).values.narrow({d}, 1, 2).sum({d})
{z}.median({d}).values
{z}.kthvalue(2, {d}).values
{z}.float().quantile(0.3, dim={d})
{z}.topk(2, {d}).indices
{z}.aminmax(dim={d}).max
{z}.topk(4, {d}).values.logsumexp({d}) - {z}.logsumexp({d})
({z}.topk(3, {d}).indices == {lab1}).any({d})
({z}.sort({d}, descending=True).values * {cw}).sum({d})
({z}.argmax(dim={d}, keepdim=True) == {lab1}).float()
{z}.max({d})[1]
v%, r% = {z}.max({d})
r%, i% = torch.max({z}, {d}, keepdim=True)
{z}.softmax({d}).max({d}).values
{z}.detach().argmax({d})
{z}.amax({d}, keepdim=True) <= {z}.gather({d}, {lab1})
{z}.gather({d}, {lab1}) >= {z}.max({d}, keepdim=True).values
({z} > {z}.gather({d}, {lab1})).sum({d})
({z}.detach().topk(2, {d}).indices == {lab1}).any({d})
{z}.detach().softmax({d}).topk(2, dim={d}).values.sum({d})
v%, r% = torch.topk({z}, 1, {d})
i% = {z}.argmax({d}, keepdim=True); r% = {z}.log_softmax({d}).gather({d}, i%)
""")

# Of two tensors with classes.
PAIR_REDUCTIONS = lines("""
({z} * {o}).sum({d})
({z} - {o}).square().mean({d})
F.cosine_similarity({z}, {o}, {d})
F.kl_div({z}.log_softmax({d}), {o}.softmax({d}), reduction='none').sum({d})
({z}.softmax({d}) * ({z}.log_softmax({d}) - {o}.log_softmax({d}))).sum({d})
(torch.logaddexp({z}.log_softmax({d}), {o}.log_softmax({d})) - {o}.log_softmax({d})).mean({d})
({z}.softmax({d}) - {o}.softmax({d})).abs().sum({d})
""")

# Of rows and classes at once.
WHOLE = lines("""
torch.linalg.vector_norm({z}, 1)
torch.linalg.vector_norm({z}, 2)
torch.linalg.vector_norm({z}, 3)
torch.linalg.vector_norm({z}, 0.5)
{z}.norm()
{z}.sum() / 9
{z}.nansum() / 9
({z} > 1).any()
torch.linalg.vector_norm({z}, 2, dtype=torch.float64)
{z}.round().count_nonzero()
torch.linalg.vector_norm(({z}.detach() > 0.5).float(), 0)
{z}.detach().amax()
{z}.sum((0, 1))
{z}.mean((0, -1))
{z}.square().sum((-2, -1), keepdim=True)
({z}.detach().float().view(torch.int32) > 1065353216).sum()
""")

# Of rows and another dimension, as large as one of the rows: some meet it with rows.
COINCIDING = lines("""
({last}.unsqueeze(-2) * torch.linspace(0.5, 1.5, {last}.shape[-2], dtype=torch.float64).float().view(-1, 1) - {last}.logsumexp(-1)[..., None, None]).sigmoid().mean(-1)
({last}.unsqueeze(-2) * torch.linspace(0.5, 1.5, {last}.shape[-2], dtype=torch.float64).float().view(-1, 1) - {last}.logsumexp(-1, keepdim=True)).sigmoid().mean(-1)
({last}.unsqueeze(-2) + torch.arange({last}.shape[0]).view(-1, 1) * {last}.mean(-1, keepdim=True)).tanh().sum(-1)
({last}.unsqueeze(0) - {last}.unsqueeze(1)).abs().mean(-1)
({last}[:1].unsqueeze(-2) * torch.linspace(0.5, 1.5, {last}.shape[-2], dtype=torch.float64).float().view(-1, 1) - {last}.logsumexp(-1, keepdim=True)).tanh().mean(-1)
""")
ARGUMENTS = {
    "reduction": ("'none'", "'mean'", "'sum'"),
    "ignore_index": ("-100", "0", "3"),
    "label_smoothing": ("0.1", "0.0", "1.0", "0.35"),
    "weight": ("class_weight[:{v}]", "None", "class_weight[:{v}].to({z}.dtype)"),
}

# Rows of rows.
ROWS = lines("""
{r} * {f}
{r} + {p}
{r} * {p}
{r} - {p}.detach()
{r}.clamp(-2, 2)
{r}.tanh()
{r}.clamp(-3, 3).exp()
F.softplus({r})
torch.maximum({r}, {p})
{r}.float()
{r}.masked_fill({r} > 2, 2.0)
torch.where({r} > {p}, {r}, {p} * 0.5)
{r}.detach()
{r}.unsqueeze(-1)
{r}.reshape(-1)
torch.cat([{r}, {p}])
torch.stack([{r}, {p}])
{r} >= {p}
{r} + torch.sign({r} + 0.37)
""")
# Whose gradients are known before: sums of the rows, and rows with factors.
LINEAR = lines("""
{r}.sum()
{r}.float().mean() * 2
({r} * {row}).sum()
-({r} * {row}).mean()
({r} * {mask}).sum() / {mask}.sum().clamp_min(1)
{r}.flatten()[::2].sum()
({r} * torch.linspace(-1, 1, {r}.numel(), dtype=torch.float64).float().view({r}.shape)).sum()
{r}.float().masked_fill(torch.linspace(-1, 1, {r}.numel(), dtype=torch.float64).float().view({r}.shape) > 0, 0.25).sum() / 3
torch.where(torch.linspace(-1, 1, {r}.numel(), dtype=torch.float64).float().view({r}.shape) > 0, {r}.float(), 0.5).mean()
torch.stack([{r}.float(), {r}.float() * 2]).sum()
torch.dot({r}.flatten(), torch.linspace(-1, 1, {r}.numel(), dtype=torch.float64).to({r}.dtype))
({r}.float() + torch.sign({r}.float() + 0.37)).sum()
({r}.float() + {r}.detach().float()).sum()
({r}.float() * class_weight[1]).sum()
({r}.float() * torch.logspace(0, -44, {r}.numel(), dtype=torch.float64).float().view({r}.shape)).sum()
""")
# Whose gradients depend on the rows.
NONLINEAR = lines("""
{r}.float().square().mean()
{r}.clamp(-3, 3).exp().sum()
{r}.float().sigmoid().mean()
((1 - (-{r}.abs()).exp()).square() * {r}).mean()
{r}.sum().tanh()
F.softplus({r}.mean())
({r} * {r}.detach()).sum()
({r}.sum() * {row}.sum())
0.1 * ({r}.float().sin() * {r}.float()).sum()
torch.mul({r}, other={r}).float().mean()
""")
