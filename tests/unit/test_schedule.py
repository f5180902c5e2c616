"""What one test may take, and how tests are written: the rules of tests/README.md."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.durations import SECONDS, SLACK, Durations
from tests.support.pairs import pairs

TESTS = Path(__file__).parents[1]

# ---------------------------------------------------------------- durations


def reported(plugin: Any, name: str, seconds: float, marks: str = "", when: str = "call") -> None:
    keywords = dict.fromkeys(marks.split(), 1)
    report = SimpleNamespace(nodeid=name, duration=seconds, when=when, keywords=keywords)
    plugin.pytest_runtest_logreport(report)


def test_a_test_that_takes_too_long_fails_the_run():
    """A full test may take longer than a quick one; fixtures, which start ranks, are not counted."""
    plugin: Any = Durations()
    session, lines = SimpleNamespace(exitstatus=0), []
    quick, full = (SLACK * SECONDS[tier] for tier in ("quick", "full"))
    for marks in ("", "full"):
        reported(plugin, "one", quick - 1, marks)
        reported(plugin, "its fixture", 900, marks, "setup")
    plugin.pytest_sessionfinish(session)
    assert session.exitstatus == 0
    reported(plugin, "a quick one", quick + 1)
    reported(plugin, "a full one", quick + 1, "full")
    reported(plugin, "a long one", full + 1, "full")
    plugin.pytest_sessionfinish(session)
    plugin.pytest_terminal_summary(SimpleNamespace(write_line=lines.append))
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    assert lines == [
        f"TOO SLOW a quick one: {quick + 1} s, of 20 s",
        f"TOO SLOW a long one: {full + 1} s, of 60 s",
    ]


def test_tiers_name_what_is_there():
    """A name in ``FULL`` or ``NEEDS`` that is gone would move its successor to the quick tests."""
    tables = {"FULL", "NEEDS"}
    for node in ast.parse((TESTS / "conftest.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in tables:
            tables.remove(ast.unparse(node.targets[0]))
            assert not [
                name for name in ast.literal_eval(node.value) if not (TESTS / name).exists()
            ]
    assert not tables


# ---------------------------------------------------------------- pairs


def test_any_two_values_meet_in_pairs():
    sizes = {"a": 2, "b": 3, "c": 2, "d": 5}
    values = {name: range(count) for name, count in sizes.items()}
    found = pairs(**values)
    assert len(found) < 20  # of 60
    for (i, one), (j, other) in itertools.combinations(enumerate(values.values()), 2):
        assert {(case[i], case[j]) for case in found} == set(itertools.product(one, other))


# ---------------------------------------------------------------- how tests are written

RUNNERS = {"compiled", "check", "same", "run", "train", "outcome"}
# What does not comply yet. Names leave these lists; none is added.
NOT_YET = {
    "a file has more than 400 lines": """
        benchmarks/test_loss.py compile/test_devices.py support/reduction_cases.py""",
    "a product of three parameters": """
        compile/test_devices.py unit/casts/test_casts.py unit/casts/test_mixed.py""",
    "a runner of programs in a test file": """
        compile/test_models.py compile/test_scaler.py libraries/test_liger.py libraries/test_lightning.py
        libraries/test_lightning_encoder.py libraries/test_llama_recipes.py libraries/test_peft.py
        libraries/test_trainers.py libraries/test_trl.py unit/cli/test_cli.py unit/cli/test_demo.py
        unit/rewrite/test_dump.py""",
}


def broken(text: str, of_tests: bool) -> Iterator[str]:
    """The rules that a module of tests breaks."""
    if text.count("\n") > 400:
        yield "a file has more than 400 lines"
    module = ast.parse(text)
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        decorators = [ast.unparse(one) for one in function.decorator_list]
        if sum("mark.parametrize" in one for one in decorators) > 2:
            yield "a product of three parameters"
    if of_tests and RUNNERS & {one.name for one in module.body if isinstance(one, ast.FunctionDef)}:
        yield "a runner of programs in a test file"


@functools.cache
def of_files() -> dict[str, set[str]]:
    """The rules that each file breaks."""
    files = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("*.py")}
    return {
        name: set(broken(path.read_text(), path.name.startswith("test_")))
        for name, path in files.items()
    }


@pytest.mark.parametrize("rule", NOT_YET)
def test_the_rules_are_kept(rule):
    found = {name for name, rules in of_files().items() if rule in rules}
    new = found - set(NOT_YET[rule].split())
    assert not new


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("x = 1\n" * 401, "a file has more than 400 lines"),
        ("@mark.parametrize(1)\n" * 3 + "def test(): pass", "a product of three parameters"),
        ("def check(): pass", "a runner of programs in a test file"),
    ],
)
def test_what_breaks_a_rule_is_found(text, rule):
    assert [*broken(text, True)] == [rule]
    assert [*broken("@mark.parametrize(1)\n" * 2 + "def test(): pass", True)] == []
