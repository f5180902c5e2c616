"""From logits to logits: the steps of random programs.

In: nothing. Out: tables of templates; :mod:`tests.fuzz.writer` fills their holes. ``{z}`` is a tensor
with classes, ``{d}`` their dimension, ``{v}`` their number, ``{o}`` another one of the same shape and
rows; ``{lab}``, ``{row}`` and ``{mask}`` are labels, factors and a mask of its rows, ``{lab1}``,
``{row1}`` and ``{mask1}`` the same with a dimension of one where the classes are; ``{c}``, ``{cw}``
and ``{order}`` vectors of the classes, ``{g}`` and ``{q}`` given values and given probabilities of its
shape, ``{f}`` a number, ``{last}`` the tensor with its classes last, ``{first}`` with its classes
where ``F.cross_entropy`` has them, ``{flat}`` as a matrix. A template that eager does not run where it
is tried is left out, so that a table holds what is legal somewhere.
"""

from __future__ import annotations


def lines(text: str) -> tuple[str, ...]:
    """A template a line."""
    return tuple(text.strip().splitlines())


# Of one logit at a time.
POINTWISE = lines("""
{z} * {f}
{z} / {f}
{z} + {f}
{f} - {z}
-{z}
{z} / temperature
{z} * temperature
{z}.tanh()
15 * torch.tanh({z} / 15)
{z}.sigmoid()
F.softplus({z})
{z}.abs()
F.relu({z})
F.gelu({z})
F.silu({z})
F.leaky_relu({z}, 0.1)
F.elu({z})
{z}.clamp(-2, 2)
{z}.clamp_min(-1.5)
{z}.clamp(max=2.5)
F.hardtanh({z})
{z}.nan_to_num()
torch.nan_to_num({z}, 0.0, 9.0, -9.0)
{z}.square() * 0.1
{z}.sin()
{z}.cos()
torch.erf({z})
torch.atan({z})
{z}.clamp(-3, 3).exp()
torch.log1p({z}.abs())
({z}.square() + 0.5).sqrt()
({z}.square() + 1).rsqrt()
torch.sign({z}) + {z}
torch.where({z} > 0, {z}, 0.5 * {z})
{z}.pow(2) / 8
({z} > 0.1).to({z}.dtype) * {z}
F.logsigmoid({z})
torch.expm1({z}.clamp(-2, 2))
{z}.masked_fill({z} < -1, -1.5)
torch.addcmul({z}, {z}, {z}, value=0.05)
Capped.apply({z}, 3.0)
Capped.apply({z}, 1.5)
Clipped.apply({z})
{z}.clone()
{z}.contiguous()
{z}.float()
{z}.double()
{z}.to(torch.bfloat16)
{z}.to(factor.dtype)
{z}.detach()
0.5 * {z} + 0.5 * {z}.detach()
{z}.lerp({z}.tanh(), 0.3)
{z} * 0.5 - 1
halved({z}, 2)
halved({z}, 24)
{z} * 1e10
{z} * 1e-3
""")

