"""Plans how many rows and classes a chunk or tile of one fused loss has.

In: sizes, dtype, device, the strategy and the user's budget. Out: a :class:`Plan` within the
budget. The operator asks for the plan when it runs, so one compiled graph serves every batch
size::

    >>> spec = Reductions((), gradients=("x", "weight"), total=("pick",))
    >>> of_call = 2048, 512, 32000, torch.float32, torch.device("cpu"), spec
    >>> plan(*of_call, scaled=False, backward=True).rows
    352

:mod:`fxpass.plan.choice` has chosen the strategy when the graph was rewritten. Nothing is measured
or fitted, so equal machines get equal plans. The rules:

- The targets, lse and losses of the rows do not count as scratch.
- ``chunked``: equal chunks, as large as the budget allows. But one chunk of all rows if it takes no
  more memory than a smaller chunk and the f32 sums of the gradients: N <= rows + 2 D for bf16.
- ``chunked`` on CPUs with N <= D and large logits: the logits ``[V, N]`` share the memory of the
  weight's gradient ``[V, D]``, a tile at a time.
- ``chunked`` if forward computes the gradients of a total, or if they need a row's largest logit;
  else ``tiled`` (a GPU's forward is ``chunked``, and so is its backward in f32).
- ``tiled``: a block of rows, and as many classes as the budget or the cache allows.
- A chunk or tile has a minimum size (``BLOCK``, ``LEAST``), even if the budget is smaller.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fxpass.plan import copies
from fxpass.plan.devices import implementation_for, multiplied_in, properties_of
from fxpass.spec.dtypes import compute_dtype, gradient_dtype
from fxpass.spec.reductions import Reductions

MIB = 1 << 20

# The default budget of a GPU: this share of its memory, within these bounds in bytes. 1 GiB holds
# 4096 rows of Llama-3's logits in bf16.
GPU_SHARE, GPU_BUDGET = 1 / 64, (256 * MIB, 1024 * MIB)
# The default budget of a CPU: this many rows of logits, within these bounds in bytes (twice the
# upper bound in f64). A few hundred rows keep the GEMMs efficient, and each chunk costs one more
# addition to the f32 gradient of the weight.
CPU_ROWS, CPU_BUDGET = 256, (48 * MIB, 128 * MIB)
# Bytes of a tile of logits on a CPU: enough work between two synchronisations of the threads.
CPU_TILE = 16 * MIB
# Bytes of a block of logits in the compute dtype, transformed between two GEMMs in the caches.
CACHED = 4 * MIB
# Minimum sizes that are worth the overhead of an operation: elements of a block of logits,
# elements of an operand, rows or classes of a tile, rows of a chunk.
BLOCK, OPERAND, LEAST, LEAST_ROWS = 1 << 14, 1 << 18, 64, 16
# Rows of a tile at most, unless there are few classes; classes of a GPU's slice are multiples.
TILE_ROWS, SLICE_CLASSES = 2048, 256
# Rows and classes are multiples of the GEMM kernels' tile sizes.
ALIGNMENT = {"aten": 16, "triton": 64}
# The Triton kernels pad a row of logits to a multiple of this many elements: a mask that ends
# inside a vector splits its load and store into single elements.
PADDING = 16
# Classes that a GPU up-casts at a time if its 16-bit GEMM cannot add to an f32 result.
UPCAST_CLASSES = 8192


class Plan(NamedTuple):
    """How one fused loss runs.

    Attributes:
        implementation: ``aten`` or ``triton``.
        strategy: ``chunked`` or ``tiled``.
        rows: of a chunk (``tiled``: of a tile).
        classes: of a tile (``chunked``: of one GEMM).
        block: rows of a chunk that the ATen implementation transforms between two GEMMs.
        reason: the reason for the implementation.
        in_place: whether the logits share the memory of the weight's gradient.
        scratch: bytes allocated beside the outputs, at most.
        sums: bytes of the f32 sums of the weight's gradient, if several chunks need them.
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
    """Bytes of scratch that one fused loss of ``v`` classes may take.

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
    return max(low, min(high * a // 4, CPU_ROWS * a * v + 4 * MIB))


def plan(
    n: int,
    d: int,
    v: int,
    dtype: torch.dtype,
    device: torch.device,
    spec: Reductions,
    scaled: bool,
    backward: bool,
    logits_exist: bool = False,
) -> Plan:
    """The plan for one run over x ``[n, d]`` and weight ``[v, d]`` of ``dtype`` on ``device``.

    ``scaled``: rows have a scale; ``backward``: this run computes the gradients of the spec;
    ``logits_exist``: the logits exist already. The scratch stays within ``spec.memory_mb`` MiB (0:
    see :func:`budget`), unless the smallest block is larger; then the plan's reason says so."""
    implementation, reason = implementation_for(device, dtype)
    if implementation == "triton" and spec.trains_weights:
        implementation, reason = "aten", "no Triton kernel has gradients of weights of moments"
    of_call = n, d, v, dtype, device, spec, scaled, backward, logits_exist
    return _plan(*of_call, implementation, reason)


