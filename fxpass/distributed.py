"""The loss of a sharded head as a function, for programs without a backend, or without DTensors.

In: hidden states, this rank's classes of the head, targets. Out: the loss over all classes, on
every rank of the group::

    from fxpass.distributed import linear_cross_entropy

    loss = linear_cross_entropy(hidden, head.weight, labels, group=tensor_parallel_group)

It is a few lines of PyTorch with collectives, :mod:`fxpass.rows.vocabulary`. In ``torch.compile``
they are part of the graph, which the backend fuses. In eager they are a program of their own, which
the pass alone compiles: the logits never exist.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import detect_fake_mode

from fxpass import messages
from fxpass.formula import expression
from fxpass.formula.shards import class_shard
from fxpass.functional import compiled_alone
from fxpass.graph.placements import compiled_for_all_ranks, is_dtensor, placements_of
from fxpass.op.collectives import with_summed_gradient
from fxpass.rows.vocabulary import local_shard, vocabulary_loss
from fxpass.settings import Settings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["linear_cross_entropy"]

_NAME = "fxpass.distributed.linear_cross_entropy"
_REDUCTIONS = ("none", "mean", "sum")


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logits: str = "z",
    group: dist.ProcessGroup | DeviceMesh | None = None,
    classes: int | None = None,
    sequence_dim: int | None = None,
) -> Tensor:
    """Cross-entropy of ``input @ linear_weight.T + linear_bias``, classes sharded over ranks.

    The names are those of ``torch.nn.functional.linear_cross_entropy``. The ranks exchange three
    numbers per row, four with label smoothing, and in backward the gradient of ``input``. Under
    autocast the operands are cast to its dtype. In eager it reads the setting
    ``FUSEDCE_MEMORY_MB``.

    Args:
        input: ``[..., D]`` hidden states, floating point: the same on all ranks, or this rank's
            part along ``sequence_dim``. Its gradient is complete on every rank.
        linear_weight: ``[V_r, D]``, this rank's classes, in the order of the ranks and divided as
            by ``torch.chunk``: only the last ranks may have fewer. Or a DTensor ``[V, D]`` that is
            sharded over its classes; ``group`` is not needed then.
        target: ``[...]`` int64 class indices among all classes, or ``[..., V]`` probabilities; all
            rows, the same on all ranks.
        linear_bias: ``[V_r]``, sharded as ``linear_weight``.
        weight: ``[V]`` class weights, of all classes.
        reduction, ignore_index, label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        logits: the transformed logit, as an expression in the linear's output ``z``:
            ``30*tanh(z/30)`` is a soft-cap.
        group: the ranks that shard the classes; all ranks by default.
        classes: V, the number of all classes; by default V_r times the number of ranks. If ranks
            have different numbers of classes, all have to pass it.
        sequence_dim: the dimension of ``input`` that is divided into equal parts over the ranks.

    Returns:
        The loss, f32 (f64 for f64 operands), the same on all ranks: a scalar, or ``[...]`` for
        ``none``.

    Raises:
        ValueError: operands do not fit together, or an option is not allowed; the message says so.
        RuntimeError: the target or the class weights need a gradient.
        IndexError: a class index is outside ``[0, V)`` and not ``ignore_index`` (on CPU; on GPUs a
            device-side assertion fails).
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(messages.REDUCTION.format(names=", ".join(_REDUCTIONS), value=reduction))
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(messages.LABEL_SMOOTHING.format(value=label_smoothing))
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(messages.IGNORE_INDEX.format(value=ignore_index))
    if any(t is not None and t.requires_grad for t in (target, weight)):
        raise RuntimeError(messages.TARGET_GRADIENT)
    shard = _shard_of(linear_weight, group, classes)
    _check(input, target, weight, shard, sequence_dim)
    options = _Options(reduction, ignore_index, label_smoothing, logits, sequence_dim)
    if torch.compiler.is_compiling() or detect_fake_mode([input]) is not None:  # traced by others
        return _loss(input, linear_weight, linear_bias, target, weight, shard, options)
    expression.parse(logits)
    index = None if target.is_floating_point() else target.long()
    if index is not None and index.device.type == "cpu":
        _check_classes(index, ignore_index, shard.classes)
    x = input
    if is_dtensor(x):
        x = with_summed_gradient(cast(Any, x).full_tensor(), shard.group)
    bias = None if linear_bias is None else local_shard(linear_bias)
    program = _program(shard, options, is_dtensor(input), Settings.read().memory_mb)
    return program(x, local_shard(linear_weight), bias, target, weight)


