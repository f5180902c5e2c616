"""Compiled and interpreted regions against the traced function in float64, in eager."""

from __future__ import annotations

import pytest
import torch

from fxpass.region.compile import functions, interpreted
from tests.support.numerics import FLOOR, error
from tests.unit.region.programs import PROGRAMS

# of no rows, also in eager
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is:UserWarning")

CPU = torch.device("cpu")
ROWS = (33, 8, 1, 0)


def cotangents(region, outputs):
    generator = torch.Generator().manual_seed(1)
    make = lambda o: torch.randn(o.shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [make(outputs[k]).to(outputs[k].dtype) for k in region.tangents]


def eager(program, region, tensors, tangents):
    """Outputs and gradients of the function itself."""
    leaves = [t.clone().requires_grad_(f) for t, f in zip(tensors, program.flags, strict=True)]
    outputs = list(program.function(*leaves))
    wrt = [leaf for leaf in leaves if leaf.requires_grad] if region.tangents else []
    roots = [outputs[k] for k in region.tangents]
    gradients = torch.autograd.grad(roots, wrt, tangents) if wrt else ()
    return [o.detach() for o in outputs], list(gradients)


def results(made, tensors, tangents):
    """Outputs and gradients of a region's functions."""
    region = made.region
    if region.total:
        found = made.both([*tensors, *tangents])
        return found[: region.outputs], found[region.outputs :]
    found = made.forward(list(tensors))
    outputs, saved = found[: region.outputs], found[region.outputs :]
    assert len(saved) == len(made.parts.saved)
    for tensor, of in zip(saved, made.parts.saved, strict=True):
        assert tensor.dtype == of.dtype
    gradients = made.backward([*tensors, *saved, *tangents]) if region.trained else []
    return outputs, gradients


def wide(tensors):
    return [t.double() if t.is_floating_point() else t for t in tensors]


TOTALS = ("cross entropy", "max", "jsd of two heads", "class weights", "two symbolic sizes")
CASES = [(name, False) for name in PROGRAMS] + [(name, True) for name in TOTALS]
# Inductor takes seconds for each: one of every kind of inputs, of outputs and of operations
COMPILED = (
    *("cross entropy", "entropy and argmax", "several labels", "temperature", "class weights"),
    *("teacher", "jsd of two heads", "max", "ties", "margin", "binary", "sort", "top-k"),
    *("several", "own gradient", "assigned", "no gradient", "symbolic classes"),
)
COMPILED_CASES = [(name, total) for name, total in CASES if total or name in COMPILED]


@pytest.mark.parametrize(
    ("how", "name", "total"),
    [
        *(("interpreted", *case) for case in CASES),
        *(("compiled", *case) for case in COMPILED_CASES),
    ],
)
def test_values_and_gradients(how, name, total):
    assert_as_accurate(PROGRAMS[name], torch.float32, how, total)


LOW = ("cross entropy", "entropy and argmax", "max", "ties", "temperature", "jsd of two heads")


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize(
    ("how", "dtype"),
    [("interpreted", torch.bfloat16), ("interpreted", torch.float16), ("compiled", torch.bfloat16)],
)
def test_16_bits(name, how, dtype):
    assert_as_accurate(PROGRAMS[name], dtype, how, False)


def assert_as_accurate(program, dtype, how, total):
    region = program.region(dtype, total)
    made = {"interpreted": interpreted, "compiled": functions}[how](region.text(), CPU)
    for n in ROWS:
        tensors = program.tensors(n, dtype)
        known = program.function(*tensors)
        tangents = cotangents(region, known)
        theirs = eager(program, region, tensors, tangents)
        exact = eager(program, region, wide(tensors), wide(tangents))
        ours = results(made, tensors, tangents)
        for kind, got, near, true in zip(("output", "gradient"), ours, theirs, exact, strict=True):
            assert len(got) == len(near)
            for i, (a, b, c) in enumerate(zip(got, near, true, strict=True)):
                assert a.dtype == b.dtype, (kind, i)
                assert a.shape == b.shape, (kind, i)
                if not a.is_floating_point():
                    assert torch.equal(a, b), (kind, i)
                    continue
                bound = 2 * error(b, c) + FLOOR[dtype]
                assert error(a, c) <= bound, (kind, i, n, error(a, c), bound)
