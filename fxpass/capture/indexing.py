"""Rules of advanced indexing: masks and selections of rows, of classes, and one class of each row.

In: a call of ``index`` or ``index_put``. Out: as in :mod:`fxpass.capture.rows`::

    logits[mask]                   rows that a mask takes: a view of rows
    logits[arange(N), labels]      one class of each row: a gather
    logits[:, classes]             the same classes of all rows
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fxpass.capture.rows import A, Rowwise, bound, rule
from fxpass.capture.values import (
    Arg,
    RowOp,
    Size,
    Step,
    Stop,
    Value,
    inner,
    is_one,
    letter_of,
    same,
)
from fxpass.capture.views import rows_of, source_of, viewed


@rule("index")
def _index(step: Step, classes: int) -> Rowwise:
    """``z[mask]``, ``z[rows]``, ``z[:, classes]`` or ``z[rows, labels]``."""
    value, out = source_of(step), step.results[0]
    tag, indices = value.tag or "", list(step.args[1])
    given = {i: index for i, index in enumerate(indices) if index is not None}
    if any(v.tag is not None and v.tag.strip("r") for v in given.values()):
        raise Stop("is indexed by what is made of the logits")
    if any(v.fake.dtype in (torch.bool, torch.uint8) for v in given.values()):
        return _masked(value, out, given, classes)
    letters = [tag[i] for i in given]
    rows = rows_of(tag)
    if "r" not in letters:
        return _of_classes(step, value, out, given, classes)
    if [i for i, c in enumerate(tag) if c == "r" and i in given] != rows[: letters.count("r")]:
        raise Stop("indexes some dimensions of rows")
    if any(v.tag is not None for v in given.values()):
        return _picked(value, out, given, classes)
    if letters.count("r") == len(letters):
        if list(given) != list(range(len(given))):
            raise Stop("indexes rows after classes")
        wanted = tuple(given.values())
        rank = len(out.shape) - (len(tag) - len(given))
        op = RowOp("index", (wanted,), len(rows), rank + len(rows) - len(given))
        return viewed(value, "r" * rank + tag[len(given) :], op)
    return _picked(value, out, given, classes)


def _masked(value: Value, out: Value, given: dict[int, Value], classes: int) -> Rowwise:
    """A mask of rows, or of classes."""
    tag, ((dim, mask), *more) = value.tag or "", given.items()
    if more or mask.tag is not None or mask.fake.dtype != torch.bool:
        raise Stop("is indexed by a mask in a way that is not known")
    covered = tag[dim : dim + len(mask.shape)]
    if set(covered) == {"r"} and not tag[:dim].strip("r"):
        rows = rows_of(tag)
        wanted = (*[None] * dim, mask), out.shape[dim]
        op = RowOp("index", wanted, len(rows), len(rows) - len(covered) + 1)
        return viewed(value, tag[:dim] + "r" + tag[dim + len(covered) :], op)
    if "r" in covered or len(covered) != 1:
        raise Stop("takes elements by a mask, whose number differs from row to row")
    place, arg = inner(tag, dim), Arg(mask, "k")
    letter = letter_of(out.shape[dim], classes)

    def run(env: Any, t: Any) -> Any:
        return t[(*[slice(None)] * place, env.of(arg)[0])]

    return viewed(value, tag[:dim] + letter + tag[dim + 1 :], None, run)


def _of_classes(
    step: Step, value: Value, out: Value, given: dict[int, Value], classes: int
) -> Rowwise:
    """The same classes of all rows."""
    tag, ((dim, index), *more) = value.tag or "", given.items()
    if more or index.tag is not None or len(index.shape) > 1:
        raise Stop("takes classes in a way that is not known")
    place, arg = inner(tag, dim), Arg(index, "k" * len(index.shape))

    def run(env: Any, t: Any) -> Any:
        found = env.of(arg)
        found = found[0] if found.dim() else found
        return t[(*[slice(None)] * place, found)]

    letter = letter_of(out.shape[dim], classes) if index.shape else ""
    return viewed(value, tag[:dim] + letter + tag[dim + 1 :], None, run)


def _picked(value: Value, out: Value, given: dict[int, Value], classes: int) -> Rowwise:
    """``z[rows, labels]``: one class of each row that is named."""
    tag = value.tag or ""
    rows = rows_of(tag)
    if list(given) != list(range(len(tag))) or len(rows) != len(tag) - 1 or tag[-1] != "c":
        raise Stop("indexes rows and classes in a way that is not known")
    *of_rows, labels = given.values()
    identity = all(is_range(v, value.shape[i], len(rows) - i) for i, v in enumerate(of_rows))
    shape = out.shape
    if identity and len(shape) == len(rows) and all(map(same, shape, value.rows)):
        op = None
    elif any(v.tag is not None for v in of_rows) or labels.tag is not None:
        raise Stop("is indexed by what is made of the logits")
    else:
        taken = torch.broadcast_shapes(*(v.fake.shape for v in of_rows))
        if len(taken) != len(shape) or not all(map(same, taken, shape)):
            raise Stop("is indexed by labels of more rows than it takes")
        op = RowOp("index", (tuple(of_rows),), len(rows), len(shape))
    new = "r" * len(shape)
    letters = labels.tag or "r" * len(labels.shape)
    then = None
    if len(labels.shape) != len(shape) or not all(map(same, labels.shape, shape)):
        start = len(shape) - len(labels.shape)
        places = tuple(i - start if i >= start else None for i in range(len(shape)))
        then = RowOp("broadcast", (places, shape), len(labels.shape), len(shape))
    arg = Arg(labels, letters, then)

    def run(env: Any, t: Any) -> Any:
        picks = env.full(arg)
        picks = torch.where(picks < 0, picks + t.shape[1], picks)
        return t.gather(1, picks[:, None])[:, 0]

    return viewed(value, new, op, run)


def is_range(index: Value, size: Size, rank: int) -> bool:
    """Whether an index is ``arange(size)``, along the dimension ``rank`` from the end."""
    shape = index.shape
    if len(shape) < rank or any(
        not is_one(s) for i, s in enumerate(shape) if i != len(shape) - rank
    ):
        return False
    while index.step is not None and index.step.op.overloadpacket in _KEEPS_RANGE:
        if index.fake.dtype not in (torch.int32, torch.int64):
            return False  # others round
        index = index.step.args[0]
    if index.data is not None:
        with _disable_current_modes():
            return isinstance(size, int) and index.data.flatten().tolist() == list(range(size))
    step = index.step
    if step is None or step.op.overloadpacket is not A.arange:
        return False
    given = bound(step)
    start, stop, by = given.get("start", 0), given["end"], given.get("step", 1)
    return start == 0 and by == 1 and same(stop, size) and same(shape[len(shape) - rank], size)


_KEEPS_RANGE = {A.unsqueeze, A.view, A._unsafe_view, A.reshape, A._to_copy, A.detach, A.alias}
_KEEPS_RANGE |= {A.lift_fresh_copy, A.clone}


@rule("index_put")
def _assigned(step: Step, classes: int) -> Rowwise:
    """``z[:, classes] = value``, ``z[mask] = number``, ``z[rows, labels] = value``."""
    given = bound(step)
    value, source = given["self"], given["values"]
    tag = value.tag
    indices = {i: v for i, v in enumerate(given["indices"]) if v is not None}
    if tag is None or given["accumulate"]:
        raise Stop("assigns in a way that is not known")
    ((dim, index), *more) = indices.items()
    one = len(source.shape) == 0 or all(map(is_one, source.shape))
    if index.fake.dtype == torch.bool and not more and dim == 0 and one and source.tag is None:
        covered = tag[: len(index.shape)]
        letters = index.tag or covered.replace("c", "k")
        if [c == "r" for c in letters] != [c == "r" for c in covered]:
            raise Stop("meets rows with classes")
        mask, number = Arg(index, letters), Arg(source, "k" * len(source.shape))
        width = len(tag.replace("r", "")) - len(covered.replace("r", ""))

        def masked(env: Any) -> Any:
            chosen = env.full(mask)
            chosen = chosen.reshape(*chosen.shape, *[1] * width)
            new = env.of(number)
            return torch.where(chosen, new.reshape(()) if new.dim() else new, env.full(whole))

        whole = Arg(value, tag)
        return Rowwise((tag,), masked)
    if not more and tag[dim] != "r" and index.tag is None and len(index.shape) == 1 and one:
        arg, number, whole = Arg(index, "k"), Arg(source, "k" * len(source.shape)), Arg(value, tag)
        place = inner(tag, dim)

        def of_classes(env: Any) -> Any:
            new = env.of(number)
            where = [*[None] * place, env.of(arg)[0]]
            return step.op(env.full(whole), where, new.reshape(()) if new.dim() else new)

        return Rowwise((tag,), of_classes)
    return _labels_assigned(step, value, source, indices)


def _labels_assigned(step: Step, value: Value, source: Value, indices: dict[int, Value]) -> Rowwise:
    """``z[arange(N), labels] = value``."""
    tag = value.tag or ""
    rows = rows_of(tag)
    if list(indices) != list(range(len(tag))) or tag != "r" * len(rows) + "c":
        raise Stop("assigns in a way that is not known")
    *of_rows, labels = indices.values()
    if not all(is_range(v, value.shape[i], len(rows) - i) for i, v in enumerate(of_rows)):
        raise Stop("assigns to rows")
    if len(labels.shape) != len(rows) or not all(map(same, labels.shape, value.rows)):
        raise Stop("assigns in a way that is not known")
    scalar = len(source.shape) == 0 or (source.tag is None and all(map(is_one, source.shape)))
    if not scalar and not (
        len(source.shape) == len(rows) and all(map(same, source.shape, value.rows))
    ):
        raise Stop("assigns in a way that is not known")
    whole, picks = Arg(value, tag), Arg(labels, "r" * len(rows))
    new = Arg(source, "k" * len(source.shape) if scalar else "r" * len(rows))

    def run(env: Any) -> Any:
        t, at, number = env.full(whole), env.full(picks), env.of(new)
        at = torch.where(at < 0, at + t.shape[1], at)[:, None]
        number = number.reshape(-1, 1) if number.dim() else number.reshape(1, 1)
        return t.scatter(1, at, number.expand(t.shape[0], 1))

    return Rowwise((tag,), run)
