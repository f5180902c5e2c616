"""Generates the body of the ``chunked`` kernel, which computes one row of logits.

In: the features of a spec. Out: lines of Triton. One program computes one row. The first pass
accumulates the maximum and the sums for the loss; the second pass, if the spec names gradients,
overwrites the logits with their gradient. A row that fits into one block is read once and stays in
registers between the passes. With z, q and Q as in :mod:`fxpass.aten.common`, they compute

    loss = Q * log(sum(exp(z - m))) - sum(q * (z - m))      m = max(z)
    lse  = m + log(sum(exp(z - m)))
    gradient = GAIN * ((row_scale * Q + lse_scale) * softmax(z) - row_scale * q) * unit slope
"""

from __future__ import annotations

from typing import NamedTuple

from sympy import Expr

from fxpass.kernels import expression
from fxpass.plan.plan import PADDING
from fxpass.spec.expression import Z
from fxpass.spec.spec import ELSEWHERE, Spec

# Most of a softmax over a vocabulary is below 6e-5, where fp16 loses precision, or below 6e-8, its
# smallest number. Gradients are stored multiplied by GAIN, in every dtype: a power of two changes
# no bits of bf16 and f32. The rest of fp16's range, a factor of 64, is for probabilities whose sum
# exceeds one, row coefficients up to 2, and slopes.
GAIN = 1024.0


class Features(NamedTuple):
    """The features of a spec and its operands that change the text of a kernel."""

    target: str
    ignore_index: int | None
    shard_of: int
    smoothing: float
    weighted: bool
    row_scaled: bool
    lse_scaled: bool
    gradient: bool
    lse: bool
    logits: Expr
    whole_row: bool
    padded: bool
    biased: bool = False

    @staticmethod
    def of(
        spec: Spec,
        weighted: bool,
        row_scaled: bool,
        lse_scaled: bool,
        whole_row: bool,
        padded: bool,
        biased: bool = False,
    ) -> Features:
        gradient = bool(spec.gradients)
        return Features(
            target=spec.target,
            ignore_index=spec.ignore_index,
            shard_of=spec.shard_of,
            smoothing=spec.label_smoothing,
            weighted=weighted,
            row_scaled=row_scaled and gradient,
            lse_scaled=lse_scaled and gradient,
            gradient=gradient,
            lse=spec.lse,
            logits=spec.transform,
            whole_row=whole_row,
            padded=padded,
            biased=biased,
        )

    @property
    def indices(self) -> bool:
        return self.target == "indices"

    @property
    def probabilities(self) -> bool:
        return self.target == "probabilities"

    @property
    def dense(self) -> bool:
        """Whether q has more than one entry, so that sum(q * z) runs over the whole row."""
        return self.probabilities or bool(self.smoothing)

    @property
    def sharded(self) -> bool:
        """Whether a target class may be in another shard."""
        return self.indices and bool(self.shard_of)

    @property
    def all_classes(self) -> str:
        """The number of classes that smoothing is spread over."""
        return str(self.shard_of or "V")

    @property
    def every_row(self) -> bool:
        """Whether ignored rows are computed too."""
        return self.lse or self.lse_scaled

    @property
    def transformed(self) -> bool:
        return self.logits != Z

    @property
    def varying(self) -> bool:
        """Whether the slope of the transform differs from class to class."""
        return self.gradient and not expression.unit_slope(self.logits)[1].is_number

    @property
    def room(self) -> str:
        """The mask of the columns that a block reads and writes, padding included."""
        return "cols < padded" if self.padded else "inside"

    @property
    def columns(self) -> str:
        """The classes of one block."""
        return "tl.arange(0, BLOCK_V)" if self.whole_row else "start + tl.arange(0, BLOCK_V)"


def body(f: Features) -> list[str]:
    """The lines after the signature."""
    padded = f"(V + {PADDING - 1}) // {PADDING} * {PADDING}"
    return [
        "row = tl.program_id(0).to(tl.int64)",
        "logits += row * stride",
        *[f"padded = {padded}  # what lies behind the classes is scratch"] * f.padded,
        *(_target_of_row(f) if f.indices else []),
        *["target += row * target_stride"] * f.probabilities,
        *(_only_pass(f) if f.whole_row else _first_pass(f)),
        *loss_lines(f),
        *(_second_pass(f) if f.gradient else []),
    ]


def _target_of_row(f: Features) -> list[str]:
    z_t = "tl.load(logits + t).to(tl.float32)" + " + tl.load(bias + t)" * f.biased
    return [
        "t = tl.load(target + row).to(tl.int64)",
        *_ignored(f),
        "t = t.to(tl.int32)",
        *elsewhere(f),
        # The reductions of the first pass are barriers, so every warp has read this logit before
        # any warp overwrites it.
        f"z_t = transform({z_t})" if f.transformed else f"z_t = {z_t}",
        *["z_t = tl.where(away, 0.0, z_t)"] * f.sharded,
    ]


