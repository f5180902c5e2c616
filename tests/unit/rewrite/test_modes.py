"""Modes between linear and loss: what the rows of tests/programs/rows/modes.py cannot state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.programs.row import FORMULA, NOTHING, Row
from tests.support.numerics import error
from tests.support.programs import (
    CLASS_REDUCTIONS,
    DECLINED,
    fused_as,
    inputs,
    last,
    same,
)


def compile_with(inner, program):
    return torch.compile(program, backend="fusedce", options={"fusedce.inner": inner})


def test_other_graphs_of_the_process_compile_after_a_block_of_inference_mode():
    """AOTAutograd raises for views there, and then for every other graph."""

    def program(x, weight, labels):
        with torch.inference_mode():
            picked = last(F.linear(x, weight)).log_softmax(-1)[:, 0]
        return F.cross_entropy(last(F.linear(x, weight)), labels.view(-1)), picked

    args = inputs()
    compile_with("aot_eager", program)(*args)
    torch.compile(torch.sin, backend="aot_eager")(args[0])


def test_a_narrowing_cast_is_not_repeated():
    """Logits cast to bf16 lose digits in eager; the fused loss is nearer to the exact one."""
    row = Row("narrow", "F.cross_entropy(z.to(torch.bfloat16).float(), labels)")
    exact = row.program(wide=True)(*row.tensors(wide=True))
    eager = error(row.program()(*row.tensors()), exact)
    assert error(compile_with("eager", row.program())(*row.tensors()), exact) < eager


# fmt: off
# Graphs of torch.func, which the oracle cannot run a second time.
TRANSFORMS = (
    Row("a loss per example by vmap",
        "torch.func.vmap(lambda h, t: F.cross_entropy(F.linear(h, weight), t))"
        "(x.view(B, T, D), tokens)", trained=()),
    Row("a gradient by torch.func",
        "torch.func.grad(lambda w: F.cross_entropy(F.linear(x, w), labels))(weight)", trained=()),
    # as transformers make attention masks: what wraps tensors writes to none
    Row("transforms before the head",
        "few = torch.vmap(torch.vmap(lambda label: label < 50))(tokens)\n"
        "h = torch.vmap(torch.func.grad(lambda row: row.square().sum()))(x)\n"
        "F.cross_entropy(F.linear(h * few.view(-1, 1), weight), labels)"),
    # the call stands after the transform, in which no tensor may require gradients
    Row("labels of a transform",
        "classes = torch.vmap(lambda label: label // 2)(labels); z[torch.arange(N), classes].mean()"),
    Row("a reduction in a transform",
        "torch.vmap(lambda label: z.logsumexp(-1) * label)(labels)",
        NOTHING),
)
# fmt: on


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("row", TRANSFORMS, ids=lambda row: row.name)
def test_transforms(row, inner):
    kinds = {FORMULA: CLASS_REDUCTIONS, NOTHING: DECLINED}
    expected = kinds[row.becomes]
    if inner == "eager":
        assert fused_as(row.program(), *row.tensors()) == expected
    same(row.program(), *row.tensors(), inner=inner)
