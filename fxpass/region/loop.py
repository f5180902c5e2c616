"""A loop over rows as text: a function of a chunk of rows, and which of its results are summed.

In: a text. Out: a ``Loop``, and the same text. The inputs of ``rows`` have rows first. The results
of ``sums`` are added up over the chunks, and those of ``merge`` merged by another operation
(:mod:`fxpass.region.merging`); others have rows first. Results have the dtype of the graph, but
those of ``wide`` the dtype in which they are added up or multiplied::

    >>> text = '''rows rows=0,1 sums=1 wide= memory_mb=0 compiled=1
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

import torch
from torch.fx import Graph

from fxpass.formula.dtypes import compute_dtype
from fxpass.region.merging import MERGES
from fxpass.region.run import values_of
from fxpass.region.text import Input, graph_of, is_on_ranks, lines_of, results_of

_HEAD = re.compile(
    r"rows rows=([0-9,]*) sums=([0-9,]*) wide=([0-9,]*) memory_mb=([0-9]+) compiled=([01])"
    r"( accumulate=float32)?( merge=([0-9]+:[a-z]+(?:,[0-9]+:[a-z]+)*))?"
)


@dataclass(frozen=True, eq=False)
class Loop:
    """The computation of ``fxpass::rows``.

    Attributes:
        rows: the inputs that have rows, in ascending order; others are the same for all rows.
        sums: the results that are added up over the chunks.
        graph: of a chunk of ``n`` rows.
        unrounded: the results that are returned in the dtype of sums: f32 for 16 bits.
        memory_mb: the user's budget in MiB; 0 is the default.
        compiled: whether Inductor compiles the function of rows; else it is interpreted.
        accumulate: as of :class:`fxpass.formula.reductions.Reductions`.
        merges: the results that are merged over the chunks, and how.
    """

    rows: tuple[int, ...]
    sums: tuple[int, ...]
    graph: Graph
    unrounded: tuple[int, ...] = ()
    memory_mb: int = 0
    compiled: bool = True
    accumulate: str = "auto"
    merges: tuple[tuple[int, str], ...] = ()

    def text(self) -> str:
        """The text that ``parse`` reads."""
        numbers = (",".join(map(str, some)) for some in (self.rows, self.sums, self.unrounded))
        head = "rows rows={} sums={} wide={}".format(*numbers)
        head += f" memory_mb={self.memory_mb} compiled={int(self.compiled)}"
        head += " accumulate=float32" if self.accumulate == "float32" else ""
        merges = ",".join(f"{i}:{name}" for i, name in self.merges)
        head += f" merge={merges}" if merges else ""
        return "\n".join([head, *lines_of(self.graph)])

    @staticmethod
    def parse(text: str) -> Loop:
        """Reads a text, of lines or with "; " between them; every call with the same text returns
        the same loop.

        Raises:
            ValueError: a line that is not understood, or an operation that is not allowed.
        """
        return _parse(text.replace("; ", "\n"))

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Dtypes and sizes of the inputs of a chunk."""
        return tuple(node.meta["input"] for node in self.graph.find_nodes(op="placeholder"))

    @cached_property
    def on_ranks(self) -> bool:
        """Is true if chunks have collectives, so that all ranks have to run the same rows."""
        return is_on_ranks(self.graph)

    @cached_property
    def results(self) -> tuple[Input, ...]:
        """Dtypes and sizes of the results of a chunk."""
        return tuple(map(values_of(self.graph).described, results_of(self.graph)))

    def dtype(self, i: int) -> torch.dtype:
        """The dtype in which a result leaves the loop."""
        dtype = self.results[i].dtype
        return compute_dtype(dtype) if i in self.unrounded else dtype


@lru_cache(maxsize=1024)
def _parse(text: str) -> Loop:
    head, *lines = text.split("\n")
    if not (match := _HEAD.fullmatch(head)):
        raise ValueError(f"{head[:200]!r} does not say which inputs have rows")
    rows, sums, unrounded = (tuple(int(i) for i in match[k].split(",") if i) for k in (1, 2, 3))
    named = [pair.split(":") for pair in (match[8] or "").split(",") if pair]
    merges = tuple((int(i), name) for i, name in named)
    loop = Loop(
        rows,
        sums,
        graph_of(lines),
        unrounded,
        memory_mb=int(match[4]),
        compiled=match[5] == "1",
        accumulate="float32" if match[6] else "auto",
        merges=merges,
    )
    count = len(results_of(loop.graph))
    for name, numbers, allowed in (
        ("rows", rows, range(len(loop.inputs))),
        ("sums", sums, range(count)),
        ("wide", unrounded, range(count)),
        ("merge", tuple(i for i, _ in merges), sorted({*range(count)} - {*sums})),
    ):
        if list(numbers) != sorted(set(numbers) & set(allowed)):
            raise ValueError(f"{name}={numbers} is not ascending or not of {list(allowed)}")
    if unknown := [name for _, name in merges if name not in MERGES]:
        raise ValueError(f"{unknown[0]} is none of the merges {', '.join(MERGES)}")
    if not rows:
        raise ValueError("no input has rows")
    return loop
