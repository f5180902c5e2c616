"""How logits are computed in parts: offsets, buffers.

What is computed is in ``test_reductions.py``.
"""

from __future__ import annotations

import pytest
import torch

from fxpass.formula import expression
from fxpass.formula.operands import Operands
from fxpass.formula.outputs import Moment
from fxpass.formula.reductions import Reductions
from fxpass.kernels import chunked, reductions, render
from fxpass.plan.plan import Plan
from tests.support import without_data
from tests.support.allocations import Allocations
from tests.support.specs import spec_of

# NumPy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def operands(n, v, dtype=torch.float32, d=5, bias=None, total=None, **more) -> Operands:
    """Of picks, and coefficients of a total of so many outputs."""
    x, weight, picks = torch.randn(n, d), torch.randn(v, d), torch.randint(v, (n,))
    bias = None if bias is None else torch.randn(v).to(bias)
    coef = None if total is None else torch.randn(total, n)
    given = Operands(x.to(dtype), weight.to(dtype), bias, None, picks, (), coef)
    return given._replace(**more)


def plan(rows: int = 4096, classes: int = 1 << 20, strategy: str = "tiled") -> Plan:
    return Plan("triton", strategy, rows=rows, classes=classes)


LOSS = Reductions(("pick",), gradients=("x", "weight"), total=("pick",))
EVALUATED = Reductions(("pick",))
ROWS = Reductions(("pick", "lse"), gradients=("x", "weight", "bias"))

FAR = 1 << 24  # elements from row to row: row 128 starts at element 2**31


def far_rows(path, rows, v, dtype):
    """``[rows, v]`` in a file of holes, so far apart that their offsets pass 2**31.

    As much room lies before them, so that offsets that wrap around would read and write holes.
    """
    before, size = 1 << 31, (1 << 31) + rows * FAR
    whole = torch.from_file(str(path), shared=True, size=size, dtype=dtype)
    return whole.as_strided((rows, v), (FAR, 1), before)


def test_offsets_beyond_2_31(tmp_path, device):
    """Of the logits, and of weights of moments: products of numbers that fit 32 bits each."""
    if device.type == "cuda":
        pytest.skip("a GPU has no memory with holes")
    rows, v = 131, 16
    logits, given = torch.randn(rows, v), torch.rand(rows, v)
    chunk = far_rows(tmp_path / "logits", rows, v, torch.float32)
    far = far_rows(tmp_path / "given", rows, v, torch.float32)
    chunk.copy_(logits)
    far.copy_(given)
    spec = spec_of("outputs=moment(0,1,0) gradients=x total=moment(0,1,0)")
    kernel = render.reductions_kernel(spec, features=render.Features(given=(True,), whole_row=True))
    outputs = torch.empty(1, rows)
    chunked.jit_function(kernel)[(rows,)](
        logits=chunk,
        given0=far,
        given0_stride=FAR,
        given0_step=1,
        outputs=outputs,
        incoming=torch.ones(1, rows),
        stride=FAR,
        N=rows,
        V=v,
        BLOCK_V=16,
        num_warps=1,
    )
    log = logits.log_softmax(1)
    torch.testing.assert_close(outputs[0], (given * log).sum(1), rtol=1e-5, atol=1e-5)
    gradient = (given - log.exp() * given.sum(1, keepdim=True)) * render.GAIN
    torch.testing.assert_close(chunk.clone(), gradient, rtol=1e-4, atol=1e-2)


# ---------------------------------------------------------------- how it is walked


@pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 1000, 4097, 12289])
@pytest.mark.parametrize("rows", [1, 3, 64, 128, 1000, 4096])
def test_chunks_and_slices_are_few_and_none_is_too_large(n, rows):
    parts = chunked.row_parts(without_data.operands(n, 1, 9, torch.float32), rows)
    assert all(part.classes == slice(0, 9) for part in parts)
    some = chunked.class_parts(without_data.operands(9, 1, n, torch.float32), rows)
    assert all(part.rows == slice(0, 9) for part in some)
    for found in ([part.rows for part in parts], [part.classes for part in some]):
        assert [i for one in found for i in range(one.start, one.stop)] == list(range(n))
        assert all(one.stop - one.start <= rows for one in found)
        assert len(found) <= -(-n // rows)


@pytest.mark.parametrize("rows", [3, 4096])
def test_the_buffer_is_no_larger_than_the_chunks(device, rows):
    v = 1000  # to the next multiple of 16
    with device:
        given = operands(7, v, total=1)
    spec = Reductions((), gradients=("x",), total=("pick",))
    with Allocations() as allocations:
        out, grads = reductions.forward(given, spec, plan(rows))
    of_gemms = 2 * min(7, rows) * v if device.type == "cpu" else 0  # which have no out= there
    allowed = (min(7, rows) * 1008 + of_gemms) * 4 + 1000
    assert allocations.peak([*out, *grads.values()]) <= allowed


@pytest.mark.parametrize("classes", [100, 4096])
def test_the_buffer_is_no_larger_than_a_slice(device, classes):
    v = 1000
    with device:
        given = operands(7, v)
        out, _ = reductions.forward(given, ROWS, plan())
        incoming = torch.ones_like(out.rows)
    with Allocations() as allocations:
        grads = reductions.backward(given, ROWS, plan(classes=classes), out, incoming)
    columns = min(1008, -(-classes // 16) * 16)
    of_gemms = 2 * 7 * min(v, classes) if device.type == "cpu" else 0
    of_bias = columns  # its sum of the rows
    bound = (7 * columns + of_gemms + of_bias) * 4 + 1000
    assert allocations.peak([*grads.values()]) <= bound


@pytest.mark.parametrize("shape", [(3, 5, 37), (3, 5, 8200)], ids=["whole", "blocked"])
def test_one_value_of_each_row_is_not_copied(device, shape):
    n, d, v = shape
    with device:
        x, weight, row = torch.randn(n, d), torch.randn(v, d), torch.randn(n, 1)
        bias = torch.randn(1).expand(v)
    values = row.expand(n, v), torch.randn(v, device=device), row.square().expand(n, v)
    spec = Reductions(("lse", Moment(1, 0, 2)), expression.parse("z-given0*given1"), ("x",))
    given = Operands(x, weight, bias, None, None, values)
    with Allocations() as allocations:
        out, _ = reductions.forward(given, spec, plan(rows=1))
    of_gemms = v if device.type == "cpu" else 0  # which has no out= there
    assert allocations.peak(out) <= (v + 16 + of_gemms) * 4 + 1000
    z = x.double() @ weight.double().T + bias
    want = torch.stack([(z - row * values[1]).logsumexp(1), row.squeeze(1) ** 2])
    torch.testing.assert_close(out.rows, want.float(), rtol=1e-5, atol=1e-4)


def test_source_is_a_file(device):
    kernel = render.reductions_kernel(Reductions(("lse",)))
    function = chunked.jit_function(kernel)
    with open(function.fn.__code__.co_filename) as file:
        assert file.read().strip() == kernel.source.strip()
    assert chunked.jit_function(render.reductions_kernel(Reductions(("lse",)))) is function
