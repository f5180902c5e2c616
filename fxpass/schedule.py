"""Which lowering and strategy run one fused loss, and with how many rows and classes at a time.

In: sizes, dtype, device and the user's budget. Out: :func:`choose`, when a graph is rewritten: a
:class:`Choice` between the strategies, by predicted time and memory; and :func:`plan`, when the
operator runs: a :class:`Plan` within the budget. Sizes are plain integers when the operator runs,
so one compiled graph serves every batch size::

    >>> plan(2048, 512, 32000, torch.float32, torch.device("cpu"), Spec()).rows
    256

What costs how much is :mod:`fxpass.cost`, how fast a device is :mod:`fxpass.rates`, and what fits
into the budget :mod:`fxpass.fit`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import sympy
import torch

from fxpass import cost, expression, rates
from fxpass.cost import MIB, Work
from fxpass.expression import Z
from fxpass.fit import fit
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
    if torch.version.cuda and torch.cuda.get_device_capability(device) < (7, 5):
        return "aten", f"{torch.cuda.get_device_name(device)} is older than sm_75"
    return "triton", "generated Triton kernel over row chunks"


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a GPU the current device: Triton launches on that, and what is asked about a stream is
    asked about that one's. It need not be the one of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


# ---------------------------------------------------------------- the budget

# A GPU's share for scratch without a setting: 1 GiB holds 4096 rows of Llama-3's logits in bf16.
GPU_SHARE, GPU_BUDGET = 1 / 64, (256 * MIB, 1024 * MIB)
# A CPU's: some hundred rows of logits are enough for its GEMMs; in f64 twice as many bytes.
CPU_ROWS, CPU_BUDGET = 256, (36 * MIB, 128 * MIB)


def budget(v: int, dtype: torch.dtype, device: torch.device, memory_mb: int) -> int:
    """Bytes of scratch that one fused loss of ``v`` classes may take; 0 MiB asks for the default.

    Outputs and the f32 gradients that ``chunked`` keeps until backward do not count.
    """
    if memory_mb:
        return memory_mb * MIB
    if device.type == "cuda":
        low, high = GPU_BUDGET
        total = getattr(rates.properties_of(device), "total_memory", 0)
        return max(low, min(high, int(total * GPU_SHARE)))
    low, high = CPU_BUDGET
    row = v * compute_dtype(dtype).itemsize
    return max(low, min(high * row // (4 * max(1, v)), CPU_ROWS * row + 4 * MIB))


# ---------------------------------------------------------------- rows and classes


class Plan(NamedTuple):
    """How one fused loss runs: the lowering's name, the strategy, the rows of a chunk (``tiled``:
    of a block), the classes of a tile (``chunked``: those up-cast at a time), and why."""

    lowering: str
    strategy: str
    rows: int
    classes: int
    reason: str


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
    work = work_of(n, d, v, dtype, device, lowering, spec, spec.gradients)
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
    device: torch.device,
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
        temporaries=_temporaries(spec, bool(gradients)),
        processors=getattr(rates.properties_of(device), "multi_processor_count", 1)
        if lowering == "triton"
        else 1,
    )


@functools.lru_cache(maxsize=1024)
def _temporaries(spec: Spec, gradients: bool) -> int:
    """Copies of a block of logits that exist beside it: of the target, of the logit transform."""
    dense = 2 if spec.target == "probabilities" else int(spec.label_smoothing > 0)
    if spec.logits == Z:
        return dense
    value = _copies(spec.logits)
    slope = _copies(expression.derivative(spec.logits)) if gradients else 0
    # beside the value: of the next block, or while the gradient is taken
    return 1 + max(value, slope, dense)


def _copies(expr: Any) -> int:
    """Copies of z that :func:`fxpass.expression.evaluate` holds at most, its result included."""
    if expr == Z:
        return 0
    if expr.is_number:
        return 1
    joined = isinstance(expr, sympy.Add | sympy.Mul)
    held, most = 0, 1
    for operand in expr.args:
        if operand.is_number:
            continue
        most = max(most, held + _copies(operand))
        held = 1 if joined else held + (operand != Z)
    return most if joined else max(most, held + 1 + isinstance(expr, expression.Where))


# ---------------------------------------------------------------- which strategy

STRATEGIES = ("chunked", "tiled")

# Time that saving memory is worth, by kind of device: where the fastest strategy needs more than
# its budget beside the outputs (the f32 gradients that ``chunked`` keeps for operands of half the
# width), the strategy that needs the least is taken as long as it is no slower than this. On GPUs
# the f32 gradients are the price of the speed; a smaller budget asks for less.
MEMORY_IS_WORTH = {"cpu": 1.5}
# The model is not more exact than this: what is as fast is judged by its memory.
AS_FAST = 1.05


class Prediction(NamedTuple):
    """What a strategy is expected to cost: seconds of forward and backward, the larger scratch of
    the two, bytes of gradients that are kept in a wider dtype than their operand's; and the rows
    and classes at a time of its last run."""

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
        wider = f", {size(self.wider)} of f32 gradients" if self.wider else ""
        return f"{duration(self.seconds)}, {size(self.scratch)} of scratch{wider}"


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

    @property
    def allowed(self) -> int:
        """The budget in bytes."""
        return budget(self.v, self.dtype, self.device, self.spec.memory_mb)

    def predictions(self) -> tuple[Prediction, ...]:
        """What each strategy that is possible would cost, the chosen one first; on a CPU this
        measures its rates if nobody has yet."""
        rated = rates.device_rates(self.device, self.dtype)
        names = ("chunked",) if self.kept else STRATEGIES
        ordered = sorted(names, key=lambda name: name != self.strategy)
        return tuple(self.predict(name, rated) for name in ordered)

    def predict(self, strategy: str, rated: cost.Rates) -> Prediction:
        """Time and memory of all runs of ``strategy`` on a device of some rates."""
        lowering, _ = lowering_for(self.device, self.dtype)
        sizes = self.n, self.d, self.v, self.dtype, self.device
        seconds, scratch, shape = 0.0, 0, (0, 0)
        for gradients in runs(strategy, self.spec):
            work = work_of(*sizes, lowering, self.spec, gradients, self.kept)
            shape = fit(lowering, strategy, work, self.allowed, self.device.type)
            scratch = max(scratch, cost.scratch(lowering, strategy, work, *shape))
            seconds += cost.seconds(lowering, strategy, work, *shape, rated)
        wider = 0
        compute = compute_dtype(self.dtype)
        if strategy == "chunked" and compute != self.dtype:
            elements = {"x": self.n * self.d, "weight": self.v * self.d, "bias": self.v}
            wider = compute.itemsize * sum(elements[name] for name in self.spec.gradients)
        return Prediction(strategy, seconds, scratch, wider, *shape)

    def __str__(self) -> str:
        """One line, as ``explain`` prints it."""
        best, *others = self.predictions()
        at_a_time = f"{best.rows} rows" if best.strategy == "chunked" else f"{best.classes} classes"
        text = f"strategy: {best.strategy}, {at_a_time} at a time: {best}"
        if others:
            text += f" ({'; '.join(f'{other.strategy}: {other}' for other in others)})"
        traced = f"; for {self.n} rows, as traced" if self.symbolic else ""
        return f"{text}; {self.reason}{traced}"


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

    The fastest is chosen, by the model at the device's rates, of those that keep the budget. What
    is nearly as fast is judged by its memory (``AS_FAST``), and so is what is slower by no more
    than saving the f32 gradients is worth (``MEMORY_IS_WORTH``).
    """
    symbolic = isinstance(n, torch.SymInt)
    rows = (n.node.hint or 1) if isinstance(n, torch.SymInt) else n
    chunked = Choice(
        "chunked", "the logits exist anyway", rows, d, v, dtype, device, spec, symbolic, kept
    )
    if kept:
        return chunked
    if setting != "auto":
        return replace(chunked, strategy=setting, reason="as set")
    plain = chunked.predict("chunked", rates.nominal(device.type))
    if plain.rows >= rows and plain.extra <= chunked.allowed:
        # nothing is repeated, and no rate has to be known
        return replace(chunked, reason="one chunk is within the budget")
    possible = chunked.predictions()
    inside = [p for p in possible if p.scratch <= chunked.allowed]
    if not inside:
        least = min(possible, key=lambda p: p.scratch)
        return replace(chunked, strategy=least.strategy, reason="nothing is within the budget")
    fastest = min(inside, key=lambda p: p.seconds)
    over = fastest.extra > chunked.allowed
    worth = MEMORY_IS_WORTH.get(device.type, AS_FAST) if over else AS_FAST
    near = [p for p in inside if p.seconds <= worth * fastest.seconds]
    best = min(near, key=lambda p: p.extra)
    if best != fastest:
        reason = f"the least memory within {worth:g} times the fastest"
    else:
        reason = "the fastest" + ("" if inside == [*possible] else " within the budget")
    return replace(chunked, strategy=best.strategy, reason=reason)


def runs(strategy: str, spec: Spec) -> tuple[tuple[str, ...], ...]:
    """The gradients that forward computes and, where they have to wait, those of backward."""
    waits = strategy == "tiled" or spec.reduction == "none" or spec.lse
    return ((), spec.gradients) if waits and spec.gradients else (spec.gradients,)


# ---------------------------------------------------------------- as text


def size(number: int) -> str:
    """Bytes in MiB or GiB."""
    if number >= 1024 * MIB:
        return f"{number / MIB / 1024:.2f} GiB"
    return f"{number / MIB:.{0 if number >= 10 * MIB else 1}f} MiB"


def duration(seconds: float) -> str:
    """Seconds with two significant digits, in the unit that suits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        number = float(f"{seconds / scale:.1e}")
        if number >= 1:
            return f"{number:g} {unit}"
    return "less than 1 µs"
