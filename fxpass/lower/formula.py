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
from fxpass.lower.reader import read_graph
from fxpass.lower.reading import Reading, aten_name, sizes_of
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
from fxpass.lower.slopes import incoming_gradients
from fxpass.lower.tables import Tables
from fxpass.region.run import values_of
from fxpass.region.text import results_of


@dataclass(frozen=True)
class Formula:
    """Reductions of one transform of a head's logits, and the gradient of the logits.

    Attributes:
        reading: of the function.
        base: the logits that are reduced.
        transform: as in a spec, whose given values are the operands of ``given``.
        biases: vectors that are added to the head's bias: their symbols and factors.
        given: the symbols of the operands of the transform and of moments.
        outputs: the outputs that results or incoming gradients read, by their names in a spec and
            in its order: the symbol, None for picks.
        picks: the index tensors of ``pick`` and ``at``.
        incoming: the incoming gradients as expressions of rows, by the outputs' names and by the
            picks' index tensors (None for other outputs).
        gradient: the number of the result that is the gradient of the logits, or None.
        columns: the numbers of the results that are the gradient's sums over the rows.
        results: the nodes that the function returns.
    """

    reading: Reading
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
    def picked_outputs(self) -> dict[Symbol, Picked]:
        """The outputs at the formula's picks by their symbols."""
        outputs = self.reading.tables.outputs.items()
        of_base = {symbol: o for symbol, (base, o) in outputs if base is self.base}
        return {s: o for s, o in of_base.items() if isinstance(o, Picked) and o.index in self.picks}

    @property
    def gradients_in_forward(self) -> bool:
        """Tells if no incoming gradient reads an output, so that forward has the gradients."""
        exprs = [e for of_output in self.incoming.values() for e in of_output.values()]
        return not any(_read_outputs(self.reading, exprs))


def formula_of(graph: Graph) -> Formula:
    """The formula of a function of rows.

    Raises:
        Unknown: the function has no formula.
    """
    values = values_of(graph)
    for node, value in values.results.items():
        node.meta["val"] = value
    places = graph.find_nodes(op="placeholder")
    results = tuple(results_of(graph))
    reading = read_graph(graph)
    tables = reading.tables
    gradients = [i for i, n in enumerate(results) if n in reading.classes]
    columns = tuple(i for i, n in enumerate(results) if n in reading.columns)
    exprs = {reading.classes[results[i]] for i in gradients}
    exprs |= {reading.columns[results[i]] for i in columns}
    if len(gradients) > 1 or len(exprs) > 1:
        raise Unknown("returns several tensors with classes")
    ends = [n for i, n in enumerate(results) if i not in (*gradients, *columns)]
    for node in (frontier := _frontier(reading, ends)):  # exp(lse - row) may be all that is finite
        whole = sympy.powsimp(resolved(tables, reading.rows[node].expr), combine="exp")
        reading.rows[node] = replace(reading.rows[node], expr=whole)
    rows = {node: reading.rows[node].expr for node in frontier}
    _check_sizes(reading, places[0], (*ends, *rows))
    incoming: dict[OfBase, Expr] = {}
    base = _base(tables, rows.values())
    if exprs:
        if base is None:
            (base,) = tables.bases[:1] or [tables.base_with(Z, sympy.Integer(1))]
        incoming = incoming_gradients(tables, base, exprs.pop(), sizes_of(places[0])[1])
        if not incoming:
            raise Unknown("has no gradient")
        # rows that a mask leaves out are 0, also if the masked value is infinite
        incoming = {o: expression.masked(resolved(tables, e)) for o, e in incoming.items()}
    if base is None:
        raise Unknown("reduces no logits")
    symbols = sorted(set(_read_outputs(reading, [*rows.values(), *incoming.values()])), key=str)
    if any(tables.outputs[s].base is not base for s in symbols):
        raise Unknown("reduces the logits of several softmaxes")
    _check_base(reading, base)
    return _formula(reading, base, symbols, incoming, gradients, columns, results)


