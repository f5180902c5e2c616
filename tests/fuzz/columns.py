"""Reductions over the rows of each class: the columns of logits in random programs.

In: nothing. Out: tables of templates, with the holes of :mod:`tests.fuzz.steps`: from logits to logits,
and from logits to values of columns. ``{m}`` is the tensor as a matrix ``[N, V]``, masked or as it is,
``{t}`` its transpose, ``{rows}`` all dimensions of rows, ``{col}`` a row for each class, ``{lab}`` a
class for each row of the matrix, ``{k}`` an earlier result with a value for each class.
"""

from __future__ import annotations

from tests.fuzz.steps import lines

# {m}: the mask of a column that is ignored whole has no finite loss, and is seldom kept
MATRICES = (
    *("{flat}",) * 5,
    "{flat}.float()",
    "{flat}.masked_fill({flat} < -2, -torch.inf)",
    "{flat}.masked_fill({flat}.detach() > 1.5, -torch.inf)",
    "{z}.masked_fill({q} > 0.2, -torch.inf).movedim({d}, -1).reshape(-1, {v})",
    "{z}.masked_fill({mask1}, -torch.inf).movedim({d}, -1).reshape(-1, {v})",
    "{flat}.masked_fill(torch.eye({n}, {v}, dtype=torch.bool), -torch.inf)",
)
TRANSPOSES = ("{m}.mT", "{m}.t()", "{m}.T", "{m}.transpose(0, 1)", "{m}.t().contiguous()")
# {col}, and the same with columns that are ignored
ROWS = (
    *("torch.arange({v}) % {n}", "torch.arange({v}) * 5 % {n}", "torch.arange({v}).flip(0) % {n}"),
    *("tokens.reshape(-1).repeat({v})[:{v}] % {n}", "torch.full(({v},), {n} - 1)"),
)

# Classes again.
STEPS = lines("""
{z}.softmax({e})
{z}.log_softmax({e})
{z}.log_softmax({e}).log_softmax({d})
{z}.log_softmax({d}).log_softmax({e})
{z}.log_softmax({d}).log_softmax({e}).log_softmax({d}).log_softmax({e})
{z}.softmax({d}) * {z}.softmax({e})
{z} - {z}.logsumexp({rows}, keepdim=True)
{z} - {z}.mean({rows}, keepdim=True)
{z} - {z}.sum({rows}, True) * 0.1
{z} * {z}.logsumexp({rows}, keepdim=True).tanh()
{z}.logsumexp({rows}, keepdim=True) - {z}.logsumexp({d}, keepdim=True) + {z}
{z} - {z}.detach().amax({rows}, keepdim=True)
{z} - {z}.amax({rows}, keepdim=True).detach()
{z} / ({z}.square().sum({rows}, keepdim=True) + 0.5).sqrt()
({z} - {z}.mean({rows}, True)) / ({z}.var({rows}, keepdim=True) + 0.5).sqrt()
{z}.masked_fill({z} >= {z}.detach().amax({rows}, keepdim=True), -1.0)
torch.where(({z}.detach() > 1).any({e}, keepdim=True), {z}, 0.5 * {z})
{z} - {m}.logsumexp(0).view({class1})
{z} * {m}.softmax(0).square().sum(0).view({class1})
{z} - {m}.detach().amin(0, keepdim=True).clamp(min=-9.0).view({class1})
{z} + {m}.argmax(0).view({class1}) * 0.1
{m}.log_softmax(0).clamp(min=-20.0).view({last}.shape).movedim(-1, {d})
{m}.softmax(0).view({last}.shape).movedim(-1, {d})
{m}.log_softmax(1).log_softmax(0).clamp(min=-20.0).view({last}.shape).movedim(-1, {d})
{t}.softmax(-1).t().reshape({last}.shape).movedim(-1, {d})
{t}.log_softmax(1).mT.clamp(min=-20.0).reshape({last}.shape).movedim(-1, {d})
{z} - {z}.gather({e}, ({col}).unsqueeze({e}))
{z}.scatter({e}, ({col}).unsqueeze({e}), -1.0)
{z} - {k}.view({class1})
{z} * {k}.view({class1}).tanh()
{z} + {k}.detach().view({class1})
torch.where({k}.view({class1}) > 0.5, {z}, 0.5 * {z})
""")