def elsewhere(f: Features) -> list[str]:
    """Masks targets in another shard; their logits are read at class 0 and not used."""
    if not f.sharded:
        return []
    return [f"away = t == {ELSEWHERE}  # in another shard", "t = tl.where(away, 0, t)"]


def ignored(f: Features) -> list[str]:
    """Masks ignored rows, in kernels that compute them too."""
    if f.ignore_index is None:
        return []
    return [f"ignored = t == {f.ignore_index}  # ignore_index", "t = tl.where(ignored, 0, t)"]


def _ignored(f: Features) -> list[str]:
    if f.every_row or f.ignore_index is None:
        return ignored(f)
    room = "cols < padded" if f.padded else "cols < V"
    zeros = [f"cols = {f.columns}", f"tl.store(logits + cols, 0.0, mask={room})"]
    return [
        f"if t == {f.ignore_index}:  # ignore_index",
        "    tl.store(loss + row, 0.0)",
        *(indent(_every_block(f, zeros)) if f.gradient else []),
        "    return",
    ]


def _every_block(f: Features, lines: list[str]) -> list[str]:
    """Repeats the lines for each block of the row."""
    return lines if f.whole_row else ["for start in range(0, V, BLOCK_V):", *indent(lines)]


# f32's lowest number, the initial maximum. -inf would give exp(-inf - -inf), which is nan.
LOWEST = "-3.4028234663852886e38"
_LOWEST = f"lowest = tl.full((), {LOWEST}, tl.float32)"


def _sums(f: Features) -> str:
    q = "q" if f.probabilities else "w" if f.weighted else "1"
    return "s = sum(exp(z - m))" + f", dot = sum({q} * (z - m))" * f.dense


def _only_pass(f: Features) -> list[str]:
    """The first pass if one block has the whole row: the second pass uses its registers."""
    q = "q * " if f.probabilities else "w * " if f.weighted else ""
    dot = [
        *(target_lines(f) if q else []),
        f"dot = tl.sum({q}tl.where(inside, z - m, 0.0), 0)",
        *([f"mass = tl.sum({q[0]}, 0)"] if q else []),
    ]
    return [
        "",
        f"# m = max(z), {_sums(f)}",
        _LOWEST,
        *_block_of_logits(f, slope=f.varying),
        "m = tl.maximum(lowest, tl.max(z, 0))",
        "e = tl.exp(z - m)",
        "s = tl.sum(e, 0)",
        *(dot if f.dense else []),
    ]


def _first_pass(f: Features) -> list[str]:
    dot = _dot(f)
    zeros = ["s", *["dot"] * f.dense, *["mass"] * any("mass" in line for line in dot)]
    return [
        "",
        f"# m = max(z), {_sums(f)}; while they grow, m is the maximum so far",
        _LOWEST,
        "m = lowest",
        *(f"{name} = tl.full((), 0.0, tl.float32)" for name in zeros),
        "for start in range(0, V, BLOCK_V):",
        *indent(
            [
                *_block_of_logits(f, slope=False),
                "higher = tl.maximum(m, tl.max(z, 0))",
                "s = s * tl.exp(m - higher) + tl.sum(tl.exp(z - higher), 0)",
                *dot,
                "m = higher",
            ]
        ),
    ]


def _dot(f: Features) -> list[str]:
    """One block's part of sum(q * (z - m)), if q has more than one entry, and of sum(q)."""
    if not f.dense:
        return []
    # clamped: lowest - higher may overflow to -inf, and a mass of 0 times -inf is nan
    shift = "shift = tl.maximum(m - higher, lowest)"
    if f.indices and not f.weighted:
        # every class weighs 1, so the classes before this block weigh `start`
        return [shift, "dot += start * shift + tl.sum(tl.where(inside, z - higher, 0.0), 0)"]
    q = "w" if f.indices else "q"
    return [
        shift,
        *target_lines(f),
        f"dot += mass * shift + tl.sum({q} * tl.where(inside, z - higher, 0.0), 0)",
        f"mass += tl.sum({q}, 0)",
    ]


def _block_of_logits(f: Features, slope: bool) -> list[str]:
    out = [f"cols = {f.columns}", "inside = cols < V"]
    # an f32 bias is added to up-cast 16-bit logits, so the sum is not rounded to 16 bits
    shift = " + tl.load(bias + cols, mask=inside, other=0.0)" * f.biased
    if not f.transformed:
        load = f'tl.load(logits + cols, mask={f.room}, other=-float("inf"))'
        cut = ['z = tl.where(inside, z, -float("inf"))'] * f.padded
        return [*out, f"z = {load}.to(tl.float32){shift}", *cut]
    called = "z, slope = transform_and_slope(raw)" if slope else "z = transform(raw)"
    return [
        *out,
        f"raw = tl.load(logits + cols, mask={f.room}, other=0.0).to(tl.float32){shift}",
        called,
        'z = tl.where(inside, z, -float("inf"))',
    ]