# With operands of rows, of classes, or of both.
OPERANDS = lines("""
{z} + {c}
{z} * {cw}
{z} / {cw}
{z} - {c} * 0.5
{z} + {row1}
{z} * {row1}
{z} / {row1}
{z} + {g}
{z} * {g}
torch.logaddexp({z}, {g})
{z} + 0.5 * {g}.tanh()
{z}.masked_fill({cw} > 1.2, -3.0)
torch.where({cw} > 0.8, {z}, {z}.detach() - 1)
{z}.masked_fill({mask1}, 0.25)
torch.where({mask1}, {z}, -{z})
{z} * {mask1}
torch.where({g} > 0, {z}, 0.5 * {z})
{z}.masked_fill({g} > 1.5, -2.0)
{z}.scatter({d}, {lab1}, -1.0)
{z}.scatter_add({d}, {lab1}, {row1}.to({z}.dtype))
{z} - 0.3 * F.one_hot({lab}, {v}).movedim(-1, {d})
{z} - {z}.gather({d}, {lab1})
{z} - 0.3 * torch.zeros_like({z}).scatter_({d}, {lab1}, 1.0)
{z} * torch.empty_like({z}).fill_(0.1).scatter_({d}, {lab1}, 0.9)
{z}.masked_fill(torch.zeros({v}, dtype=torch.bool).index_fill_(0, torch.arange(3), True).view({class1}), -3.0)
torch.where(torch.arange({v}).view({class1}) == {lab1}, {z} - 0.4, {z})
torch.maximum({z}, {c})
torch.minimum({z}, {row1} * 2)
{z}.clamp(-{row1} * 3, {row1} * 3)
{z} / temperature
{z} * temperature
{row1} * {z}
{z} / temperature.item()
{z} / {row1}.detach().abs().clamp(min=0.5)
{z} / {row1}.exp().clamp(0.5, 2)
{z}.float() / temperature
{z}.float() / {row1}
{z} / (temperature * 2)
torch.div({z}, temperature)
{z} - {c}
{c} - {z}
({z} + 1) + {cw}
{z} / temperature + {c}
{z}.float() + {c}
{z}.index_select({d}, torch.arange({v}).flip(0))
{z} + bias + {c}
{z}[..., torch.arange({v} - 1, -1, -1)]
{z} / {row1}[:1, :1]
torch.tanh({z} * temperature)
torch.tanh({z} / {row1}) * 2
F.softplus({z} / temperature)
{z} - {lab1}.to(torch.uint8)
{z} / ({lab1} + 2)
{z} * ({lab1} > 2)
{z} * (temperature * 0) + {c}
torch.stack([{z}, {z}], 1)[:, 1]
{z} * (1 + temperature).detach() - {cw}
torch.stack([{z}, {z}], 1)[..., torch.arange({v}).flip(0)][:, 0]
torch.stack([{z}, {z}], 0).index_select(-1, torch.arange({v} - 1, -1, -1))[1]
{z}.masked_fill({c} > 0.4, -9)
{z}.masked_fill({q} > 0.3, -5.0)
torch.where({cw} > 0.7, -6.0, {z})
torch.where({q} > 0.2, {z}, {z} * 0.5)
torch.where({z} > 0.3, {z}, 0.2 * {z} + 0.24)
{z} / ({cw} + 0.5)
{z} * {c}.detach()
torch.tanh({z} * {cw})
{z} + {q}.detach()
{z} - 0.35 * F.one_hot({lab}, {v})
2 * ({z} - F.one_hot({lab}, {v}).to({z}.dtype) * 0.5)
{z} * (1 + F.one_hot({lab}, {v}))
{z} - torch.zeros_like({z}).scatter({d}, {lab1}, 0.4)
{z}.clamp(-0.9, 0.9).acos()
{z}.masked_fill(F.one_hot({lab}, {v}).bool(), -4)
torch.where({z}.detach() > 0, {z}, {z} * 0.7)
{z} * {q}
{z} - F.one_hot({lab}, {v}) * {row1}.detach()
torch.sigmoid({z} - {row1}.detach())
torch.sin({z} - F.one_hot({lab}, {v}) * {c}.detach())
{z}.masked_fill({cw} > 0.9, {f})
{z}.scatter({d}, {lab1}, {z}.gather({d}, {lab1}) - 0.35)
{z}.scatter({d}, {lab1}, -3.0)
{z}.scatter({d}, {lab1}, 0.8 * ({z}.gather({d}, {lab1}) / 9).square())
{z}.scatter_add({d}, {lab1}, {z}.gather({d}, {lab1}) * 0.3)
{z}.index_fill({d}, torch.tensor([0, {v} - 1]), -6.0)
{z} + ({row1} > 0.4) * -1e9
torch.where({z} > {q}, {z}, -{z})
torch.where({z} > 0.2, {z}, {q}.detach())
{z}.masked_fill({z} < {row1}.detach(), -9)
F.relu({z} - {z}.gather({d}, {lab1}).detach())
{z}.masked_fill({z} < {z}.detach().topk(3, {d}).values.amin({d}, True), -9)
torch.where({row1} > 0.4, {z}, 2.0)
{z}.masked_fill({row1} > 0.5, 0.0).tanh()
{z}.masked_fill(({row1} > 0.7) & ({cw} > 0.5), -torch.inf)
{z}.masked_fill({cw} > 0.7, torch.finfo({z}.dtype).min)
torch.where({cw} > 0.7, {z} - 0.4, {z})
torch.where({c} > 0.3, {z} * 2, {z} * 2 + {cw})
{z} - halved({q}, 24)
{z} - 0.3 * halved(F.one_hot({lab}, {v}).float(), 24)
{z}.scatter({d}, {lab1}, halved({z}.gather({d}, {lab1}), 24))
{z} + (F.one_hot({lab}, {v}) * 0.3).where(F.one_hot({lab}, {v}).bool(), -1.0)
{z} + F.one_hot({lab}, {v}).masked_fill(F.one_hot({lab}, {v}).bool(), 1.7)
torch.where({row1} > 0.1, {z}, 0.0)
{z}.masked_fill({row1} > 0.1, -3.0)
{z} * {z}
{z} ** 2
{z}.square()
{z} * {c}
{q} * {z}
{z} - {q}
{z} * F.one_hot({lab}, {v})
torch.special.entr({z})
{z} - {f}
{z} * -{q}
(0.5 * {q}).float() * {z}
{z} * (1 - {q})
{z}.exp()
{z} * {z}.detach()
{z} * torch.full_like({z}, 2.7).int().to({z}.dtype)
{z} * torch.full(({v},), 1.7).view({class1}).long()
{z} + {g}.int().to({z}.dtype)
{z} * {row1}.int()
{z} - {z}.amax({d}, keepdim=True).detach().int()
{z} * {q}.bool().to({z}.dtype)
""")

