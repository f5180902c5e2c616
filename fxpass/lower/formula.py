"""The formula of a function of rows: reductions of one transform of its logits, and their gradient.

In: a function of rows, whose first input is the logits of its only head. Out: a :class:`Formula`,
from which :mod:`fxpass.op.formula` runs it; or :class:`fxpass.lower.records.Unknown`::

    %log = _log_softmax(%z, 1);  %a = gather(%log, 1, %c);  return %a, exp(%log) * %g - hot(%c) * %g
    ->  outputs pick at %c;  incoming gradients pick: -%g
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from sympy import Expr, Symbol
from torch.fx import Graph, Node

from fxpass.formula import expression
from fxpass.formula.expression import Z
from fxpass.formula.outputs import Output, is_index
from fxpass.lower.reader import read
from fxpass.lower.reading import Reading, name_of, sizes_of
from fxpass.lower.records import (
    Base,
    ClassOperand,
    OfBase,
    Picked,
    SpreadOperand,
    Summed,
    Unknown,
    symbols_of,
)
from fxpass.lower.slopes import coefficients
from fxpass.lower.tables import Tables
from fxpass.region.run import values_of
from fxpass.region.text import results_of


@dataclass(frozen=True)
class Formula:
    """Reductions of one transform of a head's logits, and the gradient of the logits.

    Attributes:
        found: what the nodes of the function are.
        base: the logits that are reduced.
        transform: as of a spec, whose operands are those of ``given``.
        biases: what is added to the head's bias: symbols of vectors, and their factors.
        given: the symbols of the operands of the transform and of moments.
        outputs: by their name in a spec, in its order; the symbol, None for those of picks. Those
            that results or incoming gradients read.
        picks: the index tensors of ``pick`` and ``at``.
        incoming: by the names of outputs, their incoming gradients as expressions of rows; of picks
            by their index tensors.
        gradient: the number of the result that is the gradient of the logits, or None.
        columns: the numbers of the results that are its sums over the rows.
        results: the nodes that the function returns.
    """

    found: Reading
    base: Base
    transform: Expr
    biases: tuple[tuple[Symbol, Expr], ...]
    given: tuple[Symbol, ...]
    outputs: dict[Output, Symbol | None]
    picks: tuple[Node, ...]
    incoming: dict[Output, dict[Node | None, Expr]]
    gradient: int | None
    columns: tuple[int, ...]
    results: tuple[Node, ...]

    @property
    def picked(self) -> list[tuple[Symbol, Node, Output]]:
        """The symbols of outputs at picks, their index tensors, and the outputs' names."""
        outputs = self.found.tables.outputs.items()
        of_base = [(s, o) for s, (base, o) in outputs if base is self.base]
        picks = [(s, o) for s, o in of_base if isinstance(o, Picked) and o.index in self.picks]
        return [(s, o.index, _name(o, {})[0]) for s, o in picks]

    @property
    def known(self) -> bool:
        """Whether the incoming gradients are known before the outputs are."""
        exprs = [e for of_output in self.incoming.values() for e in of_output.values()]
        return not any(_read_outputs(self.found, exprs))


