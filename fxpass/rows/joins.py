"""Rules of ``cat`` along classes and of parts of rows, and of padded classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxpass import messages
from fxpass.rows.canonical import unsqueeze_mask
from fxpass.rows.rules import Env, NodePlan, Rules, rule
from fxpass.rows.sizes import is_one, key, same_size, shape
from fxpass.rows.tags import Stop, Tag, View, ViewStep, canonical_dim, relettered
from fxpass.rows.views import source_operand, tagged


@rule("cat")
def cat(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """Joins tensors along classes, or all parts of rows at their places."""
    tensors: Any = node.args[0]
    sizes = shape(node)
    along: Any = node.args[1] if len(node.args) > 1 else 0
    dim = along % len(sizes)
    with_tags = [t for t in tensors if rules.tag_of(t) is not None]
    tag = want or rules.joined_tag(with_tags, sizes)
    tag = tag.with_letters(relettered(tag.letters, sizes, rules.classes))
    first = rules.tag_of(with_tags[0]) if with_tags else None
    step = first.view.last if first is not None else ViewStep()
    plan = None
    if tag.letters[dim] != "r":
        if first is not None and step.kind == "select":
            plan = _joined_selects(rules, tensors, dim, tag, first.view)
    elif want is not None:
        plan = _joined_slices(rules, tensors, dim, want)
    elif first is not None and step.kind == "slice":
        whole = tag.with_letters(tag.letters, first.view.before)
        plan = _joined_slices(rules, tensors, dim, whole)
    if plan is not None:
        return plan
    if tag.letters[dim] == "r":
        raise Stop(messages.JOINED)
    for tensor in tensors:
        pairs = zip(tag.letters, shape(tensor), sizes, strict=True)
        if any(letter == "r" and not same_size(a, b) for letter, a, b in pairs):
            raise Stop(messages.JOINED_OTHERS)
    refs = [
        rules.ref(t, tag.with_letters(relettered(tag.letters, shape(t), rules.classes)))
        for t in tensors
    ]
    at = canonical_dim(tag.letters, dim)
    return NodePlan(tag, refs, lambda env: torch.cat([env.full(ref) for ref in refs], at))


def _joined_slices(rules: Rules, tensors: Any, dim: int, whole: Tag) -> NodePlan | None:
    """Joins slices of rows, as the gradient of a split does; None if they are not all rows."""
    if len(whole.view.shape) != len(whole.rows):
        return None
    d = whole.rows.index(dim)
    start = 0
    sizes = list(whole.view.shape)
    views = []
    for tensor in tensors:
        sizes[d] = key(shape(tensor)[dim])
        end = start + sizes[d]
        views.append(whole.view.then("slice", (d, start, end, 1), sizes))
        start = end
    if key(start) != whole.view.shape[d]:
        return None
    return _joined_rows(rules, tensors, whole, whole.letters, views)


def _joined_selects(rules: Rules, tensors: Any, dim: int, tag: Tag, view: View) -> NodePlan | None:
    """Joins selected rows, as the gradient of an unbind does; None if they are not all rows."""
    if not all(is_one(shape(t)[dim]) for t in tensors):
        return None
    letters = tag.letters[:dim] + "r" + tag.letters[dim + 1 :]
    whole = tag.with_letters(letters, view.before)
    rows = view.before.shape
    d = whole.rows.index(dim)
    if d != view.last.args[0] or len(rows) != len(whole.rows) or rows[d] != len(tensors):
        return None
    views = [view.before.then("select", (d, i), view.shape) for i in range(len(tensors))]
    part_letters = tag.letters[:dim] + "k" + tag.letters[dim + 1 :]
    return _joined_rows(rules, tensors, whole, part_letters, views, canonical_dim(letters, dim))


def _joined_rows(
    rules: Rules,
    tensors: Any,
    whole: Tag,
    part_letters: str,
    views: Sequence[View],
    squeezed: int | None = None,
) -> NodePlan:
    """For each row, the entry of the tensor whose view has the row."""
    tags = [whole.with_letters(part_letters, view) for view in views]
    refs = [rules.ref(tensor, tag) for tensor, tag in zip(tensors, tags, strict=True)]

    def run(env: Env) -> Tensor:
        made: Tensor | None = None
        for ref, view in zip(refs, views, strict=True):
            tensor = env.full(ref)
            tensor = tensor if squeezed is None else tensor.squeeze(squeezed)
            inside = env.inside(view)
            if made is None or inside is None:
                made = tensor
            else:
                made = torch.where(unsqueeze_mask(inside, tensor), tensor, made)
        assert made is not None
        return made

    return NodePlan(whole, refs, run, tuple(views))


@rule("constant_pad_nd")
def pad(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """Adds classes that are filled with a number."""
    source = source_operand(node)
    pads = list(node.args[1])  # pyright: ignore[reportArgumentType]
    tag = want or tagged(rules, source)
    rank = len(tag.letters)
    around = {rank - 1 - i // 2: pads[i : i + 2] for i in range(0, len(pads), 2)}
    if any(tag.letters[d] == "r" and any(by) for d, by in around.items()):
        raise Stop(messages.PADS_ROWS)
    inner = [around.get(d, (0, 0)) for d in reversed(range(rank)) if tag.letters[d] != "r"]
    amounts = [n for pair in inner for n in pair]
    ref = rules.ref(source, tag.with_letters(relettered(tag.letters, shape(source), rules.classes)))
    result = tag.with_letters(relettered(tag.letters, shape(node), rules.classes))

    def run(env: Env) -> Tensor:
        sizes = [env.size(n) for n in amounts]
        return node.target(env.get(ref), sizes, *node.args[2:])  # pyright: ignore

    return NodePlan(result, [ref], run)
