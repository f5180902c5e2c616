"""About a minute of the fuzzer with fixed seeds, and the fuzzer itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from fxpass.rows import backend
from tests.fuzz.campaign import (
    SPELLED,
    Drawn,
    campaign,
    draw,
    judge,
    like,
    minimise,
    printed,
    quiet,
)
from tests.programs.row import Row
from tests.support.oracle import Way

ROOT = Path(__file__).parents[2]
# torch warns of calls that are legal and odd
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize(("only", "count"), [("", 10), ("outside", 6)])
def test_programs_do_what_eager_does(only, count):
    tally = campaign(7, count, only=only, report=lambda text: None)
    assert not tally.failures, "\n".join(tally.failures[:3])
    assert tally.valid == count
    assert tally.fused > count / 3


@pytest.fixture(scope="module")
def drawn():
    """Programs that nobody has run."""
    return [one for i in range(150) if (one := draw(3, i)) is not None]


def test_a_seed_gives_the_same_program_again(drawn):
    again = [one for i in range(20) if (one := draw(3, i)) is not None]
    assert [printed(one) for one in again] == [printed(one) for one in drawn[: len(again)]]


def test_programs_have_everything_that_the_grammar_says(drawn):
    texts = [one.row.text for one in drawn]
    for part in (
        ".detach()",
        "_(",
        "cross_entropy",
        "log_softmax",
        "with torch.no_grad()",
        "argmax",
        "softmax(0)",
        ".amax([0, 1]",
    ):
        assert any(part in text for text in texts), part
    assert {one.spelling for one in drawn} == {"", *SPELLED}
    for field in ("dtype", "autocasts", "dynamic", "patched", "around", "inner"):
        assert len({getattr(one.way, field) for one in drawn}) > 1, field
    assert any(one.row.sizes.n == one.row.sizes.v for one in drawn)


def test_a_program_is_judged_and_reduced():
    text = "y = z.tanh()\nr = y.logsumexp(-1)\np = z.softmax(-1).amax(-1)\nloss = r.sum() + p.sum()\n(loss, r,)"
    case = Drawn(Row("of the test", text), Way(dynamic=True, spread=2))
    with quiet():
        assert judge(case) == ("ok", "")

        def off(row, compile):
            program = compile(row.program())
            return lambda *tensors: tuple(v * 1.5 for v in program(*tensors))

        wrong = replace(case, way=replace(case.way, spell=off), spelling="outside")
        kind, _ = judge(wrong)
        assert kind == "invalid"  # the inner backend alone is as wrong
        small = minimise(case, lambda one: "fails" if ".logsumexp" in one.row.text else "ok")
    assert small.row.text.count("\n") == 1
    assert small.way.dynamic is None
    assert like("output 0: 1.2e-3 > 1e-6") == like("gradient of x: 5.0 > 1e-6")


def test_a_pass_that_fails_is_noticed():
    case = Drawn(Row("of the test", "loss = F.cross_entropy(z, labels)\n(loss,)"), Way())
    with quiet(), mock.patch.object(backend, "find_regions", side_effect=KeyError("of the test")):
        kind, why = judge(case)
    assert kind == "failed"
    assert "of the test" in why


def test_the_command_line():
    command = [sys.executable, "-m", "tests.fuzz", "--programs", "3", "--only", "outside"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 valid programs" in done.stdout
