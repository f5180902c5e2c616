"""What a program does, in eager and fused, and whether that is the same.

In: a case. Out: a :class:`Verdict`. Values are compared as tests/support/numerics.py does, against the same
program in float64: an answer may be twice as wrong as eager's. What a program's own rounding does
to it is found by running it on inputs that differ by a rounding; a case is judged by that only
where the fused answer is not eager's to the last few bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import itertools
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from fxpass.deferred.inputs import StaleLogitsError
from fxpass.plan import plan
from fxpass.rewrite import fuse, nested, transform
from tests.support.numerics import FLOOR

from .case import Case
from .dealt import first_of_all, over_ranks
from .small import small
from .tags import wrong_tags
from .traced import Traced

FUSED, INNER, TRACED, CHECKED = "fused", "inner", "traced", "checked"
SPREAD = 8  # runs on inputs that differ by a rounding
ALLOWED = 4  # times what these runs are off

# The same program in float64: every cast is one to float64, and autocast is off.
_WIDE = (
    (r"\.(float|half|bfloat16)\(\)", ".double()"),
    (r"torch\.(float32|bfloat16|float16)\b", "torch.float64"),
    (r'torch\.autocast\("cpu",[^)]*\)', "contextlib.nullcontext()"),
    (r"^import torch$", "import contextlib\n\nimport torch"),
)
# Writes that no version counter sees. Where they reach what backward needs, eager computes what
# nobody meant, and no particular gradient is right.
_KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
_UNSEEN = re.compile(r"\.data\b|numpy\(|inference_mode|\.(apply|map2?)_\(")
_CAST = re.compile(r"autocast\(|\b[xw]\w*\.(half|bfloat16)\(\)")
# Where this overflows, eager has nan.
_CANCELS = "torch.log(torch.exp("
# Dynamo remembers by file and line which sizes varied: each program is a file of its own.
_numbers = itertools.count()
_DRAWS = re.compile(r"torch\.rand(n?)\(([^()]*)\)")


@dataclass(frozen=True)
class Record:
    """One thing that a run shows: a tensor, with what is known of it besides its values."""

    label: str
    value: Tensor
    requires_grad: bool

    @property
    def kind(self) -> tuple[Any, ...]:
        return self.value.dtype, tuple(self.value.shape), self.requires_grad


@dataclass
class Run:
    """What one run of a session shows, up to its end or to the error that it raised."""

    records: list[Record] = field(default_factory=list)
    error: Exception | None = None


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    Attributes:
        kind: ``ok``, ``invalid`` (eager raises, or the inner backend alone is wrong too), or how
            the fused program fails: ``raises``, ``stale``, ``kind`` or ``value``; ``tags`` where its
            rows are not as independent as their tags say.
        what: one line.
    """

    kind: str
    what: str = ""

    @property
    def failed(self) -> bool:
        return self.kind not in ("ok", "invalid")


def judge(case: Case) -> Verdict:
    """Compares the fused program with eager."""
    eager = run(case)
    error = eager.error
    if error is None and _UNSEEN.search(case.source()):
        error = run(case, CHECKED).error
    if error is not None:
        return Verdict("invalid", _line(error))
    verdict = _judged(case, eager, FUSED)
    if verdict.failed and _judged(case, eager, INNER).failed:  # the compiler's own doing
        return Verdict("invalid", f"the inner backend alone: {verdict.what}")
    if verdict.kind == "raises" and case.dynamic:
        # Dynamo's graph asserts the sizes of masks, and some backends drop that
        error = run(case, TRACED).error
        if error is not None and "Runtime assertion failed" in str(error):
            return Verdict("invalid", _line(error))
    if case.tags and not verdict.failed and (what := _wrong_tags(case)):
        return Verdict("tags", what)
    return verdict


def _wrong_tags(case: Case) -> str:
    with _quiet(), _device_of(case):
        return wrong_tags(case)


def _judged(case: Case, eager: Run, how: str) -> Verdict:
    """What is different where the program runs in another way; all ranks agree on it."""
    verdict = compare(case, eager, run(case, how))
    return first_of_all(verdict, lambda one: one.failed) if case.sharded else verdict


