"""Reductions of a row of logits over its classes, in one normal form.

Let z be a row's logits after a pointwise transform, M their maximum, lse their log-sum-exp, l = z -
lse their log-softmax and p = exp(l). What programs take from a row is arithmetic on a few outputs:

    lse                the log-sum-exp
    pick, at           l and z at a given class c
    moment(a,b,w)      sum_j w_j exp(a l_j) l_j**b, for 0 <= a, b <= 2 and weights w: ones, a vector
                       of classes [V], or values [N, V]
    sum(f)             sum_j f(z_j, l_j, ...), for a function of one logit and of the row's picks
    max, amax, argmax  the largest logit, and its class
    top(k), argtop(k)  the k largest logits, and their classes
    peak               the largest l

The entropy is -moment(1,1), a sum of p**2 is moment(2,0), an expectation of u is moment(1,0,u), and
a loss with soft targets q is -moment(0,1,q). The output of a row and its gradient with respect to
the logits, for an incoming gradient of 1, are

    lse                 M + log S                         p_j
    pick, peak          (z_c - M) - log S, -log S         1[j = c] - p_j
    moment              see :func:`normalised`            psi_j - p_j sigma
    sum(f)              sum_j f_j                         df_j/dz + df_j/dl - p_j sum_k df_k/dl

with S = sum_j exp(z_j - M), psi_j = w_j exp(a l_j) (a l_j**b + b l_j**(b-1)) and sigma = sum_j
psi_j = a moment(a,b,w) + b moment(a,b-1,w). One pass over the classes accumulates the raw sums

    S_ab[w] = sum_j w_j exp(a (z_j - M)) (z_j - M)**b

under the maximum so far. A new maximum changes them by :func:`shifted`, so that blocks of a row,
tiles, chunks and vocabulary shards are joined by the same few lines. A function that reads the
log-softmax, or a pick, takes a second pass over the logits, whose pick gets the gradient sum_k
df_k/dpick; the sums of derivatives are sums of functions too::

    >>> import torch
    >>> z = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)
    >>> entropy = Moment(1, 1)
    >>> sums = {m: float(m.term(z - 3).sum()) for m in raw([entropy])}
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

from fxpass.spec import expression
from fxpass.spec.expression import Z, operands
from fxpass.spec.outputs import (
    HIGHEST_POWER,
    IN_TOTAL,
    INDICES,
    NAMED,
    OF_LARGEST,
    OF_PICKS,
    PRODUCTS,
    ROWS,
    TOTAL,
    Moment,
    Output,
    Sum,
    Top,
    is_index,
    output_of,
    position_of,
)

REVISION = "r5"  # as spec.REVISION, of the operator fxpass::class_reductions


def raw(outputs: Collection[Output]) -> tuple[Moment, ...]:
    """The moments that one pass accumulates for these outputs, ``TOTAL`` first; none if all are
    logits and sums that do not read the softmax. A largest logit takes ``TOTAL`` as a sign of nan,
    which maxima lose on GPUs."""
    if all(not o.reads_softmax if isinstance(o, Sum) else o == "at" for o in outputs):
        return ()
    wanted = [m for m in outputs if isinstance(m, Moment)]
    lower = (dataclasses.replace(m, b=b) for m in wanted for b in range(m.b + 1))
    return tuple(dict.fromkeys((TOTAL, *lower)))


def normalised(moment: Moment, sums: Mapping[Moment, Any], log_total: Any, inverse: Any) -> Any:
    """The moment of l = y - log_total, from the raw sums of y = z - M; ``inverse``: 1 / S, which is
    more accurate than the exponential of a rounded logarithm."""
    if moment == TOTAL:
        return sums[TOTAL] * inverse
    return shifted(moment, sums, -log_total, inverse)


def shifted(moment: Moment, sums: Mapping[Moment, Any], shift: Any, decay: Any) -> Any:
    """The raw sum under a new maximum, where ``shift`` is the old maximum minus the new one, and
    ``decay`` its exponential: ``decay**a sum_j w_j exp(a y_j) (y_j + shift)**b``."""
    total = sums[moment]
    for k in range(moment.b):
        lower = sums[dataclasses.replace(moment, b=k)]
        total = total + math.comb(moment.b, k) * shift ** (moment.b - k) * lower
    return total * decay**moment.a if moment.a else total


def for_slope(moment: Moment) -> tuple[tuple[int, Moment], ...]:
    """sigma as factors and moments, which are those of the terms of psi too."""
    terms = (moment.a, moment), (moment.b, dataclasses.replace(moment, b=moment.b - 1))
    return tuple((factor, term) for factor, term in terms if factor)


def for_slopes(outputs: Iterable[Output]) -> tuple[Moment | Sum, ...]:
    """The sums that the gradients of these outputs read."""
    read: list[Moment | Sum] = []
    for output in outputs:
        if isinstance(output, Moment):
            read += [moment for _, moment in for_slope(output) if moment != TOTAL]
        elif isinstance(output, Sum):
            read += output.of_row.values()
    return tuple(dict.fromkeys(read))


# ---------------------------------------------------------------- what one call computes


@dataclass(frozen=True)
class Reductions:
    """What one call of ``fxpass::class_reductions`` computes, apart from its tensors.

    Attributes:
        outputs: the outputs, each once.
        transform: the logit that is reduced, as an expression of the linear's output ``z`` and of
            given values and picks (:mod:`fxpass.spec.expression`). What sums read as z is this
            logit.
        gradients: the operands that need a gradient, of ``x``, ``weight``, ``bias``, ``scale`` and
            ``given0``, ``given1``, ..., in this order.
        total: the outputs of which the call also returns one weighted sum over all rows, whose
            weights are known before (a mean, a mask, a policy's advantages). Forward computes its
            gradients, of x, weight and bias; the other outputs then have none.
        memory_mb: scratch budget in MiB; 0 leaves it to the plan.
        accumulate: ``float32``: chunks add up the weight's gradient in f32; ``auto``: few chunks
            of bf16 add it up in bf16 (:mod:`fxpass.plan.plan`).
        shard: whether the classes are a vocabulary shard. The pick V is none of them then: its
            logit is 0, without a gradient, and no class has the hit.
        detached: those of ``rows`` that have no gradient where others have, such as metrics under
            ``no_grad``. Backward does not read what only they read.
        unrounded: those of ``x`` and ``weight`` whose gradients are returned in the dtype of the
            sums: the program cast these operands from it, and their gradients bypass the cast.

    The text form is the operator's last argument::

        >>> Reductions(("lse", Moment(1, 1)), gradients=("x",)).text()
        'r5 outputs=lse;moment(1,1) gradients=x'
        >>> Reductions.parse('r5 outputs=pick').outputs
        ('pick',)
    """

    outputs: tuple[Output, ...]
    transform: Expr = Z
    gradients: tuple[str, ...] = ()
    total: tuple[Output, ...] = ()
    memory_mb: int = 0
    shard: bool = False
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
        if Sum(self.transform).late:
            raise ValueError(f"a logit is no function of its row: {self.transform}")
        if not self.outputs and not self.total:
            raise ValueError("a call without outputs")
        if any(len(set(named)) != len(named) for named in (self.outputs, self.total)):
            raise ValueError("an output is named twice")
        for output in self.total:
            if isinstance(output, Top) or (isinstance(output, str) and output not in IN_TOTAL):
                raise ValueError(f"{output} cannot be added up over the rows")
        if self.total and not set(self.gradients) <= set(PRODUCTS):
            raise ValueError(f"a total has gradients of {', '.join(PRODUCTS)}")
        if self.detached and (self.total or not self.gradients):
            raise ValueError("outputs are detached where others have a gradient in backward")
        if self.detached != tuple(o for o in self.rows if o in self.detached):
            raise ValueError(f"detached outputs must be rows in their order, got {self.detached}")
        if self.memory_mb < 0:
            raise ValueError(f"memory_mb must not be negative, got {self.memory_mb}")
        if self.gradients != tuple(sorted(set(self.gradients), key=position_of)):
            raise ValueError(f"gradients must be named once and in order, got {self.gradients}")
        trained = tuple(name for name in PRODUCTS[:2] if name in self.gradients)
        if self.unrounded != tuple(name for name in trained if name in self.unrounded):
            raise ValueError(f"gradients of {trained} may be unrounded, got {self.unrounded}")
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
    def masks(self) -> bool:
        """Whether logits are masked with -inf. Such a logit has no gradient, whatever the softmax
        of its row is: it is nan if all logits are masked."""
        return self.transform.has(sympy.S.NegativeInfinity)

    @functools.cached_property
    def of_largest(self) -> bool:
        """Whether gradients need a row's largest logit."""
        return not set(OF_LARGEST).isdisjoint(self.outputs)

    @functools.cached_property
    def ranks(self) -> bool:
        """Whether it matters which logits are equal in the operands' dtype, as in eager."""
        return self.of_largest or bool(self.indices)

    @functools.cached_property
    def for_slopes(self) -> tuple[Moment | Sum, ...]:
        """The sums that the gradients read."""
        trained = self.total or (o for o in self.outputs if o not in self.detached)
        return for_slopes(trained) if self.gradients else ()

    @property
    def saved(self) -> tuple[Moment | Sum, ...]:
        """Those of them that backward reads."""
        return () if self.total else self.for_slopes

    @functools.cached_property
    def of_backward(self) -> Reductions:
        """What backward computes: the outputs that have a gradient."""
        if not self.detached:
            return self
        trained = tuple(o for o in self.rows if o not in self.detached)
        ranks: tuple[Output, ...] = ("argmax",) * self.ranks  # logits are rounded as in forward
        return dataclasses.replace(self, outputs=(*trained, *ranks), detached=())

    @functools.cached_property
    def sums(self) -> tuple[Sum, ...]:
        """The sums of functions that forward computes."""
        read = (*self.outputs, *self.total, *self.for_slopes)
        return tuple(dict.fromkeys(o for o in read if isinstance(o, Sum)))

    @functools.cached_property
    def late(self) -> tuple[Sum, ...]:
        """Those of them that take a second pass, over all logits of a row."""
        return tuple(o for o in self.sums if o.late)

    @functools.cached_property
    def raw(self) -> tuple[Moment, ...]:
        """The moments that one pass accumulates, as :func:`raw`."""
        return raw((*self.outputs, *self.total))

    @property
    def softmax(self) -> bool:
        """Whether an output reads the softmax. If none does, there is no lse."""
        return bool(self.raw)

    @functools.cached_property
    def operands(self) -> tuple[tuple[str, int], ...]:
        """What the transform and the sums read, as :func:`fxpass.spec.expression.operands`."""
        read = (operands(e) for e in (self.transform, *(o.function for o in self.sums)))
        return tuple(sorted({one for each in read for one in each}))

    @functools.cached_property
    def picked(self) -> bool:
        """Whether outputs or expressions read the picks."""
        return bool(self.least_picks) or not set(OF_PICKS).isdisjoint((*self.outputs, *self.total))

    @functools.cached_property
    def least_picks(self) -> int:
        """The picks of a row that expressions read."""
        return max((i + 1 for kind, i in self.operands if kind != "given"), default=0)

    @functools.cached_property
    def least_given(self) -> int:
        """The given values that weights and expressions read."""
        read = (i for kind, i in self.operands if kind == "given")
        return max((i + 1 for i in (*self.weights, *read)), default=0)

    @functools.cached_property
    def results(self) -> tuple[str, ...]:
        """The names of the tensors that the operator returns, in its order: at least two, since
        code of Inductor's cpp_wrapper reads a list of one tensor as a tensor, and crashes."""
        of_rows = {"rows": self.rows, "indices": self.indices, "lse": self.softmax}
        of_rows |= {"rest": self.softmax, "saved": self.saved}
        if self.total:
            of_rows = {k: of_rows[k] for k in ("rows", "indices")} | {"total": True}
        found = tuple(name for name, present in of_rows.items() if present)
        found = (*found, *self.gradients) if self.total else found
        return found if len(found) > 1 else (*found, "saved")

    def named(self, results: Iterable[Any]) -> dict[str, Any]:
        """What the operator returns, by name."""
        return dict(zip(self.results, results, strict=True))

    @functools.cached_property
    def weights(self) -> tuple[int, ...]:
        """The positions of the weights of moments."""
        moments = (o for o in (*self.outputs, *self.total) if isinstance(o, Moment))
        return tuple(sorted({m.weight for m in moments if m.weight is not None}))

    @functools.cached_property
    def top(self) -> tuple[Top, ...]:
        """The largest logits that are outputs."""
        return tuple(o for o in self.outputs if isinstance(o, Top))

    @functools.cached_property
    def whole_rows(self) -> bool:
        """Whether an output needs all logits of a row at once."""
        return bool(self.late or self.top)

    @functools.cached_property
    def in_slices(self) -> bool:
        """Whether backward may compute the gradient of some of the classes at a time: it needs the
        lse and sums of a row, which forward has saved, but no logit of another class."""
        read = {kind for output in self.late for kind, _ in operands(output.function)}
        return not self.of_largest and read.isdisjoint(OF_PICKS)

    @property
    def trains_weights(self) -> bool:
        """Whether weights of moments, or operands of the transform, need a gradient."""
        return any(name not in NAMED for name in self.gradients)

    def text(self) -> str:
        """One line; fields at their defaults are left out."""
        fields = {
            "outputs": ";".join(map(str, self.outputs)),
            "transform": "" if self.transform == Z else expression.text(self.transform),
            "gradients": ",".join(self.gradients),
            "total": ";".join(map(str, self.total)),
            "memory_mb": self.memory_mb or "",
            "shard": "1" if self.shard else "",
            "detached": ";".join(map(str, self.detached)),
            "unrounded": ",".join(self.unrounded),
            "accumulate": self.accumulate if self.accumulate != "auto" else "",
        }
        return " ".join([REVISION, *(f"{k}={text}" for k, text in fields.items() if text)])

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Reductions:
        """The record of a text form; ``ValueError`` for anything that :meth:`text` cannot write."""
        revision, *words = text.split(" ")
        if revision != REVISION:
            raise ValueError(
                f"this graph was compiled by another version of fxpass ({revision!r}, this is "
                f"{REVISION!r}): clear the compile cache"
            )
        try:
            found = dict(word.split("=", 1) for word in words)
            outputs, total, detached = (
                tuple(map(output_of, filter(None, found.get(name, "").split(";"))))
                for name in ("outputs", "total", "detached")
            )
            transform = expression.parse(found.get("transform", "z"))
            gradients, unrounded = (
                tuple(filter(None, found.get(name, "").split(",")))
                for name in ("gradients", "unrounded")
            )
            memory_mb, shard = int(found.get("memory_mb", "0")), found.get("shard") == "1"
            of_rows = outputs, transform, gradients, total, memory_mb, shard, detached
            spec = Reductions(*of_rows, unrounded, found.get("accumulate", "auto"))
        except ValueError as error:
            raise ValueError(f"not reductions: {text!r}") from error
        if spec.text() != text:  # one computation, one text, one cache key
            raise ValueError(f"not reductions: {text!r} (written {spec.text()!r})")
        return spec