def _formula(
    reading: Reading,
    base: Base,
    symbols: list[Symbol],
    incoming: dict[OfBase, Expr],
    gradients: list[int],
    columns: tuple[int, ...],
    results: tuple[Node, ...],
) -> Formula:
    tables = reading.tables
    transform, biases = _without_biases(base.transform)
    outputs = [tables.outputs[s].output for s in symbols]
    both = [*outputs, *incoming]
    weights = (o.weight for o in both if isinstance(o, Summed) and o.weight is not None)
    given = tuple(dict.fromkeys((*weights, *sorted(symbols_of(transform) - {Z}, key=str))))
    names = {symbol: expression.given(i) for i, symbol in enumerate(given)}
    positions = {symbol: i for i, symbol in enumerate(given)}
    of_gradient: dict[Output, dict[Node | None, Expr]] = {}
    for output, expr in incoming.items():
        index = output.index if isinstance(output, Picked) else None
        of_gradient.setdefault(_name(output, positions), {})[index] = expr
    if columns and not gradients and not incoming:
        raise Unknown("returns sums of no gradient")
    return Formula(
        reading=reading,
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
    bases = [base for base in tables.bases if any(tables.outputs[s].base is base for s in symbols)]
    if len(bases) > 1:
        raise Unknown(f"reduces the logits of {len(bases)} softmaxes")
    return bases[0] if bases else None


def _read_outputs(reading: Reading, exprs: Iterable[Any]) -> Iterable[Symbol]:
    """The symbols of outputs that expressions read, also through nodes."""
    tables = reading.tables
    seen = set[Any]()
    todo: list[Any] = [s for e in exprs for s in symbols_of(e)]
    while todo:
        item = todo.pop()  # a symbol or a node
        if item in seen:
            continue
        seen.add(item)
        if isinstance(item, Node):
            if item in reading.rows:
                todo += symbols_of(resolved(tables, reading.rows[item].expr))
            elif item in reading.opaque:
                todo += item.all_input_nodes
        elif item in tables.outputs:
            yield item
        elif isinstance(item, SpreadOperand):
            todo += symbols_of(tables.spread[item].value)
        elif item in tables.sums:
            todo.append(tables.sums[item])
        elif item in tables.nodes:
            todo.append(tables.nodes[item])
        elif item not in tables.chosen:
            raise Unknown(f"reads {item}")


def _frontier(reading: Reading, results: Iterable[Node]) -> list[Node]:
    """The nodes of rows that results, or nodes that stay in the graph, read."""
    frontier: dict[Node, None] = {}
    todo = list(results)
    seen = set(results)
    while todo:
        node = todo.pop()
        if node in reading.classes or node in reading.pairs:
            raise Unknown("returns logits")
        if node in reading.rows:
            frontier[node] = None
        elif node in reading.opaque:
            todo += [n for n in node.all_input_nodes if n not in seen]
            seen.update(node.all_input_nodes)
    return sorted(frontier)


def _check_sizes(reading: Reading, logits: Node, ends: Iterable[Node]) -> None:
    """``Unknown`` if a node that stays in the graph makes a tensor about as large as the logits."""
    classes = sizes_of(logits)[1]
    todo = [n for n in ends if n not in reading.rows]
    seen = set[Node]()
    while todo:
        node = todo.pop()
        if node in seen or node in reading.rows or node.op == "placeholder":
            continue
        seen.add(node)
        todo += node.all_input_nodes
        if not isinstance(node.meta["val"], torch.Tensor) or aten_name(node) in VIEWED:
            continue
        of_row = math.prod(s for s in sizes_of(node)[1:] if isinstance(s, int))
        if isinstance(classes, int) and of_row > 1 and of_row * 8 > classes:
            raise Unknown(f"{aten_name(node)} of rows is about as large as the logits")


# Functions whose result takes no memory.
VIEWED = ("expand", "view", "unsqueeze", "squeeze", "select", "slice", "permute", "t", "transpose")


def resolved(tables: Tables, expr: Any) -> Expr:
    """An expression of rows without a lse that has to cancel.

    Raises:
        Unknown: the lse does not cancel.
    """
    cancelling = tables.cancelling
    if not symbols_of(expr) & cancelling.keys():
        return expr
    found = sympy.expand(expr.xreplace(cancelling))
    if symbols_of(found) & {*cancelling.values()}:
        raise Unknown("loses the digits of small logits in a sum with their log-sum-exp")
    return found


def _check_base(reading: Reading, base: Base) -> None:
    """``Unknown`` if the logits of a base are computed from reductions."""
    nodes = reading.tables.nodes
    operands = symbols_of(base.logit) - {Z}
    if any(s not in nodes or nodes[s] in reading.opaque for s in operands):
        raise Unknown(f"reduces `{base.logit}`, which is known after a reduction only")


def _without_biases(transform: Any) -> tuple[Expr, tuple[tuple[Symbol, Expr], ...]]:
    """A transform without the vectors ``[V]`` that are added to its logit; and these, as biases."""
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
    """The symbols of outputs by their names in a spec, in its order; None for picks."""
    found: dict[Output, Symbol | None] = {}
    for symbol in symbols:
        output = tables.outputs[symbol].output
        found[_name(output, positions)] = None if isinstance(output, Picked) else symbol
    return {o: found[o] for o in sorted(found, key=lambda o: (is_index(o), str(o)))}


def _name(output: OfBase, positions: dict[Symbol, int]) -> Output:
    """The name of an output in a spec, by the positions of the symbols of ``given``."""
    if isinstance(output, Summed):
        weight = None if output.weight is None else positions[output.weight]
        return replace(output.moment, weight=weight)
    return output.name if isinstance(output, Picked) else output
