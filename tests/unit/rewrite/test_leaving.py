"""Logits that leave: what the rows of tests/programs/rows/leaving.py cannot state."""

from __future__ import annotations

import pytest
import torch

from fxpass import messages
from fxpass.deferred.tensor import DeferredLogits
from tests.programs.row import Row
from tests.support.programs import report_of

THEMSELVES = Row("themselves", "(F.cross_entropy(z, labels), z, z[-1])")
# Of what the joint graph leaves as it is, Dynamo's graph shows nothing.
UNFUSED = Row(
    "beside the largest of each column",
    "(F.cross_entropy(z, labels) + z.sort(0).values[:3].sum(), z)",
)
SECOND = Row(
    "beside another head",
    "y = F.linear(x * 2, weight); (F.cross_entropy(z, labels) + z.sort(0).values[:3].sum(), z, "
    "F.cross_entropy(y, labels), y)",
)


def compile_with(logits, row=THEMSELVES, **options):
    options = {"fusedce.inner": "eager", "fusedce.logits": logits} | options
    return torch.compile(row.program(), backend="fusedce", options=options)


@pytest.mark.parametrize(
    ("row", "inner", "deferred"),
    [
        *((UNFUSED, inner, [False]) for inner in ("eager", "aot_eager", "inductor")),
        *((SECOND, inner, [False, True]) for inner in ("eager", "aot_eager")),
    ],
)
def test_logits_that_turn_out_to_exist_are_returned_as_they_are(row, inner, deferred):
    options = {"fusedce.inner": inner, "fusedce.min_logits_mb": 0}
    ours, eager = (
        run(*row.tensors()) for run in (compile_with("auto", row, **options), row.program())
    )
    assert [isinstance(t, DeferredLogits) for t in ours if t.dim() > 1] == deferred
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(one * 1, other)


def test_a_report_says_why_they_exist():
    (rejection,) = report_of(UNFUSED.program(), *UNFUSED.tensors()).rejections
    assert "aten.sort" in rejection.reason
    assert "leave" in rejection.reason or messages.ALONG_ROWS in rejection.reason


def test_logits_that_are_dropped_have_a_shape_alone():
    loss, z, _ = compile_with("drop")(*THEMSELVES.tensors())
    torch.testing.assert_close(loss, THEMSELVES.program()(*THEMSELVES.tensors())[0])
    assert z.shape == (48, 97)
    with pytest.raises(RuntimeError, match="FUSEDCE_LOGITS"):
        z.sum()


def test_outputs_that_share_memory_still_do():
    for program in (THEMSELVES.program(), compile_with("auto")):
        _, z, row = program(*THEMSELVES.tensors())
        with torch.no_grad():
            z.zero_()
        assert not row.any()
