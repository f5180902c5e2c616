"""``fxpass::row_region``: any function of rows of logits, without the logits.

In: the tensors of a region, and its text (:class:`fxpass.region.text.RowRegion`). Out: its outputs
``[N, ...]``; backward computes the logits again, a chunk of rows at a time::

    >>> text = '''row_region heads=2 rows=1 shared=0 trained= outputs=1 tangents= total=0 \\
    ... memory_mb=0 compiled=0
    ... %0 = input float32[n, 10]
    ... %1 = input int64[n]
    ... %2 = aten.unsqueeze.default(%1, 1)
    ... %3 = aten.gather.default(%0, 1, %2)
    ... return %3'''
    >>> x, w, c = torch.randn(4, 8), torch.randn(10, 8), torch.tensor([1, 2, 3, 4])
    >>> (picked,) = row_region([x, w, c], text)
    >>> torch.allclose(picked, (x @ w.T).gather(1, c[:, None]), atol=1e-6)
    True

The tensors are, in order, for each head x ``[N, D]``, weight ``[V, D]`` and, if it has one, bias
``[V]``; row operands ``[N, ...]``; shared operands. Where a program adds up outputs with
coefficients that it knows before (``total``), these follow, and forward computes the gradients of
the total, as in :mod:`fxpass.op.reductions`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowADInplaceOrView, _DisableAutocast
from torch.autograd import forward_ad

from fxpass.aten import regions as aten
from fxpass.op.batched import register_batches
from fxpass.op.saved import scaled
from fxpass.plan.devices import on_device
from fxpass.plan.regions import RegionPlan, plan
from fxpass.region.compile import CLASSES, functions
from fxpass.region.joint import cut
from fxpass.region.text import Input, RowRegion
from fxpass.spec.dtypes import compute_dtype, gradient_dtype, short

NAME = "fxpass::row_region"


def row_region(tensors: Sequence[Tensor], region: str) -> list[Tensor]:
    """Runs a region on all rows.

    Args:
        tensors: of the region, in the order of the module's text, on one device. With ``total``,
            coefficients with the shapes and dtypes of the outputs that have gradients.
        region: the text of a :class:`fxpass.region.text.RowRegion`.

    Returns:
        the outputs ``[N, ...]``; then, where backward computes gradients, what it reads of each
        row. With ``total``: the sum of ``coefficient * output``, a scalar (f32, f64 for f64
        operands), and its gradients by the trained tensors, in their dtypes, but f32 for fp16. The
        total has a gradient then, and the outputs have none.

    Raises:
        ValueError: shapes, dtypes or devices do not fit the region.
    """
    return _FORWARD(tensors, region)


@dataclass(frozen=True)
class _Layout:
    """A region, and where its tensors are, as positions."""

    region: RowRegion
    names: tuple[str, ...]  # of the tensors, for errors
    heads: tuple[tuple[int, int, int | None], ...]  # x, weight and bias
    rows: tuple[int, ...]
    shared: tuple[int, ...]
    coefs: tuple[int, ...]
    of_heads: tuple[Input, ...]  # the logits
    others: tuple[Input, ...]  # row operands and shared operands
    tangents: tuple[Input, ...]  # the coefficients, or the incoming gradients
    results: tuple[Input, ...]  # outputs, and what is saved


@functools.lru_cache(1024)
def _layout(text: str) -> _Layout:
    region = RowRegion.parse(text)
    if region.total and not (region.trained and region.tangents):
        raise ValueError(f"{NAME} has nothing to add up in {text.splitlines()[0]!r}")
    heads, names = [], []
    for i, size in enumerate(region.heads):
        x = len(names)
        heads.append((x, x + 1, x + 2 if size == 3 else None))
        names += [f"{name} of head {i}" for name in ("x", "weight", "bias")[:size]]
    counts = {"row operand": region.rows, "shared operand": region.shared}
    counts["coefficient"] = len(region.tangents) * region.total
    spans = []
    for name, count in counts.items():
        spans.append(tuple(range(len(names), len(names) + count)))
        names += [f"{name} {i}" for i in range(count)]
    inputs, parts = region.inputs, cut(region)
    first, end = len(heads), len(inputs) - len(region.tangents)
    described = inputs[:first], inputs[first:end], inputs[end:], (*parts.outputs, *parts.saved)
    rows, shared, coefs = spans
    return _Layout(region, tuple(names), tuple(heads), rows, shared, coefs, *described)


# ---------------------------------------------------------------- what a call is refused for


def _check(layout: _Layout, tensors: Sequence[Tensor]) -> dict[str | int, Any]:
    """The sizes by the names that the region has for them; ``ValueError`` for tensors of other
    shapes, dtypes or devices."""
    if len(tensors) != len(layout.names):
        wanted = f"{len(layout.names)} tensors ({', '.join(layout.names)})"
        raise ValueError(f"{NAME} needs {wanted}, got {len(tensors)}")
    device = tensors[0].device
    if any(t.device != device for t in tensors):
        places = (f"{k} on {t.device}" for k, t in zip(layout.names, tensors, strict=True))
        raise ValueError(f"{NAME} needs tensors of one device, got {', '.join(places)}")
    sizes: dict[str | int, Any] = {}
    for i, (places, logits) in enumerate(zip(layout.heads, layout.of_heads, strict=True)):
        (n, v), d = logits.shape, f"D{i}"
        for position, shape in zip(places, ((n, d), (v, d), (v,)), strict=True):
            if position is not None:
                needed = Input(logits.dtype, shape)
                _check_input(layout.names[position], tensors[position], needed, sizes)
    operands = (*layout.rows, *layout.shared, *layout.coefs)
    wanted = (*layout.others, *(layout.tangents if layout.coefs else ()))
    for position, needed in zip(operands, wanted, strict=True):
        _check_input(layout.names[position], tensors[position], needed, sizes)
    if not all(tensors[i].is_floating_point() for i in layout.region.trained):
        raise ValueError(f"{NAME} has gradients of floating-point tensors only")
    return sizes


def _check_input(name: str, tensor: Tensor, wanted: Input, sizes: dict[str | int, Any]) -> None:
    fits = tensor.dtype == wanted.dtype and tensor.dim() == len(wanted.shape)
    if fits:
        for size, needed in zip(tensor.shape, wanted.shape, strict=True):
            needed = sizes.setdefault(needed, size) if isinstance(needed, str) else needed
            fits = fits and bool(size == needed)
    if not fits:
        known = Input(wanted.dtype, tuple(sizes.get(s, s) for s in wanted.shape))
        got = f"{short(tensor.dtype)}{list(tensor.shape)}"
        raise ValueError(f"{NAME} needs {name} {known}, got {got}")


def _check_all(
    kind: str, tensors: Sequence[Tensor], wanted: Sequence[Input], sizes: dict[str | int, Any]
) -> None:
    if len(tensors) != len(wanted):
        raise ValueError(f"{NAME} needs {len(wanted)} {kind}s, got {len(tensors)}")
    for i, (tensor, needed) in enumerate(zip(tensors, wanted, strict=True)):
        _check_input(f"{kind} {i}", tensor, needed, sizes)


def _check_gradients(layout: _Layout, tensors: Sequence[Tensor]) -> None:
    for i, tensor in enumerate(tensors):
        if tensor.requires_grad and i not in layout.region.trained:
            raise RuntimeError(
                f"{NAME}: {layout.names[i]} requires a gradient that the region does not have; "
                "add its position to trained= or detach it"
            )


def _check_no_tangents(tensors: Sequence[Tensor]) -> None:
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(f"{NAME} has no forward-mode derivative: set FUSEDCE=0")


# ---------------------------------------------------------------- tensors with data


def _run(tensors: Sequence[Tensor], region: str) -> list[Tensor]:
    """:func:`row_region` on tensors with data."""
    layout = _layout(region)
    r, found = layout.region, _empty(layout, tensors)
    x, run = tensors[0], functions(region, tensors[0].device)
    # without an ambient autocast, since the region's casts are explicit
    with on_device(x.device), _AutoDispatchBelowADInplaceOrView(), _DisableAutocast():
        call = _call(layout, tensors, region)
        if not r.total:
            aten.forward(call, run.forward, found)
            return found
        coefs = [tensors[i] for i in layout.coefs]
        grads = aten.both(call, run.both, coefs, found, _of_total(layout, tensors))
        outputs = [found[i] for i in r.tangents]
        return [*found, aten.total(outputs, coefs, _accumulated(layout)), *grads]


def _run_backward(
    grads: Sequence[Tensor], saved: Sequence[Tensor], tensors: Sequence[Tensor], region: str
) -> list[Tensor]:
    """The gradients of the trained tensors of a region without a total, in their dtypes.

    ``grads`` are those of the outputs that have a gradient, ``saved`` what :func:`row_region` gave
    after its outputs."""
    layout = _layout(region)
    places = _places(layout, grads, saved, tensors)
    x, run = tensors[0], functions(region, tensors[0].device)
    with on_device(x.device), _AutoDispatchBelowADInplaceOrView(), _DisableAutocast():
        call, dtypes = _call(layout, tensors, region), [dtype for _, dtype in places]
        return aten.backward(call, run.backward, saved, grads, dtypes)


def _call(layout: _Layout, tensors: Sequence[Tensor], text: str) -> aten.Call:
    """The run, whose logits are divided, and thus rounded, alike in forward and in backward."""
    region, x = layout.region, tensors[0]
    row_bytes, counted = _row_bytes(text, x.device)
    actual = sum(len(tensors[w]) * tensors[w].element_size() for _, w, _ in layout.heads)
    heads = aten.sizes(tensors, layout.heads, region.trained)
    planned = plan(len(x), heads, row_bytes * actual // counted, x.device, region.memory_mb)
    places = layout.heads, layout.rows, layout.shared, region.trained
    return aten.Call(tuple(tensors), *places, planned)


def planned_for(tensors: Sequence[Tensor], region: str) -> RegionPlan:
    """How a call runs; ``tensors`` need no data."""
    return _call(_layout(region), tensors, region).plan


@functools.lru_cache(1024)
def _row_bytes(text: str, device: torch.device) -> tuple[int, int]:
    """Bytes of a row at the worst moment, and of its logits, where symbolic sizes are
    :data:`CLASSES`."""
    layout, run = _layout(text), functions(text, device)
    kinds = ["forward", "backward"][: 1 + bool(layout.region.trained)]
    worst = max(map(run.row_bytes, ["both"] if layout.region.total else kinds))
    sizes = ((i.shape[1], i.dtype.itemsize) for i in layout.of_heads)
    counted = sum((CLASSES if isinstance(v, str) else v) * size for v, size in sizes)
    return worst, max(1, counted)


def _accumulated(layout: _Layout) -> torch.dtype:
    """The dtype of a total."""
    wide = any(head.dtype == torch.float64 for head in layout.of_heads)
    return compute_dtype(torch.float64 if wide else torch.float32)


def _of_total(layout: _Layout, tensors: Sequence[Tensor]) -> list[torch.dtype]:
    return [gradient_dtype(tensors[i].dtype) for i in layout.region.trained]


# ---------------------------------------------------------------- the compiler and autograd


def _empty(layout: _Layout, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Uninitialised outputs, and what is saved."""
    sizes, x = _check(layout, tensors), tensors[0]
    found = (([sizes.get(s, s) for s in r.shape], r.dtype) for r in layout.results)
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in found]


