"""Plans how many rows and classes a chunk or tile of one fused loss has.

In: sizes, dtype, device, the strategy and the user's budget. Out: a :class:`Plan` within the
budget. The operator asks for the plan when it runs, so one compiled graph serves every batch
size::

    >>> spec = Reductions((), gradients=("x", "weight"), total=("pick",))
    >>> of_call = 2048, 512, 32000, torch.float32, torch.device("cpu"), spec
    >>> plan(*of_call, scaled=False, backward=True).rows
    352

Nothing is measured or fitted, so equal machines get equal plans. The rules, where the targets, lse
and losses of the rows do not count as scratch, and a chunk or tile has a minimum size:

- ``chunked`` if forward computes the gradients of a total, or if a row's largest logit is an output
  beside gradients in backward; else ``tiled`` (a GPU's forward is ``chunked``, and so is its
  backward in f32).
- ``chunked``: equal chunks, as large as the budget allows. But one chunk of all rows if it takes no
  more memory than a smaller chunk and the f32 sums of the gradients: N <= rows + 2 D for bf16.
- A GPU's chunks are a quarter of the rows by default, but enough rows for its GEMMs. These chunks
  of bf16 add up the weight's gradient in bf16, where that takes no more memory than f32 sums of
  smaller chunks. With the user's budget, up to six do: see :data:`MOST_ROUNDED`.
- ``chunked`` on CPUs with N <= D and large logits: the logits ``[V, N]`` share the memory of the
  weight's gradient ``[V, D]``, a tile at a time.
- ``tiled``: a block of rows, and as many classes as the budget or the cache allows.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fxpass.formula.dtypes import compute_dtype, gradient_dtype
from fxpass.formula.reductions import Reductions
from fxpass.plan import copies
from fxpass.plan.devices import implementation_for, multiplied_in, properties_of

MIB = 1 << 20

# The default budget of a GPU: this share of its memory, within these bounds in bytes. 1 GiB holds
# 4096 rows of Llama-3's logits in bf16.
GPU_SHARE = 1 / 64
GPU_BUDGET = (256 * MIB, 1024 * MIB)
# The default budget of a CPU: this many rows of logits, within these bounds in bytes (twice the
# upper bound in f64). A few hundred rows keep the GEMMs efficient, and each chunk costs one more
# addition to the f32 gradient of the weight. But at most this part of all logits, or these bytes.
CPU_ROWS = 256
CPU_BUDGET = (48 * MIB, 128 * MIB)
CPU_PARTS = 5
CPU_LEAST = 16 * MIB
# Bytes of a tile of logits on a CPU: enough work between two synchronisations of the threads.
CPU_TILE = 16 * MIB
# Bytes of a block of logits in the compute dtype, transformed between two GEMMs in the caches.
CACHED = 4 * MIB
# Minimum sizes that are worth the overhead of an operation: elements of a block of logits,
# elements of an operand, rows or classes of a tile, rows of a chunk.
BLOCK = 1 << 14
OPERAND = 1 << 18
LEAST = 64
LEAST_ROWS = 16
# Parts of a GPU's logits by default, the rows (or classes) that keep its GEMMs efficient, and bytes
# of a part that are worth its launches. On an H100, 4 chunks of 2048 x 128256 logits take 1.03 of
# the time of one chunk, and half of its memory.
FEW = 4
EFFICIENT = 2048
FEW_BYTES = 64 * MIB
# Chunks that add up a weight's gradient in bf16, at most, where the user sets the budget. Each GEMM
# accumulates in f32 and rounds the sum so far once. The sum after k of K chunks has about
# sqrt(k / K) of the size of the whole, so K chunks have the error of sqrt((1 + ... + K) / K) =
# sqrt((K + 1) / 2) roundings: 1.6 for 4, 1.9 for 6. Eager has one rounding, and twice its error is
# allowed.
MOST_ROUNDED = 6
# Rows of a tile at most, unless there are few classes; classes of a GPU's slice are multiples.
TILE_ROWS = 2048
SLICE_CLASSES = 256
# Rows and classes are multiples of the GEMM kernels' tile sizes.
ALIGNMENT = {"aten": 16, "triton": 64}
# The Triton kernels pad a row of logits to a multiple of this many elements: a mask that ends
# inside a vector splits its load and store into single elements.
PADDING = 16
# Classes that a GPU up-casts at a time if its 16-bit GEMM cannot add to an f32 result.
UPCAST_CLASSES = 8192


class Plan(NamedTuple):
    """How one fused loss runs."""

    implementation: str  # ``aten`` or ``triton``
    strategy: str  # ``chunked`` or ``tiled``
    rows: int  # of a chunk or tile
    classes: int  # of a tile; ``chunked``: of one GEMM
    reason: str = ""  # for the implementation
    block: int = 64  # rows of a chunk that the ATen implementation transforms between two GEMMs
    in_place: bool = False  # whether the logits share the memory of the weight's gradient
    scratch: int = 0  # bytes allocated beside the outputs, at most
    sums: int = 0  # bytes of the f32 sums of the weight's gradient, if several chunks need them
    rounded: bool = False  # whether chunks add up the weight's gradient in its 16-bit dtype


def budget(n: int, v: int, dtype: torch.dtype, device: torch.device, memory_mb: int) -> int:
    """Bytes of scratch that one fused loss of ``n`` rows and ``v`` classes may take.

    ``memory_mb`` is the user's setting in MiB; 0 is the default. Outputs and the rows' targets, lse
    and losses do not count.
    """
    if memory_mb:
        return memory_mb * MIB
    if device.type == "cuda":
        low, high = GPU_BUDGET
        total = getattr(properties_of(device), "total_memory", 0)
        return max(low, min(high, int(total * GPU_SHARE)))
    low, high = CPU_BUDGET
    a = compute_dtype(dtype).itemsize
    most = max(low, min(high * a // 4, CPU_ROWS * a * v + 4 * MIB))
    return min(most, max(CPU_LEAST, n * v * a // CPU_PARTS))


def plan(
    n: int,
    d: int,
    v: int,
    dtype: torch.dtype,
    device: torch.device,
    spec: Reductions,
    scaled: bool,
    backward: bool,
) -> Plan:
    """The plan for one run over x ``[n, d]`` and weight ``[v, d]`` of ``dtype`` on ``device``.

    ``scaled``: rows have a scale; ``backward``: this run computes the gradients of the spec. The
    scratch stays within ``spec.memory_mb`` MiB (0: see :func:`budget`), unless the smallest block
    is larger; then the plan's reason says so."""
    implementation, reason = implementation_for(device, dtype)
    sizes = max(1, n), max(1, d), max(1, v)
    run = _Request(*sizes, dtype, device, implementation, spec, scaled, backward)
    return _plan(run, reason)


