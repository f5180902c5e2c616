"""Casts in AOTAutograd's graphs: what only they show, the inside of a composite operation perhaps.

In: the setting, and who is told of the casts. Out: options with which Inductor, a context in which
any other backend on AOTAutograd, and a backend of our own for ``explain``, compile graphs that went
through :func:`fxpass.casts.casts.cast_aot_graph` first. That sees the joint graph, before it is
split into a forward and a backward graph, and the graph of a program without gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, GraphModule

from fxpass.casts import autocast
from fxpass.casts import casts as cast_pass
from fxpass.casts import rules as cast_rules
from fxpass.casts.casts import Cast, cast_aot_graph
from fxpass.spec import dtypes

Record = Callable[[list[Cast]], None]

_SOURCES = tuple(module.__file__ or "" for module in (autocast, cast_rules, cast_pass, dtypes))


class CastPass(CustomGraphPass):
    """The pass as Inductor takes it: named in its caches' keys, and before the user's own passes.

    Args:
        mixed_dtypes: the setting, ``cast`` or ``error``.
        record: is given the casts of each graph.
        then: the user's own passes for the joint graph.
    """

    def __init__(
        self, mixed_dtypes: str, record: Record, then: tuple[Callable[[Graph], None], ...] = ()
    ) -> None:
        self._mixed_dtypes, self._record, self._then = mixed_dtypes, record, then

    def __call__(self, graph: Graph) -> None:
        self._record(cast_aot_graph(graph, self._mixed_dtypes))
        for theirs in self._then:
            theirs(graph)

    def uuid(self) -> Any:
        """What a compiled graph depends on: this pass, the setting, and the user's passes."""
        theirs = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self._then]
        if not all(theirs):
            return None  # not to be cached, as without us
        # torch leaves this setting out of its key, and a backward that overwrites what it was given
        # must not be taken from the cache for a graph that is retained
        settings = f"{self._mixed_dtypes} donated_buffer={functorch_config.donated_buffer}"
        return (get_hash_for_files(_SOURCES, extra=settings), *theirs)


def inductor_options(
    options: Mapping[str, Any], mixed_dtypes: str, record: Record
) -> dict[str, Any]:
    """Inductor's options with the pass in them."""
    name = "joint_custom_pre_pass"
    theirs = options.get(name, getattr(inductor_config, name))
    passes = theirs if isinstance(theirs, list | tuple) else [theirs] if theirs else []
    return {**options, name: CastPass(mixed_dtypes, record, tuple(passes))}


@contextmanager
def casting(mixed_dtypes: str, record: Record) -> Iterator[None]:
    """A context for any other backend: the graphs that AOTAutograd makes in it are cast.

    AOTAutograd has a place for passes over joint graphs. It has none for the graph of a program
    without gradients, so that the function which traces those is wrapped, for this thread.
    """
    then = functorch_config.joint_custom_pass

    def joint_pass(joint: GraphModule, inputs: Any) -> GraphModule:
        joint = _cast(joint, mixed_dtypes, record)
        return then(joint, inputs) if callable(then) else joint

    with _one_at_a_time, functorch_config.patch(joint_custom_pass=joint_pass):
        aot: Any = graph_compile
        trace, thread = aot.aot_dispatch_base_graph, threading.get_ident()

        def traced(*args: Any, **kwargs: Any) -> Any:
            graph, *rest = trace(*args, **kwargs)
            if threading.get_ident() == thread:
                _cast(graph, mixed_dtypes, record)
            return graph, *rest

        aot.aot_dispatch_base_graph = traced
        try:
            yield
        finally:
            aot.aot_dispatch_base_graph = trace


# Wrappers that do not come off in the order in which they were put on would stay. Reentrant: a
# backend may compile with another one.
_one_at_a_time = threading.RLock()


def trace(
    gm: GraphModule, example_inputs: list[Any], mixed_dtypes: str, record: Record
) -> Callable[..., Any]:
    """AOTAutograd's graphs with their casts, compiled by nobody."""

    def compiler(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, keep_inference_input_mutations=True)
    with casting(mixed_dtypes, record):
        return backend(gm, example_inputs)


def _cast(graph: GraphModule, mixed_dtypes: str, record: Record) -> GraphModule:
    found = cast_aot_graph(graph.graph, mixed_dtypes)
    if found:
        graph.recompile()
    record(found)
    return graph
