"""Rules of parts of one dimension: a part of rows is a view, and a scatter of rows is a choice."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from fxpass import messages
from fxpass.rows.aten_calls import A, call_arguments, call_with
from fxpass.rows.canonical import put_rows
from fxpass.rows.rules import Env, NodePlan, Rules, rule
from fxpass.rows.sizes import example, is_one, is_tensor_node, key, packet, same_size, shape
from fxpass.rows.tags import Stop, Tag, canonical_dim, relettered
from fxpass.rows.views import tagged


class _Part:
    """A part of one dimension, which a slice or a select takes, or a scatter puts back."""

    def __init__(self, node: Node) -> None:
        self.arguments = call_arguments(node)
        self.selects = packet(node) in (A.select, A.select_scatter)
        self.base: Node = self.arguments["self"]
        self.sizes = shape(self.base)
        self.part: Node = self.arguments.get("src", node)  # of a scatter
        self.dim = self.arguments["dim"] % len(self.sizes)

    def arguments_in(self, env: Env) -> dict[str, Any]:
        """The arguments, with values for sizes that vary."""
        return {
            name: env.size(example(arg))
            if isinstance(arg, Node) and not is_tensor_node(arg)
            else arg
            for name, arg in self.arguments.items()
        }

    def part_letters(self, letters: str) -> str:
        """The letters of the part, for the letters of the tensor."""
        return letters[: self.dim] + letters[self.dim + 1 :] if self.selects else letters

    def tensor_letters(self, letters: str, letter: str) -> str:
        """The letters of the tensor, for the letters of the part, and for a selected dimension."""
        return letters[: self.dim] + letter + letters[self.dim :] if self.selects else letters

    def part_tag(self, tag: Tag) -> Tag:
        """The tag of a part of rows, for the tag of the tensor."""
        d = tag.rows.index(self.dim)
        after = tag.row_sizes(self.sizes)
        letters = self.part_letters(tag.letters)
        if self.selects:
            after.pop(d)
            index = self._from_start(self.arguments["index"])
            return tag.with_letters(letters, tag.view.then("select", (d, index), after))
        size = shape(self.part)[self.dim]
        start = self.arguments["start"] or 0
        step = self.arguments["step"]
        if not isinstance(start, int) or not isinstance(step, int):
            raise Stop(messages.PART_FROM_NUMBER)
        if start == 0 and step == 1 and same_size(size, self.sizes[self.dim]):
            return tag.with_letters(letters)
        start = self._from_start(start)
        after[d] = size
        stop = start + key(size) * step
        return tag.with_letters(letters, tag.view.then("slice", (d, start, stop, step), after))

    def _from_start(self, index: Any) -> Any:
        """An index from the start, for an index that may count from the end."""
        if not isinstance(index, int):
            raise Stop(messages.PLACE_FROM_NUMBER)
        return index + key(self.sizes[self.dim]) if index < 0 else index

    def tensor_tag(self, tag: Tag) -> Tag | None:
        """The tag of the tensor, if the view of the part's rows ends with this part."""
        letters = self.tensor_letters(tag.letters, "r")
        if letters[self.dim] != "r":
            return None
        found = tag.with_letters(letters, tag.view.before)
        kind = "select" if self.selects else "slice"
        if tag.view.last.kind != kind or len(found.view.shape) != len(found.rows):
            return None
        return found if self.part_tag(found).view == tag.view else None


