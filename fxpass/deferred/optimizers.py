"""Clones the parameters of deferred logits before an optimizer changes them.

In: all deferred logits, before the ``step`` of any optimizer and after each call of its closure,
master weights included. Out: the same logits, which no longer depend on the parameters::

    out = model(**batch)  # out.logits is deferred, and alive during the step
    out.loss.backward()
    optimizer.step()  # clones lm_head.weight first: V·D for however many logits are alive
    out.logits  # as they were before the step
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxpass.deferred import values
from fxpass.deferred.dynamo import hidden
from fxpass.deferred.inputs import RecordedInput, StaleLogitsError, quiet
from fxpass.deferred.run import Run


@functools.cache
def watch_optimizers() -> None:
    """Calls :func:`before_update` before every optimizer changes parameters from now on."""
    register_optimizer_step_pre_hook(_before_step)


# A compiled step has a graph break here; the steps of torch's optimizers have one anyway.
@hidden
def _before_step(
    optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Calls :func:`before_update` now, and after each call of the optimizer's closure, whose logits
    read the parameters too."""
    before_update(optimizer)
    if callable(kwargs.get("closure")):
        return args, kwargs | {"closure": _then_update(optimizer, kwargs["closure"])}
    if len(args) > 1 and callable(args[1]):  # args[0] is the optimizer
        return (args[0], _then_update(optimizer, args[1]), *args[2:]), kwargs
    return None


def _then_update(optimizer: Any, closure: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(closure)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = closure(*args, **kwargs)
        before_update(optimizer)
        return result

    return wrapped


@hidden
def before_update(optimizer: Any = None) -> None:
    """Makes all deferred logits independent of the parameters, and of tensors that share memory
    with parameters of an optimizer.

    Clones each parameter once, or computes the logits if they take less memory than the clones and
    the other inputs. Synchronises with the device only to compute logits.
    """
    pending = values.pending()
    uses: dict[Any, list[tuple[Run, RecordedInput]]] = {}  # the uses of each parameter
    groups = optimizer.param_groups if optimizer is not None and pending else ()
    memory = {values.memory_of(p) for group in groups for p in group["params"]}
    for run in set(pending.values()):
        for given in run.inputs or ():
            if not isinstance(given, RecordedInput):
                continue
            given.is_parameter |= values.memory_of(given.tensor) in memory
            if given.key is not None:
                uses.setdefault(given.key, []).append((run, given))
    runs = {run for group in uses.values() for run, _ in group}
    parts = [part for part, run in pending.items() if run in runs]
    parameters = [group[0][1] for group in uses.values()]
    others = [
        i
        for run in runs
        for i in run.inputs or ()
        if isinstance(i, RecordedInput) and i.key is None
    ]
    # the memory that is held until then: clones and hidden states, or the logits
    held = sum({i.tensor.data_ptr(): i.tensor.nbytes for i in (*parameters, *others)}.values())
    if held > sum(buffer.like.nbytes for buffer in {part.buffer for part in parts}):
        # logits before their casts, and larger parts before smaller ones, which are cheap then
        for part in sorted(parts, key=lambda p: (len(p.buffer.casts), -p.like.numel())):
            with suppress(StaleLogitsError):  # a later use raises it
                part.compute()
        return
    for key, group in uses.items():
        with quiet():
            clone = group[0][1].tensor.clone()
        for run, given in group:
            with run.lock:
                if given.key == key:  # else another thread has cloned it in its step
                    given.replace(clone)
