"""The chunks of a row region: logits, the row function, and the products with its gradients.

In: the tensors of a call of ``fxpass::row_region``, and the compiled function of some rows. Out:
its outputs, and the gradients of the tensors. One chunk of ``plan.rows`` rows of logits exists at
a time, in a buffer that all chunks share, in the operands' dtype, as in the program. Products are
multiplied in the dtype that the device multiplies fastest; sums over chunks are f32 (f64 for f64)::

    >>> from fxpass.plan.regions import RegionPlan
    >>> x, weight = torch.randn(6, 8), torch.randn(10, 8)
    >>> call = Call((x, weight), ((0, 1, None),), (), (), (), RegionPlan(4, (10,), 0, 0))
    >>> lse = torch.empty(6)
    >>> forward(call, lambda some: [some[0].logsumexp(1)], [lse])
    >>> torch.allclose(lse, (x @ weight.T).logsumexp(1), atol=1e-6)
    True

NOTE: gradients of fp16. A cotangent such as 1 / N leaves nothing of small probabilities in fp16.
The gradient of a row function is linear in its cotangents: they are multiplied by a power of two,
so that the largest is near 1, and the gradients are divided again where they are f32. Both are
exact, and the factor is computed on the device, without a wait of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fxpass.aten.gemm import Rows, add_product, linear, part_of, slices
from fxpass.plan.devices import multiplied_in
from fxpass.plan.regions import Head, RegionPlan
from fxpass.spec.dtypes import compute_dtype

# Logits, rows, shared operands, then rows of what the run adds to them -> outputs and gradients.
RowFunction = Callable[[list[Tensor]], Sequence[Tensor]]
# The largest cotangent is not taken for less: the factor stays finite, and so does its inverse.
_LEAST = 2.0**-100
# Elements of a gradient of logits that are up-cast and summed at a time.
_SUMMED_AT_A_TIME = 1 << 18


class Call(NamedTuple):
    """The operands of one run of a region; numbers are positions in ``tensors``."""

    tensors: tuple[Tensor, ...]
    heads: tuple[tuple[int, int, int | None], ...]  # x [N, D], weight [V, D] and bias [V]
    rows: tuple[int, ...]  # row operands [N, ...]
    shared: tuple[int, ...]
    trained: tuple[int, ...]  # what has a gradient, if the run computes gradients; ascending
    plan: RegionPlan

    @property
    def n(self) -> int:
        return self.tensors[0].shape[0]


def multiplied(x: Tensor) -> torch.dtype:
    """The dtype in which operands like x are multiplied."""
    if not x.is_cuda:
        return multiplied_in(x.dtype, x.device)
    if x.dtype not in (torch.bfloat16, torch.float16):
        return x.dtype
    # a GPU's GEMM of 16 bits adds to an f32 result, where torch has one
    if x.dtype == torch.float16:
        mixed = not torch.backends.cuda.matmul.allow_fp16_accumulation
    else:
        mixed = bool(torch.version.hip) or torch.cuda.get_device_capability(x.device) >= (8, 0)
    if torch.version.hip:  # rocBLAS and hipBLASLt have one, Composable Kernel has not
        mixed &= torch.backends.cuda.preferred_blas_library() != torch._C._BlasBackend.Ck
    return x.dtype if mixed else torch.float32


def sizes(
    tensors: Sequence[Tensor], heads: Sequence[tuple[int, int, int | None]], trained: Sequence[int]
) -> tuple[Head, ...]:
    """What the plan of a run needs to know of its heads."""
    of_heads = ((tensors[x], tensors[weight], weight in trained) for x, weight, _ in heads)
    return tuple(Head(x.shape[1], len(w), x.dtype, multiplied(x), t) for x, w, t in of_heads)


def forward(call: Call, function: RowFunction, places: Sequence[Tensor]) -> None:
    """Writes the results of all rows to ``places`` ``[N, ...]``."""
    _over_chunks(call, function, (), places, None)


def backward(
    call: Call,
    function: RowFunction,
    saved: Sequence[Tensor],
    grads: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
) -> list[Tensor]:
    """The gradients of ``call.trained`` in these dtypes, for the gradients ``[N, ...]`` of outputs,
    from the logits, which are computed again, and what forward saved of each row."""
    grads, inverse = _scaled(call, grads)
    gradients = _Gradients(call, dtypes, inverse)
    _over_chunks(call, function, (*saved, *grads), (), gradients)
    return gradients.finished()


def both(
    call: Call,
    function: RowFunction,
    coefs: Sequence[Tensor],
    places: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
) -> list[Tensor]:
    """Writes the outputs to ``places`` and returns the gradients of their sum with ``coefs``."""
    coefs, inverse = _scaled(call, coefs)
    gradients = _Gradients(call, dtypes, inverse)
    _over_chunks(call, function, coefs, places, gradients)
    return gradients.finished()


def total(outputs: Sequence[Tensor], coefs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of ``coef * output``, a scalar; a coefficient of 0 adds nothing."""
    sums = [
        (o.to(dtype) * c.to(dtype)).masked_fill_(c == 0, 0).sum()
        for o, c in zip(outputs, coefs, strict=True)
    ]
    return torch.stack(sums).sum()


