"""Changes to torch for the whole process, made before it compiles.

Libraries add methods such as ``warning_once`` to ``logging.Logger``, with a cache, so that each
message appears once in a process. Dynamo breaks the graph at every logging call. Such a call
between a linear and its loss (transformers' GPT-2 has one) separates them into two graphs, and
they cannot be fused. :func:`trace_through_log_once` makes Dynamo skip the cached methods. Other
logging calls still break the graph: skipping them would lose messages that users want.

An encoder layer in evaluation is one operation, which autocast does not cover. torch 2.11 infers
the shape of its result by running it, which raises for bfloat16 activations and float32 parameters
before any backend sees the graph. :func:`describe_encoder_layers` adds the meta kernel that later
releases have.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo.config as config

_CACHED = type(functools.lru_cache(lambda: None))


def _log_once() -> set[Any]:
    """The cached methods that libraries have added to ``logging.Logger`` so far."""
    return {method for method in vars(logging.Logger).values() if isinstance(method, _CACHED)}


class _Functions(set[Any]):
    """A set of functions and of the log-once methods at the time of a look-up, also of libraries
    that are imported later.

    Its deep copy contains names: torch 2.11 logs a copy of its settings whenever it compiles, and
    warns of functions, which it can neither sort nor write as JSON.
    """

    def __contains__(self, function: object) -> bool:
        return super().__contains__(function) or function in _log_once()

    def __iter__(self) -> Iterator[Any]:
        return iter({*super().__iter__(), *_log_once()})

    def __deepcopy__(self, memo: dict[int, Any]) -> set[str]:
        return {getattr(function, "__qualname__", repr(function)) for function in self}


def trace_through_log_once() -> None:
    """Makes Dynamo skip the cached methods of ``logging.Logger``.

    Idempotent. Affects the whole process and all backends: compiled code does not show such a
    message.
    """
    # older releases of torch only have the second name
    name = "ignore_logging_functions"
    name = name if hasattr(config, name) else "ignore_logger_methods"
    setattr(config, name, _Functions({*getattr(config, name), *_log_once()}))


def describe_encoder_layers() -> None:
    """Adds a meta kernel for encoder layers where torch has none: like the input. Idempotent."""
    name = "_transformer_encoder_layer_fwd"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
        _library().impl(name, _like_the_input, "Meta")


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library("aten", "IMPL")  # deleting it removes its kernels


def _like_the_input(src: torch.Tensor, *parameters: Any) -> torch.Tensor:
    return torch.empty_like(src)
