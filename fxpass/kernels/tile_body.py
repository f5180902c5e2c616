"""Generates the bodies of the ``tiled`` kernels, which compute tiles of logits.

In: the features of a spec and of a GEMM. Out: lines of Triton. A tile of logits is the product of
``BLOCK_N`` rows of x and ``BLOCK_V`` rows of the weight, accumulated in f32 registers over blocks
of ``BLOCK_D``::

    >>> lines = logits(Gemm(described=True))
    >>> lines[0], lines[-1]
    ('acc = tl.full((BLOCK_N, BLOCK_V), 0.0, tl.float32)', '    acc = tl.dot(a, b, acc)')

Operands are loaded through tensor descriptors (TMA), or through pointers, which work with every
stride on every GPU. Row numbers are int64 before they are multiplied by a stride, so that addresses
do not overflow.
"""

from __future__ import annotations

from typing import NamedTuple

from fxpass.kernels import row
from fxpass.kernels.row import Features, indent


class Gemm(NamedTuple):
    """The features of a GEMM that change the text of a kernel.

    Attributes:
        biased: whether a bias is added.
        precision: ``input_precision`` of ``tl.dot`` for f32 operands; empty for 16-bit ones.
        described: whether x and weight are tensor descriptors.
        warp_specialized: whether separate warps load and multiply.
    """

    biased: bool = False
    precision: str = ""
    described: bool = False
    warp_specialized: bool = False


def grouped(others: str, other: str) -> list[str]:
    """Computes ``row_block`` and ``other`` (less than ``others``) from the program's number.

    Programs that run at the same time read GROUP_N blocks of rows of x, which stay in L2, and share
    a few tiles of the weight. In plain order they would read all of x or all of the weight.
    """
    return [
        "# neighbours share rows of x and classes of the weight in L2",
        "program = tl.program_id(0)",
        f"group = program // (GROUP_N * {others})",
        f"place = program % (GROUP_N * {others})",
        "blocks = tl.minimum((N + BLOCK_N - 1) // BLOCK_N - group * GROUP_N, GROUP_N)",
        "row_block = group * GROUP_N + place % blocks",
        f"{other} = place // blocks",
        "rows = row_block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)",
        "row_inside = rows < N",
    ]


def operands(gemm: Gemm) -> list[str]:
    """The parameters that hold x and the weight."""
    return ["x", "weight", *["x_stride", "weight_stride"] * (not gemm.described)]


def rows_of_x(gemm: Gemm) -> list[str]:
    """The lines that locate the rows of x, for all tiles of one block of rows."""
    if gemm.described:
        return ["row = row_block * BLOCK_N"]
    return [
        "# beyond the last row that one is read again; it is not stored",
        "x += tl.minimum(rows, N - 1)[:, None] * x_stride",
        "depth = tl.arange(0, BLOCK_D)",
    ]


# The classes of a tile.
_COLUMNS = ["cols = start + tl.arange(0, BLOCK_V)", "inside = cols < V"]


def logits(gemm: Gemm) -> list[str]:
    """The linear's output as ``acc`` ``[BLOCK_N, BLOCK_V]``, for classes from ``start`` on."""
    if gemm.described:
        tile = []
        loads = ["a = x.load([row, d])", "b = weight.load([start, d]).T"]
    else:
        tile = ["tile = weight + tl.minimum(cols, V - 1).to(tl.int64)[None, :] * weight_stride"]
        loads = [
            "a = tl.load(x + (d + depth)[None, :], mask=(depth < D - d)[None, :], other=0.0)",
            "b = tl.load(tile + (d + depth)[:, None], mask=(depth < D - d)[:, None], other=0.0)",
        ]
    steps = "range(0, D, BLOCK_D)"
    if gemm.warp_specialized:
        steps = "tl.range(0, D, BLOCK_D, warp_specialize=True)"
    precision = f', input_precision="{gemm.precision}"' if gemm.precision else ""
    bias = "acc += tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)[None, :]"
    return [
        *tile,
        "acc = tl.full((BLOCK_N, BLOCK_V), 0.0, tl.float32)",
        f"for d in {steps}:",
        *indent([*loads, f"acc = tl.dot(a, b, acc{precision})"]),
        *[bias] * gemm.biased,
    ]


def targets(f: Features) -> list[str]:
    """One tile of the target distribution ``q``, or one block of class weights ``w``; 0 outside the
    matrix."""
    weights = "tl.load(class_weight + cols, mask=inside, other=0.0)"
    if f.indices:
        return [f"w = {weights}"]
    mask = "row_inside[:, None] & inside[None, :]"
    at = "target + rows[:, None] * target_stride + cols[None, :]"
    out = [f"q = tl.load({at}, mask={mask}, other=0.0).to(tl.float32)"]
    if f.smoothing:
        smoothed = f"{1 - f.smoothing!r} * q + {f.smoothing!r} / {f.all_classes}"
        out.append(f"q = tl.where(inside[None, :], {smoothed}, 0.0)")
    if f.weighted:
        out.append(f"q *= {weights}[None, :]")
    return out


