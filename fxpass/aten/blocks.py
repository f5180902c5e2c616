"""Blocks of a chunk of logits, in the compute dtype, which are overwritten with their gradient.

In: operands, and a function that overwrites a block of logits with their gradient. Out: the
gradients of the operands. One chunk of rows of logits exists at a time, in a buffer that all chunks
share. It has the operands' dtype, as in eager, but f32 for fp16, whose range is too small for the
gradient of the logits. Softmax and sums are computed in f32 (f64 for f64), in blocks that stay in
the caches. All products together take 6·N·D·V operations, or 2·N·D·V without gradients.

A row of the logits' gradient may still have a factor, such as 1 / sum(exp(z - m)), which is then
multiplied into ``[rows, D]``. Not for bf16: rounding the gradient from f32 is a pass over it in any
case.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fxpass.aten.gemm import joined, slice_of, slices, split_bias
from fxpass.aten.products import Scratch, add_products, write_logits
from fxpass.formula.dtypes import compute_dtype, gradient_dtype
from fxpass.formula.operands import Operands
from fxpass.plan.devices import multiplied_in
from fxpass.plan.plan import Plan

# Overwrites the logits ``[rows, V]`` of some rows with their gradient. Returns the factor
# ``[rows, 1]`` by which the gradient has still to be multiplied; or None, for all rows. The factor
# has to be 1 or None if the last argument is True.
ToGradient = Callable[[slice, Tensor, bool], Tensor | None]


def over_blocks(
    inputs: Operands,
    gradients: tuple[str, ...],
    to_gradient: ToGradient,
    plan: Plan,
    unrounded: tuple[str, ...],
) -> dict[str, Tensor]:
    """The gradients of x, weight and bias, from a function of a block of logits.

    Deterministic; does not write to its inputs. A gradient has its operand's dtype, with four
    exceptions in f32 (f64 for f64): the weight's gradient if there are several chunks, the bias's,
    those of fp16 operands, and unrounded ones.

    Args:
        inputs: x, weight and bias.
        gradients: the operands whose gradients are returned; if empty, the logits are only read.
        to_gradient: called once for each block of rows, in the compute dtype.
        plan: the rows of a chunk and of a block, and the classes of one product.
        unrounded: those of x and weight whose gradients keep the dtype of the sums.
    """
    x = inputs.x
    weight = inputs.weight
    dtype = compute_dtype(x.dtype)
    stored = gradient_dtype(x.dtype)
    rounds = stored != dtype
    product_dtype = multiplied_in(x.dtype, x.device)
    gemm_bias, added_bias = split_bias(inputs.bias, stored)
    grads = _uninitialised(inputs, gradients, plan, unrounded)
    x_gradient = grads.get("x")
    weight_gradient = grads.get("weight")
    bias_gradient = grads.get("bias")
    trained = x_gradient is not None or weight_gradient is not None
    scratch = Scratch(x)

    def overwrite(chunk: slice, logits: Tensor) -> Tensor | None:
        """Overwrites the logits of a chunk with their gradient, and returns its factor."""
        factors = []
        for rows in slices(chunk.start, chunk.stop, plan.block):
            z = slice_of(logits, slice(rows.start - chunk.start, rows.stop - chunk.start))
            block = scratch.cast("block", z, dtype)
            if added_bias is not None:
                block.add_(added_bias)
            factor = to_gradient(rows, block, rounds)
            factors.append(factor)
            if bias_gradient is not None:  # here the logits' gradient is not rounded yet
                each = block.new_ones(block.shape[0]) if factor is None else factor.view(-1)
                # beta 0: the first block overwrites uninitialised memory
                bias_gradient.addmv_(block.t(), each, beta=float(rows.start > 0))
            if rounds and trained:
                z.copy_(block)
        return None if rounds or factors[0] is None else joined(factors)

    for chunk in slices(0, x.shape[0], plan.rows):
        x_rows = scratch.cast("x", slice_of(x, chunk), product_dtype)
        out = scratch("logits", (len(x_rows), weight.shape[0]), stored)
        logits = write_logits(x_rows, weight, gemm_bias, out, plan.classes, scratch)
        factor = overwrite(chunk, logits)
        if not trained:
            continue
        outputs = [] if x_gradient is None else [(slice_of(x_gradient, chunk), weight)]
        if factor is not None:
            x_rows = slice_of(x, chunk) * factor
        sums = [] if weight_gradient is None else [(weight_gradient, x_rows)]
        add = chunk.start > 0
        add_products(logits, outputs, sums, product_dtype, plan.classes, add, scratch)
        if factor is not None and x_gradient is not None:
            slice_of(x_gradient, chunk).mul_(factor)
    return grads


def _uninitialised(
    inputs: Operands, gradients: tuple[str, ...], plan: Plan, unrounded: tuple[str, ...]
) -> dict[str, Tensor]:
    """Memory for the gradients, which the first chunk overwrites; 0 without rows."""
    x = inputs.x
    dtypes = {name: gradient_dtype(x.dtype, name in unrounded) for name in ("x", "weight")}
    dtypes["bias"] = compute_dtype(x.dtype)
    if plan.rows < x.shape[0]:  # a sum of products
        dtypes["weight"] = compute_dtype(x.dtype)
    shapes = {"x": x.shape, "weight": inputs.weight.shape, "bias": inputs.weight.shape[:1]}
    new = x.new_empty if x.shape[0] else x.new_zeros
    return {k: new(shapes[k], dtype=dtype) for k, dtype in dtypes.items() if k in gradients}
