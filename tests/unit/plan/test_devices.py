"""The names of GPUs, and the precision in which their tiles are multiplied."""

from __future__ import annotations

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from fxpass.plan import devices
from tests.support.gpus import A100, H200, MI250, MI300, RADEON, T4
from tests.support.planned import BF16, CUDA, F32


@pytest.mark.parametrize(
    ("card", "hip", "target", "precision"),
    [
        (T4, None, "sm_75", "ieee"),
        (A100, None, "sm_80", "tf32"),
        (H200, None, "sm_90", "tf32"),
        # Triton has TF32 for one of AMD's, and refuses to compile it for the others
        (MI250, "7.0", "gfx90a", "ieee"),
        (MI300, "7.0", "gfx942", "tf32"),
        (RADEON, "7.0", "gfx1100", "ieee"),
    ],
)
def test_tf32_is_asked_for_where_there_is_any(card, hip, target, precision, gpus, tf32):
    gpus.have(card, hip=hip)
    assert devices.target_of(CUDA) == target
    assert devices.precision(F32, target) == precision
    assert devices.precision(BF16, target) == ""
    compiler = make_backend(
        GPUTarget("hip" if hip else "cuda", target if hip else int(target[3:]), 32)
    )
    assert precision in compiler.parse_options({}).allowed_dot_input_precisions


def test_f32_is_multiplied_in_f32_unless_torch_may_do_otherwise():
    assert devices.precision(F32, "sm_90") == "ieee"


def test_a_machine_without_gpus_has_no_target(gpus):
    gpus.have()
    assert devices.target_of(CUDA) == devices.target_of(torch.device("cpu")) == "cpu"