def formula_of(graph: Graph) -> Formula:
    """The formula of a function of rows.

    Raises:
        Unknown: it has none.
    """
    values = values_of(graph)
    for node, value in values.results.items():
        node.meta["val"] = value
    places = graph.find_nodes(op="placeholder")
    results = tuple(results_of(graph))
    found = read(graph)
    tables = found.tables
    gradients = [i for i, n in enumerate(results) if n in found.classes]
    columns = tuple(i for i, n in enumerate(results) if n in found.columns)
    exprs = {found.classes[results[i]].expr for i in gradients}
    exprs |= {found.columns[results[i]].expr for i in columns}
    if len(gradients) > 1 or len(exprs) > 1:
        raise Unknown("returns several tensors with classes")
    ends = [n for i, n in enumerate(results) if i not in (*gradients, *columns)]
    for node in (frontier := _frontier(found, ends)):  # exp(lse - row) may be all that is finite
        whole = sympy.powsimp(resolved(tables, found.rows[node].expr), combine="exp")
        found.rows[node] = replace(found.rows[node], expr=whole)
    rows = {node: found.rows[node].expr for node in frontier}
    _check_sizes(found, places[0], (*ends, *rows))
    incoming: dict[OfBase, Expr] = {}
    base = _base(tables, rows.values())
    if exprs:
        if base is None:
            (base,) = tables.bases[:1] or [tables.base(Z, sympy.Integer(1))]
        incoming = coefficients(tables, base, exprs.pop(), sizes_of(places[0])[1])
        if not incoming:
            raise Unknown("has no gradient")
        # what a mask of rows leaves out is 0, also if it is infinite
        incoming = {o: expression.masked(resolved(tables, e)) for o, e in incoming.items()}
    if base is None:
        raise Unknown("reduces no logits")
    read_late = list(_read_outputs(found, [*rows.values(), *incoming.values()]))
    symbols = sorted(set(read_late), key=str)
    if any(tables.outputs[s][0] is not base for s in symbols):
        raise Unknown("reduces the logits of several softmaxes")
    _check_known_before(found, base)
    return _formula(found, base, symbols, incoming, gradients, columns, results)


def _formula(
    found: Reading,
    base: Base,
    symbols: list[Symbol],
    incoming: dict[OfBase, Expr],
    gradients: list[int],
    columns: tuple[int, ...],
    results: tuple[Node, ...],
) -> Formula:
    tables = found.tables
    transform, biases = _without_biases(base.transform)
    outputs = [tables.outputs[s][1] for s in symbols]
    both = [*outputs, *incoming]
    weights = (o.weight for o in both if isinstance(o, Summed) and o.weight is not None)
    given = tuple(dict.fromkeys((*weights, *sorted(symbols_of(transform) - {Z}, key=str))))
    names = {symbol: expression.given(i) for i, symbol in enumerate(given)}
    positions = {symbol: i for i, symbol in enumerate(given)}
    of_gradient: dict[Output, dict[Node | None, Expr]] = {}
    for output, expr in incoming.items():
        index = output.index if isinstance(output, Picked) else None
        of_gradient.setdefault(_name(output, positions)[0], {})[index] = expr
    if columns and not gradients and not incoming:
        raise Unknown("returns sums of no gradient")
    return Formula(
        found=found,
        base=base,
        transform=transform.xreplace(names),  # type: ignore[arg-type]
        biases=biases,
        given=given,
        outputs=_named(tables, symbols, positions),
        picks=tuple(dict.fromkeys(o.index for o in both if isinstance(o, Picked))),
        incoming={o: of_gradient[o] for o in sorted(of_gradient, key=str)},
        gradient=gradients[0] if gradients else None,
        columns=columns,
        results=results,
    )


def _base(tables: Tables, exprs: Iterable[Any]) -> Base | None:
    """The base of the outputs that rows read."""
    symbols = {s for e in exprs for s in symbols_of(e) if s in tables.outputs}
    bases = {id(tables.outputs[s][0]): tables.outputs[s][0] for s in symbols}
    if len(bases) > 1:
        raise Unknown(f"reduces the logits of {len(bases)} softmaxes")
    return next(iter(bases.values()), None)


def _read_outputs(found: Reading, exprs: Iterable[Any]) -> Iterable[Symbol]:
    """The symbols of outputs that expressions read, also through nodes."""
    tables = found.tables
    seen = set[Any]()
    todo: list[Any] = [s for e in exprs for s in symbols_of(e)]
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if isinstance(one, Node):
            if one in found.rows:
                todo += symbols_of(resolved(tables, found.rows[one].expr))
            elif one in found.late:
                todo += one.all_input_nodes
        elif one in tables.outputs:
            yield one
        elif isinstance(one, SpreadOperand):
            todo += symbols_of(tables.spread[one][1])
        elif one in tables.sums:
            todo.append(tables.sums[one])
        elif one in tables.nodes:
            todo.append(tables.nodes[one])
        elif one not in tables.chosen:
            raise Unknown(f"reads {one}")


