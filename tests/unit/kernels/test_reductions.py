"""The Triton implementation of class reductions against float64 autograd.

Runs on the GPU where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass.aten import reductions as aten
from fxpass.kernels import call, chunked
from fxpass.kernels import reductions as kernels
from fxpass.op import reductions as operator
from fxpass.op import run
from fxpass.plan.plan import Plan
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.expression import parse
from fxpass.spec.operands import Operands
from fxpass.spec.outputs import INDICES, PRODUCTS, Moment, Output
from fxpass.spec.reductions import REVISION, Reductions
from tests.support.allocations import Allocations
from tests.support.numerics import assert_as_accurate, error
from tests.support.reduction_cases import (
    COMBINATIONS,
    INF,
    MASKED,
    NAN,
    OUTPUTS,
    TRANSFORMS,
    Case,
    assert_almost_certain,
    case,
    given_of,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GIVEN = ("given0", "given1", "given3")  # their gradients are ATen's
WHOLE, BLOCKED = (3, 5, 37), (3, 5, 8200)
# A combination with each kind of output, but few of each: the interpreter needs a second for all.
# The gradient of maxima is computed in chunks of rows, that of others in slices of classes.
IN_SLICES = [
    *("lse", "pick", "at"),
    *(Moment(1, 1), Moment(2, 2, 1), Moment(0, 2, 0), Moment(0, 1), Moment(1, 0, 1)),
    *INDICES,
]
SOME = [*IN_SLICES, "max"]
BOTH = pytest.mark.parametrize("outputs", [SOME, IN_SLICES], ids=["chunks", "slices"])

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter


@pytest.fixture(params=[2], ids=lambda rows: f"chunks of {rows}")
def triton(request, device, monkeypatch):
    """The operator runs the kernels, in chunks or slices; new tensors are on their device."""

    def plan(n, d, v, *others):
        # several slices; of those with several blocks, the last one has less than one
        return Plan("triton", "tiled", rows=request.param, classes=16 if v < 8192 else 8192)

    monkeypatch.setattr(run, "plan", plan)
    with device:
        yield device


# exp(l) is 2**x of a rounded log2(e) * l, as on a GPU: some units in the last place more than
# eager's on a CPU, which sums that cancel amplify.
FLOOR = 4e-6


def check(found: Case, dtype: torch.dtype) -> None:
    tensors = list(found.tensors.values())
    upstream = torch.randn(found.eager(*tensors).shape)
    assert_as_accurate(found.fused, found.eager, tensors, dtype, upstream, floor=FLOOR)


# ---------------------------------------------------------------- the meaning


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("transform", "shape"),
    [
        ("z", WHOLE),
        ("3*tanh(z/3)", BLOCKED),
        (MASKED, WHOLE),
        pytest.param(MASKED, BLOCKED, marks=pytest.mark.full),
        pytest.param("z", BLOCKED, marks=pytest.mark.full),
        pytest.param("3*tanh(z/3)", WHOLE, marks=pytest.mark.full),
        pytest.param("0.5-0.5*z", WHOLE, marks=pytest.mark.full),
        pytest.param("0.5-0.5*z", BLOCKED, marks=pytest.mark.full),
    ],
)
@BOTH
def test_all_kinds_of_outputs(outputs, transform, shape, dtype):
    full = transform != "z"
    bias = compute_dtype(dtype) if full else dtype
    check(case(outputs, dtype, transform, bias, full, full, shape, frozen=GIVEN), dtype)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("shape", [WHOLE, BLOCKED], ids=["whole", "blocked"])
@pytest.mark.parametrize("name", [name for name in COMBINATIONS if name != "everything"])
def test_combinations(name, shape):
    check(case(COMBINATIONS[name], shape=shape, frozen=GIVEN), torch.float32)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("first", [0, 1])
@BOTH
def test_every_other_output_is_detached(outputs, first):
    found = case(outputs, torch.bfloat16, shape=WHOLE, many=bool(first), frozen=GIVEN)
    spec = dataclasses.replace(found.spec, detached=found.spec.rows[first::2])
    check(found._replace(spec=spec), torch.bfloat16)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("many", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("shape", [WHOLE, BLOCKED], ids=["whole", "blocked"])
def test_a_vocabulary_shard(shape, many):
    """Some picks are of other shards: as in ATen."""
    n, _, v = shape
    outputs = ["lse", "at", Moment(1, 1), Moment(0, 1, 1)]
    found = case(outputs, torch.float32, MASKED, None, True, many, shape)
    assert found.picks is not None
    found.picks[0] = v
    tensors, trained = found.tensors, ("x", "weight", "scale")
    spec = dataclasses.replace(found.spec, gradients=trained, shard=True)
    named = [t.requires_grad_(name in trained) for name, t in tensors.items()]
    found = found._replace(spec=spec, frozen=())
    operands = *(tensors.get(name) for name in ("x", "weight", "bias", "scale")), found.picks
    given = tuple(given_of(tensors))
    of_call = Operands(*operands, given, shard=True)  # type: ignore[arg-type]
    got = found.run(named)
    incoming = torch.randn(got["rows"].shape)
    of_aten = Plan("aten", "tiled", rows=n, classes=v)
    with torch.no_grad():
        want, _ = aten.forward(of_call, spec, of_aten)
        slopes = aten.backward(of_call, spec, of_aten, want, incoming)
    torch.testing.assert_close(got["rows"].detach(), want.rows, rtol=1e-5, atol=1e-5)
    assert (got["rows"][1 : 4 if many else 2, 0] == 0).all()
    grads = torch.autograd.grad(got["rows"], [tensors[name] for name in trained], incoming)
    for name, grad in zip(trained, grads, strict=True):
        torch.testing.assert_close(grad, slopes[name], rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("shape", [WHOLE, BLOCKED], ids=["whole", "blocked"])
@pytest.mark.parametrize("i", range(len(OUTPUTS)), ids=lambda i: str(OUTPUTS[i]))
def test_each_output(i, shape):
    """In one of the dtypes; :func:`test_everything` has all of them."""
    output, dtype = OUTPUTS[i], DTYPES[(i + (shape is BLOCKED)) % len(DTYPES)]
    # The gradient of a scale is a sum that cancels. With a square of the log-softmax, its terms are
    # so large that the rounding of log2(e) * l, of which the kernels take 2**x, decides.
    scaled = not (isinstance(output, Moment) and output.b == 2)
    for transform in TRANSFORMS:
        check(case([output], dtype, transform, shape=shape, frozen=GIVEN), dtype)
        check(case([output], dtype, transform, dtype, scaled, True, shape, frozen=GIVEN), dtype)


@pytest.mark.full
@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [WHOLE, BLOCKED], ids=["whole", "blocked"])
@pytest.mark.parametrize("sliced", [False, True])
def test_everything(sliced, shape, dtype):
    outputs = [output for output in COMBINATIONS["everything"] if not sliced or output != "max"]
    for transform in TRANSFORMS:
        check(case(outputs, dtype, transform, shape=shape, frozen=GIVEN), dtype)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("shape", "many"),
    [((1, 5, 11), False), ((7, 1, 11), True), ((7, 5, 1), True), ((1, 1, 1), False)],
)
@BOTH
def test_sizes(outputs, shape, many):
    found = case(outputs, bias=torch.float32, scaled=True, many=many, shape=shape, frozen=GIVEN)
    check(found, torch.float32)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("shape", [WHOLE, BLOCKED], ids=["whole", "blocked"])
def test_the_gradient_of_an_entropy_of_almost_0(shape):
    assert_almost_certain(case([Moment(1, 1)], shape=shape, size=0.0, bias=torch.float32))


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("shape", [(0, 5, 11), (0, 5, 8200)])
@BOTH
def test_no_rows(outputs, shape):
    found = case(outputs, bias=torch.float32, scaled=True, shape=shape, frozen=GIVEN)
    tensors = [t.requires_grad_() for t in found.tensors.values()]
    results = found.run(tensors)
    rows, indices = results["rows"], results["indices"]
    assert rows.shape == (len(found.spec.rows), 0)
    assert indices.shape == (1, 0)
    rows.sum().backward()
    named = zip(found.tensors, tensors, strict=True)
    assert not any(t.grad is not None and t.grad.any() for _, t in named)


@pytest.mark.usefixtures("triton")
def test_no_picks():
    check(case(["lse", "pick"])._replace(picks=torch.empty(7, 0, dtype=torch.int64)), torch.float32)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("picks", [[[1, 1, 1]] * 7, [[1, 10, 1]] * 7])
def test_a_class_that_is_picked_twice(picks):
    found = case(["pick", "at"], many=True)
    check(found._replace(picks=torch.tensor(picks)), torch.float32)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("frozen", [("x",), ("weight", "scale"), ("x", "weight", "bias")])
@BOTH
def test_frozen_operands(outputs, frozen):
    found = case(outputs, bias=torch.float32, scaled=True, frozen=(*frozen, *GIVEN))
    check(found, torch.float32)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("dtype", [torch.float16])
@BOTH
def test_non_contiguous_operands(outputs, dtype):
    found = case(outputs, dtype, bias=dtype, scaled=True, many=True, frozen=GIVEN)
    for name, tensor in found.tensors.items():
        strided = tensor.repeat_interleave(2, dim=-1)[..., ::2]
        found.tensors[name] = tensor.T.contiguous().T if name == "x" else strided
    assert found.picks is not None
    check(found._replace(picks=found.picks.T.contiguous().T), dtype)


@pytest.mark.parametrize("shape", [WHOLE, BLOCKED], ids=["whole", "blocked"])
def test_one_value_of_each_row_is_not_copied(device, shape):
    n, d, v = shape
    with device:
        x, weight, row = torch.randn(n, d), torch.randn(v, d), torch.randn(n, 1)
        bias = torch.randn(1).expand(v)
    given = row.expand(n, v), torch.randn(v, device=device), row.square().expand(n, v)
    spec = Reductions(("lse", Moment(1, 0, 2)), parse("z-given0*given1"), ("x",))
    plan = Plan("triton", "chunked", rows=1, classes=v)
    with Allocations() as allocations:
        out, _ = kernels.forward(Operands(x, weight, bias, None, None, given), spec, plan)
    of_gemms = v if device.type == "cpu" else 0  # which has no out= there
    assert allocations.peak(out) <= (v + 16 + of_gemms) * 4 + 1000
    z = x.double() @ weight.double().T + bias
    want = torch.stack([(z - row * given[1]).logsumexp(1), row.squeeze(1) ** 2])
    torch.testing.assert_close(out.rows, want.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("triton", [100], indirect=True)
def test_one_chunk(triton):
    check(case(SOME, torch.bfloat16, bias=torch.bfloat16, frozen=GIVEN), torch.bfloat16)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("shape", [WHOLE, BLOCKED], ids=["whole", "blocked"])
@BOTH
def test_nothing_is_written_to_operands_and_the_bits_are_the_same(outputs, shape):
    found = case(outputs, torch.bfloat16, "3*tanh(z/3)", torch.bfloat16, True, True, shape)
    found = found._replace(frozen=GIVEN)
    spec = dataclasses.replace(found.spec, gradients=("x", "weight", "bias", "scale"))
    found = found._replace(spec=spec)
    before = [t.clone() for t in found.tensors.values()]
    answers = []
    for _ in range(2):
        leaves = [t.detach().requires_grad_() for t in found.tensors.values()]
        results = found.run([*leaves[:4], *(t.detach() for t in leaves[4:])])
        rows, indices = results["rows"], results["indices"]
        rows.backward(torch.ones_like(rows))
        answers.append([rows.detach(), indices, *(t.grad for t in leaves[:4])])
    assert all(map(torch.equal, *answers))
    assert all(map(torch.equal, found.tensors.values(), before))


# ---------------------------------------------------------------- given logits

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda z: z,
    "padded": lambda z: F.pad(z, (3, 4))[:, 3:-4],
    "transposed": lambda z: z.t().contiguous().t(),
}


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("dtype", "wide", "shape", "layout"),
    [
        (torch.bfloat16, False, WHOLE, "contiguous"),
        (torch.float32, False, BLOCKED, "padded"),
        (torch.float16, True, WHOLE, "transposed"),
        (torch.bfloat16, True, BLOCKED, "contiguous"),
        (torch.float32, False, WHOLE, "padded"),
    ],
)
@BOTH
def test_given_logits(outputs, dtype, wide, shape, layout):
    """They include the bias, and may be f32 where the operands are not; they are not written to."""
    bias = torch.float32 if wide else dtype
    found = case(outputs, dtype, bias=bias, scaled=True, many=True, shape=shape, frozen=GIVEN)

    def fused(*tensors: Tensor) -> Tensor:
        x, w, b, *others = operands_of(found, tensors)
        with torch.no_grad():
            z = F.linear(x, w) + b if wide else F.linear(x, w, b)
        z = LAYOUTS[layout](z)
        seen.append((z, z.clone()))
        return operator.class_reductions(x, w, b, *others[:3], None, z, found.spec.text())["rows"]

    seen: list[tuple[Tensor, Tensor]] = []
    tensors = list(found.tensors.values())
    upstream = torch.randn(found.eager(*tensors).shape)
    assert_as_accurate(fused, found.eager, tensors, dtype, upstream)
    assert all(torch.equal(*one) for one in seen)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("layout", ["contiguous", "padded"])
@pytest.mark.parametrize("total", [False, True])
def test_given_logits_that_are_only_read_take_no_memory(total, layout):
    found = case(["pick"], shape=(40, 5, 1000), frozen=("x", "weight"))
    x, w = found.tensors.values()
    z = LAYOUTS[layout](x @ w.T)
    some = {"outputs": (), "total": ("pick",)} if total else {}
    spec = dataclasses.replace(found.spec, gradients=(), **some)
    coef = torch.ones(1, 40) if total else None
    before = z.clone()
    with torch.no_grad(), Allocations() as allocated:
        out = operator.class_reductions(x, w, None, None, found.picks, [], coef, z, spec.text())
    assert allocated.peak([*out.values()]) < 1000
    assert torch.equal(z, before)
    assert found.picks is not None
    want = before.log_softmax(1).gather(1, found.picks.unsqueeze(1)).squeeze(1)
    got = out["total"] if total else out["rows"][0]
    torch.testing.assert_close(got, want.sum() if total else want)


# ---------------------------------------------------------------- slices


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("triton")
def test_gradients_are_rounded_once_however_many_slices_there_are(dtype, monkeypatch):
    """To the dtypes of the weight and of the bias; the others are sums."""
    monkeypatch.setattr(chunked, "_F32_BYTES", 4 * 16 * 20)  # several passes behind an f32 result
    found = case(IN_SLICES, dtype, bias=dtype, scaled=True, shape=(24, 16, 90), frozen=GIVEN)
    operands = operands_of(found, list(found.tensors.values()))
    answers = []
    for classes in (16, 90, 1 << 20):
        plan = Plan("triton", "tiled", rows=100, classes=classes)
        out, _ = kernels.forward(operands, found.spec, plan)
        answers.append(kernels.backward(operands, found.spec, plan, out, torch.ones_like(out.rows)))
    many, one, more = answers
    assert all(torch.equal(one[name], more[name]) for name in one)
    assert {name: grad.dtype for name, grad in many.items()} == {
        **{"x": torch.float32, "weight": dtype, "bias": dtype, "scale": torch.float32}
    }
    for name in ("weight", "bias"):
        assert error(many[name], one[name]) < (1e-6 if dtype == torch.float32 else 1e-4)
    # in f32 the order of a sum hardly shows behind one rounding; six roundings are off by 2e-3
    for name in ("x", "scale"):
        assert error(many[name], one[name]) < 2e-4


@pytest.mark.parametrize(("v", "added"), [(37, [False]), (200, [False, True, True])])
@pytest.mark.usefixtures("triton")
def test_the_first_slice_overwrites_the_gradient_of_x(v, added, monkeypatch):
    """An addmm of one row may read an f32 sum as 16 bits; all its classes are one slice."""
    adds, product = [], chunked.product
    monkeypatch.setattr(
        chunked, "product", lambda *args, add: (adds.append(add), product(*args, add))[1]
    )
    found = case(["pick"], torch.float32, shape=(1, 8, v), frozen=("weight",))
    operands = operands_of(found, list(found.tensors.values()))
    plan = Plan("triton", "tiled", rows=100, classes=80)
    out, _ = kernels.forward(operands, found.spec, plan)
    kernels.backward(operands, found.spec, plan, out, torch.ones(1, 1))
    assert adds == added


# ---------------------------------------------------------------- totals

TOTALS: dict[str, list[Output]] = {
    "a loss": ["pick"],
    "a policy's loss": ["pick", Moment(1, 1)],
    "a loss and a z-loss": ["lse", "at", Moment(2, 0)],
    "soft targets": [Moment(0, 1, 1), "lse", Moment(0, 2), Moment(1, 1, 0)],
}


def check_total(found: Case, dtype: torch.dtype, outputs: tuple[Output, ...] = ()) -> None:
    """The sum of the case's outputs with known weights, some of them 0, and its gradients."""
    gradients = tuple(name for name in found.spec.gradients if name in PRODUCTS)
    frozen = tuple(name for name in found.tensors if name not in PRODUCTS)
    found = found._replace(frozen=frozen)
    total = found.spec.outputs
    spec = dataclasses.replace(found.spec, outputs=outputs, gradients=gradients, total=total)
    rows = found.eager(*found.tensors.values())
    coef = torch.randn(rows.shape)
    coef[:, 1] = 0
    if len(coef) > 1:
        coef[0, 2] = 0

    def fused(*tensors: Tensor) -> Tensor:
        x, weight, bias, scale, picks, given, *_ = operands_of(found, tensors)
        out = operator.class_reductions(
            x, weight, bias, scale, picks, list(given), coef, None, spec.text()
        )
        if outputs:
            alone = dataclasses.replace(spec, total=(), gradients=())
            with torch.no_grad():
                want = operator.class_reductions(
                    x, weight, bias, scale, picks, list(given), None, None, alone.text()
                )
            assert all(torch.equal(out[k], want[k]) for k in ("rows", "indices") if k in want)
        return out["total"]

    def eager(*tensors: Tensor) -> Tensor:
        rows = found.eager(*tensors)
        return (rows * coef.to(rows.dtype)).sum()

    assert_as_accurate(fused, eager, list(found.tensors.values()), dtype)


