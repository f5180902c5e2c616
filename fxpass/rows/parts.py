"""Rules of parts of one dimension: of rows they are views, and what puts them back chooses rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from fxpass.rows.rules import A, Env, NodePlan, Rules, bound, called, put, rule
from fxpass.rows.sizes import is_one, is_tensor, key, packet, same, shape, value
from fxpass.rows.tags import Stop, Tag, place, relettered
from fxpass.rows.views import tagged


class _Part:
    """The part of one dimension that a slice or a select takes, or that a scatter puts back."""

    def __init__(self, node: Node) -> None:
        self.given = bound(node)
        self.scatters = packet(node) in (A.slice_scatter, A.select_scatter)
        self.selects = packet(node) in (A.select, A.select_scatter)
        self.base: Node = self.given["self"]
        self.sizes = shape(self.base)
        self.part: Node = self.given["src"] if self.scatters else node
        self.dim = self.given["dim"] % len(self.sizes)

    def sized(self, env: Env) -> dict[str, Any]:
        """The arguments, with the values of sizes."""
        return {
            name: env.size(value(arg)) if isinstance(arg, Node) and not is_tensor(arg) else arg
            for name, arg in self.given.items()
        }

    def without(self, letters: str) -> str:
        """The letters of the part."""
        return letters[: self.dim] + letters[self.dim + 1 :] if self.selects else letters

    def of(self, tag: Tag) -> Tag:
        """The tag of the part, of rows of the tensor."""
        d = tag.rows.index(self.dim)
        after = tag.row_sizes(self.sizes)
        letters = self.without(tag.letters)
        if self.selects:
            after.pop(d)
            index = self._from_start(self.given["index"])
            return tag.like(letters, tag.view.then("select", (d, index), after))
        size = shape(self.part)[self.dim]
        start = self.given["start"] or 0
        step = self.given["step"]
        if not isinstance(start, int) or not isinstance(step, int):
            raise Stop("starts where a number says")
        if start == 0 and step == 1 and same(size, self.sizes[self.dim]):
            return tag.like(letters)
        start, after[d] = self._from_start(start), size
        stop = start + key(size) * step
        return tag.like(letters, tag.view.then("slice", (d, start, stop, step), after))

    def _from_start(self, place: Any) -> Any:
        """A place that counts from the end counts from the start, whatever the size is."""
        if not isinstance(place, int):
            raise Stop("is a place that a number says")
        return place + key(self.sizes[self.dim]) if place < 0 else place

    def whole(self, tag: Tag) -> Tag | None:
        """The tag of the tensor, if the view of the part's rows ends with this part."""
        letters = tag.letters
        if self.selects:
            letters = letters[: self.dim] + "r" + letters[self.dim :]
        elif letters[self.dim] != "r":
            return None
        found = tag.like(letters, tag.view.before)
        kind = "select" if self.selects else "slice"
        if tag.view.last[0] != kind or len(found.view.shape) != len(found.rows):
            return None
        return found if self.of(found).view == tag.view else None


