"""Calls of ``fxpass::class_reductions``, and the programs that they stand for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass.op.reductions import class_reductions
from fxpass.spec import expression
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.outputs import INDICES, OF_PICKS, PRODUCTS, ROWS, TOTAL, Moment, Output
from fxpass.spec.reductions import Reductions
from tests.support.numerics import ORDERS, assert_as_accurate

N, D, V, K = 7, 5, 11, 3
INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
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
    """The operands of a call by name, in the order of the operator; ``picks`` apart."""

    tensors: dict[str, Tensor]
    picks: Tensor | None
    spec: Reductions
    frozen: tuple[str, ...] = ()

    def fused(self, *tensors: Tensor) -> Tensor:
        return self.run(tensors)["rows"]

    def run(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        found = self._named(tensors)
        given = given_of(found)
        one = (found.get(name) for name in ("x", "weight", "bias", "scale"))
        return class_reductions(*one, self.picks, given, None, None, self.spec.text())

    def eager(self, *tensors: Tensor) -> Tensor:
        """The rows ``[R, N]``, by autograd in the dtype of the operands."""
        found = self._named(tensors)
        z, bias = found["x"] @ found["weight"].T, found.get("bias")
        wide = torch.promote_types(z.dtype, torch.float32)
        if bias is not None:
            z = F.linear(found["x"], found["weight"], bias) if bias.dtype == z.dtype else z + bias
        picks = None if self.picks is None else self.picks.view(len(z), -1)
        read = [f"given{i}" for i in expression.given_in(self.spec.transform)]
        beside = {name: found[name].to(wide) for name in read}
        z = TRANSFORMS[expression.text(self.spec.transform)](z.to(wide), **beside)
        if "scale" in found:
            z = z * found["scale"].unsqueeze(1)
        log = z.log_softmax(1)
        lines: list[Tensor] = []
        for output in self.spec.rows:
            start = len(lines)
            if isinstance(output, Moment):
                w = 1 if output.weight is None else found[f"given{output.weight}"].to(wide)
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
            return other.eager(*permuted)[:, n.argsort()]

        return eager

    def _named(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        pairs = zip(self.tensors, tensors, strict=True)
        return {name: t.detach() if name in self.frozen else t for name, t in pairs}


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
) -> Case:
    n, d, v = shape
    wide = compute_dtype(dtype)
    tensors = {"x": (size * torch.randn(n, d)).to(dtype), "weight": torch.randn(v, d).to(dtype)}
    if bias is not None:
        tensors["bias"] = torch.randn(v).to(bias)
    if scaled:
        tensors["scale"] = (0.5 + torch.rand(n)).to(wide)
    weights = [o.weight for o in outputs if isinstance(o, Moment)]
    positions = expression.given_in(expression.parse(transform))
    for i, sizes in enumerate(([v], [n, v])):
        if any(w is not None and w >= i for w in (*weights, *positions)):
            tensors[f"given{i}"] = torch.randn(sizes).to(wide if i == 0 else dtype)
    if positions:
        tensors["given2"] = (torch.rand(v) < 0.2).to(wide)
        tensors["given3"] = torch.randn(n, v).to(dtype)
    trained = {f"given{w}" for w in (*weights, *([3] if positions else []))}
    frozen += tuple(name for name in tensors if name.startswith("given") and name not in trained)
    picked = not set(OF_PICKS).isdisjoint(outputs)
    gradients = tuple(name for name in tensors if name not in frozen)
    return Case(
        tensors,
        torch.randint(v, (n, K) if many else (n,)) if picked else None,
        Reductions(tuple(outputs), expression.parse(transform), gradients),
        frozen,
    )


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


def check(found: Case, dtype: torch.dtype = torch.float32) -> None:
    tensors = list(found.tensors.values())
    upstream = torch.randn(found.eager(*tensors).shape)
    if upstream.shape[1] > 2:
        upstream[:, 1] = 0  # one row without a gradient, which is not worth leaving out
    # of one class, eager's gradients of moments are exactly 0, and the operator's to a rounding
    floor = 4e-6 if len(found.tensors["weight"]) == 1 and dtype == torch.float32 else 0.0
    orders = map(found.reordered, range(ORDERS))
    assert_as_accurate(
        *(found.fused, found.eager, tensors, dtype, upstream), floor=floor, reordered=orders
    )


COMBINATIONS: dict[str, list[Output]] = {
    "a policy's loss": ["pick", Moment(1, 1), "argmax"],
    "a loss with a z-loss and metrics": ["pick", "lse", "argmax", "max"],
    "smoothing": ["pick", Moment(0, 1), Moment(0, 1, 0)],
    "a maximum": ["max", "at", "argmax"],
    "sums of one weight": [Moment(1, 0, 1), Moment(0, 1, 1), Moment(1, 2, 0)],
    "everything": [*OUTPUTS, *INDICES],
}


# ---------------------------------------------------------------- totals

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


def coefficients(
    total: Sequence[Output], many: bool, dtype: torch.dtype, zeros: bool, rows: int
) -> Tensor:
    lines = sum(K if many and output in OF_PICKS else 1 for output in total)
    coef = torch.randn(lines, rows).to(compute_dtype(dtype))
    if zeros:
        coef[:, 1::2] = 0
        coef[0, 2] = 0
    return coef


def check_total(
    total: Sequence[Output],
    dtype: torch.dtype,
    transform: str = "z",
    outputs: tuple[Output, ...] = (),
    scaled: bool = False,
    many: bool = False,
    zeros: bool = False,
    bias: torch.dtype | None = None,
    shape: tuple[int, int, int] = (N, D, V),
    size: float = 1.0,
) -> None:
    """The total and its gradients against eager, and the other outputs against a call without a
    total: equal, but for rounding where the logits of another shape are multiplied."""
    bias = dtype if scaled and bias is None else bias
    found = case([*total], dtype, transform, bias, scaled, many, shape, size)
    gradients = tuple(name for name in found.spec.gradients if name in PRODUCTS)
    frozen = tuple(name for name in found.tensors if name not in PRODUCTS)
    found = found._replace(frozen=frozen)
    spec = dataclasses.replace(found.spec, outputs=outputs, gradients=gradients, total=tuple(total))
    coef = coefficients(total, many, dtype, zeros, shape[0])

    def fused(*tensors: Tensor) -> Tensor:
        named = found._named(tensors)
        given = given_of(named)
        one = (named.get(name) for name in ("x", "weight", "bias", "scale"))
        out = class_reductions(*one, found.picks, given, coef, None, spec.text())
        if outputs:
            assert not out["rows"].requires_grad
            with torch.no_grad():
                alone = dataclasses.replace(spec, total=(), gradients=())
                one = (named.get(name) for name in ("x", "weight", "bias", "scale"))
                rows = class_reductions(*one, found.picks, given, None, None, alone.text())
            tolerance = 16 * torch.finfo(dtype).eps
            torch.testing.assert_close(out["rows"], rows["rows"], rtol=tolerance, atol=tolerance)
            assert torch.equal(out["indices"], rows["indices"])
        return out["total"]

    def eager(*tensors: Tensor) -> Tensor:
        rows = found.eager(*tensors)
        return (rows * coef.to(rows.dtype)).sum()

    # the coefficients have both signs: in f64, the total of large terms may be small
    assert_as_accurate(fused, eager, list(found.tensors.values()), dtype, floor=1e-12)