def operands_of(found: Case, tensors: Sequence[Tensor]) -> Operands:
    named = found._named(tensors)
    x, weight = named["x"], named["weight"]
    given = tuple(t for name, t in named.items() if name in GIVEN)
    return Operands(x, weight, named.get("bias"), named.get("scale"), found.picks, given)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [WHOLE, BLOCKED], ids=["whole", "blocked"])
@pytest.mark.parametrize("name", TOTALS)
def test_a_total_and_its_gradients_in_one_launch(name, shape, dtype):
    check_total(case(TOTALS[name], dtype, shape=shape, frozen=GIVEN), dtype)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [WHOLE, BLOCKED], ids=["whole", "blocked"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", ["a policy's loss", "soft targets"])
def test_a_total_without_gradients(name, given, shape, dtype):
    """Of the same bits, with logits that exist too."""
    found = case(TOTALS[name], dtype, shape=shape, frozen=GIVEN)
    operands = operands_of(found, list(found.tensors.values()))
    coef = torch.randn(found.eager(*found.tensors.values()).shape)
    logits = operands.x @ operands.weight.T if given else None
    operands = operands._replace(coef=coef, logits=logits)
    outputs, plan = ("argmax", "lse"), Plan("triton", "chunked", rows=2, classes=1)
    spec = dataclasses.replace(found.spec, outputs=outputs, total=found.spec.outputs)
    answers = []
    for gradients in (("x",), ()):
        some = dataclasses.replace(spec, gradients=gradients)
        out, grads = kernels.forward(operands, some, plan)
        assert grads.keys() == set(gradients)
        answers.append(out)
    assert torch.equal(answers[0].rows, answers[1].rows)
    assert torch.equal(answers[0].indices, answers[1].indices)
    torch.testing.assert_close(answers[0].total, answers[1].total, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.float32, WHOLE), (torch.bfloat16, BLOCKED), (torch.float16, WHOLE)],
)
@pytest.mark.parametrize("name", ["a policy's loss", "a loss and a z-loss"])
def test_outputs_beside_a_total(name, shape, dtype):
    """What they are without a total."""
    outputs = ("argmax", "max", "pick", Moment(1, 2))
    found = case(TOTALS[name], dtype, "3*tanh(z/3)", dtype, True, True, shape)
    check_total(found, dtype, outputs)


