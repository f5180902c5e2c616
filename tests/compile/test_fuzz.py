"""About a minute of the fuzzer with fixed seeds, and the fuzzer itself."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fxpass.op import run, saved
from fxpass.plan import plan
from tests.fuzz.afterwards import FACTORS
from tests.fuzz.campaign import KINDS, campaign, draw
from tests.fuzz.case import Statement
from tests.fuzz.generate import environment
from tests.fuzz.minimise import minimise
from tests.fuzz.oracle import judge
from tests.fuzz.small import SIZES
from tests.fuzz.specs import TIED, USED, spec

ROOT = Path(__file__).parents[2]
# torch warns of calls that are legal and odd
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture
def calls(monkeypatch):
    """The rows, spec and plan of each call of the operator, which no output of a program shows."""
    found = []

    def recorded(n, d, v, dtype, device, spec, *arguments):
        found.append((n, spec, plan.plan(n, d, v, dtype, device, spec, *arguments)))
        return found[-1][-1]

    monkeypatch.setattr(run, "plan", recorded)
    return found


COUNTS = [("programs", 120), ("deferred", 80), ("heads", 80), ("rowwise", 30), ("outside", 30)]


@pytest.mark.parametrize(("kind", "count"), COUNTS)
def test_fused_programs_do_what_eager_does(kind, count, calls, monkeypatch):
    large = []  # gradients for which a compiled backward calls an operator
    monkeypatch.setattr(saved, "_SCALED", lambda *of: large.append(of) or operator(*of))
    operator = torch.ops.fxpass.scaled.default
    tally = campaign(kind, 7, count, report=lambda text: None)
    assert not tally.failures, "\n".join(tally.failures[:3])
    assert tally.valid == count
    if kind != "deferred":
        assert tally.fused > count / 3
    if kind == "programs":  # most heads of the others are row regions
        assert large
        assert any(one.rows < n for n, _, one in calls)
        # autocast has cast f32 leaves
        assert any(spec.unrounded for _, spec, _ in calls)


def test_specs_do_what_they_stand_for(calls):
    tally = campaign("specs", 7, 150, report=lambda text: None)
    assert not tally.failures, "\n".join(tally.failures[:3])
    # a GPU's chunks add up the weight's gradient in bf16 and in f32
    of_gpu = [one for *_, one in calls if one.implementation == "triton"]
    assert any(one.rounded for one in of_gpu)
    assert any(one.sums for one in of_gpu)
    assert any(one.in_place for *_, one in calls)


def test_specs_have_f32_leaves_that_autocast_casts():
    cases = [spec(f"specs:4:{i}") for i in range(200)]
    wide = [[n for n in ("x", "weight") if f"wide_{n}=" in c.source()] for c in cases]
    assert {(), ("x",), ("weight",), ("x", "weight")} == set(map(tuple, wide))
    of_wide = [case.source() for case, names in zip(cases, wide, strict=True) if "weight" in names]
    assert any(TIED in text for text in of_wide)
    assert any(USED in text for text in of_wide)


@pytest.mark.parametrize("kind", ["programs", "heads", "specs"])
def test_losses_have_all_kinds_of_incoming_gradients(kind):
    cases = [case for i in range(60) if (case := draw(kind, 4, i))]
    sessions = [" ".join(s.text for s in case.session) for case in cases]
    for wanted in (*FACTORS, ", retain_graph=True"):
        assert any(wanted in session for session in sessions), wanted
    twice = re.compile(r"= program\(.*backward\(.*= program\(.*backward\(")
    assert any(map(twice.search, sessions))


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_program_again(kind):
    first, again = ([draw(kind, 3, i) for i in range(10)] for _ in range(2))
    assert first == again
    assert any(case is not None and case.source() for case in first)


def test_a_wrong_value_is_found():
    cases = [spec(f"specs:4:{i}") for i in range(8)]
    for case in cases:
        text = [s.text.replace("fused_loss(x", "fused_loss(2 * x") for s in case.fused]
        wrong = map(Statement, text)
        found = judge(replace(case, fused=tuple(wrong))).kind
        operands = environment(case)
        if len(operands["x"]) and len(operands["w"]) > 1:
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
    for module, sizes in SIZES.items():  # these too
        for name in sizes:
            monkeypatch.setattr(module, name, getattr(module, name))
    exec(case.stand_alone(), {})
    eager, fused = capsys.readouterr().out.removeprefix("eager").split("fused\n")
    assert len(eager.split()) == len(fused.split()) > 0


def test_the_command_line():
    command = [sys.executable, "-m", "tests.fuzz", "--programs", "3", "--kind", "deferred"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 valid programs" in done.stdout
