"""Rules of what computes each element by itself, and of reductions along classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fxpass.rows.rules import A, Env, NodePlan, P, Ref, Rules, beside, bound, called, fit, rule
from fxpass.rows.sizes import agree, is_tensor, packet, shape, value
from fxpass.rows.tags import Stop, Tag, letter_of, others, place


@rule("where", "clone", "_to_copy", "alias", "detach", "masked_fill", "fill", "lift_fresh_copy")
@rule("convert_element_type", "fma", ns=P)
def pointwise(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """Each element by itself; every call that torch tags as pointwise."""
    sizes = shape(node)
    args = [a for a in node.all_input_nodes if is_tensor(a)]
    tag = want or rules.joined(args, sizes)
    refs = {a: rules.spread(a, tag, sizes) for a in args}
    kwargs = {k: v for k, v in node.kwargs.items() if k != "memory_format"}
    varies = any(not is_tensor(a) for a in node.all_input_nodes)  # a number, read as a tensor
    call: Any = packet(node) if varies else node.target

    def run(env: Env) -> Tensor:
        def of(arg: Node) -> Any:
            if arg not in refs:
                return env.size(arg)
            return fit(env.get(refs[arg]), refs[arg].letters, tag.letters)

        given, named = map_arg((node.args, kwargs), of)
        return call(*given, **named)

    return NodePlan(tag, list(refs.values()), run)


@rule("copy")
def copy(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """``copy(self, src)``: src with the dtype and the sizes of self."""
    sizes = shape(node)
    source = node.args[1]
    tag = want or rules.joined([source], sizes)  # pyright: ignore[reportArgumentType]
    ref = rules.spread(source, tag, sizes)  # pyright: ignore[reportArgumentType]
    dtype = value(node).dtype
    inner = others(sizes, tag.letters)

    def run(env: Env) -> Tensor:
        found = fit(env.get(ref), ref.letters, tag.letters).to(dtype)
        return found.expand(env.n, *map(env.size, inner))

    return NodePlan(tag, [ref], run)


@rule("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "prod")
@rule("var", "std", "var_mean", "std_mean", "logsumexp", "nansum", "count_nonzero", "aminmax")
@rule("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort", "topk")
@rule("kthvalue", "median", "nanmedian", "mode", "linalg_vector_norm", "norm")
@rule("softmax", "_softmax", "log_softmax", "_log_softmax")
@rule("_log_softmax_backward_data", "_softmax_backward_data")
@rule("gather", "scatter", "scatter_add", "scatter_reduce", "flip", "roll")
@rule("rev", ns=P)
def along(rules: Rules, node: Node, want: Any) -> NodePlan:
    """Along dimensions that are not of rows; and sums over all rows, and flips of rows."""
    given = bound(node)
    source = node.args[0]
    assert isinstance(source, Node)
    sizes = shape(source)
    rank = len(shape(source))
    name = next((k for k in ("dim", "dims") if k in given), None)
    dim = given[name] if name else None
    every = dim is None or (isinstance(dim, list | tuple) and not dim)
    listed: Any = range(rank) if every else dim if isinstance(dim, list | tuple) else [dim]
    dims = [d % max(rank, 1) for d in listed]
    made = value(node)
    results = list(made) if isinstance(made, list | tuple) else [made]
    keeps = results[0].dim() == rank
    tensors = [a for a in node.all_input_nodes if is_tensor(a)]
    alike = [a for a in tensors if len(shape(a)) == rank]
    if want is not None:
        tag = _wanted(want, dims, sizes, keeps, rules.classes)
    else:
        tag = rules.joined([a for a in alike if rules.tag_of(a) is not None], sizes)
    if packet_flips(node):
        return _flipped(rules, node, want, tag, dims, every)
    rows = [d for d in dims if tag.letters[d] == "r"]
    if rows:
        return _over_rows(rules, node, tag, dims, rows)
    for arg in alike:
        pairs = zip(tag.letters, shape(arg), sizes, strict=True)
        if any(letter == "r" and not agree(a, b) for letter, a, b in pairs):
            raise Stop("has an index of other rows")
    refs = {
        a: rules.ref(a, tag) if a in alike else Ref("shared", a, "k" * len(shape(a)))
        for a in tensors
    }
    places = [place(tag.letters, d) for d in dims]

    def run(env: Env) -> Any:
        def of(arg: Any) -> Any:
            if not isinstance(arg, Node):
                return arg
            if arg not in refs:
                return env.size(arg)
            return env.full(refs[arg]) if arg in alike else env.get(refs[arg])

        found = {k: of(v) for k, v in given.items()}
        if name:
            found[name] = places if every or isinstance(dim, list | tuple) else places[0]
        elif node.target is A.sum.default:
            return A.sum.dim_IntList(found["self"], places, False, dtype=given.get("dtype"))
        elif every and rank:
            raise Stop("reduces all dimensions")
        return called(node, found)

    tags = [_reduced(tag, dims, keeps, o, rules.classes) for o in results]
    return NodePlan(tags if len(results) > 1 else tags[0], list(refs.values()), run)


def packet_flips(node: Node) -> bool:
    """Whether a node changes the order of entries."""
    return node.target in (A.flip.default, A.roll.default, P.rev.default)


def _wanted(want: Any, dims: list[int], sizes: Any, keeps: bool, classes: int) -> Tag:
    """The tag of the argument, for a wanted tag of the result."""
    result = want if isinstance(want, Tag) else next(t for t in want if t is not None)
    given = iter(result.letters)
    letters = ""
    for i, size in enumerate(sizes):
        of_result = next(given) if keeps or i not in dims else ""
        if i in dims and of_result == "r":
            raise Stop("works along rows")
        letters += letter_of(size, classes) if i in dims else of_result
    return result.like(letters)


def _reduced(tag: Tag, dims: list[int], keeps: bool, result: Any, classes: int) -> Tag | None:
    """The tag of a result."""
    if not isinstance(result, Tensor):
        return None
    left = [letter for i, letter in enumerate(tag.letters) if keeps or i not in dims]
    pairs = zip(left, result.shape, strict=True)
    return tag.like("".join(a if a == "r" else letter_of(size, classes) for a, size in pairs))


def _flipped(
    rules: Rules, node: Node, want: Any, tag: Tag, dims: list[int], every: bool
) -> NodePlan:
    """The other order: of rows a view, or of other dimensions."""
    source = node.args[0]
    of_rows = [d for d in dims if tag.letters[d] == "r"]
    if not of_rows and not every:
        ref = rules.ref(source, tag)  # pyright: ignore[reportArgumentType]
        places = [place(tag.letters, d) for d in dims]
        return NodePlan(tag, [ref], lambda env: node.target(env.get(ref), *_moved(node, places)))  # pyright: ignore
    if node.target is A.roll.default or len(of_rows) < len(dims):
        raise Stop("moves rows")
    rows = tuple(sorted(tag.rows.index(d) for d in of_rows))
    turned = tag.like(tag.letters, tag.view.then("flip", rows, tag.view.shape))
    ref = rules.ref(source, tag if want is None else turned)  # pyright: ignore[reportArgumentType]
    return NodePlan(turned if want is None else tag, [ref], lambda env: env.get(ref))


def _moved(node: Node, places: list[int]) -> tuple[Any, ...]:
    return (node.args[1], places) if node.target is A.roll.default else (places,)


def _over_rows(rules: Rules, node: Node, tag: Tag, dims: list[int], rows: list[int]) -> NodePlan:
    """A sum over all rows, which the loop over chunks adds up."""
    source = node.args[0]
    mean = node.target in (A.mean.default, A.mean.dim)
    sums = node.target in (A.sum.default, A.sum.dim_IntList)
    if not (mean or sums) or set(rows) != set(tag.rows):
        raise Stop("works along rows")
    if not rules.has_classes(source):
        raise Stop("sums rows of no classes")
    ref = rules.ref(source, tag)  # pyright: ignore[reportArgumentType]
    over = [0, *(place(tag.letters, d) for d in dims if d not in rows)]
    low = value(source).dtype in (torch.bfloat16, torch.float16)  # pyright: ignore
    dtype = torch.float32 if low else bound(node).get("dtype")

    def run(env: Env) -> Tensor:
        return A.sum.dim_IntList(masked(env, env.full(ref), tag), over, False, dtype=dtype)

    sizes = shape(source)  # pyright: ignore[reportArgumentType]
    return NodePlan(None, [ref], run, (tag.view,), tuple(sizes[d] for d in dims) if mean else ())


def masked(env: Env, tensor: Tensor, tag: Tag) -> Tensor:
    """A tensor whose rows that are not in the view are 0."""
    inside = env.inside(tag.view)
    if inside is None:
        return tensor
    return torch.where(beside(inside, tensor), tensor, tensor.new_zeros(()))
