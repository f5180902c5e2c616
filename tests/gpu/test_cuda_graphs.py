"""CUDA graphs: the kernels are recorded once and replayed on other data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor.codecache import PyCodeCache

from fxpass.kernels import chunked
from fxpass.op import ignored
from tests.support.numerics import assert_close
from tests.support.pairs import in_pairs


def forget_kernels():
    """As a new process: no kernel is loaded."""
    PyCodeCache.cache_clear()
    chunked.jit_function.cache_clear()


@pytest.mark.only_gpu
@in_pairs(reduction=("mean", "none"), share=(0.0, 0.1, 0.5, 1.0), deterministic=(False, True))
def test_cuda_graphs(reduction, share, deterministic, monkeypatch, tmp_path):
    """Recorded once and replayed on other data, with the numbers of each step's own data.

    Before it is recorded, ignored rows are left out, so that the capture has other sizes: nothing
    may be compiled or loaded then.
    """
    device = torch.device("cuda")
    torch.use_deterministic_algorithms(deterministic)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    forget_kernels()
    monkeypatch.setenv("FUSEDCE_MIN_LOGITS_MB", "0")
    monkeypatch.setattr(ignored, "WORTH_A_WAIT", 0)
    # as after steps that left rows out
    monkeypatch.setattr(ignored._Earlier, "left_out", lambda *_: 1.0)

    def loss_of(x, weight, target):
        return F.cross_entropy(F.linear(x, weight).float(), target, reduction=reduction).mean()

    def step(fn, *operands, target):
        operands = [operand.detach().requires_grad_() for operand in operands]
        loss = fn(*operands, target)
        grads = torch.autograd.grad(loss, operands)
        return [tensor.detach().clone() for tensor in (loss, *grads)]

    def loss_in_f64(x, weight, target):
        z = x.double() @ weight.double().t()
        return F.cross_entropy(z, target, reduction=reduction).mean()

    compiled = torch.compile(loss_of, backend="fusedce", mode="reduce-overhead")
    for _ in range(5):
        x = torch.randn(300, 64, device=device, dtype=torch.bfloat16)
        weight = torch.randn(1000, 64, device=device, dtype=torch.bfloat16)
        target = torch.randint(1000, (300,), device=device)
        target[torch.rand(300, device=device) < share] = -100
        torch.compiler.cudagraph_mark_step_begin()
        ours = step(compiled, x, weight, target=target)
        eager = step(loss_of, x, weight, target=target)
        exact = step(loss_in_f64, x.double(), weight.double(), target=target)
        assert_close(ours, eager, exact, torch.bfloat16)
    assert counters["fusedce"]["matched"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
