"""The functions of :mod:`fxpass.spec.functions` that ``tl`` does not have, in Triton, in f32; and
what the template of the kernels calls.

Every generated module has those of them that its kernel calls. They call each other and functions
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
def expm1(x):
    """Within 3 ulp; near 0 by the Taylor series, whose remainder is 1e-8 at 0.5."""
    p = 1.0 + x * (1.0 / 8.0)
    p = 1.0 + x * (1.0 / 7.0) * p
    p = 1.0 + x * (1.0 / 6.0) * p
    p = 1.0 + x * (1.0 / 5.0) * p
    p = 1.0 + x * (1.0 / 4.0) * p
    p = 1.0 + x * (1.0 / 3.0) * p
    p = 1.0 + x * (1.0 / 2.0) * p
    return tl.where(tl.abs(x) < 0.5, x * p, tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """Within 3 ulp: log(u) with u = 1 + x rounded, times x / (u - 1) for what rounding lost."""
    u = 1.0 + x
    d = u - 1.0
    near = tl.where(d == 0.0, x, tl.log(u) * (x / tl.where(d == 0.0, 1.0, d)))
    return tl.where(x > 1e8, tl.log(u), near)


@triton.jit
def sigmoid(x):
    """Within 3 ulp, small values too; the exponential cannot overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, e, 1.0) / (1.0 + e)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) within 4 ulp, small values too; the exponential cannot overflow."""
    return tl.where(x > 0.0, x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def sign(x):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def acos(x):
    """Within 4 ulp; nan outside [-1, 1]."""
    return 2.0 * atan(tl.sqrt_rn((1.0 - x) / (1.0 + x)))


@triton.jit
def atan(x):
    """Within 3 ulp; ranges and polynomial are Cephes' atanf."""
    a = tl.abs(x)
    high = a > 2.414213562373095
    middle = a > 0.4142135623730950
    offset = tl.where(high, 1.5707963267948966, tl.where(middle, 0.7853981633974483, 0.0))
    t = tl.where(high, -1.0 / a, tl.where(middle, (a - 1.0) / (a + 1.0), a))
    t2 = t * t
    p = 8.05374449538e-2
    p = p * t2 - 1.38776856032e-1
    p = p * t2 + 1.99777106478e-1
    p = p * t2 - 3.33329491539e-1
    out = offset + (t + t * t2 * p)
    return tl.where(x < 0.0, -out, out)


@triton.jit
def sinh(x):
    """Within 5 ulp; near 0 by the Taylor series, whose remainder is 2e-10 at 1."""
    x2 = x * x
    p = 1.0 + x2 * (1.0 / 110.0)
    p = 1.0 + x2 * (1.0 / 72.0) * p
    p = 1.0 + x2 * (1.0 / 42.0) * p
    p = 1.0 + x2 * (1.0 / 20.0) * p
    p = 1.0 + x2 * (1.0 / 6.0) * p
    e = tl.exp(0.5 * tl.abs(x))
    large = 0.5 * e * e - 0.5 / e / e
    return tl.where(tl.abs(x) < 1.0, x * p, tl.where(x < 0.0, -large, large))


@triton.jit
def cosh(x):
    """Within 5 ulp; the square of exp(x / 2) overflows where the result does."""
    e = tl.exp(0.5 * tl.abs(x))
    return 0.5 * e * e + 0.5 / e / e


@triton.jit
def asinh(x):
    """Within 4 ulp; from 1e4 on as log(2x), before squares overflow."""
    a = tl.abs(x)
    small = log1p(a + a * a / (1.0 + tl.sqrt_rn(1.0 + a * a)))
    out = tl.where(a < 1e4, small, tl.log(a) + 0.6931471805599453)
    return tl.where(x < 0.0, -out, out)


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
