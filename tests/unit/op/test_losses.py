"""What ``F.cross_entropy`` of a linear becomes: values and gradients against float64, ignored rows,
weights that cancel, its gradients' life, bad input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from fxpass.op import run
from fxpass.plan.plan import Plan
from tests.support.numerics import assert_as_accurate, loss_and_gradients
from tests.support.pairs import in_pairs

NAN = float("nan")
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
TRANSFORMS = {"none": lambda z: z, "soft-cap": lambda z: 30 * torch.tanh(z / 30)}
REDUCTIONS = ("none", "mean", "sum")
STRATEGIES = ("chunked", "tiled")
TARGETS = ("indices", "probabilities")
WAYS = ("aten", "triton")

# numpy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def parts(strategy, monkeypatch):
    """Chunks of 3 rows, or tiles of 3 rows and 4 classes where no gradients are computed."""
    plan = Plan("aten", "chunked", 3, 4, block=2)

    def planned(*of_call):
        return plan if of_call[5].total else plan._replace(strategy=strategy)

    monkeypatch.setattr(run, "plan_head", planned)


# ---------------------------------------------------------------- programs


def programs(
    target: Tensor, weight: Tensor | None = None, transform="none", strategy="auto", **options
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """A loss of (x, weight[, bias]), fused and in eager."""

    def plain(x, w, bias=None):
        z = TRANSFORMS[transform](F.linear(x, w, bias))
        wide = z.double() if z.dtype == F64 else z.float()
        given, weights = (
            t.to(wide.dtype) if t is not None and t.is_floating_point() else t
            for t in (target, weight)
        )
        return F.cross_entropy(wide, given, weights, **options)

    settings = {"fusedce.inner": "eager", "fusedce.strategy": strategy}
    compiled = torch.compile(plain, backend="fusedce", options=settings)

    def fused(*tensors):
        loss = compiled(*tensors)
        assert counters["fusedce"]["matched"]
        return loss

    return fused, plain


def operands(shape=(17, 5, 11), dtype=F32, bias=True) -> list[Tensor]:
    n, d, v = shape
    found = [torch.randn(n, d), torch.randn(v, d), *[torch.randn(v)] * bias]
    return [t.to(dtype) for t in found]


def target_of(kind: str, n: int, v: int) -> Tensor:
    return torch.randint(v, (n,)) if kind == "indices" else torch.randn(n, v).softmax(1)


def of_rows(reduction: str, n: int) -> Tensor | None:
    """The gradient of a loss of each row."""
    return torch.arange(1.0, n + 1) if reduction == "none" else None


@in_pairs(
    strategy=STRATEGIES,
    reduction=REDUCTIONS,
    ignored=(-100, 3, None),  # with class probabilities
    smoothing=(0.0, 0.1, 1.0),
    weighted=(False, True),
    bias=(False, True),
    transform=TRANSFORMS,
    dtype=(F64, F32, BF16, F16),
)
@pytest.mark.usefixtures("parts")
def test_options(strategy, reduction, ignored, smoothing, weighted, bias, transform, dtype):
    target = target_of("probabilities" if ignored is None else "indices", 17, 11)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    if ignored is not None:
        target[1::20] = options["ignore_index"] = ignored  # too few to be left out beforehand
    weights = torch.rand(11) if weighted else None
    both = programs(target, weights, transform, strategy, **options)
    tensors = operands(dtype=dtype, bias=bias)
    assert_as_accurate(*both, tensors, dtype, of_rows(reduction, 17))


@in_pairs(implementation=WAYS, strategy=STRATEGIES, reduction=REDUCTIONS, kept=(0, 3))
def test_ignored_rows_are_not_multiplied(implementation, strategy, reduction, kept):
    """Nothing of what is in them arrives anywhere; their losses and gradients are zeros. Of no rows
    the mean is nan, as in eager."""
    counted = torch.arange(7).sub(2).ge(0).logical_and(torch.arange(7) < 2 + kept)
    target = torch.where(counted, torch.arange(7), -1)
    options = {"reduction": reduction, "label_smoothing": 0.1, "ignore_index": -1}
    fused, plain = programs(target, torch.rand(11), strategy=strategy, **options)
    tensors, upstream = operands((7, 5, 11)), of_rows(reduction, 7)
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


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("count", [1, 10])
def test_few_rows_with_a_gradient(strategy, count):
    """A confident row's gradient is 1 - p, which another rounding of the logits would change; the
    product of few rows has another one than that of all."""
    x, weight = torch.randn(30, 16) * 8, torch.randn(40, 16) * 4
    both = programs((x @ weight.t()).argmax(-1), strategy=strategy, reduction="none")
    assert_as_accurate(*both, [x, weight], F32, (torch.arange(30) >= 30 - count).float())


# ---------------------------------------------------------------- sums of 0


WEIGHTS = {"zeros": [0, 0], "cancel": [1, -1], "usual": [1, 2], "all zeros": [0] * 11}


@in_pairs(implementation=WAYS, strategy=STRATEGIES, case=WEIGHTS)
def test_what_is_finite_is_what_is_in_eager(implementation, strategy, case):
    """Class weights that are 0, or cancel in the mean's denominator."""
    weight = torch.tensor([*WEIGHTS[case], *[1] * 9][:11], dtype=F32)
    target = target_of("probabilities", 6, 11) if case == "all zeros" else torch.arange(6) % 2
    tensors = operands((6, 8, 11), bias=False)
    both = programs(target, weight, strategy=strategy)
    answers = [loss_and_gradients(program, tensors) for program in both]
    for ours, theirs in zip(*answers, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert case != "all zeros" or not any(t.any() for t in answers[0])


CANCELLING = torch.eye(11)[1] - torch.eye(11)[2]  # class weights
CENTRED = (torch.eye(11)[1] - torch.eye(11)[-2]).expand(6, 11) / 2
SUMS = {
    "probabilities": (CENTRED, None, 0.0),
    "weighted probabilities": (torch.full((6, 11), 1 / 11), CANCELLING, 0.0),
    "smoothed indices": (torch.zeros(6, dtype=torch.int64), CANCELLING, 0.1),
}


@in_pairs(
    implementation=WAYS,
    case=SUMS,
    reduction=("none", "sum"),
    strategy=STRATEGIES,
    dtype=(F32, BF16, F16),
)
def test_a_distribution_that_cancels(implementation, device, case, reduction, strategy, dtype):
    """A row is not ignored because the factor of its softmax is 0."""
    where = device if implementation == "triton" else "cpu"
    target, weights, smoothing = SUMS[case]
    weights = None if weights is None else weights.to(where)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    fused, plain = programs(target.to(where), weights, strategy=strategy, **options)
    tensors = operands((6, 8, 11), dtype, bias=False)
    upstream = torch.ones(6) if reduction == "none" else None
    assert loss_and_gradients(fused, tensors, None, upstream)[1].any()
    assert_as_accurate(fused, plain, tensors, dtype, upstream)


# ---------------------------------------------------------------- autograd


@torch._functorch.config.patch(donated_buffer=False)
@in_pairs(implementation=WAYS, reduction=REDUCTIONS, strategy=STRATEGIES)
def test_a_retained_graph_gives_the_same_gradient_again(implementation, reduction, strategy):
    x, weight, _ = (t.requires_grad_() for t in operands((6, 4, 9)))
    fused, _ = programs(target_of("indices", 6, 9), strategy=strategy, reduction=reduction)
    loss = fused(x, weight)
    first, third, last = (
        torch.autograd.grad(loss, weight, by * torch.ones_like(loss), retain_graph=True)[0].clone()
        for by in (1, 3, 1)
    )
    torch.testing.assert_close(third, 3 * first)
    assert torch.equal(last, first)


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

    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": inner})
    loss = fused(x, weight, torch.full((5,), -100))
    assert loss.isnan()
    found = torch.autograd.grad(loss, (x, weight), retain_graph=retain and inner == "eager")
    assert [int(grad.count_nonzero()) for grad in found] == [0, 0]


@pytest.mark.only_gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_gpu_allocates_no_wider_copy(dtype):
    x = torch.randn(6, 512, dtype=dtype, device="cuda")
    weight = torch.randn(1 << 14, 512, dtype=dtype, device="cuda", requires_grad=True)
    loss = programs(torch.randint(len(weight), (6,), device="cuda"))[0](x, weight)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss.backward(torch.tensor(1 / 3, device="cuda"))
    assert torch.cuda.max_memory_allocated() - before < 1.1 * weight.nbytes


def test_fp16_gradients_survive_a_large_scale_and_many_rows(implementation):
    """Unnormalised in the buffers: dividing by N first would round most of them to zero."""
    n, d, v = 256, 8, 1000
    x, weight = torch.randn(n, d), torch.randn(v, d)
    target = torch.randint(v, (n,))
    half = [t.half().requires_grad_() for t in (x, weight)]
    wide = [t.detach().double().requires_grad_() for t in half]
    scale = 2.0**12
    (programs(target, strategy="chunked")[0](*half) * scale).backward()
    (F.cross_entropy(F.linear(*wide), target) * scale).backward()
    for got, exact in zip(half, wide, strict=True):
        assert (got.grad.double() - exact.grad).norm() < 1e-3 * exact.grad.norm()
        # what fp16 can hold at this scale is there; nothing more was lost
        assert (got.grad == 0).sum() <= (exact.grad.half() == 0).sum() * 1.01


@pytest.mark.parametrize(("index", "ignored"), [(9, -100), (-1, -100), (-100, 0)])
def test_a_label_that_is_no_class(implementation, index, ignored):
    fused, _ = programs(torch.full((6,), index), ignore_index=ignored)
    with pytest.raises(IndexError, match=f"class {index} is out of bounds"):
        fused(torch.randn(6, 4), torch.randn(9, 4))
