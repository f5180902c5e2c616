"""``python -m tests.mutants``: what is changed, what is not, and which tests are run for it."""

from __future__ import annotations

import ast
import time

import pytest

from tests.mutants import __main__ as tool
from tests.mutants import draw, run, table

TEXT = '''"""0 < 1 in a docstring."""

SIZE: int = 2


def f(x, scale=1, *, other: bool = not 0):
    """x < 0"""
    assert x != 0, x < 1
    if x < 3 and scale:
        raise ValueError(f"{x == 1}", 0)
    log.debug("%d", 1)
    for i in sorted(x, strict=True):
        y += i
        n += 1
        parts.append(i)
    if not (a := x.to(dtype) * (scale - y)):
        return a
    return [k for k in g if (
        k is None
        or k > 7
    )]


TABLE = {"a": lambda x: x - y}
'''
CHANGED = """
constant | SIZE: int = 1
constant | def f(x, scale=0, *, other: bool = not 0):
constant | def f(x, scale=1, *, other: bool = not 1):
if | if not (x < 3 and scale):
and/or | if x < 3 or scale:
condition | if True and scale:
condition | if x < 3 and True:
comparison | if x <= 3 and scale:
sum | pass
constant | n += 0
sum | pass
if | if (a := x.to(dtype) * (scale - y)):
factor | if not (a := x.to(dtype)):
cast | if not (a := x * (scale - y)):
operands | if not (a := x.to(dtype) * (y - scale)):
exit | pass
condition | False
condition | or False
comparison | k is not None
comparison | or k >= 7
operands | TABLE = {"a": lambda x: y - x}
"""


def tree_of(folder, text=TEXT):
    """A tree with one module in each package."""
    for package in draw.PACKAGES:
        (folder / "fxpass" / package).mkdir(parents=True)
        (folder / "fxpass" / package / "a.py").write_text(text)
    return folder


def test_what_is_changed():
    found = draw.Candidates("fxpass/op/a.py", TEXT).found
    assert [f"{m.kind} | {m.new.strip()}" for m in found] == CHANGED.strip().splitlines()
    assert {m.function for m in found} == {"", "f", "<lambda>"}


def test_the_same_draw(tmp_path):
    tree = tree_of(tmp_path / "one")
    count = 8 * len(draw.PACKAGES)
    mutants = draw.draw(tree, count, 0)
    assert mutants == draw.draw(tree, count, 0) != draw.draw(tree, count, 1)
    assert all(sum(m.package == package for m in mutants) == 8 for package in draw.PACKAGES)
    moved = draw.draw(tree_of(tmp_path / "two", f"{TEXT[:-1]}\n\n"), count, 0)
    assert {m.key for m in mutants} == {m.key for m in moved}


def test_every_mutant_is_another_program(tmp_path):
    tree = tree_of(tmp_path)
    (tree / "fxpass/op/a.py").write_text("def f(x):\n    if x:\n        return 1\n")
    for mutant in draw.draw(tree, 64, 0):
        assert mutant.changes(tree)
        old, new = (tree / mutant.file).read_text().split("\n"), mutant.applied(tree).split("\n")
        assert [i for i, (a, b) in enumerate(zip(old, new, strict=True), 1) if a != b] == [
            mutant.line
        ]


def test_marks_say_which_statements_run():
    text = (
        "def f(x):\n    'A docstring.'\n    if x > 0:\n        return 1\n    elif x:\n"
        "        y = 2\n    return 3\nrow = lambda x: x\n"
    )
    marks = run.Marks(-1, {3: [0], 4: [1], 5: [2], 6: [3], 8: [4]})
    reached: list[int] = []
    names = {"__reached__": reached.append}
    exec(compile(marks.visit(ast.parse(text)), "a.py", "exec"), names)
    for call, result, numbers in (
        ("f(1)", 1, [-1, 0, 1]),
        ("f(-1)", 3, [-1, 0, 2, 3]),
        ("f(0)", 3, [-1, 0, 2]),
        ("row(5)", 5, [-1, 4]),
    ):
        assert eval(call, names) == result
        assert reached == numbers
        reached.clear()
    assert eval("f.__doc__", names) == "A docstring."


