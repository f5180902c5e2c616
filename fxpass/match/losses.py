"""Losses: the spellings of a cross-entropy, and of the log-sum-exp in a z-loss.

In: a node. Out: a :class:`Loss` with its logits and its arguments, or None if the node is no loss::

    nll_loss(%log_probabilities, %labels)         neg(gather(log_softmax(%z, -1), -1, %labels))
    cross_entropy(%z, %labels)                    sub(logsumexp(%z, -1), gather(%z, -1, %labels))
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.fx import Node

from fxpass.graph.autocast import autocast_dtype
from fxpass.graph.calls import arguments, first_operand
from fxpass.graph.functions import CASTS, function_of, reads_values
from fxpass.graph.nodes import REQUIRED, NoMatch, is_tensor, value
from fxpass.graph.region import Region
from fxpass.graph.source import call_name, source_line
from fxpass.match.views import VIEWS, index_of
from fxpass.spec.dtypes import INDEX_DTYPES, LOW_PRECISION, short

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loss:
    """One loss.

    Attributes:
        node: the node that the operator replaces: the mean or sum of the loss, or one loss per row.
        logits: the end of the chain from the linear.
        dim: position of the class dimension in ``logits``.
        inner: further nodes of the spelling, between the logits and ``node``.
        counted: nodes of the spelling that do not read the logits (``arange``).
        target: class indices, class probabilities, or None for a log-sum-exp.
        class_weight: ``[V]`` or None.
        probabilities: whether the target holds class probabilities.
        log_softmax: whether the chain has to hold a log-softmax.
        negative: whether the node's value is minus the loss.
        keepdim: whether the node's value has a class dimension of size one.
        wraps: the class indices that wrap around, as in the program's indexing: ``negative`` (-1 is
            the last class), ``all`` (modulo V), or empty.
        speculative: whether the node is only a loss if its logits come from a linear; if not, it
            gets no rejection.
    """

    node: Node
    logits: Node
    dim: int
    target: Node | None
    inner: tuple[Node, ...] = ()
    counted: tuple[Node, ...] = ()
    class_weight: Node | None = None
    reduction: str = "none"
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    probabilities: bool = False
    log_softmax: bool = False
    negative: bool = False
    keepdim: bool = False
    wraps: str = ""
    speculative: bool = False


def loss_of(node: Node) -> Loss | None:
    """Reads ``node`` as a loss; None if it is no loss.

    Raises:
        NoMatch: a loss that cannot be fused.
    """
    read = LOSSES.get(function_of(node))
    return None if read is None else read(node)


# ---------------------------------------------------------------- cross_entropy and nll_loss

_NLL_LOSS: Mapping[str, Any] = {
    "input": REQUIRED,
    "target": REQUIRED,
    "weight": None,
    "size_average": None,
    "ignore_index": -100,
    "reduce": None,
    "reduction": "mean",
}
_CROSS_ENTROPY = {**_NLL_LOSS, "label_smoothing": 0.0}
# ATen has numbers for these names.
_REDUCTIONS: Mapping[Any, str] = {0: "none", 1: "mean", 2: "sum"}


def _cross_entropy(node: Node) -> Loss:
    args = arguments(node, _CROSS_ENTROPY)
    _check_constants(node, args)
    logits, target = value(args["input"]), value(args["target"])
    probabilities = target.is_floating_point()
    expected = logits.dim() if probabilities else max(0, logits.dim() - 1)
    if target.dim() != expected or not (probabilities or target.dtype in INDEX_DTYPES):
        raise NoMatch(
            node,
            f"a target of {target.dim()} dimensions and dtype {target.dtype} for logits of "
            f"{logits.dim()} dimensions is neither class indices (int64) nor class probabilities",
        )
    return _named_loss(
        node, args, probabilities=probabilities, label_smoothing=float(args["label_smoothing"])
    )


def _nll_loss(node: Node) -> Loss:
    args = arguments(node, _NLL_LOSS)
    _check_constants(node, args)
    if value(args["target"]).dtype not in INDEX_DTYPES:
        raise NoMatch(node, f"its target is {value(args['target']).dtype}; use int64")
    return _named_loss(node, args, log_softmax=True)


def _named_loss(node: Node, args: dict[str, Any], **fields: Any) -> Loss:
    if fields.get("probabilities"):
        args["ignore_index"] = -100  # PyTorch ignores it then, so all values give one spec
    return Loss(
        node=node,
        logits=args["input"],
        dim=min(1, value(args["input"]).dim() - 1),
        target=args["target"],
        class_weight=args["weight"],
        reduction=_REDUCTIONS.get(args["reduction"], args["reduction"]),
        ignore_index=args["ignore_index"],
        **fields,
    )


def _check_constants(node: Node, args: dict[str, Any]) -> None:
    for name in ("size_average", "reduce"):
        if args[name] is not None:
            raise NoMatch(node, f"it uses the deprecated {name}=; use reduction=")
    smoothing = args.get("label_smoothing")
    if isinstance(smoothing, Node):
        smoothing = smoothing.meta.get("example_value")
    if isinstance(smoothing, torch.SymFloat):
        # torch's cross-entropy also specialises on the value
        args["label_smoothing"] = float(smoothing)
        log.info(
            "label_smoothing varies from call to call: every value is compiled anew, at %s",
            source_line(node),
        )
    for name in ("ignore_index", "label_smoothing", "reduction"):
        if isinstance(args.get(name), Node | torch.SymInt | torch.SymFloat):
            raise NoMatch(node, f"{name}= is not a constant of the graph")
    if not is_tensor(args["input"]) or not is_tensor(args["target"]):
        raise NoMatch(node, "its input and target are not both tensors of the graph")
    if value(args["target"]).requires_grad:
        raise NoMatch(node, "its target needs a gradient; detach it")
    if args["weight"] is not None and value(args["weight"]).requires_grad:
        raise NoMatch(node, "its class weights need a gradient; detach them")


def check_dtypes(loss: Loss, region: Region) -> None:
    """``NoMatch`` for dtypes of target and class weights for which PyTorch raises, or multiplies
    complex numbers. For class indices, class weights have the logits' dtype; autocast makes both
    f32, but leaves f64 and integers alone. Class probabilities promote."""
    logits = value(loss.logits).dtype
    for name, node in (("class weights", loss.class_weight), ("target", loss.target)):
        dtype = logits if node is None else value(node).dtype
        if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize < 2):
            raise NoMatch(
                loss.node, f"its {name}: {short(dtype)}, which the fused loss cannot take"
            )
    if loss.class_weight is None or loss.probabilities:
        return
    weight = value(loss.class_weight).dtype
    device = value(loss.logits).device
    in_f32 = {logits, weight} <= LOW_PRECISION | {torch.float32}
    if weight != logits and not (in_f32 and autocast_dtype(region, loss.node, device) is not None):
        raise NoMatch(
            loss.node,
            f"its class weights are {short(weight)} and its logits {short(logits)}, for which "
            "PyTorch raises an error",
        )


# ---------------------------------------------------------------- one log-probability per row

# gather has an index, take_along_dim has indices.
_PICK = {"input": REQUIRED, "dim": None, "index": None, "indices": None, "sparse_grad": False}


def _picked(node: Node) -> tuple[Node, int, Node] | None:
    """Source, class dimension and index, if ``node`` gathers one element of each row."""
    if function_of(node) not in ("gather", "take_along_dim"):
        return None
    source, dim, index, indices, sparse = arguments(node, _PICK).values()
    index = indices if index is None else index
    if not is_tensor(source) or not is_tensor(index) or not isinstance(dim, int):
        return None
    if value(index).dtype != torch.int64 or sparse:
        return None
    shape, taken = list(value(source).shape), list(value(index).shape)
    if not shape or len(shape) != len(taken):
        return None
    dim %= len(shape)
    one_each = taken == [*shape[:dim], 1, *shape[dim + 1 :]]
    return (source, dim, index) if one_each else None


def _wraps(node: Node) -> str:
    return "all" if function_of(node) == "take_along_dim" else ""


def _gather(node: Node) -> Loss | None:
    """``log_softmax(z).gather(-1, index)``: minus the row losses."""
    picked = _picked(node)
    if picked is None or not _has_log_softmax(picked[0]):
        return None
    source, dim, index = picked
    if function_of(source) in LOG_SOFTMAXES and log_softmax_dim(source) != dim:
        return None
    return Loss(
        node, source, dim, index, log_softmax=True, negative=True, keepdim=True, wraps=_wraps(node)
    )


def _getitem(node: Node) -> Loss | None:
    """An index, or the first result of ``nll_loss_forward``, whose second is for autograd."""
    source, index = cast(Any, node.args)
    if not isinstance(source, Node) or function_of(source) != "nll_loss_forward":
        return _index(node)
    return replace(_nll_loss(source), node=node, inner=(source,)) if index == 0 else None


def _index(node: Node) -> Loss | None:
    """``log_softmax(z)[arange(N), index]``: minus the row losses."""
    source, index = cast(Any, node.args[0]), index_of(node)
    if not (len(index) == 2 and all(map(is_tensor, index))):
        return None
    rows, picked = index
    shape = value(source).shape if is_tensor(source) else ()
    if len(shape) != 2 or function_of(rows) != "arange" or value(picked).dim() != 1:
        return None
    given = arguments(rows, _ARANGE)
    if given["start"] != 0 or given["step"] != 1 or value(rows).dtype != torch.int64:
        return None
    if value(rows).shape[0] != shape[0] or value(picked).shape[0] != shape[0]:
        return None
    if value(picked).dtype != torch.int64 or not _has_log_softmax(source):
        return None
    return Loss(
        node, source, 1, picked, counted=(rows,), log_softmax=True, negative=True, wraps="negative"
    )


_ARANGE = {
    **{"start": 0, "end": REQUIRED, "step": 1, "dtype": None, "device": None},
    **{"layout": None, "pin_memory": None, "requires_grad": False},
}


def _has_log_softmax(node: Any) -> bool:
    while isinstance(node, Node):
        function = function_of(node)
        if function in LOG_SOFTMAXES:
            return True
        if function not in CASTS and function not in VIEWS:
            return False
        node = first_operand(node)
    return False


# ---------------------------------------------------------------- log-sum-exp


def _logsumexp(node: Node) -> Loss | None:
    given = arguments(node, {"input": REQUIRED, "dim": REQUIRED, "keepdim": False})
    dim = given["dim"]
    if isinstance(dim, tuple | list) and len(dim) == 1:
        (dim,) = dim
    if not is_tensor(given["input"]) or not isinstance(dim, int):
        return None
    rank = value(given["input"]).dim()
    if rank == 0:
        return None
    keepdim = bool(given["keepdim"])
    return Loss(
        node, given["input"], dim % rank, None, ignore_index=-100, keepdim=keepdim, speculative=True
    )


def _difference(node: Node) -> Loss | None:
    """``logsumexp(z) - gather(z)``, the row losses, or the other way round."""
    try:
        return _lse_minus_picked(node)
    except NoMatch:
        return None  # most subtractions are no loss and get no rejection


def _lse_minus_picked(node: Node) -> Loss | None:
    given = arguments(node, {"input": REQUIRED, "other": REQUIRED, "alpha": 1})
    args = given["input"], given["other"]
    if given["alpha"] != 1 or not all(map(is_tensor, args)):
        return None
    for a, b, negative in ((*args, False), (*reversed(args), True)):
        lse = _logsumexp(a) if function_of(a) == "logsumexp" else None
        pick, inner = _without_dim(b)
        picked = _picked(pick)
        if lse is None or picked is None or picked[:2] != (lse.logits, lse.dim):
            continue
        if value(a).shape != value(b).shape:
            return None
        inner = (a, *inner, pick)
        return Loss(
            node,
            lse.logits,
            lse.dim,
            picked[2],
            inner=inner,
            negative=negative,
            keepdim=lse.keepdim,
            wraps=_wraps(pick),
        )
    return None


def _without_dim(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """The node before a squeeze of its class dimension, and the squeezing node."""
    function = function_of(node)
    if function not in ("squeeze", "select", "getitem"):
        return node, ()
    before = first_operand(node)
    index = () if function == "squeeze" else index_of(node)
    if not all(i in (slice(None), Ellipsis) or isinstance(i, int) for i in index):
        return node, ()  # the index may reorder the rows
    if value(before).numel() == value(node).numel():
        return before, (node,)
    return node, ()


# ---------------------------------------------------------------- losses of which nothing is left


def _decomposed(node: Node) -> None:
    """Tracers decompose some losses. ``_log_softmax`` is what is left of one."""
    reader = next((user for user in node.users if reads_values(user, node)), None)
    if reader is not None and not _leads_to_loss(node):
        raise NoMatch(
            node,
            f"%{node.name} ({call_name(node)}) is read by %{reader.name} ({call_name(reader)}), "
            "which is no loss that can be fused",
        )


def _leads_to_loss(node: Node) -> bool:
    """Whether a node that is read as a loss has the values of ``node``."""
    for user in node.users:
        try:
            if loss_of(user) is not None:
                return True
        except NoMatch:
            return True  # it has a reason of its own
        function = function_of(user)
        same = function in CASTS or function in VIEWS or function == "nll_loss_forward"
        if same and _leads_to_loss(user):
            return True
    return False


LOG_SOFTMAXES = {"log_softmax", "_log_softmax"}

LOSSES: dict[str, Callable[[Node], Loss | None]] = {
    "cross_entropy_loss": _cross_entropy,
    "nll_loss": _nll_loss,
    "gather": _gather,
    "take_along_dim": _gather,
    "getitem": _getitem,
    "index": _index,
    "logsumexp": _logsumexp,
    "sub": _difference,
    "_log_softmax": _decomposed,
}


def log_softmax_dim(node: Node) -> int:
    """The dimension that a log-softmax node normalises."""
    wanted = {"input": REQUIRED, "dim": None, "_stacklevel": 3, "dtype": None}
    given = arguments(node, {**wanted, "half_to_float": False})
    if not isinstance(given["dim"], int):
        raise NoMatch(node, f"%{node.name} (log_softmax) has no dim=")
    if given["dtype"] == torch.float64 != value(first_operand(node)).dtype:
        raise NoMatch(node, f"%{node.name} casts logits to float64; the fused loss is f32")
    return given["dim"] % value(node).dim()
