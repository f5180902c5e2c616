"""Divergences of a student's and a teacher's head, and of two passes of one head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.operands import SIZES
from tests.programs.row import BOTH, IN_BF16, REGION, Row

KIND = "divergences of two heads"


def _sequences(rows: Tensor) -> Tensor:
    return rows.view(SIZES.b, SIZES.t, rows.shape[-1])


# fmt: off
ROWS = (
    Row("KL of the teacher's head, kl_div(log_target)",
        "student = F.linear(x, weight).log_softmax(-1); "
        "teacher = F.linear(teacher_x, teacher_weight).log_softmax(-1); "
        "F.kl_div(student, teacher, reduction='batchmean', log_target=True)", REGION,
        of="distillation", ways=IN_BF16),
    Row("KL of the teacher's softmax, no_grad",
        "with torch.no_grad():\n"
        "    teacher = F.linear(teacher_x, teacher_weight).softmax(-1)\n"
        "F.kl_div(F.linear(x, weight).log_softmax(-1), teacher, reduction='batchmean')", REGION,
        of="distillation"),
    Row("soft cross-entropy with the teacher's head",
        "teacher = F.linear(teacher_x, teacher_weight).softmax(-1); "
        "-(teacher * F.linear(x, weight).log_softmax(-1)).sum(-1)", REGION,
        of="distillation", ways=IN_BF16),
    Row("reverse KL, kl_div",
        "student = F.linear(x, weight).log_softmax(-1); "
        "teacher = F.linear(teacher_x, teacher_weight).log_softmax(-1); "
        "F.kl_div(teacher, student, reduction='none', log_target=True).sum(-1).mean()", REGION,
        of="MiniLLM", ways=IN_BF16),
    Row("reverse KL by hand",
        "student = F.linear(x, weight).log_softmax(-1); "
        "teacher = F.linear(teacher_x, teacher_weight).log_softmax(-1); "
        "(student.exp() * (student - teacher)).sum(-1)", REGION,
        of="MiniLLM"),
    Row("reverse KL to the detached head of other states",
        "student = F.linear(x, weight).log_softmax(-1); "
        "teacher = F.linear(second_x, weight).detach().log_softmax(-1); "
        "(student.exp() * (student - teacher)).sum(-1).mean()", REGION,
        of="self-distillation", trained=("x", "weight")),
    Row("KL of masked tokens, autocast",
        "with torch.autocast('cpu', torch.bfloat16):\n"
        "    student, teacher = (F.linear(x, weight), F.linear(teacher_x, teacher_weight))\n"
        "student, teacher = (student.float().log_softmax(-1), teacher.float().log_softmax(-1))\n"
        "per_token = F.kl_div(student, teacher, reduction='none', log_target=True).sum(-1)\n"
        "(per_token * mask.flatten()).sum() / mask.sum()", REGION,
        of="distillation trainers"),
    Row("skewed KL",
        "student = F.linear(x, weight).softmax(-1); "
        "teacher = F.linear(teacher_x, teacher_weight).softmax(-1); "
        "mixed = 0.1 * teacher + 0.9 * student; -(teacher * mixed.log()).sum(-1).mean()", REGION,
        of="DistiLLM", ways=IN_BF16),
    Row("Jensen-Shannon, logsumexp(stack)",
        "student = F.linear(x, weight).log_softmax(-1); "
        "teacher = F.linear(teacher_x, teacher_weight).log_softmax(-1); half = math.log(0.5); "
        "mixed = torch.logsumexp(torch.stack([student + half, teacher + half]), dim=0); "
        "of_teacher = F.kl_div(mixed, teacher, reduction='none', log_target=True); "
        "of_student = F.kl_div(mixed, student, reduction='none', log_target=True); "
        "(0.5 * of_teacher + 0.5 * of_student).sum() / len(x)", REGION,
        of="TRL's GKD, restated", ways=IN_BF16),
    Row("Jensen-Shannon, beta=0.1, logaddexp",
        "beta = 0.1; student = F.linear(x, weight).log_softmax(-1); "
        "teacher = F.linear(teacher_x, teacher_weight).log_softmax(-1); "
        "mixed = torch.logaddexp(student + math.log(1 - beta), teacher + math.log(beta)); "
        "of_teacher = (teacher.exp() * (teacher - mixed)).sum(-1); "
        "beta * of_teacher + (1 - beta) * (student.exp() * (student - mixed)).sum(-1)", REGION,
        of="GKD", ways=IN_BF16),
    Row("Jensen-Shannon by probabilities",
        "p = F.linear(x, weight).softmax(-1); "
        "q = F.linear(teacher_x, teacher_weight).softmax(-1); mixed = 0.5 * (p + q); "
        "(0.5 * p * (p / mixed).log() + 0.5 * q * (q / mixed).log()).sum(-1).mean()", REGION,
        of="Jensen-Shannon, by hand"),
    Row("Jensen-Shannon as entropies",
        "p = F.linear(x, weight).softmax(-1); "
        "q = F.linear(teacher_x, teacher_weight).softmax(-1); "
        "entropies = [torch.special.entr(r).sum(-1) for r in ((p + q) / 2, p, q)]; "
        "(entropies[0] - (entropies[1] + entropies[2]) / 2).mean()", REGION,
        of="Jensen-Shannon, by hand"),
    Row("Jensen-Shannon, a tensor beta and a temperature",
        "beta = temperature; student = (F.linear(x, weight) / temperature).log_softmax(-1); "
        "teacher = (F.linear(teacher_x, teacher_weight) / temperature).log_softmax(-1); "
        "both = torch.stack([student + torch.log1p(-beta), teacher + torch.log(beta)]); "
        "mixed = torch.logsumexp(both, dim=0); "
        "of_teacher = F.kl_div(mixed, teacher, reduction='none', log_target=True); "
        "of_student = F.kl_div(mixed, student, reduction='none', log_target=True); "
        "(beta * of_teacher + (1 - beta) * of_student).sum(-1).mean()", REGION,
        of="GKD", trained=("x", "weight")),
    Row("Jensen-Shannon of a stacked mixture, some tokens of a part",
        "beta = temperature; given = (F.linear(_sequences(x), weight), "
        "F.linear(_sequences(teacher_x), teacher_weight)); "
        "student, teacher = ((z[:, 1:] / temperature).log_softmax(-1) for z in given); "
        "both = torch.stack([student + torch.log1p(-beta), teacher + torch.log(beta)]); "
        "jsd = F.kl_div(both.logsumexp(0), teacher, reduction='none', log_target=True); "
        "jsd[tokens[:, 0] % B, tokens[:, 1] % (T - 1)].sum()", REGION,
        of="GKD", trained=("x", "weight")),
    Row("Jensen-Shannon of shifted, masked tokens",
        "student = F.linear(_sequences(x), weight)[:, :-1].log_softmax(-1); "
        "teacher = F.linear(_sequences(teacher_x), teacher_weight)[:, :-1].log_softmax(-1); "
        "mixed = torch.logaddexp(student, teacher) - math.log(2); "
        "jsd = F.kl_div(mixed, teacher, reduction='none', log_target=True); "
        "jsd = 0.5 * jsd + 0.5 * F.kl_div(mixed, student, reduction='none', log_target=True); "
        "mask = ignored_tokens[:, 1:] != -100; (jsd * mask[..., None]).sum() / mask.sum()", REGION,
        of="GKD"),
    Row("Jensen-Shannon of chosen tokens, captured",
        "student = F.linear(_sequences(x), weight).log_softmax(-1); "
        "teacher = F.linear(_sequences(teacher_x), teacher_weight).log_softmax(-1); "
        "mixed = torch.logaddexp(student, teacher) - math.log(2); "
        "jsd = 0.5 * F.kl_div(mixed, teacher, reduction='none', log_target=True); "
        "jsd = jsd + 0.5 * F.kl_div(mixed, student, reduction='none', log_target=True); "
        "jsd[ignored_tokens != -100].sum() / (ignored_tokens != -100).sum()", REGION,
        of="GKD", ways=IN_BF16, dynamo={'capture_dynamic_output_shape_ops': True}),
    Row("Jensen-Shannon, evaluation",
        "student = F.linear(x, weight).log_softmax(-1); "
        "teacher = F.linear(teacher_x, teacher_weight).log_softmax(-1); "
        "mixed = torch.logaddexp(student, teacher) - math.log(2); "
        "both = (student.exp() * (student - mixed) + teacher.exp() * (teacher - mixed)).sum(-1); "
        "both.mean() / 2", REGION,
        of="GKD", trained=()),
    Row("Jensen-Shannon with given logits",
        "student, teacher = (z.log_softmax(-1), teacher.log_softmax(-1)); "
        "mixed = torch.logaddexp(student, teacher) - math.log(2); "
        "of_teacher = F.kl_div(mixed, teacher, reduction='batchmean', log_target=True); "
        "0.5 * (of_teacher + F.kl_div(mixed, student, reduction='batchmean', log_target=True))",
        REGION, of="GKD"),
    Row("reverse KL with given logits",
        "student = z.log_softmax(-1); "
        "(student.exp() * (student - teacher.log_softmax(-1))).sum(-1)", REGION,
        of="MiniLLM", ways=IN_BF16),
    Row("reverse KL with given logits, shifted, masked",
        "student = s[:, :-1].log_softmax(-1); "
        "teacher = _sequences(teacher)[:, :-1].log_softmax(-1); "
        "per_token = (student.exp() * (student - teacher)).sum(-1); "
        "(per_token * mask[:, 1:]).sum() / mask[:, 1:].sum()", REGION, left="clone",
        of="MiniLLM"),
    Row("squared error to given logits",
        "centred = z - z.mean(-1, keepdim=True); "
        "F.mse_loss(centred, teacher - teacher.mean(-1, keepdim=True))", REGION,
        of="distillation"),
    Row("cross-entropy and KL at a temperature",
        "z, tau = (F.linear(x, weight), 2.0); "
        "teacher = F.linear(teacher_x, teacher_weight).detach(); "
        "soft = F.kl_div(F.log_softmax(z / tau, -1), F.softmax(teacher / tau, -1), "
        "reduction='batchmean'); "
        "0.5 * F.cross_entropy(z, labels) + 0.5 * tau ** 2 * soft", REGION,
        of="Hinton et al. 2015", ways=IN_BF16),
    Row("cross-entropy of ignored tokens and reverse KL",
        "z = F.linear(x, weight); log_probs = z.log_softmax(-1); "
        "teacher = F.linear(teacher_x, teacher_weight).log_softmax(-1); "
        "counted = ignored != -100; "
        "divergence = (log_probs.exp() * (log_probs - teacher)).sum(-1); "
        "divergence = (divergence * counted).sum() / counted.sum(); "
        "(F.cross_entropy(z, ignored) + 0.1 * divergence, divergence.detach())", REGION,
        of="distillation trainers"),
    Row("decoupled target and non-target KL",
        "student, teacher = (F.linear(x, weight), F.linear(teacher_x, teacher_weight)); "
        "target = F.one_hot(labels, V).bool(); "
        "p = student.softmax(-1).gather(-1, labels[:, None]); "
        "q = teacher.softmax(-1).gather(-1, labels[:, None]); "
        "two = (q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()).mean(); "
        "others = student.masked_fill(target, -1000.0).log_softmax(-1); "
        "given = teacher.masked_fill(target, -1000.0).softmax(-1); "
        "two + 2 * F.kl_div(others, given, reduction='batchmean')", REGION,
        of="DKD"),
    Row("R-Drop, one head, two passes",
        "first, second = (F.linear(x, weight), F.linear(second_x, weight)); "
        "loss = F.cross_entropy(first, labels) + F.cross_entropy(second, labels); "
        "p, q = (first.log_softmax(-1), second.log_softmax(-1)); "
        "both = F.kl_div(p, q.exp(), reduction='none') + F.kl_div(q, p.exp(), reduction='none'); "
        "loss + 0.5 * both.sum(-1).mean()", REGION,
        of="R-Drop", ways=IN_BF16),
    Row("R-Drop, both passes in one batch",
        "z = F.linear(torch.cat([x, second_x]), weight); p, q = z.log_softmax(-1).chunk(2); "
        "both = (p.exp() * (p - q) + q.exp() * (q - p)).sum(-1).mean(); "
        "F.cross_entropy(z, labels.repeat(2)) + 0.5 * both", BOTH,
        of="R-Drop"),
    Row("mutual learning, both heads trained",
        "first, second = (F.linear(x, weight), F.linear(second_x, second_weight)); "
        "p, q = (first.log_softmax(-1), second.log_softmax(-1)); "
        "to_first = F.kl_div(p, q.detach(), reduction='batchmean', log_target=True); "
        "to_second = F.kl_div(q, p.detach(), reduction='batchmean', log_target=True); "
        "hard = F.cross_entropy(first, labels) + F.cross_entropy(second, labels); "
        "hard + to_first + to_second", REGION,
        of="deep mutual learning"),
    Row("total variation of two heads",
        "p = F.linear(x, weight).softmax(-1); "
        "0.5 * (p - F.linear(teacher_x, teacher_weight).softmax(-1)).abs().sum(-1)", REGION,
        of="DistiLLM"),
    Row("cosine of two heads' logits",
        "F.cosine_similarity(F.linear(x, weight), F.linear(teacher_x, teacher_weight), dim=-1)",
        REGION, of="distillation", ways=IN_BF16),
    Row("distance of sorted probabilities",
        "p = F.linear(x, weight).softmax(-1).sort(-1, descending=True).values; "
        "q = F.linear(teacher_x, teacher_weight).softmax(-1).sort(-1, descending=True).values; "
        "(p - q).abs().sum(-1).mean()", REGION,
        of="ULD"),
    Row("KL on the teacher's top classes",
        "top = F.linear(teacher_x, teacher_weight).log_softmax(-1).topk(8, -1); "
        "student = F.linear(x, weight).log_softmax(-1).gather(-1, top.indices); "
        "(top.values.exp() * (top.values - student)).sum(-1)", REGION,
        of="TRL's SDPO, restated"),
    Row("guidance of two heads",
        "with_prompt, without = (F.linear(x, weight), F.linear(second_x, weight)); "
        "F.cross_entropy(without + 1.5 * (with_prompt - without), labels)", REGION,
        of="classifier-free guidance", ways=IN_BF16),
    Row("expert minus amateur, implausible masked",
        "expert = F.linear(teacher_x, teacher_weight).log_softmax(-1); "
        "amateur = F.linear(x, weight).log_softmax(-1); "
        "plausible = expert >= expert.amax(-1, keepdim=True) + math.log(0.1); "
        "(expert - amateur).masked_fill(~plausible, -math.inf).argmax(-1)", REGION,
        of="contrastive decoding", trained=()),
    Row("mixture of two softmaxes",
        "first, second = (F.linear(x, weight), F.linear(second_x, second_weight)); "
        "both = torch.stack([first.log_softmax(-1) - 0.5, second.log_softmax(-1) + "
        "math.log1p(-math.exp(-0.5))]); "
        "F.nll_loss(both.logsumexp(0), labels)", REGION,
        of="mixture of softmaxes"),
)
