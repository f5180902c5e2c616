"""Rules of views: of rows they compute nothing, of other dimensions they are taken of a chunk."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from fxpass.rows.rules import A, Env, NodePlan, P, Rules, fit, rule
from fxpass.rows.sizes import packet, same, shape, value
from fxpass.rows.tags import (
    Stop,
    Tag,
    others,
    place,
    regrouped,
    relettered,
)


@rule("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze")
def reshape(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """The same elements in other dimensions."""
    source = source_of(node)
    after = shape(node)
    before = shape(source)
    if want is None:
        tag = tagged(rules, source)
        letters = regrouped(before, tag.letters, after, rules.classes)
        made = tag.like(letters)
        result = tag.like(letters, tag.view.reshape(made.row_sizes(after)))
        given = tag
    else:
        letters = regrouped(after, want.letters, before, rules.classes)
        made = want.like(letters)
        result = want
        given = want.like(letters, want.view.reshape(made.row_sizes(before)))
    ref = rules.ref(source, given)
    sizes = others(after, result.letters)

    def run(env: Env) -> Tensor:
        tensor = env.get(ref)
        return tensor.reshape(tensor.shape[0], *map(env.size, sizes))

    return NodePlan(result, [ref], run)


@rule("permute", "transpose", "t")
def permute(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """The dimensions in another order."""
    source = source_of(node)
    order = _order(node)
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
        result = given.like("".join(letters[d] for d in order), view)
    else:
        back = tuple(places.index(i) for i in range(len(places)))
        view = want.view.then("permute", back, [sizes[d] for d in sorted(of_rows)])
        result = want
        given = want.like(letters, view)
    ref = rules.ref(source, given)
    inner = [place(letters, d) for d in order if letters[d] != "r"]
    return NodePlan(result, [ref], lambda env: env.get(ref).permute(0, *inner))


def _order(node: Node) -> list[int]:
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
    """Dimensions of one element as larger ones, and new dimensions in front."""
    source = source_of(node)
    sizes = shape(node)
    if want is None:
        tag = tagged(rules, source)
        start = len(sizes) - len(tag.letters)
        for i, letter in enumerate(tag.letters):
            if letter == "r" and not same(shape(source)[i], sizes[start + i]):
                raise Stop("spreads rows")
        want = tag.like(relettered("k" * start + tag.letters, sizes, rules.classes))
    tag = want
    ref = rules.spread(source, tag, sizes)
    inner = others(sizes, tag.letters)

    def run(env: Env) -> Tensor:
        tensor = fit(env.get(ref), ref.letters, tag.letters)
        return tensor.expand(tensor.shape[0] if tensor.dim() else 1, *map(env.size, inner))

    return NodePlan(tag, [ref], run)


@rule("device_put", ns=P)
def moved(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """Another device: a loop runs on one."""
    if want is not None:
        raise Stop("moves a large operand between devices")
    before = value(source_of(node)).device
    after = value(node).device
    raise Stop(f"moves the logits from {before} to {after}; move the labels to {before} instead")


def source_of(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def tagged(rules: Rules, node: Node) -> Tag:
    tag = rules.tag_of(node)
    if tag is None:
        raise Stop("has no operand with rows")
    return tag
