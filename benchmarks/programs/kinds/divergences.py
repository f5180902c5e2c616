"""Divergences of a student's and a teacher's head, and of two passes of one head.

Out: ``KINDS``, the programs. The teacher is hidden states and a weight of their own, or logits that
are given.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.programs.operands import SIZES
from benchmarks.programs.program import BF16, F32, Kind

kind = Kind("divergences of two heads")
KINDS = (kind,)
BOTH = (F32, BF16)


def _sequences(rows: Tensor) -> Tensor:
    return rows.view(SIZES.b, SIZES.t, rows.shape[-1])


# ---------------------------------------------------------------- one of the Kullback-Leiblers


@kind("KL of the teacher's head, kl_div(log_target)", "distillation", "scalar", dtypes=BOTH)
def _(x, weight, teacher_x, teacher_weight):
    student = F.linear(x, weight).log_softmax(-1)
    teacher = F.linear(teacher_x, teacher_weight).log_softmax(-1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


@kind("KL of the teacher's softmax, no_grad", "distillation", "scalar")
def _(x, weight, teacher_x, teacher_weight):
    with torch.no_grad():
        teacher = F.linear(teacher_x, teacher_weight).softmax(-1)
    return F.kl_div(F.linear(x, weight).log_softmax(-1), teacher, reduction="batchmean")


@kind("soft cross-entropy with the teacher's head", "distillation", "[N]", dtypes=BOTH)
def _(x, weight, teacher_x, teacher_weight):
    teacher = F.linear(teacher_x, teacher_weight).softmax(-1)
    return -(teacher * F.linear(x, weight).log_softmax(-1)).sum(-1)


@kind("reverse KL, kl_div", "MiniLLM", "scalar", dtypes=BOTH)
def _(x, weight, teacher_x, teacher_weight):
    student = F.linear(x, weight).log_softmax(-1)
    teacher = F.linear(teacher_x, teacher_weight).log_softmax(-1)
    return F.kl_div(teacher, student, reduction="none", log_target=True).sum(-1).mean()


@kind("reverse KL by hand", "MiniLLM", "[N]")
def _(x, weight, teacher_x, teacher_weight):
    student = F.linear(x, weight).log_softmax(-1)
    teacher = F.linear(teacher_x, teacher_weight).log_softmax(-1)
    return (student.exp() * (student - teacher)).sum(-1)


@kind("reverse KL to the detached head of other states", "self-distillation", "scalar",
      gradients=("x", "weight"))  # fmt: skip
def _(x, weight, second_x):
    student = F.linear(x, weight).log_softmax(-1)
    teacher = F.linear(second_x, weight).detach().log_softmax(-1)
    return (student.exp() * (student - teacher)).sum(-1).mean()


@kind("KL of masked tokens, autocast", "distillation trainers", "scalar")
def _(x, weight, teacher_x, teacher_weight, mask):
    with torch.autocast("cpu", torch.bfloat16):
        student, teacher = F.linear(x, weight), F.linear(teacher_x, teacher_weight)
    student, teacher = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
    per_token = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return (per_token * mask.flatten()).sum() / mask.sum()


@kind("skewed KL", "DistiLLM", "scalar", dtypes=BOTH)
def _(x, weight, teacher_x, teacher_weight):
    student = F.linear(x, weight).softmax(-1)
    teacher = F.linear(teacher_x, teacher_weight).softmax(-1)
    mixed = 0.1 * teacher + 0.9 * student
    return -(teacher * mixed.log()).sum(-1).mean()


# ---------------------------------------------------------------- Jensen-Shannon


@kind("Jensen-Shannon, logsumexp(stack)", "TRL's GKD, restated", "scalar", dtypes=BOTH)
def _(x, weight, teacher_x, teacher_weight):
    student = F.linear(x, weight).log_softmax(-1)
    teacher = F.linear(teacher_x, teacher_weight).log_softmax(-1)
    half = math.log(0.5)
    mixed = torch.logsumexp(torch.stack([student + half, teacher + half]), dim=0)
    of_teacher = F.kl_div(mixed, teacher, reduction="none", log_target=True)
    of_student = F.kl_div(mixed, student, reduction="none", log_target=True)
    return (0.5 * of_teacher + 0.5 * of_student).sum() / len(x)


@kind("Jensen-Shannon, beta=0.1, logaddexp", "GKD", "[N]", dtypes=BOTH)
def _(x, weight, teacher_x, teacher_weight):
    beta = 0.1
    student = F.linear(x, weight).log_softmax(-1)
    teacher = F.linear(teacher_x, teacher_weight).log_softmax(-1)
    mixed = torch.logaddexp(student + math.log(1 - beta), teacher + math.log(beta))
    of_teacher = (teacher.exp() * (teacher - mixed)).sum(-1)
    return beta * of_teacher + (1 - beta) * (student.exp() * (student - mixed)).sum(-1)


@kind("Jensen-Shannon by probabilities", "Jensen-Shannon, by hand", "scalar")
def _(x, weight, teacher_x, teacher_weight):
    p = F.linear(x, weight).softmax(-1)
    q = F.linear(teacher_x, teacher_weight).softmax(-1)
    mixed = 0.5 * (p + q)
    return (0.5 * p * (p / mixed).log() + 0.5 * q * (q / mixed).log()).sum(-1).mean()


@kind("Jensen-Shannon as entropies", "Jensen-Shannon, by hand", "scalar")
def _(x, weight, teacher_x, teacher_weight):
    p = F.linear(x, weight).softmax(-1)
    q = F.linear(teacher_x, teacher_weight).softmax(-1)
    entropies = [torch.special.entr(r).sum(-1) for r in ((p + q) / 2, p, q)]
    return (entropies[0] - (entropies[1] + entropies[2]) / 2).mean()


@kind("Jensen-Shannon, a tensor beta and a temperature", "GKD", "scalar", gradients=("x", "weight"))
def _(x, weight, teacher_x, teacher_weight, temperature):
    beta = temperature  # 0.75
    student = (F.linear(x, weight) / temperature).log_softmax(-1)
    teacher = (F.linear(teacher_x, teacher_weight) / temperature).log_softmax(-1)
    both = torch.stack([student + torch.log1p(-beta), teacher + torch.log(beta)])
    mixed = torch.logsumexp(both, dim=0)
    of_teacher = F.kl_div(mixed, teacher, reduction="none", log_target=True)
    of_student = F.kl_div(mixed, student, reduction="none", log_target=True)
    return (beta * of_teacher + (1 - beta) * of_student).sum(-1).mean()


@kind("Jensen-Shannon of shifted, masked tokens", "GKD", "scalar")
def _(x, weight, teacher_x, teacher_weight, ignored_tokens):
    student = F.linear(_sequences(x), weight)[:, :-1].log_softmax(-1)
    teacher = F.linear(_sequences(teacher_x), teacher_weight)[:, :-1].log_softmax(-1)
    mixed = torch.logaddexp(student, teacher) - math.log(2)
    jsd = F.kl_div(mixed, teacher, reduction="none", log_target=True)
    jsd = 0.5 * jsd + 0.5 * F.kl_div(mixed, student, reduction="none", log_target=True)
    mask = ignored_tokens[:, 1:] != -100
    return (jsd * mask[..., None]).sum() / mask.sum()


@kind("Jensen-Shannon of chosen tokens, captured", "GKD", "scalar", dtypes=BOTH,
      dynamo={"capture_dynamic_output_shape_ops": True})  # fmt: skip
def _(x, weight, teacher_x, teacher_weight, ignored_tokens):
    student = F.linear(_sequences(x), weight).log_softmax(-1)
    teacher = F.linear(_sequences(teacher_x), teacher_weight).log_softmax(-1)
    mixed = torch.logaddexp(student, teacher) - math.log(2)
    jsd = 0.5 * F.kl_div(mixed, teacher, reduction="none", log_target=True)
    jsd = jsd + 0.5 * F.kl_div(mixed, student, reduction="none", log_target=True)
    return jsd[ignored_tokens != -100].sum() / (ignored_tokens != -100).sum()


@kind("Jensen-Shannon, evaluation", "GKD", "scalar", gradients=())
def _(x, weight, teacher_x, teacher_weight):
    student = F.linear(x, weight).log_softmax(-1)
    teacher = F.linear(teacher_x, teacher_weight).log_softmax(-1)
    mixed = torch.logaddexp(student, teacher) - math.log(2)
    both = (student.exp() * (student - mixed) + teacher.exp() * (teacher - mixed)).sum(-1)
    return both.mean() / 2


# ---------------------------------------------------------------- a teacher given as logits


@kind("Jensen-Shannon with given logits", "GKD", "scalar")
def _(logits, teacher):
    student, teacher = logits.log_softmax(-1), teacher.log_softmax(-1)
    mixed = torch.logaddexp(student, teacher) - math.log(2)
    of_teacher = F.kl_div(mixed, teacher, reduction="batchmean", log_target=True)
    return 0.5 * (of_teacher + F.kl_div(mixed, student, reduction="batchmean", log_target=True))


@kind("reverse KL with given logits", "MiniLLM", "[N]", dtypes=BOTH)
def _(logits, teacher):
    student = logits.log_softmax(-1)
    return (student.exp() * (student - teacher.log_softmax(-1))).sum(-1)


@kind("reverse KL with given logits, shifted, masked", "MiniLLM", "scalar")
def _(sequences, teacher, mask):
    student = sequences[:, :-1].log_softmax(-1)
    teacher = _sequences(teacher)[:, :-1].log_softmax(-1)
    per_token = (student.exp() * (student - teacher)).sum(-1)
    return (per_token * mask[:, 1:]).sum() / mask[:, 1:].sum()


@kind("squared error to given logits", "distillation", "scalar")
def _(logits, teacher):
    centred = logits - logits.mean(-1, keepdim=True)
    return F.mse_loss(centred, teacher - teacher.mean(-1, keepdim=True))


# ---------------------------------------------------------------- beside a cross-entropy


@kind("cross-entropy and KL at a temperature", "Hinton et al. 2015", "scalar", dtypes=BOTH)
def _(x, weight, teacher_x, teacher_weight, labels):
    z, tau = F.linear(x, weight), 2.0
    teacher = F.linear(teacher_x, teacher_weight).detach()
    soft = F.kl_div(F.log_softmax(z / tau, -1), F.softmax(teacher / tau, -1), reduction="batchmean")
    return 0.5 * F.cross_entropy(z, labels) + 0.5 * tau**2 * soft


@kind("cross-entropy of ignored tokens and reverse KL", "distillation trainers", "scalar, scalar")
def _(x, weight, teacher_x, teacher_weight, ignored):
    z = F.linear(x, weight)
    log_probs = z.log_softmax(-1)
    teacher = F.linear(teacher_x, teacher_weight).log_softmax(-1)
    counted = ignored != -100
    divergence = (log_probs.exp() * (log_probs - teacher)).sum(-1)
    divergence = (divergence * counted).sum() / counted.sum()
    return F.cross_entropy(z, ignored) + 0.1 * divergence, divergence.detach()


@kind("decoupled target and non-target KL", "DKD", "scalar")
def _(x, weight, teacher_x, teacher_weight, labels):
    student, teacher = F.linear(x, weight), F.linear(teacher_x, teacher_weight)
    target = F.one_hot(labels, SIZES.v).bool()
    p = student.softmax(-1).gather(-1, labels[:, None])
    q = teacher.softmax(-1).gather(-1, labels[:, None])
    two = (q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()).mean()
    others = student.masked_fill(target, -1000.0).log_softmax(-1)
    given = teacher.masked_fill(target, -1000.0).softmax(-1)
    return two + 2 * F.kl_div(others, given, reduction="batchmean")


# ---------------------------------------------------------------- other functions of two heads


@kind("R-Drop, one head, two passes", "R-Drop", "scalar", dtypes=BOTH)
def _(x, weight, second_x, labels):
    first, second = F.linear(x, weight), F.linear(second_x, weight)
    loss = F.cross_entropy(first, labels) + F.cross_entropy(second, labels)
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    both = F.kl_div(p, q.exp(), reduction="none") + F.kl_div(q, p.exp(), reduction="none")
    return loss + 0.5 * both.sum(-1).mean()


@kind("R-Drop, both passes in one batch", "R-Drop", "scalar")
def _(x, weight, second_x, labels):
    z = F.linear(torch.cat([x, second_x]), weight)
    p, q = z.log_softmax(-1).chunk(2)
    both = (p.exp() * (p - q) + q.exp() * (q - p)).sum(-1).mean()
    return F.cross_entropy(z, labels.repeat(2)) + 0.5 * both


@kind("mutual learning, both heads trained", "deep mutual learning", "scalar")
def _(x, weight, second_x, second_weight, labels):
    first, second = F.linear(x, weight), F.linear(second_x, second_weight)
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    to_first = F.kl_div(p, q.detach(), reduction="batchmean", log_target=True)
    to_second = F.kl_div(q, p.detach(), reduction="batchmean", log_target=True)
    hard = F.cross_entropy(first, labels) + F.cross_entropy(second, labels)
    return hard + to_first + to_second


@kind("total variation of two heads", "DistiLLM", "[N]")
def _(x, weight, teacher_x, teacher_weight):
    p = F.linear(x, weight).softmax(-1)
    return 0.5 * (p - F.linear(teacher_x, teacher_weight).softmax(-1)).abs().sum(-1)


@kind("cosine of two heads' logits", "distillation", "[N]", dtypes=BOTH)
def _(x, weight, teacher_x, teacher_weight):
    return F.cosine_similarity(F.linear(x, weight), F.linear(teacher_x, teacher_weight), dim=-1)


@kind("distance of sorted probabilities", "ULD", "scalar")
def _(x, weight, teacher_x, teacher_weight):
    p = F.linear(x, weight).softmax(-1).sort(-1, descending=True).values
    q = F.linear(teacher_x, teacher_weight).softmax(-1).sort(-1, descending=True).values
    return (p - q).abs().sum(-1).mean()


@kind("KL on the teacher's top classes", "TRL's SDPO, restated", "[N]")
def _(x, weight, teacher_x, teacher_weight):
    top = F.linear(teacher_x, teacher_weight).log_softmax(-1).topk(8, -1)
    student = F.linear(x, weight).log_softmax(-1).gather(-1, top.indices)
    return (top.values.exp() * (top.values - student)).sum(-1)


@kind("guidance of two heads", "classifier-free guidance", "scalar", dtypes=BOTH)
def _(x, weight, second_x, labels):
    with_prompt, without = F.linear(x, weight), F.linear(second_x, weight)
    return F.cross_entropy(without + 1.5 * (with_prompt - without), labels)


@kind("expert minus amateur, implausible masked", "contrastive decoding", "[N]", gradients=())
def _(x, weight, teacher_x, teacher_weight):
    expert = F.linear(teacher_x, teacher_weight).log_softmax(-1)
    amateur = F.linear(x, weight).log_softmax(-1)
    plausible = expert >= expert.amax(-1, keepdim=True) + math.log(0.1)
    return (expert - amateur).masked_fill(~plausible, -math.inf).argmax(-1)


@kind("mixture of two softmaxes", "mixture of softmaxes", "scalar")
def _(x, weight, second_x, second_weight, labels):
    first, second = F.linear(x, weight), F.linear(second_x, second_weight)
    both = torch.stack(
        [first.log_softmax(-1) - 0.5, second.log_softmax(-1) + math.log1p(-math.exp(-0.5))]
    )
    return F.nll_loss(both.logsumexp(0), labels)
