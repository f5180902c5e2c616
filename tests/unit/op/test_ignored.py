"""Ignored rows that are left out, where a CUDA graph is captured with all rows afterwards."""

from __future__ import annotations

import pytest
import torch

from fxpass.op import dispatch
from fxpass.plan import plan
from fxpass.spec.spec import Spec
from tests.support.implementations import GRADIENTS, problem
from tests.support.launches import Launches


@pytest.mark.parametrize("dirty", ["x", "weight"])
@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
def test_a_batch_without_counted_rows_loads_the_kernels(strategy, dirty, device, monkeypatch):
    """And has zeros for results, whatever the operands hold."""
    monkeypatch.setattr(plan, "implementation_for", lambda *_: ("triton", ""))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    launches = Launches(monkeypatch, runs=True)
    inputs = problem(device, d=8)
    run = Spec(reduction="sum", gradients=GRADIENTS, strategy=strategy)
    zeros = torch.zeros(7, device=device)
    saved = {"lse": zeros, "lse_rest": zeros} if strategy == "tiled" else {}
    dispatch.compute(inputs._replace(**saved), run)
    kernels = {launch["kernel"] for launch in launches}
    launches.clear()
    getattr(inputs, dirty).fill_(torch.nan)
    out = dispatch.compute(inputs._replace(target=inputs.target * 0 - 100, **saved), run)
    assert {launch["kernel"] for launch in launches} == kernels != set()
    for name in GRADIENTS:
        assert not getattr(out, name).any()
        assert getattr(out, name).shape == getattr(inputs, name).shape
    if out.loss is not None:
        assert torch.equal(out.loss, zeros)
