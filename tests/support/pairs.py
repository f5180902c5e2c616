"""Pairs in place of products: few cases, in which any two values of two parameters meet.

>>> cases = pairs(size=[1, 2], kind="abc", wide=[False, True])
>>> len(cases), cases[:2]  # of 12
(6, [(1, 'a', False), (1, 'b', True)])
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest


def pairs(**parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases, each with a value of every parameter; the same ones at every call."""
    values = [list(some) for some in parameters.values()]
    one_of = list(combinations(range(len(values)), 2))
    left = {((i, a), (j, b)) for i, j in one_of for a in _of(values[i]) for b in _of(values[j])}
    found = []
    while left:
        chosen = dict(min(left))
        for i in range(len(values)):
            if i not in chosen:
                met = [_pairs(i, a, chosen) & left for a in _of(values[i])]
                chosen[i] = max(_of(values[i]), key=lambda a, met=met: len(met[a]))
        left -= set(combinations(sorted(chosen.items()), 2))
        found.append(tuple(values[i][chosen[i]] for i in range(len(values))))
    return found


def in_pairs(*fixtures: str, **parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """``@in_pairs(size=[1, 2], kind="abc")`` in place of a stack of ``parametrize``. The parameters
    of ``fixtures``, and that of ``implementation``, are those of the fixtures of that name."""
    indirect = [*fixtures, *["implementation"] * ("implementation" in parameters)]
    return pytest.mark.parametrize(tuple(parameters), pairs(**parameters), indirect=indirect)


def _of(values: list[Any]) -> range:
    return range(len(values))


def _pairs(i: int, a: int, chosen: dict[int, int]) -> set[Any]:
    """The pairs of the value ``a`` of parameter ``i`` with those that are chosen."""
    return {tuple(sorted([(i, a), other])) for other in chosen.items()}
