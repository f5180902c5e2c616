"""Calls along rows: sums, which a loop adds up, and reductions that it merges over chunks.

In: a node that works along the rows of a tagged tensor. Out: the node's plan. Of z ``[N, V]``::

    sum(z, [0])             a sum
    amax(z, [0])            "amax", of chunks
    exponentials(z, 0)      "exponentials": maxima of columns, and sums of exponentials
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxpass import messages
from fxpass.formula.dtypes import LOW_PRECISION
from fxpass.region.merging import MERGES
from fxpass.rows.aten_calls import A, call_arguments
from fxpass.rows.canonical import zero_outside
from fxpass.rows.rules import RULES, Env, NodePlan, Rules
from fxpass.rows.sizes import example, packet, shape
from fxpass.rows.tags import Stop, Tag, canonical_dim

# Reductions that rows may be among, and how they are merged.
_MERGED = {getattr(A, name): name for name in MERGES if hasattr(A, name)}


def exponentials(z: Tensor, dim: int) -> Tensor:
    """The maxima m of a dimension and the sums of ``exp(z - m)``, ``[2, ...]``, in f32 for 16 bits.

    The dimension has one element in the result. Where the maximum is -inf, the sum is 0.
    """
    z = z.float() if z.dtype in LOW_PRECISION else z
    largest = A.amax.default(z, [dim], True)
    finite = torch.where(largest == -math.inf, 0.0, largest)
    return torch.stack([largest, (z - finite).exp().sum([dim], True)])


def _exponentials(rules: Rules, node: Node, _: Any) -> NodePlan:
    """The rule of :func:`exponentials` along all rows."""
    source: Any = node.args[0]
    ref = rules.ref(source, rules.tag_of(source))  # pyright: ignore[reportArgumentType]
    run = lambda env: exponentials(env.full(ref), 0)  # noqa: E731
    return NodePlan(None, [ref], run, merge="exponentials")


RULES[exponentials] = _exponentials


def along_rows(rules: Rules, node: Node, tag: Tag, dims: list[int]) -> NodePlan:
    """The plan of a call along dimensions of which some are of rows.

    Args:
        tag: of the first argument.

    Raises:
        Stop: the call is no reduction of all rows.
    """
    source: Any = node.args[0]
    merge = _MERGED.get(packet(node), "")
    adds = packet(node) in (A.sum, A.mean)
    if "softmax" in str(node.target):
        raise Stop(messages.SOFTMAX_ALONG_ROWS)
    if {d for d in dims if tag.letters[d] == "r"} != set(tag.rows):
        raise Stop(messages.ALONG_ROWS)
    if not adds and not (rules.columns and merge and tag.view.is_whole):
        raise Stop(messages.ALONG_ROWS)
    if not rules.has_classes(source):
        raise Stop(messages.SUMS_ROWS)
    ref = rules.ref(source, tag)
    over = [0, *(canonical_dim(tag.letters, d) for d in dims if tag.letters[d] != "r")]
    if not adds:
        if merge.startswith("arg") and not (tag.view.in_order and len(over) == 1):
            raise Stop(messages.ALONG_ROWS)
        run = lambda env: _reduced(env.full(ref), merge, over)  # noqa: E731
        return NodePlan(None, [ref], run, merge=merge)
    low = example(source).dtype in LOW_PRECISION
    dtype = torch.float32 if low else call_arguments(node).get("dtype")

    def run_sum(env: Env) -> Tensor:
        return A.sum.dim_IntList(zero_outside(env, env.full(ref), tag), over, False, dtype=dtype)

    per = tuple(shape(source)[d] for d in dims) if packet(node) is A.mean else ()
    return NodePlan(None, [ref], run_sum, (tag.view,), per)


def _reduced(tensor: Tensor, merge: str, over: list[int]) -> Tensor:
    """The reduction of a chunk that is merged with those of others."""
    if merge.startswith("arg"):
        extreme = A.amax if merge == "argmax" else A.amin
        values = extreme.default(tensor, over).double()
        return torch.stack([values, getattr(A, merge)(tensor, 0).double()])
    return (
        getattr(A, merge).dims(tensor, over)
        if merge in ("any", "all")
        else getattr(A, merge)(tensor, over)
    )
