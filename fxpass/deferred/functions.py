"""Torch functions of deferred logits: which are answered, and which compute the logits.

In: a call of a torch function. Out: what it returns, without logits that are computed; or
:class:`fxpass.rows.tags.Stop`, with the reason, if it has to compute them::

    answered(F.cross_entropy, (logits.flatten(0, 1), labels), {}, make)

Views and casts of logits exist in any case (:mod:`fxpass.deferred.values`): they are remembered.
Results that are as large as logits are deferred (:mod:`fxpass.deferred.later`), all others computed
(:mod:`fxpass.deferred.programs`). Autograd links both to hidden states, weight and operands.

NOTE: what is computed together. Each function whose results are small is one program: results of
one function share a pass over the logits, and two functions take two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils import _pytree as pytree

from fxpass.deferred.inputs import quiet
from fxpass.deferred.later import Later
from fxpass.deferred.layouts import Layout, Like, layout_of
from fxpass.deferred.records import (
    Call,
    Made,
    PlainOperand,
    Source,
    call_of,
    calls_of,
    is_source,
    leaves_of,
)
from fxpass.deferred.run import Run, is_distributed
from fxpass.deferred.seen import made_of, remember
from fxpass.deferred.values import Buffer, BufferView, Deferred
from fxpass.graph.source import calling_line
from fxpass.rows.tags import Stop

Make = Callable[[BufferView, Sequence[Any]], Deferred]
ROOT = "returned by a graph"  # the record of logits that no function of the program made
# Functions that ask for values, or that run other code of the program.
COMPUTING = {"backward", "__deepcopy__", "__reduce_ex__", "item", "tolist"}
# A program is worth its logits if they take this part of what a head's have to take.
LEAST = 64
LATE = (
    "{}, after functions of these logits were computed without them: their gradients go to hidden "
    "states and weight, not through the logits. Call retain_grad() on the logits before that; or "
    "have them computed with the loss (FUSEDCE_LOGITS=keep)"
)


def answered(func: Any, args: Any, kwargs: Any, make: Make) -> Any:
    """The result of a torch function, without computing logits.

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
        see_gradients(
            kwargs["inputs"] if len(args) < 2 else args[1],
            "autograd.grad asks for the gradient of deferred logits",
        )
        return func(*args, **kwargs)
    if name in COMPUTING or is_compiling() or (name == "clone" and _is_snapshot(args, kwargs)):
        raise Stop("asks for values")
    given = _deferred_in((args, kwargs))
    if not given:
        raise Stop("reads no logits")
    plain_args, plain_kwargs = _without_masks(name, args, kwargs)
    records = {id(t): _record_of(t) for t in given}
    args_of, kwargs_of = pytree.tree_map(
        lambda leaf: records.get(id(leaf), leaf), (plain_args, plain_kwargs)
    )
    call = call_of(func, args_of, kwargs_of, given[0].device)
    likes = {records[id(t)]: _like(t._part.like, t, t._part.trained) for t in given}
    operands = [s for s in call.sources if isinstance(s, PlainOperand)]
    likes |= {s: _like(s.tensor, s.tensor, s.tensor.requires_grad) for s in operands}
    layout = layout_of(call, likes)
    size = min(t.nbytes for t in given)
    call = _of_one_program(call, layout, given)
    if layout.written is not None:
        like, at = layout.written
        written = [t for t in given if records[id(t)] is call.sources[at]]
        _check_written(written)
        after = Made(replace(_kept(call, size), writes=call.sources[at]), None)
        changed: Any = written[0]
        changed.become(_later(after, like, make))
        return layout.filled([changed] * len(layout.results))
    if not layout.results:
        return func(*args, **kwargs)
    if layout.shown or layout.cast:
        before, after = (str(t.dtype)[6:] for t in (given[0], layout.results[0].like))
        if layout.shown and before != after:
            raise Stop(f"reads the bits of {before} as {after}")
        made = func(*args, **kwargs)
        _remember(made, call, layout, pytree.tree_leaves((args, kwargs)))
        return made
    whole = [_is_wide(result, given) for result in layout.results]
    if not any(whole):
        return layout.filled(_computed(call, layout, given))
    if not all(whole):
        raise Stop("returns some tensors as large as logits, and others that are not")
    if all(t._part.has_few_rows and not t._part.trained for t in given):
        raise Stop("reads few rows")
    call = _kept(call, size)
    each = enumerate(layout.results)
    return layout.filled([_later(Made(call, i), like, make) for i, like in each])