# Along the classes, and classes again.
SCANS = lines("""
{z}.softmax({d})
{z}.log_softmax({d})
F.softmax({z}, dim={d})
F.log_softmax({z}, {d}, dtype=torch.float32)
F.softmin({z}, {d})
{z}.cumsum({d}) * 0.3
{z}.logcumsumexp({d})
{z}.flip({d})
{z}.roll(2, {d})
{z} - {z}.mean({d}, keepdim=True)
{z} - {z}.logsumexp({d}, keepdim=True)
{z} / ({z}.square().sum({d}, keepdim=True) + 0.5).sqrt()
F.normalize({z}, dim={d})
{z} - {z}.amax({d}, keepdim=True).detach()
{z}.softmax({d}).cumsum({d})
({z} - {z}.mean({d}, keepdim=True)) / ({z}.std({d}, keepdim=True) + 0.3)
{z} * {z}.softmax({d}).detach()
{z}.diff(dim={d}, prepend={z}.narrow({d}, 0, 1))
torch.cat([{z}.narrow({d}, 0, 4), {z}.narrow({d}, 4, {v} - 4) * 0.5], {d})
torch.cat([{z}.narrow({d}, 5, {v} - 5), {z}.narrow({d}, 0, 5)], {d})
{z}.index_select({d}, {order})
{z}.gather({d}, ({lab1} + torch.arange(3).view({class1})) % 7)
{z}.narrow({d}, 1, {v} - 3)
{z}.narrow({d}, 0, {v} - 1)
F.log_softmax({z}, dim={d})
F.log_softmax({z}.float(), {d})
F.softmax({z}, {d}, dtype=torch.float32)
{z} - {row1}
{z} + {row1}
{z} - {z}.amax({d}, keepdim=True)
{z} - {z}.max({d}, keepdim=True).values.detach()
{z} - {z}.detach().amax({d}, True)
{z}.softmax({d}).log()
{z}.exp()
{z} * {row1}
""")

