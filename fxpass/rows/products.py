"""Rules of products: of rows with a matrix, of rows with themselves, and sums over rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from fxpass.rows.pointwise import masked
from fxpass.rows.rules import A, Env, NodePlan, Ref, Rules, fit, rule
from fxpass.rows.sizes import hint, is_one, packet, shape, value
from fxpass.rows.tags import Stop, Tag, letter_of, relettered


@rule("mm", "addmm")
def mm(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """A product of two matrices, of which one has rows, or both."""
    bias = None
    if packet(node) is A.addmm:
        if any(v != 1 for v in node.kwargs.values()):
            raise Stop("scales a product")
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
            raise Stop("is a product of other rows")
        return _over_rows(rules, a, b, found)  # pyright: ignore[reportArgumentType]
    x, weight = (a, b) if side == 0 else (b, a)
    assert isinstance(x, Node)
    assert isinstance(weight, Node)
    if rules.tag(weight) is not None:
        raise Stop("is a product of different rows")
    if want is not None and hint(shape(node)[1 - side]) < hint(shape(x)[1 - side]):
        raise Stop("is a product that is no head")
    inner = letter_of(shape(x)[1 - side], rules.classes)
    of_x = rules.ref(x, tag.like(f"r{inner}" if side == 0 else f"{inner}r"))
    of_weight = Ref("shared", weight, "kk")
    # a product with the weight of a head ends with hidden values
    hidden = rules.is_weight(weight) and want is None
    outer = "k" if hidden else letter_of(shape(node)[1 - side], rules.classes)
    result = want or tag.like(f"r{outer}" if side == 0 else f"{outer}r")
    refs = [of_x, of_weight]
    if isinstance(bias, Node):
        refs.append(rules.spread(bias, result, shape(node)))

    def run(env: Env) -> Tensor:
        matrix = env.shared(of_weight)
        matrix = matrix if side == 0 else matrix.t()
        if len(refs) > 2 and side == 0 and refs[2].kind == "shared":  # rounded once
            return torch.addmm(env.shared(refs[2]), env.full(of_x), matrix)
        made = torch.mm(env.full(of_x), matrix)
        if len(refs) < 3:
            return made
        return made + fit(env.get(refs[2]), refs[2].letters, result.letters)

    return NodePlan(result, refs, run)


def _over_rows(rules: Rules, a: Node, b: Node, tag: Tag) -> NodePlan:
    """``aᵀ b``, a sum over rows, as the gradient of a weight is."""
    if not (rules.has_classes(a) or rules.has_classes(b)):
        raise Stop("sums rows of no classes")
    left = rules.ref(a, tag.like("kr"))
    right = rules.ref(b, tag.like("rk"))

    def run(env: Env) -> Tensor:
        x = masked(env, env.full(left), tag)
        y = masked(env, env.full(right), tag)
        return torch.mm(x.t(), y)

    return NodePlan(None, [left, right], run, (tag.view,))


@rule("bmm")
def bmm(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """A batch of products: with one matrix, with one for each of another dimension, or of rows."""
    a, b = node.args[:2]
    assert isinstance(a, Node)
    assert isinstance(b, Node)
    of_a = rules.tag_of(a)
    of_b = rules.tag_of(b)
    sizes = shape(node)
    if want is None and of_b is None and of_a is not None:
        letters = of_a.letters
        if letters[:2] in ("rr", "kr") and letters[2] != "r":
            if letters[0] == "r" and not (is_one(sizes[0]) or value(b).stride(0) == 0):
                raise Stop("multiplies each row by a matrix of its own")
            outer = "k" if rules.is_weight(b) else letter_of(sizes[2], rules.classes)
            x = rules.ref(a, of_a)
            weight = Ref("shared", b, "kkk")

            def of_weight(env: Env) -> Tensor:
                tensor = env.full(x)
                matrices = env.shared(weight)
                if letters[0] == "r":
                    return torch.matmul(tensor, matrices[0])
                return torch.matmul(tensor.movedim(0, 1), matrices).movedim(0, 1)

            return NodePlan(of_a.like(letters[:2] + outer), [x, weight], of_weight)
    for tag, own, other, turned in ((of_a, a, b, False), (of_b, b, a, True)):
        if tag is None or tag.letters[0] != "r" or "r" in tag.letters[1:]:
            continue
        of_other = tag.like(relettered("rkk", shape(other), rules.classes))
        x = rules.ref(own, tag)
        y = rules.ref(other, of_other)

        def of_rows(env: Env, x: Ref = x, y: Ref = y, turned: bool = turned) -> Tensor:
            left = env.full(x)
            right = env.full(y)
            return torch.bmm(right, left) if turned else torch.bmm(left, right)

        return NodePlan(tag.like(relettered("rkk", sizes, rules.classes)), [x, y], of_rows)
    raise Stop("is a batched product in a way that is not known")
