"""Which lowering and strategy run one fused loss, and with how many rows and classes at a time.

In: sizes, dtype, device and the user's budget. Out: :func:`choose`, when a graph is rewritten: a
:class:`Choice` between the strategies, by predicted time and memory; and :func:`plan`, when the
operator runs: a :class:`Plan` within the budget. Sizes are plain integers when the operator runs,
so one compiled graph serves every batch size::

    >>> plan(2048, 512, 32000, torch.float32, torch.device("cpu"), Spec()).rows
    256

What costs how much is :mod:`fxpass.cost`, how fast a device is :mod:`fxpass.rates`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fxpass import cost, rates
from fxpass.cost import MIB, Work
from fxpass.expression import Z
from fxpass.spec import Spec

# ---------------------------------------------------------------- which lowering


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, exponentials and losses: f64 for f64, f32 for everything smaller."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@functools.cache
def has_triton() -> bool:
    """Whether the triton package is installed."""
    return importlib.util.find_spec("triton") is not None


def lowering_for(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The lowering that runs on a device, by name, and the reason in one line."""
    if device.type != "cuda":
        return "aten", f"ATen chunks run on {device.type}; the Triton kernels need CUDA or HIP"
    if not has_triton():
        return "aten", "triton is not installed"
    if dtype == torch.float64:
        return "aten", "the Triton kernels compute in f32"
    if torch.version.cuda and _capability(device) < (7, 5):
        return "aten", f"{torch.cuda.get_device_name(device)} is older than sm_75"
    return "triton", "generated Triton kernel over row chunks"


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


# ---------------------------------------------------------------- the budget

# A GPU's share for scratch without a setting: 1 GiB holds 4096 rows of Llama-3's logits in bf16.
GPU_SHARE, GPU_BUDGET = 1 / 64, (256 * MIB, 1024 * MIB)
# A CPU's: some hundred rows of logits are enough for its GEMMs.
CPU_ROWS, CPU_BUDGET = 256, (40 * MIB, 128 * MIB)


def budget(v: int, dtype: torch.dtype, device: torch.device, memory_mb: int) -> int:
    """Bytes of scratch that one fused loss of ``v`` classes may take; 0 MiB asks for the default.

    Outputs and the f32 gradients that ``chunked`` keeps until backward do not count.
    """
    if memory_mb:
        return memory_mb * MIB
    if device.type == "cuda":
        low, high = GPU_BUDGET
        return max(low, min(high, int(_total_memory(device) * GPU_SHARE)))
    low, high = CPU_BUDGET
    row = v * compute_dtype(dtype).itemsize
    return max(low, min(high, CPU_ROWS * row + 8 * MIB))


@functools.cache
def _total_memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


# ---------------------------------------------------------------- rows and classes


class Plan(NamedTuple):
    """How one fused loss runs: the lowering's name, the strategy, the rows of a chunk (``tiled``:
    of a block), the classes of a tile (``chunked``: those up-cast at a time), and why."""

    lowering: str
    strategy: str
    rows: int
    classes: int
    reason: str


# Rows and classes come in multiples of what GEMM kernels work on at a time.
ALIGNMENT = {"cuda": 64}
CPU_ALIGNMENT = 16
# Up-cast classes beyond this many make no product faster.
MOST_CLASSES = 8192
# Less scratch is taken where the model says that it costs no more time than this.
SLACK = 1.03


def plan(n: int, d: int, v: int, dtype: torch.dtype, device: torch.device, spec: Spec) -> Plan:
    """The plan for one run over x ``[n, d]`` and weight ``[v, d]`` of ``dtype`` on ``device``.

    ``spec.gradients`` are those that this run computes. The scratch stays within ``spec.memory_mb``
    MiB (0: see :func:`budget`) as long as that is enough for one row; else the reason says so.
    """
    return _plan(n, d, v, dtype, device, spec, *lowering_for(device, dtype))


@functools.lru_cache(maxsize=4096)
def _plan(
    n: int,
    d: int,
    v: int,
    dtype: torch.dtype,
    device: torch.device,
    spec: Spec,
    lowering: str,
    reason: str,
) -> Plan:
    strategy = "tiled" if spec.strategy == "tiled" else "chunked"
    work = work_of(n, d, v, dtype, lowering, spec, spec.gradients)
    allowed = budget(v, dtype, device, spec.memory_mb)
    rows, classes = fit(lowering, strategy, work, allowed, device.type)
    taken = cost.scratch(lowering, strategy, work, rows, classes)
    if taken > allowed:
        reason += f"; the least it can take, {size(taken)}, is over its budget of {size(allowed)}"
    return Plan(lowering, strategy, rows, classes, reason)


def work_of(
    n: int,
    d: int,
    v: int,
    dtype: torch.dtype,
    lowering: str,
    spec: Spec,
    gradients: tuple[str, ...],
    kept: bool = False,
) -> Work:
    """What one run that computes ``gradients`` does, as the cost model wants it."""
    compute = compute_dtype(dtype)
    copied = lowering == "aten" or torch.version.hip is not None
    return Work(
        max(1, n),
        d,
        max(1, v),
        dtype.itemsize,
        compute.itemsize,
        *(int(name in gradients) for name in ("x", "weight", "bias")),
        kept=int(kept),
        up=int(copied and dtype != compute),
        temporaries=1 + (spec.logits != Z) + 2 * (spec.target == "probabilities"),
    )