# Those whose answer a tie would leave to chance.
ORDERED_SCANS = lines("""
{z}.sort({d}).values
{z}.sort({d}, descending=True).values
{z}.cummax({d}).values
{z}.topk(4, {d}).values
{z}.topk(3, {d}, largest=False).values * 0.5
{z}.gather({d}, {z}.detach().topk(3, {d}).indices)
{z}.gather({d}, {z}.argsort({d}))
{z}.masked_fill({z} < {z}.topk(5, {d}).values.narrow({d}, 4, 1), -4.0)
{z}.masked_fill({z}.sort({d}, descending=True).values.softmax({d}).cumsum({d}) > 0.95, -4.0)
torch.maximum({z}, {z}.kthvalue(3, {d}, keepdim=True).values)
{z} - {z}.max({d}, keepdim=True).values
torch.where({z} >= {z}.amax({d}, keepdim=True), 0.5 * {z}, {z})
""")

# Of two tensors with classes.
PAIRS = lines("""
{z} + {o}
{z} - 0.5 * {o}
{z} * {o}.tanh()
torch.maximum({z}, {o})
torch.logaddexp({z}, {o})
torch.stack([{z}, {o}]).logsumexp(0)
(torch.stack([{z}, {o}]) * 0.5).exp().sum(0)
torch.stack([{z}, {o}, {z} * {o}]).amax(0)
torch.stack([{o}.log_softmax({d}) + 0.5, {z}.log_softmax({d})]).logsumexp(0)
(torch.stack([{z}, {o}]) > 0).sum(0) * {z}
{z}.softmax({d}) * {o}
torch.where({z} > {o}, {z}, 0.5 * {o})
torch.lerp({z}, {o}, 0.3)
{z} + {o}.detach()
0.5 * ({z}.softmax({d}) + {o}.softmax({d}))
{z}.log_softmax({d}) - {o}.log_softmax({d})
F.kl_div({z}.log_softmax({d}), {o}.log_softmax({d}), reduction='none', log_target=True)
torch.cat([{z}, {o}], {d})
{o} * {z}
{o} - {z}
{o} + {z}
{o}.exp() * {z}
{z}.detach() * {o}
""")

IN_PLACE = lines("""
{z}.mul_({f})
{z}.add_({f})
{z}.div_(temperature)
{z} /= {f}
{z}.tanh_()
{z} += {c}
{z}.clamp_(-3, 3)
{z}.masked_fill_({cw} > 1.2, -3.0)
{z}.sub_({row1})
{z} *= {row1}
{z}.narrow({d}, 0, 2).fill_(-1.0)
{z}.narrow({d}, 3, 2).mul_(0.5)
{z}.neg_()
{z}.scatter_({d}, {lab1}, -1.0)
{z}.nan_to_num_()
{z}.copy_({z} * 0.5)
{z} /= temperature
{z} *= 0.5
{z}.div_({row1})
{z} -= {row1}
{z}.mul_(1.5)
{z}.masked_fill_({cw} > 0.6, -7)
{z} *= {cw}
{z} -= 0.3 * F.one_hot({lab}, {v})
{z}[..., {v} - 1:] = -7
{z}[..., 0] = -4.0
{z}[..., {cw} > 0.8] = -6
{z}[{q} > 0.5] = -5
{z}.scatter_({d}, {lab1}, -2.0)
{z}[0] = 0.5
{z}.scatter_({d}, {lab1}, {z}.gather({d}, {lab1}) - 0.35)
{z}.index_fill_({d}, torch.tensor([0]), -6.0)
""")
# Another number of rows at a time changes these, so that they must stay as they are.
MIXING = lines("""
{z}.softmax({e})
{z}.cumsum({e}) * 0.3
{z} - {z}.mean({e}, keepdim=True)
{z} / {z}.norm()
{z} - {z}.max()
F.dropout({z}, 0.0)
{z} @ {z}.mT @ {z}
F.layer_norm({z}, ({v},))
""")
