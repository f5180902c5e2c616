"""What the tests of casts share: programs as fusedce compiles them, and as Dynamo gives them."""

from __future__ import annotations

import pytest
import torch
from torch.fx import GraphModule

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
EAGER = {"fusedce.inner": "eager"}
# what eager says of operands of two dtypes
SAID = r"same dtype|to have the same|scalar type|must have the same"


def tensor(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def compiled(fn, **options):
    chosen = EAGER | {f"fusedce.{name}": value for name, value in options.items()}
    return torch.compile(fn, backend="fusedce", options=chosen)


class _CapturedError(Exception):
    """Ends a run: what was captured is not to be run."""


def captured(fn, *args) -> GraphModule:
    """The graph that Dynamo makes of ``fn(*args)``."""
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return stop  # a backend that raises here has its graph emptied, by torch 2.15

    def stop(*args):
        raise _CapturedError

    with pytest.raises(_CapturedError):
        torch.compile(fn, backend=backend)(*args)
    return graphs[0]