def _places(
    layout: _Layout, grads: Sequence[Tensor], saved: Sequence[Tensor], tensors: Sequence[Tensor]
) -> list[tuple[torch.Size, torch.dtype]]:
    """Shapes and dtypes of the gradients that backward returns."""
    sizes = _check(layout, tensors)
    _check_all("gradient", grads, layout.tangents, sizes)
    _check_all("saved tensor", saved, layout.results[layout.region.outputs :], sizes)
    return [(tensors[i].shape, tensors[i].dtype) for i in layout.region.trained]


def _fake(tensors: Sequence[Tensor], region: str) -> list[Tensor]:
    layout = _layout(region)
    found, x = _empty(layout, tensors), tensors[0]
    if layout.region.total:
        found.append(x.new_empty((), dtype=_accumulated(layout)))
        trained = (tensors[i] for i in layout.region.trained)
        found += [t.new_empty(t.shape, dtype=gradient_dtype(t.dtype)) for t in trained]
    return found


def _fake_backward(
    grads: Sequence[Tensor], saved: Sequence[Tensor], tensors: Sequence[Tensor], region: str
) -> list[Tensor]:
    places = _places(_layout(region), grads, saved, tensors)
    return [tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in places]


class _Differentiable(torch.autograd.Function):
    """The operator, whose results have a history."""

    @staticmethod
    def forward(ctx: Any, keys: Any, text: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        layout = _layout(text)
        _check_gradients(layout, tensors)
        with torch._C._AutoDispatchBelowAutograd():
            results = _FORWARD.redispatch(keys, tensors, text)
        ctx.set_materialize_grads(False)
        ctx.region, ctx.text = layout.region, text
        region, end = layout.region, layout.region.outputs
        ctx.differentiable = (end,) if region.total else region.tangents
        others = (t for i, t in enumerate(results) if i not in ctx.differentiable)
        ctx.mark_non_differentiable(*others)
        if region.total:
            ctx.dtypes = [tensors[i].dtype for i in region.trained]
            ctx.save_for_backward(*results[end + 1 :])
        else:
            ctx.likes = [(results[i].shape, results[i].dtype) for i in region.tangents]
            ctx.save_for_backward(*tensors, *results[end:])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{NAME} has no second derivative (create_graph=True). Set FUSEDCE=0 for this model"
            )
        region: RowRegion = ctx.region
        count, incoming = len(_layout(ctx.text).names), [grads[i] for i in ctx.differentiable]
        found: list[Tensor | None] = [None] * count
        if all(grad is None for grad in incoming):
            return None, None, *found
        kept = ctx.saved_tensors  # read once: a checkpoint computes them when they are
        if region.total:
            each = zip(kept, ctx.dtypes, strict=True)
            computed = [scaled(t, incoming[0], dtype) for t, dtype in each]
        else:
            new = kept[0].new_zeros
            likes = zip(incoming, ctx.likes, strict=True)
            some = [new(shape, dtype=dtype) if g is None else g for g, (shape, dtype) in likes]
            computed = _BACKWARD(some, kept[count:], kept[:count], ctx.text)
        for i, gradient in zip(region.trained, computed, strict=True):
            found[i] = gradient
        return None, None, *found


def _by_autograd(keys: Any, tensors: Sequence[Tensor], region: str) -> list[Tensor]:
    """The operator's kernel of autograd, which also runs where nothing has a gradient."""
    after = keys & torch._C._after_autograd_keyset
    _check_no_tangents(tensors)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        return list(_Differentiable.apply(after, region, *tensors))
    with torch._C._AutoDispatchBelowAutograd():
        return _FORWARD.redispatch(after, tensors, region)


_LIBRARY = torch.library.Library("fxpass", "FRAGMENT")
for _name, _function, _of_shapes in (
    ("row_region", _run, _fake),
    ("row_region_backward", _run_backward, _fake_backward),
):
    # not torch.library.custom_op, whose checks of aliases take 20 us of each call on the host
    _schema = torch.library.infer_schema(_function, mutates_args=())
    _LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxpass::{_name}", _of_shapes, lib=_LIBRARY)
_LIBRARY.impl("row_region", _by_autograd, "Autograd", with_keyset=True)
_FORWARD = torch.ops.fxpass.row_region.default
_BACKWARD = torch.ops.fxpass.row_region_backward.default
register_batches(_LIBRARY, "row_region_backward", _BACKWARD)
