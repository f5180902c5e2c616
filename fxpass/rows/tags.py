"""The meaning of the dimensions of a tensor: rows of a head, classes, or others.

A tag has a letter for each dimension (``r`` rows, ``c`` classes, ``k`` another) and the view of
rows that leads from the head's rows ``[N]`` to those of the tensor: reshapes, permutations, slices.
Of shifted logits ``z.view(B, T, V)[:, :-1]``::

    >>> whole = Tag("rc", View(6))
    >>> rows = whole.view.reshape((2, 3))
    >>> shifted = Tag("rrc", rows.then("slice", (1, 0, 2, 1), (2, 2)))
    >>> shifted.rows, shifted.view.shape
    ((0, 1), (2, 2))

Whatever the view, a tagged tensor is computed in the canonical layout ``[n, others...]``, for rows
of the head: there, a view of rows computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch.fx import Node

from fxpass.rows.sizes import hint, key, keys, numel

# A dimension has classes if it is at least this part of them: chunks of them, or a few more.
PART = 16
UNORDERED = ("reshape", "permute", "flip")  # these keep all rows


class Stop(Exception):  # noqa: N818
    """Why a node ends a region; ``str`` of it says what the node does.

    Attributes:
        node: the node; None until it is known.
    """

    node: Node | None = None


@dataclass(frozen=True)
class View:
    """The rows of a tensor among the rows of a head.

    Attributes:
        root: the number of the head's rows.
        steps: (kind, arguments, sizes of the rows after it).
    """

    root: Any
    steps: tuple[tuple[str, tuple[Any, ...], tuple[Any, ...]], ...] = ()

    @property
    def shape(self) -> tuple[Any, ...]:
        """The sizes of the rows."""
        return self.steps[-1][2] if self.steps else (self.root,)

    @property
    def before(self) -> View:
        """Without the last step."""
        return View(self.root, self.steps[:-1])

    @property
    def last(self) -> tuple[str, Any, Any]:
        """The last step."""
        return self.steps[-1] if self.steps else ("", (), ())

    @property
    def is_whole(self) -> bool:
        """Whether it has all rows."""
        return all(kind in UNORDERED for kind, _, _ in self.steps)

    @property
    def in_order(self) -> bool:
        """Whether it has all rows in the head's order."""
        return all(kind == "reshape" for kind, _, _ in self.steps)

    def then(self, kind: str, args: tuple[Any, ...], after: Sequence[Any]) -> View:
        """One step more; steps that undo each other are none."""
        made = keys(after)
        if kind == "reshape":
            return self.reshape(made)
        if kind == "permute":
            before = self
            if self.last[0] == kind:
                args = tuple(self.last[1][i] for i in args)
                before = self.before
            if args == tuple(range(len(args))):
                return before
            return View(self.root, (*before.steps, (kind, args, made)))
        if kind == "flip" and self.last[:2] == (kind, args):
            return self.before
        return View(self.root, (*self.steps, (kind, args, made)))

    def reshape(self, after: Sequence[Any]) -> View:
        """The same rows with other sizes."""
        before = self.before if self.last[0] == "reshape" else self
        made = keys(after)
        if before.shape == made:
            return before
        return View(self.root, (*before.steps, ("reshape", (), made)))


@dataclass(frozen=True)
class Tag:
    """The letters of a tensor's dimensions, and its view of the rows."""

    letters: str
    view: View

    @property
    def rows(self) -> tuple[int, ...]:
        """The dimensions of rows."""
        return tuple(i for i, letter in enumerate(self.letters) if letter == "r")

    @property
    def has_classes(self) -> bool:
        return "c" in self.letters

    def like(self, letters: str, view: View | None = None) -> Tag:
        """The same rows with other letters, or in another view."""
        return Tag(letters, self.view if view is None else view)

    def row_sizes(self, sizes: Sequence[Any]) -> list[Any]:
        """Those of a tensor's sizes that are of rows."""
        return [size for size, letter in zip(sizes, self.letters, strict=True) if letter == "r"]


def place(letters: str, dim: int) -> int:
    """The place of a dimension in the canonical layout, where rows come first."""
    return 1 + sum(letter != "r" for letter in letters[:dim])


def others(sizes: Sequence[Any], letters: str) -> tuple[Any, ...]:
    """The sizes that are not of rows."""
    return tuple(s for s, letter in zip(sizes, letters, strict=True) if letter != "r")


def letter_of(size: Any, classes: int) -> str:
    """The letter of a dimension that is not of rows."""
    return "c" if hint(size) * PART > classes else "k"


def relettered(letters: str, sizes: Sequence[Any], classes: int) -> str:
    """The same rows, where the other dimensions have other sizes."""
    pairs = zip(letters, sizes, strict=True)
    return "".join(a if a == "r" else letter_of(size, classes) for a, size in pairs)


def regrouped(old: Sequence[Any], letters: str, new: Sequence[Any], classes: int) -> str:
    """The letters of a reshaped tensor: its dimensions are of groups of old ones, in order.

    Raises:
        Stop: a dimension would have rows and classes.
    """
    unknown = Stop("reshapes in a way that is not known")
    before = list(map(key, old))
    after = list(map(key, new))
    last = 0  # so many dimensions at the end stay, of whatever size the others are
    while last < min(len(before), len(after)) and before[-1 - last] == after[-1 - last] != 1:
        last += 1
    kept = letters[len(before) - last :]
    before = before[: len(before) - last]
    after = after[: len(after) - last]
    found = []
    i = 0
    j = 0
    while i < len(before) or j < len(after):
        if i < len(before) and j < len(after) and before[i] == after[j]:
            found.append(letters[i])
            i = i + 1
            j = j + 1
        elif i < len(before) and before[i] == 1:
            i += 1
        elif j < len(after) and after[j] == 1:
            found.append("k")
            j += 1
        elif i == len(before) or j == len(after):
            raise unknown
        else:
            i0 = i
            j0 = j
            i = i + 1
            j = j + 1
            while not _same_product(before[i0:i], after[j0:j]):
                smaller = numel(old[i0:i]) < numel(new[j0:j])
                if (smaller or j == len(after)) and i < len(before):
                    i += 1
                elif j < len(after):
                    j += 1
                else:
                    break  # what is left has as many elements
            of = {letters[x] for x in range(i0, i) if before[x] != 1}
            if "r" in of and len(of) > 1:
                raise Stop("mixes rows and classes in one dimension")
            sizes = new[j0:j]
            found += ["r" if of == {"r"} else letter_of(size, classes) for size in sizes]
    return "".join(found) + kept


def _same_product(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether sizes are known to have the same product."""
    left = math.prod(some)
    right = math.prod(others)
    return left == right or sympy.expand(left) == sympy.expand(right)
