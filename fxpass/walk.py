"""The walk from a loss backward to its linear, and what it means read in the order of the data.

In: a :class:`fxpass.losses.Loss`. Out: a :class:`Walk`: the linear, the steps that the rewrite
has to do to its operands, and the one function of a logit that is left for the operator::

    linear → add(final_logits_bias) → view → truediv(30) → tanh → mul(30)

    steps = (Bias(%final_logits_bias), Move(%view))        expr = 30*tanh(z/30)

Steps that involve other tensors cannot be part of the expression; whatever stands before the last
of them has to be linear in the logit, and becomes a step too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy import Expr
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx import Node

from fxpass import expression
from fxpass.linears import Linear, linear_of
from fxpass.losses import LOG_SOFTMAXES, Loss, log_softmax_dim
from fxpass.movements import MOVEMENTS, Moved, moved, moved_operand
from fxpass.placements import TO_LOCAL, is_dtensor, placement_name
from fxpass.pointwise import IN_PLACE, POINTWISE
from fxpass.rules import CASTS, REQUIRED, NoMatch, Target, arguments, is_tensor, value, writes
from fxpass.source import call_name
from fxpass.steps import Affine, Bias, Local, Move, Scale, Stack, Step


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
        scales = [step.operand for step in self.steps if isinstance(step, Scale)]
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
    links: list[_Link] = []
    node, dim, normalised = loss.logits, loss.dim, not loss.log_softmax
    while True:
        _check_plain(node)
        chain.append(node)
        linear = linear_of(node)
        if linear is not None:
            break
        if node.op not in ("call_function", "call_method"):
            raise NoMatch(node, _not_computed_here(node))
        link = _stacked(node, dim, links) if node.target in STACKS else _link(node, dim)
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


# ---------------------------------------------------------------- one node of the way


@dataclass(frozen=True)
class _Link:
    """A node, its kind, the node before it and the position of the class dimension there."""

    node: Node
    kind: str  # cast, log_softmax, placement, move, stack, pointwise, tensor
    before: Node
    dim: int
    in_place: bool = False
    moved: Moved | None = None
    function: Target = None
    stacked: int = 0


def _link(node: Node, dim: int) -> _Link:
    if node.target in LOG_SOFTMAXES:
        if log_softmax_dim(node) != dim:
            raise NoMatch(node, f"%{node.name} (log_softmax) is over another dimension")
        return _Link(node, "log_softmax", _first(node), dim)
    if placement_name(node.target):
        return _Link(node, "placement", _first(node), dim)
    if node.target in CASTS:
        _check_cast(node)
        return _Link(node, "cast", _first(node), dim)
    if node.target in MOVEMENTS:
        step = moved(node, dim)
        return _Link(node, "move", moved_operand(node), step.dim, moved=step)
    in_place = node.target in IN_PLACE or bool(node.kwargs.get("inplace"))
    function = IN_PLACE.get(node.target, node.target)
    if function not in POINTWISE:
        if writes(node):
            raise NoMatch(node, f"%{node.name} ({call_name(node)}) changes a tensor in place")
        raise NoMatch(
            node, f"%{node.name} ({call_name(node)}) between the linear and the loss is not known"
        )
    tensors = [n for n in node.all_input_nodes if is_tensor(n)]
    before = tensors[0] if len(tensors) == 1 else _main_operand(node, function, tensors)
    kind = "pointwise" if len(tensors) == 1 else "tensor"
    return _Link(node, kind, before, dim, in_place=in_place, function=function)


def _stacked(node: Node, dim: int, after: list[_Link]) -> _Link:
    """A stack of which what comes after it, latest first, takes the logits of one linear."""
    given = arguments(node, {"tensors": REQUIRED, "dim": 0})
    tensors, new = given["tensors"], given["dim"] % value(node).dim()
    if not isinstance(tensors, tuple | list) or new == dim:
        raise NoMatch(node, f"%{node.name} (stack) stacks other than the rows of logits")
    # follow the number of each tensor through what comes after
    shape = [hint(size) for size in value(node).shape]
    shape[dim] = 1
    numbers = torch.arange(len(tensors)).view(-1, *[1] * (len(shape) - 1)).movedim(0, new)
    numbers = numbers.expand(shape)
    for link in reversed(after):
        if link.moved is not None and link.moved.replay is not None:
            op, target, args = link.moved.replay(1)
            args = torch.fx.map_arg(args, lambda n: hint(n.meta["example_value"]))
            function = getattr(torch.Tensor, target) if op == "call_method" else target
            numbers = function(numbers, *args)
    chosen = numbers.unique().tolist()
    if len(chosen) != 1:
        raise NoMatch(node, f"%{node.name} (stack) gives the loss the logits of several linears")
    return _Link(node, "stack", tensors[chosen[0]], dim - (new < dim), stacked=new)


def hint(size: Any) -> Any:
    """A size as a number: what it was when the graph was traced, where it may vary."""
    return size if isinstance(size, int) else int(size.node.hint)


STACKS: set[Target] = {torch.stack}


def _first(node: Node) -> Node:
    before = node.args[0] if node.args else node.kwargs.get("input")
    if not is_tensor(before):
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) is not of a tensor of the graph")
    assert isinstance(before, Node)
    return before


def _main_operand(node: Node, function: Target, tensors: list[Node]) -> Node:
    """The logits among several tensor operands."""
    if _operation(function) is None or node.kwargs or len(node.args) != 2:
        raise NoMatch(node, _combines(node))
    shape = value(node).shape
    whole = [n for n in tensors if value(n).shape == shape]
    computed = [n for n in whole if n.op in ("call_function", "call_method")]
    if not computed:
        raise NoMatch(node, _combines(node))
    return computed[0]


def _operation(function: Target) -> str | None:
    """``add``, ``sub``, ``mul`` or ``div``, however it is spelled; None for anything else."""
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    return {"truediv": "div", "true_divide": "div"}.get(name, name) if name in _BINARY else None


_BINARY = ("add", "sub", "mul", "div", "truediv", "true_divide")


def _combines(node: Node) -> str:
    names = ", ".join(f"%{n.name}" for n in node.all_input_nodes)
    return (
        f"%{node.name} ({call_name(node)}) combines the logits with another tensor ({names}); "
        "what can be fused are functions of one logit and of numbers, a bias [V], and a factor "
        "per row"
    )


def _check_cast(node: Node) -> None:
    old, new = value(_first(node)), value(node)
    if old.device != new.device:
        raise NoMatch(
            node,
            f"%{node.name} moves the logits from {old.device} to {new.device}; move the labels to "
            f"{old.device} instead, and the loss afterwards",
        )
    if new.dtype == torch.float64 and old.dtype != torch.float64:
        raise NoMatch(
            node, f"%{node.name} casts {old.dtype} logits to float64; the fused loss is f32"
        )


def _check_plain(node: Node) -> None:
    example = value(node)
    if not example.is_floating_point():
        raise NoMatch(node, f"%{node.name} is {example.dtype}, not floating point")
    if is_functorch_wrapped_tensor(example):
        raise NoMatch(node, f"%{node.name} is inside a torch.func transform (vmap, grad, ...)")
    plain = (torch._subclasses.FakeTensor, torch.nn.Parameter)
    if not (type(example) is torch.Tensor or isinstance(example, plain) or is_dtensor(example)):
        raise NoMatch(node, f"%{node.name} is a {type(example).__name__}, not a plain tensor")


def check_operands(found: Walk) -> None:
    """``NoMatch`` if one of the walk's operands is no floating-point tensor, plain or sharded."""
    linear = found.linear
    for operand in (linear.x, linear.weight, linear.bias):
        if operand is not None:
            _check_plain(operand)


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
    linear: Linear, chain: list[Node], links: list[_Link], dim: int, written_base: bool
) -> Walk:
    last = max((i for i, link in enumerate(links) if link.kind == "tensor"), default=-1)
    if written_base:
        last = max((i for i, link in enumerate(links) if link.in_place), default=last)
    steps: list[Step] = []
    expr: Expr = expression.Z
    for i, link in enumerate(links):
        if link.moved is not None:
            steps.append(Move(link.node, link.moved))
        elif link.kind == "stack":
            steps.append(Stack(link.node, link.stacked, len(link.node.all_input_nodes)))
        elif link.kind == "placement":
            if placement_name(link.node.target) in TO_LOCAL:
                steps.append(Local(link.node))
        elif link.kind == "pointwise":
            expr = _apply(link, expr)
        elif link.kind == "tensor":
            steps += [*_affine(link.node, expr), *_with_tensor(link)]
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
    if isinstance(last, Scale) and biased and value(last.operand).numel() != 1:
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) scales a bias by a factor per row")