# ---------------------------------------------------------------- numbers at the edge


@pytest.mark.usefixtures("triton")
def test_a_masked_function_without_a_slope():
    found = case(["lse"], shape=WHOLE)
    operands = operands_of(found, list(found.tensors.values()))
    n, _, v = WHOLE
    operands = operands._replace(given=(torch.arange(v) % 3 == 1,), coef=torch.ones(1, n))
    transform = parse("where(given0>0,-inf,where(z>0,1,-1))")
    spec = Reductions((), transform, ("x", "weight"), ("lse",))
    plan = Plan("triton", "chunked", rows=2, classes=1)
    _, grads = kernels.forward(operands, spec, plan)
    assert not grads["x"].any()
    assert not grads["weight"].any()


def assert_as_eager(found: Case, exact: bool = False) -> None:
    """To rounding, with nan and infinities at the same places."""
    answers = []
    for program in (found.fused, found.eager):
        leaves = [t.detach().requires_grad_() for t in found.tensors.values()]
        rows = program(*leaves)
        rows.backward(torch.ones_like(rows))
        answers.append([rows.detach(), *(leaf.grad for leaf in leaves)])
    for name, ours, theirs in zip(["rows", *found.tensors], *answers, strict=True):
        if name not in found.frozen:
            assert torch.allclose(ours, theirs, 1e-4, 1e-5, equal_nan=True), (name, ours, theirs)


