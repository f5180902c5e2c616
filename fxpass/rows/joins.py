"""Rules of tensors that are joined along classes, or as parts of rows, and of padded classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxpass.rows.rules import Env, NodePlan, Ref, Rules, beside, rule
from fxpass.rows.sizes import is_one, key, same, shape
from fxpass.rows.tags import Stop, Tag, place, relettered
from fxpass.rows.views import source_of, tagged


@rule("cat")
def cat(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """Tensors along classes, or all parts of rows at their places."""
    tensors: Any = node.args[0]
    sizes = shape(node)
    along: Any = node.args[1] if len(node.args) > 1 else 0
    dim = along % len(sizes)
    given_tags = [t for t in tensors if rules.tag_of(t) is not None]
    if want is None and not given_tags:
        raise Stop("has no operand with rows")
    tag = want or rules.joined(given_tags, shape(given_tags[0]))
    tag = tag.like(relettered(tag.letters, sizes, rules.classes))
    if (found := _of_rows(rules, tensors, dim, tag, given_tags, want)) is not None:
        return found
    if tag.letters[dim] == "r":
        raise Stop("joins rows of several tensors")
    for tensor in tensors:
        pairs = zip(tag.letters, shape(tensor), sizes, strict=True)
        if any(letter == "r" and not same(a, b) for letter, a, b in pairs):
            raise Stop("joins tensors of other rows")
    refs = [
        rules.ref(t, tag.like(relettered(tag.letters, shape(t), rules.classes))) for t in tensors
    ]
    at = place(tag.letters, dim)
    return NodePlan(tag, refs, lambda env: torch.cat([env.full(ref) for ref in refs], at))


def _of_rows(
    rules: Rules, tensors: Any, dim: int, tag: Tag, given_tags: list[Node], want: Tag | None
) -> NodePlan | None:
    """Parts of rows at their places: what the gradient of a split, or of an unbind, is."""
    first = rules.tag_of(given_tags[0]) if given_tags else None
    last: Any = first.view.last if first is not None else ("", (), ())
    parts: list[Tag] = []
    if tag.letters[dim] == "r" and (want is not None or last[0] == "slice"):
        if want is not None:
            whole = want
        else:
            assert first is not None
            whole = tag.like(tag.letters, first.view.before)
        if len(whole.view.shape) != len(whole.rows):
            return None
        d = whole.rows.index(dim)
        start = 0
        after = list(whole.view.shape)
        for tensor in tensors:
            size = key(shape(tensor)[dim])
            after[d] = size
            view = whole.view.then("slice", (d, start, start + size, 1), after)
            parts.append(whole.like(whole.letters, view))
            start += size
        if key(start) != whole.view.shape[d]:
            return None
        refs = [rules.ref(t, p) for t, p in zip(tensors, parts, strict=True)]
        return _put_together(whole, refs, parts, None)
    single = all(is_one(shape(t)[dim]) for t in tensors)
    if first is None or tag.letters[dim] == "r" or not single or last[0] != "select":
        return None
    letters = tag.letters[:dim] + "r" + tag.letters[dim + 1 :]
    d = letters[:dim].count("r")
    count = len(tensors)
    inner = tag.letters[:dim] + "k" + tag.letters[dim + 1 :]
    whole = tag.like(letters, first.view.before)
    before = first.view.before
    known = len(before.shape) == len(whole.rows) and before.shape[d] == count
    if d != last[1][0] or not known:  # not of an unbind
        return None
    after = list(first.view.shape)
    parts = [tag.like(inner, before.then("select", (d, i), after)) for i in range(count)]
    refs = [rules.ref(t, p) for t, p in zip(tensors, parts, strict=True)]
    return _put_together(whole, refs, parts, place(letters, dim))


def _put_together(whole: Tag, refs: list[Ref], parts: list[Tag], squeezed: int | None) -> NodePlan:
    views = tuple(tag.view for tag in parts)
    return NodePlan(whole, refs, lambda env: _placed(env, refs, parts, squeezed), views)


def _placed(env: Env, refs: list[Ref], parts: list[Tag], squeezed: int | None) -> Tensor:
    """For each row, the tensor of the part that has it."""
    made: Tensor | None = None
    for ref, tag in zip(refs, parts, strict=True):
        tensor = env.full(ref)
        tensor = tensor if squeezed is None else tensor.squeeze(squeezed)
        inside = env.inside(tag.view)
        if made is None or inside is None:
            made = tensor
        else:
            made = torch.where(beside(inside, tensor), tensor, made)
    assert made is not None
    return made


@rule("constant_pad_nd")
def pad(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """More classes of one number."""
    source = source_of(node)
    pads = list(node.args[1])  # pyright: ignore[reportArgumentType]
    tag = want or tagged(rules, source)
    rank = len(tag.letters)
    around = {rank - 1 - i // 2: pads[i : i + 2] for i in range(0, len(pads), 2)}
    if any(tag.letters[d] == "r" and any(by) for d, by in around.items()):
        raise Stop("pads rows")
    inner = [by for d in range(rank - 1, -1, -1) if tag.letters[d] != "r" for by in [around.get(d)]]
    amounts = [n for by in inner for n in (by or (0, 0))]
    ref = rules.ref(source, tag.like(relettered(tag.letters, shape(source), rules.classes)))
    result = tag.like(relettered(tag.letters, shape(node), rules.classes))

    def run(env: Env) -> Tensor:
        sizes = [env.size(n) for n in amounts]
        return node.target(env.get(ref), sizes, *node.args[2:])  # pyright: ignore

    return NodePlan(result, [ref], run)
