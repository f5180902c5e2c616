"""``fxpass::class_reductions``: reductions of a head's logits over the classes, without the logits.

In: hidden states, the head's weight, what its reductions read, and the text of
:class:`fxpass.spec.reductions.Reductions`. Out: the outputs of every row; backward computes the
logits again, a chunk of rows at a time::

    >>> x, w, c = torch.randn(4, 8), torch.randn(10, 8), torch.tensor([1, 2, 3, 4])
    >>> spec = "r4 outputs=pick;moment(1,1)"
    >>> rows, *_ = class_reductions(x, w, None, None, c, [], None, None, spec)
    >>> log_probs, minus_entropy = rows  # [4] each

NOTE: gradients in forward. Where a program adds up outputs with coefficients that it knows before
(a mean, a mask), the operator returns this total, and forward computes its gradients with it: the
logits are computed once. Backward multiplies the saved gradients by the total's incoming gradient::

    >>> of_mean = torch.full((1, 4), -1 / 4)
    >>> spec = "r4 outputs=argmax gradients=x total=pick"
    >>> _, (predicted,), *_, total, _, _, _ = class_reductions(
    ...     x.requires_grad_(), w, None, None, c, [], of_mean, None, spec
    ... )
    >>> torch.allclose(total, torch.nn.functional.cross_entropy(x @ w.T, c))
    True
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowADInplaceOrView, _DisableAutocast

import fxpass.op.kept  # noqa: F401, stored code that imports this module may call it too
from fxpass.aten import reductions as aten
from fxpass.op.ignored import of_all_rows, rows_of, selected
from fxpass.op.saved import scaled
from fxpass.plan.devices import on_device
from fxpass.plan.plan import Plan, plan
from fxpass.spec.dtypes import compute_dtype, gradient_dtype
from fxpass.spec.operands import Operands, Outputs, empty
from fxpass.spec.outputs import OF_PICKS, PRODUCTS, lines_of
from fxpass.spec.reductions import Reductions

NAME = "fxpass::class_reductions"
_Nine = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op(NAME, mutates_args=())
def class_reductions(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    picks: Tensor | None,
    given: Sequence[Tensor],
    coef: Tensor | None,
    logits: Tensor | None,
    spec: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Reductions of ``x @ weight.T + bias`` over the classes.

    Args:
        x: ``[N, D]`` floating point.
        weight: ``[V, D]``, dtype of x. Without classes, as in an empty vocabulary shard, lse, max
            and amax are -inf, and all other outputs and gradients are 0.
        bias: ``[V]`` in the dtype of x or of the outputs, or None. A wider bias is added to the
            up-cast logits.
        scale: ``[N]`` in the dtype of the outputs, a factor of each row's transformed logits.
        picks: class indices ``[N]`` or ``[N, K]`` int64, for the outputs ``pick`` and ``at``; else
            None.
        given: the weights of moments, ``[V]`` or ``[N, V]`` floating point, and operands of the
            transform, which may be masks too.
        coef: ``[T, N]`` in the dtype of the outputs, the weights of the outputs that ``spec.total``
            names, in its order, K rows for picks ``[N, K]``; None without a total. It has no
            gradient. A row of zeros adds nothing to the total and its gradients.
        logits: ``[N, V]``, the linear's output with its bias, if the graph needs it anyway; it has
            no gradient, and those of the operands are computed from it.
        spec: the text of a :class:`fxpass.spec.reductions.Reductions`.

    Returns:
        rows: ``[R, N]`` f32 (f64 for f64 operands), in the order of the spec's outputs; K rows for
            picks ``[N, K]``.
        indices: ``[I, N]`` int64, the outputs that are class indices.
        lse, rest, saved: what backward reads; size 0 with a total.
        total: a scalar, the sum of ``coef * output``; size 0 without a total.
        x_grad, weight_grad, bias_grad: the gradients of the total that the spec names, in the
            dtypes of their operands, but f32 for fp16; size 0 for the others.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        IndexError: a pick is no class (on CPU; on GPUs a device-side assertion fails).
    """
    s = Reductions.parse(spec)
    operands = Operands(x, weight, bias, scale, picks, tuple(given), coef, logits)
    _check(operands, s)
    # without an ambient autocast, since the graph's casts are explicit, and without autograd,
    # version counters and views, a fifth of the host's time
    with on_device(x.device), _AutoDispatchBelowADInplaceOrView(), _DisableAutocast():
        _check_picks(operands)
        out, found = _forward(operands, s)
        total = out.total.sum() if s.total else out.total
        of_x, of_weight, of_bias = (
            x.new_empty(0) if t is None or name not in found else _saved(found[name], t.dtype)
            for name, t in zip(PRODUCTS, (x, weight, bias), strict=True)
        )
    rows = out.rows, out.indices, out.lse, out.rest, out.saved
    return *rows, total, of_x, of_weight, of_bias