def target_lines(f: Features) -> list[str]:
    """One block of class weights ``w`` or of the target distribution ``q``; 0 outside V."""
    weights = "tl.load(class_weight + cols, mask=inside, other=0.0)"
    if f.indices:
        return [f"w = {weights}"]
    out = ["q = tl.load(target + cols, mask=inside, other=0.0).to(tl.float32)"]
    if f.smoothing:
        smooth = f"{f.smoothing!r} / {f.all_classes}"
        out.append(f"q = tl.where(inside, {1 - f.smoothing!r} * q + {smooth}, 0.0)")
    if f.weighted:
        out.append(f"q *= {weights}")
    return out


def loss_lines(f: Features) -> list[str]:
    """The loss of a row, given its sums."""
    # if all logits of the shard are -inf, the lse is the lowest number instead of nan
    possible = ["s = tl.where(s == 0.0, 1.0, s)  # no class is possible in this shard"]
    return possible * bool(f.shard_of) + _loss_lines(f)


def _loss_lines(f: Features) -> list[str]:
    lse = ["tl.store(lse + row, m + tl.log(s))"] * f.lse
    if f.target == "none":
        return ["tl.store(loss + row, m + tl.log(s))", *lse]
    if f.probabilities:
        return ["tl.store(loss + row, mass * tl.log(s) - dot)", *lse]
    out = []
    sharp = [repr(1 - f.smoothing)] * bool(f.smoothing)
    sharp += ["tl.load(class_weight + t)"] * f.weighted
    out += sharp_lines(f, sharp)
    if f.smoothing:
        out.append(f"smooth = {f.smoothing!r} / {f.all_classes}")
    if f.smoothing and (f.weighted or f.sharded):
        out.append(f"mass = sharp + smooth * {'mass' if f.weighted else 'V'}")
    loss = f"{times(mass_name(f))}tl.log(s) - {times(sharp_name(f))}(z_t - m)"
    loss += " - smooth * dot" * bool(f.smoothing)
    if f.every_row and f.ignore_index is not None:
        loss = f"tl.where(ignored, 0.0, {loss})"
    return [*out, f"tl.store(loss + row, {loss})", *lse]


def sharp_lines(f: Features, factors: list[str]) -> list[str]:
    """``sharp``, the product of ``factors``: q at the target class, without smoothing."""
    if f.sharded:
        return [f"sharp = tl.where(away, 0.0, {' * '.join(factors) or '1.0'})"]
    return [f"sharp = {' * '.join(factors)}"] if factors else []


def _second_pass(f: Features) -> list[str]:
    g = "g = share * e" if f.whole_row else "g = share * tl.exp(z - m)"
    if f.probabilities:
        g += " - unit * q"
    elif f.smoothing:
        g += " - smooth * w" if f.weighted else " - smooth"
    if f.indices:
        g += f" - tl.where(cols == t, {times(sharp_name(f))}unit, 0.0)"
    loads = [] if f.whole_row else _block_of_logits(f, slope=f.varying)
    if not f.whole_row and (f.probabilities or (f.smoothing and f.weighted)):
        loads += target_lines(f)
    row_scale = " * tl.load(row_scale + row)" * f.row_scaled
    share = f"{times(mass_name(f))}unit"
    if f.lse_scaled:
        share = f"({share} + {GAIN!r} * tl.load(lse_scale + row))"
    return [
        "",
        "# the logits become their gradient; fp16 would lose what is below 6e-8, hence the unit",
        f"unit = {GAIN!r}{row_scale}",
        f"share = {share} / s",
        *["smooth *= unit"] * (f.indices and bool(f.smoothing)),
        *_every_block(
            f,
            [
                *loads,
                g,
                *["g *= slope"] * f.varying,
                f"tl.store(logits + cols, g, mask={f.room})",
            ],
        ),
    ]


def mass_name(f: Features) -> str:
    """The variable that has Q = sum(q); empty if Q is 1."""
    if f.probabilities:
        return "mass"
    if f.weighted or f.sharded:
        return "mass" if f.smoothing else "sharp"
    return ""


def sharp_name(f: Features) -> str:
    """The variable that has q at the target class, without smoothing; empty if it is 1."""
    return "sharp" if f.smoothing or f.weighted or f.sharded else ""


def times(name: str) -> str:
    return f"{name} * " if name else ""


def indent(lines: list[str]) -> list[str]:
    """The lines one level deeper."""
    return [f"    {line}" if line else "" for line in lines]
