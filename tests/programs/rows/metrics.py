"""Metrics of the logits: beside a loss, under ``no_grad``, or alone in evaluation."""

from __future__ import annotations

from tests.programs.row import FORMULA, IN_BF16, REGION, Row

KIND = "metrics"


# of ``m``: the logits, or what they are without a gradient; and what it is fused as
METRICS = {
    "argmax": ("m.argmax(-1)", FORMULA),
    "argmax == labels": ("(m.argmax(dim=-1) == labels).float().mean()", FORMULA),
    "max, values and indices": ("m.max(-1)", FORMULA),
    "amax": ("m.amax(dim=-1)", FORMULA),
    "topk": ("torch.topk(m, 5, dim=-1)", REGION),
    "mean logit": ("m.mean(-1)", REGION),
    "max probability": ("m.softmax(-1).max(-1).values", REGION),
    "rank of the target": ("(m > m.gather(-1, labels[:, None])).sum(-1)", REGION),
    "target >= max": ("m.gather(-1, labels[:, None])[:, 0] >= m.amax(-1)", FORMULA),
}
UNDER_NO_GRAD = (
    "with torch.no_grad():\n    m = z\n    metric = {}\n(F.cross_entropy(z, labels), metric)"
)


# fmt: off
ROWS = (
    *(Row(f"{name}, no_grad beside a loss", UNDER_NO_GRAD.format(text), becomes, of="trainers")
      for name, (text, becomes) in METRICS.items()),
    *(Row(f"{name}, detached before a loss",
          f"m = z.detach(); metric = {text}; (F.cross_entropy(z, labels), metric)", becomes,
          of="trainers")
      for name, (text, becomes) in METRICS.items()),
    *(Row(f"{name}, evaluation", f"m = z; {text}", becomes, of="evaluation", trained=())
      for name, (text, becomes) in METRICS.items()),
    Row("argmax beside a loss, no detach",
        "accuracy = (torch.argmax(input=z, dim=1) == labels).sum() / len(labels); "
        "(F.cross_entropy(z, labels), accuracy)",
        of="tutorials", ways=IN_BF16),
    Row("argmax(keepdim) == labels[:, None]",
        "with torch.no_grad():\n"
        "    hits = torch.eq(torch.argmax(z, 1, True), labels.unsqueeze(1))\n"
        "(F.cross_entropy(z, labels), hits.sum())",
        of="tutorials"),
    Row("max().indices of the last dimension",
        "with torch.no_grad():\n"
        "    predicted = torch.max(input=s, dim=2).indices\n"
        "loss = F.cross_entropy(s.view(-1, s.size(-1)), tokens.view(-1))\n"
        "(loss, (predicted == tokens).flatten())",
        of="tutorials"),
    Row("rank by >=, reciprocal, evaluation",
        "target = torch.gather(input=z, dim=1, index=labels.view(-1, 1)); "
        "(z >= target).sum(dim=1).float().reciprocal().mean()", REGION,
        of="retrieval", trained=()),
    Row("logits[arange, argmax], evaluation",
        "best = z.argmax(1, keepdim=True); z.gather(1, best).squeeze(1) - z.logsumexp(1)", REGION,
        of="greedy decoding", trained=()),
    Row("max(1)[1] as the prediction",
        "_, predicted = torch.max(z.data, 1); "
        "(F.cross_entropy(z, labels), predicted.eq(labels).sum())",
        of="torch's examples", never=("exported",)),
    Row("token accuracy of shifted logits",
        "logits, labels = (s[:, :-1], ignored_tokens[:, 1:])\n"
        "loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))\n"
        "with torch.no_grad():\n"
        "    counted = labels != -100\n"
        "    hits = (logits.argmax(-1) == labels) & counted\n"
        "(loss, hits.sum() / counted.sum())",
        of="TRL's supervised trainer"),
    Row("top-1 and top-5 accuracy",
        "loss = F.cross_entropy(z, labels)\n"
        "with torch.no_grad():\n"
        "    _, predicted = z.topk(5, 1, True, True)\n"
        "    hits = predicted.t().eq(labels.reshape(1, -1).expand(5, -1))\n"
        "    top1, top5 = (hits[:k].reshape(-1).float().sum(0) / len(labels) for k in (1, 5))\n"
        "(loss, top1, top5)", REGION,
        of="timm's accuracy, restated"),
    Row("target among the top k, evaluation",
        "top = torch.topk(z, k=3, dim=1).indices; "
        "torch.any(top == labels.unsqueeze(1), dim=1).float().mean()", REGION,
        of="torchmetrics, restated", trained=()),
    Row("largest minus second, evaluation",
        "top = z.softmax(-1).topk(2, dim=-1).values; top[:, 0] - top[:, 1]", REGION,
        of="margin sampling", trained=()),
    Row("argmax of log_softmax, evaluation",
        "log_probs = z.log_softmax(-1); "
        "(torch.argmax(log_probs, dim=-1), log_probs.max(-1).values)", REGION,
        of="greedy decoding", trained=()),
    Row("argmax of softmax, evaluation", "z.softmax(dim=1).argmax(dim=1)",
        of="tutorials", trained=(), ways=IN_BF16),
    Row("loss and accuracy, evaluation",
        "accuracy = (z.argmax(-1) == labels).float().mean(); "
        "(F.cross_entropy(z, labels), accuracy)",
        of="evaluation", trained=()),
    Row("mean, largest and smallest logit, no_grad",
        "loss = F.cross_entropy(z, labels)\n"
        "with torch.no_grad():\n"
        "    return (loss, z.mean(), z.max(), z.min())", REGION,
        of="logging"),
    Row("standard deviation of logits, no_grad",
        "loss = F.cross_entropy(z, labels)\n"
        "with torch.no_grad():\n"
        "    return (loss, z.std(-1).mean())", REGION,
        of="logging"),
    Row("a penalty on the largest logit",
        "F.cross_entropy(z, labels) + 0.01 * z.amax(-1).square().mean()", REGION, of="recipes"),
    Row("hinge to the largest other logit",
        "target = z.gather(-1, labels[:, None])[:, 0]; "
        "other = z.scatter(-1, labels[:, None], float('-inf')).amax(-1); "
        "(other - target + 1).clamp(min=0).mean()", REGION,
        of="Carlini and Wagner 2017"),
    Row("expected calibration of the top class",
        "loss = F.cross_entropy(z, labels)\n"
        "with torch.no_grad():\n"
        "    confidence, predicted = z.softmax(-1).max(-1)\n"
        "    gap = confidence.mean() - predicted.eq(labels).float().mean()\n"
        "(loss, gap.abs())", REGION,
        of="calibration"),
)
