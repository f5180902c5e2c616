"""Transforms of logits, and targets whose rows cancel."""

from __future__ import annotations

import torch

TRANSFORMS = {
    "z": lambda z: z,
    "0.0625*z": lambda z: 0.0625 * z,
    "30*tanh(z/30)": lambda z: 30 * torch.tanh(z / 30),
    "2*tanh(z)": lambda z: 2 * torch.tanh(z),
    "-0.0625*z**2+0.25*z": lambda z: z / 4 - z * z / 16,
}


def centred(n, v):
    """Targets ``[n, v]`` whose rows sum to exactly 0."""
    target = torch.zeros(n, v)
    target[:, 1], target[:, -2] = 0.5, -0.5
    return target