def _saved(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of an operand of ``dtype``, as forward returns it."""
    dtype = gradient_dtype(dtype)
    return gradient if gradient.dtype == dtype else gradient.to(dtype)


def _forward(operands: Operands, spec: Reductions) -> tuple[Outputs, dict[str, Tensor]]:
    """The outputs and gradients, without the rows that add nothing to the total."""
    coef = operands.coef
    if not len(operands.weight):
        return _of_no_classes(operands, spec)
    index = None
    if coef is not None and not spec.outputs and operands.logits is None:
        index = None if coef.is_cpu and coef.all() else selected(coef.any(0))
    if coef is None or index is None:
        return _run_forward(operands, spec)

    def of(rows: Tensor) -> Operands:
        return rows_of(operands, rows)._replace(coef=coef[:, rows])

    if operands.x.is_cuda and not len(index):
        # a CUDA graph that is captured next has all rows, and can load no kernel
        _run_forward(of(index.new_zeros(1)), spec)
    out, grads = _run_forward(of(index), spec)
    return out, of_all_rows(grads, operands, index)


def _of_no_classes(operands: Operands, spec: Reductions) -> tuple[Outputs, dict[str, Tensor]]:
    """The outputs of a vocabulary shard without classes."""
    out = empty(operands, spec)
    for tensor in out:
        tensor.zero_()
    for output, line in zip(spec.rows, out.rows, strict=False):
        line.fill_(-float("inf") if output in ("lse", "max", "amax") else 0)
    named = {"x": operands.x, "weight": operands.weight, "bias": operands.bias}
    names = spec.gradients if spec.total else ()
    return out, {k: torch.zeros_like(t) for k, t in named.items() if k in names and t is not None}


def _run_forward(operands: Operands, spec: Reductions) -> tuple[Outputs, dict[str, Tensor]]:
    plan = _plan(operands, spec, gradients=bool(spec.total))
    return _implementation(plan).forward(operands, spec, plan)


def _implementation(plan: Plan) -> ModuleType:
    """The module whose ``forward`` and ``backward`` run a call."""
    if plan.implementation == "aten":
        return aten
    from fxpass.kernels import reductions as triton  # imports triton, which not every platform has

    return triton


@torch.library.custom_op(NAME + "_backward", mutates_args=())
def class_reductions_backward(
    grad: Tensor,
    lse: Tensor,
    rest: Tensor,
    saved: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    picks: Tensor | None,
    given: Sequence[Tensor],
    logits: Tensor | None,
    spec: str,
) -> list[Tensor]:
    """The gradients that a spec without a total names, for the gradient ``[R, N]`` of the rows, in
    the dtypes of their operands. The other arguments are those and the results of
    :func:`class_reductions`."""
    s = Reductions.parse(spec)
    operands = Operands(x, weight, bias, scale, picks, tuple(given), logits=logits)
    if not len(weight):
        return [torch.zeros_like(t) for name, t in _named(operands) if name in s.gradients]
    with on_device(x.device), _AutoDispatchBelowADInplaceOrView(), _DisableAutocast():
        found = _backward_of_rows(operands, s, Outputs(grad, grad, lse, rest, saved, grad))
    return [found[name].to(t.dtype) for name, t in _named(operands) if name in s.gradients]


def _backward_of_rows(operands: Operands, spec: Reductions, out: Outputs) -> dict[str, Tensor]:
    """The gradients, without the rows that have no incoming gradient in ``out.rows``."""
    counts = out.rows.any(0)
    index = selected(counts) if operands.logits is None else None
    some = operands
    if index is not None:
        some = rows_of(operands, index)
        rows, lse, rest, saved = (t[..., index] for t in (out.rows, out.lse, out.rest, out.saved))
        out = out._replace(rows=rows, lse=lse, rest=rest, saved=saved)
    else:
        # such a row adds nothing, whatever its lse is
        out = out._replace(lse=torch.where(counts, out.lse, torch.finfo(out.lse.dtype).max))
    plan = _plan(some, spec, gradients=True)
    incoming = out.rows.to(out.lse.dtype)
    grads = _implementation(plan).backward(some, spec, plan, out, incoming)
    return grads if index is None else of_all_rows(grads, operands, index)


def _named(operands: Operands) -> list[tuple[str, Tensor]]:
    """The operands that may have a gradient, in the order of ``Reductions.gradients``."""
    named: list[tuple[str, Tensor | None]] = [
        (name, getattr(operands, name)) for name in ("x", "weight", "bias", "scale")
    ]
    named += [(f"given{i}", t) for i, t in enumerate(operands.given)]
    return [(name, t) for name, t in named if t is not None]


def _plan(operands: Operands, spec: Reductions, gradients: bool) -> Plan:
    x, weight = operands.x, operands.weight
    n, d, v = *x.shape, weight.shape[0]
    scaled, exist = operands.scale is not None, operands.logits is not None
    return plan(n, d, v, x.dtype, x.device, spec, scaled, gradients, exist)


def _check(operands: Operands, spec: Reductions) -> None:
    x, weight, bias, scale, picks, given, coef, logits = operands
    named = _named(operands) + [
        (n, t) for n, t in (("picks", picks), ("coef", coef), ("logits", logits)) if t is not None
    ]
    if any(t.device != x.device for _, t in named):
        places = ", ".join(f"{name} on {t.device}" for name, t in named)
        raise ValueError(f"{NAME} needs tensors of one device, got {places}")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{NAME} needs x [N, D] and weight [V, D], got {list(x.shape)} and {list(weight.shape)}"
        )
    if not x.is_floating_point() or x.dtype != weight.dtype:
        raise ValueError(
            f"{NAME} needs x and weight of one floating-point dtype, got {x.dtype} and "
            f"{weight.dtype}: cast one of them"
        )
    n, v, dtype = x.shape[0], weight.shape[0], compute_dtype(x.dtype)
    shapes: list[tuple[str, Tensor | None, tuple[list[int], ...]]] = [
        ("bias", bias, ([v],)),
        ("scale", scale, ([n],)),
        ("logits", logits, ([n, v],)),
        *((f"given{i}", t, ([v], [n, v])) for i, t in enumerate(given)),
    ]
    for name, tensor, allowed in shapes:
        if tensor is not None and list(tensor.shape) not in allowed:
            wanted = " or ".join(map(str, allowed))
            raise ValueError(f"{NAME} needs {name} {wanted}, got {list(tensor.shape)}")
    if bias is not None and bias.dtype not in (x.dtype, dtype):
        raise ValueError(f"{NAME} needs a bias of {x.dtype} or {dtype}, got {bias.dtype}")
    if scale is not None and scale.dtype != dtype:
        raise ValueError(f"{NAME} needs a scale of {dtype}, got {scale.dtype}")
    positions = [i for kind, i in spec.operands if kind != "given"]
    picked = bool(positions) or not set(OF_PICKS).isdisjoint((*spec.outputs, *spec.total))
    if (picks is None) == picked:
        raise ValueError(
            f"{NAME} needs picks where outputs or expressions read them, and only there"
        )
    if picks is not None and (
        picks.dtype != torch.int64 or picks.dim() not in (1, 2) or picks.shape[:1] != x.shape[:1]
    ):
        raise ValueError(
            f"{NAME} needs picks [{n}] or [{n}, K] int64, got {list(picks.shape)} {picks.dtype}"
        )
    if positions and max(positions) >= operands.classes().shape[1]:
        raise ValueError(f"{NAME} needs {max(positions) + 1} picks of a row for {spec.text()!r}")
    if spec.top and max(output.k for output in spec.top) > v:
        raise ValueError(f"{NAME} needs more classes than {v} for {spec.text()!r}")
    if (coef is None) != (not spec.total):
        raise ValueError(f"{NAME} needs coef for a total, and only for it")
    if coef is not None:
        many = picks.shape[1] if picks is not None and picks.dim() == 2 else 1
        lines = sum(lines_of(o, many) for o in spec.total)
        if list(coef.shape) != [lines, n] or coef.dtype != dtype:
            raise ValueError(
                f"{NAME} needs coef [{lines}, {n}] {dtype}, got {list(coef.shape)} {coef.dtype}"
            )
    given_read = (i for kind, i in spec.operands if kind == "given")
    needed = max((*spec.weights, *given_read), default=-1) + 1
    if needed > len(given):
        raise ValueError(f"{NAME} needs {needed} given values, got {len(given)}")
    for i, tensor in enumerate(given):
        mask = tensor.dtype == torch.bool and i not in spec.weights
        if not (tensor.is_floating_point() or mask):
            raise ValueError(f"{NAME} needs a floating-point given{i}, got {tensor.dtype}")
    if absent := set(spec.gradients) - {name for name, _ in named}:
        raise ValueError(f"{NAME} cannot compute gradients of {', '.join(sorted(absent))}: absent")


def check_gradients(operands: Operands, spec: Reductions) -> None:
    """``RuntimeError`` for an operand that requires a gradient which the spec does not name."""
    others = [("coef", operands.coef), ("logits", operands.logits)]
    for name, tensor in (*_named(operands), *others):
        if tensor is not None and tensor.requires_grad and name not in spec.gradients:
            raise RuntimeError(
                f"{NAME}: {name} requires a gradient that the spec does not name "
                f"({spec.text()!r}); add it to gradients= or detach {name}"
            )


def check_first_derivative() -> None:
    """``RuntimeError`` in a backward that is to be differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{NAME} has no second derivative (create_graph=True). Set FUSEDCE=0 for this model"
        )


