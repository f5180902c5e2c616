"""What the user of a compiled function does with what it returned, in eager mode.

``{o}`` is a tensor that was returned, ``{O}`` an alias of one, ``{a}`` an argument. Statements of
:data:`CHANGES` write to arguments: deferred logits may then say that they are stale.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

USES = (
    "seen({o})",
    "seen({o}.argmax(-1))",
    "seen({o}.float().softmax(-1))",
    "seen({o}[0])",
    "seen({o}[..., -1])",
    "seen({o}.detach().double().sum())",
    "seen({o}.view(-1)[0])",
    "seen({o}.mean())",
    "seen({o} + 1)",
    "seen(torch.zeros_like({o}))",
    "seen({o}.shape[0])",
    "seen({o}.detach().clone())",
    "seen({o}.tolist())",
    "seen(torch.stack([{o}, {o}]).sum(0))",
    "seen({o}.logsumexp(-1))",
    "seen({o}.max(-1).values)",
    "seen({o}.to(torch.bfloat16))",
    "seen({o}.detach().numpy().sum())",
    "seen(F.cross_entropy({o}.reshape(-1, {o}.shape[-1]).float(), t.reshape(-1)))",
    'seen(torch.compile(lambda v: v.float().sum(-1), backend="aot_eager")({o}))',
    'seen(torch.compile(lambda v: (v[::2], v[1::2]), backend="aot_eager", fullgraph=True)({o})[0])',
    'seen(torch.compile(lambda v: v.max() in v.detach(), backend="aot_eager")({o}))',
    'g = torch.compile(lambda v: (v[:1], v.T), backend="aot_eager", fullgraph=True)({o})[1]',
    "g = {o}.view(-1)",
    "g = {o}.as_subclass(torch.nn.Buffer)",
    "g = torch.empty(0, dtype={o}.dtype).set_({o}.detach())",
    "g = {o}.detach()",
    "g = {o}[0]",
    "g = {o}.float()",
    "g = {o}[..., :2]",
    "g = {o}.transpose(0, -1)",
    "seen(g)",
    "seen(g.sum())",
    "{o} = {o} * 2",
    "{o} = {o}.float()",
    "{o} = {o}[:1]",
    "{o} = {o}[:1].detach()",
    "backward({o})",
    "del {o}",
)

# Writes to what was returned.
WRITES = (
    "{O}.mul_(2)",
    "{O}.zero_()",
    "{O}.add_(1)",
    "{O}[0] = 0.5",
    "{O}[..., 0] = -1.0",
    "{O}[{O} > 0] = 0.25",
    "{O}.copy_(torch.ones_like({O}))",
    "{O}.clamp_(-1, 1)",
    "{O}.masked_fill_({O} > 0.5, 0.0)",
    "{O}.neg_()",
    "{o} /= 2",
    "{o} *= 2",
    "torch._foreach_mul_([{O}], 2)",
    "F.relu({O}, True)",
    "{O}.numpy().fill(0)",
    'torch.compile(lambda v: v.mul_(2), backend="aot_eager", fullgraph=True)({O})',
    'torch.compile(lambda v: v[0].detach().zero_(), backend="aot_eager", fullgraph=True)({O})',
    'torch.compile(lambda v, u: v.add_(1) + u, backend="aot_eager", fullgraph=True)({O}, {o})',
    "{O}.apply_(lambda v: v * 2)",
    "{O}.map_(torch.ones({o}.shape[-1]).to({o}.dtype), lambda v, u: v + u)",
    "g.mul_(2)",
    "g[0] = 3.0",
)

RETURNED_ALIASES = (
    *["{o}"] * 3,
    "{o}.detach()",
    "{o}.data",
    "{o}.view(-1)",
    "{o}[0]",
    "{o}[..., 1]",
    "{o}.detach()[0]",
)

CHANGES = (
    "{a}.data.mul_(2)",
    "{a}.data.neg_()",
    "{a}.data[0] = 0.5",
    "{a}.detach().zero_()",
    "{a}.detach().add_(1)",
    "{a}.data = {a}.data * 2",
    "{a}.detach().numpy().fill(0.5)",
    "torch._foreach_neg_([{a}.detach()])",
    "{a}.detach().copy_({a}.detach().flip(0))",
)

# Factors of what backward begins with, which are the incoming gradient of a loss.
FACTORS = ("", "", ", by=1", ", by=1", ", by=-2.5", ", by=torch.tensor(0.25)", ", by=0")


def passes(rng: random.Random, names: Iterable[str]) -> list[str]:
    """Backward passes: one, or several, of which the last one frees the graph."""
    some = ", ".join(names)
    calls = [f"backward({some}{rng.choice(FACTORS)}" for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    return [*(f"{call}, retain_graph=True)" for call in calls[:-1]), f"{calls[-1]})"]


OPTIMIZERS = (
    "torch.optim.SGD([{p}], lr=0.1).step()",
    "torch.optim.SGD([{p}], lr=0.1, momentum=0.9).step()",
    "torch.optim.SGD([{p}], lr=0.1, foreach=True).step()",
    "torch.optim.SGD([{p}], lr=0.1, foreach=False).step()",
    "torch.optim.Adam([{p}], lr=0.1).step()",
    "torch.optim.AdamW([{p}], lr=0.1, foreach=True).step()",
    "torch.optim.SGD([{p}], lr=0.1).zero_grad()",
    "torch.optim.SGD([{p}], lr=0.1).step(lambda: None)",
)
