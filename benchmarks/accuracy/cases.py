"""One step of one provider against float64, in one setting of dtype, autocast and scaler.

In: a :class:`Setting`, the numbers of a :class:`Problem`, a loss. Out: a row with errors::

    >>> problem = Problem(64, 16, 1000, torch.float16)
    >>> def plain(x, weight, target):
    ...     return torch.nn.functional.cross_entropy(x @ weight.t(), target)
    >>> setting = Setting(torch.float16, scaled=True)
    >>> row = compare(step(plain, setting, problem), problem.exact)
    >>> row.errors["dw"] < 1e-3, row.zeros["dw"]
    (True, 0.0)
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.loss.providers import Loss
from benchmarks.loss.rows import Row

SCALE = 32768.0  # half of GradScaler's default; no gradient of 8192 rows x 32,000 classes overflows
ROWS = 256  # of float64 logits at a time


@dataclass(frozen=True)
class Setting:
    """The dtypes of a step.

    Attributes:
        dtype: of the linear's operands.
        autocast: whether x and weight are f32 leaves that autocast casts. Without autocast, the
            leaves have ``dtype``; with a scaler they are f32 and the program casts them, because
            a GradScaler does not unscale fp16 gradients.
        scaled: whether a GradScaler with the scale SCALE scales the loss.
    """

    dtype: torch.dtype
    autocast: bool = False
    scaled: bool = False

    @property
    def context(self) -> AbstractContextManager[object]:
        """The context of the forward pass."""
        return torch.autocast("cpu", self.dtype) if self.autocast else nullcontext()


class Problem:
    """Operands of one dtype: x ``[n, d]``, weight ``[v, d]``, target ``[n]``; and exact results.

    All values of the operands are numbers of ``dtype`` in every setting. So the errors are those of
    the computation, without the rounding of the operands, which is autocast's and the same for all
    providers.

    Attributes:
        exact: loss, dx and dw in float64.
    """

    def __init__(self, n: int, d: int, v: int, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(n, d, generator=generator)
        weight = torch.randn(v, d, generator=generator) * d**-0.5
        self.x, self.weight = x.to(dtype), weight.to(dtype)
        self.target = torch.randint(v, (n,), generator=generator)
        self.exact = exact_step(self.x, self.weight, self.target)

    def leaves(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """x and weight as leaves that require a gradient."""
        return self.x.to(dtype, copy=True).requires_grad_(), self.weight.to(
            dtype, copy=True
        ).requires_grad_()


def exact_step(x: Tensor, weight: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Loss and gradients in float64, ``ROWS`` rows at a time, to save memory."""
    x, weight = x.double(), weight.double()
    loss, dx, dw = x.new_zeros(()), torch.empty_like(x), torch.zeros_like(weight)
    for start in range(0, len(x), ROWS):
        part = slice(start, start + ROWS)
        g = x[part] @ weight.t()  # the logits
        g -= g.amax(1, keepdim=True)
        picked = target[part].unsqueeze(1)
        loss -= g.gather(1, picked).sum()
        total = g.exp_().sum(1, keepdim=True)
        loss += total.log().sum()
        g /= total
        g.scatter_add_(1, picked, torch.full_like(g[:, :1], -1))
        dx[part] = g @ weight
        dw.addmm_(g.t(), x[part])
    return {"loss": loss / len(x), "dx": dx / len(x), "dw": dw / len(x)}


def step(loss_of: Loss, setting: Setting, problem: Problem) -> dict[str, Tensor]:
    """The loss and the gradients of the leaves, without the loss scale."""
    f32 = setting.autocast or setting.scaled
    leaves = problem.leaves(torch.float32 if f32 else setting.dtype)
    x, weight = leaves
    if f32 and not setting.autocast:
        x, weight = x.to(setting.dtype), weight.to(setting.dtype)
    with setting.context:
        loss = loss_of(x, weight, problem.target)
    if setting.scaled:
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        optimizer = torch.optim.SGD(leaves)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
    else:
        loss.backward()
    dx, dw = (leaf.grad for leaf in leaves)
    assert dx is not None
    assert dw is not None
    return {"loss": loss.detach(), "dx": dx, "dw": dw}


def rounded(setting: Setting, problem: Problem) -> Row:
    """float64's own values, rounded once to the dtypes that the program returns.

    The loss is f32. The gradients have the dtype of the linear's operands, and the loss scale if
    there is a scaler, whatever the dtype of the leaves: an element that is zero here underflows in
    that dtype.
    """
    scale = SCALE if setting.scaled else 1.0
    got = {"loss": problem.exact["loss"].float()}
    for what in ("dx", "dw"):
        got[what] = (problem.exact[what] * scale).to(setting.dtype).double() / scale
    return compare(got, problem.exact)


def compare(got: dict[str, Tensor], exact: dict[str, Tensor]) -> Row:
    """Relative errors, and shares of zeros of the gradients."""
    errors = {k: float((got[k].double() - exact[k]).norm() / exact[k].norm()) for k in exact}
    zeros = {k: float((got[k] == 0).double().mean()) for k in ("dx", "dw")}
    return Row("", errors=errors, zeros=zeros)