def _check_picks(operands: Operands) -> None:
    picks, v = operands.picks, operands.weight.shape[0]
    if picks is None or not v or not picks.numel():
        return
    least, largest = picks.aminmax()
    if picks.device.type != "cpu":
        torch.ops.aten._assert_async((least >= 0) & (largest < v))
        return
    for index in (int(least), int(largest)):
        if not 0 <= index < v:
            raise IndexError(f"class {index} is out of bounds: there are {v} classes")


# ---------------------------------------------------------------- the compiler and autograd


@class_reductions.register_fake
def _(x, weight, bias, scale, picks, given, coef, logits, spec: str) -> _Nine:
    s = Reductions.parse(spec)
    operands = Operands(x, weight, bias, scale, picks, tuple(given), coef, logits)
    _check(operands, s)
    out = empty(operands, s)
    total = out.lse.new_empty(()) if s.total else out.total
    names = s.gradients if s.total else ()
    of_x, of_weight, of_bias = (
        t.new_empty(t.shape, dtype=gradient_dtype(t.dtype)) if name in names else x.new_empty(0)
        for name, t in zip(PRODUCTS, (x, weight, x if bias is None else bias), strict=True)
    )
    rows = out.rows, out.indices, out.lse, out.rest, out.saved
    return *rows, total, of_x, of_weight, of_bias


