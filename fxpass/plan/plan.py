"""Plans how many rows and classes a chunk or tile of one fused loss has.

In: sizes, dtype, device, the strategy and the user's budget. Out: a :class:`Plan` within the
budget. The operator asks for the plan when it runs, so one compiled graph serves every batch
size::

    >>> spec = Reductions((), gradients=("x", "weight"), total=("pick",))
    >>> plan_head(2048, 512, 32000, torch.float32, torch.device("cpu"), spec, False, True).rows
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
from fxpass.plan.budget import MIB, scratch_budget, size_text
from fxpass.plan.copies import block_copies
from fxpass.plan.devices import implementation_for, multiplied_in
from fxpass.plan.parts import (
    ALIGNMENT,
    BLOCK,
    LEAST,
    classes_of_product,
    few_part_size,
    least_of_tile,
    padded,
    part_size,
    rows_of_chunk,
)

# Bytes of a tile of logits on a CPU: enough work between two synchronisations of the threads.
CPU_TILE = 16 * MIB
# Bytes of a block of logits in the compute dtype, transformed between two GEMMs in the caches.
CACHED = 4 * MIB
# Bytes of a part of a GPU's logits that are worth its launches.
FEW_BYTES = 64 * MIB
# Minimum rows of a chunk on a CPU.
LEAST_ROWS = 16
# Chunks that add up a weight's gradient in bf16, at most, where the user sets the budget. Each GEMM
# accumulates in f32 and rounds the sum so far once. The sum after k of K chunks has about
# sqrt(k / K) of the size of the whole, so K chunks have the error of sqrt((1 + ... + K) / K) =
# sqrt((K + 1) / 2) roundings: 1.6 for 4, 1.9 for 6. Eager has one rounding, and twice its error is
# allowed.
MOST_ROUNDED = 6
# Rows of a tile at most, unless there are few classes; classes of a GPU's slice are multiples.
TILE_ROWS = 2048
SLICE_CLASSES = 256
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


def plan_head(
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
    scratch stays within :func:`scratch_budget`, unless the smallest block is larger; then the
    plan's reason says so."""
    implementation, reason = implementation_for(device, dtype)
    run = _Request(
        n=max(1, n),
        d=max(1, d),
        v=max(1, v),
        dtype=dtype,
        device=device,
        implementation=implementation,
        spec=spec,
        scaled=scaled,
        backward=backward,
    )
    return _plan(run, reason)


class _ItemBytes(NamedTuple):
    """The bytes of an element."""

    operand: int
    sum: int  # in the compute dtype
    product: int  # of an operand of a product
    gradient: int  # of a chunk of logits, and of its gradient


class _Request(NamedTuple):
    """The arguments of :func:`plan_head`; the sizes are at least 1."""

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
    def item_bytes(self) -> _ItemBytes:
        dtype = self.dtype
        on_gpu = self.implementation == "triton"
        return _ItemBytes(
            operand=dtype.itemsize,
            sum=compute_dtype(dtype).itemsize,
            product=(dtype if on_gpu else multiplied_in(dtype, self.device)).itemsize,
            gradient=gradient_dtype(dtype).itemsize,
        )

    @property
    def gradients(self) -> tuple[str, ...]:
        """The gradients that the run computes."""
        return self.spec.gradients if self.backward else ()

    @property
    def temporaries(self) -> int:
        """Copies of a block of logits that exist beside it."""
        return block_copies(self.spec, self.scaled, self.backward)

    @property
    def fits_gradient(self) -> bool:
        """Is true if the logits of all rows fit into the weight's gradient and are large enough."""
        large = self.n * self.v * self.item_bytes.gradient > CPU_TILE
        fits = self.spec.total and "weight" in self.gradients and self.n <= self.d
        fits = fits and not self.unrounded
        return large and bool(fits)

    @property
    def unrounded(self) -> bool:
        """Is true if the weight's gradient leaves in the dtype of the sums."""
        return "weight" in self.gradients and "weight" in self.spec.unrounded

    @property
    def sums(self) -> int:
        """Bytes of the f32 sums of the weight's gradient, if the returned gradient is narrower."""
        item = self.item_bytes
        narrower = "weight" in self.gradients and not self.unrounded and item.gradient < item.sum
        return self.v * self.d * item.sum if narrower else 0


