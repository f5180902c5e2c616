"""``fxpass::rows``: a function of rows, a chunk of rows at a time.

In: tensors, and the text of a :class:`fxpass.region.loop.Loop`. Out: its results: ``[N, ...]``, and
sums over all rows. It stands in graphs after autograd, and has no derivative::

    >>> text = '''rows rows=0 sums=1
    ... %0 = input float32[n, 5]
    ... %1 = aten.amax.default(%0, [1])
    ... %2 = aten.sum.dim_IntList(%0, [0])
    ... return %1, %2'''
    >>> largest, total = rows([torch.ones(4, 5)], text)
    >>> largest.shape, total.tolist()
    (torch.Size([4]), [4.0, 4.0, 4.0, 4.0, 4.0])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxpass.region.loop import Loop
from fxpass.region.run import Interpreter
from fxpass.spec.dtypes import compute_dtype

NAME = "fxpass::rows"
ROWS = 512  # of a chunk


def rows(tensors: Sequence[Tensor], text: str) -> list[Tensor]:
    """Runs a loop.

    Args:
        tensors: the inputs of the loop, on one device; those with rows have ``N`` first.
        text: of a :class:`fxpass.region.loop.Loop`.

    Returns:
        its results: of rows ``[N, ...]``; sums in the dtype of the text, at least in f32.

    Raises:
        ValueError: shapes or dtypes do not fit the text.
    """
    return _OPERATOR(tensors, text)


def _sizes(loop: Loop, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """The sizes by the names that the text has for them."""
    if len(tensors) != len(loop.inputs):
        raise ValueError(f"{NAME} needs {len(loop.inputs)} tensors, got {len(tensors)}")
    sizes: dict[str, Any] = {}
    for i, (tensor, of) in enumerate(zip(tensors, loop.inputs, strict=True)):
        if tensor.dtype != of.dtype or tensor.dim() != len(of.shape):
            raise ValueError(f"{NAME} needs {of} as tensor {i}, got {tensor.dtype} {tensor.shape}")
        for name, size in zip(of.shape, tensor.shape, strict=True):
            if isinstance(name, str):
                sizes.setdefault(name, size)
    return sizes


def _run(tensors: Sequence[Tensor], text: str) -> list[Tensor]:
    loop = Loop.parse(text)
    n, device = _sizes(loop, tensors)["n"], tensors[0].device
    function, made = Interpreter(loop.graph, device), _fake(tensors, text)
    for i in loop.sums:
        made[i].zero_()
    with torch.no_grad(), torch._C._DisableAutocast():
        for start in range(0, n, ROWS):
            count = min(ROWS, n - start)
            chunk = [
                t.narrow(0, start, count) if i in loop.rows else t for i, t in enumerate(tensors)
            ]
            for i, found in enumerate(function(chunk)):
                if i in loop.sums:
                    made[i].add_(found)
                else:
                    made[i].narrow(0, start, count).copy_(found)
    return made


def _fake(tensors: Sequence[Tensor], text: str) -> list[Tensor]:
    loop = Loop.parse(text)
    sizes = _sizes(loop, tensors)
    made = []
    for i, result in enumerate(loop.results):
        dtype = result.dtype
        if i in loop.sums and dtype.is_floating_point:
            dtype = compute_dtype(dtype)
        shape = [sizes[s] if isinstance(s, str) else s for s in result.shape]
        made.append(tensors[0].new_empty(shape, dtype=dtype))
    return made


_LIBRARY = torch.library.Library("fxpass", "FRAGMENT")
_LIBRARY.define(
    "rows" + torch.library.infer_schema(_run, mutates_args=()),
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.impl("rows", _run, "CompositeExplicitAutograd")
torch.library.register_fake(NAME, _fake, lib=_LIBRARY)
_OPERATOR = torch.ops.fxpass.rows.default
