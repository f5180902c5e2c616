"""Calls and functions that are rewritten in terms of others, which have row rules.

In: an ATen call, or a torch function. Out: others with the same values and the same gradients::

    z.amax()                       z.amax(-1, True), then the largest of the rows
    nll_loss_forward(logp, ...)    gather, where, sum
    F.one_hot(t, V)                t[:, None] == arange(V)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from fxpass.capture.rows import A, bound, dims_of, rule_of
from fxpass.capture.values import Step, Stop
from fxpass.graph.functions import GET_DATA

_TORCH: Any = torch  # whose functions of functional tensors are not exported
# Calls that are rewritten in terms of others, which have rules; with the same derivatives.
DECOMPOSED = {
    getattr(A, name)
    for name in (
        *("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss", "native_layer_norm"),
        *("repeat", "_fused_rms_norm", "renorm", "tril", "triu"),
    )
    if hasattr(A, name)
}


def in_two(step: Step, inside: list[int], args: Any) -> Any:
    """A reduction of classes and rows, one after the other, of which both are the whole: values,
    the dtype between the two, and gradients where several elements are the largest."""
    given, (tensor, *_) = bound(step), args
    op = step.op.overloadpacket
    dims, keep = dims_of(given.get("dim"), tensor.dim()), bool(given.get("keepdim"))
    dtype = given.get("dtype") or (
        torch.int64 if op in (A.sum, A.nansum) and not tensor.is_floating_point() else tensor.dtype
    )
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    if op in (A.sum, A.mean, A.nansum):
        part = op(tensor, inside, True, dtype=wide)
        return (A.sum if op is A.nansum else op)(part, dims, keep).to(dtype)
    if op is A.count_nonzero:
        return A.sum((tensor != 0).sum(inside, True), dims, keep)
    if op in (A.any, A.all):
        return op.dims(op.dims(tensor, inside, True), dims, keep)
    trains = step.grad and step.values[0].trained
    if op is A.linalg_vector_norm:
        order = given["ord"]
        if abs(order) == math.inf:
            largest = A.amax if order > 0 else A.amin
            return _largest(largest, tensor.to(dtype).abs(), inside, dims, keep, trains)
        part = op(tensor, order, inside, True, dtype=wide)
        return (A.sum(part, dims, keep) if order == 0 else op(part, order, dims, keep)).to(dtype)
    largest = A.amax if op in (A.amax, A.max) else A.amin
    return _largest(largest, tensor, inside, dims, keep, trains)


def _largest(
    largest: Any, tensor: Tensor, inside: list[int], dims: list[int], keep: bool, trains: bool
) -> Tensor:
    """The largest, or smallest, element of classes and rows. All elements that equal it have the
    same share of the gradient, however many of them a row has."""
    part = largest(tensor, inside, True)
    found = largest(part, dims, True)
    if trains:
        chosen = part == found
        shares = (tensor == part).sum(inside, True) * chosen
        shares = (shares / shares.sum(dims, True)).to(part.dtype)
        share = torch.where(chosen, part * shares, 0).sum(dims, True)
        exact = found.detach() + (share - share.detach())
        found = torch.where(found.isinf(), share, exact)
    return found if keep else found.squeeze(dims)


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes == -1:
        raise Stop("one_hot has no num_classes")
    classes = torch.arange(num_classes, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).to(torch.int64)


def _cosine(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """``cosine_similarity``, whose gradient does not see that norms are clamped."""
    units = []
    for x in torch.broadcast_tensors(x1, x2):
        norm = torch.linalg.vector_norm(x, 2, dim, True)
        units.append(x / (norm + (norm.clamp_min(eps) - norm).detach()))
    return (units[0] * units[1]).sum(dim)


def _einsum(equation: Any, *operands: Any) -> Tensor:
    """A sum of products of elements, if that is what it is: its operands may be made in chunks.
    Autocast would run a product in 16 bits, and a sum of products in f32."""
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], list) else operands
    words_alone = isinstance(equation, str) and "->" in equation
    if not words_alone or torch.is_autocast_enabled(tensors[0].device.type):
        return torch.einsum(equation, *operands)
    words, _, out = equation.replace(" ", "").partition("->")
    word = words.split(",")[0]
    kept = [letter for letter in word if letter in out]
    alike = words.split(",") == [word] * len(tensors) and "".join(kept) == out
    if not alike or "." in word or len(set(word)) < len(word) or len(kept) == len(word):
        return torch.einsum(equation, *operands)
    summed = [i for i, letter in enumerate(word) if letter not in kept]
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return functools.reduce(torch.mul, [t.to(wide) for t in tensors]).sum(summed).to(dtype)


# Functions that read a number of a tensor outside of a graph's tracer, or switch gradients off.
REPLACED: dict[Any, Any] = {
    torch.nn.functional.cosine_similarity: _cosine,
    torch.cosine_similarity: _cosine,
    torch.einsum: _einsum,
    GET_DATA: torch.detach,
    torch.nn.functional.one_hot: _one_hot,
    _TORCH._C._nn.one_hot: _one_hot,
}


@functools.cache
def decomposition_of(func: Any) -> Callable[..., Any] | None:
    """A function that computes a call by other calls, for one without a row rule."""
    import torch._decomp.decompositions
    import torch._refs

    if func.overloadpacket in DECOMPOSED and func in decomposition_table:
        return decomposition_table[func]
    composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return func.decompose if composite and rule_of(func) is None else None
