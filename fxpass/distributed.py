"""The fused loss of a sharded head as a function, for programs that the backend cannot match.

In: hidden states, this rank's classes of the head, targets. Out: the loss over all classes, on
every rank of the group. For programs in which the backend cannot match a head and loss of DTensors
(a graph break between them, a hand-written parallel head, no compiler), in eager or inside
``torch.compile``::

    from fxpass.distributed import linear_cross_entropy

    loss = linear_cross_entropy(hidden, head.weight, labels, group=tensor_parallel_group)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from fxpass.capture.sharding import compiled_for_all_ranks
from fxpass.graph.placements import is_dtensor, placements_of
from fxpass.op import sharded
from fxpass.op.collectives import waited, with_summed_gradient
from fxpass.op.kept import saved_logits
from fxpass.op.losses import cross_entropy_of, reductions_of_loss
from fxpass.plan.choice import choose
from fxpass.settings import Settings
from fxpass.spec import expression
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.reductions import Reductions
from fxpass.spec.shards import Shard, dealt

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
    numbers per row, up to six with label smoothing and class probabilities, and in backward the
    gradient of ``input``. Under autocast the operands are cast to its dtype. It reads the settings
    ``FUSEDCE_STRATEGY`` and ``FUSEDCE_MEMORY_MB``.

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
        raise ValueError(f"reduction must be one of {', '.join(_REDUCTIONS)}; got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must fit into int64, got {ignore_index}")
    if any(t is not None and t.requires_grad for t in (target, weight)):
        raise RuntimeError("the target or the class weights requires a gradient: detach them")
    tensors = (input, linear_weight, linear_bias, target, weight)
    options = (reduction, ignore_index, label_smoothing, logits, sequence_dim)
    return _fused(*tensors, *_shard_of(linear_weight, group, classes), *options)


def _shard_of(weight: Any, group: Any, classes: int | None) -> Shard:
    """This rank's first class, the number of all classes, and the group that shards them."""
    if compiled_for_all_ranks():
        raise ValueError(
            f"{_NAME}: the compiled code depends on the rank's classes; set "
            "torch.distributed.config.compile_on_one_rank = False"
        )
    if is_dtensor(weight):
        mesh, placements = weight.device_mesh, placements_of(weight)
        over = [i for i, p in enumerate(placements) if not p.is_replicate()]
        if len(over) != 1 or not placements[over[0]].is_shard(0):
            raise ValueError(
                f"{_NAME}: linear_weight has the placements {list(placements)}; it has to be "
                "sharded over its classes, Shard(0), along one dimension of its mesh"
            )
        # Dynamo of torch 2.11 cannot trace DTensor's function for this
        group, total = mesh.get_group(over[0]), int(weight.shape[0])
        first, _ = dealt(total, group.size(), group.rank())
        return Shard(first, total, group.group_name)
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError(
            f"{_NAME} needs a process group: call torch.distributed.init_process_group, or pass one"
        )
    if not isinstance(group, dist.ProcessGroup):
        group = group.get_group()
    ranks, count = group.size(), weight.shape[0]
    total = count * ranks if classes is None else classes
    first, here = dealt(total, ranks, group.rank())
    if here != count:
        raise ValueError(
            f"{_NAME}: rank {group.rank()} of {ranks} has {count} of {total} classes, and should "
            f"have {here}: classes are divided as by torch.chunk. If the number of all classes is "
            "not this rank's number times the number of ranks, pass classes="
        )
    return Shard(first, total, group.group_name)


@torch.compiler.allow_in_graph
def _fused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    first: int,
    classes: int,
    group: str,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    logits: str,
    sequence_dim: int | None,
) -> Tensor:
    """The loss. It is one node of a Dynamo graph; AOTAutograd traces through it."""
    probabilities = target.is_floating_point()
    for name, t in (("weight", class_weight), ("target", target if probabilities else None)):
        if t is not None and t.shape[-1] != classes:
            raise ValueError(
                f"{_NAME}: {name} has {t.shape[-1]} of {classes} classes; each rank needs all of "
                "them"
            )
    x = _whole_rows(x, group, sequence_dim)
    weight, bias = _local(weight), None if bias is None else _local(bias)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    shape = target.shape[:-1] if probabilities else target.shape
    if shape != x.shape[:-1] or x.dim() < 2:
        raise ValueError(
            f"{_NAME} needs input [..., D] and target [...] or [..., V] of the same rows, got "
            f"{list(x.shape)}{'' if sequence_dim is None else ' from all ranks'} and "
            f"{list(target.shape)}"
        )
    leaves = {"x": x, "weight": weight, "bias": bias}
    needed = [k for k, t in leaves.items() if t is not None and t.requires_grad]
    gradients = tuple(needed) if torch.is_grad_enabled() else ()
    settings, shard = Settings.read(), {"first": first, "classes": classes, "group": group}
    picks = index = None
    if probabilities:
        target = target.flatten(0, -2)
    else:
        index = target.flatten().long()  # uint8 cannot hold -100
        picks = index.masked_fill(index == ignore_index, 0)
    dtype = compute_dtype(x.dtype)
    outputs, given = reductions_of_loss(target, class_weight, label_smoothing, dtype)
    given = [w[..., first : first + len(weight)] for w in given]
    names, x = tuple(sorted(outputs, key=str)), x.flatten(0, -2)
    transform, memory = expression.parse(logits), settings.memory_mb
    spec = Reductions(names, transform, gradients, memory_mb=memory)
    sizes = (x.shape[0], x.shape[1], max(1, weight.shape[0]))
    choice = choose(*sizes, x.dtype, x.device, None, spec, settings.strategy, sharded=True)
    saved = saved_logits(x, weight, bias) if choice.save_logits else None
    operands = x, weight, bias, None, picks, given, saved
    rows, _ = sharded.class_reductions(*operands, choice.spec.text(), **shard)
    logs = [rows[names.index(output)] for output in outputs]
    options = reduction, ignore_index, label_smoothing, classes
    mean_log = logs[1] if len(logs) == 2 else None
    loss = cross_entropy_of(logs[0], mean_log, index, class_weight, *options)
    return loss if reduction != "none" else loss.view(shape)


def _whole_rows(x: Tensor, group: str, sequence_dim: int | None) -> Tensor:
    """All rows, on all ranks; their gradient is the sum of the ranks' gradients."""
    if is_dtensor(x):
        if sequence_dim is not None:
            raise ValueError(f"{_NAME}: a DTensor has its own placements; leave out sequence_dim")
        return with_summed_gradient(cast(Any, x).full_tensor(), group)
    if sequence_dim is None:
        return with_summed_gradient(x, group)
    gathered = funcol.all_gather_tensor_autograd(x, sequence_dim, cast(Any, group))
    return waited(gathered)


def _local(tensor: Tensor) -> Tensor:
    return cast(Any, tensor).to_local() if is_dtensor(tensor) else tensor
