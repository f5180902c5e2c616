"""Runs a program as fxpass compiles it, in one of several ways, and says what is not as it should be.

In: a :class:`tests.programs.row.Row` and a key of :data:`WAYS`. Out: an :class:`Outcome`: what the
program is fused as, what is left of the logits, the reasons, and how its values and gradients differ
from eager's. They are held against the same program in float64: an answer may be twice as wrong as
eager's in the same way (:mod:`tests.support.numerics`). Dtypes, shapes, writes to the operands and
errors have to be eager's::

    check(row)               # asserts all that the row expects
    check(row, "outside")    # the compiled function returns the logits, and the rest runs in eager
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config
from torch.utils import _pytree as pytree

from benchmarks.compiled import Records
from fxpass.deferred.values import Deferred
from fxpass.deferred.watch import watched
from fxpass.rewrite.matches import RegionMatch
from fxpass.rewrite.rejections import Rejection
from tests.programs.row import BF16, BOTH, F16, FORMULA, NOTHING, RAISES, REGION, Function, Row
from tests.support.left import listed
from tests.support.numerics import FLOOR, error
from tests.support.ways import FIRST, WAYS, Way

Values = dict[str, Any]
# Errors of a program that eager may raise.
ERRORS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, AssertionError)
ORDERS = 32  # of summation; one rounding in a few dozen decides where it is ill-conditioned


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        becomes: what it is fused as.
        calls: of the fused operator.
        left: the functions that make tensors of the logits' size outside of the operator.
        reasons: why something is not fused, graph breaks among them.
        computed: deferred logits that the program computed.
        wrong: what is not as eager has it; empty if all is.
    """

    becomes: str
    calls: int = 0
    left: str = ""
    reasons: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    wrong: str = ""


def check(row: Row, way: str = FIRST) -> None:
    """Asserts that a program is as its row says, in one way."""
    found = outcome(row, way)
    assert not found.wrong, found
    if WAYS[way].deferred:
        assert bool(found.computed) == (way in row.computes), found
        assert all(row.why in computed for computed in found.computed), found
        return
    if not WAYS[way].graph:
        return
    # without gradients, or with other dtypes, what a formula has may be the rest of a region
    alike = way != FIRST and {found.becomes, row.becomes} <= {FORMULA, REGION, BOTH}
    assert found.becomes == row.becomes or alike, found
    if row.becomes not in (NOTHING, RAISES):
        assert found.left == row.left, found
    if row.reason:
        assert any(row.reason in reason for reason in found.reasons), found


def outcome(row: Row, way: str | Way = FIRST) -> Outcome:
    """Compiles and runs a program, and compares it with eager and float64."""
    with warnings.catch_warnings(), config.patch(**row.dynamo):
        warnings.simplefilter("ignore")  # of libraries, and of torch about them
        return _outcome(row, WAYS[way] if isinstance(way, str) else way)


def _outcome(row: Row, way: Way) -> Outcome:
    torch._dynamo.reset()
    eager = run(row, way, row.program())
    records: list[Any] = []

    def compiled(function: Function) -> Function:
        options: Any = {"fusedce.min_logits_mb": 0, "fusedce.inner": way.inner, **way.options}
        return torch.compile(function, backend="fusedce", options=options, dynamic=way.dynamic)

    failed = _Failures()
    with (
        Records(records),
        failed,
        listed(row.sizes.v * row.sizes.d) as graphs,
        watched() as computed,
        way.patched(),
    ):
        try:
            function = (way.spell or _whole)(row, compiled)
        except Exception as error:
            return Outcome(NOTHING, wrong=f"cannot be traced: {_line(error)}")
        got = run(row, way, function)
    torch._dynamo.reset()
    matches = [record for record in records if isinstance(record, RegionMatch)]
    choices = [choice for match in matches for choice in match.choices]
    kinds = {REGION if isinstance(choice, str) else FORMULA for choice in choices}
    becomes = BOTH if len(kinds) == 2 else kinds.pop() if kinds else NOTHING
    large = Counter(graphs.left)
    return Outcome(
        RAISES if isinstance(eager, Exception) else becomes,
        calls=sum(len(match.calls) for match in matches),
        left=", ".join(name if n == 1 else f"{n} {name}" for name, n in large.items()),
        reasons=(*(r.reason for r in records if isinstance(r, Rejection)), *graphs.breaks),
        computed=tuple(map(str, computed)),
        wrong="; ".join([*failed.found, *differs(row, way, got, eager)]),
    )