def test_the_budget_goes_to_the_tests_that_run_the_line():
    def tests(name, count, seconds, *reached):
        return {f"{name}::{i}": tool.Test(seconds, frozenset(reached)) for i in range(count)}

    def chosen(tests, number, budget):
        found = tool.selected(tests, "tests/unit/op", number, -1, budget)
        return [(n.partition("::")[0].rpartition("/")[2], s) for n, s in found.items()]

    line = tests("tests/unit/op/test_a.py", 30, 2.0, 7, -1)
    module = tests("tests/unit/op/test_b.py", 30, 1.0, -1)
    row = tests("tests/unit/rewrite/test_c.py", 30, 3.0, 7, -1)
    other = tests("tests/unit/plan/test_d.py", 9, 0.5, 7)
    a, b, c = [("test_a.py", 2.0)], [("test_b.py", 1.0)], [("test_c.py", 3.0)]
    every = line | module | row | other
    assert chosen(every, 7, 400) == 30 * a + 30 * c
    assert chosen(every, 7, 60) == 15 * a + 10 * c  # half of it on the package's own tests
    assert chosen(row, 7, 60) == 15 * c
    few = dict(list(line.items())[:3])
    assert chosen(few | module | other, 7, 42) == 3 * a + 15 * b
    assert chosen(few | module, 8, 100) == 30 * b + 3 * a  # the module, where no test runs the line
    assert chosen(other, 8, 60) == []


@pytest.fixture
def small(tmp_path):
    """A tree whose tests are two, of one function."""
    tree = tree_of(tmp_path / "tree", "def f(x):\n    return x - 2\n")
    # packages, before a fxpass that is installed
    for name in ("README.md", "pyproject.toml", "fxpass/__init__.py", "fxpass/op/__init__.py"):
        (tree / name).write_text("")
    (tree / "benchmarks").mkdir()
    (tree / "tests").mkdir()
    (tree / "tests" / "test_a.py").write_text(
        "import time\nfrom fxpass.op.a import f\n\n\n"
        "def test_one():\n    assert f(2) == 0\n    assert f(1) < 9 or time.sleep(99)\n\n\n"
        "def test_two():\n    assert f(3) == 1\n"
    )
    return run.copy(tree, tmp_path / "copy")


@pytest.mark.parametrize(
    ("new", "ended"),
    [
        ("return x - 2", ("survives", "", 2)),
        ("return x - 2 + (x == 3)", ("killed", "tests/test_a.py::test_two", 2)),
        ("return x - 2 if x == 2 else 9", ("hangs", "tests/test_a.py::test_one", 1)),
        ("return [", ("killed", "tests/test_a.py (collection)", 1)),
    ],
)
def test_a_fork(small, new, ended):
    tool.write(small, "fxpass/op/a.py", f"def f(x):\n    {new}\n")
    order = {"tests/test_a.py::test_one": 0.1, "tests/test_a.py::test_two": 0.1}
    fork = run.Fork(small, order, 4 if ended[0] == "hangs" else 60)
    while (found := fork.ended()) is None:
        time.sleep(run.POLL)
    assert found == ended, (small / "log.txt").read_text()


def test_two_suites_are_compared():
    mutants = draw.Candidates("fxpass/op/a.py", TEXT).found
    found = {"seconds": 1, "begun": 1, "tests": 1}
    kills = {"outcome": "killed", "test": "t.py::a|b", **found}
    not_ = {"outcome": "survives", "test": "", **found}
    new = [table.result_of(i, m, **(kills if i < 3 else not_)) for i, m in enumerate(mutants)]
    old = [table.result_of(i, m, **(kills if i > 1 else not_)) for i, m in enumerate(mutants)]
    lines = table.compared(new[:-1], old)
    assert lines[0] == "Of 20 mutants that both suites ran, this one kills 3, the other one 18."
    assert "Only this suite kills 2:" in lines
    assert "Only the other suite kills 17:" in lines
    text = table.markdown(new, 100, 0, 60, old)
    assert "| op | 21 | 3 | 18 |" in text
    assert "t.py::a\\|b | 1 | 1 |" in text