class _Request(NamedTuple):
    """The arguments of :func:`plan`; the sizes are at least 1."""

    n: int
    d: int
    v: int
    dtype: torch.dtype
    device: torch.device
    implementation: str
    spec: Reductions
    scaled: bool
    backward: bool

    @property
    def bytes(self) -> tuple[int, int, int, int]:
        """The size of an element of the operands, in the compute dtype, in the dtype of the
        products, and of a chunk of logits and its gradient."""
        on_gpu = self.implementation == "triton"
        multiplied = self.dtype if on_gpu else multiplied_in(self.dtype, self.device)
        dtypes = self.dtype, compute_dtype(self.dtype), multiplied, gradient_dtype(self.dtype)
        e, a, m, g = (dtype.itemsize for dtype in dtypes)
        return e, a, m, g

    @property
    def gradients(self) -> tuple[str, ...]:
        """The gradients that the run computes."""
        return self.spec.gradients if self.backward else ()

    @property
    def temporaries(self) -> int:
        """Copies of a block of logits that exist beside it."""
        return copies.of(self.spec, self.scaled, self.backward)

    @property
    def fits_gradient(self) -> bool:
        """Whether the logits of all rows fit into the weight's gradient and are large enough."""
        large = self.n * self.v * self.bytes[-1] > CPU_TILE
        fits = self.spec.total and "weight" in self.gradients and self.n <= self.d
        fits = fits and not self.unrounded
        return large and bool(fits)

    @property
    def unrounded(self) -> bool:
        """Whether the weight's gradient is wider than a chunk of logits."""
        return "weight" in self.gradients and "weight" in self.spec.unrounded

    @property
    def sums(self) -> int:
        """Bytes of the f32 sums of the weight's gradient, if the returned gradient is narrower."""
        _, a, _, g = self.bytes
        narrower = "weight" in self.gradients and not self.unrounded and g < a
        return self.v * self.d * a if narrower else 0


