"""``fxpass::class_reductions`` as an operator: schema, fake, autograd, bad input."""

from __future__ import annotations

import dataclasses

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from fxpass.op.kept import saved_logits
from fxpass.op.reductions import class_reductions
from fxpass.spec.outputs import Moment
from fxpass.spec.reductions import REVISION
from tests.support.pairs import in_pairs
from tests.support.reduction_cases import (
    COMBINATIONS,
    DTYPES,
    Case,
    D,
    N,
    V,
    case,
)

OPERATORS = torch.ops.fxpass


def test_the_operators_of_this_revision():
    """Graphs in compile caches call them like this: another schema needs another revision, unless
    what is new has a default."""
    operators = (OPERATORS.class_reductions, OPERATORS.class_reductions_backward)
    expecttest.assert_expected_inline(
        "\n".join([REVISION, *(str(operator.default._schema) for operator in operators)]),
        """\
r6
fxpass::class_reductions(Tensor x, Tensor weight, Tensor? bias, Tensor? scale, Tensor? picks, Tensor[] given, Tensor? coef, Tensor? logits, str spec, Tensor? wide_x=None, Tensor? wide_weight=None) -> Tensor[]
fxpass::class_reductions_backward(Tensor grad, Tensor? lse, Tensor? rest, Tensor? saved, Tensor x, Tensor weight, Tensor? bias, Tensor? scale, Tensor? picks, Tensor[] given, Tensor? logits, str spec) -> Tensor[]""",
    )


def arguments(found: Case) -> tuple:
    given = [t for name, t in found.tensors.items() if name.startswith("given")]
    named = (found.tensors.get(name) for name in ("x", "weight", "bias", "scale"))
    return *named, found.picks, given, None, None, found.spec.text()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@in_pairs(
    full=(False, True),
    name=("a policy's loss", "smoothing", "everything"),
    dtype=(torch.float32, torch.bfloat16),
)
def test_opcheck(full, name, dtype):
    outputs = COMBINATIONS[name]
    found = case(outputs, dtype, bias=dtype if full else None, scaled=full, many=full)
    forward = arguments(found)
    with torch.no_grad():
        results = class_reductions(*forward)
    *operands, _, logits, text = forward
    saved = (results.get(name) for name in ("lse", "rest", "saved"))
    backward = (torch.ones_like(results["rows"]), *saved, *operands, logits, text)
    torch.library.opcheck(OPERATORS.class_reductions_backward.default, backward)
    for tensor in found.tensors.values():
        tensor.requires_grad_()
    torch.library.opcheck(OPERATORS.class_reductions.default, forward)
    # torch has no gradients of lists that hold tensors without one
    frozen = case(outputs, dtype, frozen=tuple(name for name in found.tensors if name != "x"))
    frozen.tensors["x"].requires_grad_()
    torch.library.opcheck(OPERATORS.class_reductions.default, arguments(frozen))


def test_derivatives_that_there_are_not():
    found = case(["lse"])
    leaves = [t.requires_grad_() for t in found.tensors.values()]
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(found.fused(*leaves).sum(), leaves, create_graph=True)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t.detach(), torch.ones_like(t)) for t in leaves]
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            found.fused(*duals)
        found.fused(*leaves)
    frozen = case(["lse"], frozen=("weight",))._replace(frozen=())
    with pytest.raises(RuntimeError, match="weight requires a gradient that the spec does not"):
        frozen.fused(*leaves)


def test_outputs_without_a_gradient():
    found = case(["argmax"])
    results = found.run([t.requires_grad_() for t in found.tensors.values()])
    assert list(results) == ["indices", "lse", "rest"]
    assert not any(tensor.requires_grad for tensor in results.values())


def test_autocast_changes_nothing():
    found = case(COMBINATIONS["a policy's loss"])
    tensors = [*found.tensors.values()]
    with torch.autocast("cpu", torch.bfloat16):
        cast = found.fused(*tensors)
    assert torch.equal(cast, found.fused(*tensors))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_mode_sees_one_operator(frozen):
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    found = case(["lse"])
    tensors = [t.requires_grad_(not frozen) for t in found.tensors.values()]
    with Seen():
        results = found.run(tensors)
    assert [func for func in seen if func.namespace == "fxpass"] == [
        OPERATORS.class_reductions.default
    ]
    assert not {torch.ops.aten.mm.out, torch.ops.aten.mm.default}.intersection(seen)
    assert results["rows"].requires_grad != frozen


