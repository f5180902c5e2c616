"""The chain of nodes from a linear to its loss, and its computation.

In: a :class:`fxpass.match.losses.Loss`. Out: a :class:`Chain`: the linear, the folds that the
rewrite applies to the linear's operands, and the function of one logit that the operator computes::

    linear → add(final_logits_bias) → view → truediv(30) → tanh → mul(30)

    folds = (Bias(%final_logits_bias), RowView(%view))        expr = 30*tanh(z/30)

A node with another tensor cannot be part of the expression, so it is folded. All functions before
the last such node have to be linear in the logit, and are folded too. No factor is folded into
16-bit hidden states, which would round it, or overflow.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from sympy import Expr
from torch.fx import Node

from fxpass.graph.nodes import NoMatch, is_number, is_tensor, value
from fxpass.graph.placements import TO_LOCAL, placement_name
from fxpass.graph.source import call_name
from fxpass.match.chain_node import ChainNode, apply_pointwise, check_plain, read_node, tensor_folds
from fxpass.match.folds import Affine, Bias, Fold, RowView, Scale, Stack, ToLocal
from fxpass.match.linears import Linear, linear_of
from fxpass.match.losses import Loss
from fxpass.spec import expression
from fxpass.spec.dtypes import short


@dataclass(frozen=True)
class Chain:
    """The nodes from a linear to a loss.

    Attributes:
        linear: the linear.
        nodes: all nodes in the order of the data, the linear's node first.
        base: the node whose value is ``z`` in ``expr``.
        folds: the folds beside ``expr``, in the order of the data.
        expr: the logit that enters the loss, as a function of ``z``.
        dim: position of the class dimension in the last node's output.
    """

    linear: Linear
    nodes: tuple[Node, ...]
    base: Node
    folds: tuple[Fold, ...]
    expr: Expr
    dim: int

    @property
    def operands(self) -> list[Node]:
        """Every node outside the chain whose value the fused loss reads, except the target."""
        linear = self.linear
        found = [n for n in (linear.x, linear.weight, linear.bias) if n is not None]
        for fold in self.folds:
            if isinstance(fold, Bias | Scale):
                found.append(fold.operand)
            elif isinstance(fold, RowView):
                found += [n for n in fold.node.all_input_nodes if n not in self.nodes]
        return found

    def read_by(self, name: str) -> list[Node]:
        """The nodes from which the operator's operand ``x``, ``weight`` or ``bias`` is computed."""
        scales = [s.operand for s in self.folds if isinstance(s, Scale) and is_tensor(s.operand)]
        biases = [fold.operand for fold in self.folds if isinstance(fold, Bias)]
        biases += [self.linear.bias] if self.linear.bias is not None else []
        biased = bool(biases) or any(_shifts(fold) for fold in self.folds)
        return {
            "x": [self.linear.x, *scales],
            "weight": [self.linear.weight],
            "bias": [*biases, *scales] if biased else [],
        }[name]


def chain_of(loss: Loss, *, written_base: bool = False) -> Chain:
    """The chain that ends at ``loss``, read backward from the loss.

    Args:
        loss: the end of the chain.
        written_base: whether ``base`` has to come after the chain's last in-place node, so that
            the loss can read its value.

    Raises:
        NoMatch: a node is in no table, or cannot be part of a chain.
    """
    read: list[ChainNode] = []
    node, dim, normalised = loss.logits, loss.dim, not loss.log_softmax
    while True:
        check_plain(node)
        linear = linear_of(node)
        if linear is not None:
            break
        if node.op not in ("call_function", "call_method"):
            raise NoMatch(node, _not_computed_here(node))
        reading = read_node(node, dim, read)
        if reading.kind == "log_softmax":
            if normalised:
                raise NoMatch(node, f"%{node.name} is a second log-softmax between linear and loss")
            normalised = True
        elif not normalised and reading.kind in ("pointwise", "tensor"):
            raise NoMatch(
                node, f"%{node.name} ({call_name(node)}) changes probabilities, not logits"
            )
        read.append(reading)
        node, dim = reading.before, reading.dim
    if not normalised:
        raise NoMatch(loss.node, "its input is not a log_softmax of the logits")
    if dim != linear.dim:
        raise NoMatch(linear.node, "the dimension of the loss's classes is not the linear's")
    return _fold(linear, read[::-1], loss.dim, written_base)


def check_operands(found: Chain) -> None:
    """``NoMatch`` unless the linear's operands are floating-point tensors, plain or DTensors."""
    linear = found.linear
    for operand in (linear.x, linear.weight, linear.bias):
        if operand is not None:
            check_plain(operand)


