"""Casts in AOTAutograd's graphs, which have the operations that composite ones consist of.

In: the setting, and a function that records casts. Out: options for Inductor, and a context for any
other backend on AOTAutograd. Both apply :func:`fxpass.casts.casts.cast_aot_graph` to the joint
graph, before it is split into forward and backward, and to the graph of a program without
gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._functorch._aot_autograd import graph_compile
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, GraphModule

from fxpass.casts import casts, rules
from fxpass.casts.casts import Cast, cast_aot_graph
from fxpass.formula import dtypes
from fxpass.graph import autocast

Record = Callable[[list[Cast]], None]

_SOURCES = tuple(module.__file__ or "" for module in (autocast, rules, casts, dtypes))


class Pass(CustomGraphPass):
    """A pass of Inductor, with a cache key, before the user's passes."""

    def __init__(self, function: Callable[[Graph], object], key: str, then: Any) -> None:
        self._function = function
        self._key = key
        self._then = tuple(then) if isinstance(then, list | tuple) else (then,) if then else ()

    def __call__(self, graph: Graph) -> None:
        self._function(graph)
        for user_pass in self._then:
            user_pass(graph)

    def uuid(self) -> Any:
        """The part of the cache key for this pass and the user's passes."""
        user_keys = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self._then]
        # no caching without all keys, as without this pass
        return (self._key, *user_keys) if all(user_keys) else None


def with_pass(
    options: Mapping[str, Any], name: str, function: Callable[[Graph], object], key: str
) -> dict[str, Any]:
    """Inductor's options with a pass before the user's passes, in the option ``name``."""
    options = {key.replace("-", "_"): given for key, given in options.items()}  # as Inductor does
    then = options.get(name, getattr(inductor_config, name))
    return {**options, name: Pass(function, key, then)}


def options_with_casts(
    options: Mapping[str, Any], mixed_dtypes: str, record: Record
) -> dict[str, Any]:
    """Inductor's options with the casts, before the user's passes."""
    # torch's key lacks donated_buffer, but a cached backward that overwrites its saved tensors
    # must not run with retain_graph=True
    settings = f"{mixed_dtypes} donated_buffer={functorch_config.donated_buffer}"
    key = get_hash_for_files(_SOURCES, extra=settings)

    def cast(graph: Graph) -> None:
        record(cast_aot_graph(graph, mixed_dtypes))

    return with_pass(options, "joint_custom_pre_pass", cast, str(key))


@contextmanager
def casting(mixed_dtypes: str, record: Record) -> Iterator[None]:
    """A context for any other backend: inserts casts into all graphs that AOTAutograd makes in it.

    AOTAutograd has no setting for a pass over graphs without gradients. The context wraps the
    function that traces such graphs, for this thread.
    """
    then = functorch_config.joint_custom_pass

    def joint_pass(joint: GraphModule, inputs: Any) -> GraphModule:
        joint = _cast(joint, mixed_dtypes, record)
        return then(joint, inputs) if callable(then) else joint

    with _one_at_a_time, functorch_config.patch(joint_custom_pass=joint_pass):
        aot: Any = graph_compile
        trace = aot.aot_dispatch_base_graph
        thread = threading.get_ident()

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


# Otherwise one thread could restore the wrapper of another. Reentrant: a backend may compile with
# another backend.
_one_at_a_time = threading.RLock()


def _cast(graph: GraphModule, mixed_dtypes: str, record: Record) -> GraphModule:
    inserted = cast_aot_graph(graph.graph, mixed_dtypes)
    if inserted:
        graph.recompile()
    record(inserted)
    return graph
