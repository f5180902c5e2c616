"""A setting of Dynamo for the whole process: calls that log once do not break a graph.

Libraries add methods such as ``warning_once`` to ``logging.Logger``, with a cache, so that each
message appears once in a process. Dynamo breaks the graph at every logging call. Such a call
between a linear and its loss (transformers' GPT-2 has one) separates them into two graphs, and
they cannot be fused. :func:`trace_through_log_once` makes Dynamo skip the cached methods. Other
logging calls still break the graph: skipping them would lose messages that users want.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch._dynamo.config as config

from fxpass.releases.torch_2_11 import CopiedAsNames

_CACHED = type(functools.lru_cache(lambda: None))


def _log_once() -> set[Any]:
    """The cached methods that libraries have added to ``logging.Logger`` so far."""
    return {method for method in vars(logging.Logger).values() if isinstance(method, _CACHED)}


class _Functions(CopiedAsNames):
    """A set of functions, and of the log-once methods at the time of a look-up: libraries that are
    imported later add methods too."""

    def __contains__(self, function: object) -> bool:
        return super().__contains__(function) or function in _log_once()

    def __iter__(self) -> Iterator[Any]:
        return iter({*super().__iter__(), *_log_once()})


def trace_through_log_once() -> None:
    """Makes Dynamo skip the cached methods of ``logging.Logger``.

    Idempotent. Affects the whole process and all backends: compiled code does not show such a
    message.
    """
    config.ignore_logging_functions = _Functions({*config.ignore_logging_functions, *_log_once()})
