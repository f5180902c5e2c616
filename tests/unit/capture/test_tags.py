"""Tags against values: a row of logits changes, and only the rows that are made of it change.

Of random programs (tests/programs checks its rows). A rule that claims too much is found.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fxpass.capture.rows import A, Rowwise
from fxpass.capture.values import Arg
from tests.fuzz.campaign import Drawn, draw, judge, quiet, tags_of
from tests.support.row_programs import run
from tests.support.row_tags import rule_for

# torch warns of calls that are legal and odd
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def _drawn(count: int) -> Iterator[Drawn]:
    """Random programs whose tags are checked, as they are written."""
    for number in range(count):
        one = draw(11, number)
        if one is not None and one.tags:
            yield one


def test_random_programs():
    with quiet():
        found = [tags_of(one) for one in _drawn(120)]
    assert not any(one.wrong for one in found)
    assert sum(bool(one.captured) for one in found) > len(found) / 4 > 2
    assert sum(one.tensors for one in found) > 4 * len(found)


# ---------------------------------------------------------------- rules that claim too much


def _claims(run_of):
    """A rule by which a call keeps the tag of its argument."""

    def rule(step, classes):
        value = step.args[0]
        arg = Arg(value, value.tag)
        return Rowwise((value.tag,) * len(step.results), lambda env: run_of(env.of(arg)))

    return rule


# The program, the call of which the rule is broken, and what the rule computes of some rows.
BROKEN = (
    ("z.softmax(0).amax(-1)", "_softmax", lambda t: t.softmax(0)),
    ("s.cumsum(1).amax(-1)", "cumsum", lambda t: t.cumsum(0)),
    ("z.sort(0).values.amax(-1)", "sort", lambda t: t.sort(0)),
    # views of rows that nobody takes of the operands
    ("z.flip(0).amax(-1)", "flip", lambda t: t),
    ("s.roll(1, 1).amax(-1)", "roll", lambda t: t),
    ("s.view(T, B, V).transpose(0, 1).amax(-1)", "transpose", lambda t: t),
)


@pytest.mark.parametrize(("text", "op", "run_of"), BROKEN, ids=[text for text, *_ in BROKEN])
def test_a_rule_that_mixes_rows_is_found(text, op, run_of):
    with rule_for(getattr(A, op), _claims(run_of)):
        found = run(text)
    assert any("changes in rows" in wrong for wrong in found.wrong)


def test_a_rule_that_computes_something_else_is_found():
    with rule_for(A.cumsum, _claims(lambda t: t.cumprod(-1))):
        found = run("z.cumsum(-1).amax(-1)")
    assert any("is another on a chunk of rows" in wrong for wrong in found.wrong)
    assert not any("changes in rows" in wrong for wrong in found.wrong)


def test_the_fuzzer_finds_a_broken_rule():
    """A program that computes what eager computes fails by its tags: the check is part of it."""
    with quiet():
        for one in _drawn(400):
            if ".softmax(" not in one.row.text or judge(one)[0] != "ok":
                continue
            with rule_for(A._softmax, _claims(lambda t: t.softmax(0))):
                if not tags_of(one).wrong:
                    continue
                assert judge(one)[0] == "failed"
                return
    raise AssertionError("no program has a softmax")
