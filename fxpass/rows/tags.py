"""The meaning of the dimensions of a tensor: rows of a head, classes, or others.

A tag has a letter for each dimension (``r`` rows, ``c`` classes, ``k`` another) and a view, the
steps from the head's rows ``[N]`` to the tensor's rows: reshapes, permutations, slices.
Of shifted logits ``z.view(B, T, V)[:, :-1]``::

    >>> whole = Tag("rc", View(6))
    >>> rows = whole.view.reshape((2, 3))
    >>> shifted = Tag("rrc", rows.then("slice", (1, 0, 2, 1), (2, 2)))
    >>> shifted.rows, shifted.view.shape
    ((0, 1), (2, 2))

Whatever the view, a tagged tensor is computed in the canonical layout ``[n, others...]``, for rows
of the head: a view of rows computes nothing there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
from torch.fx import Node

from fxpass import messages
from fxpass.rows.sizes import key, keys, numel, size_hint

# A dimension has classes if it has at least this part of the head's, as a chunk of classes has.
_PART = 16
_UNORDERED = ("reshape", "permute", "flip")  # these steps keep all rows


class Stop(Exception):  # noqa: N818
    """The reason why a node ends a region; its text says what the node does.

    Attributes:
        node: the node; None while only the rule's caller knows the node.
    """

    node: Node | None = None


class ViewStep(NamedTuple):
    """A step of a view.

    Attributes:
        kind: ``reshape``, ``permute``, ``flip``, ``slice``, ``select`` or ``mask``; empty for none.
        args: of the step.
        sizes: of the rows after the step.
    """

    kind: str = ""
    args: tuple[Any, ...] = ()
    sizes: tuple[Any, ...] = ()


@dataclass(frozen=True)
class View:
    """The rows of a tensor among the rows of a head.

    Attributes:
        root: the number of the head's rows.
        steps: from the head's rows to the tensor's.
    """

    root: Any
    steps: tuple[ViewStep, ...] = ()

    @property
    def shape(self) -> tuple[Any, ...]:
        """The sizes of the rows."""
        return self.steps[-1].sizes if self.steps else (self.root,)

    @property
    def before(self) -> View:
        """The view without its last step."""
        return View(self.root, self.steps[:-1])

    @property
    def last(self) -> ViewStep:
        """The last step; of no kind if there is none."""
        return self.steps[-1] if self.steps else ViewStep()

    @property
    def is_whole(self) -> bool:
        """True for a view of all rows."""
        return all(step.kind in _UNORDERED for step in self.steps)

    @property
    def in_order(self) -> bool:
        """True for a view of all rows in the head's order."""
        return all(step.kind == "reshape" for step in self.steps)

    def then(self, kind: str, args: tuple[Any, ...], sizes: Sequence[Any]) -> View:
        """The view with one step more; a step that undoes the last removes both."""
        before = self
        if kind == "permute":
            if self.last.kind == kind:
                args = tuple(self.last.args[i] for i in args)
                before = self.before
            if args == tuple(range(len(args))):
                return before
        if kind == "flip" and self.last[:2] == (kind, args):
            return self.before
        return View(self.root, (*before.steps, ViewStep(kind, args, keys(sizes))))

    def reshape(self, sizes: Sequence[Any]) -> View:
        """The same rows with other sizes."""
        before = self.before if self.last.kind == "reshape" else self
        after = keys(sizes)
        if before.shape == after:
            return before
        return View(self.root, (*before.steps, ViewStep("reshape", (), after)))


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
        """True if a dimension has classes."""
        return "c" in self.letters

    def with_letters(self, letters: str, view: View | None = None) -> Tag:
        """A tag with other letters, in the same view or in another."""
        return Tag(letters, self.view if view is None else view)

    def row_sizes(self, sizes: Sequence[Any]) -> list[Any]:
        """The sizes of a tensor's rows, among all its sizes."""
        return [size for size, letter in zip(sizes, self.letters, strict=True) if letter == "r"]


def canonical_dim(letters: str, dim: int) -> int:
    """The canonical index of a dimension that is not of rows: one dimension of rows comes first."""
    return 1 + sum(letter != "r" for letter in letters[:dim])


def inner_sizes(sizes: Sequence[Any], letters: str) -> tuple[Any, ...]:
    """The sizes of the dimensions that are not of rows."""
    return tuple(s for s, letter in zip(sizes, letters, strict=True) if letter != "r")


def letter_of(size: Any, classes: int) -> str:
    """The letter of a dimension that is not of rows."""
    return "c" if size_hint(size) * _PART > classes else "k"


def relettered(letters: str, sizes: Sequence[Any], classes: int) -> str:
    """The letters, where the dimensions that are not of rows have other sizes."""
    pairs = zip(letters, sizes, strict=True)
    return "".join("r" if letter == "r" else letter_of(size, classes) for letter, size in pairs)


def regrouped(old: Sequence[Any], letters: str, new: Sequence[Any], classes: int) -> str:
    """The letters of a reshaped tensor: groups of old dimensions become groups of new ones.

    Raises:
        Stop: a dimension would have rows and classes.
    """
    before = list(map(key, old))
    after = list(map(key, new))
    last = 0  # the number of dimensions at the end that stay, whatever the sizes of the others
    while last < min(len(before), len(after)) and before[-1 - last] == after[-1 - last] != 1:
        last += 1
    end = letters[len(before) - last :]
    before = before[: len(before) - last]
    after = after[: len(after) - last]
    found = []
    i = 0
    j = 0
    while i < len(before) or j < len(after):
        if i < len(before) and j < len(after) and before[i] == after[j]:
            found.append(letters[i])
            i += 1
            j += 1
        elif i < len(before) and before[i] == 1:
            i += 1
        elif j < len(after) and after[j] == 1:
            found.append("k")
            j += 1
        elif i == len(before) or j == len(after):
            raise Stop(messages.RESHAPED_ROWS)
        else:
            i0 = i
            j0 = j
            i += 1
            j += 1
            while not _same_product(before[i0:i], after[j0:j]):
                smaller = numel(old[i0:i]) < numel(new[j0:j])
                if (smaller or j == len(after)) and i < len(before):
                    i += 1
                elif j < len(after):
                    j += 1
                else:
                    break  # the rest of both has as many elements
            group = {letters[x] for x in range(i0, i) if before[x] != 1}
            if "r" in group and len(group) > 1:
                raise Stop(messages.ROWS_AND_CLASSES)
            sizes = new[j0:j]
            found += ["r" if group == {"r"} else letter_of(size, classes) for size in sizes]
    return "".join(found) + end


def _same_product(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """True if sizes have the same product, whatever the symbols are."""
    left = math.prod(some)
    right = math.prod(others)
    return left == right or sympy.expand(left) == sympy.expand(right)