class _Options(NamedTuple):
    """The options of a loss."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    logits: str
    sequence_dim: int | None


@functools.lru_cache(maxsize=256)
def _program(
    shard: _Shard, options: _Options, summed: bool, memory_mb: int
) -> Callable[..., Tensor]:
    """The loss of plain tensors, compiled by the pass; for any number of rows.

    Args:
        summed: whether the gradient of the hidden states is added up by the caller.
    """

    def loss(
        x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None
    ) -> Tensor:
        return _loss(x, weight, bias, target, class_weight, shard, options, summed)

    return compiled_alone(loss, memory_mb)


def _loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    shard: _Shard,
    options: _Options,
    summed: bool = False,
) -> Tensor:
    """:func:`fxpass.rows.vocabulary.vocabulary_loss`, which has no records among its parameters:
    it is a node of a graph."""
    return vocabulary_loss(
        x,
        weight,
        bias,
        target,
        class_weight,
        first=shard.first,
        classes=shard.classes,
        group=shard.group,
        ranks=shard.ranks,
        reduction=options.reduction,
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        logits=options.logits,
        sequence_dim=options.sequence_dim,
        summed=summed,
    )


class _Shard(NamedTuple):
    """A rank's part of the classes.

    Attributes:
        first: the rank's first class.
        classes: the number of all classes.
        group, ranks: the name and the size of the group that shards the classes.
    """

    first: int
    classes: int
    group: str
    ranks: int


def _shard_of(weight: Any, group: Any, classes: int | None) -> _Shard:
    """This rank's part of the classes."""
    if compiled_for_all_ranks():
        raise ValueError(messages.COMPILED_FOR_ALL.format(name=_NAME))
    if is_dtensor(weight):
        mesh = weight.device_mesh
        placements = placements_of(weight)
        over = [i for i, p in enumerate(placements) if not p.is_replicate()]
        if len(over) != 1 or not placements[over[0]].is_shard(0):
            raise ValueError(messages.PLACEMENTS.format(name=_NAME, placements=list(placements)))
        # torch 2.11: Dynamo cannot trace DTensor's function for the shard's size and offset
        group = mesh.get_group(over[0])
        total = int(weight.shape[0])
        first, _ = class_shard(total, group.size(), group.rank())
        return _Shard(first, total, group.group_name, group.size())
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError(messages.NO_GROUP.format(name=_NAME))
    if not isinstance(group, dist.ProcessGroup):
        group = group.get_group()
    ranks = group.size()
    count = weight.shape[0]
    total = count * ranks if classes is None else classes
    first, here = class_shard(total, ranks, group.rank())
    if here != count:
        raise ValueError(
            messages.SHARD_SIZE.format(
                name=_NAME, rank=group.rank(), ranks=ranks, count=count, classes=total, due=here
            )
        )
    return _Shard(first, total, group.group_name, ranks)


def _check(
    x: Tensor, target: Tensor, weight: Tensor | None, shard: _Shard, sequence_dim: int | None
) -> None:
    """Raises ValueError for shapes that do not fit together."""
    probabilities = target.is_floating_point()
    for name, t in (("weight", weight), ("target", target if probabilities else None)):
        if t is not None and t.shape[-1] != shard.classes:
            raise ValueError(
                messages.ALL_CLASSES.format(
                    name=_NAME, operand=name, count=t.shape[-1], classes=shard.classes
                )
            )
    if is_dtensor(x) and sequence_dim is not None:
        raise ValueError(messages.SEQUENCE_DIM.format(name=_NAME))
    sizes = list(x.shape)
    if sequence_dim is not None and -len(sizes) <= sequence_dim < len(sizes):
        sizes[sequence_dim] *= shard.ranks
    shape = target.shape[:-1] if probabilities else target.shape
    if list(shape) != sizes[:-1] or len(sizes) < 2:
        raise ValueError(
            messages.SAME_ROWS.format(
                name=_NAME,
                input=sizes,
                ranks="" if sequence_dim is None else " from all ranks",
                target=list(target.shape),
            )
        )


def _check_classes(index: Tensor, ignored: int, classes: int) -> None:
    """Raises IndexError for a class that does not exist."""
    wrong = index[(index != ignored) & ((index < 0) | (index >= classes))]
    if len(wrong):
        raise IndexError(messages.CLASS_RANGE.format(index=int(wrong[0]), classes=classes))
