"""Rules of calls along dimensions: reductions, softmaxes, sorts, gathers, joins, padding.

In: a call. Out: as in :mod:`fxpass.capture.rows`. The dimension has to be none of rows::

    logits.amax(-1)            "rrc"    "rr"
    logits.transpose(1, 2)     "rcr"    of which softmax(1) is along the classes
    logits.softmax(0)          stops: it works along rows
"""

from __future__ import annotations

from typing import Any

from fxpass.capture.rows import A, Rowwise, bound, call, dims_of, pointwise, rule
from fxpass.capture.values import (
    Arg,
    RowOp,
    Step,
    Stop,
    Value,
    inner,
    letter_of,
    same,
    values_in,
)

# Calls over several dimensions that may be taken one after the other.
SEPARABLE = {
    getattr(A, name)
    for name in ("sum", "mean", "amax", "amin", "max", "min", "any", "all", "nansum")
} | {A.linalg_vector_norm, A.count_nonzero}


def reduces_rows(step: Step) -> list[int] | None:
    """For a call that reduces classes and rows: the dimensions that are no rows; else None."""
    if step.op.overloadpacket not in SEPARABLE or len(step.values) != 1:
        return None
    tag: str = step.args[0].tag
    dims = dims_of(bound(step).get("dim"), len(tag))
    inside = [d for d in dims if tag[d] != "r"]
    if len(inside) == len(dims):
        return None
    return inside if any(tag[d] == "c" for d in inside) else None


@rule("sum", "mean", "amax", "amin", "max", "min", "any", "all", "prod", "nansum", "argmax")
@rule("argmin", "logsumexp", "std", "var", "var_mean", "std_mean", "linalg_vector_norm", "norm")
@rule("count_nonzero", "median", "nanmedian", "kthvalue", "mode", "aminmax")
def reduction(step: Step, classes: int) -> Rowwise:
    """A call that reduces dimensions, or one, of one tensor."""
    if len(step.values) > 1:  # max(a, b)
        return pointwise(step, classes)
    given, value = bound(step), step.args[0]
    tag = value.tag
    if "dim" not in given:  # max() or median() of everything
        raise Stop("reduces rows")
    dims = dims_of(given["dim"], len(tag))
    if any(tag[d] == "r" for d in dims):
        raise Stop("reduces rows")
    keep = bool(given.get("keepdim"))
    new = "".join(
        ("k" if d in dims else letter) if keep or d not in dims else ""
        for d, letter in enumerate(tag)
    )
    single = isinstance(given["dim"], int)
    places: Any = [inner(tag, d) for d in dims]
    given |= {"dim": places[0] if single else places}
    arg = Arg(value, tag)

    def run(env: Any) -> Any:
        return call(step.op, {**given, "self": env.of(arg)} | _self_name(step, env.of(arg)))

    return Rowwise((new,) * len(step.results), run)


def _self_name(step: Step, tensor: Any) -> dict[str, Any]:
    first = step.op._schema.arguments[0].name
    return {first: tensor}


@rule("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp")
@rule("cummax", "cummin", "sort", "topk", "flip", "roll", "glu")
def along(step: Step, classes: int) -> Rowwise:
    """A call along dimensions of one tensor, which it keeps."""
    given, value = bound(step), step.args[0]
    tag, name = value.tag, "dims" if "dims" in given else "dim"
    if tag is None or len(step.values) > 1:
        raise Stop("has no rule for these arguments")
    if given[name] is None or given[name] == []:
        raise Stop("works on all elements in a row")
    listed = list(given[name]) if isinstance(given[name], list | tuple) else [given[name]]
    dims = [d % len(tag) for d in listed]
    rows = [d for d in dims if tag[d] == "r"]
    if rows and name == "dims" and len(rows) == len(dims):
        order = [i for i, letter in enumerate(tag) if letter == "r"]
        places = tuple(order.index(d) for d in dims)
        args = (places,) if "shifts" not in given else (tuple(given["shifts"]), places)
        op = RowOp(step.op.overloadpacket.__name__, args, len(order), len(order))
        return Rowwise((tag,), lambda env: env.of(Arg(value, tag, op)))
    if rows:
        raise Stop("works along rows")
    moved: Any = [inner(tag, d) for d in dims]
    given |= {name: moved if isinstance(given[name], list | tuple) else moved[0]}
    tags = []
    for result in step.results:
        sizes = zip(tag, result.shape, strict=True)
        tags.append("".join(c if c == "r" else letter_of(s, classes) for c, s in sizes))
    arg = Arg(value, tag)
    return Rowwise(tuple(tags), lambda env: call(step.op, given | _self_name(step, env.of(arg))))


