"""Products: those that make logits (heads), and those over the classes of logits.

In: a call of a matrix product. Out: a :class:`fxpass.capture.values.Head`, or a row rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxpass.capture.rows import A, Rowwise, rule
from fxpass.capture.values import Arg, Head, Size, Step, Stop, Value, is_one, letter_of, same
from fxpass.graph.nodes import hint

# A product over the classes with more columns than a sixteenth of them is a hidden layer.
HIDDEN = 16


def operands_of(step: Step) -> tuple[Value, Value, Value | None] | None:
    """The factors of a product of matrices and its bias; None for another call."""
    packet, args = step.op.overloadpacket, step.args
    if packet is A.mm or (packet is A.bmm and is_one(args[0].shape[0])):
        return args[0], args[1], None
    if packet is A.addmm and not {k: v for k, v in step.kwargs.items() if v != 1}:
        return args[1], args[2], args[0]
    return None


def shared_matrix(op: Any, args: Sequence[Any]) -> Value | None:
    """The matrix ``[D, V]`` that each matrix of a batch is multiplied by, if it is one: a linear of
    hidden states ``[B, T, D]`` that are not contiguous spreads its weight."""
    if op is not A.bmm.default:
        return None
    found: Value = args[1]
    while len(found.shape) > 2 and found.node is None and found.step is not None:
        if found.step.op.overloadpacket not in (A.expand, A.view, A._unsafe_view):
            return None
        found = found.step.values[0]
    sizes = zip(found.shape, args[1].shape[1:], strict=False)
    alike = len(found.shape) == 2 and all(same(a, b) for a, b in sizes)
    spread = is_one(args[1].shape[0]) or args[1].fake.stride(0) == 0
    return found if alike and spread else None


def head_of(step: Step, first: bool) -> tuple[Head, str] | None:
    """A head and the tag of its logits; None if the call makes none.

    Args:
        step: a call of which no operand is made of logits.
        first: whether the classes are the product's first dimension.
    """
    found = operands_of(step)
    if found is None:
        return None
    a, b, bias = found
    if bias is not None and (first or len(bias.shape) != 1):
        return None
    tag = "cr" if first else "rc"
    tag = "k" * (len(a.shape) - 2) + tag
    x, weight = (b, a) if first else (a, b)
    return Head(x, weight, bias, first, step.node, step.grad), tag


@rule("mm", "mv", "addmm", "bmm")
def over_classes(step: Step, classes: int) -> Rowwise:
    """A product of logits with a matrix or vector that all rows share, over the classes."""
    packet = step.op.overloadpacket
    if packet is A.bmm:
        return _of_each_row(step)
    if packet not in (A.mm, A.mv):
        raise Stop("is a product in a way that is not known")
    a, b = step.args
    if a.tag is not None and b.tag is not None:
        raise Stop("is a product of different rows")
    if packet is A.mv:
        if a.tag is None or a.tag[0] != "r" or a.tag[1] == "r":
            raise Stop("is a product over rows")
        arg, vector = Arg(a, a.tag), Arg(b, "k")
        return Rowwise(("r",), lambda env: step.op(env.of(arg), env.of(vector)[0]))
    if a.tag is not None:
        value, other, turned, over, rows = a, b, False, 1, 0
    else:
        value, other, turned, over, rows = b, a, True, 0, 1
    tag = value.tag or ""
    if tag[over] == "r" or tag[rows] != "r":
        raise Stop("is a product over rows")
    columns: Size = other.shape[0 if turned else 1]
    if tag[over] == "c" and hint(columns) * HIDDEN > hint(value.shape[over]):
        raise Stop("is the product of a hidden layer")
    arg, matrix = Arg(value, tag), Arg(other, "kk")
    letter = letter_of(columns, classes)

    def run(env: Any) -> Any:
        shared = env.of(matrix)[0]
        return env.of(arg) @ (shared.t() if turned else shared)

    return Rowwise((letter + "r" if turned else "r" + letter,), run)


def _of_each_row(step: Step) -> Rowwise:
    """A product of matrices that each row has: ``einsum("nv,nv->n")``."""
    a, b = step.args
    for value in (a, b):
        if value.tag is not None and value.tag[0] == "k" and is_one(value.shape[0]):
            return _of_one_batch(step)
        if value.tag is not None and (value.tag[0] != "r" or "r" in value.tag[1:]):
            raise Stop("is a product over rows")
    args = [Arg(v, v.tag or "rkk") for v in (a, b)]
    tag = "r" + (a.tag or "rkk")[1] + (b.tag or "rkk")[2]
    return Rowwise((tag,), lambda env: step.op(*(env.full(arg) for arg in args)))


def _of_one_batch(step: Step) -> Rowwise:
    """``[1, N, V] @ [1, V, K]``."""
    a, b = step.args
    if a.tag is None or b.tag is not None or a.tag[1] != "r" or a.tag[2] == "r":
        raise Stop("is a product over rows")
    if hint(b.shape[2]) * HIDDEN > hint(a.shape[2]):
        raise Stop("is the product of a hidden layer")
    arg, matrix = Arg(a, a.tag), Arg(b, "kkk")
    return Rowwise(("krk",), lambda env: (env.of(arg)[:, 0] @ env.of(matrix)[0, 0])[:, None])
