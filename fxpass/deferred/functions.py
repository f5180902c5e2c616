"""Torch functions of deferred logits: which are answered, and which compute the logits.

In: a call of a torch function. Out: what it returns, without logits that are computed; or
:class:`fxpass.capture.values.Stop`, with the reason, if it has to compute them::

    answered(F.cross_entropy, (logits.flatten(0, 1), labels), {}, make)

Views and casts of logits exist in any case (:mod:`fxpass.deferred.values`): they are remembered.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils import _pytree as pytree

from fxpass.capture.values import Stop, Value
from fxpass.deferred import answers
from fxpass.deferred.jobs import Logits, Operand, Record
from fxpass.deferred.known import recorded
from fxpass.deferred.recording import Call, is_value, without_masks
from fxpass.deferred.run import Run, is_distributed
from fxpass.deferred.values import Deferred, Part

Make = Callable[[Part, Sequence[Tensor]], Deferred]
ROOT = "returned by a graph"  # the record of logits that no function of the program made
# Functions that ask for values, or that run other code of the program.
COMPUTING = {"backward", "__deepcopy__", "__reduce_ex__", "item", "tolist"}
_ALIKE = {"_to_copy", "alias", "detach", "lift_fresh"}


def answered(func: Any, args: Any, kwargs: Any, make: Make) -> Any:
    """What a torch function returns, without computing logits.

    Args:
        func, args, kwargs: a call; some arguments are deferred logits.
        make: makes deferred logits of a part, and of the tensors that autograd links them to.

    Raises:
        Stop: it has to compute them.
    """
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func(*args, **kwargs)
    if func is torch.autograd.grad:
        before = see_gradients(kwargs["inputs"] if len(args) < 2 else args[1])
        try:
            return func(*args, **kwargs)
        finally:
            for run in before:
                run.see(-1)
    if name in COMPUTING or is_compiling() or (name == "clone" and _is_snapshot(args, kwargs)):
        raise Stop("asks for values")
    given: dict[Value, Any] = {}
    direct: dict[Value, Tensor] = {}
    classes: list[int] = []

    def of(argument: Any) -> Any:
        if not isinstance(argument, Deferred):
            return argument
        record = _record_of(argument)
        for value, source in record.given.items():
            if given.setdefault(value, source) is not source and not _alike(given[value], source):
                raise Stop("reads the logits of two calls of one graph")
            if isinstance(source, Logits):
                if source.tensor.grad_fn is not source.history:
                    raise Stop("reads logits that were written to")
                classes.append(int(value.shape[-1]))
        direct.setdefault(record.value, argument)
        return record.value

    as_values: Any = pytree.tree_map(of, (args, kwargs))
    if not classes:
        raise Stop("reads no logits")
    plain_args, plain_kwargs = without_masks(name, as_values[0], as_values[1])
    call = Call.now(func, plain_args, plain_kwargs, min(classes))
    found, numbers = recorded(call)
    direct |= dict(zip(found.operands, call.tensors, strict=True))
    given |= {v: Operand(t) for v, t in zip(found.operands, call.tensors, strict=True)}
    given |= dict(zip(found.numbers, numbers, strict=True))
    if found.written is not None:
        before, after = found.written
        written = [t for t in _deferred_in((args, kwargs)) if _record_of(t).value is before]
        trained = {v: t for v, t in direct.items() if v.trained and t.requires_grad}
        _write(written, _later(after, given, trained, make))
        return written[0] if found.values else None
    if not found.values:
        return func(*args, **kwargs)
    logits = {
        id(leaf) for leaf in pytree.tree_leaves(as_values, is_leaf=is_value) if is_value(leaf)
    }
    if found.shown or all(_is_cast(value, logits) for value in found.values):
        made = func(*args, **kwargs)
        _remember(made, found, given, pytree.tree_leaves((args, kwargs)))
        return made
    arguments = {v: t for v, t in direct.items() if v.trained and t.requires_grad}
    if not any(value.of_classes for value in found.values):
        made = answers.answer(found, given, arguments)
    elif all(value.of_classes for value in found.values):
        made = [_later(value, given, arguments, make) for value in found.values]
    else:
        raise Stop("returns tensors with classes, and others without")
    results = iter(made)
    return pytree.tree_map(
        lambda r: next(results) if is_value(r) else r,
        found.results,
        is_leaf=is_value,
    )


def _deferred_in(arguments: Any) -> list[Deferred]:
    leaves = pytree.tree_leaves(arguments)
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Deferred)}.values())


def _write(written: Sequence[Any], new: Deferred) -> None:
    """Lets deferred logits become others, in place. Only those that a function of the program has
    made, and of which there is no view: a write to those of a model computes them.

    Raises:
        Stop: they are others.
    """
    (t, *others), part = written, written[0]._part
    alone = not others and isinstance(part.run, answers.Later) and part.is_alone
    if not alone or isinstance(part.run, answers.GradientOfLogits) or t.is_inference():
        raise Stop("writes to logits of a model, or of which there are views")
    if t.requires_grad and not torch.is_grad_enabled():
        raise Stop("writes to logits where gradients are off")
    t.become(new)


def _is_snapshot(args: Any, kwargs: Any) -> bool:
    """Whether a copy is one of values, for later: it has no history, or there are several ranks, on
    which FSDP may free the weight. Others are copies to be written to."""
    (t,) = _deferred_in((args, kwargs))
    return not (torch.is_grad_enabled() and t.requires_grad) or is_distributed()


def of_leaf(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one tensor that reads its memory, and does not ask the tensor's class."""

    @functools.wraps(original)
    def function(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        leaf: Any = getattr(tensor, "_leaf", None)
        return original(leaf() if isinstance(tensor, Deferred) else tensor, *args, **kwargs)

    return function


def see_gradients(tensors: Any) -> list[Run]:
    """Lets gradients pass tensors that functions made of logits, each as in eager: a program sees
    them. Returns the runs of the logits."""
    found: dict[Run, None] = {}
    for t in pytree.tree_leaves(tensors):
        record = t._part.record if isinstance(t, Deferred) else None
        if isinstance(record, Record):
            logits = [g for g in record.given.values() if isinstance(g, Logits)]
            found |= {of.run: None for of in logits}
    for run in found:
        run.see(1)
    return [*found]


def _alike(one: Any, other: Any) -> bool:
    return isinstance(one, Logits) and one.tensor is other.tensor


def _record_of(t: Deferred) -> Record:
    """How deferred logits were made.

    Raises:
        Stop: they are computed, or autograd knows more of them than the record.
    """
    part = t._part
    run = part.run
    if run is None:
        raise Stop("reads logits that are computed")
    if part.record is None:
        raise Stop("reads logits of which nothing is known")
    if isinstance(run, Run) and run.inputs is None:
        raise Stop("reads logits that were dropped")
    record = part.record
    if record == ROOT:
        value = run.root(t.requires_grad)
        record = Record(value, {value: Logits(run, t, t.grad_fn, weakref.ref(part.buffer))})
    trained = record.value.trained
    # torch says of a view without gradients, of logits with gradients, that it is a leaf with some
    cut = not trained and t.is_leaf and not torch.is_grad_enabled()
    if (t.requires_grad != trained and not cut) or (trained and t.is_leaf):
        raise Stop("reads a tensor whose history was changed")
    return record


def _is_cast(value: Value, arguments: Collection[int]) -> bool:
    """Whether a tensor is one of the arguments in another dtype."""
    while id(value) not in arguments and value.step is not None:
        source = value.step.args[0] if value.step.args else None
        if value.step.op.overloadpacket.__name__ not in _ALIKE or not isinstance(source, Value):
            return False
        value = source
    return id(value) in arguments


def _remember(made: Any, found: Any, given: Any, arguments: Sequence[Any]) -> None:
    """Notes of tensors that exist how they were made."""
    tensors = [t for t in pytree.tree_leaves(made) if isinstance(t, Tensor)]
    if len(tensors) != len(found.values):
        return
    for t, value in zip(tensors, found.values, strict=True):
        if isinstance(t, Deferred) and not any(t is a for a in arguments):
            t._computes.record = Record(value, given)


def _later(value: Value, given: Any, arguments: Any, make: Make) -> Deferred:
    part = answers.later(value, given, tuple(arguments))
    run: Any = part.run
    if not value.trained:
        return make(part, ())
    links = {**arguments, **run.job.tracked}
    return make(part, [links[source] for source in run.job.linked])
