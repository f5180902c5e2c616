"""Row functions that no formula covers: they run as regions, some rows at a time."""

from __future__ import annotations

from tests.programs.row import BF16, BOTH, FORMULA, NOTHING, OUTSIDE, REGION, Row, becoming
from tests.programs.rows.refused import spread

KIND = "regions"
EVERY = ("aot_eager", "inductor", "bf16", "f16", "dynamic", "no_grad")
KL_AND_LOSS = (
    "teacher = F.linear(second_x, second_weight).detach(); "
    "kl = F.kl_div((z / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction='batchmean'); "
    "F.cross_entropy(z, ignored) + 4 * kl"
)
# the classes' weights of probabilities, which promote both
BALANCED = (
    "balance = torch.arange(1, V + 1).to({}); "
    "soft = F.one_hot(labels, V).to(x.dtype) * 0.9 + 0.01; "
    "F.cross_entropy(z, soft, balance, label_smoothing={}).to(x.dtype)"
)
SCALARS = {"capture_scalar_outputs": True}
# sizes are symbolic in the first way too
SYMBOLIC = {**SCALARS, "assume_static_by_default": False}

# fmt: off
ROWS = becoming((
    Row("Jensen-Shannon to a teacher",
        "student = z.log_softmax(-1)\n"
        "with torch.no_grad():\n"
        "    teacher = q.log_softmax(-1)\n"
        "mixed = torch.logaddexp(student, teacher) - torch.tensor(2.0).log()\n"
        "one = F.kl_div(mixed, student, reduction='none', log_target=True).sum(-1)\n"
        "other = F.kl_div(mixed, teacher, reduction='none', log_target=True).sum(-1)\n"
        "counted = ignored != -100\n"
        "((one + other) / 2 * counted).sum() / counted.sum()",
        REGION, of="TRL's GKD", ways=EVERY),
    Row("KL to a teacher beside a loss",
        KL_AND_LOSS, REGION, of="distillation", ways=("bf16", "f16", "dynamic", "no_grad")),
    Row("KL to a teacher beside a loss, in bf16", KL_AND_LOSS, REGION, of="distillation",
        dtype=BF16, ways=("inductor",)),
    Row("a low-rank update of a frozen head",
        "z = F.linear(x, weight.detach()) + 0.5 * F.linear(F.linear(x, down), up); "
        "F.cross_entropy(z, ignored)",
        REGION, of="LoRA", ways=EVERY),
    Row("entropy of the nucleus",
        "p, _ = z.softmax(-1).sort(-1, descending=True); "
        "kept = p * (p.cumsum(-1) - p < 0.9); kept = kept / kept.sum(-1, keepdim=True); "
        "-(kept * kept.clamp(min=1e-9).log()).sum(-1).pow(2).mean()",
        REGION, of="top-p", ways=EVERY),
    # operands
    Row("views of rows are taken of the operands",
        "picks = tokens[:, 1:, None]; y = s[:, :-1]; spread(y) - y.gather(-1, picks).squeeze(-1)",
        REGION, ways=("dynamic",)),
    Row("two heads in one call",
        "with torch.no_grad():\n"
        "    teacher = q.softmax(-1)\n"
        "F.kl_div(z.log_softmax(-1), teacher, reduction='none').sum(-1).mean()",
        REGION, ways=("dynamic",)),
    Row("detached hidden states, and a detached weight",
        "spread(F.linear(x.detach(), weight)) + spread(F.linear(x, weight.detach()))", REGION),
    Row("an operand without a gradient, and one that has it elsewhere",
        "scale = x[:, :1]; "
        "(spread(z * scale.detach()), (z.sort(-1).values.argmax(-1) * scale[:, 0]).sum())",
        REGION),
    Row("a quotient by the number of classes",
        "smoothed = F.cross_entropy(z, labels, label_smoothing=0.1); "
        "spread(z).sum() + smoothed.sigmoid()",
        REGION, ways=("dynamic",)),
    Row("numbers of the logits that are known without them",
        "spread(s).sum() / s.size(0) + s.shape[-1] * s.sort(-1).values[..., :50].mean()",
        REGION, ways=("dynamic",)),
    # places
    Row("rows read without gradients",
        "with torch.no_grad():\n"
        "    first = z.topk(2).values.logsumexp(-1)\n"
        "    rows = spread(z)\n"
        "(spread(z).sum() + rows.sum(), first)", REGION),
    Row("rows without gradients after an operand",
        "own = labels.clone()\n"
        "with torch.no_grad():\n"
        "    rows = F.cross_entropy(z, own, reduction='none')\n"
        "(spread(z).sum(), rows)", REGION),
    Row("rows without gradients after another block",
        "with torch.no_grad():\n"
        "    own = teacher_x.sum(-1, keepdim=True)\n"
        "with torch.no_grad():\n"
        "    rows = spread(z * own)\n"
        "(spread(z).sum(), rows)", REGION),
    Row("rows without gradients before those with them",
        "z = z.sort(-1).values\n"
        "with torch.no_grad():\n"
        "    constant = z + z.tanh()\n"
        "(constant.softmax(-1) * z).var(-1)", REGION),
    Row("nothing has a gradient",
        "with torch.no_grad():\n"
        "    return (spread(F.linear(x, weight)),\n"
        "        F.linear(x, weight).topk(3).indices.eq(3).any(-1))",
        REGION),
    Row("rows that several nodes read",
        "rows = spread(z); (rows.mean(), rows.amax(), z.std(-1), z.argmax(-1) == labels)", REGION),
    # writes
    Row("an operand written between head and rows",
        "hidden = x * 1; z = F.linear(hidden, weight.detach()); hidden.mul_(2); "
        "(spread(z), hidden.clone())", REGION),
    Row("an operand of rows is written",
        "marks = labels.clone(); "
        "rows = z.detach().gather(-1, marks[..., None]).squeeze(-1) * 1.5; marks.zero_(); "
        "(rows.sum() + spread(z).sum(), marks)", REGION),
    Row("logits written and read later",
        "z.mul_(0.5); rows = spread(z); z[..., 0] = 3.0; (rows, spread(z))",
        REGION, computes=OUTSIDE, never=("checkpointed",)),
    Row("rows that are written", "rows = spread(z) + 0.5; rows.mul_(2).add_(1); rows", REGION),
    Row("rows read before they are written",
        "rows = z.sort(-1).values[..., :40].sum(-1); before = torch.cat([rows, rows * 2]); "
        "rows[:1] = 0; (rows, before)", REGION),
    Row("rows written where they are detached",
        "picks = z.gather(-1, labels[..., None]).squeeze(-1); column = picks.unsqueeze(-1); "
        "picks.detach().mul_(0.5); spread(F.relu(1 + z - column))",
        REGION, never=("checkpointed",)),
    Row("a view that is taken without gradients",
        "with torch.no_grad():\n"
        "    z = z[:, :-1]\n"
        "spread(z - z.mean(-1, keepdim=True))", REGION),
    Row("a part of the logits is written",
        "z[..., 3:9].mul_(2.0); spread(z)", REGION, computes=OUTSIDE, never=("checkpointed",)),
    Row("one class is written",
        "z[..., 0].zero_(); spread(z)", REGION, computes=OUTSIDE,
        never=("checkpointed",)),
    Row("a part of the sorted is written",
        "values = z.sort(-1).values; values[..., :4].zero_(); values[..., :60].logsumexp(-1)",
        REGION, computes=OUTSIDE, never=("checkpointed",)),
    Row("rows written that meet logits again",
        "largest = z.detach().amax(-1, keepdim=True); largest.mul_(2); spread(z - largest)",
        REGION),
    # beside other losses
    Row("a region of one head beside a formula of another",
        "(F.cross_entropy(z, labels), spread(q).mean())", BOTH),
    Row("a total that adds up the loss of a later call",
        "z = F.linear(x, weight[:11]); loss = F.cross_entropy(z, labels % 11); "
        "product = torch.matmul(z.exp().softmax(-1), weight[:11, :1]); "
        "loss + product.sum() + product.sign().sum()", REGION),
    Row("a part of the hidden states that autocast casts",
        "with torch.autocast('cpu', torch.bfloat16):\n"
        "    z = F.linear(x.view(B, T, D)[:, :-1], weight)\n"
        "z.softmax(-1).gather(-1, tokens[:, 1:, None]).sum()", FORMULA),
    # numbers
    Row("a bound of a label",
        "spread(z.clamp(max=(labels[0] + 2.5).item()))", REGION,
        dynamo=SCALARS, ways=("dynamic",)),
    Row("over the number of classes", "spread(z / weight.shape[0])", REGION, dynamo=SYMBOLIC),
    Row("by a root of the number of classes", "spread(z * weight.shape[0] ** -0.5)", REGION,
        dynamo=SYMBOLIC),
    Row("over the number of rows",
        "spread(z / z.shape[0])", REGION, dynamo=SYMBOLIC),
    *(Row(f"an index of one boolean, {place}", f"z = {text}; F.cross_entropy(z, labels)", REGION)
      for place, text in (
          ("of rows", "z[True].squeeze(0)"),
          ("between rows and classes", "z[:, True].squeeze(1)"),
          ("after the classes", "z[..., True].squeeze(-1)"))),
    # logits that are returned
    Row("logits leave", "(spread(z).mean(), z)", REGION, computes=OUTSIDE),
    Row("logits leave soft-capped, and of two losses",
        "loss = F.cross_entropy(z, torch.zeros(N, dtype=torch.int64)); "
        "(spread(z).mean() + loss, 30 * (z / 30).tanh())", REGION, computes=OUTSIDE),
    Row("logits leave twice",
        "(spread(s[:, 1:]).sum(), s.flatten(0, 1), s / 2)", REGION, computes=OUTSIDE),
    Row("logits leave beside those of another head",
        "y = F.linear(x.tanh(), weight); (F.cross_entropy(y, labels), y, spread(z).mean(), z)",
        BOTH, computes=OUTSIDE),
    *(Row(f"rows leave: {name}", text, NOTHING, "leave", computes=OUTSIDE, never=("checkpointed",))
      for name, text in {
          "sorted": "(spread(z).mean(), z.sort(-1).values)",
          "a softmax": "(spread(z), z.softmax(-1))",
          "without a gradient": "(spread(z.detach()).mean(), z.detach())",
          "less their lse": "(spread(z).mean(), z - z.logsumexp(-1, True))",
      }.items()),
    *(Row(f"probabilities weighted in {dtype}, smoothing {smoothing}",
          BALANCED.format(f"torch.{dtype}", smoothing), REGION,
          never=("checkpointed", "exported"))
      for dtype in ("float64", "bfloat16", "int64") for smoothing in (0.0, 0.1)),
    # sums of products by einsum
    *(Row(f"einsum, {name}", f"p = s.softmax(-1); {text}", becomes,
          computes=OUTSIDE if "no arrow" in name else (), never=("exported",) * (name == "all"))
      for name, text, becomes in (
          ("words", "torch.einsum('btv,btv->bt', p, s)", REGION),
          ("all", "torch.einsum('btv,btv->', p, s)", NOTHING),
          ("a list", "torch.einsum('btv,btv->bt', [p, s])", REGION),
          ("no arrow", "torch.einsum('btv,btv', p, s)", NOTHING),
          ("one operand, no arrow", "torch.einsum('btv', p).sort(-1).values[..., 3]", REGION),
          ("numbers", "torch.einsum(p, [0, 1, 2], s, [0, 1, 2], [0, 1])", REGION))),
    Row("einsum, autocast",
        "with torch.autocast('cpu', torch.bfloat16):\n"
        "    p = s.softmax(-1)\n"
        "    return torch.einsum('btv,btv->bt', p.float(), s.float()).double()", BOTH),
), {
    FORMULA: ("probabilities weighted in bfloat16, smoothing 0.1", "probabilities weighted in int64, smoothing 0.1", "probabilities weighted in bfloat16, smoothing 0.0", "probabilities weighted in int64, smoothing 0.0",),
    BOTH: ("einsum, numbers", "einsum, words", "einsum, a list",),
})
