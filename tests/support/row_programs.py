"""Programs of logits as text, for the tables of accepted and refused programs.

In: statements of ``z`` (logits [N, V]) or ``s`` ([B, T, V]), of which the last is an expression, or
of both products ``z`` and ``q``. Out: a function of all operands::

    run("z.mul_(2); z.amax(-1)")
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.row_tags import Check, check

B, T, D, V = 2, 12, 8, 67
N = B * T
_HEADS = {
    "z": "F.linear(x, weight)",
    "s": "F.linear(x.view(B, T, D), weight)",
    "q": "F.linear(y, other)",
    "zt": "weight @ x.t()",
}


def operands() -> dict[str, Tensor]:
    """The tensors of the programs by name; the same at every call."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    return {
        "x": normal(N, D).requires_grad_(),
        "weight": normal(V, D).requires_grad_(),
        # a teacher's
        "y": normal(N, 5),
        "other": normal(V, 5),
        "labels": torch.randint(V, (N,), generator=random),
        "tokens": torch.randint(V, (B, T), generator=random),
        "some": torch.randint(V, (N, 5), generator=random),
        # [N], [N, V], [V], [], indices of classes and of rows, masks of rows and of classes
        "row": normal(N),
        "given": normal(N, V),
        "classes": normal(V),
        "number": normal(1)[0],
        "chosen": torch.randperm(V, generator=random)[:40],
        "order": torch.randperm(N, generator=random)[:9],
        "rows": torch.rand(N, generator=random) > 0.4,
        "mask": torch.rand(B, T, generator=random) > 0.4,
        "banned": torch.rand(V, generator=random) > 0.7,
        "matrix": normal(V, 3),
        "square": normal(V, V),
    }


def program(text: str) -> Callable[..., Any]:
    """The function of a text."""
    names = ", ".join(operands())
    used = [name for name in _HEADS if re.search(rf"\b{name}\b", text)]
    *statements, last = text.split("; ")
    lines = [*(f"{name} = {_HEADS[name]}" for name in used), *statements, f"return {last}"]
    scope: dict[str, Any] = {"torch": torch, "F": F, "B": B, "T": T, "D": D, "V": V, "N": N}
    source = f"def program({names}):\n" + "".join(f"    {line}\n" for line in lines)
    exec(compile(source, f"<{text}>", "exec"), scope)
    return scope["program"]


def run(text: str, dynamic: bool = False) -> Check:
    """What is captured of a program, and what is wrong in it."""
    sizes = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with sizes:
        return check(program(text), *operands().values(), dynamic=dynamic, fullgraph=True)


def accepted(text: str, *tags: str) -> None:
    """Asserts that a program is one region, with these tags among its own, all of them true."""
    found = run(text)
    assert not found.refused
    assert not found.wrong
    assert len(found.captured) == 1
    assert found.tensors
    missing = [tag for tag in tags if tag not in found.tags]
    assert not missing, found.tags


def refused(text: str, reason: str) -> None:
    """Asserts that a program is no region, for a reason."""
    found = run(text)
    assert not found.captured
    assert found.refused
    assert all(reason in no for no in found.refused), found.refused
