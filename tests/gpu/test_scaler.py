"""A tied head under fp16 autocast with a GradScaler: once, such a process ended without a message."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
import torch.nn.functional as F

device, inner = sys.argv[1:]
N, D, V = 512, 64, 5000
torch.manual_seed(0)
start = torch.randn(V, D, device=device) / 8
batches = torch.randint(V, (6, N), device=device)


def train(compile_it):
    weight = start.clone().requires_grad_()

    def step(tokens):
        logits = F.linear(F.embedding(tokens[:-1], weight).tanh(), weight)
        return F.cross_entropy(logits.float(), tokens[1:])

    if compile_it:
        options = {"fusedce.inner": inner, "fusedce.min_logits_mb": 0}
        step = torch.compile(step, backend="fusedce", options=options)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
    losses = []
    for tokens in batches:
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = step(tokens)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return torch.stack(losses), scaler.get_scale()


losses, scale = train(True)
assert torch._dynamo.utils.counters["fusedce"]["matched"] == 1
eager, eager_scale = train(False)
torch.testing.assert_close(losses, eager, rtol=2e-3, atol=0)
assert scale == eager_scale
print("ended")
"""


@pytest.mark.only_gpu
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_tied_head_with_a_scaler(inner):
    """In a process of its own, which has to reach its end."""
    program = [sys.executable, "-X", "faulthandler", "-c", PROGRAM, "cuda", inner]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
