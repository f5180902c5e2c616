"""The fused loss as a function: autograd, its gradients' life, bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fxpass.op.losses import linear_cross_entropy
from fxpass.op.saved import scaled
from fxpass.spec.spec import Spec

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
        "none": lambda: None,
    }
    target = targets[spec.target]()
    weighted = weighted and target is not None
    return x, weight, b, target, torch.rand(V) if weighted else None, z


def training(**changes):
    """(loss, x, weight) of a fresh training loss."""
    spec = Spec(**{"gradients": ("x", "weight"), **changes})
    torch.manual_seed(0)
    x, weight, *rest = arguments(spec, bias=False, weighted=False)
    return linear_cross_entropy(x, weight, *rest, spec=spec.text())[0], x, weight


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
    large = {dtype for dtype, elements in returned.kinds if elements == gradient.numel()}
    assert large == {saved, dtype}


@pytest.mark.only_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_allocates_no_wider_copy(dtype):
    x = torch.randn(N, 512, dtype=dtype, device="cuda")
    weight = torch.randn(1 << 14, 512, dtype=dtype, device="cuda", requires_grad=True)
    target = torch.randint(len(weight), (N,), device="cuda")
    text = Spec(gradients=("weight",)).text()
    loss, _ = linear_cross_entropy(x, weight, target=target, spec=text)
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
    second = linear_cross_entropy(*args, spec=Spec(gradients=("x", "weight")).text())[0]
    (alone,) = torch.autograd.grad(second, weight, retain_graph=True)
    second.backward()
    torch.testing.assert_close(weight.grad, once + alone)


def z_loss_training(spec):
    """(loss, lse, leaves) of the operator, and of the program that it stands for in float64."""
    torch.manual_seed(0)
    x, weight, _, target, *rest = arguments(spec, bias=False, weighted=False)
    target[2] = -100
    loss, lse = linear_cross_entropy(x, weight, None, target, *rest, spec=spec.text())
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    z = F.linear(*wide)
    exact = F.cross_entropy(z, target, reduction=spec.reduction), z.logsumexp(1)
    return (loss, lse, [x, weight]), (*exact, wide)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("read", ["loss", "lse", "both"])
def test_each_of_loss_and_lse_may_be_read_alone(reduction, read):
    spec = Spec(reduction, gradients=("x", "weight"), lse=True)
    for loss, lse, leaves in (ours := z_loss_training(spec)):
        total = lse.square().mean() if read != "loss" else 0.0
        total = total + loss.sum() if read != "lse" else total
        total.backward()
        assert all(leaf.grad is not None for leaf in leaves)
    for got, want in zip(ours[0][2], ours[1][2], strict=True):
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_retained_graph_of_loss_and_lse(reduction):
    (loss, lse, (_, weight)), _ = z_loss_training(Spec(reduction, gradients=("weight",), lse=True))
    total = loss.sum() + 0.1 * lse.square().mean()
    (first,) = torch.autograd.grad(total, weight, retain_graph=True)
    (again,) = torch.autograd.grad(total, weight, retain_graph=True)
    assert torch.equal(first, again)
    (of_lse,) = torch.autograd.grad(lse.sum(), weight, retain_graph=True)
    (of_loss,) = torch.autograd.grad(loss.sum(), weight, retain_graph=True)
    (of_both,) = torch.autograd.grad(loss.sum() + lse.sum(), weight)
    torch.testing.assert_close(of_both, of_lse + of_loss)


@pytest.mark.parametrize("target", ["indices", "none"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_loss_and_lse_in_a_compiled_graph(dynamic, target):
    spec = Spec("mean", target, gradients=("x", "weight"), lse=True)
    x, weight, _, target, *rest = arguments(spec, bias=False, weighted=False)

    def step(x, weight):
        loss, lse = torch.ops.fxpass.linear_cross_entropy(
            x, weight, None, target, *rest, spec=spec.text()
        )
        return loss + 0.1 * (lse**2).mean()

    compiled = torch.compile(step, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    loss, want = compiled(x, weight), step(x, weight)
    assert torch.equal(loss, want)
    ours, theirs = (torch.autograd.grad(t, (x, weight)) for t in (loss, want))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_second_derivative_of_the_lse_is_refused(reduction):
    (_, lse, (x, _)), _ = z_loss_training(Spec(reduction, gradients=("x", "weight"), lse=True))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(lse.sum(), x, create_graph=True)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_second_derivative_is_refused(reduction):
    loss, x, _ = training(reduction=reduction)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss.sum(), x, create_graph=True)


def test_a_gradient_that_the_spec_does_not_name_is_refused():
    args = arguments(Spec(gradients=("x", "weight")))
    with pytest.raises(RuntimeError, match="weight requires a gradient"):
        linear_cross_entropy(*args, spec=Spec(gradients=("x",)).text())


def test_the_same_bits_every_time():
    (a, _, w1), (b, _, w2) = training(), training()
    a.backward()
    b.backward()
    assert torch.equal(a, b)
    assert torch.equal(w1.grad, w2.grad)


def test_ambient_autocast_changes_nothing_in_here():
    args = arguments(Spec())
    plain = linear_cross_entropy(*args, spec=Spec().text())[0]
    with torch.autocast(plain.device.type, torch.bfloat16):
        assert torch.equal(linear_cross_entropy(*args, spec=Spec().text())[0], plain)


def test_fp16_gradients_survive_a_large_scale_and_many_rows():
    """Unnormalised in the buffers: dividing by N first would round most of them to zero."""
    n, d, v = 512, 8, 2000
    x, weight = torch.randn(n, d), torch.randn(v, d)
    target = torch.randint(v, (n,))
    half = [t.half().requires_grad_() for t in (x, weight)]
    wide = [t.detach().double().requires_grad_() for t in half]
    spec = Spec(gradients=("x", "weight")).text()
    scale = 2.0**12
    (linear_cross_entropy(*half, target=target, spec=spec)[0] * scale).backward()
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
    return lambda: linear_cross_entropy(**args, spec=spec.text())


EVERY_ROW = Spec(ignore_index=None)
IN_SHARD = Spec(reduction="none", shard_of=20)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (bad(x=torch.randn(N, D + 1)), ValueError, r"weight \[V, D\], got \[6, 5\] and \[9, 4\]"),
        (bad(bias=torch.randn(V + 1)), ValueError, r"bias \[9\]"),
        (bad(logits=torch.randn(N, V + 1)), ValueError, r"logits \[6, 9\]"),
        (bad(target=torch.full((N,), V)), IndexError, "class 9 is out of bounds"),
        (bad(target=torch.full((N,), -1)), IndexError, "class -1 is out of bounds"),
        (bad(target=torch.full((N,), -100), spec=EVERY_ROW), IndexError, "class -100 is out of"),
        (bad(target=torch.full((N,), -2), spec=IN_SHARD), IndexError, "class -2 is out of"),
        (bad(target=torch.full((N,), 20), spec=IN_SHARD), IndexError, "class 20 is out of bounds"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_no_rows_give_nan_as_in_eager():
    x, weight, target = torch.randn(0, D), torch.randn(V, D), torch.zeros(0).long()
    for given in ("indices", "none"):
        named = {"target": target} if given == "indices" else {}

        def loss(reduction, given=given, named=named):
            spec = Spec(reduction, given).text()
            return linear_cross_entropy(x, weight, **named, spec=spec)[0]

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
        linear_cross_entropy(x, weight, **named, spec=spec.text())


@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
def test_class_weights_of_zero_in_fp16(strategy):
    spec = Spec("sum", "probabilities", gradients=("x", "weight"), strategy=strategy)
    x, weight, _, target, *_ = arguments(spec, torch.float16, bias=False)
    loss, _ = linear_cross_entropy(x, weight, None, target, torch.zeros(V), spec=spec.text())
    for grad in torch.autograd.grad(loss, (x, weight)):
        assert not grad.any()