def _of_one_program(call: Call, layout: Layout, given: Sequence[Deferred]) -> Call:
    """A call that reads how its operands were made, if they are results of the same logits, and no
    gradient of them is asked for."""
    if layout.written is not None or layout.shown or layout.cast:
        return call
    buffers = [t._part.buffer for t in given]
    no_gradients = not any(r.trained for r in layout.results)
    found: dict[int, Source] = {}
    for s in call.sources:
        if not isinstance(s, PlainOperand) or (s.tensor.requires_grad and not no_gradients):
            continue
        if (made := made_of(buffers, s.tensor)) is not None:
            found[id(s)] = made
    args, kwargs = pytree.tree_map(
        lambda leaf: found.get(id(leaf), leaf), (call.args, call.kwargs), is_leaf=is_source
    )
    return replace(call, args=args, kwargs=kwargs) if found else call


def _deferred_in(arguments: Any) -> list[Deferred]:
    leaves = pytree.tree_leaves(arguments)
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Deferred)}.values())


def _like(like: Tensor, t: Tensor, trained: bool) -> Like:
    with quiet():
        meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return Like(meta, t.device, trained)


def _is_wide(result: Like, given: Sequence[Deferred]) -> bool:
    """Whether a result is as large as logits, or has rows of them."""
    size = result.like.numel()
    if 2 * size >= min(t.numel() for t in given):
        return True
    runs = [t._part.run for t in given]
    classes = {root.like.shape[-1] for run in runs if run is not None for root in run.roots}
    shape = result.like.shape
    return len(shape) > 1 and shape[-1] in classes and size >= 2 * shape[-1]


# ---------------------------------------------------------------- small results


def _computed(call: Call, layout: Layout, given: Sequence[Deferred]) -> list[Tensor]:
    """The results of a call, none of which is as large as logits."""
    wanted = [Made(call, i) for i in range(len(layout.results))]
    roots = [leaf for leaf in leaves_of(calls_of(wanted)) if isinstance(leaf, Run)]
    programs = roots[0].recipe.programs
    if sum(t.nbytes for t in given) * LEAST < programs.least or given[0].numel() < 2:
        raise Stop("reads few rows")
    trained = any(result.trained for result in layout.results)
    found = programs(wanted, trained, calling_line())
    remember([t._part.buffer for t in given], wanted, found)
    linked = [t for t in found if t.requires_grad]
    for root in roots if linked else ():
        root.answered = True
        for hook, t in ((hook, t) for hook in root.hooks for t in linked):
            t.register_hook(hook)
    return found


def see_gradients(tensors: Any, what: str) -> None:
    """A program looks at gradients of deferred logits: functions of them compute the logits then.

    Raises:
        RuntimeError: one was answered before, so that its gradients do not pass the logits.
    """
    for t in pytree.tree_leaves(tensors):
        run = t._part.run if isinstance(t, Deferred) else None
        if run is None:
            continue
        if any(root.answered for root in run.roots):
            raise RuntimeError(LATE.format(what))
        for one in (run, *run.roots):
            one.seen = True


def is_of_fsdp(hook: Any) -> bool:
    """Whether a hook only waits for a gradient, and returns it."""
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.")


# ---------------------------------------------------------------- results as large as logits