@rule("slice", "select")
def one_part(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """A part of one dimension."""
    this = _Part(node)
    if want is None:
        tag = tagged(rules, this.base)
        if tag.letters[this.dim] == "r":
            result = this.part_tag(tag)
        else:
            letters = this.part_letters(tag.letters)
            result = tag.with_letters(relettered(letters, shape(node), rules.classes))
    else:
        result = want
        tag = _pulled_tag(rules, this, want)
    ref = rules.ref(this.base, tag)
    if tag.letters[this.dim] == "r":
        return NodePlan(result, [ref], lambda env: env.get(ref))
    at = canonical_dim(tag.letters, this.dim)

    def run(env: Env) -> Tensor:
        return call_with(node, this.arguments_in(env) | {"self": env.get(ref), "dim": at})

    return NodePlan(result, [ref], run)


def _pulled_tag(rules: Rules, this: _Part, want: Tag) -> Tag:
    """The tag of a tensor, for the tag that is wanted of its part."""
    if (tag := this.tensor_tag(want)) is not None:
        return tag
    if not this.selects and want.letters[this.dim] == "r":
        if not same_size(shape(this.part)[this.dim], this.sizes[this.dim]):
            raise Stop(messages.PART_OF_OTHERS)
        return want
    letters = this.tensor_letters(want.letters, "k")
    return want.with_letters(relettered(letters, this.sizes, rules.classes))


@rule("slice_scatter", "select_scatter")
def part_put_back(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """A part put back: in rows of the part's view, the part; in others, the base."""
    this = _Part(node)
    tag = want or _scattered(rules, this)
    base = rules.ref(this.base, tag)
    if tag.letters[this.dim] == "r":
        inner = this.part_tag(tag)
        source = rules.ref(this.part, inner)
        views = (inner.view,)
        return NodePlan(
            tag, [base, source], lambda env: put_rows(env, inner.view, base, source), views
        )
    letters = relettered(this.part_letters(tag.letters), shape(this.part), rules.classes)
    source = rules.ref(this.part, tag.with_letters(letters))
    at = canonical_dim(tag.letters, this.dim)

    def run(env: Env) -> Tensor:
        tensors = {"self": env.full(base), "src": env.full(source)}
        return call_with(node, this.arguments_in(env) | tensors | {"dim": at})

    return NodePlan(tag, [base, source], run)


def _scattered(rules: Rules, this: _Part) -> Tag:
    """The tag of a tensor with a part put back."""
    if (of_base := rules.tag_of(this.base)) is not None:
        return of_base
    tag = tagged(rules, this.part)
    dim = this.dim
    letters = tag.letters
    if not this.selects and letters[dim] != "r" and is_one(shape(this.part)[dim]):
        of_rows = tag.with_letters(letters[:dim] + "r" + letters[dim + 1 :])
        view = tag.view.reshape(of_rows.row_sizes(shape(this.part)))
        if view.last.kind == "slice" and not is_one(this.sizes[dim]):
            tag = of_rows.with_letters(of_rows.letters, view)
    if (whole := this.tensor_tag(tag)) is not None:
        return whole
    if not this.selects and tag.letters[dim] == "r":
        if same_size(shape(this.part)[dim], this.sizes[dim]):
            return tag
        raise Stop(messages.PART_MOVED)
    letters = this.tensor_letters(letters, "k")
    return tag.with_letters(relettered(letters, this.sizes, rules.classes))


@rule("split", "split_with_sizes", "unbind")
def all_parts(rules: Rules, node: Node, want: Any) -> NodePlan:
    """All parts of one dimension."""
    given = call_arguments(node)
    results = example(node)
    base = given["self"]
    sizes = shape(base)
    dim = given["dim"] % len(sizes)
    unbinds = packet(node) is A.unbind
    tag = rules.tag_of(base)
    if want is not None:
        result = next(t for t in want if t is not None)
        letters = result.letters
        if not unbinds and letters[dim] == "r":
            raise Stop(messages.PART_SPLIT)
        letters = letters[:dim] + "k" + letters[dim:] if unbinds else letters
        tag = result.with_letters(relettered(letters, sizes, rules.classes))
    if tag is None:
        raise Stop(messages.NO_ROWS)
    ref = rules.ref(base, tag)
    letters = tag.letters[:dim] + tag.letters[dim + 1 :] if unbinds else tag.letters
    if tag.letters[dim] != "r":
        tags = [tag.with_letters(relettered(letters, r.shape, rules.classes)) for r in results]
        at = canonical_dim(tag.letters, dim)

        def run(env: Env) -> list[Tensor]:
            return list(call_with(node, given | {"self": env.get(ref), "dim": at}))

        return NodePlan(tags, [ref], run)
    parts: list[Tag | None] = []
    start = 0
    d = tag.rows.index(dim)
    for result in results:
        after = tag.row_sizes(sizes)
        size = after.pop(d) if unbinds else result.shape[dim]
        if unbinds:
            view = tag.view.then("select", (d, len(parts)), after)
        elif same_size(size, sizes[dim]):
            view = tag.view
        else:
            after[d] = size
            view = tag.view.then("slice", (d, start, start + key(size), 1), after)
            start += key(size)
        parts.append(tag.with_letters(letters, view))
    return NodePlan(parts, [ref], lambda env: [env.get(ref)] * len(parts))