@class_reductions_backward.register_fake
def _(
    grad, lse, rest, saved, x, weight, bias, scale, picks, given, logits, spec: str
) -> list[Tensor]:
    named = _named(Operands(x, weight, bias, scale, picks, tuple(given)))
    gradients = Reductions.parse(spec).gradients
    return [t.new_empty(t.shape) for name, t in named if name in gradients]


def _setup_context(ctx, inputs, output) -> None:
    x, weight, bias, scale, picks, given, coef, logits, text = inputs
    rows, indices, lse, rest, saved, total, *grads = output
    spec = ctx.spec = Reductions.parse(text)
    check_gradients(Operands(x, weight, bias, scale, picks, tuple(given), coef, logits), spec)
    ctx.set_materialize_grads(False)
    ctx.count = len(given)
    ctx.mark_non_differentiable(indices, lse, rest, saved, *grads, rows if spec.total else total)
    if spec.total:
        ctx.dtypes = [None if t is None else t.dtype for t in (x, weight, bias)]
        ctx.save_for_backward(*grads)
        return
    tensors = (x, weight, bias, scale, picks, logits, *given)
    ctx.present = [t is not None for t in tensors]
    ctx.save_for_backward(lse, rest, saved, *(t for t in tensors if t is not None))


def _backward(ctx, grad: Tensor | None, _i, _l, _r, _s, total: Tensor | None, *_):
    check_first_derivative()
    found = {}
    if ctx.spec.total and total is not None:
        saved = zip(PRODUCTS, ctx.saved_tensors, ctx.dtypes, strict=True)
        found = {
            name: scaled(t, total, dtype) for name, t, dtype in saved if name in ctx.spec.gradients
        }
    elif grad is not None:
        lse, rest, saved, *present = ctx.saved_tensors
        tensors = iter(present)
        operands = (next(tensors) if p else None for p in ctx.present)
        x, weight, bias, scale, picks, logits, *given = operands
        tensors = (lse, rest, saved, x, weight, bias, scale, picks, given, logits)
        grads = class_reductions_backward(grad, *tensors, ctx.spec.text())
        found = dict(zip(ctx.spec.gradients, grads, strict=True))
    of_given = [found.get(f"given{i}") for i in range(ctx.count)]
    named = (found.get(name) for name in ("x", "weight", "bias", "scale"))
    return *named, None, of_given, None, None, None


class_reductions.register_autograd(_backward, setup_context=_setup_context)
