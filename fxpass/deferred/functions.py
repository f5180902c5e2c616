"""Torch functions of deferred logits: which are answered, and which compute the logits.

In: a call of a torch function. Out: its result, without computing the logits; or
:class:`fxpass.rows.tags.Stop`, with the reason why the logits have to be computed::

    answered(F.cross_entropy, (logits.flatten(0, 1), labels), {}, make)

Views and casts of logits are made as of any tensor (:mod:`fxpass.deferred.values`), and recorded.
Results that are as large as logits are deferred (:mod:`fxpass.deferred.replay`), all others are
computed (:mod:`fxpass.deferred.programs`). Autograd links both to hidden states, weight and
operands.

NOTE: passes over the logits. Each function with small results is one program: its results share a
pass, and two functions need two passes.
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

from fxpass import messages
from fxpass.deferred.inputs import quiet
from fxpass.deferred.layouts import CallLayout, TensorLayout, layout_of
from fxpass.deferred.records import (
    Call,
    CallResult,
    Operand,
    PlainOperand,
    call_of,
    calls_of,
    is_operand,
    origins_of,
)
from fxpass.deferred.replay import Replay
from fxpass.deferred.results import find_result, record_results
from fxpass.deferred.run import Run, is_distributed
from fxpass.deferred.values import Buffer, BufferView, Deferred
from fxpass.graph.source import calling_line
from fxpass.rows.tags import Stop

Make = Callable[[BufferView, Sequence[Any]], Deferred]
ROOT = "returned by a graph"  # the record of logits that are no result of a function
# Functions that read values, or run other code of the program.
COMPUTING = {"backward", "__deepcopy__", "__reduce_ex__", "item", "tolist"}
# A program runs on logits of at least 1/LEAST of the size from which a loss is fused.
LEAST = 64


def answered(func: Any, args: Any, kwargs: Any, make: Make) -> Any:
    """The result of a torch function, without computing logits.

    Args:
        func, args, kwargs: a call; some arguments are deferred logits.
        make: makes deferred logits of a part, and of the tensors that autograd links them to.

    Raises:
        Stop: the logits have to be computed.
    """
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func(*args, **kwargs)
    if func is torch.autograd.grad:
        mark_gradient_use(
            kwargs["inputs"] if len(args) < 2 else args[1],
            "autograd.grad asks for the gradient of deferred logits",
        )
        return func(*args, **kwargs)
    if name in COMPUTING or is_compiling() or (name == "clone" and _is_snapshot(args, kwargs)):
        raise Stop(messages.ASKS_VALUES)
    given = _deferred_in((args, kwargs))
    if not given:
        raise Stop(messages.NO_LOGITS)
    plain_args, plain_kwargs = _without_masks(name, args, kwargs)
    records = {id(t): _record_of(t) for t in given}
    args_of, kwargs_of = pytree.tree_map(
        lambda leaf: records.get(id(leaf), leaf), (plain_args, plain_kwargs)
    )
    call = call_of(func, args_of, kwargs_of, given[0].device)
    layouts = {records[id(t)]: _tensor_layout(t._part.like, t, t._part.trained) for t in given}
    plain = [x for x in call.operands if isinstance(x, PlainOperand)]
    layouts |= {x: _tensor_layout(x.tensor, x.tensor, x.tensor.requires_grad) for x in plain}
    layout = layout_of(call, layouts)
    size = min(t.nbytes for t in given)
    call = _with_recorded_results(call, layout, given)
    if layout.written is not None:
        tensor_layout, at = layout.written
        operand = call.operands[at]
        written = _written_logits([t for t in given if records[id(t)] is operand])
        after = CallResult(replace(_saved_call(call, size), writes=operand), None)
        written.become(_deferred_result(after, tensor_layout, make))
        return layout.filled([written] * len(layout.results))
    if not layout.results:
        return func(*args, **kwargs)
    if layout.aliased or layout.cast:
        before, after = (str(t.dtype)[6:] for t in (given[0], layout.results[0].meta))
        if layout.aliased and before != after:
            raise Stop(messages.BITS.format(before=before, after=after))
        result = func(*args, **kwargs)
        _record_views(result, call, layout, pytree.tree_leaves((args, kwargs)))
        return result
    large = [_is_large(result, given) for result in layout.results]
    if not any(large):
        return layout.filled(_small_results(call, layout, given))
    if not all(large):
        raise Stop(messages.SOME_AS_LARGE)
    if all(t._part.has_few_rows and not t._part.trained for t in given):
        raise Stop(messages.FEW_ROWS)
    call = _saved_call(call, size)
    each = enumerate(layout.results)
    return layout.filled([_deferred_result(CallResult(call, i), of, make) for i, of in each])


def _with_recorded_results(call: Call, layout: CallLayout, given: Sequence[Deferred]) -> Call:
    """The call with recorded results in the place of plain operands that are results of the same
    logits, if no gradient of these operands is needed."""
    if layout.written is not None or layout.aliased or layout.cast:
        return call
    buffers = [t._part.buffer for t in given]
    trained = any(result.trained for result in layout.results)
    found: dict[int, Operand] = {}
    for x in call.operands:
        if not isinstance(x, PlainOperand) or (x.tensor.requires_grad and trained):
            continue
        if (result := find_result(buffers, x.tensor)) is not None:
            found[id(x)] = result
    args, kwargs = pytree.tree_map(
        lambda leaf: found.get(id(leaf), leaf), (call.args, call.kwargs), is_leaf=is_operand
    )
    return replace(call, args=args, kwargs=kwargs) if found else call


def _deferred_in(arguments: Any) -> list[Deferred]:
    leaves = pytree.tree_leaves(arguments)
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Deferred)}.values())


def _tensor_layout(like: Tensor, t: Tensor, trained: bool) -> TensorLayout:
    with quiet():
        meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return TensorLayout(meta, t.device, trained)


def _is_large(result: TensorLayout, given: Sequence[Deferred]) -> bool:
    """Is true for a result that is as large as logits, or has rows of logits."""
    size = result.meta.numel()
    if 2 * size >= min(t.numel() for t in given):
        return True
    runs = [t._part.run for t in given]
    classes = {root.like.shape[-1] for run in runs if run is not None for root in run.roots}
    shape = result.meta.shape
    return len(shape) > 1 and shape[-1] in classes and size >= 2 * shape[-1]


# ---------------------------------------------------------------- small results


def _small_results(call: Call, layout: CallLayout, given: Sequence[Deferred]) -> list[Tensor]:
    """The results of a call, none of which is as large as logits."""
    wanted = [CallResult(call, i) for i in range(len(layout.results))]
    roots = [origin for origin in origins_of(calls_of(wanted)) if isinstance(origin, Run)]
    programs = roots[0].recipe.programs
    if sum(t.nbytes for t in given) * LEAST < programs.least or given[0].numel() < 2:
        raise Stop(messages.FEW_ROWS)
    trained = any(result.trained for result in layout.results)
    results = programs(wanted, trained, calling_line())
    record_results([t._part.buffer for t in given], wanted, results)
    linked = [t for t in results if t.requires_grad]
    for root in roots if linked else ():
        root.answered = True
        for hook, t in ((hook, t) for hook in root.hooks for t in linked):
            t.register_hook(hook)
    return results


def mark_gradient_use(tensors: Any, use: str) -> None:
    """Notes that the program uses gradients of tensors, some of them deferred logits: their
    functions compute the logits from now on.

    Raises:
        RuntimeError: a function was answered before; its gradients do not pass the logits.
    """
    for t in pytree.tree_leaves(tensors):
        run = t._part.run if isinstance(t, Deferred) else None
        if run is None:
            continue
        if any(root.answered for root in run.roots):
            raise RuntimeError(messages.GRADIENT_LATE.format(what=use))
        for one in (run, *run.roots):
            one.gradient_used = True


def is_of_fsdp(hook: Any) -> bool:
    """Is true for a hook that only waits for a gradient, and returns it unchanged."""
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.")


# ---------------------------------------------------------------- results as large as logits


def _saved_call(call: Call, logits_bytes: int) -> Call:
    """The call, and the calls behind it, with saved operands."""
    calls: dict[Call, Call] = {}

    def saved(operand: Operand) -> Operand:
        if isinstance(operand, CallResult):
            after = calls[operand.call]
            return operand if after is operand.call else CallResult(after, operand.index)
        return operand.saved(logits_bytes) if isinstance(operand, PlainOperand) else operand

    with quiet():
        for before in calls_of([CallResult(call, None)]):
            operands = {id(x): saved(x) for x in before.operands}
            args, kwargs = pytree.tree_map(
                lambda leaf, operands=operands: operands.get(id(leaf), leaf),
                (before.args, before.kwargs),
                is_leaf=is_operand,
            )
            same = all(operands[id(x)] is x for x in before.operands)
            calls[before] = before if same else replace(before, args=args, kwargs=kwargs)
    return calls[call]


def _deferred_result(result: CallResult, layout: TensorLayout, make: Make) -> Deferred:
    """The result of a call, as deferred logits."""
    run: Any = Replay(result, layout)
    part = BufferView(Buffer(run, run.device, run.like), run.like)
    part.record = result
    part.trained = layout.trained
    return make(part, run.given if layout.trained else ())


def _record_views(result: Any, call: Call, layout: CallLayout, arguments: Sequence[Any]) -> None:
    """Records the call at the views and casts that it has returned."""
    tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
    if len(tensors) != len(layout.results):
        return
    for i, t in enumerate(tensors):
        if isinstance(t, Deferred) and not any(t is a for a in arguments):
            part = t._computes
            part.record = CallResult(call, i)
            part.trained = layout.results[i].trained


def _written_logits(written: Sequence[Deferred]) -> Any:
    """The deferred logits that a write turns into other deferred logits.

    Raises:
        Stop: several tensors are written; or a model returned the tensor, or it has views.
    """
    if len(written) != 1:
        raise Stop(messages.WRITES)
    (t,) = written
    if not (isinstance(t._part.run, Replay) and t._part.is_alone) or t.is_inference():
        raise Stop(messages.WRITES_OF_MODEL)
    if t.requires_grad and not torch.is_grad_enabled():
        raise Stop(messages.WRITES_WITHOUT_GRADIENTS)
    return t


def _record_of(t: Deferred) -> Operand:
    """The record of deferred logits.

    Raises:
        Stop: they have no record, or are computed, or have another autograd history.
    """
    part = t._part
    run = part.run
    if run is None:
        raise Stop(messages.ALREADY_COMPUTED)
    if part.record is None:
        raise Stop(messages.NO_RECORD)
    if run.inputs is None:
        raise Stop(messages.WERE_DROPPED)
    if run.gradient_used or any(root.gradient_used for root in run.roots):
        raise Stop(messages.GRADIENT_SEEN)
    # torch says of a view without gradients, of logits with gradients: a leaf with a gradient
    cut = not part.trained and t.is_leaf and not torch.is_grad_enabled()
    if (t.requires_grad != part.trained and not cut) or (part.trained and t.is_leaf):
        raise Stop(messages.HISTORY_CHANGED)
    return run if part.record == ROOT else part.record


def _is_snapshot(args: Any, kwargs: Any) -> bool:
    """Is true for a copy that saves values: it has no history, or there are several ranks, on which
    FSDP may free the weight. Programs write to all other copies."""
    (t,) = _deferred_in((args, kwargs))
    return not (torch.is_grad_enabled() and t.requires_grad) or is_distributed()


def _without_masks(name: str, args: Any, kwargs: Any) -> Any:
    """Arguments with the indices of selected elements in the place of boolean masks."""
    if name != "__getitem__" or len(args) != 2:
        return args, kwargs

    def without_mask(index: Any) -> tuple[Any, ...]:
        if isinstance(index, Tensor) and index.dtype == torch.bool and index.dim():
            return index.nonzero(as_tuple=True)
        return (index,)

    given = args[1] if isinstance(args[1], tuple) else (args[1],)
    indices: list[Any] = [index for some in given for index in without_mask(some)]
    return (args[0], tuple(indices) if len(indices) > 1 else indices[0]), kwargs


def on_plain_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which reads a tensor's memory and ignores its class, on the values of deferred
    logits."""

    @functools.wraps(original)
    def function(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        detached: Any = getattr(tensor, "_detached", None)
        return original(detached() if isinstance(tensor, Deferred) else tensor, *args, **kwargs)

    return function