# A value for each class, or one of all.
REDUCTIONS = lines("""
{m}.sum(0)
{m}.mean(0)
{m}.mean(0, keepdim=True)
{m}.logsumexp(0)
{m}.logsumexp(0, keepdim=True)
{z}.logsumexp({rows})
{z}.logsumexp({rows}, keepdim=True)
{z}.sum({rows}) * {z}.mean({rows})
{m}.detach().amax(0)
{m}.amin(0).detach()
{m}.amax(0)
{t}.amax(-1)
{z}.detach().amax({rows})
({m} > 0.5).any(0)
({m} > -9).all(0, keepdim=True)
({m} > 0.5).sum(0)
{m}.exp().sum(0).log()
{m}.softmax(0).square().sum(0)
-({m}.softmax(0) * {m}.log_softmax(0)).sum(0)
torch.special.entr({m}.softmax(0)).sum(0)
-({m}.softmax(0) * {m}.log_softmax(1)).sum(1)
({m}.softmax(0) * {m}.softmax(1)).sum()
{m}.std(0)
{t}.logsumexp(1)
{t}.logsumexp(-1) - {t}.mean(1)
{t}.softmax(-1).square().sum(-1)
{t}.log_softmax(dim=1).gather(1, ({col}).unsqueeze(1)).squeeze(1)
{t}.log_softmax(-1)[torch.arange({v}), {col}]
{m}.gather(0, ({col}).unsqueeze(0)).squeeze(0)
{m}.gather(0, ({col})[None]) - {m}.logsumexp(0, True)
{m}.log_softmax(0).gather(0, ({col}).unsqueeze(0))
{m}.log_softmax(0).log_softmax(1).gather(1, {lab}[:, None])
{m}.log_softmax(1).log_softmax(0).gather(1, {lab}[:, None])
{m}.log_softmax(0).gather(1, {lab}[:, None]).squeeze(1)
F.cross_entropy({t}, {col})
F.cross_entropy({t}, {col}, reduction={reduction})
F.cross_entropy({t}, {col}, reduction={reduction}, ignore_index=2)
F.cross_entropy({t}, {col}, label_smoothing=0.1, reduction={reduction})
F.cross_entropy({t}, torch.where(class_weight[:{v}] > 0.9, {col}, -100), reduction={reduction})
F.cross_entropy({flat}, {lab}) + F.cross_entropy({t}, {col})
(F.cross_entropy({m}, {lab}, reduction='none').mean() + F.cross_entropy({t}, {col}, reduction='none').tanh().sum()) / 2
F.cross_entropy({t}, {m}.detach().softmax(0).t())
F.kl_div({m}.log_softmax(0), {m}.detach().softmax(1), reduction='sum')
F.nll_loss({t}.log_softmax(1), {col}, reduction={reduction})
F.cross_entropy({flat}.log_softmax(0), {lab}, reduction={reduction})
p% = {m}.softmax(-1); p% = p% / (p%.sum(0, keepdim=True) + 0.1); r% = (p% / p%.sum(1, keepdim=True)).square().sum(1)
k% = {m}.logsumexp(0, True); r% = ({flat} - k%).tanh().mean(1)
k% = {m}.logsumexp(0); r% = ({flat} * k%).logsumexp(-1)
k% = {m}.detach().amax(0); r% = ({flat} - k%).exp().sum(0).log()
k% = {m}.amax(0, True).detach(); r% = k% + ({m} - k%).exp().sum(0, True).log()
with torch.no_grad(): k% = {m}.softmax(0).sum(1); r% = k% * {flat}.logsumexp(1)
{flat}.diagonal()
torch.diag({flat}) - {flat}.logsumexp(0)
-{flat}.log_softmax(0).diagonal()
({flat}.log_softmax(0) + {flat}.log_softmax(1)).diagonal()
-torch.diag({t}.log_softmax(-1))
F.cross_entropy({flat}, torch.arange({n})) + F.cross_entropy({flat}.t(), torch.arange({n}))
""")

# Those whose answer a tie would leave to chance.
ORDERED = lines("""
{flat}.argmax(0)
{flat}.argmin(0, keepdim=True)
{flat}.detach().max(0).indices
{flat}.detach().max(0).values
{flat}.detach().min(0, True)[0]
v%, r% = {flat}.max(0)
{t}.argmax(1)
({flat}.argmax(0) == {col}).float()
({flat}.mT.argmax(-1) == {col}) & ({flat} > 0).any(0)
({flat} > {flat}.detach().gather(0, ({col}).unsqueeze(0))).sum(0)
i% = {flat}.argmax(0, keepdim=True); r% = {flat}.log_softmax(0).gather(0, i%)
{flat}.amax(0) * {flat}.argmax(0)
""")
