"""Logits that leave: what the rows of tests/programs/rows/leaving.py cannot state."""

from __future__ import annotations

import pytest
import torch

from tests.programs.row import Row

THEMSELVES = Row("themselves", "(F.cross_entropy(z, labels), z, z[-1])")


def compile_with(logits):
    options = {"fusedce.inner": "eager", "fusedce.logits": logits}
    return torch.compile(THEMSELVES.program(), backend="fusedce", options=options)


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