@rule("slice", "select")
def part(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """A part of one dimension."""
    this = _Part(node)
    if want is None:
        tag = tagged(rules, this.base)
        if tag.letters[this.dim] == "r":
            result = this.of(tag)
        else:
            letters = this.without(tag.letters)
            result = tag.like(relettered(letters, shape(node), rules.classes))
    else:
        result = want
        tag = _pulled_part(rules, this, want)
    ref = rules.ref(this.base, tag)
    if tag.letters[this.dim] == "r":
        return NodePlan(result, [ref], lambda env: env.get(ref))
    at = place(tag.letters, this.dim)

    def run(env: Env) -> Tensor:
        return called(node, this.sized(env) | {"self": env.get(ref), "dim": at})

    return NodePlan(result, [ref], run)


def _pulled_part(rules: Rules, this: _Part, want: Tag) -> Tag:
    """The tag of a tensor, for the tag that is wanted of its part."""
    if (found := this.whole(want)) is not None:
        return found
    if not this.selects and want.letters[this.dim] == "r":
        if not same(shape(this.part)[this.dim], this.sizes[this.dim]):
            raise Stop("is a part of other rows")
        return want
    letters = want.letters
    if this.selects:
        letters = letters[: this.dim] + "k" + letters[this.dim :]
    return want.like(relettered(letters, this.sizes, rules.classes))


@rule("slice_scatter", "select_scatter")
def part_put_back(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """A part at its place: of rows, what is in the view, and the base elsewhere."""
    this = _Part(node)
    tag = want or _scattered(rules, this)
    base = rules.ref(this.base, tag)
    if tag.letters[this.dim] == "r":
        inner = this.of(tag)
        source = rules.ref(this.part, inner)
        views = (inner.view,)
        return NodePlan(tag, [base, source], lambda env: put(env, inner.view, base, source), views)
    letters = relettered(this.without(tag.letters), shape(this.part), rules.classes)
    source = rules.ref(this.part, tag.like(letters))
    at = place(tag.letters, this.dim)

    def run(env: Env) -> Tensor:
        tensors = {"self": env.full(base), "src": env.full(source)}
        return called(node, this.sized(env) | tensors | {"dim": at})

    return NodePlan(tag, [base, source], run)


def _scattered(rules: Rules, this: _Part) -> Tag:
    """The tag of a tensor into which a part is put."""
    if (found := rules.tag_of(this.base)) is not None:
        return found
    tag = tagged(rules, this.part)
    dim = this.dim
    letters = tag.letters
    if not this.selects and letters[dim] != "r" and is_one(shape(this.part)[dim]):
        of_rows = tag.like(letters[:dim] + "r" + letters[dim + 1 :])
        view = tag.view.reshape(of_rows.row_sizes(shape(this.part)))
        if view.last[0] == "slice" and not is_one(this.sizes[dim]):
            tag = of_rows.like(of_rows.letters, view)
    if (found := this.whole(tag)) is not None:
        return found
    if not this.selects and tag.letters[dim] == "r":
        if same(shape(this.part)[dim], this.sizes[dim]):
            return tag
        raise Stop("puts rows at other rows")
    if this.selects:
        letters = letters[:dim] + "k" + letters[dim:]
    return tag.like(relettered(letters, this.sizes, rules.classes))


@rule("split", "split_with_sizes", "unbind")
def split(rules: Rules, node: Node, want: Any) -> NodePlan:
    """All parts of one dimension."""
    given = bound(node)
    results = value(node)
    base = given["self"]
    sizes = shape(given["self"])
    dim = given["dim"] % len(sizes)
    apart = packet(node) is A.unbind
    tag = rules.tag_of(base)
    if want is not None:
        result = next(t for t in want if t is not None)
        letters = result.letters
        if not apart and letters[dim] == "r":
            raise Stop("splits rows of what is read with them")
        letters = letters[:dim] + "k" + letters[dim:] if apart else letters
        tag = result.like(relettered(letters, sizes, rules.classes))
    if tag is None:
        raise Stop("has no operand with rows")
    ref = rules.ref(base, tag)
    cut = tag.letters[:dim] + tag.letters[dim + 1 :] if apart else tag.letters
    if tag.letters[dim] != "r":
        tags = [tag.like(relettered(cut, r.shape, rules.classes)) for r in results]
        at = place(tag.letters, dim)

        def run(env: Env) -> list[Tensor]:
            return list(called(node, given | {"self": env.get(ref), "dim": at}))

        return NodePlan(tags, [ref], run)
    found: list[Tag | None] = []
    start = 0
    d = tag.rows.index(dim)
    for result in results:
        after = tag.row_sizes(sizes)
        size = after.pop(d) if apart else result.shape[dim]
        if apart:
            view = tag.view.then("select", (d, len(found)), after)
        elif same(size, sizes[dim]):
            view = tag.view
        else:
            after[d] = size
            view = tag.view.then("slice", (d, start, start + key(size), 1), after)
            start += key(size)
        found.append(tag.like(cut, view))
    return NodePlan(found, [ref], lambda env: [env.get(ref)] * len(found))
