"""The inner backend: who compiles the graph after fxpass, and what to do when it cannot.

In: a graph and what ``torch.compile`` was given for the inner backend. Out: its compiled callable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule


class InnerBackendError(RuntimeError):
    """The inner backend cannot run on this machine; the message says what to do."""


def compile_inner(
    name: str,
    gm: GraphModule,
    example_inputs: list[Any],
    mode: str | None,
    options: Mapping[str, Any],
) -> Callable[..., Any]:
    """Compiles ``gm`` with the backend ``name``, exactly as ``torch.compile`` would.

    Raises:
        InnerBackendError: Inductor found no working C++ compiler.
    """
    if name != "inductor":
        given = {"mode": mode, "options": dict(options)}
        backend = torch._dynamo.lookup_backend(name)
        return backend(gm, example_inputs, **{k: v for k, v in given.items() if v})
    from torch._inductor.exc import InvalidCxxCompiler

    # The class that torch.compile itself uses: mode and options mean the same here.
    backend = torch._TorchCompileInductorWrapper(mode, dict(options), dynamic=None)
    try:
        return backend(gm, example_inputs)
    except Exception as error:
        if not _caused_by(error, InvalidCxxCompiler):
            raise
        raise InnerBackendError(
            "Inductor needs a C++ compiler for code on the CPU and found none: install g++ or "
            "clang (for example apt-get install g++), name yours in CXX, or choose another inner "
            "backend with FUSEDCE_INNER=aot_eager"
        ) from error


def _caused_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    while error is not None:
        if isinstance(error, kind) or isinstance(getattr(error, "inner_exception", None), kind):
            return True
        error = error.__cause__ or error.__context__
    return False
