"""What Inductor makes of functions of rows is as near to float64 as what is interpreted."""

from __future__ import annotations

import pytest
import torch

from fxpass.formula.dtypes import LOW_PRECISION
from fxpass.region.compile import RowFunction
from fxpass.region.run import Interpreter
from tests.support.numerics import FLOOR, error
from tests.unit.region.programs import CPU, PROGRAMS, functions

# Inductor takes seconds for each
LOW = ("entropy and argmax", "largest", "ties", "divergence")
CASES = [
    *((name, "eager") for name in PROGRAMS),
    *((name, "bf16") for name in LOW),
    *(("largest", "f16"), ("class weights", "dynamic")),
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_compiled(name, way):
    made = functions(name, way)
    assert made
    for function in made:
        compiled = RowFunction(function.graph, CPU, compiled=True)
        for n in (48, 7):
            tensors = function.some(n)
            wide = [t.double() if t.is_floating_point() else t for t in tensors]
            exact = Interpreter(function.wide(), CPU)(wide)
            near = Interpreter(function.graph, CPU)(list(tensors))
            for got, other, true in zip(compiled(list(tensors)), near, exact, strict=True):
                assert (got.dtype, got.shape) == (other.dtype, other.shape)
                if got.is_floating_point():
                    assert error(got, true) <= 2 * error(other, true) + FLOOR[got.dtype]
                else:
                    assert torch.equal(got, other)
        # what would be misrounded is not compiled: see compile.py
        low = any(t.dtype in LOW_PRECISION for t in function.tensors)
        assert compiled.kernels or (low and not compiled.compilable)