def _shifts(step: Step) -> bool:
    return isinstance(step, Affine) and step.shift != 0


def _apply(link: _Link, expr: Expr) -> Expr:
    """The expression after one pointwise node."""
    node, row = link.node, POINTWISE[link.function]
    given: dict[str, Any] = dict(zip(row.signature, node.args, strict=False))
    if len(node.args) > len(row.signature):
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) has arguments that are not known")
    for name, argument in node.kwargs.items():
        if name == "inplace":
            continue
        if name not in row.signature:
            raise NoMatch(node, f"%{node.name} ({call_name(node)}) has {name}=, which is not known")
        given[name] = argument
    try:
        operands = [
            _operand(node, given.get(name, default), link.before, expr)
            for name, default in row.signature.items()
        ]
        return row.value(*operands)
    except ValueError as error:
        raise NoMatch(node, f"%{node.name} ({call_name(node)}): {error}") from error


def _operand(node: Node, argument: Any, before: Node, expr: Expr) -> Any:
    if argument is before:
        return expr
    if isinstance(argument, Node | torch.SymInt | torch.SymFloat | torch.SymBool):
        raise NoMatch(
            node,
            f"%{node.name} ({call_name(node)}) has an operand that is not a number: {argument}",
        )
    if isinstance(argument, int | float) and not isinstance(argument, bool):
        return expression.exact(argument)
    return argument


