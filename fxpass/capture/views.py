"""Rules of views: of rows, which move to the operands, and of other dimensions.

In: a call that views or selects. Out: as in :mod:`fxpass.capture.rows`. A view of rows computes
nothing in the canonical layout; it is a :class:`fxpass.capture.values.RowOp`::

    logits[:, :-1]            "rrc"    slice (1, 0, -1) of the rows
    .reshape(-1, V)           "rc"     reshape (N,) of the rows
    logits.transpose(1, 2)    "rcr"    nothing: rows and classes keep their order
"""

from __future__ import annotations

import math
from typing import Any

from fxpass.capture.rows import A, Rowwise, bound, rule
from fxpass.capture.values import (
    Arg,
    RowOp,
    Size,
    Step,
    Stop,
    Value,
    inner,
    inner_sizes,
    is_one,
    letter_of,
    same,
)
from fxpass.graph.nodes import hint
from fxpass.spec.dtypes import short


def rows_of(tag: str) -> list[int]:
    return [i for i, letter in enumerate(tag) if letter == "r"]


def viewed(value: Value, tag: str, op: RowOp | None, run: Any = None) -> Rowwise:
    """The result of a view of rows, and of a function of the canonical tensor."""
    assert value.tag is not None
    arg = Arg(value, value.tag, op)
    if run is None:
        return Rowwise((tag,), lambda env: env.of(arg))
    return Rowwise((tag,), lambda env: run(env, env.of(arg)))


def source_of(step: Step) -> Value:
    value = step.args[0]
    if not isinstance(value, Value) or value.tag is None:
        raise Stop("has an argument made of the logits")
    return value


@rule("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze")
def _reshape(step: Step, classes: int) -> Rowwise:
    """Rows become other rows, and other dimensions other ones, in the same order."""
    value, out = source_of(step), step.results[0]
    if value.fake.dtype != out.fake.dtype:
        raise Stop(f"reads the bits of {short(value.fake.dtype)} as {short(out.fake.dtype)}")
    tag = regrouped(value.shape, value.tag or "", out.shape)
    before, after = value.rows, tuple(s for s, c in zip(out.shape, tag, strict=True) if c == "r")
    op = None
    if len(before) != len(after) or not all(map(same, before, after)):
        op = RowOp("reshape", (after,), len(before), len(after))
    old, new = inner_sizes(value, value.tag or ""), inner_sizes(out, tag)
    if len(old) == len(new) and all(map(same, old, new)):
        return viewed(value, tag, op)
    return viewed(value, tag, op, lambda env, t: t.reshape(t.shape[0], *env.sizes(new)))


def regrouped(old: tuple[Size, ...], tag: str, new: tuple[Size, ...]) -> str:
    """The tag of a reshaped tensor: each new dimension from a group of old ones, in order."""
    i = j = 0
    found: list[str] = []
    while i < len(old) or j < len(new):
        if i < len(old) and j < len(new) and same(old[i], new[j]):
            found.append(tag[i])
            i, j = i + 1, j + 1
        elif i < len(old) and is_one(old[i]):
            i += 1
        elif j < len(new) and is_one(new[j]):
            found.append("k")
            j += 1
        elif i == len(old) or j == len(new):
            raise Stop("changes sizes in a way that is not known")
        else:
            i, j, letter = _group(old, tag, new, i, j, found)
            found += letter
    return "".join(found)


def _group(
    old: tuple[Size, ...], tag: str, new: tuple[Size, ...], i: int, j: int, found: list[str]
) -> tuple[int, int, str]:
    """The end of a group of dimensions with one product, and the letters of the new ones."""
    start, first = i, j
    left, right = old[i], new[j]
    i, j = i + 1, j + 1
    while not same(left, right):
        # a product that is 0 stays: the other one grows until it is, too
        a, b = (hint(product) or math.inf for product in (left, right))
        if a < b and i < len(old):
            left, i = left * old[i], i + 1
        elif b < a and j < len(new):
            right, j = right * new[j], j + 1
        else:
            raise Stop("changes sizes in a way that is not known")
    letters = {tag[k] for k in range(start, i) if not is_one(old[k])}
    if "r" in letters and len(letters) > 1:
        raise Stop("mixes rows and classes in one dimension")
    letter = "r" if letters == {"r"} else "c" if "c" in letters else "k"
    if letter == "c" and j - first > 1:
        return i, j, "".join("k" if hint(s) == 1 else "c" for s in new[first:j])
    return i, j, letter * (j - first)


@rule("expand")
def _expand(step: Step, classes: int) -> Rowwise:
    value, out = source_of(step), step.results[0]
    start = len(out.shape) - len(value.shape)
    tag, op = "k" * start + (value.tag or ""), None
    sizes = inner_sizes(out, tag)
    rows = tuple(s for s, c in zip(out.shape, tag, strict=True) if c == "r")
    if not all(map(same, value.rows, rows)):
        places = tuple(range(len(rows)))
        op = RowOp("broadcast", (places, rows), len(rows), len(rows))

    def run(env: Any, t: Any) -> Any:
        t = t.reshape(t.shape[0], *[1] * start, *t.shape[1:])
        return t.expand(t.shape[0], *env.sizes(sizes))

    return viewed(value, tag, op, run)


