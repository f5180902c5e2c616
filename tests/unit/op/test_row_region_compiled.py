"""``fxpass::row_region`` compiled, what it refuses, and the memory that it takes."""

from __future__ import annotations

import expecttest
import pytest
import torch

from fxpass.op import row_region as module
from fxpass.op.row_region import row_region
from fxpass.region.text import RowRegion
from tests.support.allocations import Allocations
from tests.unit.op.test_row_region import (
    F32,
    OPERATORS,
    N,
    assert_as_in_eager,
    cotangents,
    eager,
    names,
    program_itself,
    tensors_of,
    text_of,
    totals,
)


def test_the_operators():
    """Graphs in compile caches call them like this."""
    operators = (OPERATORS.row_region, OPERATORS.row_region_backward)
    expecttest.assert_expected_inline(
        "\n".join(str(operator.default._schema) for operator in operators),
        """\
fxpass::row_region(Tensor[] tensors, str region) -> Tensor[]
fxpass::row_region_backward(Tensor[] grads, Tensor[] saved, Tensor[] tensors, str region) -> Tensor[]""",
    )


@names
@totals
def test_opcheck(name, total):
    dtype = F32
    text = text_of(name, dtype, total)
    region = RowRegion.parse(text)
    tensors = tensors_of(name, dtype)
    coefs = cotangents(eager(name, tensors), text)
    torch.library.opcheck(OPERATORS.row_region.default, ([*tensors, *coefs * total], text))
    if not total:
        saved = row_region(tensors, text)[region.outputs :]
        arguments = coefs, saved, tensors, text
        torch.library.opcheck(OPERATORS.row_region_backward.default, arguments)


@pytest.mark.usefixtures("small_regions")
@names
@totals
@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [
        ("aot_eager", None),
        ("aot_eager", True),
        pytest.param("inductor", None, marks=pytest.mark.full),
    ],
)
def test_compiled(name, total, backend, dynamic):
    text = text_of(name, total=total)
    compiled = torch.compile(
        lambda tensors: row_region(tensors, text), backend=backend, dynamic=dynamic, fullgraph=True
    )
    region = RowRegion.parse(text)
    for n in (N, 17) if dynamic else (N,):
        tensors = tensors_of(name, n=n, text=text)
        leaves = [tensors[i] for i in region.trained]
        wanted, gradients = program_itself(name, tensors, text)
        coefs = cotangents(wanted, text)
        found = compiled([*tensors, *coefs * total])
        some, seeds = [found[k] for k in region.tangents], coefs
        if total:
            some, seeds = [found[region.outputs]], None
        torch.testing.assert_close(found[: region.outputs], wanted)
        got = torch.autograd.grad(some, leaves, seeds)
        torch.testing.assert_close(list(got), gradients)


@pytest.mark.parametrize("total", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_region_that_inductor_compiles(total):
    name = "a divergence"
    text = text_of(name, F32, total, compiled=True)
    tensors = tensors_of(name, F32, text=text)
    assert_as_in_eager(name, tensors, text)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:-1], r"needs 6 tensors \(x of head 0, .*row operand 0\), got 5"),
        (
            lambda t: [t[0][:, 1:], *t[1:]],
            r"weight of head 0 float64\[37, 4\], got float64\[37, 5\]",
        ),
        (lambda t: [t[0], t[1][1:], *t[2:]], r"weight of head 0 .*got float64\[36, 5\]"),
        (lambda t: [t[0], t[1].float(), *t[2:]], r"weight of head 0 float64.*got float32"),
        (lambda t: [t[0].float(), *t[1:]], r"x of head 0 float64.*got float32\[13, 5\]"),
        (lambda t: [*t[:2], t[2][1:], *t[3:]], r"x of head 1 float64\[13, 6\], got float64\[12"),
        (lambda t: [*t[:4], t[4][None], t[5]], r"bias of head 1 float64\[37\], got float64\[1, 37"),
        (lambda t: [*t[:5], t[5].int()], r"row operand 0 int64\[13\], got int32\[13\]"),
        (lambda t: [*t[:5], t[5].to("meta")], "tensors of one device, got x of head 0 on cpu"),
    ],
)
def test_tensors_that_do_not_fit(change, message):
    text, tensors = text_of("a divergence"), tensors_of("a divergence")
    with pytest.raises(ValueError, match=message):
        row_region(change(tensors), text)


def test_texts_and_gradients_that_do_not_fit():
    name = "a mean of squares"
    text, tensors = text_of(name), tensors_of(name)
    with pytest.raises(ValueError, match="no operation"):
        row_region(tensors, text.replace("aten.", "aten.no_"))
    with pytest.raises(ValueError, match="nothing to add up"):
        row_region(tensors, text_of(name, frozen=(0, 1)).replace("total=0", "total=1"))
    backward = OPERATORS.row_region_backward
    with pytest.raises(ValueError, match=r"gradient 0 float64\[13\], got float32\[13\]"):
        backward([torch.ones(N)], [], tensors, text)
    with pytest.raises(ValueError, match="needs 1 gradients, got 0"):
        backward([], [], tensors, text)


# ---------------------------------------------------------------- memory


@pytest.mark.full
def test_memory():
    """Two heads with [1024, 32000] logits each: their divergence and a cross-entropy."""
    name, n, v = "a divergence", 1024, 32000
    late, at_once = (text_of(name, F32, total, symbolic=True) for total in (False, True))
    torch.manual_seed(0)
    tensors = [torch.randn(n, 256), torch.randn(v, 256), torch.randn(n, 256), torch.randn(v, 256)]
    tensors = [t.mul_(0.1).requires_grad_() for t in tensors]
    tensors += [torch.zeros(v, requires_grad=True), torch.randint(v, (n,))]
    coefs = [torch.full((n,), 1 / n)] * 3

    def program():
        outputs = eager(name, tensors)
        some = [outputs[k] for k in (0, 1, 3)]
        return [*outputs, *torch.autograd.grad(some, tensors[:5], coefs)]

    def in_backward():  # below the operator, within which allocations are not seen
        outputs = module._run(tensors, late)
        return [*outputs, *module._run_backward(coefs, outputs[4:], tensors, late)]

    def in_forward():
        return module._run([*tensors, *coefs], at_once)

    def peak(run) -> int:
        with torch.set_grad_enabled(run is program), Allocations() as allocated:
            outputs = run()
        return allocated.peak(outputs)

    theirs = peak(program)
    # the budget is 128 MiB, an eighth
    assert peak(in_backward) < 0.15 * theirs
    assert peak(in_forward) < 0.15 * theirs
