"""All cases, by family and name, and what the processes of ranks are given: :func:`main`."""

from __future__ import annotations

import torch

from tests.ranks import (
    case,
    functional,
    heads,
    joint,
    logits,
    pipeline,
    plans,
    programs,
    sequence,
    training,
)
from tests.ranks.case import Case, Found

FAMILIES = {
    "functional": functional,
    "heads": heads,
    "joint": joint,
    "programs": programs,
    "sequence": sequence,
    "pipeline": pipeline,
    "plans": plans,
    "training": training,
    "logits": logits,
}
CASES: dict[str, Case] = {
    f"{family}: {name}": row
    for family, module in FAMILIES.items()
    for name, row in module.CASES.items()
}


def main(rank: int, world: int, device: torch.device, name: str) -> Found:
    """What a rank did for a case."""
    return case.ran(CASES[name], rank, world, device)