# ---------------------------------------------------------------- running


def run(
    case: Case, how: str = "", wide: bool = False, disturb: Callable[[Tensor], None] | None = None
) -> Run:
    """Runs a session.

    Args:
        how: ``fused``, ``inner`` for the inner backend alone, ``traced`` for Dynamo's graph that no
            backend changes, ``checked`` for eager that raises where backward reads what was changed
            since; else eager.
        wide: in float64.
        disturb: what is done to every input that holds floating-point numbers.
    """
    out = Run()
    env: dict[str, Any] = {}
    leaves: list[tuple[str, Tensor]] = []
    source = _wide(case.source()) if wide else case.source()
    try:
        exec(compile(source, f"<program {next(_numbers)}>", "exec"), env)
    except SyntaxError as error:
        return Run(error=error)
    program, make = env["program"], env["inputs"]

    checks: Any = contextlib.nullcontext()

    def inputs(n: int = 2) -> tuple[Any, ...]:
        state = torch.get_rng_state()
        made = make(n)
        torch.set_rng_state(state)
        for (name, _), value in zip(case.inputs, made, strict=True):
            if isinstance(value, Tensor):
                leaves.append((name, value))
                if disturb and value.is_floating_point():
                    disturb(value)
        return made

    def seen(value: Any) -> None:
        out.records.append(_record(f"seen({len(out.records)})", value))

    if how == CHECKED:
        checks = torch.autograd.graph.saved_tensors_hooks(_saved, _unchanged)
    elif how == FUSED:
        checks = _implemented_by(case.implementation)
    if how == FUSED and case.fused:
        program = env["fused"]
    elif not case.fused:
        program = _program(case, program, how)
    if case.sharded and how in (FUSED, INNER):
        over_ranks(env, program)
    torch.manual_seed(0)
    # dynamic sizes may also be those of a mask, or of nonzero
    sizes = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=bool(case.dynamic))
    # what torch asks of who retains a graph
    given = functorch_config.patch(donated_buffer="retain_graph" not in source)
    divided = small() if case.small and how == FUSED else contextlib.nullcontext()
    with _quiet(), checks, _unforeseen(), _device_of(case), sizes, given, divided:
        try:
            kept = env["session"](program, inputs, seen)
            out.records += [_record(n, v) for n, v in zip(case.kept, kept, strict=True)]
        except Exception as error:
            out.error = error.with_traceback(None)
        out.records.append(_record("the random state", torch.get_rng_state()))
        out.records.append(_record("the grad mode", torch.is_grad_enabled()))
        for name, leaf in leaves:
            out.records.append(_record(f"{name} afterwards", leaf))
            gradient = leaf.grad
            if gradient is None and case.zeros and leaf.requires_grad:
                gradient = torch.zeros_like(leaf)
            if gradient is not None:
                out.records.append(_record(f"{name}.grad", gradient))
    if out.error is not None:
        # an exception in AOTAutograd holds frames, and these hold guards, which set the state of the
        # dispatcher when they are freed: here, and not in the middle of a later program
        out.error.__context__ = out.error.__cause__ = None
        with clean_state():
            gc.collect()
    return out


