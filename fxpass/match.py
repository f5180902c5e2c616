"""Finds linear → cross-entropy in a graph: one walk backward from each loss.

In: a Dynamo graph, with ``example_value`` on its nodes. Out: for every loss a :class:`Match` that
:mod:`fxpass.rewrite` can carry out, or a :class:`Rejection` that tells the user why not. The walk
accepts what stands in the tables of :mod:`fxpass.rules` and nothing else; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sympy import Expr
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx import Graph, Node

from fxpass import effects, expression, rules
from fxpass.operator import INDEX_DTYPES
from fxpass.settings import Settings
from fxpass.source import call_name, source_line
from fxpass.spec import GRADIENTS, Spec


@dataclass(frozen=True)
class Rejection:
    """A loss that is left as it was.

    Attributes:
        node: the node at which the walk stopped.
        reason: why, as a sentence without its first capital.
        source: the user's line of the loss.
    """

    node: Node
    reason: str
    source: str

    def __str__(self) -> str:
        return f"not fused: {self.source}: {self.reason}"


@dataclass(frozen=True)
class Match:
    """A linear → cross-entropy that can be fused.

    Attributes:
        loss, linear: the two nodes.
        x, weight, bias: the linear's operands (``bias`` may be None).
        target, class_weight: the loss's operands (``class_weight`` may be None).
        movements: the nodes between them that move rows, in the order of the data.
        chain: every node from the linear (first) to the input of the loss (last).
        keep: whether the logits are a graph output, so that they have to exist.
        spec: what is computed.
        logits_shape: rows and classes; rows may be symbolic.
        source: the user's line of the loss.
    """

    loss: Node
    linear: Node
    x: Node
    weight: Node
    bias: Node | None
    target: Node
    class_weight: Node | None
    movements: tuple[Node, ...]
    chain: tuple[Node, ...]
    keep: bool
    spec: Spec
    logits_shape: tuple[int | torch.SymInt, int]
    source: str

    @property
    def logits_bytes(self) -> int:
        """Bytes of one copy of the logits in the linear's output dtype; 0 if not known."""
        n, v = self.logits_shape
        rows = n if isinstance(n, int) else n.node.hint or 0
        return rows * v * value(self.linear).dtype.itemsize

    def __str__(self) -> str:
        n, v = self.logits_shape
        kept = " (logits kept: they are a graph output)" if self.keep else ""
        return f"fused: {self.source}: logits [{n}, {v}], {self.spec.text()}{kept}"


def find(graph: Graph, settings: Settings) -> Iterator[Match | Rejection]:
    """One answer per loss, in the graph's order; a match may be rewritten before the next one."""
    losses = [n for n in graph.nodes if n.op == "call_function" and n.target in rules.LOSSES]
    for loss in losses:
        order = {node: i for i, node in enumerate(graph.nodes)}
        try:
            yield _match(loss, order, settings)
        except _MatchError as no:
            yield Rejection(no.node, no.reason, source_line(loss))


def value(node: Node) -> Tensor:
    """The example tensor of a node: its shape, dtype, device and whether it needs a gradient."""
    example = node.meta.get("example_value")
    if not isinstance(example, Tensor):
        raise _MatchError(node, f"%{node.name} is not a tensor whose shape and dtype are known")
    return example


class _MatchError(Exception):
    """Ends one walk; never leaves this module."""

    def __init__(self, node: Node, reason: str) -> None:
        self.node, self.reason = node, reason


def _match(loss: Node, order: dict[Node, int], settings: Settings) -> Match:
    args = rules.arguments(loss, rules.LOSSES[loss.target])
    _check_whole(loss)
    _check_loss(loss, args)
    walk = _walk(loss, args["input"])
    linear = rules.arguments(walk.linear, rules.LINEARS[walk.linear.target])
    operands = [linear["x"], linear["weight"], linear["bias"]]
    _check_operands(walk, operands)
    read = [node for node in (*operands, *walk.chain) if node is not None]
    if found := effects.hazard(order, walk.linear, loss, read):
        raise _MatchError(*found)
    keep = _is_kept(walk, loss)
    value_out = value(args["input"])
    match = Match(
        loss=loss,
        linear=walk.linear,
        x=linear["x"],
        weight=linear["weight"],
        bias=linear["bias"],
        target=args["target"],
        class_weight=args["weight"],
        movements=tuple(reversed(walk.movements)),
        chain=tuple(reversed(walk.chain)),
        keep=keep,
        spec=_spec(loss, args, walk.expr, operands, settings),
        logits_shape=(value_out.shape[0], int(value_out.shape[1])),
        source=source_line(loss),
    )
    if match.logits_bytes < settings.min_logits_mb * 2**20:
        raise _MatchError(
            loss,
            f"its logits take {match.logits_bytes / 2**20:.1f} MiB, fewer than "
            f"FUSEDCE_MIN_LOGITS_MB={settings.min_logits_mb:g}",
        )
    return match