def fit(
    lowering: str, strategy: str, work: Work, allowed: int, device_type: str
) -> tuple[int, int]:
    """Rows and classes at a time: the least scratch that is about as fast as the fastest within
    ``allowed`` bytes, by the model at a typical device's rates; the smallest where none fits."""
    typical = rates.nominal(device_type)
    found = []
    for rows, classes in _candidates(lowering, strategy, work, allowed, device_type):
        taken = cost.scratch(lowering, strategy, work, rows, classes)
        seconds = cost.seconds(lowering, strategy, work, rows, classes, typical)
        found.append((taken, seconds, rows, classes))
    inside = [each for each in found if each[0] <= allowed]
    if not inside:
        return min(found)[2:]
    limit = SLACK * min(each[1] for each in inside)
    return min(each for each in inside if each[1] <= limit)[2:]


def _candidates(
    lowering: str, strategy: str, work: Work, allowed: int, device_type: str
) -> Iterator[tuple[int, int]]:
    """Pairs that fill the budget, or half of it, or a quarter ...

    Scratch is affine in the rows and in the classes, and more of either never takes longer, so for
    every number of the one the best of the other is what the budget leaves for it.
    """
    align = ALIGNMENT.get(device_type, CPU_ALIGNMENT)

    def least(rows: int, classes: int) -> int:
        return cost.scratch(lowering, strategy, work, rows, classes)

    def most_rows(classes: int, size: int) -> int:
        fixed = least(0, classes)
        return _aligned((size - fixed) // max(1, least(1, classes) - fixed), work.n, align)

    def most_classes(rows: int, size: int) -> int:
        fixed = least(rows, 0)
        return _aligned((size - fixed) // max(1, least(rows, 1) - fixed), work.v, align)

    for size in (allowed >> shift for shift in range(5)):
        if strategy == "chunked":
            most = min(work.v, MOST_CLASSES)
            for classes in {most >> shift or 1 for shift in range(0, 14, 2 if work.up else 14)}:
                yield most_rows(classes, size), classes
        elif lowering == "triton":
            yield work.n, most_classes(work.n, size)
        else:
            for blocks in (1, 2, 4, 8, 16, 64, 256):
                rows = _aligned(-(-work.n // blocks), work.n, align, up=True)
                yield rows, most_classes(rows, size)
    yield (work.n if (lowering, strategy) == ("triton", "tiled") else 1), 1


def _aligned(most: int, total: int, align: int, up: bool = False) -> int:
    """Equal parts of ``total``, each at most ``most`` (at least 1), in multiples of ``align`` where
    that many fit: the last part is then not much smaller than the others."""
    if up:
        return min(total, -(-most // align) * align)
    if most >= total:
        return total
    if most < align:
        return max(1, most)
    most -= most % align
    part = -(-total // -(-total // most))
    return -(-part // align) * align


# ---------------------------------------------------------------- which strategy


class Prediction(NamedTuple):
    """What a strategy is expected to cost: seconds of forward and backward, the larger scratch of
    the two, and bytes of gradients that are kept in a wider dtype than their operand's."""

    strategy: str
    seconds: float
    scratch: int
    wider: int
    rows: int
    classes: int

    @property
    def extra(self) -> int:
        """Bytes beside the outputs."""
        return self.scratch + self.wider

    def __str__(self) -> str:
        return f"{duration(self.seconds)}, {size(self.scratch)} of scratch" + (
            f", {size(self.wider)} of f32 gradients" if self.wider else ""
        )


# Time that saving memory is worth, by kind of device: where the fastest strategy needs more than
# its budget beside the outputs (the f32 gradients that ``chunked`` keeps for operands of half the
# width), the strategy that needs the least is taken as long as it is no slower than this. On GPUs
# the f32 gradients are the price of the speed; a smaller budget asks for less.
MEMORY_IS_WORTH = {"cpu": 1.5}
# The model is not more exact than this: what is as fast is judged by its memory.
AS_FAST = 1.05


@dataclass(frozen=True)
class Choice:
    """The strategy of one fused loss, and what it was chosen by.

    Attributes:
        strategy: ``chunked`` or ``tiled``.
        reason: why, in a few words.
        n, d, v, dtype, device, spec: what it was chosen for; ``n`` is the hint where the number of
            rows is symbolic.
        symbolic: whether it is.
        kept: whether the logits exist anyway.
    """

    strategy: str
    reason: str
    n: int
    d: int
    v: int
    dtype: torch.dtype
    device: torch.device
    spec: Spec
    symbolic: bool = False
    kept: bool = False

    def predictions(self) -> tuple[Prediction, ...]:
        """What each strategy that is possible would cost, the chosen one first."""
        names = STRATEGIES if not self.kept else ("chunked",)
        ordered = sorted(names, key=lambda name: name != self.strategy)
        return tuple(predict(self, name) for name in ordered)

    def __str__(self) -> str:
        """One line, as ``explain`` prints it; measures the CPU's rates if nobody has yet."""
        best, *others = self.predictions()
        n = f"{'about ' if self.symbolic else ''}{self.n}"
        at_a_time = {
            "chunked": f"{best.rows} of {n} rows at a time",
            "tiled": f"{best.classes} of {self.v} classes at a time",
        }
        text = f"strategy: {best.strategy}, {at_a_time[best.strategy]}: {best}"
        if others:
            text += f" ({'; '.join(f'{other.strategy}: {other}' for other in others)})"
        return f"{text}; {self.reason}"


STRATEGIES = ("chunked", "tiled")


def choose(
    n: int | torch.SymInt,
    d: int,
    v: int,
    dtype: torch.dtype,
    device: torch.device,
    spec: Spec,
    setting: str,
    kept: bool = False,
) -> Choice:
    """The strategy for x ``[n, d]`` and weight ``[v, d]``, when a graph is rewritten.

    Args:
        n: rows; the hint decides where they are symbolic.
        d, v: hidden size and classes.
        dtype: of x and weight, as they are multiplied.
        device: where they are.
        spec: what is computed; its ``strategy`` is not read.
        setting: ``auto``, ``chunked`` or ``tiled``.
        kept: whether the logits exist in the graph anyway.
    """
    symbolic = isinstance(n, torch.SymInt)
    rows = (n.node.hint or 1) if isinstance(n, torch.SymInt) else n

    def chosen(strategy: str, reason: str) -> Choice:
        return Choice(strategy, reason, rows, d, v, dtype, device, spec, symbolic, kept)

    if kept:
        return chosen("chunked", "the logits exist anyway")
    if setting != "auto":
        return chosen(setting, "as set")
    allowed = budget(v, dtype, device, spec.memory_mb)
    chunked = plan_of("chunked", rows, d, v, dtype, device, spec)
    if chunked.rows >= rows and chunked.scratch + chunked.wider <= allowed:
        # nothing is repeated, and no rate has to be known
        return chosen("chunked", "one chunk is within the budget")
    possible = chosen("chunked", "").predictions()
    fastest = min(possible, key=lambda p: p.seconds)
    if fastest.extra > allowed:
        worth = MEMORY_IS_WORTH.get(device.type, AS_FAST)
        reason = f"the least memory within {worth:g} times the fastest"
    else:
        worth, reason = AS_FAST, "the fastest"
    near = [p for p in possible if p.seconds <= worth * fastest.seconds]
    best = min(near, key=lambda p: p.extra)
    return chosen(best.strategy, "the fastest" if best == fastest else reason)


def predict(choice: Choice, strategy: str) -> Prediction:
    """What ``strategy`` would cost; on a CPU measures its rates if nobody has yet."""
    rated = rates.device_rates(choice.device, choice.dtype)
    return plan_of(
        strategy,
        choice.n,
        choice.d,
        choice.v,
        choice.dtype,
        choice.device,
        choice.spec,
        rated,
        choice.kept,
    )


def plan_of(
    strategy: str,
    n: int,
    d: int,
    v: int,
    dtype: torch.dtype,
    device: torch.device,
    spec: Spec,
    rated: cost.Rates | None = None,
    kept: bool = False,
) -> Prediction:
    """Time and memory of all runs of a strategy; no time without rates."""
    lowering, _ = lowering_for(device, dtype)
    allowed = budget(v, dtype, device, spec.memory_mb)
    seconds, scratch, shape = 0.0, 0, (0, 0)
    for gradients in runs(strategy, spec):
        work = work_of(n, d, v, dtype, lowering, spec, gradients, kept)
        shape = fit(lowering, strategy, work, allowed, device.type)
        scratch = max(scratch, cost.scratch(lowering, strategy, work, *shape))
        if rated is not None:
            seconds += cost.seconds(lowering, strategy, work, *shape, rated)
    wider = 0
    compute = compute_dtype(dtype)
    if strategy == "chunked" and compute != dtype:
        elements = {"x": n * d, "weight": v * d, "bias": v}
        wider = compute.itemsize * sum(elements[name] for name in spec.gradients)
    return Prediction(strategy, seconds, scratch, wider, *shape)


def runs(strategy: str, spec: Spec) -> tuple[tuple[str, ...], ...]:
    """The gradients that forward computes and, where they have to wait, those of backward."""
    waits = strategy == "tiled" or spec.reduction == "none" or spec.lse
    return ((), spec.gradients) if waits and spec.gradients else (spec.gradients,)


# ---------------------------------------------------------------- as text


def size(number: int) -> str:
    """Bytes in MiB or GiB."""
    return f"{number / MIB:.0f} MiB" if number < 1024 * MIB else f"{number / MIB / 1024:.2f} GiB"


def duration(seconds: float) -> str:
    """Seconds with two significant digits, in the unit that suits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        number = float(f"{seconds / scale:.1e}")
        if number >= 1:
            return f"{number:g} {unit}"
    return "less than 1 µs"