# ---------------------------------------------------------------- forward

# Every name that partials() may return.
PARTIALS = {"maxima", "sums", "picks", "dots", "masses"}


def partials(f: Features) -> list[str]:
    """The names of a split's partial sums of a row, in the order of the parameters."""
    return ["maxima", "sums", *["picks"] * f.indices, *["dots"] * f.dense, *["masses"] * varies(f)]


def varies(f: Features) -> bool:
    """Whether sum(q) over some classes depends on data; otherwise every class has weight one."""
    return f.dense and (f.probabilities or f.weighted)


def forward(f: Features, gemm: Gemm) -> list[str]:
    """One program's rows over one split of the classes: maximum, sums and the target's logit.

    The recurrences are those of :mod:`fxpass.kernels.row`, for BLOCK_N rows at a time.
    """
    zeros = ["s", *["z_t"] * f.indices, *["dot"] * f.dense, *["mass"] * varies(f)]
    names = zip(partials(f), ["m", *zeros], strict=True)
    return [
        *grouped("splits", "split"),
        *rows_of_x(gemm),
        *(["t = tl.load(target + rows, mask=row_inside, other=0).to(tl.int32)"] * f.indices),
        # -inf would give exp(-inf - -inf), which is nan
        f"lowest = tl.full((BLOCK_N,), {row.LOWEST}, tl.float32)",
        "m = lowest",
        *(f"{name} = tl.full((BLOCK_N,), 0.0, tl.float32)" for name in zeros),
        "first = split * per_split",
        # vector loads of a distribution, and few addresses of it in registers
        *["first = tl.multiple_of(first, BLOCK_V)"] * f.probabilities,
        "for start in range(first, tl.minimum(first + per_split, V), BLOCK_V):",
        *indent(
            [
                *_COLUMNS,
                *logits(gemm),
                f"z = tl.where(inside[None, :], {'transform(acc)' if f.transformed else 'acc'}, "
                '-float("inf"))',
                "higher = tl.maximum(m, tl.max(z, 1))",
                "s = s * tl.exp(m - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)",
                *["z_t += tl.sum(tl.where(cols[None, :] == t[:, None], z, 0.0), 1)"] * f.indices,
                *_dot(f),
                "m = higher",
            ]
        ),
        "part = rows * splits + split",
        *(f"tl.store({to} + part, {name}, mask=row_inside)" for to, name in names),
    ]


def _dot(f: Features) -> list[str]:
    """One tile's part of sum(q * (z - m)), if q has more than one entry, and of sum(q)."""
    if not f.dense:
        return []
    # clamped: lowest - higher may overflow to -inf, and a mass of 0 times -inf is nan
    shift = "shift = tl.maximum(m - higher, lowest)"
    below = "tl.where(inside[None, :], z - higher[:, None], 0.0)"
    if not varies(f):
        # every class weighs 1, so the classes before this tile weigh `start - first`
        return [shift, f"dot += (start - first) * shift + tl.sum({below}, 1)"]
    q = "w[None, :]" if f.indices else "q"
    mass = "tl.sum(w, 0)" if f.indices else "tl.sum(q, 1)"
    return [
        shift,
        *targets(f),
        f"dot += mass * shift + tl.sum({q} * {below}, 1)",
        f"mass += {mass}",
    ]


def merge(f: Features) -> list[str]:
    """Combines the splits of one row in a fixed order and computes its loss, as in
    :mod:`fxpass.kernels.row`."""
    total = "tl.sum(tl.load(sums + part, mask=inside, other=0.0) * tl.exp(ms - m), 0)"
    out = [
        "row = tl.program_id(0).to(tl.int64)",
        "split = tl.arange(0, SPLITS)",
        "inside = split < splits",
        "part = row * splits + split",
        f"lowest = {row.LOWEST}",
        "ms = tl.load(maxima + part, mask=inside, other=lowest)",
        "m = tl.max(ms, 0)",
        f"s = {total}",
    ]
    if f.dense:
        out += [
            "shift = tl.where(inside, tl.maximum(ms - m, lowest), 0.0)",
            "part_mass = tl.load(masses + part, mask=inside, other=0.0)"
            if varies(f)
            else "part_mass = tl.minimum(V - split * per_split, per_split)",
            "part_dot = tl.load(dots + part, mask=inside, other=0.0)",
            "dot = tl.sum(part_dot + part_mass * shift, 0)",
            *["mass = tl.sum(part_mass, 0)"] * varies(f),
        ]
    if f.indices:
        out += [
            "z_t = tl.sum(tl.load(picks + part, mask=inside, other=0.0), 0)",
            *(
                ["t = tl.load(target + row).to(tl.int64)"]
                * (f.ignore_index is not None or f.weighted or f.sharded)
            ),
            *row.ignored(f),
            *row.elsewhere(f),
        ]
    return [
        *out,
        *row.loss_lines(f),
        # the rounding error of the lse, which backward needs to recover the sum
        "log_s = tl.log(s)",
        "missing = log_s - ((m + log_s) - m)",
        "tl.store(lse_rest + row, tl.where(missing == missing, missing, 0.0))",
    ]