def with_logits(outputs, row, shape=WHOLE, **options) -> Case:
    """Every row has these logits, repeated; hidden states are zero."""
    found = case(outputs, bias=torch.float32, shape=shape, frozen=GIVEN, **options)
    times = -(-shape[2] // len(row))
    found.tensors["bias"] = torch.tensor(row).repeat_interleave(times)[: shape[2]].clone()
    found.tensors["x"].zero_()
    return found


# One of the classes, or those of more than one block, are the largest.
SHAPES = pytest.mark.parametrize("shape", [WHOLE, BLOCKED], ids=["whole", "blocked"])


@SHAPES
@pytest.mark.usefixtures("triton")
def test_equal_maxima(shape):
    """The first of them has the gradient, as in torch."""
    found = with_logits(["max", *INDICES], [1.0, 4.0, 4.0, 2.0, 4.0, 0.0], shape)
    assert_as_eager(found)
    indices = found.run([*found.tensors.values()])["indices"]
    first = int((found.tensors["bias"] == 4).nonzero()[0])
    assert indices.tolist() == [[first] * shape[0]]


@SHAPES
@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    "row",
    [
        [-INF] * 3,
        [-INF, -INF, 1.0, 2.0],
        [1.0, INF, 2.0],
        [1.0, 5.0, NAN, 7.0],
        [NAN, INF, 7.0],
        [torch.finfo(torch.float32).min] * 3,
        [-INF, -INF, torch.finfo(torch.float32).min],
    ],
    ids=str,
)
def test_the_largest_logit_is_torchs(row, shape):
    found = with_logits(["max", *INDICES], row, shape)
    results = found.run([*found.tensors.values()])
    rows, indices = results["rows"], results["indices"]
    values, first = found.tensors["bias"].max(0)
    if not values.isnan():  # of equal ones, torch may take another one than the first
        first = (found.tensors["bias"] == values).nonzero()[0, 0]
    assert torch.equal(indices, first.expand_as(indices))
    assert torch.allclose(rows, values.expand_as(rows), equal_nan=True)


