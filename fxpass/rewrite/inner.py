"""The inner backend, which compiles the rewritten graph.

In: a graph and the arguments of ``torch.compile`` for the inner backend. Out: a compiled callable.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import GraphModule

from fxpass.casts import aot
from fxpass.casts.casts import note
from fxpass.graph.source import warn_once
from fxpass.rewrite import in_place
from fxpass.rows.alike import mark
from fxpass.rows.backend import RowsPass

log = logging.getLogger(__name__)


def compile_inner(
    name: str,
    gm: GraphModule,
    example_inputs: list[Any],
    mode: str | None,
    options: Mapping[str, Any],
    mixed_dtypes: str | None = None,
    record: aot.Record = note,
    region: str | None = None,
    rows: RowsPass | None = None,
) -> Callable[..., Any]:
    """Compiles ``gm`` with the backend ``name``, as ``torch.compile`` would.

    Args:
        name, gm, example_inputs, mode, options: as ``torch.compile`` passes them to the backend.
        mixed_dtypes: the setting for casts in AOTAutograd's graphs of ``gm``; None: no casts.
        record: is called with these casts.
        region: the name of the compiled region, for a backend with such a parameter.
        rows: the pass on AOTAutograd's graphs, of Inductor, aot_eager and eager, which runs as
            aot_eager does then.
    """
    if name != "inductor":
        given = {"mode": mode, "options": dict(options)}
        backend = torch._dynamo.lookup_backend(name)
        if rows is not None and name in ("eager", "aot_eager"):
            given = {}
            backend = rows.backend()
        elif rows is not None:
            warn_once(log, f"inner {name}", _NO_PASS.format(name))
        if region is not None and "name" in inspect.signature(backend).parameters:
            given["name"] = region
        with aot.casting(mixed_dtypes, record) if mixed_dtypes else nullcontext():
            return backend(gm, example_inputs, **{k: v for k, v in given.items() if v})
    _warn_without_compiler(example_inputs)
    if mixed_dtypes:
        options = in_place.inductor_options(options)
        if rows is not None:
            mark(gm)
            options = aot.with_pass(options, "joint_custom_pre_pass", rows, rows.key())
        options = aot.inductor_options(options, mixed_dtypes, record)
    # torch.compile uses this class too, so mode and options have the same meaning.
    named = {"name": region} if region is not None else {}  # older ones have none
    backend: Any = torch._TorchCompileInductorWrapper(mode, dict(options), dynamic=None, **named)
    return backend(gm, example_inputs)


_NO_PASS = (
    "FUSEDCE_INNER={}: fxpass has no pass on the joint graph of this backend: casts are inserted, "
    "logits deferred, and no loss is fused"
)


def _warn_without_compiler(example_inputs: list[Any]) -> None:
    """Warns before Inductor fails for lack of a C++ compiler, perhaps only in backward.

    Not an error: Inductor's caches may have all compiled code.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if not any(isinstance(i, torch.Tensor) and i.device.type == "cpu" for i in example_inputs):
        return
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        log.warning(
            "Inductor needs a C++ compiler for code on the CPU and found none: install g++ or "
            "clang (for example apt-get install g++), name yours in CXX, or choose another inner "
            "backend with FUSEDCE_INNER=aot_eager"
        )