@rule("gather", "scatter", "scatter_add", "scatter_reduce")
def gathers(step: Step, classes: int) -> Rowwise:
    """A call along one dimension of tensors with the same rows."""
    given, out = bound(step), step.results[0]
    value = given["self"]
    rank, dim = len(value.shape), given["dim"] % max(len(value.shape), 1)
    tag = _common(step.values, rank)
    if tag[dim] == "r":
        raise Stop("works along rows")
    for v in step.values:
        for i, letter in enumerate(tag):
            if letter == "r" and not same(v.shape[i], value.shape[i]):
                raise Stop("has an index of other rows")
    args = {id(v): Arg(v, tag) for v in step.values}
    new = "".join(
        c if c == "r" else letter_of(s, classes) for c, s in zip(tag, out.shape, strict=True)
    )

    def run(env: Any) -> Any:
        found = {k: env.full(args[id(v)]) if isinstance(v, Value) else v for k, v in given.items()}
        return call(step.op, found | {"dim": inner(tag, dim)})

    return Rowwise((new,), run)


def _common(values: list[Value], rank: int) -> str:
    """The tag of tensors of one rank, of which the dimensions correspond."""
    found = ["" for _ in range(rank)]
    for value in values:
        if len(value.shape) != rank:
            raise Stop("has arguments of other ranks")
        for i, letter in enumerate(value.tag or ""):
            if found[i] and (found[i] == "r") != (letter == "r"):
                raise Stop("meets rows with classes")
            found[i] = letter if letter != "k" else found[i] or letter
    return "".join(letter or "k" for letter in found)


@rule("index_select", "index_add", "index_fill", "index_copy")
def along_an_index(step: Step, classes: int) -> Rowwise:
    """A call along one dimension, of which a vector that all rows share names the entries."""
    given, out = bound(step), step.results[0]
    value, index, source = given["self"], given["index"], given.get("source")
    tag = _common([v for v in (value, source) if isinstance(v, Value)], len(value.shape))
    dim = given["dim"] % len(tag)
    if index.tag is not None or isinstance(given.get("value"), Value):
        raise Stop("has an index made of the logits")
    if tag[dim] == "r":
        if source is not None or "value" in given:
            raise Stop("assigns to rows")
        rows = [i for i, letter in enumerate(tag) if letter == "r"]
        place = rows.index(dim)
        op = RowOp("index", ((None,) * place + (index,),), len(rows), len(rows))
        return Rowwise((tag,), lambda env: env.of(Arg(value, tag, op)))
    if source is not None and not all(
        same(a, b) for a, b, t in zip(value.shape, source.shape, tag, strict=True) if t == "r"
    ):
        raise Stop("has a source of other rows")
    args = {id(v): Arg(v, tag) for v in (value, source) if isinstance(v, Value)}
    args[id(index)] = Arg(index, "k")
    new = "".join(
        c if c == "r" else letter_of(s, classes) for c, s in zip(tag, out.shape, strict=True)
    )

    def run(env: Any) -> Any:
        found = {k: env.full(args[id(v)]) if isinstance(v, Value) else v for k, v in given.items()}
        found["index"] = env.of(args[id(index)])[0]
        return call(step.op, found | {"dim": inner(tag, dim)})

    return Rowwise((new,), run)


@rule("cat", "stack")
def joins(step: Step, classes: int) -> Rowwise:
    """Tensors one after the other along a dimension that is no row."""
    given, out = bound(step), step.results[0]
    values, dim = list(values_in(given["tensors"])), given["dim"] % max(len(out.shape), 1)
    rank = len(values[0].shape)
    tag = _common(values, rank)
    new = tag[:dim] + "k" + tag[dim:] if step.op.overloadpacket is A.stack else tag
    if new[dim] == "r":
        raise Stop("joins rows of several tensors")
    first = next(v for v in values if v.tag is not None)
    for v in values:
        for i, letter in enumerate(tag):
            if letter == "r" and not same(v.shape[i], first.shape[i]):
                raise Stop("joins tensors of other rows")
    args = [Arg(v, tag) for v in values]
    place = inner(new, dim)
    sizes = zip(new, out.shape, strict=True)
    new = "".join(c if c == "r" or c == "c" else letter_of(s, classes) for c, s in sizes)
    return Rowwise((new,), lambda env: step.op([env.full(a) for a in args], place))


@rule("constant_pad_nd")
def pads(step: Step, classes: int) -> Rowwise:
    """Padding of dimensions that are no rows."""
    value, pad = step.args[0], list(step.args[1])
    tag = value.tag
    rank = len(tag)
    new = [0] * (2 * sum(letter != "r" for letter in tag))
    for i in range(0, len(pad), 2):
        dim = rank - 1 - i // 2
        if tag[dim] != "r":
            after = len(new) // 2 - inner(tag, dim)
            new[2 * after : 2 * after + 2] = pad[i : i + 2]
        elif pad[i] or pad[i + 1]:
            raise Stop("pads rows")
    arg, rest = Arg(value, tag), step.args[2:]
    return Rowwise((tag,), lambda env: step.op(env.of(arg), new, *rest))
