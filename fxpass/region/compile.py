"""Functions of a chunk of rows, compiled by Inductor or interpreted.

In: a graph of a loop and a device. Out: a :class:`RowFunction`, which takes lists of real tensors::

    >>> lines = ["%0 = input float32[n, 3]", "%1 = aten.amax.default(%0, [1])", "return %1"]
    >>> graph = graph_of(lines)
    >>> function = RowFunction(graph, torch.device("cpu"), compiled=False)
    >>> function([torch.tensor([[1.0, 3.0, 2.0]], device="cpu")])
    [tensor([3.])]

A graph is compiled once in a process, at its first run or when ``compiled`` is read, for any number
of rows. Inductor's own cache has the code for other processes.
"""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch.fx.traceback import preserve_node_meta

from fxpass.formula.dtypes import LOW_PRECISION
from fxpass.region.run import Fakes, Interpreter, in_own_thread, values_of
from fxpass.region.steps import Step, steps_of
from fxpass.region.text import graph_of, is_on_ranks, results_of
from fxpass.region.trace import EQUAL, traced
from fxpass.releases.torch_2_12 import COMPARES_UNROUNDED

__all__ = ["RowFunction", "graph_of"]
log = logging.getLogger(__name__)

# The sizes for which Inductor chooses how to reduce; the code runs for others.
ROWS = 512
CLASSES = 32768
# Roundings are those of eager: of 16-bit values, and without fused multiply-adds on GPUs. The other
# options may have been set by callers of torch.compile, process-wide up to torch 2.11.
_CONFIG = {
    "emulate_precision_casts": True,
    "compile_threads": 1,  # processes of a pool do not outlive a fork
    "cpp_wrapper": False,
    "triton.cudagraphs": False,
    "post_grad_custom_pre_pass": None,
    "post_grad_custom_post_pass": None,
}
_KERNEL = re.compile(r"^(\w+) = async_compile\.", re.MULTILINE)  # in Inductor's source
_warned: set[str] = set()


