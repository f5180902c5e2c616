"""The chunks of a row region, whose row function is compiled.

In: the tensors of a call of ``fxpass::row_region``, and the compiled function of some rows. Out:
its outputs, and the gradients of the tensors, from :func:`fxpass.aten.chunks.over_chunks`. Logits
have the operands' dtype, as in the program::

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

from fxpass.aten.chunks import Chunks, over_chunks, place
from fxpass.aten.gemm import part_of
from fxpass.plan.devices import multiplied_in
from fxpass.plan.regions import Head, RegionPlan
from fxpass.spec.dtypes import compute_dtype

# Logits, rows, shared operands, then rows of what the run adds to them -> outputs and gradients.
RowFunction = Callable[[list[Tensor]], Sequence[Tensor]]
# The largest cotangent is not taken for less: the factor stays finite, and so does its inverse.
_LEAST = 2.0**-100


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
    _run(call, function, (), places, None)


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
    _run(call, function, (*saved, *grads), (), gradients)
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
    _run(call, function, coefs, places, gradients)
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


def _run(
    call: Call,
    function: RowFunction,
    more: Sequence[Tensor],
    places: Sequence[Tensor],
    gradients: _Gradients | None,
) -> None:
    """Calls the function once for each chunk, with rows of ``more`` after the operands."""
    tensors, plan = call.tensors, call.plan
    rows, heads = min(plan.rows, call.n), []
    for (x, weight, bias), classes in zip(call.heads, plan.classes, strict=True):
        operands = tensors[x], tensors[weight], None if bias is None else tensors[bias]
        grads, inverse = (None, None, None), None
        if gradients is not None:
            grads, inverse = gradients.of_head(x, weight, bias), gradients.inverse
        dtypes = multiplied(tensors[x]), tensors[x].dtype
        heads.append(Chunks(operands, rows, classes, *dtypes, grads, inverse))
    of_rows = [tensors[i] for i in call.rows]
    shared = [tensors[i].contiguous() for i in call.shared]

    def of_chunk(part: slice, logits: list[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        rows = ([part_of(t, part).contiguous() for t in some] for some in (of_rows, more))
        found = list(function([*logits, *next(rows), *shared, *next(rows)]))
        for whole in places:
            part_of(whole, part).copy_(found.pop(0))
        of_logits: list[tuple[Tensor, Tensor | None]]
        of_logits = [(found.pop(0), None) for head in heads if head.trained]
        if gradients is not None:
            gradients.add(part, found)
        return of_logits

    over_chunks(call.n, rows, heads, of_chunk)


class _Gradients:
    """The gradients of the trained tensors of a call, chunk by chunk.

    Args:
        call: whose ``trained`` are computed.
        dtypes: of the returned gradients.
        inverse: 0-dim f32, by which they are multiplied at the end; None is 1.
    """

    def __init__(self, call: Call, dtypes: Sequence[torch.dtype], inverse: Tensor | None) -> None:
        self._call, self.inverse = call, inverse
        self._dtypes = dict(zip(call.trained, dtypes, strict=True))
        rows = {*call.rows, *(x for x, _, _ in call.heads)}
        weights = {w for _, w, _ in call.heads}
        several = call.plan.rows < call.n
        self._found: dict[int, Tensor] = {}
        self._rows: list[int] = [i for i in call.trained if i in rows]
        for i, dtype in self._dtypes.items():
            tensor = call.tensors[i]
            exact = i in rows or (i in weights and inverse is None and not several)
            self._found[i] = place(tensor, dtype, call.n, exact)

    def of_head(
        self, x: int, weight: int, bias: int | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The places of the gradients of a head's operands."""
        found = self._found
        return found.get(x), found.get(weight), None if bias is None else found.get(bias)

    def add(self, part: slice, found: list[Tensor]) -> None:
        """Adds the gradients of a chunk of row operands, then of shared operands. Takes them out
        of the list: each is freed once added."""
        for i in self._call.rows:
            if i in self._found:
                self._write(part_of(self._found[i], part), found.pop(0))
        for i in self._call.shared:
            if i in self._found:
                gradient = self._found[i]
                (gradient.add_ if part.start else gradient.copy_)(found.pop(0))

    def _write(self, out: Tensor, gradient: Tensor) -> None:
        """``out = gradient * inverse``, rounded once."""
        if self.inverse is not None:
            gradient = gradient.to(compute_dtype(gradient.dtype)) * self.inverse
        out.copy_(gradient)

    def finished(self) -> list[Tensor]:
        """The gradients in the order of ``trained``."""
        found = []
        for i, dtype in self._dtypes.items():
            gradient = self._found.pop(i)
            if self.inverse is not None and i not in self._rows:
                gradient.mul_(self.inverse)
            found.append(gradient if gradient.dtype == dtype else gradient.to(dtype))
        return found
