"""The inner backend, which compiles the rewritten graph.

In: a graph and an :class:`InnerBackend`. Out: a compiled callable.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from fxpass import messages
from fxpass.casts import aot
from fxpass.casts.casts import note
from fxpass.graph.source import warn_once
from fxpass.releases.torch_2_11 import region_name
from fxpass.rewrite import in_place
from fxpass.rows.alike import mark_alike
from fxpass.rows.backend import RowsPass

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InnerBackend:
    """A backend and its arguments.

    Attributes:
        name: the backend's name for ``torch.compile``.
        mode, options: as ``torch.compile`` passes them to a backend.
        region: the name of the compiled region, for a backend with such a parameter.
    """

    name: str
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    region: str | None = None


def compile_inner(
    inner: InnerBackend,
    gm: GraphModule,
    example_inputs: list[Any],
    mixed_dtypes: str | None = None,
    record: aot.Record = note,
    rows: RowsPass | None = None,
) -> Callable[..., Any]:
    """Compiles ``gm`` as ``torch.compile`` would.

    Args:
        inner: the backend.
        gm, example_inputs: as ``torch.compile`` passes them to the backend.
        mixed_dtypes: the setting for casts in AOTAutograd's graphs of ``gm``; None: no casts.
        record: is called with these casts.
        rows: the pass on AOTAutograd's graphs, of Inductor, aot_eager and eager, which runs as
            aot_eager does then.
    """
    options = inner.options
    if inner.name != "inductor":
        given = {"mode": inner.mode, "options": dict(options)}
        backend = torch._dynamo.lookup_backend(inner.name)
        if rows is not None and inner.name in ("eager", "aot_eager"):
            given = {}
            backend = rows.backend()
        elif rows is not None:
            warn_once(log, f"inner {inner.name}", _NO_PASS.format(inner.name))
        if inner.region is not None and "name" in inspect.signature(backend).parameters:
            given["name"] = inner.region
        with aot.casting(mixed_dtypes, record) if mixed_dtypes else nullcontext():
            return backend(gm, example_inputs, **{k: v for k, v in given.items() if v})
    _warn_without_compiler(example_inputs)
    if mixed_dtypes:
        options = in_place.with_scaling_in_place(options)
        if rows is not None:
            mark_alike(gm)
            options = aot.with_pass(options, "joint_custom_pre_pass", rows, rows.key())
        options = aot.options_with_casts(options, mixed_dtypes, record)
    # torch.compile uses this class too, so mode and options have the same meaning.
    backend: Any = torch._TorchCompileInductorWrapper(
        inner.mode, dict(options), dynamic=None, **region_name(inner.region)
    )
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
        log.warning(messages.NO_COMPILER)
