"""Expectations of a class vector: distributional and binned values."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.programs.row import BOTH, FORMULA, IN_BF16, REGION, Row

KIND = "expectations"

# fmt: off
ROWS = (
    Row("(p * atoms).sum()", "(z.softmax(-1) * atoms).sum(-1)", of="C51", ways=IN_BF16),
    Row("p @ atoms", "F.softmax(z, dim=-1) @ atoms", FORMULA, of="C51"),
    Row("p @ atoms[:, None]", "torch.matmul(torch.softmax(z, dim=-1), atoms.unsqueeze(-1))", REGION,
        of="HL-Gauss"),
    Row("einsum of p and atoms", "torch.einsum('nv,v->n', z.softmax(-1), atoms)",
        BOTH, of="JAX ports"),
    Row("torch.sum(atoms * exp(lp), keepdim)",
        "torch.sum(atoms * z.log_softmax(1).exp(), 1, keepdim=True)", of="C51"),
    Row("C51 with the expected value",
        "log_probs = z.log_softmax(-1); value = (log_probs.exp() * atoms).sum(-1); "
        "(-(soft * log_probs).sum(-1).mean(), value.detach())",
        of="C51", trained=("x", "weight")),
    Row("squared error of the expected value",
        "F.mse_loss((z.softmax(dim=-1) * atoms[None]).sum(dim=-1), values)", REGION,
        of="MuZero's supports"),
    Row("symexp of the expected value",
        "mean = (z.softmax(-1) * atoms).sum(-1); torch.sign(mean) * (torch.exp(mean.abs()) - 1)",
        of="DreamerV3, restated"),
    Row("two-hot targets",
        "above = torch.searchsorted(atoms, values.clamp(-4.9, 4.9)).clamp(1); "
        "low, high = (atoms[above - 1], atoms[above]); "
        "share = (values.clamp(-4.9, 4.9) - low) / (high - low); lp = z.log_softmax(-1); "
        "picked = lp.gather(-1, torch.stack([above - 1, above], -1)); "
        "-((1 - share) * picked[:, 0] + share * picked[:, 1]).mean()",
        of="DreamerV3, restated"),
    Row("Gaussian histogram targets",
        "edges = torch.cat([atoms - 0.05, atoms[-1:] + 0.05]); "
        "cdf = torch.special.erf((edges - values[:, None]) / 0.75); "
        "target = (cdf[:, 1:] - cdf[:, :-1]) / (cdf[:, -1:] - cdf[:, :1]); "
        "F.cross_entropy(z, target)", REGION,
        of="HL-Gauss"),
    Row("mean and variance",
        "p = z.softmax(-1); mean = (p * atoms).sum(-1); "
        "(mean, (p * (atoms - mean[:, None]) ** 2).sum(-1))", REGION,
        of="distribution focal losses"),
    Row("Σ p u² - (Σ p u)²",
        "p = F.softmax(z, -1); (p * atoms ** 2).sum(-1) - (p * atoms).sum(-1) ** 2", BOTH,
        of="distributional RL"),
    Row("expected age",
        "ages = torch.arange(z.shape[-1], dtype=z.dtype); "
        "F.l1_loss((z.softmax(1) * ages).sum(1), labels.to(z.dtype))", REGION,
        of="DEX"),
    Row("expected value, evaluation", "(z.softmax(-1) * atoms).sum(-1)", of="C51", trained=()),
    Row("mean probability of banned classes", "(z.softmax(-1) * banned).sum(-1).mean()",
        of="safety penalties"),
)
