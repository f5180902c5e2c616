"""What keeps deferred logits right when an optimizer is about to change their parameters.

In: everything that is deferred, when the ``step`` of any optimizer is called, also of one that
holds other tensors than the model (master weights). Out: the same, independent of parameters::

    out = model(**batch)  # out.logits is deferred, and alive during the step
    out.loss.backward()
    optimizer.step()  # clones lm_head.weight first: V·D for however many logits are alive
    out.logits  # as they were before the step
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxpass.deferred import values
from fxpass.deferred.inputs import Held, StaleLogitsError, quiet
from fxpass.deferred.values import Origin

_hook_lock = threading.Lock()
_hook: Any = None


def watch_optimizers() -> None:
    """From now on every optimizer step is preceded by :func:`settle`."""
    global _hook
    with _hook_lock:
        if _hook is None:
            # A compiled step has a graph break here; torch's own steps have one anyway.
            hook: Any = torch.compiler.disable(_before_step)
            _hook = register_optimizer_step_pre_hook(hook)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    settle()


def settle() -> None:
    """Makes everything that is deferred independent of parameters that are about to change.

    Clones the parameters, one clone for all logits that use it, or computes the logits, whichever
    takes less memory. No synchronisation with the device unless logits are computed.
    """
    parts = values.pending()
    helds: dict[Any, list[tuple[Origin, Held]]] = {}
    for origin in {id(p.origin): p.origin for p in parts if p.origin}.values():
        for held in origin.held:
            if held.key is not None:
                helds.setdefault(held.key, []).append((origin, held))
    clones = sum(_nbytes(group[0][1].tensor) for group in helds.values())
    logits = sum(_nbytes(b.like) for b in {id(p.buffer): p.buffer for p in parts}.values())
    if clones > logits:
        # the logits before their casts, which can then be taken from them
        for part in sorted(parts, key=lambda p: len(p.buffer.steps) + len(p.path)):
            with suppress(StaleLogitsError):  # it is raised for whoever uses them, if anybody does
                part.read()
        return
    for group in helds.values():
        with quiet():
            clone = group[0][1].tensor.clone()
        for origin, held in group:
            with origin.lock:
                held.freeze(clone)


def _nbytes(t: Tensor) -> int:
    return t.numel() * t.element_size()
