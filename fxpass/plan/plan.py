"""How many rows and classes of one fused loss are worked on at a time.

In: sizes, dtype, device, the strategy and the user's budget, when the operator runs. Out: a
:class:`Plan` within the budget. Sizes are plain integers then, so one compiled graph serves every
batch size::

    >>> plan(2048, 512, 32000, torch.float32, torch.device("cpu"), Spec()).rows
    256

The strategy is chosen before, when a graph is rewritten: :mod:`fxpass.plan.choice`. Nothing is
measured and nothing fitted, so that every machine of a kind gives the same answer. The rules:

- What each row needs in any case (its target, lse and loss) is not scratch.
- ``chunked``: as many rows as the budget holds, in equal parts. But all rows at once where that
  takes no more memory than a chunk and the f32 sums of several: N <= rows + 2 D for bf16.
- ``chunked`` on CPUs, where a row of logits is no longer than one of the weight's gradient
  (N <= D) and they are large: the logits live in the gradient's memory, a tile at a time.
- ``tiled``: a block of rows and the classes that the budget, or the cache, then holds.
- Never fewer than a sensible block (``BLOCK``, ``LEAST``), whatever the budget.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import sympy
import torch

from fxpass.plan.devices import (
    compute_dtype,
    gradient_dtype,
    implementation_for,
    multiplied_in,
    properties_of,
)
from fxpass.spec import expression
from fxpass.spec.expression import Z
from fxpass.spec.spec import Spec

MIB = 1 << 20

# A GPU's share for scratch without a setting: 1 GiB holds 4096 rows of Llama-3's logits in bf16.
GPU_SHARE, GPU_BUDGET = 1 / 64, (256 * MIB, 1024 * MIB)
# A CPU's: some hundred rows of logits are enough for its GEMMs; in f64 twice as many bytes. Chunks
# of 16 bits have copies beside them, and should be few, since each is added up in f32.
CPU_ROWS, CPU_BUDGET, CPU_BUDGET_16 = 256, (36 * MIB, 128 * MIB), 48 * MIB
# Bytes of a tile of logits on a CPU: enough work between two waits of its threads.
CPU_TILE = 16 * MIB
# Bytes of logits in the compute dtype that are worked on between two products: in the caches, but
# not so few that its threads do nothing but wait for each other.
CACHED = 4 * MIB
# What is worth the overhead of an operation: logits, elements of an operand; rows or classes of a
# tile, and rows of a chunk.
BLOCK, OPERAND, LEAST, LEAST_ROWS = 1 << 14, 1 << 18, 64, 16
# Rows of a tile where there are more. Tiles of the generated kernel come in so many classes.
TILE_ROWS, SLICE_CLASSES = 2048, 256
# Rows and classes come in multiples of what GEMM kernels work on at a time.
ALIGNMENT = {"aten": 16, "triton": 64}
# Rows of logits start at multiples of so many elements where Triton's kernels read them.
PADDING = 16
# Classes that those up-cast at a time where 16-bit operands cannot add to an f32 result.
UPCAST_CLASSES = 8192


class Plan(NamedTuple):
    """How one fused loss runs.

    Attributes:
        implementation, strategy: which code.
        rows: of a chunk (``tiled``: of a block).
        classes: of a tile (``chunked``: those that are multiplied at a time).
        block: rows of a chunk that are worked on between two products, where ATen runs it.
        reason: why this implementation.
        in_place: whether the logits live in the memory of the weight's gradient.
        scratch: bytes that are allocated beside the outputs, at most.
        sums: bytes of f32 sums as large as the weight, of several chunks with 16-bit gradients.
    """

    implementation: str
    strategy: str
    rows: int
    classes: int
    reason: str = ""
    block: int = 64
    in_place: bool = False
    scratch: int = 0
    sums: int = 0


def budget(v: int, dtype: torch.dtype, device: torch.device, memory_mb: int) -> int:
    """Bytes of scratch that one fused loss of ``v`` classes may take; 0 MiB asks for the default.

    Results do not count, nor what each row needs in any case.
    """
    if memory_mb:
        return memory_mb * MIB
    if device.type == "cuda":
        low, high = GPU_BUDGET
        total = getattr(properties_of(device), "total_memory", 0)
        return max(low, min(high, int(total * GPU_SHARE)))
    low, high = CPU_BUDGET
    a = compute_dtype(dtype).itemsize
    low = CPU_BUDGET_16 if dtype.itemsize == 2 else low
    return max(low, min(high * a // 4, CPU_ROWS * a * v + 4 * MIB))


def plan(
    n: int,
    d: int,
    v: int,
    dtype: torch.dtype,
    device: torch.device,
    spec: Spec,
    kept: bool = False,
) -> Plan:
    """The plan for one run over x ``[n, d]`` and weight ``[v, d]`` of ``dtype`` on ``device``.

    ``spec.gradients`` are those that this run computes; ``kept`` says that the logits exist. The
    scratch stays within ``spec.memory_mb`` MiB (0: see :func:`budget`) as long as that holds the
    smallest block; else the reason says so.
    """
    return _plan(n, d, v, dtype, device, spec, kept, *implementation_for(device, dtype))


@functools.lru_cache(maxsize=4096)
def _plan(
    n: int,
    d: int,
    v: int,
    dtype: torch.dtype,
    device: torch.device,
    spec: Spec,
    kept: bool,
    implementation: str,
    reason: str,
) -> Plan:
    strategy = "tiled" if spec.strategy == "tiled" else "chunked"
    allowed = budget(v, dtype, device, spec.memory_mb)
    work = _Work(
        *(max(1, size) for size in (n, d, v)),
        e=dtype.itemsize,
        a=compute_dtype(dtype).itemsize,
        m=multiplied_in(dtype, device).itemsize if implementation == "aten" else dtype.itemsize,
        g=gradient_dtype(dtype).itemsize,
        gradients=spec.gradients,
        kept=kept,
        temporaries=_temporaries(spec, bool(spec.gradients)),
    )
    if implementation == "aten" and strategy == "chunked" and work.fits_gradient:
        found = _aten_tiled(work, allowed, one_block=True)._replace(in_place=True)
    else:
        # a budget that was set holds the sums as well
        sums = work.sums if spec.memory_mb and strategy == "chunked" else 0
        found = _RULES[implementation, strategy](work, max(allowed // 4, allowed - sums))
    if found.scratch > allowed:
        over = f"{size(found.scratch)}, is over its budget of {size(allowed)}"
        reason += f"; the smallest block takes {over}"
    return found._replace(implementation=implementation, strategy=strategy, reason=reason)


class _Work(NamedTuple):
    """One run: its sizes (at least 1); bytes of an operand's element, of one that is computed with,
    that is multiplied, of a gradient; what is computed; copies that a block of logits needs."""

    n: int
    d: int
    v: int
    e: int
    a: int
    m: int
    g: int
    gradients: tuple[str, ...]
    kept: bool
    temporaries: int

    @property
    def fits_gradient(self) -> bool:
        """Whether the logits of all rows are worth placing in the weight's gradient, and fit."""
        large = self.n * self.v * self.g > CPU_TILE
        fits = "weight" in self.gradients and self.n <= self.d
        return large and fits and not self.kept

    @property
    def sums(self) -> int:
        """Bytes of f32 sums of the weight's gradient, where several chunks have to be added up in
        another dtype than it is returned in."""
        return self.v * self.d * self.a if "weight" in self.gradients and self.g < self.a else 0

    def vectors(self, allowed: int) -> int:
        """Bytes of copies of the bias and the class weights, as far as a budget can spare them."""
        return min(2 * self.a * self.v, allowed // 2)

    def rows(self, most: int, row: int, least: int, align: int) -> int:
        """Rows of a chunk: at most ``most``, if that is more than the least, in equal parts; or all
        at once where that takes no more than such a chunk and the sums. ``row`` bytes each."""
        if self.n * row <= most * row + self.sums:
            return self.n
        return _parts(self.n, max(most, least, BLOCK // self.v), align)


def _aten_chunked(w: _Work, allowed: int) -> Plan:
    wide = w.g == w.a  # the logits are computed with where they are
    copied = w.m != w.e  # operands, and, unless they are wide, the gradient of the logits
    share = min(allowed // 4, CPU_TILE) if copied or not wide else 0
    # a block in f32, if they are narrower, and what the loss needs beside it
    copies, vectors = w.temporaries + (not wide), w.vectors(allowed)
    block = min(w.n, max(1, min(CACHED, allowed // (4 * max(1, copies))) // (w.a * w.v)))
    # of x copies that are multiplied or scaled, and, unless it is rounded at once, its gradient
    row = w.g * w.v + w.m * (copied + wide + (copied and not wide)) * w.d
    blocks = block * w.a * w.v * copies
    left = allowed - share - blocks - vectors
    rows = w.rows(left // row, row, LEAST_ROWS, ALIGNMENT["aten"])
    block = min(block, rows)
    sums = w.sums if rows < w.n else 0
    # a tile of the gradient of the logits, of the weight, and of the weight's gradient
    column = w.m * (rows * (w.m != w.g) + w.d * (copied + ("weight" in w.gradients)))
    classes = w.v
    if copied or sums:
        classes = _parts(w.v, max(share // column, _least(rows, w.d)), ALIGNMENT["aten"])
    taken = rows * row + blocks + (classes * column if share else 0) + vectors
    return Plan("", "", rows, classes, block=block, scratch=taken, sums=sums)


def _aten_tiled(w: _Work, allowed: int, one_block: bool = False) -> Plan:
    vectors = w.vectors(allowed)
    allowed = min(allowed, CPU_TILE * (1 + one_block)) - vectors
    copied, narrow = w.m != w.e, w.m != w.a
    backward = bool(w.gradients)
    row = w.d * w.m * (copied + (backward and narrow))
    column = w.d * (w.m * (copied + (backward and narrow)) + w.a * (backward and w.e != w.a))
    cell = w.a * (1 + w.temporaries) + w.m * narrow
    align = ALIGNMENT["aten"]
    rows = w.n
    if not one_block:
        most = min(TILE_ROWS, allowed // (2 * row) if row else TILE_ROWS)
        # more where there are few classes
        most = max(most, (allowed - w.v * column) // (row + w.v * cell))
        rows = _parts(w.n, max(most, _least(w.v, w.d)), align)
    most = (allowed - rows * row) // (column + rows * cell)
    classes = _parts(w.v, max(most, _least(rows, w.d)), align)
    taken = rows * row + classes * column + rows * classes * cell + vectors
    return Plan("", "", rows, classes, scratch=taken)


def _triton_chunked(w: _Work, allowed: int) -> Plan:
    # ROCm may have to multiply copies in f32, of some classes at a time
    copies = 4 * min(w.v, UPCAST_CLASSES) if torch.version.hip and w.e < w.a else 0
    row = w.e * padded(w.v) + copies + (4 * w.d if copies else 0)
    rows = w.rows((allowed - copies * w.d) // row, row, LEAST, ALIGNMENT["triton"])
    sums = w.sums if rows < w.n else 0
    return Plan("", "", rows, w.v, scratch=rows * row + copies * w.d, sums=sums)


def _triton_tiled(w: _Work, allowed: int) -> Plan:
    if not w.gradients:
        return Plan("", "", w.n, w.v)
    most = allowed // (w.n * w.e)
    classes = min(w.v, max(SLICE_CLASSES, most - most % SLICE_CLASSES))
    return Plan("", "", w.n, classes, scratch=w.n * w.e * padded(classes))


_RULES = {
    ("aten", "chunked"): _aten_chunked,
    ("aten", "tiled"): _aten_tiled,
    ("triton", "chunked"): _triton_chunked,
    ("triton", "tiled"): _triton_tiled,
}


def padded(classes: int) -> int:
    """The elements from one row of logits to the next."""
    return -(-classes // PADDING) * PADDING


def _least(others: int, d: int) -> int:
    """Rows or classes of a tile at least, beside so many of the other."""
    return max(LEAST, min(BLOCK // others, OPERAND // d))


def _parts(total: int, most: int, align: int) -> int:
    """The size of equal parts of ``total``, each at most ``most`` (at least 1), in multiples of
    ``align`` where one fits: the last part is then not much smaller than the others."""
    if most >= total:
        return total
    if most < align:
        return most
    most -= most % align
    even = -(-total // -(-total // most))
    return min(most, -(-even // align) * align)


# ---------------------------------------------------------------- copies of a block of logits


@functools.lru_cache(maxsize=1024)
def _temporaries(spec: Spec, gradients: bool) -> int:
    """Copies of a block of logits that exist beside it: of the target, of the logit transform."""
    dense = 2 if spec.target == "probabilities" else int(spec.label_smoothing > 0)
    if spec.transform == Z:
        return dense
    value = _copies(spec.transform)
    slope = _copies(expression.derivative(spec.transform)) if gradients else 0
    # beside the value: of the next block, or while the gradient is taken
    return 1 + max(value, slope, dense)


def _copies(expr: Any) -> int:
    """Copies of z that :func:`expression.evaluate` holds at most, its result included."""
    if expr == Z:
        return 0
    if expr.is_number:
        return 1
    joined = isinstance(expr, sympy.Add | sympy.Mul)
    held, most = 0, 1
    for operand in expr.args:
        if operand.is_number:
            continue
        most = max(most, held + _copies(operand))
        held = 1 if joined else held + (operand != Z)
    return most if joined else max(most, held + 1 + isinstance(expr, expression.Where))


def size(number: int) -> str:
    """Bytes in MiB or GiB."""
    if number >= 1024 * MIB:
        return f"{number / MIB / 1024:.2f} GiB"
    return f"{number / MIB:.{0 if number >= 10 * MIB else 1}f} MiB"