def _program(case: Case, program: Callable[..., Any], how: str) -> Callable[..., Any]:
    """What stands for the program: traced, compiled, or as it is."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        if how not in (FUSED, INNER, TRACED):
            return function
        options = case.options | {"fusedce.enabled": how == FUSED}
        if how == TRACED:
            options["fusedce.inner"] = "eager"
        return torch.compile(function, backend="fusedce", options=options, dynamic=case.dynamic)

    return Traced(program, case.tracer, compiled) if case.tracer else compiled(program)


def _wide(source: str) -> str:
    """The same program in float64. What is drawn is drawn as before."""
    for pattern, replacement in _WIDE:
        source = re.sub(pattern, replacement, source, flags=re.MULTILINE)
    source = _DRAWS.sub(r"torch.rand\1(\2).double()", source)
    return source


def _record(label: str, value: Any) -> Record:
    if not isinstance(value, Tensor):
        return Record(label, torch.tensor(value, device="cpu"), False)
    # a copy of deferred logits is a plain tensor
    return Record(label, value.detach().clone().cpu(), value.requires_grad)


@contextlib.contextmanager
def _unforeseen() -> Iterator[None]:
    """Raises where fxpass would leave a program as it is because its own code raised."""

    def raises(message: str, *args: Any, **kwargs: Any) -> None:
        raise AssertionError(message % args) from sys.exc_info()[1]

    with contextlib.ExitStack() as stack:
        for module in (fuse, nested, transform):
            stack.enter_context(mock.patch.object(module.log, "warning", raises))
        yield


def _implemented_by(name: str) -> Any:
    """Makes an implementation run on the CPU; in float64 there is ATen only."""
    known = plan.implementation_for

    def implementation_for(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
        wide = dtype == torch.float64
        return known(device, dtype) if wide or not name else (name, "for the fuzzer")

    return mock.patch.object(plan, "implementation_for", implementation_for)


def _device_of(case: Case) -> Any:
    """Triton's kernels run in its interpreter, on the CPU, or on a GPU."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (
        contextlib.nullcontext() if interpreted or not case.implementation else torch.device("cuda")
    )


