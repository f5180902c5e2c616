"""What torch has to be told before it compiles; all of it holds for the whole process.

Log-once helpers are no reason to break the graph. Libraries hang methods such as ``warning_once``
on ``logging.Logger``, cached so that each message appears once in a process. Dynamo breaks the
graph at every logging call, and one such call between the linear and its loss puts the two into
different graphs, where nothing can fuse them (GPT-2 in transformers is one).
:func:`trace_through_log_once` has Dynamo step over the cached ones; ordinary logging calls still
break the graph, since stepping over them would lose lines a user wants.

torch's registry of backends loads an entry point in every thread that looks its name up before the
first one has registered it, and raises "duplicate name" in all but that one.
:func:`register_in_any_thread` lets a name be registered again.

An encoder layer in evaluation is one operation, which autocast does not cover. torch 2.11 finds the
shape of its result by running it, which raises for bfloat16 activations with float32 parameters
before any backend sees the graph. :func:`describe_encoder_layers` gives it what later ones have.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo.config as config
from torch._dynamo.backends import registry

_CACHED = type(functools.lru_cache(lambda: None))


def _log_once() -> set[Any]:
    """The cached methods that libraries have hung on ``logging.Logger`` so far."""
    return {method for method in vars(logging.Logger).values() if isinstance(method, _CACHED)}


class _Functions(set[Any]):
    """Functions, and whatever is log-once when it is looked for: a library may be imported later.

    A copy has their names: torch 2.11 writes a copy of its settings to a log whenever it compiles,
    and complains of each function there that it is neither to be sorted nor JSON.
    """

    def __contains__(self, function: object) -> bool:
        return super().__contains__(function) or function in _log_once()

    def __iter__(self) -> Iterator[Any]:
        return iter({*super().__iter__(), *_log_once()})

    def __deepcopy__(self, memo: dict[int, Any]) -> set[str]:
        return {getattr(function, "__qualname__", repr(function)) for function in self}


class _Backends(dict[str, Any]):
    """Backends by name. One of them is never known, so that it may be registered again; looked up,
    it is there all the same."""

    def __init__(self, backends: dict[str, Any], again: str) -> None:
        super().__init__(backends)
        self.again = again

    def __contains__(self, name: object) -> bool:
        return name != self.again and super().__contains__(name)


def register_in_any_thread(name: str, backend: Any) -> None:
    """Registers a backend, and lets torch register it under this name as often as it likes.

    For the module of an entry point: while it is imported, no thread has loaded that yet.
    """
    known = registry._COMPILER_FNS
    if isinstance(known, _Backends):
        return
    backend._tags = ()
    registry._COMPILER_FNS = backends = _Backends({**known, name: backend}, name)
    for other in known.keys() - backends.keys():  # of another thread, since they were copied
        backends[other] = known[other]


def trace_through_log_once() -> None:
    """Has Dynamo step over the cached methods of ``logging.Logger``.

    Idempotent. It holds for the process, for other backends too: in compiled code, such a message
    is not shown.
    """
    # older releases of torch have the second name only
    name = "ignore_logging_functions"
    name = name if hasattr(config, name) else "ignore_logger_methods"
    setattr(config, name, _Functions({*getattr(config, name), *_log_once()}))


def describe_encoder_layers() -> None:
    """Says that an encoder layer's result is like its input, where torch does not. Idempotent."""
    name = "_transformer_encoder_layer_fwd"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
        _library().impl(name, _like_the_input, "Meta")


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library("aten", "IMPL")  # what it holds is gone with it


def _like_the_input(src: torch.Tensor, *parameters: Any) -> torch.Tensor:
    return torch.empty_like(src)
