"""Letters of reshaped tensors, and views of rows."""

from __future__ import annotations

import pytest

from fxpass import messages
from fxpass.rows.tags import Stop, Tag, View, letter_of, regrouped

B, T, V = 2, 24, 97


@pytest.mark.parametrize(
    ("old", "letters", "new", "found"),
    [
        ((B * T, V), "rc", (B, T, V), "rrc"),
        ((B, T, V), "rrc", (B * T, V), "rc"),
        ((B * T, V), "rc", (B * T, 1, V), "rkc"),
        ((B, 1, T, V), "rkrc", (B * T, V), "rc"),
        ((B * T, 96), "rc", (B * T, 2, 48), "rkc"),
        ((B * T, 1), "rk", (B * T,), "r"),
        # as many rows as classes: the order of the dimensions decides
        ((6, 6), "rc", (2, 3, 6), "rrc"),
        ((6, 6), "cr", (6, 2, 3), "crr"),
    ],
)
def test_a_reshape_keeps_letters(old, letters, new, found):
    assert regrouped(old, letters, new, V) == found


@pytest.mark.parametrize(
    ("old", "letters", "new"),
    [
        ((B * T, V), "rc", (B * T * V,)),
        ((B, T, V), "rrc", (B, T * V)),
        ((4, 6), "rc", (6, 4)),
    ],
)
def test_a_reshape_that_mixes_rows_and_classes(old, letters, new):
    with pytest.raises(Stop, match=messages.ROWS_AND_CLASSES):
        regrouped(old, letters, new, V)


def test_few_entries_are_no_classes():
    assert (letter_of(5, V), letter_of(7, V), letter_of(V, V)) == ("k", "c", "c")


def test_steps_that_undo_each_other_are_none():
    view = View(B * T).reshape((B, T))
    assert view.reshape((B * T,)) == View(B * T)
    assert view.then("permute", (1, 0), (T, B)).then("permute", (1, 0), (B, T)) == view
    assert view.then("flip", (1,), (B, T)).then("flip", (1,), (B, T)) == view
    assert view.then("permute", (0, 1), (B, T)) is view


def test_a_part_has_not_all_rows():
    assert not View(B * T).then("slice", (0, 1, B * T, 1), (B * T - 1,)).is_whole
    assert View(4).then("flip", (0,), (4,)).is_whole
    assert not View(4).then("flip", (0,), (4,)).in_order


def test_the_sizes_of_rows():
    assert Tag("krc", View(5)).row_sizes((2, 5, 7)) == [5]
