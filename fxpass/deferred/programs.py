"""Programs of deferred logits: recipes and functions of their logits, in one compiled graph.

In: results of calls. Out: their tensors. The graph goes through the same pass as any graph
(:mod:`fxpass.rows`), and autograd links it to hidden states, weight and operands::

    programs([CallResult(cross_entropy, 0)], trained=True, line="train.py:9 loss = ...")    # [loss]

A graph is compiled once for all numbers of rows, if the pass fuses it with symbolic sizes. A number
that differs from call to call is an input of the graph from the second value on.
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

from fxpass import messages
from fxpass.deferred.drawing import Drawing, Drawn
from fxpass.deferred.layouts import LOCK
from fxpass.deferred.records import CallResult
from fxpass.region.run import in_own_thread
from fxpass.rows.backend import Rewritten, RowsPass
from fxpass.rows.tags import Stop

MOST = 256  # families of programs
MOST_NUMBERS = 4  # of one family, if a number differs that cannot be an input
MOST_SIZES = 8  # of one graph that is compiled for fixed sizes

Compiled = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class _Program:
    """A compiled graph, and a guard on the sizes of its inputs."""

    compiled: Compiled
    symbols: Sequence[str]  # none if the sizes are fixed
    guard: Any  # the code of an expression of the symbols; or the fixed sizes

    def fits(self, sizes: Sequence[int]) -> bool:
        if not self.symbols:
            return self.guard == tuple(sizes)
        return bool(eval(self.guard, {}, dict(zip(self.symbols, sizes, strict=True))))


@dataclass
class _Family:
    """The programs of graphs that differ in numbers alone.

    Attributes:
        first: the numbers of the first graph.
        varying: the positions of the numbers that differ.
        takes_inputs: whether these numbers can be inputs of the graph.
        programs: by the fixed numbers: the programs, or the reason why there are none.
    """

    first: tuple[float, ...]
    varying: frozenset[int] = frozenset()
    takes_inputs: bool = True
    programs: dict[Any, list[_Program] | str] = field(default_factory=dict)

    def differing(self, numbers: tuple[float, ...]) -> frozenset[int]:
        """The positions of the numbers that are inputs now."""
        pairs = enumerate(zip(self.first, numbers, strict=True))
        self.varying |= {i for i, (a, b) in pairs if a != b}
        return self.varying if self.takes_inputs else frozenset()


class Programs:
    """Compiles functions of the logits of one compiled graph.

    Args:
        make: makes the pass, with the settings of the graph.
        least: the bytes of logits from which a loss is fused.
        tell: is called with each compiled graph and its rewrites.
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
        self._families: OrderedDict[Any, _Family] = OrderedDict()

    def __call__(self, wanted: Sequence[CallResult], trained: bool, line: str) -> list[Tensor]:
        """The results of calls.

        Args:
            wanted: the results of one call.
            trained: whether one of them has a gradient.
            line: the user's line, for reports of the graph.

        Raises:
            Stop: the pass leaves logits in the graph, or the graph cannot be compiled.
            StaleLogitsError: an input was changed.
        """
        with torch.set_grad_enabled(trained), torch._C._DisableAutocast():
            with LOCK:
                compiled, tensors = self._compiled_with_inputs(wanted, trained, line)
            return list(compiled(*tensors))

    def _compiled_with_inputs(
        self, wanted: Sequence[CallResult], trained: bool, line: str
    ) -> tuple[Compiled, Sequence[Tensor]]:
        drawing = Drawing(wanted, trained)
        family = self._families.setdefault(drawing.key, _Family(drawing.numbers))
        self._families.move_to_end(drawing.key)
        if len(self._families) > MOST:
            self._families.popitem(last=False)
        if varying := family.differing(drawing.numbers):
            with_inputs = Drawing(wanted, trained, varying)
            try:
                return self._compiled(with_inputs, family, line), with_inputs.tensors
            except Stop:
                family.takes_inputs = False
        return self._compiled(drawing, family, line), drawing.tensors

    def _compiled(self, drawing: Drawing, family: _Family, line: str) -> Compiled:
        numbers = drawing.fixed, drawing.key  # a number may be equal to a size, or not
        programs = family.programs.setdefault(numbers, [])
        if isinstance(programs, str):
            raise Stop(programs)
        for program in programs:
            if program.fits(drawing.sizes):
                return program.compiled
        if len(family.programs) > MOST_NUMBERS:
            raise Stop(messages.NUMBER_VARIES)
        if len(programs) >= MOST_SIZES:
            raise Stop(messages.SIZES_VARY)
        try:
            programs.append(in_own_thread(lambda: self._new_program(drawing, line)))
        except Stop as stop:
            family.programs[numbers] = str(stop)
            raise
        return programs[-1].compiled

    def _new_program(self, drawing: Drawing, line: str) -> _Program:
        """A program for any sizes; else one for the sizes of the drawing."""
        if drawing.sizes:
            try:
                drawn, compiled = self._compile(drawing, True, line)
                guard = compile(drawn.guard(), line, "eval")
                return _Program(compiled, drawn.symbols, guard)
            except Stop:
                pass
        _, compiled = self._compile(drawing, False, line)
        return _Program(compiled, (), tuple(drawing.sizes))

    def _compile(self, drawing: Drawing, varies: bool, line: str) -> tuple[Drawn, Compiled]:
        try:
            drawn = drawing.drawn(varies, line)
            context = TracingContext(drawn.mode)
            rows = self._make()
            with torch.set_grad_enabled(drawing.trained), tracing(context):
                compiled = rows.backend()(drawn.module, drawn.fakes)
        except Stop:
            raise
        except Exception as error:  # an unforeseen program runs on the logits
            text = " ".join(str(error).split())[:120]
            raise Stop(
                messages.NOT_COMPILED.format(error=type(error).__name__, text=text)
            ) from None
        if context.fw_metadata is not None:  # backward may run twice, and overwrites nothing
            context.fw_metadata.bw_donated_idxs = []
        rewrites = rows.made
        if why := next((str(no) for rewrite in rewrites for no in rewrite.declined), None):
            raise Stop(messages.NOT_FUSED_BECAUSE.format(why=why))
        if sum(len(rewrite.heads) for rewrite in rewrites) < len(drawing.runs):
            raise Stop(messages.NOT_FUSED)
        self._tell(drawn.module, rewrites)
        return drawn, compiled
