"""The gradients of an operator for a batch of incoming gradients: one call for each of them.

``torch.autograd.grad(..., is_grads_batched=True)`` and ``torch.vmap`` of a backward ask for them,
with a dispatch key each, for neither of which torch has a rule where an operator returns a list::

    >>> from fxpass.op.reductions import class_reductions
    >>> x, w, c = torch.randn(4, 8, requires_grad=True), torch.randn(10, 8), torch.arange(4)
    >>> spec = "r6 outputs=pick gradients=x"
    >>> picks = class_reductions(x, w, None, None, c, [], None, None, spec)["rows"][0]
    >>> torch.autograd.grad(picks, x, torch.eye(4), is_grads_batched=True)[0].shape
    torch.Size([4, 4, 8])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_vmap
from torch.utils._pytree import tree_leaves, tree_map

Operator = Callable[..., list[Tensor]]


def register_batches(library: Library, name: str, operator: Operator) -> None:
    """Registers the rules of an operator of fxpass that returns tensors, the first argument of
    which is the incoming gradient, or a list of them."""

    def of_autograd(grads: Tensor | list[Tensor], *others: Any) -> list[Tensor]:
        level = torch._C._vmapmode_increment_nesting() - 1
        for _ in range(2):  # an outer batch is of the level below
            torch._C._vmapmode_decrement_nesting()
        try:
            # only incoming gradients have a batch: the operands are saved tensors
            remove = torch._remove_batch_dim  # pyright: ignore
            batches = tree_map(lambda grad: remove(grad, level, 1, 0), grads)
            size = max(map(len, tree_leaves(batches)))  # 1 of a gradient without a batch

            def entry(i: int) -> Any:
                return tree_map(lambda batch: batch[min(i, len(batch) - 1)], batches)

            found = _stacked([operator(entry(i), *others) for i in range(size)])
        finally:
            torch._C._vmapmode_increment_nesting()
        return [torch._add_batch_dim(t, 0, level) for t in found]  # pyright: ignore

    def of_vmap(info: Any, dims: Any, *arguments: Any) -> tuple[list[Tensor], list[int]]:
        def entry(i: int) -> Any:
            return tree_map(lambda t, dim: t if dim is None else t.select(dim, i), arguments, dims)

        found = _stacked([operator(*entry(i)) for i in range(info.batch_size)])
        return found, [0] * len(found)

    library.impl(name, of_autograd, "Batched")
    register_vmap(f"fxpass::{name}", of_vmap, lib=library)


def _stacked(found: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(tensors) for tensors in zip(*found, strict=True)]
