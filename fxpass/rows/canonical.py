"""Canonical tensors ``[n, ...]`` of a chunk: dimensions for broadcasting, and rows of a view.

In: tensors whose rows come first, and letters. Out: tensors::

    >>> align(torch.ones(5, 7), "rk", "crk").shape
    torch.Size([5, 1, 7])
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpass.rows.rules import Env, Ref
from fxpass.rows.tags import Tag, View


def align(tensor: Any, letters: str, result: str) -> Any:
    """A canonical tensor, with a dimension for each of a canonical result, for broadcasting."""
    if not isinstance(tensor, Tensor) or tensor.dim() == 0:
        return tensor
    start = len(result) - len(letters)
    index: list[Any] = [slice(None)]
    for i, letter in enumerate(result):
        own = letters[i - start] if i >= start else ""
        if letter != "r":
            index.append(slice(None) if own else None)
        elif own and own != "r":
            index.append(0)
    return tensor if all(i == slice(None) for i in index) else tensor[tuple(index)]


def unsqueeze_mask(mask: Tensor, tensor: Tensor) -> Tensor:
    """A mask of rows ``[n]`` with the dimensions of a tensor ``[n, ...]``."""
    return mask.reshape(-1, *[1] * (tensor.dim() - 1))


def put_rows(env: Env, view: View, base: Ref, source: Ref) -> Tensor:
    """The source in the rows of a view, the base in other rows."""
    whole = env.full(base)
    some = env.full(source)
    inside = env.inside(view)
    return some if inside is None else torch.where(unsqueeze_mask(inside, some), some, whole)


def zero_outside(env: Env, tensor: Tensor, tag: Tag) -> Tensor:
    """A tensor that is 0 in rows outside of the tag's view."""
    inside = env.inside(tag.view)
    if inside is None:
        return tensor
    return torch.where(unsqueeze_mask(inside, tensor), tensor, tensor.new_zeros(()))