def mass(f: Features) -> list[str]:
    """One row's sum(q), for class probabilities."""
    return [
        "row = tl.program_id(0).to(tl.int64)",
        "target += row * target_stride",
        "mass = tl.full((), 0.0, tl.float32)",
        "for start in range(0, V, BLOCK_V):",
        *indent([*_COLUMNS, *row.target_lines(f), "mass += tl.sum(q, 0)"]),
        "tl.store(row_mass + row, mass)",
    ]


# ---------------------------------------------------------------- backward


def backward(f: Features, gemm: Gemm) -> list[str]:
    """Recomputes one tile of logits and writes its gradient, from the lse that forward saved."""
    mask = "row_inside[:, None] & inside[None, :]"
    return [
        *grouped("class_blocks", "class_block"),
        *rows_of_x(gemm),
        "start = first + class_block * BLOCK_V",
        *_COLUMNS,
        *logits(gemm),
        "",
        *_coefficients(f),
        *_gradient(f),
        "# fp16 would lose what is below 6e-8, hence the unit",
        "place = class_block * BLOCK_V + tl.arange(0, BLOCK_V)",
        f"tl.store(g + rows[:, None] * g_stride + place[None, :], gradient, mask={mask})",
    ]


def _coefficients(f: Features) -> list[str]:
    """The factors of softmax (``share``) and of q (``unit``) in each row, and sum(q)."""
    gain = f"{row.GAIN!r}"
    scale = "tl.load({} + rows, mask=row_inside, other=0.0)"
    unit = f"{gain} * {scale.format('row_scale')}" if f.row_scaled else gain
    out = []
    if f.indices:
        out = [
            "t = tl.load(target + rows, mask=row_inside, other=0).to(tl.int64)",
            *row.ignored(f),
            "t = t.to(tl.int32)",
            *row.elsewhere(f),
        ]
    if f.indices and f.ignore_index is not None:
        unit = f"tl.where(ignored, 0.0, {unit})"
    out.append(f"unit = {unit}")
    sharp = [repr(1 - f.smoothing)] * bool(f.smoothing and f.indices)
    sharp += ["tl.load(class_weight + t)"] * (f.weighted and f.indices)
    out += row.sharp_lines(f, sharp)
    if f.smoothing and f.indices:
        out.append(f"smooth = {f.smoothing!r} / {f.all_classes}")
    if f.smoothing and f.indices and (f.weighted or f.sharded):
        out.append(f"mass = sharp + smooth * {'tl.load(class_mass)' if f.weighted else 'V'}")
    if f.probabilities:
        out.append(f"mass = {scale.format('row_mass')}")
    share = f"{row.times(row.mass_name(f))}unit"
    if f.lse_scaled:
        share = f"({share} + {gain} * {scale.format('lse_scale')})"
    # exp(z - lse) needs this factor, because the lse is rounded
    return [*out, f"share = {share} * tl.exp(-{scale.format('lse_rest')})"]


def _gradient(f: Features) -> list[str]:
    called = "z, slope = transform_and_slope(acc)" if f.varying else "z = transform(acc)"
    out = [
        'lse_of_row = tl.load(lse + rows, mask=row_inside, other=float("inf"))',
        *[called] * f.transformed,
    ]
    z = "z" if f.transformed else "acc"
    g = f"gradient = share[:, None] * tl.exp({z} - lse_of_row[:, None])"
    of_row = "unit" if _unit_is_number(f) else "unit[:, None]"
    if f.probabilities:
        out += [*targets(f), f"{g} - {of_row} * q"]
    elif f.indices and f.smoothing:
        weight = " * w[None, :]" * f.weighted
        out += [*(targets(f) if f.weighted else []), f"{g} - smooth * {of_row}{weight}"]
    else:
        out.append(g)
    if f.indices:
        sharp = row.sharp_name(f)
        picked = f"({sharp} * unit)" if sharp else "unit"
        by_row = f.weighted or f.sharded
        picked = picked if _unit_is_number(f) and not by_row else f"{picked}[:, None]"
        out.append(f"gradient -= tl.where(cols[None, :] == t[:, None], {picked}, 0.0)")
    if f.indices and f.ignore_index is not None and not f.lse_scaled:
        # zero coefficients are not enough: 0 * nan is nan, and hidden states of padding may be nan
        out.append("gradient = tl.where(ignored[:, None], 0.0, gradient)")
    return [*out, *["gradient *= slope"] * f.varying]


def _unit_is_number(f: Features) -> bool:
    return not f.row_scaled and not (f.indices and f.ignore_index is not None)
