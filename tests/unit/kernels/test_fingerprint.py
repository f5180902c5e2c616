"""The kernel of fingerprints against ATen, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxpass.kernels import fingerprint as kernel
from fxpass.op import fingerprint
from fxpass.op.fingerprint import ReadOrder

LAYOUTS = {
    "whole": lambda t: t,
    "transposed": lambda t: t.t(),
    "unaligned": lambda t: t.flatten()[1:-1],
    "columns": lambda t: t[:, 3:],
    "every second": lambda t: t[1::2, ::2],
    "one column": lambda t: t[:, :1],
    "three dimensions": lambda t: t.unflatten(0, (5, -1))[:, :-1, 1:],
    "four dimensions": lambda t: t.unflatten(0, (5, -1)).unflatten(-1, (3, -1))[:, :-1, :-1, 1:],
    "repeated": lambda t: t[:4, None, :300].expand(-1, 3, -1),
    "less than a block": lambda t: t[0, :200],
    "a block and some": lambda t: t.flatten()[: 2048 // t.element_size() + 3],
    "nothing": lambda t: t[:, :0],
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64)


def digest(t, implementation, patch):
    answer = (implementation, "for the test")
    patch.setattr(fingerprint, "implementation_for", lambda *_: answer)
    return fingerprint.fingerprint(t, ReadOrder.of(t))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_has_the_bits_of_aten(layout, dtype, device, monkeypatch):
    base = torch.randint(-100, 100, (10, 3 * 343), device=device)
    t = LAYOUTS[layout](base.to(dtype))
    want, got = (digest(t, name, monkeypatch) for name in ("aten", "triton"))
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


class Calls(TorchDispatchMode):
    """The operations that are no views, and launches."""

    def __init__(self, patch):
        super().__init__()
        self.names = []
        patch.setattr(kernel, "weighted_sums", self)

    def __getitem__(self, grid):
        return lambda *args, **options: self.names.append("launch")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", [lambda t: t, lambda t: t[:, 1:]])
def test_one_launch_and_nothing_else(layout, device, monkeypatch):
    t = layout(torch.randn(64, 1024, device=device))
    digest(t, "aten", monkeypatch)  # makes the factors
    with Calls(monkeypatch) as calls:
        digest(t, "triton", monkeypatch)
    assert calls.names == ["aten::new_empty", "launch"]


@pytest.mark.parametrize("dims", [2, 3])
def test_addresses_beyond_two_gigabytes(dims, device, monkeypatch):
    memory = torch.from_numpy(np.zeros(33 << 26, np.uint8)).to(
        device
    )  # pages of zeros cost nothing
    t = memory.view(-1, 1 << 26)[:, 1:4100]
    t = t.unflatten(0, (11, 3))[:, :2] if dims == 3 else t
    t[-1, ..., 4000] = 7
    digests = [digest(t, name, monkeypatch) for name in ("aten", "triton")]
    assert torch.equal(*digests)
    t[-1, ..., 4000] = 8
    assert not torch.equal(digest(t, "triton", monkeypatch), digests[0])
