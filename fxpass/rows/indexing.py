"""Rules of indices: one class of each row, the same classes of all rows, and entries of tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from fxpass import messages
from fxpass.rows.aten_calls import A, P
from fxpass.rows.canonical import align, put_rows
from fxpass.rows.rules import Env, NodePlan, Ref, Rules, rule
from fxpass.rows.sizes import example, key, numel, packet, shape
from fxpass.rows.tags import Stop, Tag, canonical_dim, letter_of, relettered


@rule("index", "_unsafe_index", "index_put", "_unsafe_index_put", "embedding", "index_select")
def index(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """Entries at indices or masks, read or put."""
    base: Any = node.args[0]
    puts = packet(node) in (A.index_put, getattr(A, "_unsafe_index_put", None))
    given = _indices(node)
    tag = want if puts and want is not None else rules.tag_of(base)
    if any(example(i).dtype in (torch.bool, torch.uint8) for i in given.values()):
        if (plan := _rows_by_mask(rules, node, given, tag, puts)) is not None:
            return plan
        if not puts or tag is None:
            raise Stop(messages.MASK_OF_LOGITS)
        return _put_at_mask(rules, node, given, tag)
    if puts:
        return _put(rules, node, given, tag)
    if tag is None and want is not None:
        tag = _operand_tag(rules, node, given, want)
    if tag is None:
        return _table_entries(rules, node, given, want)
    if (plan := _shared_classes(rules, node, given, tag)) is not None:
        return plan
    return _class_of_each_row(rules, node, given, tag)


def _indices(node: Node) -> dict[int, Node]:
    """The indices by dimension."""
    given: Any = node.args[1]
    if packet(node) is A.embedding:
        return {0: given}
    if packet(node) is A.index_select:
        return {given % max(len(shape(node)), 1): node.args[2]}  # pyright: ignore
    return {i: x for i, x in enumerate(given) if x is not None}


def _operand_tag(rules: Rules, node: Node, given: dict[int, Node], want: Tag) -> Tag | None:
    """The tag of an operand whose rows are the result's, if another dimension is indexed."""
    base: Any = node.args[0]
    if len(given) != 1:
        return None
    ((dim, ids),) = given.items()
    rank = len(shape(ids))
    outside = want.letters[:dim] + want.letters[dim + rank :]
    if "r" in want.letters[dim : dim + rank] or "r" not in outside:
        return None
    letters = want.letters[:dim] + "k" + want.letters[dim + rank :]
    return want.with_letters(relettered(letters, shape(base), rules.classes))


def _table_entries(rules: Rules, node: Node, given: dict[int, Node], want: Tag | None) -> NodePlan:
    """Entries of an operand without rows, such as an embedding."""
    base: Any = node.args[0]
    if len(given) != 1:
        raise Stop(messages.INDEX_OF_OPERAND)
    ((dim, ids),) = given.items()
    of_ids = rules.tag_of(ids)
    rank = len(shape(ids))
    tag = want
    if tag is None:
        if of_ids is None:
            raise Stop(messages.NO_ROWS)
        letters = "".join(letter_of(s, rules.classes) for s in shape(base))
        tag = of_ids.with_letters(letters[:dim] + of_ids.letters + letters[dim + 1 :])
    if "r" in tag.letters[:dim] + tag.letters[dim + rank :]:
        raise Stop(messages.INDEX_OF_ROWS)
    ref = rules.ref(ids, tag.with_letters(tag.letters[dim : dim + rank]))
    table = Ref("shared", base, "k" * len(shape(base)))

    def run(env: Env) -> Tensor:
        entries = env.shared(table).movedim(dim, 0)[env.get(ref)]
        if not dim:
            return entries
        inner = env.get(ref).dim() - 1
        order = [1 + inner + j for j in range(dim)] + list(range(1, 1 + inner))
        return entries.permute(0, *order, *range(1 + inner + dim, entries.dim()))

    return NodePlan(tag, [ref, table], run)


