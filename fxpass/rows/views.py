"""Rules of views: views of rows move no values, views of other dimensions run on a chunk."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from fxpass import messages
from fxpass.rows.aten_calls import A, P
from fxpass.rows.canonical import align
from fxpass.rows.rules import Env, NodePlan, Rules, rule
from fxpass.rows.sizes import example, keys, packet, same_size, shape
from fxpass.rows.tags import (
    Stop,
    Tag,
    canonical_dim,
    inner_sizes,
    regrouped,
    relettered,
)


@rule("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze")
def reshape(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """The same values in other dimensions."""
    source = source_operand(node)
    after = shape(node)
    before = shape(source)
    if want is None:
        tag = tagged(rules, source)
        letters = regrouped(before, tag.letters, after, rules.classes)
        made = tag.with_letters(letters)
        result = tag.with_letters(letters, tag.view.reshape(made.row_sizes(after)))
        given = tag
    else:
        letters = regrouped(after, want.letters, before, rules.classes)
        made = want.with_letters(letters)
        result = want
        given = want.with_letters(letters, want.view.reshape(made.row_sizes(before)))
    ref = rules.ref(source, given)
    sizes = inner_sizes(after, result.letters)
    varying = [
        {k for k in keys(inner_sizes(some, tag.letters)) if not isinstance(k, int)}
        for some, tag in ((before, given), (after, result))
    ]
    if varying[0] != varying[1]:  # in a text, no size is a product of two others
        raise Stop(messages.SIZES_VARY)

    def run(env: Env) -> Tensor:
        tensor = env.get(ref)
        return tensor.reshape(tensor.shape[0], *map(env.size, sizes))

    return NodePlan(result, [ref], run)


@rule("permute", "transpose", "t")
def permute(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """The dimensions in another order."""
    source = source_operand(node)
    order = permutation(node)
    sizes = shape(source)
    if want is None:
        letters = tagged(rules, source).letters
    else:
        letters = "".join(want.letters[order.index(d)] for d in range(len(order)))
    of_rows = [d for d in order if letters[d] == "r"]
    places = tuple(sorted(of_rows).index(d) for d in of_rows)
    if want is None:
        given = tagged(rules, source)
        view = given.view.then("permute", places, [sizes[d] for d in of_rows])
        result = given.with_letters("".join(letters[d] for d in order), view)
    else:
        back = tuple(places.index(i) for i in range(len(places)))
        view = want.view.then("permute", back, [sizes[d] for d in sorted(of_rows)])
        result = want
        given = want.with_letters(letters, view)
    ref = rules.ref(source, given)
    inner = [canonical_dim(letters, d) for d in order if letters[d] != "r"]
    return NodePlan(result, [ref], lambda env: env.get(ref).permute(0, *inner))


def permutation(node: Node) -> list[int]:
    """The order of dimensions in a ``permute``, ``transpose`` or ``t``."""
    rank = len(shape(node))
    if packet(node) is A.permute:
        return [d % rank for d in node.args[1]]  # pyright: ignore
    order = list(range(rank))
    if rank > 1:
        given: Any = (0, 1) if packet(node) is A.t else node.args[1:]
        a, b = (d % rank for d in given)
        order[a], order[b] = order[b], order[a]
    return order


@rule("expand")
def expand(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """Larger dimensions in the place of those of size 1, and new dimensions in front."""
    source = source_operand(node)
    sizes = shape(node)
    if want is None:
        tag = tagged(rules, source)
        start = len(sizes) - len(tag.letters)
        for i, letter in enumerate(tag.letters):
            if letter == "r" and not same_size(shape(source)[i], sizes[start + i]):
                raise Stop(messages.ROWS_SPREAD)
        want = tag.with_letters(relettered("k" * start + tag.letters, sizes, rules.classes))
    tag = want
    ref = rules.broadcast_ref(source, tag, sizes)
    inner = inner_sizes(sizes, tag.letters)

    def run(env: Env) -> Tensor:
        tensor = align(env.get(ref), ref.letters, tag.letters)
        return tensor.expand(tensor.shape[0] if tensor.dim() else 1, *map(env.size, inner))

    return NodePlan(tag, [ref], run)


@rule("device_put", ns=P)
def moved(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """Refuses a move to another device: a loop runs on a single device."""
    if want is not None:
        raise Stop(messages.DEVICE_OF_OPERAND)
    before = example(source_operand(node)).device
    after = example(node).device
    raise Stop(messages.DEVICE_OF_LOGITS.format(before=before, after=after))


def source_operand(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def tagged(rules: Rules, node: Node) -> Tag:
    tag = rules.tag_of(node)
    if tag is None:
        raise Stop(messages.NO_ROWS)
    return tag
