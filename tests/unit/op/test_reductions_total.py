"""The total of ``fxpass::class_reductions``: a weighted sum over the rows, gradients in forward."""

from __future__ import annotations

import pytest
import torch

from fxpass.op.reductions import class_reductions
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.outputs import Moment
from fxpass.spec.reductions import REVISION, Reductions
from tests.support.allocations import Allocations
from tests.support.reduction_cases import DTYPES, TOTALS, TRANSFORMS, D, N, V, check_total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("total", TOTALS.values(), ids=TOTALS)
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_total_and_its_gradients(chunks, total, dtype, request):
    if chunks > 1:
        request.getfixturevalue("few")
    for flags in (0, 1, 2, 4, 7):
        scaled, many, zeros = (bool(flags & bit) for bit in (1, 2, 4))
        for transform in TRANSFORMS if flags == 7 else ("z",):
            check_total(total, dtype, transform, (), scaled, many, zeros)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("total", TOTALS.values(), ids=TOTALS)
def test_other_outputs_are_what_they_are_without_a_total(total, dtype):
    outputs = tuple(o for o in ("lse", "max", "argmax", Moment(1, 1)))
    if Reductions((), total=tuple(total)).picked:
        outputs = ("pick", *outputs)
    check_total(total, dtype, outputs=outputs, zeros=True)
    check_total(total, dtype, "3*tanh(z/3)", outputs, scaled=True)


def operands(dtype=torch.float32, rows=N):
    x, w = torch.randn(rows, D, dtype=dtype), torch.randn(V, D, dtype=dtype)
    coef = torch.full((1, rows), 1 / max(1, rows), dtype=compute_dtype(dtype))
    return x.requires_grad_(), w.requires_grad_(), torch.randint(V, (rows,)), coef


OPERATOR = torch.ops.fxpass.class_reductions.default
LOSS = "r6 gradients=x,weight total=pick"


def test_rows_that_add_nothing_are_not_multiplied():
    """Their values do not matter either, as those of ignored rows."""
    x, w, picks, coef = operands(rows=64)
    coef[:, 4:] = 0
    with torch.no_grad():
        x[4:] = float("nan")
    out = class_reductions(x, w, None, None, picks, [], coef, None, LOSS)["total"]
    out.backward()
    few = x.detach()[:4].clone().requires_grad_()
    loss = (few @ w.detach().t()).log_softmax(1).gather(1, picks[:4, None]).sum() / 64
    loss.backward()
    assert torch.allclose(out, loss)
    assert torch.allclose(x.grad[:4], few.grad, atol=1e-6)
    assert not x.grad[4:].any()
    assert w.grad.isfinite().all()


@pytest.mark.parametrize("coefficient", [0.0, 1.0])
def test_no_rows_or_none_that_count(coefficient):
    for rows in (0, N):
        x, w, picks, coef = operands(rows=rows)
        total = class_reductions(x, w, None, None, picks, [], coef * coefficient, None, LOSS)[
            "total"
        ]
        if rows and coefficient:
            continue
        total.backward()
        assert total.item() == 0
        assert not w.grad.any()
        assert x.grad.shape == x.shape


def test_two_backwards():
    x, w, picks, coef = operands()
    total = class_reductions(x, w, None, None, picks, [], coef, None, LOSS)["total"]
    first = torch.autograd.grad(total * 3, (x, w), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(total * 3, (x, w))))
    total = class_reductions(x, w, None, None, picks, [], coef, None, LOSS)["total"]
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(total, (x, w), create_graph=True)


