"""The fused loss: values and gradients against ``F.cross_entropy`` in float64, ignored rows, weights
that cancel, its gradients' life, bad input."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fxpass.op import run
from fxpass.op.losses import cross_entropy_of
from fxpass.op.saved import scaled
from fxpass.plan.plan import Plan
from fxpass.spec import expression
from tests.support.losses import Spec, linear_cross_entropy
from tests.support.numerics import assert_as_accurate, loss_and_gradients
from tests.support.targets import centred

INF, NAN = float("inf"), float("nan")
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
TRANSFORMS = {"z": lambda z: z, "30*tanh(z/30)": lambda z: 30 * torch.tanh(z / 30)}
REDUCTIONS = ("none", "mean", "sum")
BOTH = ("x", "weight")
SHAPE = 17, 5, 11

# numpy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
strategies = pytest.mark.parametrize("strategy", ["chunked", "tiled"])


@pytest.fixture
def parts(strategy, monkeypatch):
    """Chunks of 3 rows, or tiles of 3 rows and 4 classes."""
    plan = Plan("aten", strategy, 3, 4, block=2)
    monkeypatch.setattr(run, "plan", lambda *_: plan)


def programs(spec: Spec, target: Tensor, class_weight: Tensor | None = None):
    """The fused loss and the program it stands for, both of (x, weight[, bias])."""

    def fused(x, weight, bias=None):
        return linear_cross_entropy(x, weight, bias, target, class_weight, spec=spec)

    def plain(x, weight, bias=None):
        z = TRANSFORMS[expression.text(spec.transform)](F.linear(x, weight, bias))
        given, weights = (
            t.to(z.dtype) if t is not None and t.is_floating_point() else t
            for t in (target, class_weight)
        )
        every = -100 if spec.ignore_index is None else spec.ignore_index
        smoothing = spec.label_smoothing
        return F.cross_entropy(z, given, weights, None, every, None, spec.reduction, smoothing)

    return fused, plain


def problem(spec: Spec, dtype: torch.dtype, weighted=False, shape=SHAPE, size=1.0):
    n, d, v = shape
    found = [(torch.randn(n, d) * size).to(dtype), torch.randn(v, d).to(dtype)]
    found += [torch.randn(v).to(dtype)] * ("bias" in spec.gradients)
    target = torch.randn(n, v).softmax(1)
    if spec.target == "indices":
        target = torch.randint(v, (n,))
        if spec.ignore_index is not None:
            target[1::20] = spec.ignore_index  # too few to be left out beforehand
    return found, target, torch.rand(v) if weighted else None


def check(spec: Spec, dtype: torch.dtype, *of_problem, **more) -> None:
    tensors, target, class_weight = problem(spec, dtype, *of_problem, **more)
    fused, plain = programs(spec, target, class_weight)
    upstream = torch.arange(1.0, len(target) + 1) if spec.reduction == "none" else None
    wide = F32 if dtype == F16 else dtype  # eager has no fp16 loss on CPUs
    assert_as_accurate(fused, plain, tensors, dtype, upstream, wide)


@strategies
@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("target", ["indices", "probabilities"])
def test_every_combination(strategy, target, reduction):
    dtypes = itertools.cycle((F64, F32, BF16, F16, F32))
    for smoothing, weighted, bias, transform, ignored in itertools.product(
        (0.0, 0.1, 1.0), (False, True), (False, True), TRANSFORMS, (None, -100, 3)
    ):
        if target == "probabilities" and ignored is not None:
            continue
        gradients = (*BOTH, "bias") if bias else BOTH
        parsed = expression.parse(transform)
        spec = Spec(reduction, target, ignored, smoothing, parsed, gradients, strategy)
        check(spec, next(dtypes), weighted)


@strategies
@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("target", ["indices", "probabilities"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_sizes_and_huge_logits(strategy, reduction, target):
    spec = Spec(reduction, target, None, 0.1, gradients=(*BOTH, "bias"), strategy=strategy)
    for shape in ((0, 5, 11), (1, 1, 1), (7, 1, 11), (7, 5, 1), (300, 3, 13)):
        check(spec, F32, shape=shape)
    check(spec, BF16, size=1e4)


@strategies
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kept", [0, 3])
def test_ignored_rows_are_not_multiplied(implementation, strategy, reduction, kept):
    """Nothing of what is in them arrives anywhere; their losses and gradients are zeros. Of no rows
    the mean is nan, as in eager."""
    counted = torch.arange(7).sub(2).ge(0).logical_and(torch.arange(7) < 2 + kept)
    target = torch.where(counted, torch.arange(7), -1)
    tensors, _, class_weight = problem(Spec(gradients=(*BOTH, "bias")), F32, True, (7, 5, 11))
    spec = Spec(reduction, "indices", -1, 0.1, gradients=(*BOTH, "bias"), strategy=strategy)
    fused, plain = programs(spec, target, class_weight)
    upstream = torch.arange(1.0, 8) if reduction == "none" else None
    want = loss_and_gradients(plain, tensors, None, upstream)
    with_nan = [tensors[0].masked_fill(~counted[:, None], NAN), *tensors[1:]]
    given = with_nan if implementation == "aten" else tensors
    got = loss_and_gradients(fused, given, None, upstream)
    if not kept and reduction == "mean":
        assert got[0].isnan()
        assert want[0].isnan()
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert not got[1][~counted].any()


@strategies
@pytest.mark.usefixtures("parts")
def test_operands_of_other_kinds(strategy):
    """A padded class with a bias of -inf, strides, and uint8: -100 is 156 modulo 256, and 156 is a
    class like any other."""
    tensors, _, _ = problem(Spec(gradients=(*BOTH, "bias")), F32, shape=(7, 5, 200))
    tensors[2][4] = -INF
    strided = [t.repeat_interleave(2, dim=-1)[..., ::2].T.contiguous().T for t in tensors[:2]]
    target = torch.tensor([156, 3, 0, 1, 2, 3, 199], dtype=torch.uint8)
    spec = Spec(gradients=(*BOTH, "bias"), strategy=strategy)
    fused, plain = programs(spec, target.repeat_interleave(2)[::2])
    assert_as_accurate(fused, plain, [*strided, tensors[2]], F32)


def test_the_shape_and_dtype_are_those_of_the_rows():
    picked, target = torch.randn(2, 3, 2), torch.randint(9, (2, 3, 2))
    weight = torch.rand(9, dtype=BF16)
    loss = cross_entropy_of(picked, None, target, weight, "none", -100, 0.0, 9)
    assert (loss.shape, loss.dtype) == (picked.shape, F32)


@strategies
@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("count", [1, 10])
def test_few_rows_with_a_gradient(strategy, count):
    """A confident row's gradient is 1 - p, which another rounding of the logits would change; the
    product of few rows has another one than that of all."""
    x, weight = torch.randn(30, 16) * 8, torch.randn(40, 16) * 4
    spec = Spec("none", gradients=BOTH, strategy=strategy)
    fused, plain = programs(spec, (x @ weight.t()).argmax(-1))
    upstream = (torch.arange(30) >= 30 - count).float()
    assert_as_accurate(fused, plain, [x, weight], F32, upstream)


# ---------------------------------------------------------------- sums of 0


@strategies
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    ("case", "target"),
    [("zeros", "indices"), ("cancel", "indices"), ("usual", "indices"), ("zeros", "probabilities")],
)
def test_what_is_finite_is_what_is_in_eager(implementation, strategy, case, target, dtype):
    """Class weights that are 0, or cancel in the mean's denominator."""
    spec = Spec("mean", target, gradients=BOTH, strategy=strategy)
    tensors, labels, _ = problem(spec, dtype, shape=(6, 8, 11))
    class_weight = torch.ones(11, dtype=dtype)
    if target == "indices":
        labels = torch.arange(6) % 2
        class_weight[1] = {"zeros": 0, "cancel": -1, "usual": 2}[case]
        class_weight[0] = 0 if case == "zeros" else 1
    else:
        class_weight[:] = 0
    answers = [loss_and_gradients(p, tensors) for p in programs(spec, labels, class_weight)]
    for ours, theirs in zip(*answers, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert target == "indices" or not any(t.any() for t in answers[0])


CANCELLING = torch.eye(11)[1] - torch.eye(11)[2]  # class weights
TARGETS = {
    "probabilities": (centred(6, 11), None, 0.0),
    "weighted probabilities": (torch.full((6, 11), 1 / 11), CANCELLING, 0.0),
    "smoothed indices": (torch.zeros(6, dtype=torch.int64), CANCELLING, 0.1),
}


@strategies
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("case", TARGETS)
def test_a_target_distribution_that_cancels(implementation, device, case, reduction, strategy):
    """A row is not ignored because the factor of its softmax is 0."""
    where = device if implementation == "triton" else "cpu"
    target, class_weight, smoothing = TARGETS[case]
    kind = "probabilities" if target.is_floating_point() else "indices"
    spec = Spec(reduction, kind, -100, smoothing, gradients=BOTH, strategy=strategy)
    class_weight = None if class_weight is None else class_weight.to(where)
    fused, plain = programs(spec, target.to(where), class_weight)
    for dtype in (F32, BF16, F16):
        tensors = [torch.randn(6, 8).to(dtype), torch.randn(11, 8).to(dtype)]
        assert loss_and_gradients(fused, tensors)[1].any() if reduction == "sum" else True
        upstream = torch.ones(6) if reduction == "none" else None
        assert_as_accurate(fused, plain, tensors, dtype, upstream, F32)


# ---------------------------------------------------------------- autograd


def training(**changes):
    """(loss, x, weight) of a fresh training loss, the same each time."""
    spec = Spec(**{"gradients": BOTH, **changes})
    torch.manual_seed(0)
    (x, weight), target, _ = problem(spec, F32, shape=(6, 4, 9))
    leaves = x.requires_grad_(), weight.requires_grad_()
    return linear_cross_entropy(*leaves, target=target, spec=spec), *leaves


@strategies
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_retained_graph_gives_the_same_gradient_again(implementation, reduction, strategy):
    loss, _, weight = training(reduction=reduction, strategy=strategy)
    upstream = torch.ones_like(loss)
    first, third, last = (
        torch.autograd.grad(loss, weight, by * upstream, retain_graph=True)[0].clone()
        for by in (1, 3, 1)
    )
    torch.testing.assert_close(third, 3 * first)
    assert torch.equal(last, first)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss.sum(), weight, create_graph=True)


