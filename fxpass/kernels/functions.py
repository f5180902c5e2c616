"""The functions of :mod:`fxpass.formula.functions` that ``tl`` does not have, in Triton, in f32;
and those that the template of the kernels calls.

A generated module has the functions that its kernel calls. They call each other and functions
of ``tl``, but not libdevice, which does not run in Triton's interpreter. Errors are given in units
in the last place of f32, and assume that ``tl.exp`` and ``tl.log`` are within 3, as numpy's are. On
NVIDIA GPUs the error of ``tl.exp(x)`` is up to ``3 + |x|`` larger, as in any softmax.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Within 2 ulp of the f32 nearest to tanh(x); the polynomial is Cephes' tanhf."""
    x2 = x * x
    p = -5.70498872745e-3
    p = p * x2 + 2.06390887954e-2
    p = p * x2 - 5.37397155531e-2
    p = p * x2 + 1.33314422036e-1
    p = p * x2 - 3.33332819422e-1
    large = 1.0 - 2.0 / (1.0 + tl.exp2(2.8853900817779268 * tl.abs(x)))  # exp(2 * |x|)
    return tl.where(tl.abs(x) < 0.625, x + x * x2 * p, tl.where(x < 0.0, -large, large))


@triton.jit
def sigmoid(x):
    """Within 3 ulp, small values too; the exponential cannot overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, e, 1.0) / (1.0 + e)


@triton.jit
def sign(x):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def maximum(x, y):
    """nan where x is nan, as in torch.clamp."""
    return tl.where(x < y, y, x)


@triton.jit
def minimum(x, y):
    """nan where x is nan, as in torch.clamp."""
    return tl.where(x > y, y, x)


@triton.jit
def in_lanes(x, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """A block as ``[blocks of all lanes, LANES, VECTOR]``: a lane's elements are those that one
    thread has loaded, VECTOR neighbours at a time, so that its sums need no other thread."""
    return tl.reshape(x, (x.shape[0] // (LANES * VECTOR), LANES, VECTOR))
