"""The engine of formulas: which gradients it returns, heads without classes, bad input."""

from __future__ import annotations

import pytest
import torch

from fxpass.formula.operands import Operands
from fxpass.formula.outputs import Moment
from fxpass.op import run
from tests.support.engine import reduced
from tests.support.reduction_cases import DTYPES, D, N, V, case
from tests.support.specs import spec_of


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_only_detached_outputs_read_may_be_overwritten(dtype):
    """As in eager, whose metrics under no_grad save nothing."""
    metrics = (Moment(1, 0, 1), "at")
    found = case(("lse", Moment(1, 1, 0), *metrics), dtype, many=True, detached=metrics)
    tensors = [t.requires_grad_(name not in found.frozen) for name, t in found.tensors.items()]
    leaves = [t for t in tensors if t.requires_grad]
    rows = found.fused(*tensors)
    want = torch.autograd.grad(rows.sum(), leaves, retain_graph=True)
    assert found.picks is not None
    found.picks.fill_(-1)
    found.tensors["given1"].fill_(float("nan"))
    got = torch.autograd.grad(rows.sum(), leaves)
    assert all(map(torch.equal, got, want))


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("index", [-1, -100, V, 2**40])
@pytest.mark.parametrize("many", [False, True])
def test_a_pick_that_is_no_class(many, index):
    found = case(["pick"], many=many)
    assert found.picks is not None
    found.picks[-1] = index
    with pytest.raises(IndexError, match=f"class {index} is out of bounds: there are {V} classes"):
        found.fused(*found.tensors.values())


F32, META = torch.float32, torch.device("meta")
DEFAULT = {
    "x": torch.ones(N, D),
    "weight": torch.ones(V, D),
    "bias": None,
    "scale": None,
    "picks": None,
    "given": (),
    "coef": None,
    "spec": "outputs=lse",
}
PICK = "outputs=pick"
WRONG = {
    "needs x .N, D. and weight": [
        {"x": torch.ones(D)},
        {"x": torch.ones(1, N, D)},
        {"weight": torch.ones(V)},
        {"weight": torch.ones(V, D + 1)},
    ],
    "of one floating-point dtype": [
        {"x": torch.ones(N, D, dtype=torch.float64)},
        {"x": torch.ones(N, D).long(), "weight": torch.ones(V, D).long()},
        {"x": torch.ones(N, D).to(torch.complex64), "weight": torch.ones(V, D).to(torch.complex64)},
    ],
    "needs tensors of one device, got x on cpu, weight on meta": [
        {"weight": torch.ones(V, D, device=META)},
    ],
    "needs tensors of one device": [
        {"bias": torch.ones(V, device=META)},
        {"scale": torch.ones(N, device=META)},
        {"picks": torch.ones(N, device=META).long(), "spec": PICK},
        {"given": (torch.ones(V, device=META),)},
    ],
    rf"needs bias \[{V}\], got": [{"bias": torch.ones(1, V)}, {"bias": torch.ones(1)}],
    "needs a bias of": [{"bias": torch.ones(V).double()}, {"bias": torch.ones(V).half()}],
    rf"needs scale \[{N}\], got": [{"scale": torch.ones(())}, {"scale": torch.ones(N, 1)}],
    "needs a scale of torch.float32, got torch.float64": [{"scale": torch.ones(N).double()}],
    "needs picks where outputs read them": [
        {"spec": PICK},
        {"spec": "outputs=at"},
        {"picks": torch.zeros(N).long()},
    ],
    rf"needs picks \[{N}\] or \[{N}, K\] int64": [
        {"picks": torch.zeros(N).int(), "spec": PICK},
        {"picks": torch.zeros(N), "spec": PICK},
        {"picks": torch.zeros(N + 1).long(), "spec": PICK},
        {"picks": torch.zeros(()).long(), "spec": PICK},
        {"picks": torch.zeros(N, 2, 2).long(), "spec": PICK},
    ],
    rf"needs given0 \[{V}\] or \[{N}, {V}\], got": [
        {"given": (torch.ones(N),)},
        {"given": (torch.ones(1, V),)},
        {"given": (torch.ones(()),)},
    ],
    "needs a floating-point given1, got torch.int64": [
        {"given": (torch.ones(V), torch.ones(V).long())}
    ],
    "needs 3 given values, got 1": [
        {"given": (torch.ones(V),), "spec": "outputs=moment(1,0,2)"},
        {"given": (torch.ones(V),), "spec": "outputs=lse transform=given2*z"},
    ],
    "cannot compute gradients of bias: absent": [{"spec": "outputs=lse gradients=x,bias"}],
}


@pytest.mark.parametrize(
    ("message", "changes"),
    [(message, changes) for message, cases in WRONG.items() for changes in cases],
)
def test_operands_that_do_not_fit(message, changes):
    *operands, text = (DEFAULT | changes).values()

    def refused():
        run.reduce_head(Operands(*operands), spec_of(text))

    with pytest.raises(ValueError, match=message):
        refused()


def test_a_head_without_classes_adds_nothing():
    x, w = torch.ones(3, 4, requires_grad=True), torch.ones(0, 4, requires_grad=True)
    picks = torch.zeros(3, dtype=torch.int64)
    operands = Operands(x, w, None, None, picks, ())
    found = reduced(operands, "outputs=pick;argmax;max;lse gradients=x,weight detached=max")
    pick, most, lse = found["rows"]
    assert (pick == 0).all()
    assert (torch.stack([most, lse]) == -float("inf")).all()
    assert found["indices"].tolist() == [[0] * 3]
    for operand, grad in zip((x, w), torch.autograd.grad(pick.sum(), (x, w)), strict=True):
        assert torch.equal(grad, torch.zeros_like(operand))


def test_a_total_of_no_classes():
    x, w = torch.ones(3, 4), torch.ones(0, 4)
    operands = Operands(x, w, None, None, None, (), torch.ones(1, 3))
    spec = spec_of("outputs=moment(1,1) gradients=x,weight total=moment(1,1)")
    out, grads = run.reduce_head(operands, spec)
    assert out.rows.tolist() == [[0.0] * 3]
    assert torch.equal(grads["x"], torch.zeros_like(x))
    assert torch.equal(grads["weight"], w)


def test_few_rows_beside_outputs_without_a_gradient():
    """Backward has no operands of these outputs."""
    found = case(("pick", "lse"), torch.float32)
    x, w = (found.tensors[name].detach().requires_grad_() for name in ("x", "weight"))
    operands = Operands(x, w, None, None, found.picks, ())
    rows = reduced(operands, "outputs=pick;lse;max gradients=x,weight detached=pick;max")["rows"]
    upstream = torch.zeros(len(x))
    upstream[0] = 2
    got = torch.autograd.grad(rows, (x, w), torch.stack([upstream, upstream, 0 * upstream]))
    lse = (x @ w.t()).logsumexp(1)
    torch.testing.assert_close(got, torch.autograd.grad(lse, (x, w), upstream))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_gradient_add_nothing(dtype):
    """Their lse may be infinite: where a program masks all classes of a row."""
    found = case(("pick",), dtype, bias=dtype)
    x, w, b = (found.tensors[name] for name in ("x", "weight", "bias"))
    b = torch.full_like(b, -float("inf")).requires_grad_()
    operands = Operands(x, w, b, None, found.picks, ())
    rows = reduced(operands, "outputs=pick gradients=bias")["rows"]
    assert torch.equal(
        torch.autograd.grad((rows * 0).nan_to_num().sum(), b)[0], torch.zeros_like(b)
    )