@functools.lru_cache(maxsize=4096)
def _plan(
    n: int,
    d: int,
    v: int,
    dtype: torch.dtype,
    device: torch.device,
    spec: Reductions,
    scaled: bool,
    backward: bool,
    logits_exist: bool,
    implementation: str,
    reason: str,
) -> Plan:
    gradients = spec.gradients if backward else ()
    temporaries = copies.of(spec, scaled, backward)
    work = _Work.of((n, d, v), dtype, device, implementation, gradients, logits_exist, temporaries)
    allowed, by_user = budget(v, dtype, device, spec.memory_mb), bool(spec.memory_mb)
    # gradients of a largest logit need the whole row; those of a total come with its value
    in_tiles = not (spec.gradients and (spec.total or spec.of_largest))
    if implementation == "aten":
        # both passes in one way: their logits are rounded alike
        strategy = "tiled" if in_tiles else "chunked"
        found = _within(work, allowed, by_user, implementation, strategy)
    else:
        found = _within(work, allowed, by_user, implementation, "chunked")
        # f32 has no sums to save, and slices round logits in another way than forward
        if in_tiles and backward and dtype.itemsize < 4:
            of_tile = _triton_tiled(work, allowed)
            scratch = max(found.scratch, of_tile.scratch)
            found = found._replace(strategy="tiled", classes=of_tile.classes, scratch=scratch)
    if found.scratch > allowed:
        taken = f"{size(found.scratch)}, is over its budget of {size(allowed)}"
        reason += f"; the smallest block takes {taken}"
    return found._replace(reason=reason)


def _within(work: _Work, allowed: int, by_user: bool, implementation: str, strategy: str) -> Plan:
    """The plan of a strategy within ``allowed`` bytes, if these are enough for a block."""
    if implementation == "aten" and strategy == "chunked" and work.fits_gradient:
        found = _aten_tiled(work, allowed, one_block=True)._replace(in_place=True)
    else:
        # the user's budget includes the sums
        sums = work.sums if by_user and strategy == "chunked" else 0
        found = _RULES[implementation, strategy](work, max(allowed // 4, allowed - sums))
    return found._replace(implementation=implementation, strategy=strategy)


class _Work(NamedTuple):
    """One run of a fused loss.

    Attributes:
        n, d, v: its sizes, at least 1.
        e, a, m, g: bytes of an element of the operands, in the compute dtype, in the dtype of the
            products, and of the gradients.
        gradients: the gradients that the run computes.
        logits_exist: whether the logits exist already.
        temporaries: copies of a block of logits that exist beside it.
    """

    n: int
    d: int
    v: int
    e: int
    a: int
    m: int
    g: int
    gradients: tuple[str, ...]
    logits_exist: bool
    temporaries: int

    @staticmethod
    def of(
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        implementation: str,
        gradients: tuple[str, ...],
        logits_exist: bool,
        temporaries: int,
    ) -> _Work:
        multiplied = multiplied_in(dtype, device) if implementation == "aten" else dtype
        dtypes = dtype, compute_dtype(dtype), multiplied, gradient_dtype(dtype)
        e, a, m, g = (one.itemsize for one in dtypes)
        n, d, v = (max(1, size) for size in sizes)
        return _Work(n, d, v, e, a, m, g, gradients, logits_exist, temporaries)

    @property
    def fits_gradient(self) -> bool:
        """Whether the logits of all rows fit into the weight's gradient and are large enough."""
        large = self.n * self.v * self.g > CPU_TILE
        fits = "weight" in self.gradients and self.n <= self.d
        return large and fits and not self.logits_exist

    @property
    def sums(self) -> int:
        """Bytes of the f32 sums of the weight's gradient, if the returned gradient is narrower."""
        return self.v * self.d * self.a if "weight" in self.gradients and self.g < self.a else 0

    def vectors(self, allowed: int) -> int:
        """Bytes of copies of the bias and the class weights, at most half of the budget."""
        return min(2 * self.a * self.v, allowed // 2)

    def rows(self, most: int, row: int, least: int, align: int) -> int:
        """Rows of a chunk: equal chunks of at most ``most`` rows, but not below the minimum
        ``least``. All rows, if they take no more memory than such a chunk and the sums. A row takes
        ``row`` bytes."""
        if self.n * row <= most * row + self.sums:
            return self.n
        return _parts(self.n, max(most, least, BLOCK // self.v), align)


def _aten_chunked(w: _Work, allowed: int) -> Plan:
    wide = w.g == w.a  # the stored logits have the compute dtype and are transformed in place
    copied = w.m != w.e  # operands, and the gradient of narrower logits, are cast before products
    share = min(allowed // 4, CPU_TILE) if copied or not wide else 0
    # a block of narrower logits in the compute dtype, and the temporaries of the loss
    copies, vectors = w.temporaries + (not wide), w.vectors(allowed)
    block = min(w.n, max(1, min(CACHED, allowed // (4 * max(1, copies))) // (w.a * w.v)))
    # the logits, copies of x that are cast or scaled, and the unrounded gradient of x
    row = w.g * w.v + w.m * (copied + wide + (copied and not wide)) * w.d
    blocks = block * w.a * w.v * copies
    left = allowed - share - blocks - vectors
    rows = w.rows(left // row, row, LEAST_ROWS, ALIGNMENT["aten"])
    block = min(block, rows)
    sums = w.sums if rows < w.n else 0
    # per class: the cast gradient of the logits, the cast weight, the product for its gradient
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
        # few classes: more rows
        most = max(most, (allowed - w.v * column) // (row + w.v * cell))
        rows = _parts(w.n, max(most, _least(w.v, w.d)), align)
    most = (allowed - rows * row) // (column + rows * cell)
    classes = _parts(w.v, max(most, _least(rows, w.d)), align)
    taken = rows * row + classes * column + rows * classes * cell + vectors
    return Plan("", "", rows, classes, scratch=taken)


def _triton_chunked(w: _Work, allowed: int) -> Plan:
    # ROCm may have to multiply f32 copies of some classes
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
    """The elements from one row of padded logits to the next."""
    return -(-classes // PADDING) * PADDING


def _least(others: int, d: int) -> int:
    """The minimum of a tile's rows (or classes), for ``others`` classes (or rows)."""
    return max(LEAST, min(BLOCK // others, OPERAND // d))


def _parts(total: int, most: int, align: int) -> int:
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
