"""What the page of extensions shows works; its trainer is in tests/libraries/test_outside.py."""

from __future__ import annotations

import inspect

import torch

from fxpass.formula.expression import parse
from fxpass.formula.functions import FUNCTIONS
from fxpass.kernels import expression
from fxpass.lower.pointwise import POINTWISE
from fxpass.rows import rules
from tests.programs.row import FORMULA, NOTHING, REGION, Row
from tests.support.oracle import FIRST, outcome
from tests.support.pages import EXTENDING, as_module, code_under
from tests.unit.kernels.test_expression import value_and_slope


def test_a_rule(monkeypatch, tmp_path):
    rule, row = code_under(EXTENDING, "A rule for an ATen op")
    row = as_module(row, tmp_path / "row.py").ROW
    assert outcome(row, FIRST).becomes == NOTHING
    monkeypatch.setattr(rules, "RULES", dict(rules.RULES))
    as_module(rule, tmp_path / "bucketize.py")
    found = outcome(row, FIRST)
    assert (found.becomes, found.wrong) == (row.becomes, "")
    assert row.becomes == REGION


def test_a_function(monkeypatch, tmp_path, device):
    (code,) = code_under(EXTENDING, "A function of one logit in the kernel")
    made = as_module(code, tmp_path / "log1p.py")
    row = Row("log1p of the logits", "(z * z).log1p().logsumexp(-1).sin()")
    before = Row("without it", "(z * z * 2).log1p().logsumexp(-1).sin()")
    assert outcome(before, FIRST).becomes == REGION
    monkeypatch.setitem(POINTWISE, "log1p", made.SPELLING)
    monkeypatch.setitem(FUNCTIONS, "log1p", made.FUNCTION)
    source = inspect.getsource(made.log1p.fn)
    monkeypatch.setattr(expression, "LIBRARY", f"{expression.LIBRARY}\n\n{source}")
    found = outcome(row, FIRST)
    assert (found.becomes, found.wrong) == (FORMULA, "")
    z = torch.linspace(0.01, 9, 100, device=device)
    value, slope = value_and_slope(parse("log1p(z)"), z)
    torch.testing.assert_close(value, z.log1p(), rtol=1e-6, atol=0)
    torch.testing.assert_close(slope, 1 / (1 + z), rtol=1e-6, atol=0)