def _shared_classes(rules: Rules, node: Node, given: dict[int, Node], tag: Tag) -> NodePlan | None:
    """Entries of one dimension that is not of rows, the same of all rows."""
    if len(given) != 1 or any(tag.letters[d] == "r" for d in given):
        return None
    ((dim, ids),) = given.items()
    if rules.tags_of(ids) is not None or len(shape(ids)) > 1:
        return None
    base: Any = node.args[0]
    letters = tag.letters[:dim] + "k" * len(shape(ids)) + tag.letters[dim + 1 :]
    result = tag.with_letters(relettered(letters, shape(node), rules.classes))
    ref = rules.ref(base, tag)
    at = canonical_dim(tag.letters, dim)
    of_ids = Ref("shared", ids, "k" * len(shape(ids)))

    def run(env: Env) -> Tensor:
        chosen = env.shared(of_ids)
        return A.index.Tensor(env.get(ref), [*[None] * at, chosen])

    return NodePlan(result, [ref, of_ids], run)


def _class_of_each_row(rules: Rules, node: Node, given: dict[int, Node], tag: Tag) -> NodePlan:
    """``z[arange(N), labels]``: one class of each row."""
    base: Any = node.args[0]
    labels, result = _picked(rules, given, tag, shape(base), shape(node))
    ref = rules.ref(base, tag)

    def run(env: Env) -> Tensor:
        tensor = env.get(ref)
        return tensor.gather(1, _from_start(env.full(labels), tensor)[:, None])[:, 0]

    return NodePlan(result, [ref, labels], run)


def _picked(
    rules: Rules, given: dict[int, Node], tag: Tag, sizes: Any, picked: Any
) -> tuple[Ref, Tag]:
    """The labels, and the tag of the entries ``[*rows]`` that the labels pick."""
    rank = len(sizes)
    whole = list(given) == list(range(rank)) and tag.letters[:-1] == "r" * (rank - 1)
    if not whole or tag.letters[-1] == "r" or len(picked) != rank - 1:
        raise Stop(messages.INDEX_OF_LOGITS)
    *ranges, labels = given.values()
    if not all(is_range(x, sizes[i], rank - 1 - i) for i, x in enumerate(ranges)):
        raise Stop(messages.INDEX_OF_LOGITS)
    result = tag.with_letters("r" * (rank - 1))
    return rules.broadcast_ref(labels, result, picked), result


def _from_start(labels: Tensor, tensor: Tensor) -> Tensor:
    """Labels from the start, for labels that may count from the end."""
    return torch.where(labels < 0, labels + tensor.shape[1], labels)


def is_range(index: Any, size: Any, rank: int) -> bool:
    """True if an index is ``arange(size)`` along the dimension ``rank`` from the end."""
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


# ---------------------------------------------------------------- entries that are put


def _put(rules: Rules, node: Node, given: dict[int, Node], tag: Tag | None) -> NodePlan:
    """Values at one class of each row, or at the same classes of all rows."""
    base: Any = node.args[0]
    source: Any = node.args[2]
    adds = bool(len(node.args) > 3 and node.args[3])
    sizes = shape(base)
    if tag is None:
        tag = rules.tag_of(source)
        if tag is None:
            raise Stop(messages.NO_ROWS)
        if list(given) == list(range(len(sizes))) and set(tag.letters) == {"r"}:
            tag = tag.with_letters(tag.letters + letter_of(sizes[-1], rules.classes))
        elif len(given) == 1 and len(shape(source)) == len(sizes):
            tag = tag.with_letters(relettered(tag.letters, sizes, rules.classes))
        else:
            raise Stop(messages.INDEX_OF_LOGITS)
    of_base = rules.ref(base, tag)
    if len(given) == 1 and all(tag.letters[d] != "r" for d in given):
        ((dim, ids),) = given.items()
        if rules.tags_of(ids) is not None or len(shape(ids)) > 1:
            raise Stop(messages.INDEX_OF_LOGITS)
        letters = tag.letters[:dim] + "k" * len(shape(ids)) + tag.letters[dim + 1 :]
        entries = [*sizes[:dim], *shape(ids), *sizes[dim + 1 :]]
        inner = tag.with_letters(relettered(letters, entries, rules.classes))
        values = rules.broadcast_ref(source, inner, entries)
        at = canonical_dim(tag.letters, dim)
        of_ids = Ref("shared", ids, "k" * len(shape(ids)))

        def run(env: Env) -> Tensor:
            chosen = env.shared(of_ids)
            put = align(env.get(values), values.letters, inner.letters)
            return A.index_put.default(env.full(of_base), [*[None] * at, chosen], put, adds)

        return NodePlan(tag, [of_base, of_ids, values], run)
    picked = torch.broadcast_shapes(*(shape(x) for x in given.values()))
    labels, result = _picked(rules, given, tag, sizes, picked)
    values = rules.broadcast_ref(source, result, picked)

    def run_picked(env: Env) -> Tensor:
        tensor = env.full(of_base)
        put = env.get(values).reshape(-1, 1).expand(tensor.shape[0], 1).to(tensor.dtype)
        at = _from_start(env.full(labels), tensor)[:, None]
        return tensor.scatter_add(1, at, put) if adds else tensor.scatter(1, at, put)

    return NodePlan(tag, [of_base, labels, values], run_picked)