@rule("permute", "transpose", "t")
def _permute(step: Step, classes: int) -> Rowwise:
    value, given = source_of(step), bound(step)
    tag = value.tag or ""
    order = list(range(len(tag)))
    if "dims" in given:
        order = [d % len(tag) for d in given["dims"]]
    elif "dim0" in given:
        a, b = given["dim0"] % len(tag), given["dim1"] % len(tag)
        order[a], order[b] = order[b], order[a]
    else:
        order.reverse()
    rows, op = [d for d in order if tag[d] == "r"], None
    if rows != sorted(rows):
        places = tuple(sorted(rows).index(d) for d in rows)
        op = RowOp("permute", (places,), len(rows), len(rows))
    others = [inner(tag, d) for d in order if tag[d] != "r"]
    new = "".join(tag[d] for d in order)
    if others == sorted(others):
        return viewed(value, new, op)
    return viewed(value, new, op, lambda env, t: t.permute(0, *others))


@rule("slice", "select")
def _part(step: Step, classes: int) -> Rowwise:
    """Entries of one dimension, or one of them."""
    value, out, given = source_of(step), step.results[0], bound(step)
    tag = value.tag or ""
    dim = given["dim"] % len(tag)
    select = step.op.overloadpacket is A.select
    rest = [v for k, v in given.items() if k not in ("self", "dim")]
    if any(isinstance(v, Value) for v in rest):
        raise Stop("starts where a tensor says")
    new = tag[:dim] + tag[dim + 1 :] if select else tag
    if tag[dim] == "r":
        rows = rows_of(tag)
        kind = "select" if select else step.op.overloadpacket.__name__
        if kind == "slice" and same(value.shape[dim], out.shape[dim]) and given["step"] == 1:
            return viewed(value, tag, None)
        op = RowOp(kind, (rows.index(dim), *rest), len(rows), len(rows) - select)
        return viewed(value, new, op)
    if not select:
        new = tag[:dim] + letter_of(out.shape[dim], classes) + tag[dim + 1 :]
    place = inner(tag, dim)
    return viewed(value, new, None, lambda env, t: step.op(t, place, *env.sizes(rest)))


@rule("split", "split_with_sizes", "unbind")
def _parts(step: Step, classes: int) -> Rowwise:
    value, given = source_of(step), bound(step)
    tag, dim = value.tag or "", given["dim"] % len(value.tag or "-")
    unbind = step.op.overloadpacket is A.unbind
    if tag[dim] != "r":
        arg, place = Arg(value, tag), inner(tag, dim)
        rest = [v for k, v in given.items() if k not in ("self", "dim")]
        tags = []
        for result in step.results:
            letter = "" if unbind else letter_of(result.shape[dim], classes)
            tags.append(tag[:dim] + letter + tag[dim + 1 :])
        return Rowwise(tuple(tags), lambda env: step.op(env.of(arg), *env.sizes(rest), place))
    rows, start, ops = rows_of(tag), 0, []
    for i, result in enumerate(step.results):
        if unbind:
            ops.append(RowOp("select", (rows.index(dim), i), len(rows), len(rows) - 1))
            continue
        stop = start + result.shape[dim]
        ops.append(RowOp("slice", (rows.index(dim), start, stop, 1), len(rows), len(rows)))
        start = stop
    args = [Arg(value, tag, op) for op in ops]
    new = tag[:dim] + tag[dim + 1 :] if unbind else tag
    return Rowwise((new,) * len(args), _OneOf(args))


class _OneOf:
    """Results that are views of different rows: only the one that is read is computed."""

    def __init__(self, args: list[Arg]) -> None:
        self.args = args

    def __call__(self, env: Any, index: int = 0) -> Any:
        return env.of(self.args[index])


@rule("select_scatter", "slice_scatter")
def _part_assigned(step: Step, classes: int) -> Rowwise:
    """Assigns entries of one dimension that is no row."""
    given, out = bound(step), step.results[0]
    value, source = given["self"], given["src"]
    dim = given["dim"] % len(out.shape)
    select = step.op.overloadpacket is A.select_scatter
    tag = value.tag
    if tag is None:
        tag = source.tag[:dim] + "c" + source.tag[dim:] if select else source.tag
    if tag[dim] == "r":
        raise Stop("assigns to rows")
    part = tag[:dim] + tag[dim + 1 :] if select else tag
    if source.tag is not None and [c == "r" for c in source.tag] != [c == "r" for c in part]:
        raise Stop("meets rows with classes")
    args, place = (Arg(value, tag), Arg(source, part)), inner(tag, dim)
    rest = [v for k, v in given.items() if k not in ("self", "src", "dim")]

    def run(env: Any) -> Any:
        return step.op(*(env.full(a) for a in args), place, *env.sizes(rest))

    return Rowwise((tag,), run)
