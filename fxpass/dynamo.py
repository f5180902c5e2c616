"""What torch has to be told before it compiles; all of it holds for the whole process.

Log-once helpers are no reason to break the graph. Libraries hang methods such as ``warning_once``
on ``logging.Logger``, cached so that each message appears once in a process. Dynamo breaks the
graph at every logging call, and one such call between the linear and its loss puts the two into
different graphs, where nothing can fuse them (GPT-2 in transformers is one).
:func:`trace_through_log_once` has Dynamo step over the cached ones; ordinary logging calls still
break the graph, since stepping over them would lose lines a user wants.

Buffers that a backward graph donates to itself are gone after one backward, and a second one
raises (``retain_graph=True``). :func:`keep_saved_buffers` turns that off: the operator reuses the
one large buffer itself, and knows when it must not. AOTAutograd asks again at run time, so a
setting for the time of compiling only would not do.

An encoder layer in evaluation is one operation, which autocast does not cover. torch 2.11 finds the
shape of its result by running it, which raises for bfloat16 activations with float32 parameters
before any backend sees the graph. :func:`describe_encoder_layers` gives it what later ones have.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch._dynamo.config as config
import torch._functorch.config as functorch_config

_CACHED = type(functools.lru_cache(lambda: None))


class _Functions(set[Any]):
    """Functions. A copy has their names: torch 2.11 writes a copy of its settings to a log whenever
    it compiles, and complains of each function there that it is neither to be sorted nor JSON."""

    def __deepcopy__(self, memo: dict[int, Any]) -> set[str]:
        return {getattr(function, "__qualname__", repr(function)) for function in self}


def trace_through_log_once() -> None:
    """Adds the cached methods of ``logging.Logger`` to those that Dynamo steps over.

    Idempotent. It holds for the process, for other backends too: in compiled code, such a message
    is not shown.
    """
    # older releases of torch have the second name only
    name = "ignore_logging_functions"
    name = name if hasattr(config, name) else "ignore_logger_methods"
    cached = {method for method in vars(logging.Logger).values() if isinstance(method, _CACHED)}
    setattr(config, name, _Functions({*getattr(config, name), *cached}))


def keep_saved_buffers() -> None:
    """Turns donated buffers off. Idempotent."""
    functorch_config.donated_buffer = False


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