def _frontier(found: Reading, results: Iterable[Node]) -> list[Node]:
    """The nodes of rows that results, or what stays in the graph, read."""
    frontier: dict[Node, None] = {}
    todo = list(results)
    seen = set(results)
    while todo:
        node = todo.pop()
        if node in found.classes or node in found.pairs:
            raise Unknown("returns logits")
        if node in found.rows:
            frontier[node] = None
        elif node in found.late:
            todo += [n for n in node.all_input_nodes if n not in seen]
            seen.update(node.all_input_nodes)
    return sorted(frontier)


def _check_sizes(found: Reading, logits: Node, ends: Iterable[Node]) -> None:
    """``Unknown`` if what stays in the graph makes a tensor about as large as the logits."""
    todo = [n for n in ends if n not in found.rows]
    seen = set[Node]()
    while todo:
        node = todo.pop()
        if node in seen or node in found.rows or node.op == "placeholder":
            continue
        seen.add(node)
        todo += node.all_input_nodes
        tensor = isinstance(node.meta["val"], torch.Tensor)
        classes = sizes_of(logits)[1]
        of_row = math.prod(s for s in sizes_of(node)[1:] if isinstance(s, int)) if tensor else 0
        large = isinstance(classes, int) and of_row > 1 and of_row * 8 > classes
        if large and name_of(node) not in VIEWED:
            raise Unknown(f"{name_of(node)} of rows is about as large as the logits")


# Functions whose result takes no memory.
VIEWED = ("expand", "view", "unsqueeze", "squeeze", "select", "slice", "permute", "t", "transpose")


def resolved(tables: Tables, expr: Any) -> Expr:
    """An expression of rows without a lse that has to cancel.

    Raises:
        Unknown: it does not cancel.
    """
    loose: Any = {base.loose: base.lse for base in tables.bases}
    if not symbols_of(expr) & loose.keys():
        return expr
    found = sympy.expand(expr.xreplace(loose))
    if symbols_of(found) & {*loose.values()}:
        raise Unknown("loses the digits of small logits in a sum with their log-sum-exp")
    return found


def _check_known_before(found: Reading, base: Base) -> None:
    """``Unknown`` if the logits of a base are computed from reductions."""
    tables = found.tables
    read = symbols_of(base.logit) - {Z}
    late = [s for s in read if s not in tables.nodes or tables.nodes[s] in found.late]
    if late:
        raise Unknown(f"reduces `{base.logit}`, which is known after a reduction only")


def _without_biases(transform: Any) -> tuple[Expr, tuple[tuple[Symbol, Expr], ...]]:
    """A transform of the logit plus vectors ``[V]``, without these, and they as biases."""
    symbols = symbols_of(transform)
    vectors = sorted((s for s in symbols if isinstance(s, ClassOperand)), key=str)
    factor = transform.diff(Z)
    factors = [transform.diff(v) / factor for v in vectors] if factor != 0 else []
    if not factors or not all(f.is_number for f in factors):
        return transform, ()
    rest = transform.subs(dict.fromkeys(vectors, 0))
    biased = Z + sum(v * f for v, f in zip(vectors, factors, strict=True))
    if sympy.expand(transform - rest.subs(Z, biased)) != 0:
        return transform, ()  # a mask has the derivative 0
    return rest, tuple(zip(vectors, factors, strict=True))


def _named(
    tables: Tables, symbols: Iterable[Symbol], positions: dict[Symbol, int]
) -> dict[Output, Symbol | None]:
    """Outputs by their names in a spec, in its order; None for those of picks."""
    found: dict[Output, Symbol | None] = {}
    for symbol in symbols:
        name, of_pick = _name(tables.outputs[symbol][1], positions)
        found[name] = None if of_pick else symbol
    return {o: found[o] for o in sorted(found, key=lambda o: (is_index(o), str(o)))}


def _name(output: OfBase, positions: dict[Symbol, int]) -> tuple[Output, bool]:
    if isinstance(output, Summed):
        if output.weight is None:
            return output.moment, False
        a = output.moment.a
        b = output.moment.b
        return type(output.moment)(a, b, positions[output.weight]), False
    if isinstance(output, Picked):
        return "at" if output.logit else "pick", True
    return output, False
