"""Rules of elementwise calls, and of calls that work along dimensions, such as reductions."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fxpass import messages
from fxpass.rows.aten_calls import A, P, call_arguments, call_with
from fxpass.rows.canonical import align
from fxpass.rows.column_spelling import respell
from fxpass.rows.columns import along_rows
from fxpass.rows.rules import Env, NodePlan, Ref, Rules, rule
from fxpass.rows.sizes import example, guard_equal, is_tensor_node, packet, shape
from fxpass.rows.tags import Stop, Tag, canonical_dim, inner_sizes, letter_of, relettered


@rule("where", "clone", "_to_copy", "alias", "detach", "masked_fill", "fill", "lift_fresh_copy")
@rule("convert_element_type", "fma", ns=P)
def elementwise(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """Each element by itself; also the rule of every call that torch tags as pointwise."""
    sizes = shape(node)
    args = [a for a in node.all_input_nodes if is_tensor_node(a)]
    tag = want or rules.joined_tag(args, sizes)
    refs = {a: rules.broadcast_ref(a, tag, sizes) for a in args}
    kwargs = {k: v for k, v in node.kwargs.items() if k != "memory_format"}
    # a number that varies is read as a tensor, which may need another overload
    varies = any(not is_tensor_node(a) for a in node.all_input_nodes)
    call: Any = packet(node) if varies else node.target

    def run(env: Env) -> Tensor:
        def operand(arg: Node) -> Any:
            if arg not in refs:
                return env.size(arg)
            return align(env.get(refs[arg]), refs[arg].letters, tag.letters)

        args, named = map_arg((node.args, kwargs), operand)
        return call(*args, **named)

    return NodePlan(tag, list(refs.values()), run)


@rule("copy")
def copy(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """``copy(self, src)``: ``src`` in the dtype and the sizes of ``self``."""
    sizes = shape(node)
    source = node.args[1]
    tag = want or rules.joined_tag([source], sizes)  # pyright: ignore[reportArgumentType]
    ref = rules.broadcast_ref(source, tag, sizes)  # pyright: ignore[reportArgumentType]
    dtype = example(node).dtype
    inner = inner_sizes(sizes, tag.letters)

    def run(env: Env) -> Tensor:
        tensor = align(env.get(ref), ref.letters, tag.letters).to(dtype)
        return tensor.expand(env.n, *map(env.size, inner))

    return NodePlan(tag, [ref], run)


@rule("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "prod")
@rule("var", "std", "var_mean", "std_mean", "logsumexp", "nansum", "count_nonzero", "aminmax")
@rule("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort", "topk")
@rule("kthvalue", "median", "nanmedian", "mode", "linalg_vector_norm", "norm")
@rule("softmax", "_softmax", "log_softmax", "_log_softmax")
@rule("_log_softmax_backward_data", "_softmax_backward_data")
@rule("gather", "scatter", "scatter_add", "scatter_reduce")
def along(rules: Rules, node: Node, want: Any) -> NodePlan:
    """Calls along dimensions that are not of rows, and reductions over all rows."""
    given = call_arguments(node)
    source = node.args[0]
    assert isinstance(source, Node)
    sizes = shape(source)
    rank = len(sizes)
    dims = _dims(given.get("dim"), rank)
    single = isinstance(given.get("dim"), int)
    made = example(node)
    results = list(made) if isinstance(made, list | tuple) else [made]
    keeps = results[0].dim() == rank
    tensors = [a for a in node.all_input_nodes if is_tensor_node(a)]
    alike = [a for a in tensors if len(shape(a)) == rank]
    if want is None:
        tag = rules.joined_tag(alike, sizes)
    elif packet(node) in (A.scatter, A.scatter_add):
        tag = want
    else:
        tag = _source_tag(want, dims, sizes, keeps, rules.classes)
    if rules.columns and len(dims) == 1 and respell(rules, node, tag, dims[0]):
        rules.plan_node(node, want)
        return rules.plans[node]
    if any(tag.letters[d] == "r" for d in dims):
        return along_rows(rules, node, tag, dims)
    for arg in alike:
        pairs = zip(tag.letters, shape(arg), sizes, strict=True)
        if any(letter == "r" and not guard_equal(a, b) for letter, a, b in pairs):
            raise Stop(messages.INDEX_OF_OTHER_ROWS)
    refs = {
        a: rules.ref(a, tag) if a in alike else Ref("shared", a, "k" * len(shape(a)))
        for a in tensors
    }
    places = [canonical_dim(tag.letters, d) for d in dims]

    def run(env: Env) -> Any:
        def argument(arg: Any) -> Any:
            if not isinstance(arg, Node):
                return arg
            if arg not in refs:
                return env.size(arg)
            return env.full(refs[arg]) if arg in alike else env.get(refs[arg])

        arguments = {name: argument(arg) for name, arg in given.items()}
        if "dim" in given:
            arguments["dim"] = places[0] if single else places
        elif node.target is A.sum.default:
            return A.sum.dim_IntList(arguments["self"], places, False, dtype=given.get("dtype"))
        elif rank:
            raise Stop(messages.REDUCES_ALL)
        return call_with(node, arguments)

    tags = [_result_tag(tag, dims, keeps, result, rules.classes) for result in results]
    return NodePlan(tags if len(results) > 1 else tags[0], list(refs.values()), run)


def _dims(dim: Any, rank: int) -> list[int]:
    """The dimensions that an argument names: None and an empty list name all."""
    listed: Any = [dim] if isinstance(dim, int) else dim or range(rank)
    return [d % max(rank, 1) for d in listed]


def _source_tag(want: Any, dims: list[int], sizes: Any, keeps: bool, classes: int) -> Tag:
    """The tag of the first argument, of these sizes, for a wanted tag of the result."""
    result = want if isinstance(want, Tag) else next(t for t in want if t is not None)
    given = iter(result.letters)
    letters = ""
    for i, size in enumerate(sizes):
        of_result = next(given) if keeps or i not in dims else ""
        if i in dims and of_result == "r":
            raise Stop(messages.ALONG_ROWS)
        letters += letter_of(size, classes) if i in dims else of_result
    return result.with_letters(letters)


def _result_tag(tag: Tag, dims: list[int], keeps: bool, result: Any, classes: int) -> Tag | None:
    """The tag of a result, for the tag of the first argument."""
    if not isinstance(result, Tensor):
        return None
    letters = "".join(letter for i, letter in enumerate(tag.letters) if keeps or i not in dims)
    return tag.with_letters(relettered(letters, result.shape, classes))


@rule("flip", "roll")
@rule("rev", ns=P)
def flip(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """Another order: of rows a view, of other dimensions computed."""
    source: Any = node.args[0]
    sizes = shape(source)
    given: Any = call_arguments(node)["dims"]
    dims = _dims(given, len(sizes))
    if want is not None:
        tag = _source_tag(want, dims, sizes, True, rules.classes)
    else:
        tag = rules.joined_tag([source], sizes)
    rolls = node.target is A.roll.default
    rows = tuple(sorted(tag.rows.index(d) for d in dims if tag.letters[d] == "r"))
    if not rows and given not in ([], ()):
        ref = rules.ref(source, tag)
        places = [canonical_dim(tag.letters, d) for d in dims]
        args = [node.args[1], places] if rolls else [places]
        return NodePlan(tag, [ref], lambda env: node.target(env.get(ref), *args))  # pyright: ignore
    if rolls or len(rows) < len(dims):
        raise Stop(messages.ROWS_MOVED)
    ref = rules.ref(source, tag)
    view = tag.view.then("flip", rows, tag.view.shape)
    return NodePlan(tag.with_letters(tag.letters, view), [ref], lambda env: env.get(ref))
