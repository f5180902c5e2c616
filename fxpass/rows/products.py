"""Rules of products: of rows with a matrix, of rows with themselves, and sums over rows."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxpass import messages
from fxpass.rows.aten_calls import A
from fxpass.rows.canonical import align, zero_outside
from fxpass.rows.rules import Env, NodePlan, Ref, Rules, rule
from fxpass.rows.sizes import example, is_one, packet, shape, size_hint
from fxpass.rows.tags import Stop, Tag, letter_of, relettered


@rule("mm", "addmm")
def mm(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """A product of two matrices of which one or both have rows."""
    bias = None
    if packet(node) is A.addmm:
        if any(v != 1 for v in node.kwargs.values()):
            raise Stop(messages.PRODUCT_SCALED)
        bias, a, b = node.args
    else:
        a, b = node.args[:2]
    of_a = rules.tag_of(a)
    of_b = rules.tag_of(b)
    if want is not None:
        side = 0 if want.letters[0] == "r" else 1
        tag = want
    elif of_a is not None and of_a.letters[0] == "r":
        side = 0
        tag = of_a
    elif of_b is not None and of_b.letters[1] == "r":
        side = 1
        tag = of_b
    else:
        found = of_a if of_a is not None and of_a.letters[1] == "r" else of_b
        if found is None or "r" not in found.letters or bias is not None:
            raise Stop(messages.PRODUCT_OF_OTHERS)
        return _over_rows(rules, a, b, found)  # pyright: ignore[reportArgumentType]
    x, weight = (a, b) if side == 0 else (b, a)
    assert isinstance(x, Node)
    assert isinstance(weight, Node)
    if rules.tags_of(weight) is not None:
        raise Stop(messages.PRODUCT_OF_ROWS)
    if want is not None and size_hint(shape(node)[1 - side]) < size_hint(shape(x)[1 - side]):
        raise Stop(messages.PRODUCT_NO_HEAD)
    inner = letter_of(shape(x)[1 - side], rules.classes)
    of_x = rules.ref(x, tag.with_letters(f"r{inner}" if side == 0 else f"{inner}r"))
    of_weight = Ref("shared", weight, "kk")
    # a product with the weight of a head ends with hidden values
    hidden = rules.is_weight(weight) and want is None
    outer = "k" if hidden else letter_of(shape(node)[1 - side], rules.classes)
    result = want or tag.with_letters(f"r{outer}" if side == 0 else f"{outer}r")
    refs = [of_x, of_weight]
    if isinstance(bias, Node):
        refs.append(rules.broadcast_ref(bias, result, shape(node)))

    def run(env: Env) -> Tensor:
        matrix = env.shared(of_weight)
        matrix = matrix if side == 0 else matrix.t()
        if len(refs) > 2 and side == 0 and refs[2].kind == "shared":  # rounded once
            return torch.addmm(env.shared(refs[2]), env.full(of_x), matrix)
        made = torch.mm(env.full(of_x), matrix)
        if len(refs) < 3:
            return made
        return made + align(env.get(refs[2]), refs[2].letters, result.letters)

    return NodePlan(result, refs, run)


def _over_rows(rules: Rules, a: Node, b: Node, tag: Tag) -> NodePlan:
    """``aᵀ b``, a sum over rows, as the gradient of a weight is."""
    if not (rules.has_classes(a) or rules.has_classes(b)):
        raise Stop(messages.SUMS_ROWS)
    left = rules.ref(a, tag.with_letters("kr"))
    right = rules.ref(b, tag.with_letters("rk"))

    def run(env: Env) -> Tensor:
        x = zero_outside(env, env.full(left), tag)
        y = zero_outside(env, env.full(right), tag)
        return torch.mm(x.t(), y)

    return NodePlan(None, [left, right], run, (tag.view,))


@rule("bmm")
def bmm(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """A batch of products: with one matrix, with a matrix for each entry of a dimension without
    rows, or with a matrix for each row."""
    a, b = node.args[:2]
    assert isinstance(a, Node)
    assert isinstance(b, Node)
    of_a = rules.tag_of(a)
    of_b = rules.tag_of(b)
    if want is None and of_b is None and of_a is not None and re.match("(rr|kr)[^r]", of_a.letters):
        return _shared_matrices(rules, node, a, b, of_a)
    for tag in (of_a, of_b):
        if tag is not None and tag.letters[0] == "r" and "r" not in tag.letters[1:]:
            return _row_products(rules, node, tag, tag is not of_a)
    raise Stop(messages.BATCHED_PRODUCT)


def _shared_matrices(rules: Rules, node: Node, a: Node, b: Node, tag: Tag) -> NodePlan:
    """Rows ``a`` with matrices ``b`` that are the same for all rows."""
    sizes = shape(node)
    letters = tag.letters
    if letters[0] == "r" and not (is_one(sizes[0]) or example(b).stride(0) == 0):
        raise Stop(messages.MATRIX_EACH_ROW)
    last = "k" if rules.is_weight(b) else letter_of(sizes[2], rules.classes)
    x = rules.ref(a, tag)
    weight = Ref("shared", b, "kkk")

    def run(env: Env) -> Tensor:
        tensor = env.full(x)
        matrices = env.shared(weight)
        if letters[0] == "r":
            return torch.matmul(tensor, matrices[0])
        return torch.matmul(tensor.movedim(0, 1), matrices).movedim(0, 1)

    return NodePlan(tag.with_letters(letters[:2] + last), [x, weight], run)


def _row_products(rules: Rules, node: Node, tag: Tag, swapped: bool) -> NodePlan:
    """A product for each row; the tag is that of the second factor if ``swapped``."""
    factors: Any = node.args[:2]
    own, other = reversed(factors) if swapped else factors
    x = rules.ref(own, tag)
    y = rules.ref(other, tag.with_letters(relettered("rkk", shape(other), rules.classes)))

    def run(env: Env) -> Tensor:
        tensors = env.full(x), env.full(y)
        return torch.bmm(*reversed(tensors)) if swapped else torch.bmm(*tensors)

    result = tag.with_letters(relettered("rkk", shape(node), rules.classes))
    return NodePlan(result, [x, y], run)
