"""Programs that random programs were reduced to, each of which failed once.

A row of another table that failed is not repeated here.
"""

from __future__ import annotations

from tests.programs.row import BOTH, FORMULA, NOTHING, REGION, Row

KIND = "corpus"

# fmt: off
ROWS = (
    # The class indices were those after the write: a transposed index that is reshaped is a copy.
    Row("a one-hot tensor of a copied view, and its labels change",
        "hot_of = tokens.t().reshape(-1); "
        "y = s.transpose(0, 1).reshape(-1, V) - 0.5 * F.one_hot(hot_of, V); "
        "tokens.copy_((tokens + 1) % V); "
        "F.cross_entropy(y, tokens.t().reshape(-1))", REGION),
    # The rewrite put in an einsum, which autocast makes one of bf16.
    Row("sums of given values inside of autocast",
        "log = z.log_softmax(-1); q = torch.full_like(log, 1 / 7).detach() + prior.exp()\n"
        "with torch.autocast('cpu', torch.bfloat16):\n"
        "    rows = (q * (q.log() - log)).sum(-1).square()\n"
        "rows.sum()", REGION),
    # All pieces were read as one, of which the factor has too few rows.
    Row("pieces of the rows with one factor for all",
        "factor = 1.0 + torch.arange(12.0).unsqueeze(1); "
        "torch.cat([(torch.tanh(piece * factor).log_softmax(-1).exp() * prior).sum(-1)"
        " for piece in z.split(12)])", REGION),
    # The index was placed after the call.
    Row("an index of classes that comes first",
        "y = torch.index_select(index=labels[:5] * 0 + 1, input=z, dim=1); "
        "y.log_softmax(-1).square().sum(-1)", REGION),
    # What a call under no_grad had read was constant for the calls with gradients.
    Row("rows that are read without gradients first",
        "y = z.sort(-1).values\n"
        "with torch.no_grad():\n"
        "    constant = y + y.tanh()\n"
        "(constant.softmax(-1) * y).var(-1)", REGION),
    # The gradient of the values was nan: a row without a gradient has a huge log-sum-exp.
    Row("trained values of classes beside rows without a gradient",
        "((z.log_softmax(-1) * factor).sum(-1) * (values > 0)).sum()", REGION),
    # 1 + z - z lost digits of a certain row's gradient.
    Row("a sum of classes of which one is certain",
        "certain = torch.arange(V) == 3; y = z + 1000.0 * certain; "
        "0.3 * (y.softmax(-1) * y).sum(-1)", REGION),
    # Was read as the value before the write.
    Row("logits beside a row that is written to",
        "chosen = z.gather(-1, labels[:, None]); chosen.detach().mul_(2); "
        "(z > chosen).sum(-1) * z.sum(-1)", REGION),
    # Saved for backward though only a metric reads it: an error where it is overwritten.
    Row("an operand that only a metric reads is written to",
        "log = z.log_softmax(-1)\n"
        "with torch.no_grad():\n"
        "    read = (log.exp() * teacher).sum(-1)\n"
        "teacher.zero_()\n"
        "(log.gather(-1, labels[:, None]).square().sum(), read)", left="maximum, full"),
    # False for the largest class: the two sides were rounded in two ways.
    Row("a target that is the largest, by hand",
        "y = z - z.logsumexp(-1, keepdim=True); "
        "(y.amax(-1) <= y.gather(-1, labels[:, None])[:, 0]) * y.mean(-1)", BOTH),
    # The other results changed: they were rows of one tensor.
    Row("results of one call, of which one is written to",
        "first, second = z.logsumexp(-1), z.logsumexp(-1); first.add_(1); (first, second, z.amax(-1))",
        trained=()),
    # Broadcast by position, not by name: three dimensions of rows.
    Row("picks of three dimensions of rows",
        "y = z.view(2, 2, 12, V); a = torch.arange(2)[:, None, None]; b = torch.arange(2)[None, :, None]; "
        "y.log_softmax(-1)[a, b, torch.arange(12)[None, None], labels.view(2, 2, 12)]"),
    Row("one label for each of the second rows",
        "y = z.view(2, 2, 12, V).log_softmax(-1); a = torch.arange(2)[:, None, None]; "
        "y[a, torch.arange(2)[None, :, None], torch.arange(12), labels[:24].view(2, 1, 12)]"),
    Row("values that are put at labels",
        "y = s * 1; y[torch.arange(B)[:, None], torch.arange(T), tokens] = values.view(B, T); "
        "y.logsumexp(-1)", REGION),
    Row("one-hot labels by a scatter along the classes",
        "hot = torch.zeros(N, V).scatter(1, labels[:, None], 1.0); "
        "((z - hot).log_softmax(-1) * hot).sum(-1).square()", REGION),
    Row("classes that a scatter marks in every row",
        "hot = torch.zeros(N, V).scatter(0, labels[None, :V].clamp(max=N - 1), 1.0); "
        "((z - hot).softmax(-1) * z).sum(-1)", REGION, left="full, scatter"),
    Row("logits times the probabilities of twice the logits",
        "(F.softmax(2 * z, -1) * z).sum(-1)", BOTH),
    # The sum, which writes, came before the write to a view.
    Row("values that are filled through a view, then added to",
        "made = torch.zeros(N, V); made[1].fill_(3.0); (made.add_(5) * z.log_softmax(-1)).sum()",
        FORMULA),
    # The gradient was lost: the operand cancels out of the expression.
    Row("an operand that cancels",
        "((z + bias).log_softmax(-1) - (z + bias) + bias).sum(-1)", REGION),
    # Half of the digits: a moment of the softmax was found by a power of 0.
    Row("a square of a log-softmax times a probability of another temperature",
        "(z.log_softmax(-1).square() * (2 * z).softmax(-1)).sum(-1)", REGION),
)