def test_an_fp16_gradient_below_its_smallest_number():
    """A scaled loss brings it back: it is saved in f32."""
    x, w, picks, coef = operands(torch.float16)
    total = class_reductions(x, w, None, None, picks, [], coef * 1e-7, None, LOSS)["total"]
    (grad,) = torch.autograd.grad(total * 2.0**16, w)
    wide = w.detach().float().requires_grad_()
    loss = (x.detach().float() @ wide.t()).log_softmax(1).gather(1, picks[:, None]).mean()
    (exact,) = torch.autograd.grad(loss * 1e-7 * 2**16, wide)
    assert torch.allclose(grad.float(), exact, rtol=2e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    x, w, picks, coef = operands(dtype)
    coef.neg_()  # a positive total: backward in eager overwrites what it multiplies by -1
    torch.library.opcheck(OPERATOR, (x, w, None, None, picks, [], coef, None, LOSS))
    # a float first: opcheck adds the other results to it
    spec = "r6 outputs=max;argmax gradients=weight total=pick"
    frozen = (x.detach(), w, None, None, picks, [], coef, None, spec)
    torch.library.opcheck(OPERATOR, frozen)


def test_one_chunk_of_logits_and_no_copy():
    """The logits' memory becomes the gradient: nothing of its size beside it."""
    x, w = torch.randn(300, 8), torch.randn(4001, 8)
    picks, coef = torch.randint(4001, (300,)), torch.full((1, 300), 1 / 300)
    with torch.no_grad(), Allocations() as allocated:
        out = class_reductions(x, w, None, None, picks, [], coef, None, LOSS)
    assert allocated.peak([*out.values()]) < 1.2 * 300 * 4001 * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gradients=scale total=pick", "a total has gradients of x, weight, bias"),
        ("gradients=x total=max", "max cannot be added up over the rows"),
        ("gradients=x total=argmax", "argmax cannot be added up over the rows"),
        ("gradients=x total=pick;pick", "an output is named twice"),
        ("gradients=x", "a call without outputs"),
    ],
)
def test_no_spec(text, message):
    with pytest.raises(ValueError, match="not reductions") as raised:
        Reductions.parse(f"{REVISION} {text}")
    assert message in str(raised.value.__cause__)


@pytest.mark.parametrize(
    ("coef", "spec", "message"),
    [
        (None, LOSS, "needs coef for a total, and only for it"),
        (torch.ones(1, N), "r6 outputs=pick", "needs coef for a total, and only for it"),
        (torch.ones(N), LOSS, r"needs coef \[1, 7\]"),
        (torch.ones(2, N), LOSS, r"needs coef \[1, 7\]"),
        (torch.ones(1, N).double(), LOSS, r"needs coef \[1, 7\] torch.float32"),
    ],
)
def test_bad_coefficients(coef, spec, message):
    x, w, picks, _ = operands()
    with pytest.raises(ValueError, match=message):
        class_reductions(x.detach(), w.detach(), None, None, picks, [], coef, None, spec)


def test_coefficients_with_a_gradient():
    x, w, picks, coef = operands()
    with pytest.raises(RuntimeError, match="coef requires a gradient that the spec does not name"):
        class_reductions(x, w, None, None, picks, [], coef.requires_grad_(), None, LOSS)


def test_a_total_without_gradients():
    """As in evaluation: rows without a coefficient are not computed."""
    x, w, picks = torch.randn(6, 4), torch.randn(9, 4), torch.arange(6)
    x[0] = float("nan")
    coef = torch.full((1, 6), -0.2)
    coef[0, :1] = 0
    total = class_reductions(x, w, None, None, picks, [], coef, None, "r6 total=pick")["total"]
    want = torch.nn.functional.cross_entropy(x[1:] @ w.t(), picks[1:])
    torch.testing.assert_close(total, want)


@pytest.mark.parametrize("exponent", [-60, -85, -95, -100, -104])
@pytest.mark.parametrize("v", [V, 1003, 20001])
def test_coefficients_that_are_nearly_zero(v, exponent):
    """Those of a discount, for example. Divided by the sum of exponentials, they would be 0."""
    torch.manual_seed(0)
    x, w, picks = torch.randn(3, D), 0.1 * torch.randn(v, D), torch.tensor([1, 2, 3])
    coef = torch.tensor([[0.0, 0.0, exponent]]).exp()
    leaves = [[t.clone().requires_grad_() for t in (x, w)] for _ in range(2)]
    found = class_reductions(*leaves[0], None, None, picks, [], coef, None, LOSS)["total"]
    log = (leaves[1][0] @ leaves[1][1].T).log_softmax(1)
    loss = (log.gather(1, picks[:, None]).T * coef).sum()
    found.backward()
    loss.backward()
    (of_x, of_w), (exact_x, exact_w) = ((t.grad for t in pair) for pair in leaves)
    # some units of the smallest denormal number
    torch.testing.assert_close(of_x[2], exact_x[2], rtol=1e-4, atol=1e-44)
    torch.testing.assert_close(of_x[:2], exact_x[:2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_w, exact_w, rtol=1e-5, atol=1e-6)
