"""The normal form of a row function: reductions of one transform of its logits.

In: a canonical ATen graph. Out: a :class:`Normal`, from which a rewrite makes one call of
``fxpass::class_reductions``, and the nodes of rows that are computed of its outputs; or
:class:`fxpass.lower.records.Unknown`::

    %a = gather(_log_softmax(%z, 1), 1, %c);  %b = exp(%a - %old)
    ->  outputs pick at %c; %a = pick; %b stays
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy import Expr, Symbol
from torch.fx import Graph, Node

from fxpass.lower.reader import read
from fxpass.lower.reading import Reading, name_of, sizes_of
from fxpass.lower.records import Base, ClassOperand, OfBase, Picked, Summed, Unknown, symbols_of
from fxpass.lower.tables import Tables
from fxpass.region.text import results_of
from fxpass.spec import expression
from fxpass.spec.expression import Z
from fxpass.spec.outputs import Output, is_index


@dataclass(frozen=True)
class Normal:
    """Reductions of one transform of a head's logits.

    Attributes:
        graph: the row function.
        tables: what symbols stand for.
        base: the logits that are reduced.
        transform: as of a spec, whose operands are those of ``given``.
        biases: what is added to the head's bias: symbols of vectors, and their factors.
        given: the symbols of the operands of the transform and of moments.
        outputs: by their name in a spec, in its order; the symbol, None for those of picks.
        trained: those that a gradient reaches.
        picks: the index tensors of ``pick`` and ``at``.
        rows: the nodes that outputs are the rows of, as expressions.
        late: what is computed of them, and stays.
        results: of the graph.
    """

    graph: Graph
    tables: Tables
    base: Base
    transform: Expr
    biases: tuple[tuple[Symbol, Expr], ...]
    given: tuple[Symbol, ...]
    outputs: dict[Output, Symbol | None]
    trained: tuple[Output, ...]
    picks: tuple[Node, ...]
    rows: dict[Node, Expr]
    late: frozenset[Node]
    results: tuple[Node, ...]

    def is_attached(self, node: Node) -> bool:
        """Whether a gradient flows through a node."""
        return self.tables.attached[node]


def lower(
    graph: Graph, trained: Sequence[bool], reached: Sequence[bool] = (), large: bool = False
) -> Normal:
    """The normal form of a graph.

    Args:
        graph: a row function; its first input is the logits of its only head.
        trained: for each input whether it needs a gradient.
        reached: for each result whether a gradient may come from it; by default from all.
        large: whether an operand as large as the logits may be made of others.

    Raises:
        Unknown: it has none.
    """
    places = graph.find_nodes(op="placeholder")
    results = tuple(results_of(graph))
    ends = [n for n, some in zip(results, reached or [True] * len(results), strict=True) if some]
    found = read(graph, dict(zip(places, trained, strict=True)), ends, large)
    tables = found.tables
    rows = {node: _resolved(tables, found.rows[node].expr) for node in _frontier(found, results)}
    used = {node: _outputs(tables, expr) for node, expr in rows.items()}
    if not all(used.values()):
        raise Unknown("has rows that read no logits: they cancel")
    _check_sizes(found, places[0], (*results, *rows))
    symbols = sorted(set().union(*used.values()), key=str)
    bases = {id(tables.outputs[s][0]): tables.outputs[s][0] for s in symbols}
    if len(bases) != 1:
        raise Unknown(f"reduces the logits of {len(bases)} softmaxes")
    (base,) = bases.values()
    _check_known_before(found, base)
    attached = [n for n in rows if tables.attached[n] and n in found.reached]
    of_trained = {s for n in attached for s in _outputs(tables, rows[n], through=False)}
    transform, biases = _without_biases(base.transform)
    outputs = [tables.outputs[s][1] for s in symbols]
    weights = (o.weight for o in outputs if isinstance(o, Summed) and o.weight is not None)
    given = tuple(dict.fromkeys((*weights, *sorted(symbols_of(transform) - {Z}, key=str))))
    names = {symbol: expression.given(i) for i, symbol in enumerate(given)}
    positions = {symbol: i for i, symbol in enumerate(given)}
    return Normal(
        graph=graph,
        tables=tables,
        base=base,
        transform=transform.xreplace(names),  # type: ignore[arg-type]
        biases=biases,
        given=given,
        outputs=_named(tables, symbols, positions),
        trained=tuple(_named(tables, sorted(of_trained, key=str), positions)),
        picks=tuple(dict.fromkeys(o.index for o in outputs if isinstance(o, Picked))),
        rows=rows,
        late=frozenset(found.late),
        results=results,
    )


def _frontier(found: Reading, results: Iterable[Node]) -> list[Node]:
    """The nodes of rows that results, or what stays in the graph, read."""
    frontier: dict[Node, None] = {}
    todo, seen = list(results), set(results)
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
    todo, seen = [n for n in ends if n not in found.rows], set[Node]()
    while todo:
        node = todo.pop()
        if node in seen or node in found.rows or node.op == "placeholder":
            continue
        seen.add(node)
        todo += node.all_input_nodes
        tensor, classes = isinstance(node.meta["val"], torch.Tensor), sizes_of(logits)[1]
        of_row = math.prod(s for s in sizes_of(node)[1:] if isinstance(s, int)) if tensor else 0
        large = isinstance(classes, int) and of_row > 1 and of_row * 8 > classes
        if large and name_of(node) not in VIEWED:
            raise Unknown(f"{name_of(node)} of rows is about as large as the logits")


# Functions whose result takes no memory.
VIEWED = ("expand", "view", "unsqueeze", "squeeze", "select", "slice", "permute", "t", "transpose")


def _resolved(tables: Tables, expr: Any) -> Expr:
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


def _outputs(tables: Tables, expr: Any, through: bool = True) -> set[Symbol]:
    """The outputs that an expression reads; ``through``: also without gradients."""
    found: set[Symbol] = set()
    for symbol in symbols_of(expr):
        if symbol in tables.outputs:
            found.add(symbol)
        elif symbol in tables.cut:
            found |= _outputs(tables, _resolved(tables, tables.cut[symbol])) if through else set()
        elif symbol not in tables.nodes and symbol not in tables.chosen:
            raise Unknown(f"reads {symbol}, of which equal classes have a share each")
    return found


def _check_known_before(found: Reading, base: Base) -> None:
    """``Unknown`` if the logits of a base are computed from reductions."""
    tables = found.tables
    if symbols_of(base.logit) - {Z} - tables.nodes.keys():
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
        a, b = output.moment.a, output.moment.b
        return type(output.moment)(a, b, positions[output.weight]), False
    if isinstance(output, Picked):
        return "at" if output.logit else "pick", True
    return output, False
