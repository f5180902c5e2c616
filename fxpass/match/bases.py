"""The logits of which a softmax is taken, and expressions in its log-softmax and log-sum-exp.

In: a tensor with classes. Out: its :class:`fxpass.match.classes.Base` and the shift of each row::

    2 * z + row  ->  the base with the transform 2 * z, and the shift row
    p * z        ->  exp(log_0) * (log_0 + lse_0)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import sympy
from sympy import Expr, Symbol
from torch.fx import Node

from fxpass.graph.nodes import NoMatch, needs_gradient
from fxpass.match.classes import Classes, Flow, has_classes, of_classes_alone
from fxpass.match.edits import symbols_of
from fxpass.match.outputs import Base
from fxpass.spec.expression import Z
from fxpass.spec.functions import FUNCTIONS, Where


def base_of(flow: Flow, node: Node, like: Classes) -> tuple[Base, Expr]:
    """The base of logits of which a softmax is taken, and the shift of each row that they have."""
    expr = sympy.expand(like.expr, deep=False) if like.expr.is_Add else like.expr
    shift, rest = split(expr)
    if rest == 0:
        raise NoMatch.at(node, "reads no logits: they cancel")
    for base in flow.bases:  # log_softmax(log_softmax(z)), or of z + lse
        if rest == base.log:
            return base, shift - base.lse
        if rest == base.logit and fits(flow, base, like):
            return base, shift
    classes = [s for s in symbols_of(rest) if has_classes(s)]
    scale, transform = rest.as_independent(*classes, as_Add=False)
    number = scale.as_coeff_Mul()[0]
    scale, transform = scale / number, number * transform
    check_given(flow, node, transform)
    reads = transform.has(Z) and of_classes_alone(transform, rows=True)
    if not reads or not scale.free_symbols <= _rows_of(flow, scale):
        raise NoMatch.at(node, f"of `{like.expr}` is not known")
    return flow.base(like, transform, scale), shift


def check_given(flow: Flow, node: Node, transform: Expr) -> None:
    """``NoMatch`` if a function of one logit reads reductions, or values of its own or of its row
    that are trained."""
    for symbol in sorted(symbols_of(transform) & flow.tensors.keys(), key=str):
        tensor = flow.tensors[symbol]
        # values [N, V] with gradients take as much memory as the logits
        if needs_gradient(tensor) and (symbol in flow.dims or symbol.name.startswith("row_")):
            reason = f"combines the logits with another tensor (%{tensor.name}, which needs a "
            raise NoMatch.at(node, f"{reason}gradient): `{transform}`")
    check_compared(flow, node, transform)


# Functions with a corner, or that are not defined everywhere.
_CORNERS = (Where, *(FUNCTIONS[n].symbolic for n in ("abs", "sign", "maximum", "minimum", "sqrt")))


def check_compared(flow: Flow, node: Node, expr: Expr) -> None:
    """``NoMatch`` if logits are compared with a tensor that the program computes from them: one of
    them may equal it there, and the call, which does not round its logits, would find them apart.
    """
    for function in sorted(expr.atoms(*_CORNERS), key=str):
        sides: Any = sympy.Tuple(*function.args[:2])  # the others are branches
        read = [flow.tensors[s] for s in sorted(symbols_of(sides) & flow.tensors.keys(), key=str)]
        own = next((n for n in read if flow.is_computed_from_logits(n)), None)
        if own is not None and has_classes(sides):
            raise NoMatch.at(node, f"compares logits with %{own.name}, which is computed from them")


def softmax_base_of(flow: Flow, node: Node, like: Classes) -> Base:
    """The base of logits of which a softmax is taken. It does not depend on a shift by reductions,
    but a shift by a tensor of rows is computed: a mask of them may absorb the logits.

    Raises:
        NoMatch: the shift has a gradient, which is 0 and not None.
    """
    base, shift = base_of(flow, node, like)
    for symbol in symbols_of(shift) & flow.tensors.keys():
        if needs_gradient(flow.tensors[symbol]):
            name = flow.tensors[symbol].name
            raise NoMatch.at(node, f"does not depend on %{name}, which needs a gradient")
    rows = symbols_of(shift) & flow.tensors.keys()
    terms = sympy.Add.make_args(sympy.expand(shift))
    added = sympy.Add(*(t for t in terms if not rows.isdisjoint(symbols_of(t))))
    if added == 0:
        return base
    if not symbols_of(added) <= flow.tensors.keys():
        raise NoMatch.at(node, f"of `{like.expr}` is not known")
    transform = base.logit + added
    check_given(flow, node, transform)
    return flow.base(like, transform, sympy.Integer(1))


def fits(flow: Flow, base: Base, like: Classes) -> bool:
    """Whether a tensor with classes has the rows of a base."""
    return flow.base(like, base.transform, base.scale) is base


def split(expr: Expr) -> tuple[Expr, Expr]:
    """The terms without classes and those with classes."""
    terms = sympy.Add.make_args(expr)
    rows = [t for t in terms if not has_classes(t)]
    return sympy.Add(*rows), sympy.Add(*(t for t in terms if has_classes(t)))


def _rows_of(flow: Flow, expr: Expr) -> set[Symbol]:
    return {s for s in symbols_of(expr) if s in flow.tensors and s.name.startswith("row_")}


def in_logs(flow: Flow, node: Node, like: Classes, expr: Expr) -> Expr:
    """An expression with the raw logits as log-softmax and lse of a base."""
    if not expr.has(Z):
        return expr
    bases = [base for base in flow.bases if fits(flow, base, like)]
    read = [base for base in bases if expr.has(base.log)]
    for some in (read, bases):
        replaced = [expr.subs(base.logit, base.log + base.lse) for base in some]
        if found := [one for one in replaced if not one.has(Z)]:
            return cast(Expr, min(found, key=sympy.count_ops))  # of a logit, not of a function of z
    for base in read:  # p * z, where p is the softmax of a multiple of z
        factor = base.logit / Z
        if factor.is_number:  # another one may be 0
            return expr.subs(Z, (base.log + base.lse) / factor)
    poly = sympy.expand(expr)
    if not read and (not poly.is_polynomial(Z) or sympy.Poly(poly, Z).degree() == 1):
        try:
            base, shift = base_of(flow, node, replace(like, expr=poly))
            return base.log + base.lse + shift
        except NoMatch:
            if not poly.is_polynomial(Z):
                raise
    if not poly.is_polynomial(Z):
        raise NoMatch.at(node, f"of `{expr}` is not known")
    base = flow.base(like, Z, sympy.Integer(1))
    return poly.subs(Z, base.log + base.lse)


def in_one_log(
    flow: Flow, node: Node, like: Classes, expr: Expr, grows: bool = False
) -> tuple[Base, Expr] | None:
    """A base, and an expression in its log-softmax and in rows: of a base that exists, or of one of
    this expression. None for another expression, and if it has to grow with the logits."""
    found = in_logs(flow, node, like, expr)
    logs = [base for base in flow.bases if found.has(base.log)]
    if len(logs) == 1 and fits(flow, logs[0], like):
        (base,) = logs
        rest = split(sympy.expand(found))[1] if grows else found
        factor, core = rest.as_coeff_Mul()
        alone = all(s == base.log for s in symbols_of(rest) if has_classes(s))
        if alone and (not grows or (factor > 0 and core in (base.log, sympy.exp(base.log)))):
            return base, found
    if not logs or any(expr.has(base.log) for base in flow.bases):
        return None
    base, shift = base_of(flow, node, replace(like, expr=expr))
    return base, base.log + base.lse + shift
