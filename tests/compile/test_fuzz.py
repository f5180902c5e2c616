"""About a minute of the fuzzer with fixed seeds, and the fuzzer itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fxpass.plan import plan
from tests.fuzz.campaign import KINDS, campaign, draw
from tests.fuzz.case import Statement
from tests.fuzz.minimise import minimise
from tests.fuzz.oracle import judge
from tests.fuzz.specs import spec

ROOT = Path(__file__).parents[2]
# torch warns of calls that are legal and odd
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize(("kind", "count"), [("programs", 120), ("deferred", 80), ("heads", 40)])
def test_fused_programs_do_what_eager_does(kind, count):
    tally = campaign(kind, 7, count, report=lambda text: None)
    assert not tally.failures, "\n".join(tally.failures[:3])
    assert tally.valid == count
    assert kind == "deferred" or tally.fused > count / 3


def test_specs_do_what_they_stand_for():
    tally = campaign("specs", 7, 120, report=lambda text: None)
    assert not tally.failures, "\n".join(tally.failures[:3])


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_program_again(kind):
    first, again = ([draw(kind, 3, i) for i in range(10)] for _ in range(2))
    assert first == again
    assert any(case is not None and case.source() for case in first)


def test_a_wrong_value_is_found():
    cases = [spec(f"specs:4:{i}") for i in range(8)]
    for case in cases:
        (call,) = case.fused
        wrong = replace(call, text=call.text.replace("(x, w", "(2 * x, w"))
        found = judge(replace(case, fused=(wrong,))).kind
        operands = dict(case.inputs)
        if "(0, " not in operands["x"] and "randn(1, " not in operands["w"]:  # no rows, one class
            assert found == "value"
        assert judge(case).kind == "ok"


def test_a_failure_is_reduced_to_what_fails():
    cases = [draw("programs", 5, i) for i in range(20)]
    case = next(c for c in cases if c is not None and len(c.body) > 6)
    culprit = Statement("r = torch.rand(2)")
    case = replace(case, body=(culprit, *case.body))
    small = minimise(case, lambda c: "fails" if culprit in c.body else "ok")
    assert small.body == (culprit,)
    assert not small.session
    assert len(small.returned) == 1


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"sharded"}))  # which starts a process group
def test_a_printed_program_runs_alone(kind, capsys, monkeypatch):
    monkeypatch.setattr(
        plan, "implementation_for", plan.implementation_for
    )  # the program replaces it
    case = next(c for i in range(9) if (c := draw(kind, 6, i)) and judge(c).kind == "ok")
    exec(case.stand_alone(), {})
    eager, fused = capsys.readouterr().out.removeprefix("eager").split("fused\n")
    assert len(eager.split()) == len(fused.split()) > 0


def test_the_command_line():
    command = [sys.executable, "-m", "tests.fuzz", "--programs", "3", "--kind", "deferred"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 valid programs" in done.stdout
