"""The table of programs: what it says of outcomes, and that the committed one has every row."""

from __future__ import annotations

from pathlib import Path

from benchmarks.programs import __main__ as command
from benchmarks.programs.table import Result, document, statuses, totals
from tests.programs.catalog import catalog
from tests.programs.row import FORMULA, NOTHING, Row
from tests.support.oracle import FIRST, Outcome

COMMITTED = Path(command.__file__).with_name("results.md")
WHY = "%z is read by %y (exp, <a row: program 12>:7 exp(z))"
RESULTS = [
    Result(Row("fused", "", of="a test", kind="tests"), FIRST, Outcome(FORMULA, 1)),
    Result(
        Row("kept", "", of="a test", kind="tests"),
        "bf16",
        Outcome(FORMULA, 1, left="linear, 2 sort"),
    ),
    Result(
        Row("a | b", "", of="a test", kind="tests"),
        FIRST,
        Outcome(NOTHING, left="linear", reasons=(WHY,)),
    ),
    Result(
        Row("wrong", "", of="a test", kind="other"),
        FIRST,
        Outcome(FORMULA, left="exp", wrong="off"),
    ),
]


def test_the_table():
    text = document(RESULTS)
    assert statuses(text) == {
        "fused": "fused",
        "kept, bf16": "part",
        "a | b": "no",
        "wrong": "part",
    }
    assert "| kept, bf16 | a test | part | formula | 1 | linear, 2 sort |  | yes |" in text
    assert (
        "| a \\| b | a test | no | nothing | 0 | linear | %z is read by %y (exp, exp(z)) | yes |"
        in text
    )
    assert "| wrong | a test | part | formula | 0 | exp |  | WRONG: off |" in text
    assert totals(RESULTS).splitlines()[2:] == [
        "| tests | 3 | 1 | 1 | 1 | 0 |",
        "| other | 1 | 0 | 1 | 0 | 1 |",
        "| all | 4 | 1 | 2 | 1 | 1 |",
    ]


def test_the_command(tmp_path, capsys, monkeypatch):
    file = tmp_path / "programs.md"
    arguments = ["--kinds", "z-losses", "--only", "^z-loss alone$", "--markdown", str(file)]
    assert command.main(arguments) == 0
    assert file.read_text() == capsys.readouterr().out
    assert statuses(file.read_text()) == {"z-loss alone": "fused"}
    monkeypatch.setattr(command, "outcome", lambda row, way: Outcome(FORMULA, wrong="off"))
    assert command.main(arguments) == 1


def test_the_committed_table_has_every_row_of_torch():
    names = {Result(row, FIRST, Outcome("")).name for row in catalog(libraries=False) if row.of}
    assert names <= statuses(COMMITTED.read_text()).keys()