# ---------------------------------------------------------------- the loss


def _check_loss(loss: Node, args: dict[str, Any]) -> None:
    for name in ("size_average", "reduce"):
        if args[name] is not None:
            raise _MatchError(loss, f"it uses the deprecated {name}=; use reduction=")
    for name in ("ignore_index", "label_smoothing", "reduction"):
        if isinstance(args[name], Node | torch.SymInt | torch.SymFloat):
            raise _MatchError(loss, f"{name}= is not a constant of the graph")
    if not isinstance(args["input"], Node) or not isinstance(args["target"], Node):
        raise _MatchError(loss, "its input and target are not both tensors of the graph")
    logits, target = value(args["input"]), value(args["target"])
    if logits.dim() != 2:
        raise _MatchError(
            loss,
            f"its input has {logits.dim()} dimensions; use logits [N, V], for example through "
            ".flatten(0, -2) with the classes last",
        )
    if target.requires_grad:
        raise _MatchError(loss, "its target needs a gradient; detach it")
    if args["weight"] is not None and value(args["weight"]).requires_grad:
        raise _MatchError(loss, "its class weights need a gradient; detach them")
    if not target.is_floating_point() and target.dtype not in INDEX_DTYPES:
        raise _MatchError(loss, f"its target is {target.dtype}; class indices have to be int64")
    if target.dim() != (2 if target.is_floating_point() else 1):
        raise _MatchError(
            loss,
            f"a target of {target.dim()} dimensions and dtype {target.dtype} is neither class "
            "indices [N] nor class probabilities [N, V]",
        )


def _spec(
    loss: Node, args: dict[str, Any], expr: Expr, operands: list[Node | None], settings: Settings
) -> Spec:
    gradients = ()
    if value(loss).requires_grad:
        pairs = zip(GRADIENTS, operands, strict=True)
        gradients = tuple(name for name, o in pairs if o is not None and value(o).requires_grad)
    probabilities = value(args["target"]).is_floating_point()
    try:
        return Spec(
            reduction=args["reduction"],
            target="probabilities" if probabilities else "indices",
            # ignored by PyTorch for probabilities; one spec for what is one computation
            ignore_index=-100 if probabilities else args["ignore_index"],
            label_smoothing=float(args["label_smoothing"]),
            logits=expr,
            gradients=gradients,
            strategy=settings.strategy,
            memory_mb=settings.memory_mb,
        )
    except ValueError as error:
        raise _MatchError(loss, str(error)) from error


# ---------------------------------------------------------------- the walk to the linear


@dataclass
class _Walk:
    """What the way from the loss back to the linear gathered, latest node first."""

    linear: Node
    chain: list[Node]
    movements: list[Node]
    expr: Expr


_BETWEEN = rules.CASTS | rules.MOVEMENTS.keys() | rules.POINTWISE.keys()


def _walk(loss: Node, start: Any) -> _Walk:
    chain: list[Node] = []
    steps: list[Node] = []  # pointwise nodes
    movements: list[Node] = []
    node = start
    while True:
        _check_whole(node)
        chain.append(node)
        if node.op not in ("call_function", "call_method"):
            raise _MatchError(node, _not_computed_here(node))
        if node.target in rules.LINEARS:
            break
        if rules.writes(node):
            raise _MatchError(node, f"%{node.name} ({call_name(node)}) changes a tensor in place")
        if node.target not in _BETWEEN:
            raise _MatchError(
                node,
                f"%{node.name} ({call_name(node)}) between the linear and the loss is not known",
            )
        following = _next(node)
        if node.target in rules.CASTS:
            _check_cast(node, following)
        elif node.target in rules.MOVEMENTS:
            _check_movement(node)
            movements.append(node)
        else:
            steps.append(node)
        node = following
    return _Walk(node, chain, movements, _expression(steps, chain))