def _rows_by_mask(
    rules: Rules, node: Node, given: dict[int, Node], tag: Tag | None, puts: bool
) -> NodePlan | None:
    """Rows that a mask chooses, a view; or a source that is put into these rows of a base."""
    base: Any = node.args[0]
    ((dim, mask), *more) = given.items()
    rank = len(shape(mask))
    source = node.args[2] if puts else None
    if more or rules.tags_of(mask) is not None:
        return None

    def chosen_tag(whole: Tag, sizes: Any) -> Tag:
        d = whole.rows.index(dim)
        after = whole.row_sizes(shape(base))
        after[d : d + rank] = [sizes[dim]]
        letters = whole.letters[:dim] + "r" + whole.letters[dim + rank :]
        return whole.with_letters(letters, whole.view.then("mask", (d, mask, rank), after))

    if tag is None and isinstance(source, Node):
        part = rules.tag_of(source)
        if part is None or part.letters[dim : dim + 1] != "r" or part.view.last.kind != "mask":
            return None
        letters = part.letters[:dim] + "r" * rank + part.letters[dim + 1 :]
        tag = part.with_letters(letters, part.view.before)
        if len(tag.view.shape) != len(tag.rows) or chosen_tag(tag, shape(source)) != part:
            return None
    if tag is None or set(tag.letters[dim : dim + rank]) != {"r"}:
        return None
    if not isinstance(source, Node):
        ref = rules.ref(base, tag)
        return NodePlan(chosen_tag(tag, shape(node)), [ref], lambda env: env.get(ref))
    if len(shape(source)) != len(shape(base)) - rank + 1:
        return None
    part = chosen_tag(tag, shape(source))
    of_base = rules.ref(base, tag)
    of_source = rules.ref(source, part)
    views = (part.view,)
    run = lambda env: put_rows(env, part.view, of_base, of_source)  # noqa: E731
    return NodePlan(tag, [of_base, of_source], run, views)


def _put_at_mask(rules: Rules, node: Node, given: dict[int, Node], tag: Tag) -> NodePlan:
    """One number where a mask is True."""
    base: Any = node.args[0]
    source: Any = node.args[2]
    ((dim, mask), *more) = given.items()
    if more or numel(shape(source)) != 1 or (len(node.args) > 3 and node.args[3]):
        raise Stop(messages.MASK_OF_LOGITS)
    covered = tag.letters[dim : dim + len(shape(mask))]
    of_base = rules.ref(base, tag)
    number = Ref("shared", source, "k" * len(shape(source)))
    if not dim:
        mask_tag = tag.with_letters(covered)
        ref = rules.broadcast_ref(mask, mask_tag, shape(mask)) if "r" in covered else None
        of_mask = ref or Ref("shared", mask, covered)
    elif "r" not in covered and len(covered) == 1 and rules.tags_of(mask) is None:
        of_mask = Ref("shared", mask, covered)
    else:
        raise Stop(messages.MASK_OF_LOGITS)
    at = canonical_dim(tag.letters, dim) if "r" not in covered else 0

    def run(env: Env) -> Tensor:
        tensor = env.full(of_base)
        chosen = env.get(of_mask)
        if at:
            chosen = chosen[0].reshape(-1, *[1] * (tensor.dim() - at - 1))
        else:
            chosen = chosen.reshape(*chosen.shape, *[1] * (tensor.dim() - chosen.dim()))
        return torch.where(chosen, env.get(number).reshape(()), tensor)

    return NodePlan(tag, [of_base, of_mask, number], run)
