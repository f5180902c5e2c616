"""Blocks of a chunk of logits, in the compute dtype, which are overwritten with their gradient.

In: operands, and a function that turns some rows of logits into their gradient. Out: the gradients
of the operands, from :func:`fxpass.aten.chunks.over_chunks`. A chunk has the operands' dtype, as in
eager, but f32 for fp16, whose range is too small for the gradient of the logits. Softmax and sums
are computed in f32 (f64 for f64), in blocks that stay in the caches.

The gradient of a row of logits may have a factor left, such as 1 / sum(exp(z - m)), which products
with x multiply where it is cheaper. Not for bf16, because rounding the gradient from f32 is a pass
over it in any case.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fxpass.aten.chunks import Chunks, over_chunks, place
from fxpass.aten.gemm import joined, part_of, slices, split_bias
from fxpass.formula.dtypes import compute_dtype, gradient_dtype
from fxpass.formula.operands import Operands
from fxpass.plan.devices import multiplied_in
from fxpass.plan.plan import Plan

# Overwrites some rows of logits ``[few, V]`` with their gradient, and returns the factor
# ``[few, 1]`` by which the gradient has still to be multiplied, or None for all rows. It has to be
# 1 or None if the last argument is True.
ToGradient = Callable[[slice, Tensor, bool], Tensor | None]


def over_blocks(
    inputs: Operands,
    gradients: tuple[str, ...],
    to_gradient: ToGradient,
    plan: Plan,
    unrounded: tuple[str, ...],
) -> dict[str, Tensor]:
    """The gradients of x, weight and bias, from a function of some rows of logits.

    Deterministic; does not write to its inputs. A gradient has its operand's dtype, with four
    exceptions in f32 (f64 for f64): the weight's gradient if there are several chunks, the bias's,
    those of fp16 operands, and unrounded ones.

    Args:
        inputs: x, weight and bias.
        gradients: the operands whose gradients are returned; if empty, the logits are only read.
        to_gradient: called once for each block of rows, in the compute dtype.
        plan: its rows, of a chunk; its block; its classes, of one product.
        unrounded: those of x and weight whose gradients keep the dtype of the sums.
    """
    x = inputs.x
    weight = inputs.weight
    dtype = compute_dtype(x.dtype)
    stored = gradient_dtype(x.dtype)
    n = x.shape[0]
    narrow = stored != dtype
    rows = min(plan.rows, n)
    grads: dict[str, Tensor] = {}
    for name, operand, exact in ("x", x, True), ("weight", weight, rows == n):
        if name in gradients:
            grads[name] = place(operand, gradient_dtype(x.dtype, name in unrounded), n, exact)
    if "bias" in gradients and inputs.bias is not None:
        grads["bias"] = place(inputs.bias, dtype, n, True)
    early, late = split_bias(inputs.bias, stored)
    # the bias's gradient is summed here, before the gradient of the logits is rounded
    places = grads.get("x"), grads.get("weight")
    multiplied = multiplied_in(x.dtype, x.device)
    head = Chunks((x, weight, early), rows, plan.classes, multiplied, stored, places)
    block = min(plan.block, rows)
    room = x.new_empty((block, weight.shape[0]), dtype=dtype) if narrow else None

    def of_chunk(part: slice, chunk: Tensor) -> Tensor | None:
        factors = []
        for few in slices(part.start, part.stop, block):
            kept = part_of(chunk, slice(few.start - part.start, few.stop - part.start))
            some = kept if room is None else part_of(room, slice(0, few.stop - few.start))
            if kept is not some:
                some.copy_(kept)
            if late is not None:
                some.add_(late)
            factor = to_gradient(few, some, narrow)
            factors.append(factor)
            if "bias" in grads:
                each = some.new_ones(some.shape[0]) if factor is None else factor.view(-1)
                # beta 0: the first block overwrites uninitialised memory
                grads["bias"].addmv_(some.t(), each, beta=float(few.start > 0))
            if narrow and head.trained:
                kept.copy_(some)
        return None if narrow or factors[0] is None else joined(factors)

    over_chunks(n, rows, head, of_chunk)
    return grads
