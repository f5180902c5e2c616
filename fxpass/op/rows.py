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

from fxpass.formula.dtypes import dtype_name
from fxpass.kernels.call import Launch, gpu_for_listing, launches
from fxpass.op.row_chunks import formula_operands, loop_plan, prepared, run_loop
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
        its results: of rows ``[N, ...]``; sums in the dtype of the text, or at least in f32.

    Raises:
        ValueError: shapes, dtypes or devices do not fit the text, or the text is none of a loop.
    """
    results = _OPERATOR(tensors, text)
    return results[: len(Loop.parse(text).results)]


def _sizes(loop: Loop, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """The sizes by their names in the text; ``ValueError`` for tensors of other shapes, dtypes or
    devices."""
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
            needed_input = Input(wanted.dtype, tuple(sizes.get(s, s) for s in wanted.shape))  # pyright: ignore
            got = f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
            raise ValueError(f"{NAME} needs {needed_input} as tensor {i}, got {got}")
    return sizes


class CallDescription(NamedTuple):
    """The description of a call, for a report.

    Attributes:
        choice: of a formula.
        plan: of a loop without a formula.
        launches: the Triton kernels of a formula.
    """

    choice: Choice | None
    plan: RegionPlan | None
    launches: tuple[Launch, ...] = ()


def describe_call(tensors: Sequence[Tensor], text: str) -> CallDescription:
    """The description of a call; ``tensors`` need no data."""
    sizes = _sizes(Loop.parse(text), tensors)
    device = tensors[0].device
    loop = prepared(text, device)
    if loop.formula is None:
        return CallDescription(None, loop_plan(loop, tensors, sizes))
    operands = formula_operands(loop, tensors, sizes)
    spec = loop.formula.spec
    n, d = operands.x.shape
    choice = loop.formula.choice(n, d, len(operands.weight), device)
    return CallDescription(choice, None, launches(spec, operands, gpu_for_listing(device)))


def compile_ahead(text: str, device: torch.device) -> tuple[str, ...]:
    """Compiles the function of a loop before a call runs it; returns the names of the kernels."""
    loop = prepared(text, device)
    if loop.formula is not None:
        return ()
    function, _ = loop.function()
    return function.kernels if function.compiled is not None else ()


def _run(tensors: Sequence[Tensor], text: str) -> list[Tensor]:
    sizes = _sizes(Loop.parse(text), tensors)
    return _at_least_two(run_loop(prepared(text, tensors[0].device), tensors, sizes), tensors[0])


def _fake(tensors: Sequence[Tensor], text: str) -> list[Tensor]:
    loop = Loop.parse(text)
    sizes = _sizes(loop, tensors)
    new = tensors[0].new_empty
    results = [
        new(result.actual_shape(sizes), dtype=loop.dtype(i))
        for i, result in enumerate(loop.results)
    ]
    return _at_least_two(results, tensors[0])


def _at_least_two(results: list[Tensor], like: Tensor) -> list[Tensor]:
    """At least two tensors: up to torch 2.13, code of Inductor's cpp_wrapper reads a list of one as
    a tensor, and crashes."""
    return results if len(results) > 1 else [*results, like.new_empty(0)]


_LIBRARY = torch.library.Library("fxpass", "FRAGMENT")
_LIBRARY.define(
    "rows" + torch.library.infer_schema(_run, mutates_args=()),
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.impl("rows", _run, "CompositeExplicitAutograd")
torch.library.register_fake(NAME, _fake, lib=_LIBRARY)
_OPERATOR = torch.ops.fxpass.rows.default
