"""Reductions of a row of logits over its classes, in one normal form.

Let z be a row's logits after a pointwise transform, M their maximum, lse their log-sum-exp, l = z -
lse their log-softmax and p = exp(l). What programs take from a row is arithmetic on a few outputs:

    lse                the log-sum-exp
    pick, at           l and z at a given class c
    moment(a,b,w)      sum_j w_j exp(a l_j) l_j**b, for 0 <= a, b <= 2 and weights w: ones, a vector
                       of classes [V], or values [N, V]
    max, argmax        the largest logit, and its class

The entropy is -moment(1,1), a sum of p**2 is moment(2,0), an expectation of u is moment(1,0,u), and
a loss with soft targets q is -moment(0,1,q). The outputs of a row, and their gradients with respect
to the logits for an incoming gradient of 1, are

    lse                 M + log S                         p_j
    pick                (z_c - M) - log S                 1[j = c] - p_j
    moment              see :func:`normalised`            psi_j - p_j sigma
    max                 M                                 none

with S = sum_j exp(z_j - M), psi_j = w_j exp(a l_j) (a l_j**b + b l_j**(b-1)) and sigma = sum_j
psi_j = a moment(a,b,w) + b moment(a,b-1,w). One pass over the classes accumulates the raw sums

    S_ab[w] = sum_j w_j exp(a (z_j - M)) (z_j - M)**b

under the maximum so far. A new maximum changes them by :func:`shifted`; so blocks of a row, tiles
and chunks are joined by the same function::

    >>> import torch
    >>> z = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)
    >>> entropy = Moment(1, 1)
    >>> sums = {m: float(m.term(z - 3).sum()) for m in raw_moments([entropy])}
    >>> -normalised(entropy, sums, math.log(sums[TOTAL]), 1 / sums[TOTAL])
    0.83239...
    >>> torch.distributions.Categorical(logits=z).entropy().item()
    0.83239...
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from sympy import Expr

from fxpass.formula import expression
from fxpass.formula.expression import Z
from fxpass.formula.outputs import (
    HIGHEST_POWER,
    INDICES,
    OF_PICKS,
    PRODUCTS,
    ROWS,
    TOTAL,
    TRAINED,
    Moment,
    Output,
    is_index,
)


def raw_moments(outputs: Collection[Output]) -> tuple[Moment, ...]:
    """The moments whose raw sums one pass accumulates for these outputs, ``TOTAL`` first; none if
    all outputs are ``at``. ``max`` has ``TOTAL`` as a sign of nan, which maxima lose on GPUs."""
    if all(output == "at" for output in outputs):
        return ()
    wanted = [m for m in outputs if isinstance(m, Moment)]
    lower = (dataclasses.replace(m, b=b) for m in wanted for b in range(m.b + 1))
    return tuple(dict.fromkeys((TOTAL, *lower)))


def normalised(moment: Moment, sums: Mapping[Moment, Any], log_total: Any, inverse: Any) -> Any:
    """The moment of l = y - log_total, from the raw sums of y = z - M; ``inverse``: 1 / S, which is
    more accurate than the exponential of a rounded logarithm."""
    return shifted(moment, sums, -log_total, inverse)


def shifted(moment: Moment, sums: Mapping[Moment, Any], shift: Any, decay: Any) -> Any:
    """The raw sum under a new maximum, where ``shift`` is the old maximum minus the new one, and
    ``decay`` its exponential: ``decay**a sum_j w_j exp(a y_j) (y_j + shift)**b``."""
    total = sums[moment]
    for k in range(moment.b):
        lower = sums[dataclasses.replace(moment, b=k)]
        total = total + math.comb(moment.b, k) * shift ** (moment.b - k) * lower
    return total * decay**moment.a if moment.a else total


def slope_terms(moment: Moment) -> tuple[tuple[int, Moment], ...]:
    """The terms of sigma as factors and moments; psi has the same terms at each class."""
    terms = (moment.a, moment), (moment.b, dataclasses.replace(moment, b=moment.b - 1))
    return tuple((factor, term) for factor, term in terms if factor)


def slope_moments(outputs: Iterable[Output]) -> tuple[Moment, ...]:
    """The moments that the slopes of these outputs read."""
    moments = (output for output in outputs if isinstance(output, Moment))
    read = (moment for output in moments for _, moment in slope_terms(output))
    return tuple(dict.fromkeys(moment for moment in read if moment != TOTAL))


# ---------------------------------------------------------------- the spec of one call


@dataclass(frozen=True)
class Reductions:
    """The reductions of a head's rows, apart from the tensors.

    Attributes:
        outputs: the outputs, each once.
        transform: the logit that is reduced, as an expression of the linear's output ``z`` and of
            given values (:mod:`fxpass.formula.expression`).
        gradients: the operands that need a gradient, of ``x``, ``weight`` and ``bias``, in this
            order.
        total: the outputs that the program adds up over all rows, with weights that read no output
            (a mean, a mask, a policy's advantages). Forward computes the gradients of this sum; the
            other outputs then have no gradient.
        memory_mb: scratch budget in MiB; 0 leaves it to the plan.
        accumulate: ``float32``: chunks add up the weight's gradient in f32; ``auto``: few chunks
            of bf16 add it up in bf16 (:mod:`fxpass.plan.plan`).
        detached: the outputs of ``rows`` without a gradient where others have one, such as metrics
            under ``no_grad``. Backward reads no moments for them.
        unrounded: the operands of ``x`` and ``weight`` whose gradients are returned in the dtype of
            the sums: the program cast these operands from it, and the gradients bypass the cast.

    The text form::

        >>> Reductions(("lse", Moment(1, 1)), gradients=("x",)).text()
        'outputs=lse;moment(1,1) gradients=x'
    """

    outputs: tuple[Output, ...]
    transform: Expr = Z
    gradients: tuple[str, ...] = ()
    total: tuple[Output, ...] = ()
    memory_mb: int = 0
    detached: tuple[Output, ...] = ()
    unrounded: tuple[str, ...] = ()
    accumulate: str = "auto"

    def __post_init__(self) -> None:
        for output in (*self.outputs, *self.total):
            if isinstance(output, str) and output not in (*ROWS, *INDICES):
                raise ValueError(f"{output!r} is no reduction of a row of logits")
            if not isinstance(output, Moment):
                continue
            if (output.weight or 0) < 0:
                raise ValueError(f"{output} has a weight at a negative position")
            if not all(0 <= power <= HIGHEST_POWER for power in (output.a, output.b)):
                raise ValueError(f"{output} has a power that is not 0 to {HIGHEST_POWER}")
            if output == TOTAL:
                raise ValueError(f"{output} is 1 in every row")
        if not self.outputs and not self.total:
            raise ValueError("a call without outputs")
        if self.total and not self.gradients:
            raise ValueError("a total without gradients")
        if any(len(set(named)) != len(named) for named in (self.outputs, self.total)):
            raise ValueError("an output is named twice")
        if unknown := [name for name in self.gradients if name not in PRODUCTS]:
            raise ValueError(f"{unknown[0]!r} has no gradient: only {', '.join(PRODUCTS)}")
        trained = self.total or (self.rows if self.gradients else ())
        for output in trained:
            if isinstance(output, str) and output not in (*TRAINED, *self.detached):
                raise ValueError(f"{output} has no gradient")
        if self.detached and (self.total or not self.gradients):
            raise ValueError("outputs are detached where others have a gradient in backward")
        if self.detached != tuple(o for o in self.rows if o in self.detached):
            raise ValueError(f"detached outputs must be rows in their order, got {self.detached}")
        if self.memory_mb < 0:
            raise ValueError(f"memory_mb must not be negative, got {self.memory_mb}")
        if self.gradients != tuple(name for name in PRODUCTS if name in self.gradients):
            raise ValueError(f"gradients must be named once and in order, got {self.gradients}")
        narrow = tuple(name for name in PRODUCTS[:2] if name in self.gradients)
        if self.unrounded != tuple(name for name in narrow if name in self.unrounded):
            raise ValueError(f"gradients of {narrow} may be unrounded, got {self.unrounded}")
        if self.accumulate not in ("auto", "float32"):
            raise ValueError(f"accumulate must be auto or float32, got {self.accumulate!r}")

    @functools.cached_property
    def rows(self) -> tuple[Output, ...]:
        """The outputs that are floats."""
        return tuple(o for o in self.outputs if not is_index(o))

    @functools.cached_property
    def indices(self) -> tuple[Output, ...]:
        """The outputs that are class indices."""
        return tuple(o for o in self.outputs if is_index(o))

    @functools.cached_property
    def masks_logits(self) -> bool:
        """Tells if logits are masked with -inf. Such a logit has no gradient, also in a row whose
        logits are all masked, where the softmax is nan."""
        return self.transform.has(sympy.S.NegativeInfinity)

    @property
    def reads_max(self) -> bool:
        """Tells if an output is a row's largest logit."""
        return "max" in self.outputs

    @functools.cached_property
    def rounds_logits(self) -> bool:
        """Tells if logits are rounded to the operands' dtype, so that the same ones are equal as in
        eager."""
        return self.reads_max or bool(self.indices)

    @functools.cached_property
    def slope_moments(self) -> tuple[Moment, ...]:
        """The moments that the gradients read, in forward or backward."""
        trained = self.total or (o for o in self.outputs if o not in self.detached)
        return slope_moments(trained) if self.gradients else ()

    @property
    def saved(self) -> tuple[Moment, ...]:
        """The moments that backward reads."""
        return () if self.total else self.slope_moments

    @functools.cached_property
    def of_backward(self) -> Reductions:
        """The reductions of backward: the outputs that have a gradient."""
        if not self.detached:
            return self
        trained = tuple(o for o in self.rows if o not in self.detached)
        indices: tuple[Output, ...] = ("argmax",) if self.rounds_logits else ()  # as in forward
        return dataclasses.replace(self, outputs=(*trained, *indices), detached=())

    @functools.cached_property
    def raw_moments(self) -> tuple[Moment, ...]:
        """The :func:`raw_moments` of all outputs."""
        return raw_moments((*self.outputs, *self.total))

    @property
    def reads_softmax(self) -> bool:
        """Tells if an output reads the softmax. Otherwise there is no lse."""
        return bool(self.raw_moments)

    @property
    def returns_lse(self) -> bool:
        """Tells if a call returns the lse of each row, which backward reads."""
        return self.reads_softmax and not self.total

    @functools.cached_property
    def reads_picks(self) -> bool:
        """Tells if an output is of picks."""
        return not set(OF_PICKS).isdisjoint((*self.outputs, *self.total))

    @functools.cached_property
    def given_positions(self) -> tuple[int, ...]:
        """The positions of the given values that moments and the transform read."""
        return tuple(sorted({*self.weight_positions, *expression.given_in(self.transform)}))

    @functools.cached_property
    def weight_positions(self) -> tuple[int, ...]:
        """The positions of the weights of moments."""
        moments = (o for o in (*self.outputs, *self.total) if isinstance(o, Moment))
        return tuple(sorted({m.weight for m in moments if m.weight is not None}))

    def text(self) -> str:
        """One line; fields at their defaults are left out."""
        fields = {
            "outputs": ";".join(map(str, self.outputs)),
            "transform": "" if self.transform == Z else expression.text(self.transform),
            "gradients": ",".join(self.gradients),
            "total": ";".join(map(str, self.total)),
            "memory_mb": self.memory_mb or "",
            "detached": ";".join(map(str, self.detached)),
            "unrounded": ",".join(self.unrounded),
            "accumulate": self.accumulate if self.accumulate != "auto" else "",
        }
        return " ".join(f"{k}={text}" for k, text in fields.items() if text)
