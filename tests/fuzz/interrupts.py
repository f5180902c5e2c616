"""What random programs do besides a loss: writes, reads, other aliases, modes.

Templates as in :mod:`tests.fuzz.grammar`: ``{a}`` is a tensor that somebody may write to, ``{A}``
an alias of one.
"""

from __future__ import annotations

# ---------------------------------------------------------------- writes

ALIASES = (
    *["{a}"] * 6,
    "{a}.data",
    "{a}.detach()",
    "{a}.view(-1)",
    "{a}[0]",
    "{a}[..., 0]",
    "{a}[..., -1:]",
    "{a}.T",
    "{a}.view_as({a})",
    "{a}.flatten()",
    "{a}.narrow(0, 0, 1)",
    "{a}.unsqueeze(0)",
)

WRITES = (
    "{A}.mul_({f})",
    "{A}.neg_()",
    "{A}.zero_()",
    "{A}.add_(1.0)",
    "{A}.add_(other={A}, alpha=2)",
    "{A}.clamp_(-1, 1)",
    "{A}.clamp_(max=0.5, min=-0.5)",
    "{A}.copy_({A} * {f})",
    "{A}.copy_({A}.flip(0))",
    "{A}.fill_({f})",
    "{A}.sub_({A}.mean())",
    "{A}.div_({p})",
    "{A}.lerp_(torch.ones_like({A}), 0.5)",
    "{A}.masked_fill_({A} > 0.5, {f})",
    "{A}.index_fill_(0, torch.tensor([0]), {f})",
    "{A}.relu_()",
    "{A}.tanh_()",
    "{A}.__imul__({f})",
    "{A}.__setitem__(0, {f})",
    "{A}.normal_()",
    "{A}[0] = {f}",
    "{A}[..., 0] = {f}",
    "{A}[{A} > 0.5] = {f}",
    "{A}[:] = {A} * {f}",
    "{a} *= {f}",
    "{a} += 1.0",
    "{a} /= {p}",
    "{a} -= {a}.mean()",
    "{a} += {b}",
    "{a} *= s",
    "F.relu({A}, {true})",
    "F.relu({A}, inplace={true})",
    "F.relu_({A})",
    "F.hardtanh({A}, -1.0, 1.0, {true})",
    "F.hardtanh({A}, inplace={true}, min_val=-0.5)",
    "F.leaky_relu({A}, 0.1, {true})",
    "F.elu({A}, 1.0, {true})",
    "F.celu({A}, 1.0, {true})",
    "F.selu({A}, {true})",
    "F.relu6({A}, {true})",
    "F.silu({A}, {true})",
    "F.mish({A}, {true})",
    "F.hardswish({A}, {true})",
    "F.hardsigmoid({A}, {true})",
    "F.threshold({A}, 0.1, {f}, {true})",
    "F.dropout({A}, 0.5, True, {true})",
    "F.dropout({A}, 0.0, True, {true})",
    "F.dropout(training=True, p=0.5, inplace={true}, input={A})",
    "F.alpha_dropout({A}, 0.5, True, {true})",
    "F.feature_dropout({A}, 0.5, True, True)",
    "F.normalize({A}, out={A})",
    "torch.mul({A}, {f}, out={A})",
    "torch.neg({A}, out={A})",
    "torch.clamp({A}, -1, 1, out={A})",
    "torch.relu_({A})",
    "torch._foreach_mul_([{A}], {f})",
    "torch._foreach_add_([{A}, {A}], 1.0)",
    "torch.nn.init.zeros_({A})",
    "operator.imul({A}, {f})",
    "operator.iadd({A}, 1.0)",
    "operator.setitem({A}, 0, {f})",
    "torch.ops.aten.mul_({A}, {f})",
    "torch.ops.aten.mul_.Scalar({A}, {f})",
    "F.embedding(ids, {a}, max_norm=0.5)",
    "F.embedding_bag(ids, {a}, max_norm=0.3)",
    "F.batch_norm({x2}, mean, mean, training={true})",
    "mean.mul_(0.9).add_({x2}.detach().mean(0).float())",
    "e.mul_(0.5).add_({w}.detach(), alpha=0.5)",
    "e.copy_({w}.detach())",
    "e.lerp_({w}.detach(), 0.1)",
    "g.mul_({f})",
    "g[0] = {f}",
)

INTEGER_WRITES = (
    "t[0] = 1",
    "t[:, 0] = -100",
    "t.masked_fill_(~m, -100)",
    "t.clamp_(max=2)",
    "t.view(-1)[0] = 0",
    "t.zero_()",
    "t += 0",
    "t.add_(1).remainder_(7)",
    "t.data.fill_(3)",
    "m[0] = False",
    "m.logical_not_()",
    "m &= t > 1",
    "cw.zero_()",
    "cw[t.view(-1)] = 0.5",
    "s.mul_(2.0)",
    "ids.zero_()",
    "i.zero_()",
    "i.sub_(1)",
)

NEW_ALIASES = ("{a}.view(-1)", "{a}.detach()", "{a}[0]", "{a}.data", "{a}.T", "{a}.view_as({a})")

WRITABLE = ("x", "h", "w", "w2", "wt", "b", "z", "y", "e", "s")

# ---------------------------------------------------------------- what only reads, or does nothing

READS = (
    "r = {z}.argmax(-1)",
    "r = {z}.detach().softmax(-1)",
    "r = {z}.max(-1).values.detach()",
    "r = {z}.logsumexp(-1)",
    "r = {z}.square().mean()",
    "r = {z}[..., 0]",
    "r = torch.isfinite({z}).all()",
    "r = {z}.topk(2).indices",
    "r = {x}.sum()",
    "r = {w}.norm()",
    "r = (F.softmax({z}, -1) * F.log_softmax({z}, -1)).sum(-1)",
    "r = torch.rand(2)",
    "r = {z}.shape[0] * torch.ones(())",
    "r = (t != -100).sum()",
    "r = {z}.sum(-1).mean()",
    "r = F.linear({x}, e).mean()",
    "r = F.cross_entropy(F.linear({x}, e).reshape(-1, 11), t.reshape(-1))",
)

SWITCHES = (
    "torch.set_grad_enabled(False)",
    "torch.set_grad_enabled(True)",
    "torch._C._set_grad_enabled(True)",
)

BREAKS = ("torch._dynamo.graph_break()",)

CONTEXTS = (
    *["torch.no_grad()"] * 5,
    "torch.enable_grad()",
    "torch.set_grad_enabled(True)",
    "torch.inference_mode()",
    "torch.inference_mode(False)",
    'torch.autocast("cpu", torch.bfloat16)',
    'torch.autocast("cpu", dtype=torch.bfloat16)',
    'torch.autocast("cpu", enabled=False)',
)