def _next(node: Node) -> Node:
    """The operand through which the logits came; the only tensor operand there may be."""
    nodes = node.all_input_nodes
    tensors = [n for n in nodes if isinstance(n.meta.get("example_value"), Tensor)]
    if node.target in rules.MOVEMENTS or node.target in rules.CASTS:
        tensors = [n for n in tensors if n is node.args[0]]
    if len(tensors) != 1:
        names = ", ".join(f"%{n.name}" for n in nodes)
        raise _MatchError(
            node,
            f"%{node.name} ({call_name(node)}) combines the logits with another tensor ({names}); "
            "only functions of one logit and of numbers are fused",
        )
    return tensors[0]


def _check_whole(node: Node) -> None:
    example = value(node)
    if not example.is_floating_point():
        raise _MatchError(node, f"%{node.name} is {example.dtype}, not floating point")
    if is_functorch_wrapped_tensor(example):
        raise _MatchError(node, f"%{node.name} is inside a torch.func transform (vmap, grad, ...)")
    plain = (torch._subclasses.FakeTensor, torch.nn.Parameter)
    if not (type(example) is Tensor or isinstance(example, plain)):
        raise _MatchError(node, f"%{node.name} is a {type(example).__name__}, not a plain tensor")


def _not_computed_here(node: Node) -> str:
    if node.op == "placeholder":
        return (
            f"its logits enter the graph as %{node.name}: the linear is in another graph, or there "
            "was a graph break between them (TORCH_LOGS=graph_breaks tells where)"
        )
    return f"its logits come from %{node.name} ({node.op}), not from a linear"


def _check_cast(node: Node, before: Node) -> None:
    old, new = value(before), value(node)
    if old.device != new.device:
        raise _MatchError(node, f"%{node.name} moves the logits from {old.device} to {new.device}")
    if new.dtype == torch.float64 and old.dtype != torch.float64:
        raise _MatchError(
            node,
            f"%{node.name} casts {old.dtype} logits to float64; the fused loss is f32",
        )


def _check_movement(node: Node) -> None:
    before, after = value(node.all_input_nodes[0]), value(node)
    # one class dimension, last, whole, before and after: then rows moved and nothing else did
    if before.dtype != after.dtype or after.dim() == 0 or before.shape[-1] != after.shape[-1]:
        raise _MatchError(node, f"%{node.name} ({call_name(node)}) changes the class dimension")
    replay = rules.MOVEMENTS[node.target](node, before.shape, after.shape[-1])
    if isinstance(replay, str):
        raise _MatchError(node, f"%{node.name} ({call_name(node)}): {replay}")


def _expression(steps: list[Node], chain: list[Node]) -> Expr:
    """The pointwise nodes as one expression of the linear's output."""
    expr: Expr = expression.Z
    for node in reversed(steps):
        if node.kwargs:
            raise _MatchError(node, f"%{node.name} ({call_name(node)}) has keyword arguments")
        operands = [expr if a in chain else _constant(node, a) for a in node.args]
        expr = rules.POINTWISE[node.target](*operands)
    if expression.Z not in expr.free_symbols:
        raise _MatchError(chain[0], "its logits do not depend on the linear")
    try:
        expression.text(expr)
    except ValueError as error:
        raise _MatchError(chain[0], str(error)) from error
    return expr


def _constant(node: Node, argument: Any) -> Expr:
    if isinstance(argument, bool) or not isinstance(argument, int | float):
        raise _MatchError(
            node,
            f"%{node.name} ({call_name(node)}) has an operand that is not a number: {argument}",
        )
    try:
        return expression.exact(argument)
    except ValueError as error:
        raise _MatchError(node, str(error)) from error


# ---------------------------------------------------------------- what the rewrite must not change


def _check_operands(walk: _Walk, operands: list[Any]) -> None:
    for operand in operands:
        if isinstance(operand, Node):
            _check_whole(operand)
        elif operand is not None:
            raise _MatchError(walk.linear, f"the linear's operand {operand!r} is not in the graph")
    shape = value(operands[1]).shape
    if len(shape) != 2 or not all(isinstance(s, int) for s in shape):
        raise _MatchError(walk.linear, f"the linear's weight has shape {list(shape)}, not [V, D]")


def _is_kept(walk: _Walk, loss: Node) -> bool:
    """Whether the logits leave the graph; ``_MatchError`` if anything else in it reads them."""
    keep = False
    inside = {loss, *walk.chain}
    for node in walk.chain:
        for user in node.users:
            if user in inside or user.target in rules.METADATA:
                continue
            if user.op != "output":
                verb = "changed in place" if rules.writes(user) else "also read"
                raise _MatchError(
                    user,
                    f"the logits %{node.name} are {verb} by %{user.name} ({call_name(user)}, "
                    f"{source_line(user)}), so they have to exist",
                )
            keep = True
    return keep
