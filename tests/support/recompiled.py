"""Programs that compile several functions, and use in one what another one returned.

In: a program, which is given ``compile``. Out: that with fusedce it does what it does without::

    assert_agrees(lambda compile: compile(torch.exp)(compile(torch.sin)(x)))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

N, D, V = 6, 8, 10
LABELS = torch.arange(N) % V


def model(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, w)
    return F.cross_entropy(logits, LABELS), logits


def leaves() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, D).requires_grad_(), torch.randn(V, D).requires_grad_()


def values_of(program: Callable[..., Any], backend: str, inner: str) -> tuple[list[Any], int]:
    """The values of a program, whose ``compile`` uses ``backend`` (``"inner"``: ``inner`` alone), and
    its graph breaks."""
    options: Any = {"fusedce.inner": inner} if backend == "fusedce" else None
    torch._dynamo.reset()
    counters.clear()

    def compile(fn: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
        name = inner if backend == "inner" else backend
        return fn if name == "eager" else torch.compile(fn, backend=name, options=options, **kwargs)

    try:
        found = pytree.tree_leaves(program(compile))
        values = [v.detach().clone() if isinstance(v, Tensor) else v for v in found]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        values = ["modified in place"]
    return values, sum(counters["graph_break"].values())


def agree(got: list[Any], want: list[Any]) -> bool:
    return len(got) == len(want) and all(map(alike, got, want))


def alike(got: Any, want: Any) -> bool:
    # a small gradient may be the difference of large ones
    is_float = isinstance(want, Tensor) and want.is_floating_point() and want.numel()
    largest = want.detach().abs().max().item() if is_float else 1
    try:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6 * max(10, largest))
    except AssertionError:
        return False
    except TypeError:  # strings and None
        return got == want
    return True


def assert_agrees(program: Callable[..., Any], inner: str = "aot_eager") -> None:
    """With fusedce a program has the values that eager has, or the inner backend alone, in as many
    graphs."""
    got, breaks = values_of(program, "fusedce", inner)
    alone, breaks_alone = values_of(program, "inner", inner)
    if not agree(got, alone):
        eager, _ = values_of(program, "eager", "eager")
        assert agree(got, eager), (got, eager, alone)
    assert breaks <= breaks_alone
