"""Losses by name: ``cross_entropy`` and ``nll_loss``.

In: a node. Out: a :class:`Loss` with its logits and its arguments, or None if the node is no loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fxpass.graph.autocast import autocast_dtype
from fxpass.graph.calls import arguments
from fxpass.graph.functions import function_of
from fxpass.graph.nodes import REQUIRED, NoMatch, is_tensor, value
from fxpass.graph.region import Region
from fxpass.graph.source import source_line
from fxpass.spec.dtypes import INDEX_DTYPES, LOW_PRECISION, short

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loss:
    """One loss.

    Attributes:
        node: the mean or sum of the loss, or one loss per row.
        logits: its input.
        dim: position of the class dimension in ``logits``.
        target: class indices or class probabilities.
        class_weight: ``[V]`` or None.
        reduction, ignore_index, label_smoothing: as in ``F.cross_entropy``.
        probabilities: whether the target holds class probabilities.
        log_softmax: whether the input has to be a log-softmax.
    """

    node: Node
    logits: Node
    dim: int
    target: Node
    class_weight: Node | None
    reduction: str
    ignore_index: int
    label_smoothing: float = 0.0
    probabilities: bool = False
    log_softmax: bool = False

    @property
    def indices(self) -> tuple[Node | None, Node | None]:
        """The class indices, and the class weights at them; none for class probabilities."""
        return (None, None) if self.probabilities else (self.target, self.class_weight)


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


def _getitem(node: Node) -> Loss | None:
    """The first result of ``nll_loss_forward``, whose second is for autograd."""
    source, index = node.args
    if not isinstance(source, Node) or function_of(source) != "nll_loss_forward" or index != 0:
        return None
    return replace(_nll_loss(source), node=node)


LOSSES: dict[str, Callable[[Node], Loss | None]] = {
    "cross_entropy_loss": _cross_entropy,
    "nll_loss": _nll_loss,
    "getitem": _getitem,
}