class RowFunction:
    """A graph that runs on chunks of rows."""

    def __init__(self, graph: fx.Graph, device: torch.device, compiled: bool) -> None:
        self.device = device
        on_ranks = is_on_ranks(graph)  # collectives run in the order of the text on each rank
        self.steps = _steps(graph, device) if on_ranks and compiled else []
        compiled = compiled and not on_ranks
        self.compilable = compiled and _is_available(device) and not _misrounds(graph, device)
        self.inputs = [node.meta["input"] for node in graph.find_nodes(op="placeholder")]
        self.interpreter = Interpreter(graph, device)
        self.tried = False
        self._code: _Compiled | None = None

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.steps:
            return self._in_steps(tensors)
        sizes = {
            name: size
            for tensor, given in zip(tensors, self.inputs, strict=True)
            for name, size in zip(given.shape, tensor.shape, strict=True)
            if isinstance(name, str)
        }
        tensors[:] = [t.contiguous() for t in tensors]
        with torch.no_grad(), torch._C._DisableAutocast():
            compiled = self.compiled if min(sizes.values(), default=0) > 1 else None
            if compiled is None or not compiled.holds(sizes):
                return self.interpreter(tensors)
            return list(compiled.run(tensors))

    def _in_steps(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The graph's results. Values that no later step reads are freed."""
        values = dict(zip(self.interpreter.given, tensors, strict=True))
        tensors.clear()
        results = results_of(self.interpreter.graph)
        for i, (step, function) in enumerate(self.steps):
            computed = function([values[node] for node in step.inputs])
            values |= dict(zip(step.results, computed, strict=True))
            alive = {node for later, _ in self.steps[i + 1 :] for node in later.inputs}
            values = {n: value for n, value in values.items() if n in alive or n in results}
        return [values[node] for node in results]

    @property
    def compiled(self) -> _Compiled | None:
        """The compiled graph, or None if it is interpreted."""
        if not self.tried and self.compilable:
            in_own_thread(self._compile)
        return self._code

    @property
    def compiles(self) -> bool:
        """Is true unless the graph is interpreted, or Inductor has failed."""
        return self.compilable and (self._code is not None or not self.tried)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of the compiled graph's kernels; none if it is not compiled yet."""
        return self._code.kernels if self._code is not None else ()

    def _compile(self) -> None:
        if self.tried:  # by another thread
            return
        try:
            self._code = _Compiled(self.interpreter, self.inputs)
        except Exception as error:
            log.debug("not compiled", exc_info=True)
            if not _warned:
                _warned.add("compile")
                log.warning(
                    "Inductor cannot compile a function of rows, which is interpreted instead, "
                    "slower and with more memory: %s: %s",
                    type(error).__name__,
                    error,
                )
        self.tried = True


def _steps(graph: fx.Graph, device: torch.device) -> list[tuple[Step, RowFunction]]:
    """The functions of collectives and between them; none if a value cannot be handed on."""
    try:
        steps = steps_of(graph)
        return [(s, RowFunction(s.graph, device, not is_on_ranks(s.graph))) for s in steps]
    except ValueError:
        log.debug("interpreted", exc_info=True)
        return []


def _is_available(device: torch.device) -> bool:
    module = getattr(torch, device.type, None)
    return module is not None and module.is_available()


def _misrounds(graph: fx.Graph, device: torch.device) -> bool:
    """Tells if Inductor would compare 16-bit values with values that it did not round: no logit
    would be the largest."""
    if device.type != "cpu" or not COMPARES_UNROUNDED:
        return False
    values = values_of(graph)
    read = [n for node in graph.nodes if node.target in EQUAL for n in node.all_input_nodes]
    return any(n in values.tensors and values.dtype(n) in LOW_PRECISION for n in read)


class _Compiled:
    """Inductor's code for a graph, and the conditions under which the code is right."""

    def __init__(self, interpreter: Interpreter, inputs: list[Any]) -> None:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table

        device = interpreter.device
        names = sorted({s for i in inputs for s in i.shape if isinstance(s, str)})
        hints = {name: CLASSES + k for k, name in enumerate(names)} | {"n": ROWS}
        self.fakes = Fakes(inputs, hints, device)
        where = (
            nullcontext() if device.type == "cpu" else getattr(torch, device.type).device(device)
        )
        with where, torch.no_grad(), config.patch(_CONFIG):
            table = select_decomp_table() | _SCATTERS
            with preserve_node_meta():  # kernels are named after ATen's operations
                graph = traced(lambda *tensors: interpreter(list(tensors)), self.fakes, table)
            module = fx.GraphModule({}, graph)
            with tracing(TracingContext(self.fakes.mode)):
                self.run: Any = compile_fx_inner(module, self.fakes.tensors, is_inference=True)
        self.fakes.check(probes=())
        self._holds: dict[tuple[int, ...], bool] = {}

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of Inductor's own kernels, in the order of its source."""
        source = getattr(self.run, "source_code", "")
        return tuple(dict.fromkeys(_KERNEL.findall(source)))

    def holds(self, sizes: dict[str, int]) -> bool:
        """Tells if sizes meet the conditions that Inductor found, such as 32-bit indices."""
        key = tuple(sizes.values())
        if key not in self._holds:
            at = {self.fakes.sizes[name].node.expr: size for name, size in sizes.items()}
            self._holds[key] = all(guard.expr.subs(at) for guard in self.fakes.env.guards)
        return self._holds[key]


def _scatter(x: Any, dim: int, index: Any, src: Any, add: bool = False) -> Any:
    """``aten.scatter`` of one value in each row, which fuses as a pointwise operation."""
    dim %= x.dim()
    shape = [1 if d == dim else s for d, s in enumerate(x.shape)]
    same = [index.shape, src.shape if isinstance(src, torch.Tensor) else shape]
    if any(str(list(s)) != str(shape) for s in same):  # compared as text: no condition on n
        return NotImplemented
    classes = torch.arange(x.shape[dim], device=x.device)
    hit = index == classes.view([-1 if d == dim else 1 for d in range(x.dim())])
    return torch.where(hit, x + src if add else src, x)


_SCATTERS = {
    torch.ops.aten.scatter.value: _scatter,
    torch.ops.aten.scatter.src: _scatter,
    torch.ops.aten.scatter_add.default: partial(_scatter, add=True),
}