def _whole(row: Row, compile: Callable[[Function], Function]) -> Function:
    return compile(row.program())


# ---------------------------------------------------------------- values


def run(
    row: Row,
    way: Way,
    function: Function,
    wide: bool = False,
    order: Tensor | None = None,
    rounding: int | None = None,
) -> Values | Exception:
    """Runs a function once: outputs, gradients of all operands that need some (None where there is
    none), operands and outputs that were written to; or what it raises.

    Args:
        wide: in float64.
        order: a permutation of the hidden values.
        rounding: a seed of changes of the operands by about one rounding.
    """
    tensors = row.tensors(way.dtype, wide)
    if rounding is not None:
        _round(tensors, way, rounding)
    named = dict(zip(row.names, tensors, strict=True))
    if order is not None:
        for name in ("x", "weight"):
            named[name] = named[name].detach()[:, order].requires_grad_(named[name].requires_grad)
    before = {name: t.detach().clone() for name, t in named.items()}
    torch.manual_seed(0)  # of what a program draws
    try:
        around = contextlib.nullcontext() if wide and way.autocasts else way.around()
        with torch.set_grad_enabled(bool(row.gradients)), around:
            made = function(*named.values())
        outputs = pytree.tree_leaves(made)
        values: Values = {
            f"output {i}": t.detach().clone() if isinstance(t, Tensor) else t
            for i, t in enumerate(outputs)
        }
        trained = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
        values["gradients"] = tuple(isinstance(t, Tensor) and t.requires_grad for t in outputs)
        if trained:
            torch.autograd.backward(trained, [_upstream(t) for t in trained])
    except ERRORS as error:
        return error
    back = None if order is None else order.argsort()
    for name, tensor in named.items():
        if tensor.requires_grad:
            values[f"gradient of {name}"] = _in(back, name, tensor.grad)
        if not torch.equal(tensor.detach(), before[name]):
            values[f"{name} afterwards"] = _in(back, name, tensor.detach().clone())
    values["written"] = _written([t for t in outputs if isinstance(t, Tensor)])
    return values


def _written(outputs: list[Tensor]) -> str | None:
    """What outputs are once the program has written to one after the other; empty if it may not.
    None where that computes logits, or is written to views or in inference mode."""
    if any(isinstance(t, Deferred) or t._is_view() or t.is_inference() for t in outputs):
        return None
    try:
        for i, t in enumerate(outputs):
            t.fill_(i % 2)
    except RuntimeError:
        return ""
    return str([t.tolist() for t in outputs])


def _in(order: Tensor | None, name: str, tensor: Tensor | None) -> Tensor | None:
    if tensor is None or order is None or name not in ("x", "weight"):
        return tensor
    return tensor[:, order]


def _upstream(output: Tensor) -> Tensor:
    """What backward starts with: different numbers for the rows, 1 for a scalar."""
    return torch.linspace(0.5, 1.5, output.numel()).view(output.shape).to(output.dtype)


FINITE = "finite where eager and float64 have nan"


def differs(
    row: Row, way: Way, got: Values | Exception, eager: Values | Exception
) -> Iterator[str]:
    """Why ``got`` is wrong: an error, a dtype or shape that is not eager's, or more than twice
    eager's error. Indices and counts have to be exact wherever eager's are."""
    if isinstance(eager, Exception):
        if not isinstance(got, Exception):
            yield f"does not raise: {_line(eager)}"
        return
    if isinstance(got, Exception):
        yield f"raises {_line(got)}"
        return
    if got.keys() != eager.keys():
        yield f"{list(got)} for {list(eager)}"
        return
    exact = eager if row.drawn else run(row, way, row.program(wide=True), wide=True)
    named = _named(row.text) if (way.dtype or row.dtype) == torch.float64 else ()
    if isinstance(exact, Exception) or row.drawn:  # of dtypes that are no float64, or share memory
        exact, named = eager, _named(row.text)
    others = functools.cache(lambda: _in_other_orders(row, way, exact))
    for name, ours in got.items():
        theirs, true = eager[name], exact.get(name, eager[name])
        if name == "written":
            if theirs and ours is not None and ours != theirs:
                yield f"outputs that are written to: {ours or 'cannot be'} for {theirs}"
        elif _kind(ours) != _kind(theirs):
            yield f"{name}: {_kind(ours)} for {_kind(theirs)}"
        elif isinstance(ours, Tensor):
            narrow = _coarsest(row, way, ours.dtype, named)
            yield from _off(name, ours, theirs, true, FLOOR[narrow], others)