def _kept(call: Call, size: int) -> Call:
    """A call that is read later, if logits take so many bytes."""
    calls: dict[Call, Call] = {}

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Made):
            after = calls[leaf.call]
            return leaf if after is leaf.call else Made(after, leaf.index)
        return leaf.kept(size) if isinstance(leaf, PlainOperand) else leaf

    with quiet():
        for one in calls_of([Made(call, None)]):
            known = {id(s): of(s) for s in one.sources}
            args, kwargs = pytree.tree_map(
                lambda leaf, known=known: known.get(id(leaf), leaf),
                (one.args, one.kwargs),
                is_leaf=is_source,
            )
            same = all(known[id(s)] is s for s in one.sources)
            calls[one] = one if same else replace(one, args=args, kwargs=kwargs)
    return calls[call]


def _later(made: Made, layout: Like, make: Make) -> Deferred:
    """Deferred logits that a call makes."""
    run: Any = Later(made, layout)
    part = BufferView(Buffer(run, run.device, run.like), run.like)
    part.record = made
    part.trained = layout.trained
    return make(part, run.given if layout.trained else ())


def _remember(made: Any, call: Call, layout: Layout, arguments: Sequence[Any]) -> None:
    """Notes of tensors that exist how they were made."""
    tensors = [t for t in pytree.tree_leaves(made) if isinstance(t, Tensor)]
    if len(tensors) != len(layout.results):
        return
    for i, t in enumerate(tensors):
        if isinstance(t, Deferred) and not any(t is a for a in arguments):
            part = t._computes
            part.record = Made(call, i)
            part.trained = layout.results[i].trained


def _check_written(written: Sequence[Deferred]) -> None:
    """Lets deferred logits become others, in place. Only those that a function of the program has
    made, and of which there is no view: a write to those of a model computes them.

    Raises:
        Stop: they are others.
    """
    if len(written) != 1:
        raise Stop("writes to its arguments")
    (t,) = written
    if not (isinstance(t._part.run, Later) and t._part.is_alone) or t.is_inference():
        raise Stop("writes to logits of a model, or of which there are views")
    if t.requires_grad and not torch.is_grad_enabled():
        raise Stop("writes to logits where gradients are off")


def _record_of(t: Deferred) -> Source:
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
    if run.inputs is None:
        raise Stop("reads logits that were dropped")
    if run.seen or any(root.seen for root in run.roots):
        raise Stop("reads logits at whose gradient the program looks")
    # torch says of a view without gradients, of logits with gradients, that it is a leaf with some
    cut = not part.trained and t.is_leaf and not torch.is_grad_enabled()
    if (t.requires_grad != part.trained and not cut) or (part.trained and t.is_leaf):
        raise Stop("reads a tensor whose history was changed")
    return run if part.record == ROOT else part.record


def _is_snapshot(args: Any, kwargs: Any) -> bool:
    """Whether a copy is one of values, for later: it has no history, or there are several ranks, on
    which FSDP may free the weight. Others are copies to be written to."""
    (t,) = _deferred_in((args, kwargs))
    return not (torch.is_grad_enabled() and t.requires_grad) or is_distributed()


def _without_masks(name: str, args: Any, kwargs: Any) -> Any:
    """Arguments with the numbers of the elements that masks take, in the place of masks."""
    if name != "__getitem__" or len(args) != 2:
        return args, kwargs

    def numbers(index: Any) -> tuple[Any, ...]:
        if isinstance(index, Tensor) and index.dtype == torch.bool and index.dim():
            return index.nonzero(as_tuple=True)
        return (index,)

    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    taken: list[Any] = [number for one in index for number in numbers(one)]
    return (args[0], tuple(taken) if len(taken) > 1 else taken[0]), kwargs


def of_leaf(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one tensor that reads its memory, and does not ask the tensor's class."""

    @functools.wraps(original)
    def function(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        leaf: Any = getattr(tensor, "_leaf", None)
        return original(leaf() if isinstance(tensor, Deferred) else tensor, *args, **kwargs)

    return function
