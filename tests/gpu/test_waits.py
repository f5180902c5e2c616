"""A step on a GPU never makes the host wait."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpass.op import ignored
from tests.support.numerics import assert_close


def loss_of(x, weight, target):
    return F.cross_entropy(F.linear(x, weight).float(), target)


@pytest.mark.only_gpu
@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_no_step_waits(share, factor, monkeypatch):
    """But the second one on, where half of the rows are ignored, for their indices."""
    torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(ignored, "WORTH_A_WAIT", 0)
    monkeypatch.setattr(ignored, "_EARLIER", ignored._Earlier())
    monkeypatch.setenv("FUSEDCE_MIN_LOGITS_MB", "0")
    compiled = torch.compile(loss_of, backend="fusedce")
    dtype, device = torch.bfloat16, torch.device("cuda")
    x = torch.randn(4096, 128, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(16000, 128, device=device, dtype=dtype, requires_grad=True)
    target = torch.randint(16000, (4096,), device=device)
    target[: int(4096 * share)] = -100
    by = torch.tensor(factor, device=device)

    def step(fn, *operands):
        loss = fn(*operands, target)
        return [loss.detach(), *torch.autograd.grad(loss * by, operands)]

    for number in range(4):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if number and not share else "default")
        try:
            ours = step(compiled, x, weight)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        exact = step(
            loss_of, x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
        )
        assert_close(ours, step(loss_of, x, weight), exact, dtype)
    left_out = list(ignored._EARLIER._left_out.values())
    assert left_out == [pytest.approx(share, abs=1e-3)]