def rows_of_chunk(
    n: int, v: int, row: int, most: int, sums: int, implementation: str, least: int
) -> int:
    """The rule for the rows of a chunk of ``n`` rows and ``v`` classes.

    Equal chunks of at most ``most`` rows, but not below the minimum ``least``. All rows, if they
    take no more memory than ``most`` rows and the ``sums``. A row takes ``row`` bytes."""
    if n * row <= most * row + sums:
        return n
    return parts(n, max(most, least, BLOCK // v), ALIGNMENT[implementation])


def classes_of_product(v: int, d: int, rows: int, column: int, share: int) -> int:
    """The rule for the classes of one product with a chunk of ``rows`` rows, where operands are
    cast or products added to a wider sum: a class takes ``column`` bytes of the ``share``."""
    return parts(v, max(share // max(1, column), least_of_tile(rows, d)), ALIGNMENT["aten"])


@functools.lru_cache(maxsize=4096)
def _plan(run: _Request, reason: str) -> Plan:
    spec = run.spec
    allowed = budget(run.n, run.v, run.dtype, run.device, spec.memory_mb)
    # the user's budget includes the sums
    for_chunks = max(allowed // 4, allowed - run.sums * bool(spec.memory_mb))
    # gradients that come with the outputs need the softmax of a row
    at_once = bool(spec.total)
    of_whole_rows = at_once or bool(spec.gradients and spec.of_largest)
    if run.implementation == "triton":
        found = _triton_chunked(run, allowed, for_chunks)
        # f32 has no sums to save, and slices round logits in another way than forward
        if run.gradients and not of_whole_rows and run.dtype.itemsize < 4:
            found = _triton_tiled(run, allowed)
    elif not of_whole_rows:  # in forward as in backward: logits are rounded alike
        found = _aten_tiled(run, allowed)
    elif run.fits_gradient:
        found = _aten_tiled(run, allowed, in_place=True)
    else:
        found = _aten_chunked(run, for_chunks)
    if found.scratch > allowed:
        taken = f"{size(found.scratch)}, is over its budget of {size(allowed)}"
        reason += f"; the smallest block takes {taken}"
    return found._replace(reason=reason)


def _aten_chunked(run: _Request, allowed: int) -> Plan:
    n, d, v = run[:3]
    e, a, m, g = run.bytes
    wide = g == a  # the stored logits have the compute dtype and are transformed in place
    copied = m != e  # operands, and the gradient of narrower logits, are cast before products
    share = min(allowed // 4, CPU_TILE) if copied or not wide else 0
    vectors = _vectors(run, allowed)
    # a block of narrower logits in the compute dtype, and the temporaries of the loss
    copies = run.temporaries + (not wide)
    block = min(n, max(1, min(CACHED, allowed // (4 * max(1, copies))) // (a * v)))
    blocks = block * a * v * copies
    # the logits, copies of x that are cast or scaled, and the unrounded gradient of x
    row = g * v + m * (copied + wide + (copied and not wide)) * d
    most = (allowed - share - blocks - vectors) // row
    rows = rows_of_chunk(n, v, row, most, run.sums, "aten", LEAST_ROWS)
    sums = run.sums if rows < n else 0
    # per class: the cast gradient of the logits, the cast weight, the product for its gradient
    column = m * (rows * (m != g) + d * (copied + ("weight" in run.gradients)))
    classes = v
    if copied or sums or run.unrounded:
        classes = classes_of_product(v, d, rows, column, share)
    taken = rows * row + blocks + (classes * column if share else 0) + vectors
    return Plan("aten", "chunked", rows, classes, "", min(block, rows), scratch=taken, sums=sums)


def _aten_tiled(run: _Request, allowed: int, in_place: bool = False) -> Plan:
    n, d, v = run[:3]
    e, a, m, _ = run.bytes
    align = ALIGNMENT["aten"]
    vectors = _vectors(run, allowed)
    allowed = min(allowed, CPU_TILE * (1 + in_place)) - vectors
    narrow = m != a
    backward = bool(run.gradients)
    operand = m * ((m != e) + (backward and narrow))
    row = d * operand
    column = d * (operand + a * (backward and e != a))
    cell = a * (1 + run.temporaries) + m * narrow
    rows = n
    if not in_place:
        most = min(TILE_ROWS, allowed // (2 * row) if row else TILE_ROWS)
        # few classes: more rows
        most = max(most, (allowed - v * column) // (row + v * cell))
        rows = parts(n, max(most, least_of_tile(v, d)), align)
    most = (allowed - rows * row) // (column + rows * cell)
    classes = parts(v, max(most, least_of_tile(rows, d)), align)
    taken = rows * row + classes * column + rows * classes * cell + vectors
    strategy = "chunked" if in_place else "tiled"
    return Plan("aten", strategy, rows, classes, in_place=in_place, scratch=taken)


def _triton_chunked(run: _Request, allowed: int, beside_sums: int) -> Plan:
    """Chunks within the budget ``allowed``, or ``beside_sums`` where there are f32 sums too."""
    n, d, v = run[:3]
    e, a, _, g = run.bytes
    align = ALIGNMENT["triton"]
    by_user = bool(run.spec.memory_mb)
    least = max(LEAST, BLOCK // v)
    # ROCm may have to multiply f32 copies of some classes
    copies = 4 * min(v, UPCAST_CLASSES) if torch.version.hip and e < a else 0
    row = e * padded(v) + copies + (4 * d if copies else 0)
    copied = copies * d

    def of(rows: int, sums: int = 0, rounded: bool = False) -> Plan:
        sums, rounded = (sums, rounded) if rows < n else (0, False)
        scratch = rows * row + copied
        return Plan("triton", "chunked", rows, v, scratch=scratch, sums=sums, rounded=rounded)

    most = (allowed - copied) // row
    few = max(few_parts(n), FEW_BYTES // row)
    if not run.sums:  # chunks add up in the gradient that is returned
        return of(parts(n, max(most if by_user else min(most, few), least), align))
    most_beside = (beside_sums - copied) // row
    wide = of(rows_of_chunk(n, v, row, most_beside, run.sums, "triton", LEAST), run.sums)
    if run.spec.accumulate == "float32":
        return wide
    narrow = of(parts(n, max(most if by_user else few, least), align), rounded=True)
    if by_user:
        return narrow if n <= MOST_ROUNDED * narrow.rows else wide
    gradient = g * v * d
    of_wide = wide.sums + max(wide.scratch, gradient) if wide.sums else wide.scratch + gradient
    return narrow if narrow.scratch + gradient <= of_wide else wide


def _triton_tiled(run: _Request, allowed: int) -> Plan:
    """Slices of classes of all rows, after a forward in chunks of rows."""
    chunks = _triton_chunked(run._replace(backward=False), allowed, allowed)
    row = run.n * run.bytes[0]
    most = allowed // row
    if not run.spec.memory_mb:
        few = max(few_parts(run.v), FEW_BYTES // row)
        most = min(most, few + -few % SLICE_CLASSES)
    classes = min(run.v, max(SLICE_CLASSES, most - most % SLICE_CLASSES))
    scratch = max(chunks.scratch, row * padded(classes))
    return chunks._replace(
        strategy="tiled", classes=classes, scratch=scratch, rounded=False, sums=0
    )


def few_parts(total: int) -> int:
    """The rows (or classes) of each of a few parts that keep GEMMs efficient."""
    return -(-total // max(1, min(FEW, total // EFFICIENT)))


def _vectors(run: _Request, allowed: int) -> int:
    """Bytes of copies of the bias and the class weights, at most half of the budget."""
    return min(2 * run.bytes[1] * run.v, allowed // 2)


def padded(classes: int) -> int:
    """The elements from one row of padded logits to the next."""
    return -(-classes // PADDING) * PADDING


def least_of_tile(others: int, d: int) -> int:
    """The minimum of a tile's rows (or classes), for ``others`` classes (or rows)."""
    return max(LEAST, min(BLOCK // others, OPERAND // d))


def parts(total: int, most: int, align: int) -> int:
    """The size of the parts if ``total`` is divided evenly into parts of at most ``most``.

    ``most`` is at least 1. The size is a multiple of ``align`` if ``most`` allows one; the last
    part may be smaller."""
    if most >= total:
        return total
    if most < align:
        return most
    most -= most % align
    even = -(-total // -(-total // most))
    return min(most, -(-even // align) * align)


def size(number: int) -> str:
    """A number of bytes as text in KiB, MiB or GiB."""
    if number >= 1024 * MIB:
        return f"{number / MIB / 1024:.2f} GiB"
    if number < MIB:
        return f"{-(-number // 1024)} KiB"
    return f"{number / MIB:.{0 if number >= 10 * MIB else 1}f} MiB"