def _named(text: str) -> tuple[torch.dtype, ...]:
    """The dtypes to which a text casts."""
    words = {torch.float32: r"float(32)?", F16: r"half|float16", BF16: "bfloat16"}
    return tuple(dtype for dtype, word in words.items() if re.search(rf"\.({word})\b", text))


def _coarsest(
    row: Row, way: Way, dtype: torch.dtype, named: tuple[torch.dtype, ...]
) -> torch.dtype:
    """The dtype of a program with the fewest bits; of integers, that of exact ones."""
    if not dtype.is_floating_point:
        return torch.float64
    of = [BF16] * way.autocasts + [way.dtype or row.dtype, dtype, *named]
    return max((d for d in of if d in FLOOR), key=FLOOR.__getitem__)


def _off(
    name: str, ours: Tensor, theirs: Tensor, true: Any, floor: float, others: Any
) -> Iterator[str]:
    """More than twice eager's error, the largest of several orders of summation."""
    if not isinstance(true, Tensor) or true.shape != ours.shape or true.is_complex():
        true = theirs
    nowhere = theirs.isnan() & true.isnan()
    if nowhere.any() and not ours[nowhere].isnan().any():
        yield f"{name}: {FINITE}"
        ours, theirs, true = (t.masked_fill(nowhere, 0) for t in (ours, theirs, true))
    off, bound = error(ours, true), 2 * error(theirs, true) + floor
    for answer in others() if not off <= bound else ():
        if isinstance(answer.get(name), Tensor) and answer[name].shape == true.shape:
            bound = max(bound, 2 * error(answer[name], true) + floor)
    if not off <= bound:
        yield f"{name}: {off:.2e} > {bound:.2e}"


def _in_other_orders(row: Row, way: Way, exact: Values) -> list[Values]:
    """Eager's values where hidden values are summed in other orders; none where they are not only
    summed over, as another order in float64 shows."""
    near = [run(row, way, row.program(), rounding=seed) for seed in range(way.spread)]
    near = [values for values in near if not isinstance(values, Exception)]
    shapes = {name: t.shape for name, t in zip(row.names, row.tensors(), strict=True)}
    x, weight = shapes.get("x", ()), shapes.get("weight", ())
    if len(x) != 2 or len(weight) != 2 or x[1] != weight[1]:
        return near
    random = torch.Generator().manual_seed(0)
    orders = [torch.randperm(x[1], generator=random) for _ in range(ORDERS)]
    again = run(row, way, row.program(wide=True), True, orders[0])
    if isinstance(again, Exception) or again.keys() != exact.keys():
        return near
    pairs = [(again[name], true) for name, true in exact.items() if isinstance(true, Tensor)]
    if any(error(ours, true) > 1e-6 for ours, true in pairs):
        return near
    found = [run(row, way, row.program(), order=order) for order in orders]
    return [*near, *(values for values in found if not isinstance(values, Exception))]


def _round(tensors: list[Tensor], way: Way, seed: int) -> None:
    """Changes floating-point numbers by about one rounding, of bf16 if the way casts to it."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in filter(torch.is_floating_point, tensors):
            eps = torch.finfo(BF16 if way.autocasts else tensor.dtype).eps
            noise = torch.rand(tensor.shape, generator=random, dtype=torch.float64)
            tensor.copy_(tensor.double() * (1 + (2 * noise - 1) * eps))


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    return f"{str(value.dtype)[6:]}{list(value.shape)}"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class _Failures(logging.Handler):
    """Collects what fxpass logs where an unforeseen program runs without the rewrite."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "failed" in record.getMessage():
            error = record.exc_info and record.exc_info[1]
            self.found.append(f"{record.getMessage()}: {error!r}")

    def __enter__(self) -> None:
        logging.getLogger("fxpass").addHandler(self)

    def __exit__(self, *error: object) -> None:
        logging.getLogger("fxpass").removeHandler(self)