OF_SOFTMAX = ["lse", "pick", Moment(1, 0, 0), Moment(2, 0), Moment(2, 0, 1)]


@SHAPES
@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("outputs", [OF_SOFTMAX, ["at", "max", *OF_SOFTMAX]], ids=len)
def test_some_infinite_logits(outputs, shape):
    found = with_logits(outputs, [-INF, -INF, 2.0, 1.0, -INF, 0.5], shape)
    assert found.picks is not None
    found.picks.fill_(int(shape[2] // 6 * 2.5))
    assert_as_eager(found)


@SHAPES
@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("bad", [-INF, INF, NAN])
def test_rows_without_a_distribution(bad, shape):
    """Every logit is -inf, one is inf, or one is nan."""
    row = [bad] * 3 if bad == -INF else [0.0, bad, 1.0]
    outputs = ["pick", "max", Moment(1, 1), *(["lse"] if bad != INF else [])]
    for output in [*outputs, *([Moment(2, 0)] if shape == WHOLE else [])]:
        assert_as_eager(with_logits([output], row, shape))


@SHAPES
@pytest.mark.usefixtures("triton")
def test_a_class_without_probability_counts_nothing(shape):
    """An entropy, say: eager has nan. The answer is that without these classes."""
    outputs = [Moment(a, b, w) for a in (1, 2) for b in (1, 2) for w in (None, 0)]
    row = [-INF, 1.0, 2.0, -INF, 0.0]
    found = with_logits(outputs, row, shape)
    kept = found.tensors["bias"].isfinite()
    answers = []
    for some in (slice(None), kept):
        sizes = {n: t if n == "x" else t[some] for n, t in found.tensors.items()}
        leaves = [t.detach().requires_grad_() for t in sizes.values()]
        rows = found._replace(tensors=sizes).fused(*leaves)
        rows.sum().backward()
        answers.append((rows, leaves[2].grad))
    (rows, bias), (rows_of_kept, bias_of_kept) = answers
    assert torch.allclose(rows, rows_of_kept, 1e-5, 1e-6)
    assert torch.allclose(bias[kept], bias_of_kept, 1e-5, 1e-6)
    assert not bias[~kept].any()


@SHAPES
@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("output", ["pick", "lse"])
def test_a_row_that_is_masked_wholly(output, shape):
    """Its softmax is nan, and its logits have no gradient."""
    n, d, v = shape
    x, weight = torch.randn(n, d), torch.randn(v, d)
    mask, picks = torch.rand(n, v) < 0.3, torch.zeros(n, dtype=torch.int64)
    mask[:, 0], mask[1] = False, True
    text = f"{REVISION} outputs={output} transform=where(given0>0,-inf,z) gradients=x,weight"
    got, want = ([t.clone().requires_grad_() for t in (x, weight)] for _ in range(2))
    of_picks = picks if output == "pick" else None
    rows = operator.class_reductions(*got, None, None, of_picks, [mask], None, None, text)["rows"]
    z = F.linear(*want).masked_fill(mask, -INF)
    eager = z.log_softmax(1)[:, 0] if output == "pick" else z.logsumexp(1)
    torch.testing.assert_close(rows[0], eager, equal_nan=True)
    for program in (rows[0], eager):
        program.sum().backward()
    for ours, theirs in zip(got, want, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)
        assert ours.grad.isfinite().all()


@SHAPES
@pytest.mark.usefixtures("triton")
def test_sums_over_infinite_logits_are_eagers(shape):
    """Infinite, also where the maximum grows afterwards, and nan where the weight is 0."""
    outputs = [Moment(0, 1), Moment(0, 2), Moment(0, 1, 0), "max"]
    found = with_logits(outputs, [-INF, 1.0, 2.0], shape)
    for of_infinite in (1.0, 0.0):
        found.tensors["given0"][found.tensors["bias"] == -INF] = of_infinite
        tensors = [*found.tensors.values()]
        ours, theirs = found.fused(*tensors), found.eager(*tensors)
        assert torch.allclose(ours, theirs, 1e-5, 1e-6, equal_nan=True)


@SHAPES
@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("dtype", [torch.float32])
def test_huge_logits(shape, dtype):
    check(case(SOME, dtype, bias=dtype, size=1e4, shape=shape, frozen=GIVEN), dtype)


@SHAPES
@pytest.mark.usefixtures("triton")
def test_huge_logits_that_differ_by_ones(shape):
    """A softmax from an lse in f32 alone would be off by half of f32's spacing, 1e-3 here. (Logits
    of a slice are not to the last bit what they are in forward, so that all are from the bias.)"""
    found = case(["pick", "lse", Moment(1, 1)], bias=torch.float32, shape=shape, frozen=GIVEN)
    found.tensors["x"].mul_(2.0**-20)
    found.tensors["bias"].add_(3e4)
    check(found, torch.float32)


# ---------------------------------------------------------------- fp16


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("name", "exponent"), [("a policy's loss", -60), ("a policy's loss", 40), ("smoothing", 40)]
)
@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
def test_gradients_of_any_magnitude(strategy, name, exponent):
    """Of logits in fp16, whose range is small; powers of two change no bits. (Slices return
    gradients of the weight in fp16.)"""
    found = case(COMBINATIONS[name], torch.float16, scaled=True, shape=(5, 5, 300), frozen=GIVEN)
    tensors = list(found.tensors.values())
    incoming = torch.randn(found.eager(*tensors).shape)
    operands, plan = operands_of(found, tensors), Plan("triton", strategy, rows=2, classes=256)
    out, _ = kernels.forward(operands, found.spec, plan)
    gradients = tuple(name for name in found.spec.gradients if name in PRODUCTS)
    spec = dataclasses.replace(found.spec, outputs=(), total=found.spec.rows, gradients=gradients)
    answers, totals = [], []
    for power in (0, exponent):
        scaled = incoming * 2.0**power
        grads = kernels.backward(operands, found.spec, plan, out, scaled)
        wide = {name: grad for name, grad in grads.items() if grad.dtype == torch.float32}
        assert ("weight" in wide) == (strategy == "chunked")
        answers.append({name: grad * 2.0**-power for name, grad in wide.items()})
        of_total, grads = kernels.forward(operands._replace(coef=scaled), spec, plan)
        totals.append({name: grad * 2.0**-power for name, grad in grads.items()})
        totals[-1]["total"] = of_total.total * 2.0**-power
    for plain, other in (answers, totals):
        assert all(torch.equal(plain[name], other[name]) for name in plain)
        assert all(grad.isfinite().all() and grad.any() for grad in plain.values())


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("value", [INF, NAN])
def test_overflow_of_the_loss_scale_is_seen(value):
    """GradScaler looks for gradients that are not finite."""
    found = case(["pick", Moment(1, 1)], torch.float16)
    leaves = [t.requires_grad_() for t in found.tensors.values()]
    rows = found.fused(*leaves)
    grad = torch.ones_like(rows)
    grad[0, 3] = value
    rows.backward(grad)
    x_grad, weight_grad = (leaf.grad for leaf in leaves)
    assert x_grad is not None
    assert weight_grad is not None
    assert not x_grad[3].isfinite().any()
    assert x_grad[4].isfinite().all()
    assert not weight_grad.isfinite().any()


# ---------------------------------------------------------------- which implementation runs


def test_a_row_that_is_heavy_is_not_kept_in_registers():
    """Weights, a transform or the gradient of a scale need registers for each logit."""
    for outputs, transform, scaled, whole in (
        (["pick", Moment(1, 1)], "z", False, True),
        (["pick", Moment(1, 1)], "z", True, False),
        (["lse"], "3*tanh(z/3)", False, False),
        ([Moment(0, 1, 1)], "z", False, False),
    ):
        spec = case(outputs, transform=transform, scaled=scaled, frozen=GIVEN).spec
        found = call.blocks(16032, torch.bfloat16, "sm_90", spec)
        assert any(block >= 16032 for block, _ in found) == whole
