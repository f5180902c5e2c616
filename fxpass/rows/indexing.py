"""Rules of indices: classes of each row, classes for all rows, and tables by rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from fxpass.rows.rules import A, Env, NodePlan, P, Ref, Rules, fit, put, rule
from fxpass.rows.sizes import key, numel, packet, shape, value
from fxpass.rows.tags import Stop, Tag, letter_of, place, relettered

UNKNOWN = "indexes in a way that is not known"


@rule("index", "_unsafe_index", "index_put", "_unsafe_index_put", "embedding", "index_select")
def index(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """Entries by tensors of numbers, and entries that are written so."""
    base: Any = node.args[0]
    puts = packet(node) in (A.index_put, getattr(A, "_unsafe_index_put", None))
    given = _indices(node)
    tag = want if puts and want is not None else rules.tag_of(base)
    if any(value(i).dtype in (torch.bool, torch.uint8) for i in given.values()):
        if (found := _rows_by_mask(rules, node, given, tag, puts)) is not None:
            return found
        if not puts or tag is None:
            raise Stop("is indexed by a mask in a way that is not known")
        return _masked(rules, node, given, tag)
    if puts:
        return _put(rules, node, given, tag)
    if tag is None and want is not None:
        tag = _of_operand(rules, node, given, want)
    if tag is None:
        return _of_table(rules, node, given, want)
    if (found := _of_classes(rules, node, given, tag)) is not None:
        return found
    return _of_rows(rules, node, given, tag)


def _indices(node: Node) -> dict[int, Node]:
    """The indices by dimension."""
    base = packet(node)
    found = node.args[1]
    if base is A.embedding:
        return {0: found}  # pyright: ignore[reportReturnType]
    if base is A.index_select:
        return {found % max(len(shape(node)), 1): node.args[2]}  # pyright: ignore
    return {i: x for i, x in enumerate(found) if x is not None}  # pyright: ignore


def _of_operand(rules: Rules, node: Node, given: dict[int, Node], want: Tag) -> Tag | None:
    """The tag of an operand with rows, of which entries of another dimension are read."""
    base: Any = node.args[0]
    if len(given) != 1:
        return None
    ((dim, ids),) = given.items()
    rank = len(shape(ids))
    outside = want.letters[:dim] + want.letters[dim + rank :]
    if "r" in want.letters[dim : dim + rank] or "r" not in outside:
        return None
    letters = want.letters[:dim] + "k" + want.letters[dim + rank :]
    return want.like(relettered(letters, shape(base), rules.classes))


def _of_table(rules: Rules, node: Node, given: dict[int, Node], want: Tag | None) -> NodePlan:
    """Entries of an operand without rows, such as of an embedding."""
    base: Any = node.args[0]
    if len(given) != 1:
        raise Stop("indexes an operand in a way that is not known")
    ((dim, ids),) = given.items()
    of_ids = rules.tag_of(ids)
    rank = len(shape(ids))
    tag = want
    if tag is None:
        if of_ids is None:
            raise Stop("has no operand with rows")
        letters = "".join(letter_of(s, rules.classes) for s in shape(base))
        tag = of_ids.like(letters[:dim] + of_ids.letters + letters[dim + 1 :])
    if "r" in tag.letters[:dim] + tag.letters[dim + rank :]:
        raise Stop("indexes rows of an operand")
    ref = rules.ref(ids, tag.like(tag.letters[dim : dim + rank]))
    table = Ref("shared", base, "k" * len(shape(base)))

    def run(env: Env) -> Tensor:
        found = env.shared(table).movedim(dim, 0)[env.get(ref)]
        if not dim:
            return found
        inner = env.get(ref).dim() - 1
        order = [1 + inner + j for j in range(dim)] + list(range(1, 1 + inner))
        return found.permute(0, *order, *range(1 + inner + dim, found.dim()))

    return NodePlan(tag, [ref, table], run)


def _of_classes(rules: Rules, node: Node, given: dict[int, Node], tag: Tag) -> NodePlan | None:
    """Entries of one dimension that is not of rows, the same for all rows."""
    if len(given) != 1 or any(tag.letters[d] == "r" for d in given):
        return None
    ((dim, ids),) = given.items()
    if rules.tag(ids) is not None or len(shape(ids)) > 1:
        return None
    base: Any = node.args[0]
    letters = tag.letters[:dim] + "k" * len(shape(ids)) + tag.letters[dim + 1 :]
    result = tag.like(relettered(letters, shape(node), rules.classes))
    ref = rules.ref(base, tag)
    at = place(tag.letters, dim)
    of_ids = Ref("shared", ids, "k" * len(shape(ids)))

    def run(env: Env) -> Tensor:
        chosen = env.shared(of_ids)
        return A.index.Tensor(env.get(ref), [*[None] * at, chosen])

    return NodePlan(result, [ref, of_ids], run)


def _of_rows(rules: Rules, node: Node, given: dict[int, Node], tag: Tag) -> NodePlan:
    """``z[arange(N), labels]``: one class of each row."""
    base: Any = node.args[0]
    labels, result = _picked(rules, given, tag, shape(base), shape(node))
    ref = rules.ref(base, tag)

    def run(env: Env) -> Tensor:
        tensor = env.get(ref)
        return tensor.gather(1, _wrapped(env.full(labels), tensor)[:, None])[:, 0]

    return NodePlan(result, [ref, labels], run)


def _picked(
    rules: Rules, given: dict[int, Node], tag: Tag, sizes: Any, picked: Any
) -> tuple[Ref, Tag]:
    """The labels, and the tag of what they pick."""
    rank = len(sizes)
    whole = list(given) == list(range(rank)) and tag.letters[:-1] == "r" * (rank - 1)
    if not whole or tag.letters[-1] == "r" or len(picked) != rank - 1:
        raise Stop(UNKNOWN)
    *of_rows, labels = given.values()
    if not all(is_range(x, sizes[i], rank - 1 - i) for i, x in enumerate(of_rows)):
        raise Stop(UNKNOWN)
    result = tag.like("r" * (rank - 1))
    return rules.spread(labels, result, picked), result


def _wrapped(labels: Tensor, tensor: Tensor) -> Tensor:
    """Labels that count from the end count from the start."""
    return torch.where(labels < 0, labels + tensor.shape[1], labels)


def is_range(index: Any, size: Any, rank: int) -> bool:
    """Whether an index is ``arange(size)`` along the dimension ``rank`` from the end."""
    sizes = shape(index)
    along = len(sizes) - rank
    if along < 0 or any(key(s) != 1 for i, s in enumerate(sizes) if i != along):
        return False
    same = (A.unsqueeze, A.view, A.alias, A.expand, A.clone, A._unsafe_view, A.lift_fresh_copy)
    while isinstance(index, Node) and packet(index) in same:
        index = index.args[0]
    if index.op == "get_attr":
        data = getattr(index.graph.owning_module, str(index.target))
        with _disable_current_modes():
            return isinstance(key(size), int) and data.flatten().tolist() == list(range(key(size)))
    if packet(index) is P.iota:
        given = index.kwargs
        return key(index.args[0]) == key(size) and (given["start"], given["step"]) == (0, 1)
    if packet(index) is A.arange:
        return len(index.args) == 1 and key(index.args[0]) == key(size)
    return False


# ---------------------------------------------------------------- writes


def _put(rules: Rules, node: Node, given: dict[int, Node], tag: Tag | None) -> NodePlan:
    """Values at classes of each row, or at classes that are the same for all rows."""
    base = node.args[0]
    source = node.args[2]
    assert isinstance(base, Node)
    assert isinstance(source, Node)
    adds = bool(len(node.args) > 3 and node.args[3])
    sizes = shape(base)
    if tag is None:
        tag = rules.tag_of(source)
        if tag is None:
            raise Stop("has no operand with rows")
        if list(given) == list(range(len(sizes))) and set(tag.letters) == {"r"}:
            tag = tag.like(tag.letters + letter_of(sizes[-1], rules.classes))
        elif len(given) == 1 and len(shape(source)) == len(sizes):
            tag = tag.like(relettered(tag.letters, sizes, rules.classes))
        else:
            raise Stop(UNKNOWN)
    of_base = rules.ref(base, tag)
    if len(given) == 1 and all(tag.letters[d] != "r" for d in given):
        ((dim, ids),) = given.items()
        if rules.tag(ids) is not None or len(shape(ids)) > 1:
            raise Stop(UNKNOWN)
        letters = tag.letters[:dim] + "k" * len(shape(ids)) + tag.letters[dim + 1 :]
        put = [*sizes[:dim], *shape(ids), *sizes[dim + 1 :]]
        inner = tag.like(relettered(letters, put, rules.classes))
        values = rules.spread(source, inner, put)
        at = place(tag.letters, dim)
        of_ids = Ref("shared", ids, "k" * len(shape(ids)))

        def run(env: Env) -> Tensor:
            chosen = env.shared(of_ids)
            found = fit(env.get(values), values.letters, inner.letters)
            return A.index_put.default(env.full(of_base), [*[None] * at, chosen], found, adds)

        return NodePlan(tag, [of_base, of_ids, values], run)
    picked = torch.broadcast_shapes(*(shape(x) for x in given.values()))
    labels, result = _picked(rules, given, tag, sizes, picked)
    values = rules.spread(source, result, picked)

    def run_picked(env: Env) -> Tensor:
        tensor = env.full(of_base)
        found = env.get(values)
        at = _wrapped(env.full(labels), tensor)[:, None]
        found = found.reshape(-1, 1).expand(tensor.shape[0], 1).to(tensor.dtype)
        return tensor.scatter_add(1, at, found) if adds else tensor.scatter(1, at, found)

    return NodePlan(tag, [of_base, labels, values], run_picked)


def _rows_by_mask(
    rules: Rules, node: Node, given: dict[int, Node], tag: Tag | None, puts: bool
) -> NodePlan | None:
    """Rows that a mask chooses are a view; their gradient is put into other rows."""
    base = node.args[0]
    ((dim, mask), *more) = given.items()
    assert isinstance(base, Node)
    rank = len(shape(mask))
    source = node.args[2] if puts else None
    if more or rules.tag(mask) is not None:
        return None

    def chosen(whole: Tag, sizes: Any) -> Tag:
        d = whole.rows.index(dim)
        after = whole.row_sizes(shape(base))
        after[d : d + rank] = [sizes[dim]]
        letters = whole.letters[:dim] + "r" + whole.letters[dim + rank :]
        return whole.like(letters, whole.view.then("mask", (d, mask, rank), after))

    if tag is None and isinstance(source, Node):
        part = rules.tag_of(source)
        if part is None or part.letters[dim : dim + 1] != "r" or part.view.last[0] != "mask":
            return None
        letters = part.letters[:dim] + "r" * rank + part.letters[dim + 1 :]
        tag = part.like(letters, part.view.before)
        if len(tag.view.shape) != len(tag.rows) or chosen(tag, shape(source)) != part:
            return None
    if tag is None or set(tag.letters[dim : dim + rank]) != {"r"}:
        return None
    if not isinstance(source, Node):
        ref = rules.ref(base, tag)
        return NodePlan(chosen(tag, shape(node)), [ref], lambda env: env.get(ref))
    if len(shape(source)) != len(shape(base)) - rank + 1:
        return None
    part = chosen(tag, shape(source))
    of_base = rules.ref(base, tag)
    of_source = rules.ref(source, part)
    views = (part.view,)
    run = lambda env: put(env, part.view, of_base, of_source)  # noqa: E731
    return NodePlan(tag, [of_base, of_source], run, views)


def _masked(rules: Rules, node: Node, given: dict[int, Node], tag: Tag) -> NodePlan:
    """One number where a mask says."""
    base = node.args[0]
    source = node.args[2]
    assert isinstance(base, Node)
    assert isinstance(source, Node)
    ((dim, mask), *more) = given.items()
    if more or numel(shape(source)) != 1 or (len(node.args) > 3 and node.args[3]):
        raise Stop("is indexed by a mask in a way that is not known")
    covered = tag.letters[dim : dim + len(shape(mask))]
    of_base = rules.ref(base, tag)
    number = Ref("shared", source, "k" * len(shape(source)))
    if not dim:
        letters = tag.like(covered)
        ref = rules.spread(mask, letters, shape(mask)) if "r" in covered else None
        of_mask = ref or Ref("shared", mask, covered)
    elif "r" not in covered and len(covered) == 1 and rules.tag(mask) is None:
        of_mask = Ref("shared", mask, covered)
    else:
        raise Stop("is indexed by a mask in a way that is not known")
    at = place(tag.letters, dim) if "r" not in covered else 0

    def run(env: Env) -> Tensor:
        tensor = env.full(of_base)
        chosen = env.get(of_mask)
        if at:
            chosen = chosen[0].reshape(-1, *[1] * (tensor.dim() - at - 1))
        else:
            chosen = chosen.reshape(*chosen.shape, *[1] * (tensor.dim() - chosen.dim()))
        return torch.where(chosen, env.get(number).reshape(()), tensor)

    return NodePlan(tag, [of_base, of_mask, number], run)