@functools.lru_cache(maxsize=4096)
def _plan(run: _Request, reason: str) -> Plan:
    spec = run.spec
    allowed = scratch_budget(run.n, run.v, run.dtype, run.device, spec.memory_mb)
    # the user's budget includes the sums
    for_chunks = max(allowed // 4, allowed - run.sums * bool(spec.memory_mb))
    # gradients that are computed with the outputs need the softmax of a row
    of_whole_rows = bool(spec.total) or bool(spec.gradients and spec.reads_max)
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
        over = f"{size_text(found.scratch)}, is over its budget of {size_text(allowed)}"
        reason += f"; the smallest block takes {over}"
    return found._replace(reason=reason)


def _aten_chunked(run: _Request, allowed: int) -> Plan:
    n = run.n
    v = run.v
    item = run.item_bytes
    in_sum_dtype = item.gradient == item.sum  # the stored logits are transformed in place
    casts = item.product != item.operand  # operands, and the gradient of narrower logits, are cast
    share = min(allowed // 4, CPU_TILE) if casts or not in_sum_dtype else 0
    vectors = _vectors(run, allowed)
    # a block of narrower logits in the compute dtype, and the temporaries of the loss
    copies = run.temporaries + (not in_sum_dtype)
    block = min(n, max(1, min(CACHED, allowed // (4 * max(1, copies))) // (item.sum * v)))
    blocks = block * item.sum * v * copies
    # the logits, copies of x that are cast or scaled, and the unrounded gradient of x
    x_copies = casts + in_sum_dtype + (casts and not in_sum_dtype)
    row = item.gradient * v + item.product * x_copies * run.d
    most = (allowed - share - blocks - vectors) // row
    rows = rows_of_chunk(n, v, row, most, run.sums, "aten", LEAST_ROWS)
    sums = run.sums if rows < n else 0
    # per class: the cast gradient of the logits, the cast weight, the product for its gradient
    weights = run.d * (casts + ("weight" in run.gradients))
    column = item.product * (rows * (item.product != item.gradient) + weights)
    classes = v
    if casts or sums or run.unrounded:
        classes = classes_of_product(v, run.d, rows, column, share)
    scratch = rows * row + blocks + (classes * column if share else 0) + vectors
    return Plan(
        "aten", "chunked", rows, classes, block=min(block, rows), scratch=scratch, sums=sums
    )


def _aten_tiled(run: _Request, allowed: int, in_place: bool = False) -> Plan:
    d = run.d
    v = run.v
    item = run.item_bytes
    align = ALIGNMENT["aten"]
    vectors = _vectors(run, allowed)
    allowed = min(allowed, CPU_TILE * (1 + in_place)) - vectors
    narrow = item.product != item.sum
    backward = bool(run.gradients)
    operand = item.product * ((item.product != item.operand) + (backward and narrow))
    row = d * operand
    column = d * (operand + item.sum * (backward and item.operand != item.sum))
    cell = item.sum * (1 + run.temporaries) + item.product * narrow
    rows = run.n
    if not in_place:
        most = min(TILE_ROWS, allowed // (2 * row) if row else TILE_ROWS)
        # few classes: more rows
        most = max(most, (allowed - v * column) // (row + v * cell))
        rows = part_size(rows, max(most, least_of_tile(v, d)), align)
    most = (allowed - rows * row) // (column + rows * cell)
    classes = part_size(v, max(most, least_of_tile(rows, d)), align)
    scratch = rows * row + classes * column + rows * classes * cell + vectors
    strategy = "chunked" if in_place else "tiled"
    return Plan("aten", strategy, rows, classes, in_place=in_place, scratch=scratch)


def _triton_chunked(run: _Request, allowed: int, beside_sums: int) -> Plan:
    """Chunks within the budget ``allowed``, or ``beside_sums`` where there are f32 sums too."""
    n = run.n
    v = run.v
    item = run.item_bytes
    by_user = bool(run.spec.memory_mb)
    least = max(LEAST, BLOCK // v)
    # ROCm may have to multiply f32 copies of some classes
    upcasts = bool(torch.version.hip) and item.operand < item.sum
    copies = 4 * min(v, UPCAST_CLASSES) if upcasts else 0
    row = item.operand * padded(v) + copies + (4 * run.d if copies else 0)
    weights = copies * run.d

    def plan_of(rows: int, sums: int = 0, rounded: bool = False) -> Plan:
        several = rows < n
        return Plan(
            "triton",
            "chunked",
            rows,
            v,
            scratch=rows * row + weights,
            sums=sums * several,
            rounded=rounded and several,
        )

    most = (allowed - weights) // row
    few = max(few_part_size(n), FEW_BYTES // row)
    if not run.sums:  # chunks add up in the gradient that is returned
        most = most if by_user else min(most, few)
        return plan_of(part_size(n, max(most, least), ALIGNMENT["triton"]))
    most_beside = (beside_sums - weights) // row
    rows = rows_of_chunk(n, v, row, most_beside, run.sums, "triton", LEAST)
    in_f32 = plan_of(rows, sums=run.sums)
    if run.spec.accumulate == "float32":
        return in_f32
    large = part_size(n, max(most if by_user else few, least), ALIGNMENT["triton"])
    in_bf16 = plan_of(large, rounded=True)
    if by_user:
        return in_bf16 if n <= MOST_ROUNDED * large else in_f32
    gradient = item.gradient * v * run.d
    bytes_in_f32 = max(in_f32.scratch, gradient) if in_f32.sums else in_f32.scratch + gradient
    return in_bf16 if in_bf16.scratch + gradient <= in_f32.sums + bytes_in_f32 else in_f32


def _triton_tiled(run: _Request, allowed: int) -> Plan:
    """Slices of classes of all rows, after a forward in chunks of rows."""
    chunks = _triton_chunked(run._replace(backward=False), allowed, allowed)
    row = run.n * run.item_bytes.operand
    most = allowed // row
    if not run.spec.memory_mb:
        few = max(few_part_size(run.v), FEW_BYTES // row)
        most = min(most, few + -few % SLICE_CLASSES)
    classes = min(run.v, max(SLICE_CLASSES, most - most % SLICE_CLASSES))
    scratch = max(chunks.scratch, row * padded(classes))
    return chunks._replace(
        strategy="tiled", classes=classes, scratch=scratch, rounded=False, sums=0
    )


def _vectors(run: _Request, allowed: int) -> int:
    """Bytes of copies of the bias and the class weights, at most half of the budget."""
    return min(2 * run.item_bytes.sum * run.v, allowed // 2)