def _affine(node: Node, expr: Expr) -> list[Step]:
    """The expression as a step, which it can be where it is linear in the logit."""
    if expr == expression.Z:
        return []
    factor = sympy.diff(expr, expression.Z)
    if not factor.is_Rational or factor == 0:
        raise NoMatch(
            node,
            f"%{node.name} ({call_name(node)}) comes after a function of the logits that is not "
            "linear, and cannot be done to the hidden states instead",
        )
    return [Affine(factor, sympy.expand(expr - factor * expression.Z))]


def _with_tensor(link: _Link) -> list[Step]:
    """A node that combines the logits with a bias or with a factor per row."""
    node, operation = link.node, _operation(link.function)
    left, right = node.args
    other = right if left is link.before else left
    if not isinstance(other, Node) or left is right:
        raise NoMatch(node, _combines(node))
    from_end = value(node).dim() - link.dim  # the class dimension, counted from the end
    shape = list(value(other).shape)
    v = value(node).shape[link.dim]
    classes = shape[-from_end] if len(shape) >= from_end else 1
    if operation in ("add", "sub"):
        rows = [s for i, s in enumerate(shape) if len(shape) - i != from_end]
        if classes != v or any(s != 1 for s in rows):
            raise NoMatch(node, _combines(node))
        if operation == "add":
            return [Bias(other, 1)]
        if other is right:
            return [Bias(other, -1)]
        return [Affine(sympy.Integer(-1), sympy.Integer(0)), Bias(other, 1)]
    if classes != 1 or (operation == "div" and other is left):
        raise NoMatch(node, _combines(node))
    return [Scale(other, operation == "div")]