def test_some_of_the_given_values_have_gradients():
    x, weight = torch.randn(4, 6), torch.randn(9, 6)
    given = [torch.rand(9), torch.rand(9, requires_grad=True)]
    spec = f"{REVISION} outputs=moment(1,0,0);moment(1,0,1) gradients=given1"
    rows = class_reductions(x, weight, None, None, None, given, None, None, spec)["rows"]
    rows.sum().backward()
    assert given[0].grad is None
    assert given[1].grad is not None
    torch.testing.assert_close(given[1].grad, (x @ weight.T).softmax(1).sum(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_only_detached_outputs_read_may_be_overwritten(dtype):
    """As in eager, whose metrics under no_grad save nothing."""
    metrics = (Moment(1, 0, 1), "at")
    found = case(("lse", Moment(1, 1, 0), *metrics), dtype, many=True, frozen=("given1",))
    found = found._replace(spec=dataclasses.replace(found.spec, detached=metrics))
    tensors = [t.requires_grad_(name != "given1") for name, t in found.tensors.items()]
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
    "given": [],
    "coef": None,
    "logits": None,
    "spec": "r6 outputs=lse",
}
PICK = "r6 outputs=pick"
WRONG = {
    "needs x .N, D. and weight": [
        {"x": torch.ones(D)},
        {"x": torch.ones(1, N, D)},
        {"weight": torch.ones(V)},
        {"weight": torch.ones(V, D + 1)},
    ],
    "needs logits": [{"logits": torch.ones(N, V + 1)}],
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
        {"given": [torch.ones(V, device=META)]},
    ],
    rf"needs bias \[{V}\], got": [{"bias": torch.ones(1, V)}, {"bias": torch.ones(1)}],
    "needs a bias of": [{"bias": torch.ones(V).double()}, {"bias": torch.ones(V).half()}],
    rf"needs scale \[{N}\], got": [{"scale": torch.ones(())}, {"scale": torch.ones(N, 1)}],
    "needs a scale of torch.float32, got torch.float64": [{"scale": torch.ones(N).double()}],
    "needs picks where outputs read them": [
        {"spec": PICK},
        {"spec": "r6 outputs=at"},
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
        {"given": [torch.ones(N)]},
        {"given": [torch.ones(1, V)]},
        {"given": [torch.ones(())]},
    ],
    "needs a floating-point given1, got torch.int64": [
        {"given": [torch.ones(V), torch.ones(V).long()]}
    ],
    "needs 3 given values, got 1": [
        {"given": [torch.ones(V)], "spec": "r6 outputs=moment(1,0,2)"},
        {"given": [torch.ones(V)], "spec": "r6 outputs=lse transform=given2*z"},
    ],
    "cannot compute gradients of bias, given1: absent": [
        {"given": [torch.ones(V)], "spec": "r6 outputs=lse gradients=x,bias,given0,given1"},
    ],
    "another version of fxpass": [{"spec": "v7 reduction=mean"}],
    "not reductions": [{"spec": "r6 outputs=loss"}],
}


@pytest.mark.parametrize(
    ("message", "changes"),
    [(message, changes) for message, cases in WRONG.items() for changes in cases],
)
def test_operands_that_do_not_fit(message, changes):
    with pytest.raises(ValueError, match=message):
        class_reductions(*(DEFAULT | changes).values())


def test_a_shard_without_classes_adds_nothing():
    x, w = torch.ones(3, 4, requires_grad=True), torch.ones(0, 4, requires_grad=True)
    spec = "r6 outputs=pick;lse gradients=x,weight"
    picks = torch.zeros(3, dtype=torch.int64)
    pick, lse = class_reductions(x, w, None, None, picks, [], None, None, spec)["rows"]
    assert (pick == 0).all()
    assert (lse == -float("inf")).all()
    for operand, grad in zip((x, w), torch.autograd.grad(pick.sum(), (x, w)), strict=True):
        assert torch.equal(grad, torch.zeros_like(operand))


def test_few_rows_beside_outputs_without_a_gradient():
    """Backward has no operands of these outputs, and computes the others of these rows anew."""
    found = case(("pick", "lse"), torch.float32)
    x, w = (found.tensors[name].detach().requires_grad_() for name in ("x", "weight"))
    spec = "r6 outputs=pick;lse;max gradients=x,weight detached=pick"
    rows = class_reductions(x, w, None, None, found.picks, [], None, None, spec)["rows"]
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
    spec = "r6 outputs=pick gradients=bias"
    operands = (x.detach(), w.detach(), b, None, found.picks, [], None, None)
    rows = class_reductions(*operands, spec)["rows"]
    assert torch.equal(
        torch.autograd.grad((rows * 0).nan_to_num().sum(), b)[0], torch.zeros_like(b)
    )


def test_picks_of_a_shard_without_classes():
    """Each of K picks has a line of its own; gradients have the strides of the fake's."""
    x, w = torch.randn(3, D).t().contiguous().t(), torch.randn(0, D)
    picks = torch.zeros(3, 2, dtype=torch.long)
    text = f"{REVISION} outputs=pick;argmax;max;lse gradients=x,weight shard=1"
    arguments = x.requires_grad_(), w.requires_grad_(), None, None, picks, [], None, None, text
    found = class_reductions(*arguments)["rows"]
    assert found.tolist() == [[0.0] * 3] * 2 + [[-float("inf")] * 3] * 2
    (of_x,) = torch.autograd.grad(found.nan_to_num().sum(), x)
    assert of_x.is_contiguous()
    assert not of_x.any()


def test_saved_logits_with_a_wider_bias():
    x, w, b = torch.randn(3, D).bfloat16(), torch.randn(V, D).bfloat16(), torch.randn(V)
    assert torch.equal(saved_logits(x, w, b), F.linear(x, w).float() + b)
    assert torch.equal(saved_logits(x, w, b.bfloat16()), F.linear(x, w, b.bfloat16()))
