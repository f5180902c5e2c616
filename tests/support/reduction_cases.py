"""Calls of the engine of formulas, the programs that they stand for, and the list of calls that each
implementation computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass.aten import blocks, tiles
from fxpass.formula import expression
from fxpass.formula.dtypes import compute_dtype
from fxpass.formula.operands import Operands
from fxpass.formula.outputs import INDICES, OF_PICKS, PRODUCTS, ROWS, TOTAL, Moment, Output
from fxpass.formula.reductions import Reductions
from fxpass.op import run
from fxpass.plan.plan import Plan
from tests.support.engine import reduced
from tests.support.numerics import ORDERS, assert_as_accurate, assert_close

N, D, V, K = 7, 5, 11, 3
INF, NAN = float("inf"), float("nan")
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = [F64, F32, BF16, F16]
WEIGHTS = (None, 0, 1)  # ones, classes [V], values [N, V]
MOMENTS = [Moment(a, b, w) for a in range(3) for b in range(3) for w in WEIGHTS]
MOMENTS.remove(TOTAL)  # 1, with gradients that are rounding errors

OUTPUTS: list[Output] = [*ROWS, *MOMENTS]
# Of the logits and the call's other tensors by name, in the compute dtype.
TRANSFORMS: dict[str, Callable[..., Tensor]] = {
    "z": lambda z: z,
    "3*tanh(z/3)": lambda z: 3 * torch.tanh(z / 3),
    "0.5-0.5*z": lambda z: 0.5 - 0.5 * z,
}
# A mask of classes, and values [N, V].
MASKED = "where(given2>0,-2,0.25*given3*z)"
TRANSFORMS[MASKED] = lambda z, given2, given3: torch.where(given2 > 0, -2, 0.25 * given3 * z)


class Case(NamedTuple):
    """The operands of a call by name, in the order of the engine; ``picks`` and ``coef`` apart."""

    tensors: dict[str, Tensor]
    picks: Tensor | None
    spec: Reductions
    frozen: tuple[str, ...] = ()
    coef: Tensor | None = None

    def fused(self, *tensors: Tensor) -> Tensor:
        """The rows, or the sum of the total if there is one."""
        return self.run(tensors)["total" if self.spec.total else "rows"]

    def run(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        found = self._named(tensors)
        x, weight, bias, scale = (found.get(name) for name in ("x", "weight", "bias", "scale"))
        given = tuple(given_of(found))
        operands = Operands(x, weight, bias, scale, self.picks, given, self.coef)
        return reduced(operands, self.spec)

    def eager(self, *tensors: Tensor) -> Tensor:
        """The rows ``[R, N]`` or the total, by autograd in the dtype of the operands."""
        return self._result(self.rows(self.spec.total or self.spec.rows, *tensors))

    def _result(self, rows: Tensor) -> Tensor:
        return rows if self.coef is None else (rows * self.coef.to(rows.dtype)).sum()

    def logits(self, *tensors: Tensor) -> Tensor:
        """Transformed and scaled."""
        found = self._named(tensors)
        z = _linear(found)
        wide = torch.promote_types(z.dtype, torch.float32)
        read = [f"given{i}" for i in expression.given_in(self.spec.transform)]
        beside = {name: found[name].to(wide) for name in read}
        z = TRANSFORMS[expression.text(self.spec.transform)](z.to(wide), **beside)
        return z * found["scale"].unsqueeze(1) if "scale" in found else z

    def rows(self, outputs: Sequence[Output], *tensors: Tensor) -> Tensor:
        """Some outputs ``[R, N]``."""
        found, z = self._named(tensors), self.logits(*tensors)
        picks = None if self.picks is None else self.picks.view(len(z), -1)
        log = z.log_softmax(1)
        lines: list[Tensor] = []
        for output in outputs:
            start = len(lines)
            if isinstance(output, Moment):
                w = 1 if output.weight is None else found[f"given{output.weight}"].to(z.dtype)
                lines.append((w * term(output, log)).sum(1))
            elif output in OF_PICKS:
                assert picks is not None
                lines += (log if output == "pick" else z).gather(1, picks).unbind(1)
            else:
                lines.append(z.logsumexp(1) if output == "lse" else z.max(1).values)
            if output in self.spec.detached:
                lines[start:] = [line.detach() for line in lines[start:]]
        return torch.stack(lines)

    def reordered(self, seed: int) -> Callable[..., Tensor]:
        """:meth:`eager` with rows, hidden size and classes permuted, so that all sums are in
        another order. Its rows and gradients are in the places of the others."""
        x, weight = self.tensors["x"], self.tensors["weight"]
        random = torch.Generator().manual_seed(seed)
        n, d, v = (
            torch.randperm(size, generator=random, device="cpu").to(x.device)
            for size in (*x.shape, len(weight))
        )
        axes = {"x": (n, d), "weight": (v, d), "bias": (v,), "scale": (n,)}
        axes |= {"given0": (v,), "given1": (n, v), "given2": (v,), "given3": (n, v)}
        other = self
        if self.picks is not None:
            other = self._replace(picks=v.argsort()[self.picks[n]])

        def eager(*tensors: Tensor) -> Tensor:
            permuted = []
            for name, tensor in zip(self.tensors, tensors, strict=True):
                for dim, order in enumerate(axes[name]):
                    tensor = tensor.index_select(dim, order)
                permuted.append(tensor)
            rows = other.rows(self.spec.total or self.spec.rows, *permuted)
            return self._result(rows[:, n.argsort()])

        return eager

    def _named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        pairs = zip(self.tensors, tensors, strict=True)
        return {name: t.detach() if name in self.frozen else t for name, t in pairs}

    @property
    def all(self) -> list[Tensor]:
        return list(self.tensors.values())


def _linear(found: dict[str, Tensor]) -> Tensor:
    x, weight, bias = found["x"], found["weight"], found.get("bias")
    if bias is None or bias.dtype == x.dtype:
        return F.linear(x, weight, bias)
    return x @ weight.T + bias


def given_of(named: dict[str, Tensor]) -> list[Tensor]:
    """The given tensors of a call; ``given2`` as a mask."""
    return [t > 0 if n == "given2" else t for n, t in named.items() if n.startswith("given")]


def term(moment: Moment, log: Tensor) -> Tensor:
    """As programs write it, without a power of 0."""
    if not moment.a:  # 0 * log: autograd wants a gradient
        return log**moment.b if moment.b else 1 + 0 * log
    e = (moment.a * log).exp()
    return e * log**moment.b if moment.b else e


def case(
    outputs: Sequence[Output],
    dtype: torch.dtype = torch.float32,
    transform: str = "z",
    bias: torch.dtype | None = None,
    scaled: bool = False,
    many: bool = False,
    shape: tuple[int, int, int] = (N, D, V),
    size: float = 1.0,
    frozen: tuple[str, ...] = (),
    total: Sequence[Output] = (),
    detached: tuple[Output, ...] = (),
    strided: bool = False,
) -> Case:
    """A call with random operands. The outputs of a total are outputs too; some of its coefficients
    are 0. A largest logit is detached."""
    n, d, v = shape
    wide = compute_dtype(dtype)
    outputs = every = tuple(dict.fromkeys((*total, *outputs)))
    tensors = {"x": (size * torch.randn(n, d)).to(dtype), "weight": torch.randn(v, d).to(dtype)}
    if bias is not None:
        tensors["bias"] = torch.randn(v).to(bias)
    if scaled:
        tensors["scale"] = (0.5 + torch.rand(n)).to(wide)
    weights = [o.weight for o in every if isinstance(o, Moment)]
    positions = expression.given_in(expression.parse(transform))
    for i, sizes in enumerate(([v], [n, v])):
        if any(w is not None and w >= i for w in (*weights, *positions)):
            tensors[f"given{i}"] = torch.randn(sizes).to(wide if i == 0 else dtype)
    if positions:
        tensors["given2"] = (torch.rand(v) < 0.2).to(wide)
        tensors["given3"] = torch.randn(n, v).to(dtype)
    picks = None
    if not set(OF_PICKS).isdisjoint(every):
        picks = torch.randint(v, (n, K) if many else (n,))
    if strided:
        tensors = {k: t.repeat_interleave(2, dim=-1)[..., ::2] for k, t in tensors.items()}
        tensors["x"] = tensors["x"].T.contiguous().T
        picks = None if picks is None else picks.T.contiguous().T
    frozen += tuple(name for name in tensors if name not in PRODUCTS)
    coef = None
    if total:
        coef = torch.randn(sum(K if many and o in OF_PICKS else 1 for o in total), n).to(wide)
        coef[:, 1:2] = 0
        coef[0, 2:3] = 0
    gradients = tuple(k for k in tensors if k not in frozen)
    if gradients and not total:
        detached = tuple(o for o in outputs if o == "max" or o in detached)
    spec = Reductions(
        outputs, expression.parse(transform), gradients, total=tuple(total), detached=detached
    )
    return Case(tensors, picks, spec, frozen, coef)


def assert_almost_certain(found: Case) -> None:
    """The gradient of an entropy in rows with one class that has almost all of the softmax is
    small, and as accurate as others."""
    bias = found.tensors["bias"].clone()
    bias[3] = 25
    leaves = found.tensors | {"bias": bias.requires_grad_()}
    found.fused(*leaves.values()).sum().backward()
    exact = bias.detach().double().requires_grad_()
    p = exact.softmax(0)
    (len(found.tensors["x"]) * (p * exact.log_softmax(0)).sum()).backward()
    assert bias.grad is not None
    assert exact.grad is not None
    assert (bias.grad - exact.grad).norm() < 1e-5 * exact.grad.norm()


def check(found: Case, dtype: torch.dtype = torch.float32, floor: float = 0.0) -> None:
    """Values and gradients, as accurate as eager's; beside a total also other outputs. The class of
    the largest logit has it, but for the rounding of logits."""
    tensors, spec = found.all, found.spec
    upstream = torch.randn(found.eager(*tensors).shape)
    if found.coef is None and upstream.shape[1] > 2:
        upstream[:, 1] = 0  # one row without a gradient, which is not worth leaving out
    # of one class, eager's gradients of moments are exactly 0, and the engine's to a rounding
    if len(found.tensors["weight"]) == 1 and dtype == torch.float32:
        floor = max(floor, 4e-6)
    if found.coef is not None:
        # the coefficients have both signs: in f64, the total of large terms may be small
        floor = max(floor, 1e-12)
    orders = map(found.reordered, range(ORDERS))
    assert_as_accurate(
        *(found.fused, found.eager, tensors, dtype, upstream), floor=floor, reordered=orders
    )
    beside = [output for output in spec.rows if output not in spec.total] if spec.total else []
    if not (spec.indices or beside):
        return
    results = found.run([t.detach() for t in tensors])
    exact = [t.double() for t in tensors]
    if beside:
        of_rows = (found.rows(spec.rows, *some) for some in (tensors, exact))
        assert_close([results["rows"]], *([rows] for rows in of_rows), dtype, floor=floor)
    if spec.indices and len(tensors[0]):
        z = found.logits(*exact)
        at = z.gather(1, results["indices"].T)
        of_logits = 4 * torch.finfo(dtype).eps * (1 + z.abs().amax(1, keepdim=True))
        assert ((z.amax(1, keepdim=True) - at) <= of_logits).all()


# ---------------------------------------------------------------- implementations


# Chunks of 3 rows, blocks of 2, products of 4 classes; tiles of 3 rows and 4 classes; the logits in
# the weight's gradient; several chunks and slices of kernels, whose rows are one block or several.
PLANS = {
    "chunked": Plan("aten", "chunked", 3, 4, block=2),
    "tiled": Plan("aten", "tiled", 3, 4),
    "in place": Plan("aten", "chunked", 100, 4, in_place=True),
    "triton": Plan("triton", "tiled", 2, 16),
}
# exp(l) of kernels is 2**x of a rounded log2(e) * l, as on a GPU: some units in the last place more
# than eager's on a CPU, which sums that cancel amplify
FLOORS = {"triton": 4e-6}
# Dtypes of operands and of ATen's products, as CPUs with and without products in bf16 have them.
PRECISIONS = [(F64, F64), (F32, F32), (BF16, BF16), (BF16, F32), (F16, F32)]


def implement(way: str, patch: pytest.MonkeyPatch, multiplied: torch.dtype | None = None) -> None:
    """The engine runs one of :data:`PLANS`; where no total is computed in place, in chunks."""

    def plan(*of_call: Any) -> Plan:
        spec = of_call[5]
        if way == "in place" and not spec.total:
            return PLANS["chunked"]
        if way == "triton" and of_call[2] > 8192:
            return PLANS[way]._replace(classes=8192)
        return PLANS[way]

    patch.setattr(run, "plan_head", plan)
    if multiplied is not None:
        for module in (blocks, tiles):
            patch.setattr(
                module,
                "multiplied_in",
                lambda dtype, _: multiplied if dtype == BF16 else compute_dtype(dtype),
            )


def computes(way: str, total: bool) -> bool:
    """Whether an implementation has its own computation of a total, or of rows."""
    return {"tiled": not total, "in place": total}.get(way, True)


def where(way: str, device: torch.device) -> Any:
    """Makes new tensors on a device that the implementation runs on."""
    return device if way == "triton" else nullcontext()


# ---------------------------------------------------------------- the list of cases

COMBINATIONS: dict[str, list[Output]] = {
    "a policy's loss": ["pick", Moment(1, 1), "argmax"],
    "a loss with a z-loss and metrics": ["pick", "lse", "argmax", "max"],
    "smoothing": ["pick", Moment(0, 1), Moment(0, 1, 0)],
    "a maximum": ["max", "at", "argmax"],
    "sums of one weight": [Moment(1, 0, 1), Moment(0, 1, 1), Moment(1, 2, 0)],
    "everything": [*OUTPUTS, *INDICES],
}
# With each kind of output, but few of each: the interpreter needs a second for all.
SOME: list[Output] = [
    *("lse", "pick", "at"),
    *(Moment(1, 1), Moment(2, 2, 1), Moment(0, 2, 0), Moment(0, 1), Moment(1, 0, 1)),
    *INDICES,
]
TOTALS: dict[str, list[Output]] = {
    "a loss": ["pick"],
    "a z-loss": ["lse"],
    "lse and logit": ["lse", "at"],
    "a logit": ["at"],
    "a policy's loss": ["pick", Moment(1, 1)],
    "smoothing": ["pick", Moment(0, 1), Moment(0, 1, 0)],
    "soft targets": [Moment(0, 1, 1), Moment(0, 0, 0), "lse"],
    "squares": [Moment(2, 2), Moment(1, 2, 1), Moment(2, 0)],
}
FEW = (4, 9, V)  # no more rows than the hidden size
BLOCKED = (3, 5, 8200)  # several blocks of a kernel, the last one with less than one
# For each dtype the next one.
VARIANTS: list[dict[str, Any]] = [
    {},
    {"transform": "3*tanh(z/3)", "bias": "own", "many": True},
    {"transform": MASKED, "bias": "wide", "scaled": True},
    {"transform": "0.5-0.5*z", "bias": "own", "scaled": True, "many": True},
]


def _cases() -> Iterator[tuple[str, dict[str, Any]]]:
    for i, output in enumerate(OUTPUTS):
        # a largest logit has no gradient
        outputs = [output, *["lse"] * (output == "max")]
        yield str(output), {"outputs": outputs, "variant": i}
        yield f"huge {output}", {"outputs": outputs, "size": 1e4, "bias": "own"}
    for i, (name, outputs) in enumerate(COMBINATIONS.items()):
        for j in range(len(VARIANTS)):
            yield f"{name}, variant {j}", {"outputs": outputs, "variant": i + j}
    full = {"bias": "own", "scaled": True}
    everything = COMBINATIONS["everything"]
    for outputs, more in ((everything, "and maxima"), ([o for o in everything if o != "max"], "")):
        for shape in ((1, 5, 11), (7, 1, 11), (7, 5, 1), (1, 1, 1), (7, 5, 4), (7, 9, 37)):
            yield f"sizes {shape} {more}", {"outputs": outputs, "shape": shape, **full}
        for frozen in ("x",), ("weight",), ("weight", "bias"):
            yield f"frozen {frozen} {more}", {"outputs": outputs, "frozen": frozen, **full}
        for first in (0, 1):
            detached = tuple(outputs[:-1][first::2])
            found = {"outputs": outputs, "detached": detached, "many": bool(first), **full}
            yield f"detached {first} {more}", {**found, "transform": MASKED}
        yield f"strided {more}", {"outputs": outputs, "many": True, "strided": True, **full}
    yield "certain", {"outputs": ["lse", "pick", "argmax"], "size": 30.0, "detached": ("lse",)}
    for i, (name, total) in enumerate(TOTALS.items()):
        found = {"outputs": [], "total": total, "shape": FEW}
        for j in range(len(VARIANTS)):
            yield f"total: {name}, variant {j}", {**found, "variant": i + j}
        yield f"total: huge {name}", {**found, "size": 1e4}
        for shape in ((1, 1, 1), (5, 5, 1), (5, 5, 12), (9, 9, 37)):
            yield f"total: {name} {shape}", {**found, "shape": shape, "bias": "own"}
        picks = [one for one in ("pick", "at") if {"pick", "at"} & set(total)]
        beside = [*picks, "lse", "max", "argmax", Moment(1, 1), Moment(0, 2)]
        for j in (0, 1):
            yield f"total: {name} beside outputs {j}", {**found, "outputs": beside, "variant": j}
    yield "total: frozen", {**found, "total": ["pick"], "frozen": ("weight",)}


CASES: dict[str, dict[str, Any]] = dict(_cases())
_FULL = {"bias": "wide", "scaled": True, "many": True}
# What kernels compute is compiled for each call, and the interpreter is slow: less than all.
OF_TRITON: dict[str, dict[str, Any]] = {
    "kinds": {"outputs": SOME, "variant": 0},
    "kinds and maxima": {"outputs": [*SOME, "max"], "variant": 1},
    "kinds with a mask": {"outputs": SOME, "variant": 2, "shape": (5, 5, 37)},
    "blocks": {"outputs": SOME, "shape": BLOCKED, "transform": "3*tanh(z/3)", **_FULL},
    "blocks and maxima": {"outputs": [*SOME, "max"], "shape": BLOCKED},
    "blocks of a policy": {"outputs": ["pick", Moment(1, 1), "argmax"], "shape": BLOCKED},
    "blocks of huge logits": {
        "outputs": [*SOME, "max"],
        "shape": BLOCKED,
        "size": 1e4,
        "bias": "own",
    },
    "one row": {"outputs": SOME, "shape": (1, 5, 11), "bias": "own"},
    "one class": {"outputs": [*SOME, "max"], "shape": (7, 5, 1), "bias": "own", "many": True},
    "detached": {"outputs": SOME, "detached": tuple(SOME[:-1:2]), "many": True},
    "frozen": {"outputs": SOME, "frozen": ("x", "weight"), "bias": "own", "scaled": True},
    "strided": {"outputs": [*SOME, "max"], "strided": True, **_FULL},
    **{f"total: {name}": {"outputs": [], "total": total} for name, total in TOTALS.items()},
    "total: blocks of a policy": {
        "outputs": [],
        "total": TOTALS["a policy's loss"],
        "shape": BLOCKED,
    },
    "total: blocks of squares": {"outputs": [], "total": TOTALS["squares"], "shape": BLOCKED},
    "total: beside outputs": {
        "outputs": ["argmax", "max", "pick", Moment(1, 2)],
        **{"total": TOTALS["a policy's loss"], "transform": "3*tanh(z/3)", "shape": BLOCKED},
        **{"bias": "own", "scaled": True, "many": True},
    },
}


def cases_of(way: str) -> dict[str, dict[str, Any]]:
    """The cases that an implementation computes in its own way."""
    if way == "triton":
        return OF_TRITON
    return {name: options for name, options in CASES.items() if computes(way, "total" in options)}


def precisions(way: str, options: dict[str, Any]) -> Iterator[tuple[torch.dtype, torch.dtype]]:
    """The dtypes of a case; huge logits are infinite in fp16."""
    for dtype, multiplied in PRECISIONS:
        of_kernels = dtype != F64 and multiplied != BF16
        if (way != "triton" or of_kernels) and (dtype != F16 or "size" not in options):
            yield dtype, multiplied


def made(options: dict[str, Any], dtype: torch.dtype, turn: int = 0) -> Case:
    """The case of some options, of a list's ``turn``-th dtype."""
    options = dict(options)
    if (variant := options.pop("variant", None)) is not None:
        options |= VARIANTS[(variant + turn) % len(VARIANTS)]
    bias = {"own": dtype, "wide": compute_dtype(dtype)}.get(options.pop("bias", ""))
    return case(dtype=dtype, bias=bias, **options)
