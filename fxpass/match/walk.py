"""The walk from a loss backward to its linear, and what it means read in the order of the data.

In: a :class:`fxpass.match.losses.Loss`. Out: a :class:`Walk`: the linear, the steps that the
rewrite has to do to its operands, and the one function of a logit that is left for the operator::

    linear → add(final_logits_bias) → view → truediv(30) → tanh → mul(30)

    steps = (Bias(%final_logits_bias), Move(%view))        expr = 30*tanh(z/30)

Steps that involve other tensors cannot be part of the expression; whatever stands before the last
of them has to be linear in the logit, and becomes a step too.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
from sympy import Expr
from torch.fx import Node

from fxpass.graph.nodes import NoMatch, is_number, is_tensor, value
from fxpass.graph.placements import TO_LOCAL, placement_name
from fxpass.graph.source import call_name
from fxpass.match.linears import Linear, linear_of
from fxpass.match.links import Link, apply_pointwise, check_plain, link_of, tensor_steps
from fxpass.match.losses import Loss
from fxpass.match.steps import Affine, Bias, Local, Move, Scale, Stack, Step
from fxpass.spec import expression


@dataclass(frozen=True)
class Walk:
    """The way from a linear to a loss.

    Attributes:
        linear: where it starts.
        chain: all its nodes in the order of the data, the linear's first.
        base: the node of the chain whose value is ``z`` in ``expr``.
        steps: what happens beside ``expr``, in the order of the data.
        expr: the logit that enters the loss, as a function of ``z``.
        dim: position of the class dimension at the end.
    """

    linear: Linear
    chain: tuple[Node, ...]
    base: Node
    steps: tuple[Step, ...]
    expr: Expr
    dim: int

    @property
    def operands(self) -> list[Node]:
        """Every node outside of the chain whose value the fused loss reads, the target aside."""
        linear = self.linear
        found = [n for n in (linear.x, linear.weight, linear.bias) if n is not None]
        for step in self.steps:
            if isinstance(step, Bias | Scale):
                found.append(step.operand)
            elif isinstance(step, Move):
                found += [n for n in step.node.all_input_nodes if n not in self.chain]
        return found

    def read_by(self, name: str) -> list[Node]:
        """The nodes that the operator's operand ``x``, ``weight`` or ``bias`` is made of."""
        scales = [s.operand for s in self.steps if isinstance(s, Scale) and is_tensor(s.operand)]
        biases = [step.operand for step in self.steps if isinstance(step, Bias)]
        biases += [self.linear.bias] if self.linear.bias is not None else []
        biased = bool(biases) or any(_shifts(step) for step in self.steps)
        return {
            "x": [self.linear.x, *scales],
            "weight": [self.linear.weight],
            "bias": [*biases, *scales] if biased else [],
        }[name]


def walk(loss: Loss, *, written_base: bool = False) -> Walk:
    """The walk of ``loss``.

    Args:
        loss: where it ends.
        written_base: whether ``base`` has to be a node after which nothing writes to its memory,
            so that its value can be read at the loss.

    Raises:
        NoMatch: a node that no table knows, with the reason.
    """
    chain: list[Node] = []
    links: list[Link] = []
    node, dim, normalised = loss.logits, loss.dim, not loss.log_softmax
    while True:
        check_plain(node)
        chain.append(node)
        linear = linear_of(node)
        if linear is not None:
            break
        if node.op not in ("call_function", "call_method"):
            raise NoMatch(node, _not_computed_here(node))
        link = link_of(node, dim, links)
        if link.kind == "log_softmax":
            if normalised:
                raise NoMatch(node, f"%{node.name} is a second log-softmax on the way")
            normalised = True
        elif not normalised and link.kind in ("pointwise", "tensor"):
            raise NoMatch(
                node, f"%{node.name} ({call_name(node)}) changes probabilities, not logits"
            )
        links.append(link)
        node, dim = link.before, link.dim
    if not normalised:
        raise NoMatch(loss.node, "its input is not a log_softmax of the logits")
    if dim != linear.dim:
        raise NoMatch(linear.node, "the dimension of the loss's classes is not the linear's")
    return _fold(linear, chain[::-1], links[::-1], loss.dim, written_base)


def check_operands(found: Walk) -> None:
    """``NoMatch`` if one of the walk's operands is no floating-point tensor, plain or sharded."""
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


def _fold(
    linear: Linear, chain: list[Node], links: list[Link], dim: int, written_base: bool
) -> Walk:
    ends = [link.kind == "tensor" or (written_base and link.in_place) for link in links]
    last = max((i for i, end in enumerate(ends) if end), default=-1)
    steps: list[Step] = []
    expr: Expr = expression.Z
    for i, link in enumerate(links):
        if link.moved is not None:
            steps.append(Move(link.node, link.moved))
        elif link.kind == "stack":
            steps.append(Stack(link.node, *link.stacked))
        elif link.kind == "placement":
            if placement_name(link.node.target) in TO_LOCAL:
                steps.append(Local(link.node))
        elif link.kind == "pointwise":
            expr = apply_pointwise(link, expr)
        elif link.kind == "tensor":
            steps += [*_affine(link.node, expr), *tensor_steps(link)]
            expr = expression.Z
            _check_scale(link.node, linear, steps)
        if i == last and link.kind != "tensor":
            steps += _affine(link.node, expr)
            expr = expression.Z
    if expression.Z not in expr.free_symbols:
        raise NoMatch(linear.node, "its logits do not depend on the linear")
    try:
        expression.text(expr)
    except ValueError as error:
        raise NoMatch(linear.node, str(error)) from error
    return Walk(linear, tuple(chain), chain[last + 1], tuple(steps), expr, dim)


def _check_scale(node: Node, linear: Linear, steps: list[Step]) -> None:
    """A bias can follow a factor per row, but no bias can be multiplied by one."""
    biased = linear.bias is not None or any(isinstance(s, Bias) or _shifts(s) for s in steps)
    last = steps[-1]
    if not (isinstance(last, Scale) and biased) or is_number(last.operand):
        return
    if value(last.operand).numel() != 1:
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) scales a bias by a factor per row")


def _shifts(step: Step) -> bool:
    return isinstance(step, Affine) and step.shift != 0


def _affine(node: Node, expr: Expr) -> list[Step]:
    """The expression as a step, which it can be where it is linear in the logit."""
    if expr == expression.Z:
        return []
    factor = sympy.diff(expr, expression.Z)
    shift = sympy.expand(expr - factor * expression.Z)
    if not factor.is_Rational or factor == 0 or not shift.is_Rational:
        raise NoMatch(
            node,
            f"%{node.name} ({call_name(node)}) comes after a function of the logits that is not "
            "linear, and cannot be done to the hidden states instead",
        )
    return [Affine(factor, shift)]
