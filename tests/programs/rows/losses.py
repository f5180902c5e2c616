"""Ways to write a loss of logits."""

from __future__ import annotations

from tests.programs.operands import Sizes
from tests.programs.row import FORMULA, REGION, Row

KIND = "losses"
STUDENT = ("x", "weight")

# of ``s``, the same as ``z`` [N, V], and ``t`` [B, T]
LOSSES = {
    "a module": "nn.CrossEntropyLoss(label_smoothing=0.1)(z, labels)",
    "by position": "F.cross_entropy(z, labels, None, None, 3, None, 'sum', 0.1)",
    "everything, of more dimensions":
        "F.cross_entropy(s.mT, t, class_weight, ignore_index=2, label_smoothing=0.2)",
    "labels that are padded":
        "padded = F.pad(t, (0, 1), value=-100)[..., 1:].reshape(-1); "
        "F.cross_entropy(z, padded, ignore_index=-100)",
    "nll_loss modules": "nn.NLLLoss()(nn.LogSoftmax(1)(z), labels)",
    "nll_loss with class weights":
        "F.nll_loss(z.log_softmax(1), labels, class_weight, ignore_index=3)",
    "nll_loss of logits": "F.nll_loss(z, labels)",
    "nll_loss of shifted logits": "F.nll_loss(2 - z * 3, labels, class_weight, ignore_index=3)",
    "nll_loss of scaled log-probabilities":
        "F.nll_loss(s.log_softmax(-1).view(-1, V) * 2, labels)",
    "nll_loss of a function of the softmax":
        "F.nll_loss((z.softmax(-1) + 1e-3).log(), labels, ignore_index=3)",
    "nll_loss of a log_softmax of a log_softmax":
        "F.nll_loss(z.log_softmax(-1).log_softmax(-1), labels)",
    "nll_loss, one per row":
        "F.nll_loss(s.transpose(1, 2).log_softmax(1), t, reduction='none').square().sum()",
    "log-probabilities that are also read":
        "p = z.log_softmax(-1); F.nll_loss(p, labels) + p.exp().square().sum()",
    "take_along_dim":
        "torch.take_along_dim(s.log_softmax(-1), t.unsqueeze(-1), dim=-1).square().mean()",
    "index": "-z.log_softmax(-1)[torch.arange(N), labels].mean()",
    "index by a range": "z.log_softmax(-1)[range(len(z)), labels].mean()",
    "index of three dimensions":
        "at = torch.arange(s.shape[0])[:, None], torch.arange(t.shape[1]), t; "
        "-s.log_softmax(-1)[at].mean()",
    "index from the end":
        "at = torch.arange(len(t)).view(-1, 1), torch.arange(t.shape[1])[None], t - V; "
        "s[at].square().mean()",
    "gather - logsumexp":
        "-(s.gather(-1, t[..., None]).squeeze(-1) - torch.logsumexp(s, dim=-1)).mean()",
    "logsumexp - gather, the dimension kept":
        "(s.logsumexp(-1, keepdim=True) - s.gather(-1, t.unsqueeze(-1))).square().mean()",
    "logsumexp of more dimensions": "s.transpose(1, 2).logsumexp(1).square().mean()",
}  # fmt: skip
OF_PROBABILITIES = (
    "p = F.one_hot(t, V).to(s.dtype) * 0.9 + 0.01; F.cross_entropy(s.mT, p.mT, label_smoothing=0.1)"
)
OF = "s = s * 2; z = s.view(-1, V); t = tokens; {}"

# fmt: off
ROWS = (
    *(Row(name, OF.format(text)) for name, text in LOSSES.items()),
    Row("probabilities of one row", OF.format("F.cross_entropy(s[0, 0], soft[0])"), FORMULA,
        trained=STUDENT),
    # What is given is the row function's own from 32 classes on.
    Row("probabilities of more dimensions", OF.format(OF_PROBABILITIES), FORMULA),
    Row("probabilities of more dimensions, few classes", OF.format(OF_PROBABILITIES), sizes=Sizes(b=2, t=4, d=6, v=10)),
    Row("targets that are trained", OF.format("F.cross_entropy(z, soft)"), REGION),
    Row("class weights that are trained",
        OF.format("p = F.one_hot(labels, V).to(z.dtype); F.cross_entropy(z, p, factor)"),
        REGION),
    Row("probabilities, class weights and a z-loss", OF.format(
        "p = F.one_hot(labels, V).to(z.dtype) * 0.9 + 0.01; "
        "loss = F.cross_entropy(z, p, class_weight, label_smoothing=0.1); "
        "loss + 1e-2 * s.logsumexp(-1).square().mean()"), FORMULA),
)
