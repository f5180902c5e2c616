"""The same computations in ATen's spelling: graphs of ``torch.export`` and ``make_fx``."""

from __future__ import annotations

from tests.programs.row import Row

KIND = "ATen's spellings"
TRACED = ("exported", "decomposed", "made", "made before autograd")

# fmt: off
ROWS = (
    Row("cross_entropy", "F.cross_entropy(z, labels)", of="torch", ways=TRACED),
    Row("log-probabilities", "z.log_softmax(-1).gather(-1, labels[:, None])[:, 0]",
        of="torch", ways=TRACED),
    Row("gather(z) - lse", "z.gather(-1, labels[:, None]).squeeze(-1) - z.logsumexp(-1)",
        of="torch", ways=TRACED),
    Row("entropy", "log_probs = F.log_softmax(z, dim=-1); -(log_probs.exp() * log_probs).sum(-1)",
        of="torch", ways=TRACED),
    Row("loss and accuracy",
        "z = torch.addmm(bias, x, weight.t()); "
        "(F.cross_entropy(z, labels), (z.argmax(-1) == labels).float().mean())",
        of="torch", ways=TRACED),
    Row("loss, accuracy under no_grad",
        "with torch.no_grad():\n"
        "    accuracy = (z.argmax(-1) == labels).float().mean()\n"
        "(F.cross_entropy(z, labels), accuracy)",
        of="torch", ways=TRACED),
    Row("head under autocast, loss not",
        "with torch.autocast(x.device.type, torch.bfloat16):\n"
        "    z = F.linear(x, weight)\n"
        "    with torch.autocast(x.device.type, enabled=False):\n"
        "        loss = F.cross_entropy(z.float(), labels)\n"
        "loss",
        of="torch", ways=TRACED),
    Row("aten._log_softmax and aten.gather",
        "z = aten.mm.default(x, aten.t.default(weight)); "
        "log_probs = aten._log_softmax.default(z, -1, False); "
        "aten.gather.default(log_probs, 1, aten.unsqueeze.default(labels, 1))",
        of="torch.ops"),
    Row("aten.linear and aten.cross_entropy_loss",
        "aten.cross_entropy_loss.default(aten.linear.default(x, weight), labels)",
        of="torch.ops"),
    Row("aten.addmm and aten.nll_loss_forward",
        "z = aten.addmm.default(bias, x, aten.permute.default(weight, [1, 0])); "
        "log_probs = aten._log_softmax.default(z, 1, False); "
        "aten.nll_loss_forward.default(log_probs, labels, None, 1, -100)[0]",
        of="torch.ops"),
)
