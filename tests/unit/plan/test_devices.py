"""The names of GPUs."""

from __future__ import annotations

import pytest
import torch

from fxpass.plan import devices
from tests.support.gpus import A100, H200, MI250, MI300, RADEON, T4
from tests.support.planned import CUDA


@pytest.mark.parametrize(
    ("card", "hip", "target"),
    [
        (T4, None, "sm_75"),
        (A100, None, "sm_80"),
        (H200, None, "sm_90"),
        (MI250, "7.0", "gfx90a"),
        (MI300, "7.0", "gfx942"),
        (RADEON, "7.0", "gfx1100"),
    ],
)
def test_a_target_is_named_as_compilers_name_it(card, hip, target, gpus):
    gpus.have(card, hip=hip)
    assert devices.target_of(CUDA) == target


def test_a_machine_without_gpus_has_no_target(gpus):
    gpus.have()
    assert devices.target_of(CUDA) == devices.target_of(torch.device("cpu")) == "cpu"
