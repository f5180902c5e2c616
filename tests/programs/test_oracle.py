"""The oracle sees what is fused, what is left of the logits, and whatever is not as eager has it."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch

from fxpass import messages
from tests.programs.catalog import LIBRARIES, MODULES, catalog
from tests.programs.operands import OPERANDS, SIZES, TRAINED
from tests.programs.row import F32, FORMULA, NOTHING, RAISES, REGION, Row
from tests.support import oracle
from tests.support.oracle import Outcome, outcome

# fmt: off
OUTCOMES = {
    "fused": (Row("fused", "F.cross_entropy(z, labels)"), Outcome(FORMULA, 1)),
    "part": (
        Row("part", "hot = F.one_hot(labels, V).float(); "
            "(F.cross_entropy(z, labels), hot.cumsum(-1).cos().sum(-1))"),
        Outcome(FORMULA, 1, left="eq, 2 convert_element_type, cumsum, cos")),
    "kept": (
        Row("kept", "(F.cross_entropy(z, labels), z.detach().sort(0).values[:, 7])"),
        # the loss of logits that stay is computed of them; values and indices
        Outcome(NOTHING, left="mm, _log_softmax, 2 sort", reasons=("aten.sort", messages.ALONG_ROWS))),
    "no": (Row("no", "F.cross_entropy(z.cumsum(0), labels)"),
           Outcome(NOTHING, left="mm, cumsum, _log_softmax", reasons=("cumsum",))),
    "silent": (Row("silent", "z.sort(0).values.sort(-1).values[:, 7]"),
               Outcome(NOTHING, left="mm, 4 sort")),
    "break": (Row("break", "torch._dynamo.graph_break(); F.cross_entropy(z, labels)"),
              Outcome(NOTHING, left="mm, _log_softmax", reasons=("graph_break",))),
    "no head": (Row("no head", "x.sum() + weight.sum()"), Outcome(NOTHING)),
    "a checkpointed graph": (
        Row("a checkpointed graph", "checkpoint(lambda z: z.cumsum(0).sort(-1).values[:, 7], "
            "z.tanh(), use_reentrant=False)"),
        Outcome(NOTHING, left="mm, tanh, cumsum, 2 sort")),
    "raises": (Row("raises", "F.cross_entropy(z, labels[1:])"), Outcome(RAISES)),
}
# fmt: on


@pytest.mark.parametrize("name", OUTCOMES)
def test_what_becomes_of_a_program(name):
    row, expected = OUTCOMES[name]
    found = outcome(row)
    assert not found.wrong
    assert (found.becomes, found.calls) == (expected.becomes, expected.calls)
    assert found.left == expected.left
    assert bool(found.reasons) >= bool(expected.reasons)
    assert all(part in found.reasons[0] for part in expected.reasons)


WRONG = {
    "a value": (lambda loss: loss * 1.001, "output 0: 1.0"),
    "a gradient": (lambda loss: loss.detach() + 2 * (loss - loss.detach()), "gradient of x: 1.0"),
    "a dtype": (lambda loss: loss.double(), "output 0: float64[] for float32[]"),
    "a shape": (lambda loss: loss[None], "output 0: float32[1] for float32[]"),
    "no gradient": (lambda loss: loss.detach(), "gradients: (False,) for (True,)"),
    "nothing flows": (
        lambda loss: loss.detach().requires_grad_(),
        "gradient of x: None for float32[48, 16]",
    ),
    "an error": (lambda loss: loss.view(7), "raises "),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_is_found(name, monkeypatch):
    change, said = WRONG[name]

    def spell(row, compile):
        return compile(lambda *tensors: change(row.program()(*tensors)))

    monkeypatch.setitem(oracle.WAYS, "changed", oracle.Way(spell=spell))
    found = outcome(OUTCOMES["fused"][0], "changed")
    assert found.wrong.startswith(said), found.wrong
    with pytest.raises(AssertionError):
        oracle.check(OUTCOMES["fused"][0], "changed")


def test_an_index_is_exact(monkeypatch):
    row = Row("argmax", "z.argmax(-1)", trained=())
    assert not outcome(row, "bf16").wrong

    def off(row, compile):
        program = compile(row.program())
        return lambda *tensors: program(*tensors) + (torch.arange(SIZES.n) == 0)

    monkeypatch.setitem(oracle.WAYS, "off", oracle.Way(spell=off))
    assert outcome(row, "off").wrong.startswith("output 0: ")


def test_a_write_to_an_operand_is_compared(monkeypatch):
    row = Row("written", "x.detach().mul_(2); x.sum(-1)", trained=())
    assert not outcome(row).wrong
    spell = oracle.Way(spell=lambda row, compile: lambda *tensors: tensors[0].sum(-1) * 2)
    monkeypatch.setitem(oracle.WAYS, "reads", spell)
    assert "x afterwards" in outcome(row, "reads").wrong


@pytest.mark.parametrize(
    "text", ["z = F.linear(x, weight); F.cross_entropy(z, labels)", "z.amax(-1)"]
)
def test_names_that_a_text_assigns_are_its_own(text):
    row = Row("", text)
    assert row.heads == (("z",) if "F.linear" not in text else ())
    assert row.names[:2] == ("x", "weight")


def test_operands_are_rounded_before_they_are_widened():
    wide, narrow = (Row("", "z", dtype=torch.bfloat16).tensors(wide=w)[0] for w in (True, False))
    assert wide.dtype == torch.float64
    assert torch.equal(wide, narrow.double())
    assert Row("", "z").tensors()[0].dtype == F32


def test_rows_name_what_there_is():
    rows = catalog(libraries=False)
    assert len({(row.kind, row.name) for row in rows}) == len(rows)
    assert len({row.kind for row in rows}) == len(MODULES) - len(LIBRARIES)
    for row in rows:
        assert set(row.names) <= OPERANDS.keys()
        assert set(row.gradients) <= TRAINED
        assert {*row.ways, *row.never, *row.computes} <= oracle.WAYS.keys()


@pytest.mark.parametrize("module", ["operands", "row", "catalog"])
def test_examples(module):
    found = doctest.testmod(importlib.import_module(f"tests.programs.{module}"))
    assert found.attempted
    assert not found.failed


def test_a_region_is_told_from_a_formula():
    assert outcome(Row("", "z.sort(-1).values[:, :5].logsumexp(-1)")).becomes == REGION