def _saved(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return tensor, tensor.detach().clone()


def _unchanged(saved: tuple[Tensor, Tensor]) -> Tensor:
    tensor, copy = saved
    if not torch.equal(tensor.nan_to_num(0.5), copy.nan_to_num(0.5)):
        raise RuntimeError("backward reads what was changed without a trace")
    return tensor


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        with clean_state():
            yield


@contextlib.contextmanager
def clean_state() -> Iterator[None]:
    """Gradients on and nothing traced, whatever a program, or an error in a graph, has left."""
    keys = torch._C._ForceDispatchKeyGuard(*_KEYS)
    with keys, torch.inference_mode(False), torch.enable_grad():
        yield


# ---------------------------------------------------------------- comparing


def compare(case: Case, eager: Run, fused: Run) -> Verdict:
    """What is different."""
    if fused.error is not None and _is_stale(fused.error):
        if not case.may_be_stale:
            return Verdict("stale", _line(fused.error))
    elif fused.error is not None:
        return Verdict("raises", _line(fused.error))
    stopped = fused.error is not None
    pairs = list(_pairs(eager, fused, stopped))
    if not stopped and len(eager.records) != len(fused.records):
        return Verdict("kind", f"{_labels(fused)} for {_labels(eager)}")
    for theirs, ours in pairs:
        if theirs.label != ours.label:
            return Verdict("kind", f"{ours.label} for {theirs.label}")
        if theirs.kind != ours.kind:
            return Verdict("kind", f"{theirs.label}: {ours.kind} for {theirs.kind}")
    if all(_equal(theirs, ours) for theirs, ours in pairs):
        return Verdict("ok")
    return _judge_values(case, eager, fused, stopped)


def _is_stale(error: Exception) -> bool:
    """Whether an error says that an input was changed since."""
    # Dynamo wraps what reading an argument raises
    return StaleLogitsError.__name__ in f"{type(error).__name__}: {error}"


def _pairs(eager: Run, fused: Run, stopped: bool) -> Iterator[tuple[Record, Record]]:
    for theirs, ours in zip(eager.records, fused.records, strict=False):
        if stopped and not ours.label.startswith("seen"):
            return
        yield theirs, ours


def _labels(run: Run) -> str:
    return ", ".join(record.label for record in run.records)


def _equal(theirs: Record, ours: Record) -> bool:
    """Equal but for the last bits of 32 or 64."""
    a, b = theirs.value, ours.value
    if not a.is_floating_point():
        return torch.equal(a, b)
    if a.dtype not in (torch.float32, torch.float64):
        return torch.equal(a.double().nan_to_num(1e39), b.double().nan_to_num(1e39))
    return _error(b, a) <= FLOOR[a.dtype]


def _error(got: Tensor, exact: Tensor) -> float:
    """Relative error; inf where what is not finite is elsewhere, or another."""
    got, exact = got.double(), exact.double()
    odd = ~exact.isfinite()
    if not torch.equal(odd, ~got.isfinite()):
        return float("inf")
    if not torch.equal(got[odd].nan_to_num(1e39), exact[odd].nan_to_num(1e39)):
        return float("inf")
    got, exact = got.masked_fill(odd, 0), exact.masked_fill(odd, 0)
    norm = exact.norm()
    return float((got - exact).norm() / norm) if norm > 0 else float(got.norm())


def _judge_values(case: Case, eager: Run, fused: Run, stopped: bool) -> Verdict:
    exact = run(case, wide=True)
    reference = exact if _fits(exact, eager) else eager
    # where the program casts its leaves, what is below the rounding of 16 bits does not arrive
    eps = torch.finfo(_coarsest(case)).eps if _CAST.search(case.source()) else 0.0
    near = [run(case, disturb=_Rounding(i, eps)) for i in range(SPREAD)]
    near = [r for r in near if _fits(r, eager)]
    for i, (theirs, ours) in enumerate(_pairs(eager, fused, stopped)):
        if _equal(theirs, ours):
            continue
        true = reference.records[i].value
        leaves = [name for name, _ in case.inputs]
        if theirs.label.split()[0].removesuffix(".grad") in leaves or _CANCELS in case.source():
            # a gradient of 0 times infinity in eager, or a parameter after an optimizer's step
            nan = theirs.value.isnan() & true.isnan() & ours.value.isfinite()
            ours = dataclasses.replace(ours, value=ours.value.masked_fill(nan, float("nan")))
        if not theirs.value.is_floating_point():
            # an argmax, say: rounding may decide, and then it does so in eager too
            if any(not torch.equal(r.records[i].value, theirs.value) for r in (*near, reference)):
                continue
            return Verdict("value", f"{theirs.label}: {_short(ours)} for {_short(theirs)}")
        off = [_error(r.records[i].value, true) for r in (eager, *near)]
        # what a program looks at is summed in f64, of values that are not
        seen = theirs.label.startswith("seen")
        floor = FLOOR[_coarsest(case)] if seen else FLOOR.get(theirs.value.dtype, 0.25)
        bound = ALLOWED * max(off) + 2 * floor
        if reference is eager:
            bound += 4 * FLOOR[_coarsest(case)]
        got = _error(ours.value, true)
        if not got <= bound and not all(map(_odd, off)):
            return Verdict(
                "value",
                f"{theirs.label}: error {got:.1e}, allowed {bound:.1e}: {_short(ours)} for "
                f"{_short(theirs)}",
            )
    return Verdict("ok")


def _odd(error: float) -> bool:
    return not error < 1e3


def _fits(run: Run, eager: Run) -> bool:
    shapes = [[tuple(r.value.shape) for r in one.records] for one in (run, eager)]
    return run.error is None and shapes[0] == shapes[1]


def _coarsest(case: Case) -> torch.dtype:
    text = case.source()
    for name, dtype in (("bfloat16", torch.bfloat16), (r"half|\bfloat16", torch.float16)):
        if re.search(name, text):
            return dtype
    return torch.float32


@dataclass
class _Rounding:
    """Changes a tensor by about one rounding, or by ``eps`` if that is more."""

    seed: int
    eps: float

    def __call__(self, tensor: Tensor) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            noise = torch.rand(
                tensor.shape, generator=generator, dtype=torch.float64, device="cpu"
            ).to(tensor.device)
            eps = max(self.eps, torch.finfo(tensor.dtype).eps)
            changed = tensor.double() * (1 + (2 * noise - 1) * eps)
            tensor.copy_(changed.to(tensor.dtype))


def _short(record: Record) -> str:
    values = record.value.flatten()[:4].tolist()
    more = ", ..." if record.value.numel() > 4 else ""
    return "[" + ", ".join(f"{v:.6g}" for v in values) + more + "]"


def _line(error: BaseException) -> str:
    text = str(error).strip()
    inner = re.search(r"raised:\n(.*)", text)
    line = inner[1] if inner else (text.splitlines() or [""])[0]
    return f"{type(error).__name__}: {line[:200]}"


__all__ = ["FUSED", "INNER", "Record", "Run", "Verdict", "compare", "judge", "run"]
