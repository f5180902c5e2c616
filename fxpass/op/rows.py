"""``fxpass::rows``: a function of rows, a chunk of rows at a time.

In: tensors, and the text of a :class:`fxpass.region.loop.Loop`. Out: its results: ``[N, ...]``, and
sums over all rows. It stands in graphs after autograd, and has no derivative::

    >>> text = '''rows rows=0 sums=1 wide= memory_mb=0 compiled=0
    ... %0 = input float32[n, 5]
    ... %1 = aten.amax.default(%0, [1])
    ... %2 = aten.sum.dim_IntList(%0, [0])
    ... return %1, %2'''
    >>> largest, total = rows([torch.ones(4, 5)], text)
    >>> largest.shape, total.tolist()
    (torch.Size([4]), [4.0, 4.0, 4.0, 4.0, 4.0])

:mod:`fxpass.op.row_chunks` runs it, :mod:`fxpass.plan.regions` decides how many rows a chunk has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpass.formula.dtypes import short
from fxpass.kernels.call import Launch, gpu_for_listing, launches
from fxpass.op.row_chunks import operands_of, planned_for, prepared, run
from fxpass.plan.choice import Choice
from fxpass.plan.regions import RegionPlan
from fxpass.region.loop import Loop
from fxpass.region.text import Input

NAME = "fxpass::rows"


def rows(tensors: Sequence[Tensor], text: str) -> list[Tensor]:
    """Runs a loop.

    Args:
        tensors: the inputs of the loop, on one device; those with rows have ``N`` first.
        text: of a :class:`fxpass.region.loop.Loop`.

    Returns:
        its results: of rows ``[N, ...]``; sums in the dtype of the text, wide ones at least in f32.

    Raises:
        ValueError: shapes, dtypes or devices do not fit the text, or it is none of a loop.
    """
    found = _OPERATOR(tensors, text)
    return found[: len(Loop.parse(text).results)]


def _sizes(loop: Loop, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """The sizes by the names that the text has for them; ``ValueError`` for tensors of other
    shapes, dtypes or devices."""
    if len(tensors) != len(loop.inputs):
        raise ValueError(f"{NAME} needs {len(loop.inputs)} tensors, got {len(tensors)}")
    if len(devices := {t.device for t in tensors}) > 1:
        places = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"{NAME} needs tensors of one device, got {places}")
    sizes: dict[str, Any] = {}
    for i, (tensor, wanted) in enumerate(zip(tensors, loop.inputs, strict=True)):
        fits = tensor.dtype == wanted.dtype and tensor.dim() == len(wanted.shape)
        for size, needed in zip(tensor.shape, wanted.shape, strict=False) if fits else ():
            needed = sizes.setdefault(needed, size) if isinstance(needed, str) else needed
            fits = fits and bool(size == needed)
        if not fits:
            known = Input(wanted.dtype, tuple(sizes.get(s, s) for s in wanted.shape))  # pyright: ignore
            got = f"{short(tensor.dtype)}{list(tensor.shape)}"
            raise ValueError(f"{NAME} needs {known} as tensor {i}, got {got}")
    return sizes


class Listed(NamedTuple):
    """The description of a call, for a report.

    Attributes:
        choice: of a formula.
        plan: of a loop without a formula.
        launches: the Triton kernels of a formula.
    """

    choice: Choice | None
    plan: RegionPlan | None
    launches: tuple[Launch, ...] = ()


def listed(tensors: Sequence[Tensor], text: str) -> Listed:
    """How a call runs; ``tensors`` need no data."""
    sizes = _sizes(Loop.parse(text), tensors)
    device = tensors[0].device
    loop = prepared(text, device)
    if loop.formula is None:
        return Listed(None, planned_for(loop, tensors, sizes))
    operands = operands_of(loop, tensors, sizes)
    spec = loop.formula.spec
    n, d = operands.x.shape
    choice = loop.formula.choice(n, d, len(operands.weight), device)
    return Listed(choice, None, launches(spec, operands, gpu_for_listing(device)))


def warm(text: str, device: torch.device) -> tuple[str, ...]:
    """Compiles what a call runs before it runs; the names of the kernels."""
    loop = prepared(text, device)
    if loop.formula is not None:
        return ()
    function, _ = loop.function()
    return function.kernels if function.compiled is not None else ()


def _run(tensors: Sequence[Tensor], text: str) -> list[Tensor]:
    sizes = _sizes(Loop.parse(text), tensors)
    return _several(run(prepared(text, tensors[0].device), tensors, sizes), tensors[0])


def _fake(tensors: Sequence[Tensor], text: str) -> list[Tensor]:
    loop = Loop.parse(text)
    sizes = _sizes(loop, tensors)
    new = tensors[0].new_empty
    found = [
        new([sizes[s] if isinstance(s, str) else s for s in result.shape], dtype=loop.dtype(i))
        for i, result in enumerate(loop.results)
    ]
    return _several(found, tensors[0])


def _several(found: list[Tensor], like: Tensor) -> list[Tensor]:
    """At least two tensors: code of Inductor's cpp_wrapper reads a list of one as a tensor."""
    return found if len(found) > 1 else [*found, like.new_empty(0)]


_LIBRARY = torch.library.Library("fxpass", "FRAGMENT")
_LIBRARY.define(
    "rows" + torch.library.infer_schema(_run, mutates_args=()),
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.impl("rows", _run, "CompositeExplicitAutograd")
torch.library.register_fake(NAME, _fake, lib=_LIBRARY)
_OPERATOR = torch.ops.fxpass.rows.default
