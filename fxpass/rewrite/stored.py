"""Compiled code that torch stores for other processes.

torch stores code in files with ``TORCH_CACHING_PRECOMPILE=1`` and with ``aot_compile``. Another
process runs the code without a call of any backend. Two conditions follow:

- The stored code returns the program's outputs. torch stores the function of the inner backend,
  without the function around it that makes deferred logits; therefore such graphs return
  materialised logits.
- The operator is registered before the code runs. Dynamo's precompiled code has a list of its
  sources, whose modules torch imports; if a source has changed, torch compiles again. The
  operator's functions join this list. A function from ``aot_compile`` is unpickled by
  :class:`WithOperator`, and this module imports the operator.
"""

from __future__ import annotations

import inspect
import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import CodeType
from typing import Any

from torch._dynamo.aot_compile_types import (
    BundledAOTAutogradSerializableCallable,
    SerializableCallable,
)
from torch._guards import TracingContext
from torch.fx import GraphModule

from fxpass.op import rows, saved
from fxpass.settings import Settings

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]


def is_stored(gm: GraphModule) -> bool:
    """True if torch stores the compiled function of a Dynamo graph."""
    return getattr(gm, "_backend_id", None) is not None


def with_materialised_logits(settings: Settings) -> Settings:
    """The settings for a graph whose compiled function is stored."""
    if settings.logits in ("defer", "drop"):
        log.warning(
            "FUSEDCE_LOGITS=%s has no effect where torch stores compiled code "
            "(TORCH_CACHING_PRECOMPILE=1, aot_compile): returned logits are kept",
            settings.logits,
        )
    return replace(settings, logits="keep")


def with_operator(compiled: Compiled) -> Compiled:
    """``compiled``, which calls the operator, such that a process that loads it registers the
    operator first."""
    sources = TracingContext.get_traced_code()
    if sources is not None:
        sources += _code_of_operator()
    if isinstance(compiled, SerializableCallable):
        return WithOperator(compiled)
    if getattr(compiled, "serialize", None) is not None:
        return WithOperator(BundledAOTAutogradSerializableCallable(compiled))
    return compiled  # the inner backend's function cannot be stored: torch says so


class WithOperator(SerializableCallable):
    """A compiled function; a process that loads it imports this module, and with it the operator.

    Has no attribute ``serialize``: ``aot_compile`` would store the function of that attribute.
    """

    def __init__(self, compiled: SerializableCallable) -> None:
        self.compiled = compiled

    def __call__(self, *args: Any) -> Any:
        return self.compiled(*args)

    @classmethod
    def serialize_compile_artifacts(cls, fn: WithOperator) -> bytes:
        """``fn`` as bytes."""
        kind = type(fn.compiled)
        return pickle.dumps((kind, kind.serialize_compile_artifacts(fn.compiled)))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> WithOperator:
        """The function of :meth:`serialize_compile_artifacts`."""
        kind, content = pickle.loads(data)
        return cls(kind.deserialize_compile_artifacts(content))


def _code_of_operator() -> list[CodeType]:
    """The code of the operators' functions."""
    return [
        f.__code__
        for module in (rows, saved)
        for f in vars(module).values()
        if inspect.isfunction(f) and f.__module__ == module.__name__
    ]
