"""What an eager program makes of deferred logits, which the compiled model returned: it is answered
without them, unless the row says that they are computed."""

from __future__ import annotations

import re
from dataclasses import replace

from fxpass import messages
from tests.programs.row import BOTH, FORMULA, NOTHING, OUTSIDE, REGION, Row

KIND = "answers"

OF_LABELS = "F.cross_entropy(m.flatten(0, 1), tokens.flatten())"
# of ``m``: what is answered of the logits of every head, what it becomes in their graph, and the
# ways that trace no number of rows
OF_HEADS = {
    "cross_entropy": (OF_LABELS, FORMULA, ()),
    "entropy": ("-(m.softmax(-1) * m.log_softmax(-1)).sum(-1)", FORMULA, ()),
    "masked rows": ("F.cross_entropy(m[tokens > 40], tokens[tokens > 40])", NOTHING, ("made",)),
    "two": (f"({OF_LABELS}, m.logsumexp(-1).mean())", FORMULA, ()),
    "argmax": ("m.argmax(-1)", FORMULA, ()),
}
HEADS = {"s": ("behind a break", *OUTSIDE), "capped": ("outside",), "biased": ("outside",)}

# fmt: off
ANSWERED = (
    Row("classes second", "F.cross_entropy(s.transpose(1, 2), tokens)"),
    Row("shifted", "F.cross_entropy(s[:, :-1].reshape(-1, V), tokens[:, 1:].reshape(-1))"),
    Row("contiguous, smoothed",
        "F.cross_entropy(s[..., :-1, :].contiguous().view(-1, V).float(), "
        "tokens[:, 1:].flatten(), label_smoothing=0.1)"),
    Row("module", "nn.CrossEntropyLoss(reduction='sum')(s.view(-1, V), tokens.view(-1))"),
    Row("probabilities", "F.cross_entropy(s.flatten(0, 1), soft)", REGION),
    Row("of later rows",
        "s.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).sum()"),
    Row("one-hot", "(s.log_softmax(-1) * F.one_hot(tokens, V)).sum(-1)", becomes=FORMULA),
    Row("for each sequence", "torch.stack([row.logsumexp(-1) for row in s])"),
    Row("chunks", "[part.logsumexp(-1) for part in s.chunk(3, 1)]"),
    Row("max", "s.max(-1)"),
    Row("top-k", "s.topk(4)", becomes=REGION),
    Row("accuracy", "(s.argmax(-1) == tokens).float().mean()"),
    Row("factors of rows", "(s * temperatures.view(B, T, 1)).logsumexp(-1)", BOTH),
    Row("masked classes", "s.masked_fill(torch.arange(V) > 60, -1e4).logsumexp(-1)"),
    Row("some classes", "s[..., :50].logsumexp(-1)", REGION),
    Row("mean", "s.mean()", becomes=REGION),
    Row("binary", "F.binary_cross_entropy_with_logits(s, soft.view(B, T, V))", trained=("x", "weight"),
        becomes=REGION),
    Row("einsum", "torch.einsum('btv,btv->bt', s.softmax(-1), soft.view(B, T, V))", BOTH),
    Row("detached", "s.detach().logsumexp(-1)"),
    Row("as large as the largest", "(s >= s.amax(-1, True)).sum(-1)", becomes=REGION),
    Row("above the label's",
        "lp = s.log_softmax(-1); own = lp.gather(-1, tokens[..., None]).squeeze(-1); "
        "(own.sum(), (lp > own.unsqueeze(-1)).sum(-1))", REGION),
    Row("below the third",
        "least = s.topk(3).values[..., -1:]; s.masked_fill(s < least, -9).logsumexp(-1)", REGION),
    Row("below the third of a row of values",
        "least = s.topk(3).values[..., -1].unsqueeze(-1); s.masked_fill(s < least, -9).logsumexp(-1)",
        REGION),
    Row("sign of what the largest exceeds", "(s - s.amax(-1, True).detach()).sign().sum(-1)",
        REGION),
    Row("above half of the label's",
        "own = s.gather(-1, tokens[..., None]); own.detach().mul_(0.5); "
        "(s > own).float().sum(-1) * s.logsumexp(-1)", BOTH),
    Row("padded", "F.cross_entropy(F.pad(s, (0, 21), value=-1e4).flatten(0, 1), tokens.flatten())",
        becomes=REGION),
    Row("packed bits",
        "bits = torch.arange(N * 4).view(B, T, 4) * 40503 * 65537 % 2 ** 31; classes = torch.arange(V); "
        "set = (bits[..., classes // 32] >> (classes % 32)) & 1 > 0; "
        "s.masked_fill(set, -1e4).logsumexp(-1)", becomes=REGION),
    Row("lerp",
        "torch.lerp(s, soft.view(B, T, V).to(s.dtype), s.new_tensor(0.3)).logsumexp(-1)",
        becomes=REGION),
    Row("norm of order 0", "torch.linalg.vector_norm(s.detach().round(), 0)", becomes=REGION),
    Row("norm of order 3 in f64", "torch.linalg.vector_norm(s, 3, dtype=torch.float64)",
        becomes=REGION),
    Row("probabilities of labels",
        "F.binary_cross_entropy((s * 99).sigmoid(), soft.view(B, T, V))", trained=("x", "weight"),
        becomes=REGION),
    Row("distillation", "F.kl_div(s.log_softmax(-1), soft.view(B, T, V), reduction='batchmean')",
        trained=("x", "weight"), becomes=REGION),
    Row("log-probabilities and the largest, evaluation",
        "(s.log_softmax(-1).gather(-1, tokens[..., None]), s.argmax(-1))", trained=()),
    # what the program has made is written in place
    Row("smoothed labels, filled and scattered",
        "wanted = torch.zeros_like(s); wanted.fill_(0.1 / (V - 1)); "
        "wanted.scatter_(-1, tokens[..., None], 0.9); -(wanted * s.log_softmax(-1)).sum(-1).mean()",
        becomes=FORMULA),
    Row("margins, scattered",
        "hot = torch.zeros_like(s).scatter_(-1, tokens[..., None], 1); "
        "F.cross_entropy((s - 0.3 * hot).flatten(0, 1), tokens.flatten())", becomes=REGION),
    Row("a masked copy",
        "copy = torch.clone(input=s); copy[..., 50:] = -1e4; copy[:, :, 3] = float('-inf'); "
        "copy.logsumexp(-1)", becomes=REGION),
    Row("a scaled copy",
        "copy = s.clone(memory_format=torch.contiguous_format); copy /= 2; "
        "copy.masked_fill_(soft.view(B, T, V) > 0.02, -3).mul_(temperatures.view(B, T, 1)); "
        "copy.log_softmax(-1).gather(-1, tokens[..., None])", becomes=BOTH),
    Row("filled with logits", "torch.empty_like(s).copy_(s).add_(s.detach()).logsumexp(-1)",
        becomes=FORMULA),
    Row("the result of out=",
        "with torch.no_grad():\n"
        "    made = torch.zeros_like(s)\n"
        "    torch.mul(s, 2, out=made)\n"
        "made.argmax(-1)"),
    Row("written twice",
        "copy = s.clone(); before = copy.sum(-1); copy *= 2; (before, copy.logsumexp(-1))",
        becomes=BOTH),
)
# Writes are seen by all views; what is not answered has the values of the logits.
COMPUTED = (
    Row("bits", "((s.detach().view(torch.int32) > 1065353216).sum(-1), s.logsumexp(-1))",
        becomes=NOTHING, reason="view.dtype", why=messages.BITS.format(before="float32", after="int32")),
    Row("seen by a view",
        "copy = s.clone(); row = copy[0]; copy[:, 3] = 0.0; (row.sum(-1), copy.logsumexp(-1))",
        becomes=BOTH, why=messages.WRITES_OF_MODEL),
    Row("seen by an alias",
        "copy = torch.zeros_like(s); alias = copy.detach(); copy += 1; "
        "(alias.sum(-1), (copy * s).sum(-1))", becomes=REGION, why=messages.WRITES_OF_MODEL),
    Row("to a view", "copy = s.clone(); copy[0].zero_(); copy.logsumexp(-1)",
        becomes=FORMULA, why="zero_ writes to logits of a model, or of which there are views"),
    Row("to a view of a copy",
        "copy = torch.empty_like(s); copy.copy_(s); flat = copy.view(-1, V); flat[:, 0] = 5.0; "
        "(flat.logsumexp(-1), copy.sum(-1))", becomes=REGION, why=messages.WRITES_OF_MODEL),
    Row("to the logits", "s[..., 3] = -2.0; (s.logsumexp(-1), s[0].sum())",
        becomes=REGION, why=messages.WRITES_OF_MODEL),
    Row("without gradients",
        "copy = s.clone()\n"
        "with torch.no_grad():\n"
        "    copy *= 2\n"
        "copy.logsumexp(-1)", becomes=FORMULA, why=messages.WRITES_WITHOUT_GRADIENTS),
    Row("to another shape",
        "copy = s.clone(); copy.unsqueeze_(0); copy.squeeze_(0).transpose_(1, 2); copy.logsumexp(1)",
        becomes=FORMULA),
    Row("to an operand", "given = torch.zeros(B, T, V); given.copy_(s); given.logsumexp(-1)",
        why="copy_ writes to its arguments"),
    Row("to a snapshot",
        "copy = s.detach().clone(); copy.resize_(N, V); (copy.sum(-1), s.logsumexp(-1))",
        becomes=NOTHING, why="clone asks for values"),
)


def _capped(row: Row) -> Row:
    return replace(row, name=f"{row.name}, capped", text=re.sub(r"\bs\b", "capped", row.text))


ROWS = (
    *(Row(f"{name} of {head}", f"m = {head}; {text}", becomes, ways=ways, never=never)
      for name, (text, becomes, never) in OF_HEADS.items() for head, ways in HEADS.items()),
    *(replace(row, ways=OUTSIDE) for row in ANSWERED),
    *(replace(row, ways=("outside",), computes=("outside",) * bool(row.why))
      for one in COMPUTED for row in (one, _capped(one))),
)
