"""What keeps deferred logits right when an optimizer is about to change their parameters.

In: everything that is deferred, when the ``step`` of any optimizer is called, also of one that
holds other tensors than the model (master weights). Out: the same, independent of parameters::

    out = model(**batch)  # out.logits is deferred, and alive during the step
    out.loss.backward()
    optimizer.step()  # clones lm_head.weight first: V·D for however many logits are alive
    out.logits  # as they were before the step
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxpass.deferred import values
from fxpass.deferred.inputs import Input, StaleLogitsError, quiet
from fxpass.deferred.values import Run


@functools.cache
def watch_optimizers() -> None:
    """From now on every optimizer step is preceded by :func:`before_step`."""
    # A compiled step has a graph break here; torch's own steps have one anyway.
    hook: Any = torch.compiler.disable(before_step)
    register_optimizer_step_pre_hook(hook)


def before_step(*_: Any) -> None:
    """Makes everything that is deferred independent of parameters that are about to change.

    Clones the parameters, one clone for all logits that use it, or computes the logits, whichever
    takes less memory. No synchronisation with the device unless logits are computed.
    """
    pending = values.pending()
    uses: dict[Any, list[tuple[Run, Input]]] = {}  # of one parameter
    for run in set(pending.values()):
        for given in run.inputs or ():
            if isinstance(given, Input) and given.key is not None:
                uses.setdefault(given.key, []).append((run, given))
    parameters = sum(group[0][1].tensor.nbytes for group in uses.values())
    logits = sum(buffer.like.nbytes for buffer in {part.buffer for part in pending})
    if parameters > logits:
        # the logits before their casts, the whole before its rows: those can be taken from these
        for part in sorted(pending, key=lambda p: (len(p.buffer.casts), -p.like.numel())):
            with suppress(StaleLogitsError):  # it is raised for whoever uses them, if anybody does
                part.read()
        return
    for group in uses.values():
        with quiet():
            clone = group[0][1].tensor.clone()
        for run, given in group:
            with run.lock:
                given.replace(clone)