def _scaled(call: Call, grads: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
    """The cotangents times a power of two, and its inverse, for fp16; else as they are."""
    half = any(call.tensors[x].dtype == torch.float16 for x, _, _ in call.heads)
    half |= any(g.dtype == torch.float16 for g in grads)
    some = [g for g in grads if g.numel()]
    if not half or not some:
        return grads, None
    largest = torch.stack([g.abs().amax().float() for g in some]).amax()
    largest = largest.masked_fill_(~largest.isfinite() | (largest == 0), 1).clamp_(_LEAST)
    # a quotient of numbers with the same mantissa is an exact power of two
    mantissa = largest.frexp().mantissa
    factor, inverse = mantissa / largest, largest / mantissa
    return [(g.to(compute_dtype(g.dtype)) * factor).to(g.dtype) for g in grads], inverse


def _over_chunks(
    call: Call,
    function: RowFunction,
    more: Sequence[Tensor],
    places: Sequence[Tensor],
    gradients: _Gradients | None,
) -> None:
    """Calls the function once for each chunk, with rows of ``more`` after the operands."""
    tensors, plan = call.tensors, call.plan
    heads = [_Logits(call, i) for i in range(len(call.heads))]
    of_rows = [tensors[i] for i in call.rows]
    shared = [tensors[i].contiguous() for i in call.shared]
    for part in slices(0, call.n, plan.rows):
        logits = [head.of(part) for head in heads]
        rows = ([part_of(t, part).contiguous() for t in some] for some in (of_rows, more))
        found = list(function([*logits, *next(rows), *shared, *next(rows)]))
        for place in places:
            part_of(place, part).copy_(found.pop(0))
        if gradients is not None:
            gradients.add(part, heads, found)


class _Logits:
    """Chunks of the logits of one head, in the dtype of its operands.

    Attributes:
        tiles: the classes of each product, where operands are cast or products added.
        rows: of x, for the chunk that was computed last, in the dtype of the products.
        weight: the weight in the dtype of the products.
    """

    def __init__(self, call: Call, head: int) -> None:
        place, weight, bias = call.heads[head]
        x, w = call.tensors[place], call.tensors[weight]
        self._bias = None if bias is None else call.tensors[bias]
        dtype, v, rows = multiplied(x), w.shape[0], min(call.plan.rows, call.n)
        most = call.plan.classes[head]
        self.tiles = slices(0, v, most)
        self._x, self.weight = Rows(x, rows, dtype), Rows(w, most, dtype)
        self._buffer = x.new_empty((rows, v))
        self._tile = None if dtype == x.dtype else x.new_empty(rows * most, dtype=dtype)
        self.rows = x

    def of(self, part: slice) -> Tensor:
        """``[rows, V]``; valid until the next call."""
        self.rows = self._x[part]
        out = part_of(self._buffer, slice(0, part.stop - part.start))
        if self._tile is None:
            return linear(self.rows, self.weight[slice(0, out.shape[1])], self._bias, out)
        for place in self.tiles:
            tile = part_of(out, place, 1)
            wide = torch.mm(self.rows, self.weight[place].t(), out=self._wide(tile))
            tile.copy_(wide if self._bias is None else wide.add_(self._bias[place]))
        return out

    def multiplied(self, gradient: Tensor) -> Tensor:
        """A tile of the gradient of logits in the dtype of the products."""
        return gradient if self._tile is None else self._wide(gradient).copy_(gradient)

    def _wide(self, tile: Tensor) -> Tensor:
        assert self._tile is not None
        return self._tile[: tile.numel()].view(tile.shape)


class _Gradients:
    """The gradients of the trained tensors of a call, chunk by chunk.

    Args:
        call: whose ``trained`` are computed.
        dtypes: of the returned gradients.
        inverse: 0-dim f32, by which they are multiplied at the end; None is 1.
    """

    def __init__(self, call: Call, dtypes: Sequence[torch.dtype], inverse: Tensor | None) -> None:
        self._call, self._inverse = call, inverse
        self._dtypes = dict(zip(call.trained, dtypes, strict=True))
        rows = {*call.rows, *(x for x, _, _ in call.heads)}
        weights = {w for _, w, _ in call.heads}
        several = call.plan.rows < call.n
        self._found: dict[int, Tensor] = {}
        self._rows: list[int] = [i for i in call.trained if i in rows]
        for i, dtype in self._dtypes.items():
            tensor = call.tensors[i]
            # what one product computes is rounded once
            exact = i in rows or (i in weights and inverse is None and not several)
            new = tensor.new_empty if call.n else tensor.new_zeros
            self._found[i] = new(tensor.shape, dtype=dtype if exact else compute_dtype(dtype))

    def add(self, part: slice, heads: Sequence[_Logits], found: list[Tensor]) -> None:
        """Adds the gradients of a chunk: of the logits of each head with something trained, then of
        row operands and shared operands. Takes them out of the list: each is freed once added."""
        for head, places in zip(heads, self._call.heads, strict=True):
            if any(i in self._found for i in places):
                self._add_products(part, head, places, found.pop(0))
        for i in self._call.rows:
            if i in self._found:
                self._write(part_of(self._found[i], part), found.pop(0))
        for i in self._call.shared:
            if i in self._found:
                self._add_sum(self._found[i], part, found.pop(0))

    def _add_products(
        self, part: slice, head: _Logits, places: tuple[int, int, int | None], of_z: Tensor
    ) -> None:
        x, weight, bias = (None if i is None else self._found.get(i) for i in places)
        of_x = None if x is None else part_of(x, part)
        sums = None if of_x is None else self._place(of_x, head.rows.dtype)
        if sums is not None and of_z.dtype == head.rows.dtype:
            _product(sums, of_z, head.weight[slice(0, of_z.shape[1])], add=False)
        for place in head.tiles:
            g = head.multiplied(part_of(of_z, place, 1))
            if sums is not None and of_z.dtype != g.dtype:
                _product(sums, g, head.weight[place], add=place.start > 0)
            if weight is not None:
                _product(part_of(weight, place), g.t(), head.rows, add=part.start > 0)
            if bias is not None:
                self._add_sum(part_of(bias, place), part, _sum(g, bias.dtype))
        if (
            of_x is not None
            and sums is not None
            and (sums is not of_x or self._inverse is not None)
        ):
            self._write(of_x, sums)

    def _place(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        """Where a product in ``dtype`` goes that is to be written to ``out``: to ``out``, if it is
        not rounded twice there."""
        wide = compute_dtype(out.dtype)
        if out.dtype == wide or (out.dtype == dtype and self._inverse is None):
            return out
        return torch.empty_like(out, dtype=wide)

    def _write(self, out: Tensor, gradient: Tensor) -> None:
        """``out = gradient * inverse``, rounded once; the gradient may be ``out``."""
        if self._inverse is not None:
            gradient = gradient.to(compute_dtype(gradient.dtype)) * self._inverse
        out.copy_(gradient)

    def _add_sum(self, out: Tensor, part: slice, gradient: Tensor) -> None:
        (out.add_ if part.start else out.copy_)(gradient)

    def finished(self) -> list[Tensor]:
        """The gradients in the order of ``trained``."""
        found = []
        for i, dtype in self._dtypes.items():
            gradient = self._found.pop(i)
            if self._inverse is not None and i not in self._rows:
                gradient.mul_(self._inverse)
            found.append(gradient if gradient.dtype == dtype else gradient.to(dtype))
        return found


def _product(out: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """``out = a @ b``, or ``out += a @ b``, accumulated in f32 on GPUs."""
    if out.is_cuda and out.dtype != a.dtype and a.dtype.itemsize == 2:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(add), out=out)
    else:
        add_product(out, a, b, add)


def _sum(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the rows ``[rows, V]``; a CPU up-casts some rows at a time."""
    if gradient.is_cuda or gradient.dtype == dtype:
        return gradient.sum(0, dtype=dtype)
    rows = max(1, _SUMMED_AT_A_TIME // max(1, gradient.shape[1]))
    first, *others = (some.sum(0, dtype=dtype) for some in gradient.split(rows))
    for other in others:
        first.add_(other)
    return first