def _not_computed_here(node: Node) -> str:
    ended = getattr(node.graph.owning_module, "compile_subgraph_reason", None)
    if node.op == "placeholder" and getattr(ended, "reason", "").startswith("DDPOptimizer"):
        return (
            f"its logits enter the graph as %{node.name}: DistributedDataParallel's splitting put "
            "the linear into another part; compute each loss right after its head, or set "
            "torch._dynamo.config.optimize_ddp = False"
        )
    if node.op == "placeholder":
        return (
            f"its logits enter the graph as %{node.name}: the linear is in another graph, or there "
            "was a graph break between them (TORCH_LOGS=graph_breaks tells where)"
        )
    return f"its logits come from %{node.name} ({node.op}), not from a linear"


# ---------------------------------------------------------------- in the order of the data


def _fold(linear: Linear, read: list[ChainNode], dim: int, written_base: bool) -> Chain:
    ends = [reading.kind == "tensor" or (written_base and reading.in_place) for reading in read]
    last = max((i for i, end in enumerate(ends) if end), default=-1)
    folds: list[Fold] = []
    expr: Expr = expression.Z
    for i, reading in enumerate(read):
        if reading.view is not None:
            folds.append(RowView(reading.node, reading.view))
        elif reading.kind == "stack":
            folds.append(Stack(reading.node, *reading.stacked))
        elif reading.kind == "placement":
            if placement_name(reading.node.target) in TO_LOCAL:
                folds.append(ToLocal(reading.node))
        elif reading.kind == "pointwise":
            expr = apply_pointwise(reading, expr)
        elif reading.kind == "tensor":
            more = [*_affine(reading.node, expr), *tensor_folds(reading)]
            expr = expression.Z
            _check_factors(reading.node, linear, more)
            folds += more
            _check_scale(reading.node, linear, folds)
        if i == last and reading.kind != "tensor":
            more = _affine(reading.node, expr)
            expr = expression.Z
            if value(reading.node).requires_grad:  # else only the logits' values are read
                _check_factors(reading.node, linear, more)
            folds += more
    if expression.Z not in expr.free_symbols:
        raise NoMatch(linear.node, "its logits do not depend on the linear")
    try:
        expression.text(expr)
    except ValueError as error:
        raise NoMatch(linear.node, str(error)) from error
    nodes = (linear.node, *(reading.node for reading in read))
    return Chain(linear, nodes, nodes[last + 1], tuple(folds), expr, dim)


def _check_factors(node: Node, linear: Linear, folds: list[Fold]) -> None:
    """``NoMatch`` for a factor that 16-bit hidden states would take: there it rounds every product
    of the linear, and may overflow, which it does not on the logits."""
    dtype = value(linear.node).dtype
    tensor = any(isinstance(fold, Scale) for fold in folds)
    constant = any(isinstance(fold, Affine) and abs(fold.factor) != 1 for fold in folds)
    if dtype.itemsize < torch.float32.itemsize and (tensor or constant):
        raise NoMatch(
            node,
            f"%{node.name} ({call_name(node)}) {'is' if tensor else 'comes after'} a factor of the "
            f"logits, which would be multiplied into the {short(dtype)} hidden states and rounded "
            "there; it is fused with float32 hidden states, or as a constant after which no other "
            "tensor comes",
        )


def _check_scale(node: Node, linear: Linear, folds: list[Fold]) -> None:
    """``NoMatch`` for a factor per row after a bias, which the factor would scale per row too."""
    biased = linear.bias is not None or any(isinstance(s, Bias) or _shifts(s) for s in folds)
    last = folds[-1]
    if not (isinstance(last, Scale) and biased) or is_number(last.operand):
        return
    if value(last.operand).numel() != 1:
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) scales a bias by a factor per row")


def _shifts(fold: Fold) -> bool:
    return isinstance(fold, Affine) and fold.shift != 0


def _affine(node: Node, expr: Expr) -> list[Fold]:
    """The expression as a fold; ``NoMatch`` if it is not linear in the logit."""
    if expr == expression.Z:
        return []
    factor = sympy.diff(expr, expression.Z)
    shift = sympy.expand(expr - factor * expression.Z)
    if not factor.is_Rational or factor == 0 or not shift.is_Rational:
        raise NoMatch(
            node,
            f"%{node.name} ({call_name(node)}) comes after a function of the logits that is not "
            "linear, and cannot be applied to the hidden states instead",
        )
    return [Affine(factor, shift)]
