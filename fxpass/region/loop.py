"""A loop over rows as text: a function of a chunk of rows, and which of its results are summed.

In: a text. Out: a ``Loop``, and the same text again. The inputs of ``rows`` have rows first, and so
do the results that are not in ``sums``; those are added up over the chunks::

    >>> text = '''rows rows=0,1 sums=1
    ... %0 = input float32[n, 5]
    ... %1 = input float32[n]
    ... %2 = input float32[5]
    ... %3 = aten.mv.default(%0, %2)
    ... %4 = aten.sum.dim_IntList(%1, [0])
    ... return %3, %4'''
    >>> loop = Loop.parse(text)
    >>> loop.text() == text, [str(result) for result in loop.results]
    (True, ['float32[n]', 'float32[]'])
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch.fx import Graph

from fxpass.region.run import Values, apart
from fxpass.region.text import Input, graph_of, lines_of, results_of

_HEAD = re.compile(r"rows rows=([0-9,]*) sums=([0-9,]*)")


@dataclass(frozen=True, eq=False)
class Loop:
    """What ``fxpass::rows`` computes.

    Attributes:
        rows: the inputs that have rows, in ascending order; the others are the same for all rows.
        sums: the results that are added up over the chunks.
        graph: of a chunk of ``n`` rows.
    """

    rows: tuple[int, ...]
    sums: tuple[int, ...]
    graph: Graph

    def text(self) -> str:
        """The text that ``parse`` reads."""
        rows, sums = (",".join(map(str, numbers)) for numbers in (self.rows, self.sums))
        return "\n".join([f"rows rows={rows} sums={sums}", *lines_of(self.graph)])

    @staticmethod
    def parse(text: str) -> Loop:
        """Reads a text; every call with the same text returns the same loop.

        Raises:
            ValueError: a line that is not understood, or an operation that is not allowed.
        """
        return _parse(text)

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Dtypes and sizes of the inputs of a chunk."""
        return tuple(node.meta["input"] for node in self.graph.find_nodes(op="placeholder"))

    @cached_property
    def results(self) -> tuple[Input, ...]:
        """Dtypes and sizes of the results of a chunk."""
        values = apart(lambda: Values(self.graph))
        return tuple(map(values.described, results_of(self.graph)))


@lru_cache(maxsize=1024)
def _parse(text: str) -> Loop:
    head, *lines = text.split("\n")
    if not (match := _HEAD.fullmatch(head)):
        raise ValueError(f"{head[:200]!r} does not say which inputs have rows")
    rows, sums = (tuple(int(i) for i in found.split(",") if i) for found in match.groups())
    loop = Loop(rows, sums, graph_of(lines))
    for name, numbers, end in (
        ("rows", rows, len(loop.inputs)),
        ("sums", sums, len(results_of(loop.graph))),
    ):
        if list(numbers) != sorted({i for i in numbers if 0 <= i < end}):
            raise ValueError(f"{name}={numbers} is not ascending or not below {end}")
    if not rows:
        raise ValueError("no input has rows")
    return loop
