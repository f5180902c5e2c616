"""The table of programs: every status is what the real pipeline gives, and nothing is wrong."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.programs import __main__ as command
from benchmarks.programs import catalog as programs
from benchmarks.programs.catalog import KINDS, catalog
from benchmarks.programs.measure import STATUSES, Result, examine
from benchmarks.programs.operands import OPERANDS, SIZES, TRAINED, make
from benchmarks.programs.program import BF16, F32, Kind
from benchmarks.programs.table import document, statuses, totals

COMMITTED = Path(command.__file__).with_name("results.md")

# ---------------------------------------------------------------- the catalog


def test_there_are_many_programs_of_torch_alone():
    names = [program.name for program in catalog(libraries=False)]
    assert len(names) > 300
    assert len(set(names)) == len(names)


def test_every_kind_has_programs_of_its_own():
    found = {program.kind for program in catalog(libraries=False)}
    assert found == set(KINDS.values())


def test_operands_are_known_and_the_same_at_every_call():
    for program in catalog(libraries=False):
        assert set(program.names) <= OPERANDS.keys()
        assert set(program.gradients) <= set(program.names) & TRAINED
    for name in OPERANDS:
        assert torch.equal(make(name, F32), make(name, F32))


def test_a_function_of_logits_gets_a_head():
    kind = Kind("a kind")
    kind("a program", "a test", "[N]", dtypes=(F32, BF16))(lambda logits, labels: logits[:, 0])
    one, other = kind.programs
    assert (one.name, other.name) == ("a program", "a program, bf16")
    assert one.names == ("x", "weight", "labels")
    assert one.gradients == ("x", "weight")
    x, weight, labels = other.tensors()
    assert (x.dtype, weight.dtype, labels.dtype) == (BF16, BF16, torch.int64)
    assert torch.equal(other.function(x, weight, labels), F.linear(x, weight)[:, 0])
    assert all(t.requires_grad == (t is not labels) for t in (x, weight, labels))


def test_the_committed_table_has_every_program():
    names = {program.name for program in catalog(libraries=False)}
    assert names <= statuses(COMMITTED.read_text()).keys()


@pytest.mark.parametrize("module", ["operands", "program", "measure", "catalog"])
def test_examples(module):
    found = doctest.testmod(importlib.import_module(f"benchmarks.programs.{module}"))
    assert found.attempted
    assert not found.failed


# ---------------------------------------------------------------- statuses

kind = Kind("tests")


@kind("fused", "a test", "scalar")
def _(logits, labels):
    return F.cross_entropy(logits, labels)


@kind("part", "a test", "scalar, [N]")
def _(logits, labels):
    one_hot = F.one_hot(labels, SIZES.v).float()
    return F.cross_entropy(logits, labels), one_hot.cumsum(-1).cos().sum(-1)


@kind("kept", "a test", "scalar, [N]")
def _(logits, labels):
    return F.cross_entropy(logits, labels), logits.detach().sort(0).values[:, 7]


@kind("no", "a test", "scalar")
def _(logits, labels):
    return F.cross_entropy(logits.cumsum(0), labels)


@kind("silent", "a test", "[N]")
def _(logits):
    return logits.sort(0).values[:, 7]


@kind("break", "a test", "scalar")
def _(logits, labels):
    torch._dynamo.graph_break()
    return F.cross_entropy(logits, labels)


CASES = {program.name: program for program in kind.programs}
LEFT = {
    "fused": (),
    "part": ("one_hot", "float", "cumsum", "cos"),
    "kept": ("linear", "sort", "sort"),  # values and indices
    "no": ("linear", "cumsum"),
    "silent": ("linear", "sort", "sort"),
    "break": ("linear",),
}
REASONS = {"no": "cumsum", "break": "graph_break"}


@pytest.mark.parametrize("status", STATUSES)
def test_a_program_of_each_status(status):
    result = examine(CASES[status])
    assert result.status == status
    assert result.left == LEFT[status]
    assert result.matches == (status in ("fused", "part", "kept"))
    assert REASONS.get(status, "") in result.reason
    assert bool(result.reason) == (status in REASONS)
    assert not result.wrong


def test_a_program_without_a_head_is_not_fused():
    kind = Kind("tests")
    kind("no head", "a test", "scalar")(lambda x, weight: x.sum() + weight.sum())
    result = examine(kind.programs[0])
    assert (result.status, result.reason) == ("break", "no head in the graph")


def test_a_checkpointed_graph_is_looked_into():
    kind = Kind("tests")

    @kind("checkpointed", "a test", "[N]")
    def _(logits):
        def middle(logits):
            return logits.cumsum(0).sort(-1).values[:, 7]

        return checkpoint(middle, logits.tanh(), use_reentrant=False)

    assert examine(kind.programs[0]).left == ("linear", "tanh", "cumsum", "sort", "sort")


WRONG = {
    "a value": (lambda loss: loss * 1.001, "output 0: 1.0"),
    "a gradient": (lambda loss: loss.detach() + 2 * (loss - loss.detach()), "gradient of x: 1.0"),
    "a dtype": (lambda loss: loss.double(), "output 0: float64[] for float32[]"),
    "a shape": (lambda loss: loss[None], "output 0: float32[1] for float32[]"),
    "no gradient": (
        lambda loss: loss.detach().requires_grad_(),
        "gradient of x: None for float32[48, 16]",
    ),
    "an error": (lambda loss: loss.view(7), "raises "),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_program_is_found(what):
    change, said = WRONG[what]
    wrong = dataclasses.replace(
        CASES["fused"], spell=lambda function, _: lambda *tensors: change(function(*tensors))
    )
    assert examine(wrong).wrong.startswith(said)


def test_an_index_is_exact():
    kind = Kind("tests")
    kind("argmax", "a test", "[N]", gradients=(), dtypes=(BF16,))(lambda logits: logits.argmax(-1))
    (program,) = kind.programs
    assert not examine(program).wrong

    def off(function, _):
        return lambda *tensors: function(*tensors) + (torch.arange(SIZES.n) == 0)

    assert examine(dataclasses.replace(program, spell=off)).wrong.startswith("output 0: ")


# ---------------------------------------------------------------- the table and the command

WHY = "%z is read by %y (exp, benchmarks/programs/kinds/z.py:7 exp(z))"
RESULTS = [
    Result(CASES["fused"], matches=1),
    Result(CASES["kept"], matches=1, kept=True, left=("linear", "sort", "sort")),
    Result(dataclasses.replace(CASES["no"], name="a | b"), rejections=(WHY,), left=("linear",)),
    Result(dataclasses.replace(CASES["silent"], kind="other"), left=("linear",), wrong="off"),
]


def test_the_table():
    text = document(RESULTS)
    assert statuses(text) == {"fused": "fused", "kept": "kept", "a | b": "no", "silent": "silent"}
    assert "| kept | a test | scalar, [N] | kept | 1 | linear, 2 sort |  | yes |" in text
    assert (
        "| a \\| b | a test | scalar | no | 0 | linear | %z is read by %y (exp, exp(z)) | yes |"
        in text
    )
    assert "| silent | a test | [N] | silent | 0 | linear |  | WRONG: off |" in text
    assert totals(RESULTS).splitlines()[2:] == [
        "| tests | 3 | 1 | 0 | 1 | 1 | 0 | 0 | 0 |",
        "| other | 1 | 0 | 0 | 0 | 0 | 1 | 0 | 1 |",
        "| all | 4 | 1 | 0 | 1 | 1 | 1 | 0 | 1 |",
    ]


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(programs, "LIBRARIES", {})  # which take seconds to import
    file = tmp_path / "programs.md"
    arguments = ["--kinds", "z-losses", "--only", "^z-loss alone$", "--markdown", str(file)]
    assert command.main(arguments) == 0
    assert file.read_text() == capsys.readouterr().out
    assert statuses(file.read_text()) == {"z-loss alone": "fused"}
    monkeypatch.setattr(command, "examine", lambda program: Result(program, wrong="off"))
    assert command.main(arguments) == 1


# ---------------------------------------------------------------- programs of every kind


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS.values())
def test_programs_are_right_and_stay_fused(kind):
    before = statuses(COMMITTED.read_text())
    results = [examine(program) for program in catalog(kinds=[kind])]
    assert {r.program.name: r.wrong for r in results if r.wrong} == {}
    assert before.keys() >= {r.program.name for r in results}
    unfused = [r.program.name for r in results if r.status != "fused"]
    assert [name for name in unfused if before[name] == "fused"] == []


@pytest.mark.full
def test_names_are_unique_among_libraries_too():
    names = [program.name for program in catalog()]
    assert len(set(names)) == len(names)
