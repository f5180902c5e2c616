"""Expectations of a class vector: distributional and binned values.

Out: ``KINDS``, the programs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.programs.program import BF16, F32, Kind

kind = Kind("expectations")
KINDS = (kind,)


@kind("(p * atoms).sum()", "C51", "[N]", dtypes=(F32, BF16))
def _(logits, atoms):
    return (logits.softmax(-1) * atoms).sum(-1)


@kind("p @ atoms", "C51", "[N]")
def _(logits, atoms):
    return F.softmax(logits, dim=-1) @ atoms


@kind("p @ atoms[:, None]", "HL-Gauss", "[N, 1]")
def _(logits, atoms):
    return torch.matmul(torch.softmax(logits, dim=-1), atoms.unsqueeze(-1))


@kind("einsum of p and atoms", "JAX ports", "[N]")
def _(logits, atoms):
    return torch.einsum("nv,v->n", logits.softmax(-1), atoms)


@kind("torch.sum(atoms * exp(lp), keepdim)", "C51", "[N, 1]")
def _(logits, atoms):
    return torch.sum(atoms * logits.log_softmax(1).exp(), 1, keepdim=True)


@kind("C51 with the expected value", "C51", "scalar, [N]", gradients=("x", "weight"))
def _(logits, soft, atoms):
    log_probs = logits.log_softmax(-1)
    value = (log_probs.exp() * atoms).sum(-1)
    return -(soft * log_probs).sum(-1).mean(), value.detach()


@kind("squared error of the expected value", "MuZero's supports", "scalar")
def _(logits, atoms, values):
    return F.mse_loss((logits.softmax(dim=-1) * atoms[None]).sum(dim=-1), values)


@kind("symexp of the expected value", "DreamerV3, restated", "[N]")
def _(logits, atoms):
    mean = (logits.softmax(-1) * atoms).sum(-1)
    return torch.sign(mean) * (torch.exp(mean.abs()) - 1)


@kind("two-hot targets", "DreamerV3, restated", "scalar")
def _(logits, atoms, values):
    above = torch.searchsorted(atoms, values.clamp(-4.9, 4.9)).clamp(1)
    low, high = atoms[above - 1], atoms[above]
    share = (values.clamp(-4.9, 4.9) - low) / (high - low)
    lp = logits.log_softmax(-1)
    picked = lp.gather(-1, torch.stack([above - 1, above], -1))
    return -((1 - share) * picked[:, 0] + share * picked[:, 1]).mean()


@kind("Gaussian histogram targets", "HL-Gauss", "scalar")
def _(logits, atoms, values):
    edges = torch.cat([atoms - 0.05, atoms[-1:] + 0.05])
    cdf = torch.special.erf((edges - values[:, None]) / 0.75)
    target = (cdf[:, 1:] - cdf[:, :-1]) / (cdf[:, -1:] - cdf[:, :1])
    return F.cross_entropy(logits, target)


@kind("mean and variance", "distribution focal losses", "[N], [N]")
def _(logits, atoms):
    p = logits.softmax(-1)
    mean = (p * atoms).sum(-1)
    return mean, (p * (atoms - mean[:, None]) ** 2).sum(-1)


@kind("Σ p u² - (Σ p u)²", "distributional RL", "[N]")
def _(logits, atoms):
    p = F.softmax(logits, -1)
    return (p * atoms**2).sum(-1) - (p * atoms).sum(-1) ** 2


@kind("expected age", "DEX", "scalar")
def _(logits, labels):
    ages = torch.arange(logits.shape[-1], dtype=logits.dtype)
    return F.l1_loss((logits.softmax(1) * ages).sum(1), labels.to(logits.dtype))


@kind("expected value, evaluation", "C51", "[N]", gradients=())
def _(logits, atoms):
    return (logits.softmax(-1) * atoms).sum(-1)


@kind("mean probability of banned classes", "safety penalties", "scalar")
def _(logits, banned):
    return (logits.softmax(-1) * banned).sum(-1).mean()