@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize(
    "inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.full)]
)
def test_no_row_counts_in_a_sum_over_the_number_of_labels(implementation, inner, retain):
    """The loss is nan, and its incoming gradient is infinite: an empty batch changes no weight."""
    x, weight = torch.randn(5, 6, requires_grad=True), torch.randn(7, 6, requires_grad=True)

    def program(x, weight, labels):
        loss = F.cross_entropy(F.linear(x, weight), labels, reduction="sum")
        return loss / (labels != -100).sum()

    options = {"fusedce.inner": inner} | {"fusedce.min_logits_mb": 0}
    fused = torch.compile(program, backend="fusedce", options=options)
    loss = fused(x, weight, torch.full((5,), -100))
    assert loss.isnan()
    found = torch.autograd.grad(loss, (x, weight), retain_graph=retain and inner == "eager")
    assert [int(grad.count_nonzero()) for grad in found] == [0, 0]


class Returned(TorchFunctionMode):
    """Dtype and number of elements of every tensor that a function of torch returns."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[tuple[torch.dtype, int]] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.kinds |= {(t.dtype, t.numel()) for t in tensors}
        return out


@pytest.mark.parametrize(("saved", "dtype"), [(BF16, BF16), (F32, F16)])
def test_a_gpu_scales_the_saved_gradient_without_a_wider_copy(saved, dtype):
    """A GPU's kernel casts what it reads and writes. The operator's backward hides its calls from
    modes, hence the function that it calls, and tensors on the meta device stand for a GPU's."""
    gradient = torch.empty(200, 300, dtype=saved, device="meta")
    with Returned() as returned:
        out = scaled(gradient, torch.empty((), device="meta"), dtype)
    assert out.dtype == dtype
    large = {dtype for dtype, elements in returned.kinds if elements > 1}
    assert large == {saved, dtype, torch.bool}  # the mask is of some rows
    assert (torch.bool, gradient.numel()) not in returned.kinds


