"""Programs of deferred logits: their recipe and what functions make of them, in one compiled graph.

In: what calls make. Out: the tensors; the graph has gone through the same pass as any other
(:mod:`fxpass.rows`), and is linked by autograd to hidden states, weight and operands::

    programs([Made(cross_entropy, 0)], trained=True, line="train.py:9 loss = ...")    [the loss]

A graph is compiled once for all numbers of rows, if the pass takes it so. A number that differs
from call to call is an input of the graph from the second one on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch.fx import GraphModule

from fxpass.deferred.drawing import Drawing, Drawn
from fxpass.deferred.layouts import LOCK
from fxpass.deferred.records import Made
from fxpass.region.run import apart
from fxpass.rows.backend import Rewritten, RowsPass
from fxpass.rows.tags import Stop

MOST = 256  # graphs that are known
MOST_NUMBERS = 4  # of one graph, where a number differs that cannot be an input
MOST_SIZES = 8  # of one graph that is compiled for some sizes alone

Compiled = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class _Program:
    """A compiled graph, and the sizes that it is for."""

    run: Compiled
    symbols: Sequence[str]
    guard: Any  # code of an expression; or sizes

    def takes(self, sizes: Sequence[int]) -> bool:
        if not self.symbols:
            return self.guard == tuple(sizes)
        return bool(eval(self.guard, {}, dict(zip(self.symbols, sizes, strict=True))))


@dataclass
class _Alike:
    """The programs of graphs that differ in numbers alone.

    Attributes:
        first: the numbers of the first of them.
        varying: the positions of those that differ.
        takes_inputs: whether these can be inputs of the graph.
        known: by the numbers that do not differ: the programs, or why there are none.
    """

    first: tuple[float, ...]
    varying: frozenset[int] = frozenset()
    takes_inputs: bool = True
    known: dict[Any, list[_Program] | str] = field(default_factory=dict)

    def differing(self, numbers: tuple[float, ...]) -> frozenset[int]:
        """The positions of the numbers that are inputs now."""
        pairs = enumerate(zip(self.first, numbers, strict=True))
        self.varying |= {i for i, (a, b) in pairs if a != b}
        return self.varying if self.takes_inputs else frozenset()


class Programs:
    """Compiles what is made of the logits of one compiled graph.

    Args:
        make: makes the pass, with the settings of the graph.
        least: the bytes of logits that are worth a program.
        tell: is told what became of a graph.
    """

    def __init__(
        self,
        make: Callable[[], RowsPass],
        least: float,
        tell: Callable[[GraphModule, Sequence[Rewritten]], None],
    ) -> None:
        self.least = least
        self._make = make
        self._tell = tell
        self._known: OrderedDict[Any, _Alike] = OrderedDict()

    def __call__(self, wanted: Sequence[Made], trained: bool, line: str) -> list[Tensor]:
        """The results of calls.

        Args:
            wanted: the results of one call.
            trained: whether one of them has a gradient.
            line: the user's, for what is said of the graph.

        Raises:
            Stop: the pass leaves logits in the graph, or it cannot be compiled.
            StaleLogitsError: something was changed.
        """
        with torch.set_grad_enabled(trained), torch._C._DisableAutocast():
            with LOCK:
                run, tensors = self._found(wanted, trained, line)
            return list(run(*tensors))

    def _found(
        self, wanted: Sequence[Made], trained: bool, line: str
    ) -> tuple[Compiled, Sequence[Tensor]]:
        drawing = Drawing(wanted, trained)
        alike = self._known.setdefault(drawing.alike, _Alike(drawing.numbers))
        self._known.move_to_end(drawing.alike)
        if len(self._known) > MOST:
            self._known.popitem(last=False)
        if varying := alike.differing(drawing.numbers):
            of_numbers = Drawing(wanted, trained, varying)
            try:
                return self._program(of_numbers, alike, line), of_numbers.tensors
            except Stop:
                alike.takes_inputs = False
        return self._program(drawing, alike, line), drawing.tensors

    def _program(self, drawing: Drawing, alike: _Alike, line: str) -> Compiled:
        numbers = drawing.fixed, drawing.alike  # a number may be equal to a size, or not
        known = alike.known.setdefault(numbers, [])
        if isinstance(known, str):
            raise Stop(known)
        for program in known:
            if program.takes(drawing.sizes):
                return program.run
        if len(alike.known) > MOST_NUMBERS:
            raise Stop("has a number that differs from call to call")
        if len(known) >= MOST_SIZES:
            raise Stop("has sizes that differ from call to call")
        try:
            known.append(apart(lambda: self._made(drawing, line)))
        except Stop as stop:
            alike.known[numbers] = str(stop)
            raise
        return known[-1].run

    def _made(self, drawing: Drawing, line: str) -> _Program:
        """A program for any sizes; for these alone, if there is none."""
        if drawing.sizes:
            try:
                drawn, run = self._compiled(drawing, True, line)
                guard = compile(drawn.guard(), line, "eval")
                return _Program(run, drawn.symbols, guard)
            except Stop:
                pass
        _, run = self._compiled(drawing, False, line)
        return _Program(run, (), tuple(drawing.sizes))

    def _compiled(self, drawing: Drawing, varies: bool, line: str) -> tuple[Drawn, Compiled]:
        try:
            drawn = drawing.drawn(varies, line)
            context = TracingContext(drawn.mode)
            rows = self._make()
            with torch.set_grad_enabled(drawing.trained), tracing(context):
                run = rows.backend()(drawn.module, drawn.fakes)
        except Stop:
            raise
        except Exception as error:  # an unforeseen program runs on the logits
            text = " ".join(str(error).split())[:120]
            raise Stop(f"is not compiled ({type(error).__name__}: {text})") from None
        if context.fw_metadata is not None:  # backward may run twice, and overwrites nothing
            context.fw_metadata.bw_donated_idxs = []
        made = rows.made
        if why := next((str(no) for one in made for no in one.declined), None):
            raise Stop(f"is not fused: {why}")
        if sum(len(one.heads) for one in made) < len(drawing.runs):
            raise Stop("is not fused")
        self._tell(drawn.module, made)
        return drawn, run
