"""The backend ``fusedce``: rewrite the Dynamo graph, then hand it to the inner backend.

In: a graph and example inputs from Dynamo. Out: the compiled function of the inner backend. torch
finds the backend through the entry-point group ``torch_dynamo_backends``: users import nothing::

    torch.compile(model, backend="fusedce", options={"fusedce.inner": "aot_eager"})

``torch.compile`` imports this module when it looks up the backend, and the rewrite for the first
graph, while Dynamo holds its compile lock. The import registers the backend, and the entry point is
:data:`registered`, which is None: threads that look up the name at the same time each pass the
entry point's value to ``register_backend``, which raises "duplicate name" for a second function,
but registers nothing for None.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch._dynamo.backends import registry
from torch.fx import GraphModule

from fxpass import messages
from fxpass.deferred.optimizers import watch_optimizers
from fxpass.releases.torch_2_11 import describe_encoder_layers
from fxpass.rewrite.dynamo import trace_through_log_once
from fxpass.settings import PREFIX, SettingError, Settings

log = logging.getLogger(__name__)


def fusedce(
    gm: GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """Compiles one Dynamo graph.

    Args:
        gm: the graph, changed in place.
        example_inputs: its inputs.
        mode: a mode of the inner backend (``reduce-overhead``, ``max-autotune``, ...).
        options: keys that start with ``fusedce.`` are settings of fxpass; other keys go to the
            inner backend.
        name: of the compiled region, for an inner backend that takes one.

    Raises:
        SettingError: an unknown setting, or a value that is not allowed.
        MixedDtypeError: operands of unlike dtypes outside autocast, with
            ``fusedce.mixed_dtypes=error``.
    """
    from fxpass.graph.source import warn_once
    from fxpass.rewrite.compiling import compile_graph
    from fxpass.rewrite.inner import InnerBackend, compile_inner
    from fxpass.rewrite.outputs import plain_inputs
    from fxpass.rewrite.remembered import remembering
    from fxpass.rewrite.stored import is_stored, with_materialised_logits, with_operator

    settings = Settings.read(options)
    rest = {k: v for k, v in (options or {}).items() if not k.startswith(PREFIX)}
    inner = InnerBackend(settings.inner, mode, rest, name)
    if not settings.enabled:
        log.info("switched off: the graph goes to %s unchanged", settings.inner)
        return compile_inner(inner, gm, example_inputs)
    stored = is_stored(gm)
    examples, with_plain_inputs = plain_inputs(example_inputs)

    def compile(rows: Any) -> Callable[..., Any]:
        with remembering(gm, rows):
            return compile_inner(inner, gm, examples, settings.mixed_dtypes, rows=rows)

    in_force = with_materialised_logits(settings) if stored else settings
    compiled = compile_graph(gm, in_force, example_inputs, compile)
    outcome = compiled.outcome
    for rejection in outcome.rejections:
        if rejection.loss_elsewhere:
            warn_once(log, "loss elsewhere", str(rejection))
    function = compiled.function
    # torch stores this function: with materialised logits, no other function is around it
    if stored and (outcome.heads or outcome.candidates):
        function = with_operator(function)
    return with_plain_inputs(function)


def misnamed(*_args: Any, **_options: Any) -> Any:
    """Raises for ``backend="fxpass"``, which is no backend, and names the right one."""
    raise SettingError(messages.BACKEND_NAME)


if Settings.read().enabled:
    trace_through_log_once()
    describe_encoder_layers()
    watch_optimizers()  # the logits of the first step may be made in its closure
registered = None
if "fusedce" not in registry._COMPILER_FNS:  # registered already if this module is reloaded
    registry.register_backend(fusedce)