@pytest.mark.only_gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_gpu_allocates_no_wider_copy(dtype):
    x = torch.randn(6, 512, dtype=dtype, device="cuda")
    weight = torch.randn(1 << 14, 512, dtype=dtype, device="cuda", requires_grad=True)
    target = torch.randint(len(weight), (6,), device="cuda")
    loss = linear_cross_entropy(x, weight, target=target, spec=Spec(gradients=("weight",)))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss.backward(torch.tensor(1 / 3, device="cuda"))
    assert torch.cuda.max_memory_allocated() - before < 1.1 * weight.nbytes


def test_fp16_gradients_survive_a_large_scale_and_many_rows(implementation):
    """Unnormalised in the buffers: dividing by N first would round most of them to zero."""
    n, d, v = 512, 8, 2000
    x, weight = torch.randn(n, d), torch.randn(v, d)
    target = torch.randint(v, (n,))
    half = [t.half().requires_grad_() for t in (x, weight)]
    wide = [t.detach().double().requires_grad_() for t in half]
    scale = 2.0**12
    (linear_cross_entropy(*half, target=target, spec=Spec(gradients=BOTH)) * scale).backward()
    (F.cross_entropy(F.linear(*wide), target) * scale).backward()
    for got, exact in zip(half, wide, strict=True):
        assert (got.grad.double() - exact.grad).norm() < 1e-3 * exact.grad.norm()
        # what fp16 can hold at this scale is there; nothing more was lost
        assert (got.grad == 0).sum() <= (exact.grad.half() == 0).sum() * 1.01


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(("index", "ignored"), [(9, -100), (-1, -100), (-100, None)])
def test_a_label_that_is_no_class(implementation, index, ignored):
    spec = Spec(ignore_index=ignored)
    x, weight = torch.randn(6, 4), torch.randn(9, 4)
    with pytest.raises(IndexError, match=f"class {index} is out of bounds"):
        linear_cross_entropy(x, weight, target=torch.full((6,), index), spec=spec)


@pytest.mark.parametrize("name", ["target", "class_weight"])
def test_targets_and_class_weights_have_no_gradient(implementation, name):
    """An error, and not a gradient that is missing."""
    spec = Spec(target="probabilities", gradients=("x",))
    (x, weight), target, class_weight = problem(spec, F32, True)
    named = {"target": target, "class_weight": class_weight}
    named[name] = named[name].requires_grad_()
    with pytest.raises(RuntimeError, match="requires a gradient"):
        linear_cross_entropy(x.requires_grad_(), weight, **named, spec=spec)
