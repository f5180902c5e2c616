"""The fused loss as a function: autograd, its gradients' life, bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fxpass.op.saved import scaled
from tests.support.losses import Spec, linear_cross_entropy

pytestmark = [
    pytest.mark.usefixtures("implementation"),
    # torch 2.15's own, where opcheck describes the tensors that it made of the arguments
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

N, D, V = 6, 4, 9


def arguments(spec: Spec, dtype=torch.float32, bias=True, weighted=True, logits=False):
    """Arguments of the operator; those that the spec names require gradients."""
    x, weight = torch.randn(N, D, dtype=dtype), torch.randn(V, D, dtype=dtype)
    b = torch.randn(V, dtype=dtype) if bias else None
    z = F.linear(x, weight, b) if logits else None
    for name, tensor in (("x", x), ("weight", weight), ("bias", b)):
        if tensor is not None:
            tensor.requires_grad_(name in spec.gradients)
    targets = {
        "indices": lambda: torch.randint(V, (N,)),
        "probabilities": lambda: torch.rand(N, V).softmax(1),
    }
    target = targets[spec.target]()
    return x, weight, b, target, torch.rand(V) if weighted else None, z


def training(**changes):
    """(loss, x, weight) of a fresh training loss."""
    spec = Spec(**{"gradients": ("x", "weight"), **changes})
    torch.manual_seed(0)
    x, weight, *rest = arguments(spec, bias=False, weighted=False)
    return linear_cross_entropy(x, weight, *rest, spec=spec), x, weight


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
def test_a_retained_graph_gives_the_same_gradient_again(reduction, strategy):
    loss, _, weight = training(reduction=reduction, strategy=strategy)
    upstream = torch.ones_like(loss)
    loss.backward(upstream, retain_graph=True)
    first = weight.grad.clone()
    weight.grad = None
    loss.backward(3 * upstream, retain_graph=True)
    torch.testing.assert_close(weight.grad, 3 * first)
    weight.grad = None
    loss.backward(upstream)
    assert torch.equal(weight.grad, first)


@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_no_row_counts_in_a_sum_over_the_number_of_labels(inner, retain):
    """The loss is nan, and its incoming gradient is infinite: an empty batch changes no weight."""
    x, weight = torch.randn(5, 6, requires_grad=True), torch.randn(7, 6, requires_grad=True)

    def program(x, weight, labels):
        logits = torch.nn.functional.linear(x, weight)
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
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


@pytest.mark.parametrize(
    ("saved", "dtype"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)]
)
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
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_allocates_no_wider_copy(dtype):
    x = torch.randn(N, 512, dtype=dtype, device="cuda")
    weight = torch.randn(1 << 14, 512, dtype=dtype, device="cuda", requires_grad=True)
    target = torch.randint(len(weight), (N,), device="cuda")
    spec = Spec(gradients=("weight",))
    loss = linear_cross_entropy(x, weight, target=target, spec=spec)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss.backward(torch.tensor(1 / 3, device="cuda"))
    assert torch.cuda.max_memory_allocated() - before < 1.1 * weight.nbytes


def test_accumulating_twice():
    loss, x, weight = training()
    loss.backward()
    once = weight.grad.clone()
    for t in (x, weight):
        assert t.grad is not None
    args = (x, weight, None, torch.randint(V, (N,)), None, None)
    second = linear_cross_entropy(*args, spec=Spec(gradients=("x", "weight")))
    (alone,) = torch.autograd.grad(second, weight, retain_graph=True)
    second.backward()
    torch.testing.assert_close(weight.grad, once + alone)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_second_derivative_is_refused(reduction):
    loss, x, _ = training(reduction=reduction)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss.sum(), x, create_graph=True)


def test_a_gradient_that_the_spec_does_not_name_is_refused():
    args = arguments(Spec(gradients=("x", "weight")))
    with pytest.raises(RuntimeError, match="weight requires a gradient"):
        linear_cross_entropy(*args, spec=Spec(gradients=("x",)))


def test_the_same_bits_every_time():
    (a, _, w1), (b, _, w2) = training(), training()
    a.backward()
    b.backward()
    assert torch.equal(a, b)
    assert torch.equal(w1.grad, w2.grad)


def test_ambient_autocast_changes_nothing_in_here():
    args = arguments(Spec())
    plain = linear_cross_entropy(*args, spec=Spec())
    with torch.autocast(plain.device.type, torch.bfloat16):
        assert torch.equal(linear_cross_entropy(*args, spec=Spec()), plain)


def test_fp16_gradients_survive_a_large_scale_and_many_rows():
    """Unnormalised in the buffers: dividing by N first would round most of them to zero."""
    n, d, v = 512, 8, 2000
    x, weight = torch.randn(n, d), torch.randn(v, d)
    target = torch.randint(v, (n,))
    half = [t.half().requires_grad_() for t in (x, weight)]
    wide = [t.detach().double().requires_grad_() for t in half]
    spec = Spec(gradients=("x", "weight"))
    scale = 2.0**12
    (linear_cross_entropy(*half, target=target, spec=spec) * scale).backward()
    (F.cross_entropy(F.linear(*wide), target) * scale).backward()
    for got, exact in zip(half, wide, strict=True):
        error = (got.grad.double() - exact.grad).norm() / exact.grad.norm()
        assert error < 1e-3
        # what fp16 can hold at this scale is there; nothing more was lost
        assert (got.grad == 0).sum() <= (exact.grad.half() == 0).sum() * 1.01


# ---------------------------------------------------------------- bad input


def bad(**changes):
    spec = changes.pop("spec", Spec())
    names = ("x", "weight", "bias", "target", "class_weight", "logits")
    args = dict(zip(names, arguments(spec, logits=True), strict=False)) | changes
    return lambda: linear_cross_entropy(**args, spec=spec)


EVERY_ROW = Spec(ignore_index=None)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (bad(x=torch.randn(N, D + 1)), ValueError, r"weight \[V, D\], got \[6, 5\] and \[9, 4\]"),
        (bad(bias=torch.randn(V + 1)), ValueError, r"bias \[9\]"),
        (bad(logits=torch.randn(N, V + 1)), ValueError, r"logits \[6, 9\]"),
        (bad(target=torch.full((N,), V)), IndexError, "class 9 is out of bounds"),
        (bad(target=torch.full((N,), -1)), IndexError, "class -1 is out of bounds"),
        (bad(target=torch.full((N,), -100), spec=EVERY_ROW), IndexError, "class -100 is out of"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_no_rows_give_nan_as_in_eager():
    x, weight, target = torch.randn(0, D), torch.randn(V, D), torch.zeros(0).long()

    def loss(reduction):
        return linear_cross_entropy(x, weight, target=target, spec=Spec(reduction))

    assert loss("mean").isnan()
    assert loss("sum") == 0
    assert loss("none").shape == (0,)


@pytest.mark.parametrize("name", ["target", "class_weight"])
def test_targets_and_class_weights_have_no_gradient(name):
    """An error, and not a gradient that is missing."""
    spec = Spec(target="probabilities", gradients=("x",))
    x, weight, _, target, class_weight, _ = arguments(spec, bias=False)
    named = {"target": target, "class_weight": class_weight}
    named[name] = named[name].requires_grad_()
    with pytest.raises(RuntimeError, match="requires a gradient"):
        linear_cross_entropy(x, weight, **named, spec=spec)


@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
def test_class_weights_of_zero_in_fp16(strategy):
    spec = Spec("sum", "probabilities", gradients=("x", "weight"), strategy=strategy)
    x, weight, _, target, *_ = arguments(spec, torch.float16, bias=False)
    loss = linear_cross_entropy(x, weight, None, target, torch.zeros(V), spec=spec)
    for grad in torch.autograd.grad(loss, (x, weight)):
        assert not grad.any()
