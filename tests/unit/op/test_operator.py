"""The operator as an operator: schema, fake, autograd, its gradients' life, bad input."""

from __future__ import annotations

import dataclasses
import itertools

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fxpass.op.dispatch import compute
from fxpass.op.operator import linear_cross_entropy, linear_cross_entropy_backward
from fxpass.op.saved import scaled
from fxpass.spec.operands import Inputs
from fxpass.spec.spec import ELSEWHERE, IGNORED, REVISION, Spec

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
    return x, weight, b, target, torch.rand(V) if weighted else None, z, spec.text()


def test_the_operators_of_this_revision():
    """Graphs in compile caches call them like this: another schema needs another revision."""
    names = ("", "_backward")
    operators = [getattr(torch.ops.fxpass, f"linear_cross_entropy{name}") for name in names]
    schemas = [REVISION, *(str(operator.default._schema) for operator in operators)]
    expecttest.assert_expected_inline(
        "\n".join(schemas),
        """\
v6
fxpass::linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor? target, Tensor? class_weight, Tensor? logits, str spec) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)
fxpass::linear_cross_entropy_backward(Tensor? row_scale, Tensor? lse_scale, Tensor? lse, Tensor? lse_rest, Tensor x, Tensor weight, Tensor? bias, Tensor? target, Tensor? class_weight, Tensor? logits, str spec) -> (Tensor, Tensor, Tensor)""",
    )


def opcheck(operator, args, implementation: str) -> None:
    """What an implementation decides is what comes out; the rest is checked with one of them."""
    fewer = {"test_utils": ("test_schema", "test_faketensor")} if implementation == "triton" else {}
    torch.library.opcheck(operator, args, **fewer)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("target", ["indices", "probabilities", "none"])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
def test_opcheck(reduction, target, lse, strategy, implementation):
    smoothing = 0.0 if target == "none" else 0.1
    every = ("x", "weight", "bias")
    cases = itertools.product([(), ("x",), every], [False, True])
    if (strategy, implementation) != ("chunked", "aten"):
        # what differs is where the gradients are computed, and by whom
        cases = [((), False), (every, True)]
    for gradients, full in cases:
        bias = full or "bias" in gradients
        spec = Spec(reduction, target, -100, smoothing, gradients=gradients, lse=lse)
        spec = dataclasses.replace(spec, strategy=strategy)
        args = arguments(spec, bias=bias, weighted=full, logits=full)
        opcheck(torch.ops.fxpass.linear_cross_entropy.default, args, implementation)


@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
def test_opcheck_of_what_backward_calls(strategy, implementation):
    spec = Spec("none", gradients=("x", "weight", "bias"), strategy=strategy)
    lse = (torch.zeros(N), torch.zeros(N)) if strategy == "tiled" else (None, None)
    args = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments(spec)]
    for scales in itertools.product([torch.rand(N), None], [torch.rand(N), None]):
        if scales != (None, None):
            backward = torch.ops.fxpass.linear_cross_entropy_backward.default
            opcheck(backward, (*scales, *lse, *args), implementation)


def training(**changes):
    """(loss, x, weight) of a fresh training loss."""
    spec = Spec(**{"gradients": ("x", "weight"), **changes})
    torch.manual_seed(0)
    x, weight, *rest = arguments(spec, bias=False, weighted=False)
    return linear_cross_entropy(x, weight, *rest)[0], x, weight


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


def test_the_last_backward_allocates_no_second_weight_gradient():
    x, weight, *rest = arguments(Spec(gradients=("x", "weight")), bias=False, weighted=False)
    loss, _, _, _, saved, *_ = linear_cross_entropy(x, weight, *rest)
    (kept,) = torch.autograd.grad(loss, weight, retain_graph=True)
    assert kept.data_ptr() != saved.data_ptr()
    (last,) = torch.autograd.grad(loss, weight)
    assert last.data_ptr() == saved.data_ptr()
    assert torch.equal(kept, last)


@pytest.mark.parametrize(
    "shape", [(7, 3, 5), (0, 3, 5), (7, 3000, 50), (1300, 3000, 50), (3, 7, 70000)]
)
def test_a_gradient_is_rounded_once_and_by_parts(shape):
    """Operands of fp16: what is kept in f32 until backward is read once, and stays as it is."""
    n, v, d = shape
    sizes = (n, d), (v, d), (v,)
    leaves = [torch.randn(s, dtype=torch.float16, requires_grad=True) for s in sizes]
    text = Spec("sum", gradients=("x", "weight", "bias")).text()
    target = torch.arange(n) % v
    loss, _, _, *saved, _ = linear_cross_entropy(*leaves, target, None, None, text)
    kept = [gradient.clone() for gradient in saved]
    loss.backward(torch.tensor(1 / 3))
    for leaf, gradient, before in zip(leaves, saved, kept, strict=True):
        assert gradient.dtype == torch.float32
        assert torch.equal(leaf.grad, (before * torch.tensor(1 / 3)).half())
        assert torch.equal(gradient, before)


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
    loss, *_ = linear_cross_entropy(x, weight, None, target, None, None, text)
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
    second = linear_cross_entropy(*args, Spec(gradients=("x", "weight")).text())[0]
    (alone,) = torch.autograd.grad(second, weight, retain_graph=True)
    second.backward()
    torch.testing.assert_close(weight.grad, once + alone)


def z_loss_training(spec):
    """(loss, lse, leaves) of the operator, and of the program that it stands for in float64."""
    torch.manual_seed(0)
    x, weight, _, target, *rest = arguments(spec, bias=False, weighted=False)
    target[2] = -100
    loss, lse, *_ = linear_cross_entropy(x, weight, None, target, *rest)
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


def test_an_lse_that_was_not_asked_for():
    lse = linear_cross_entropy(*arguments(Spec(gradients=("x",))))[1]
    assert lse.shape == (0,)
    assert not lse.requires_grad


@pytest.mark.parametrize("target", ["indices", "none"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_loss_and_lse_in_a_compiled_graph(dynamic, target):
    spec = Spec("mean", target, gradients=("x", "weight"), lse=True)
    x, weight, _, target, *rest = arguments(spec, bias=False, weighted=False)

    def step(x, weight):
        loss, lse, *_ = linear_cross_entropy(x, weight, None, target, *rest)
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
    args = list(arguments(Spec(gradients=("x", "weight"))))
    args[-1] = Spec(gradients=("x",)).text()
    with pytest.raises(RuntimeError, match="weight requires a gradient"):
        linear_cross_entropy(*args)


def test_the_same_bits_every_time():
    (a, _, w1), (b, _, w2) = training(), training()
    a.backward()
    b.backward()
    assert torch.equal(a, b)
    assert torch.equal(w1.grad, w2.grad)


def test_ambient_autocast_changes_nothing_in_here():
    args = arguments(Spec())
    plain = linear_cross_entropy(*args)[0]
    with torch.autocast(plain.device.type, torch.bfloat16):
        assert torch.equal(linear_cross_entropy(*args)[0], plain)


def test_fp16_gradients_survive_a_large_scale_and_many_rows():
    """Unnormalised in the buffers: dividing by N first would round most of them to zero."""
    n, d, v = 512, 8, 2000
    x, weight = torch.randn(n, d), torch.randn(v, d)
    target = torch.randint(v, (n,))
    half = [t.half().requires_grad_() for t in (x, weight)]
    wide = [t.detach().double().requires_grad_() for t in half]
    spec = Spec(gradients=("x", "weight")).text()
    scale = 2.0**12
    (linear_cross_entropy(*half, None, target, None, None, spec)[0] * scale).backward()
    (F.cross_entropy(F.linear(*wide), target) * scale).backward()
    for got, exact in zip(half, wide, strict=True):
        error = (got.grad.double() - exact.grad).norm() / exact.grad.norm()
        assert error < 1e-3
        # what fp16 can hold at this scale is there; nothing more was lost
        assert (got.grad == 0).sum() <= (exact.grad.half() == 0).sum() * 1.01


# ---------------------------------------------------------------- shards of the classes


def in_shard(strategy, **changes):
    """Arguments of a shard's loss: rows with a target here, elsewhere, and ignored."""
    whole = Spec(gradients=("x", "weight", "bias"), strategy=strategy, shard_of=20, **changes)
    args = arguments(whole.of_shard())
    if args[3] is not None and args[3].dtype == torch.int64:
        args[3][:4] = torch.tensor([ELSEWHERE, ELSEWHERE, IGNORED, IGNORED])
    return args


@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
def test_opcheck_of_a_shard(strategy, implementation):
    args = in_shard(strategy, label_smoothing=0.1)
    opcheck(torch.ops.fxpass.linear_cross_entropy.default, args, implementation)


@pytest.mark.parametrize(
    ("strategy", "lse"), [("chunked", True), ("chunked", False), ("tiled", True)]
)
def test_opcheck_of_a_shard_without_classes(lse, strategy, implementation):
    x, weight, bias, target, _, _, text = in_shard(strategy)
    spec = dataclasses.replace(Spec.parse(text), lse=lse)
    weight, bias = (t.detach()[:0].requires_grad_() for t in (weight, bias))
    args = (x, weight, bias, target.clamp(max=ELSEWHERE), None, None, spec.text())
    opcheck(torch.ops.fxpass.linear_cross_entropy.default, args, implementation)


@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_shard_without_classes_adds_nothing(dtype, strategy):
    *_, text = in_shard(strategy, label_smoothing=0.1)
    x, weight, bias = (torch.randn(s, dtype=dtype) for s in ((N, D), (0, D), (0,)))
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    target = torch.tensor([ELSEWHERE] * 4 + [IGNORED] * 2)
    loss, lse, *_ = linear_cross_entropy(*leaves, target, torch.rand(0), None, text)
    assert loss.dtype == lse.dtype == torch.promote_types(dtype, torch.float32)
    assert loss.tolist() == [0.0] * N
    assert lse.tolist() == [torch.finfo(lse.dtype).min] * N
    (loss + lse * torch.randn(N)).sum().backward()
    for leaf in leaves:
        assert leaf.grad.shape == leaf.shape
        assert leaf.grad.dtype == dtype
        assert not leaf.grad.any()


@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
@pytest.mark.parametrize("read", ["loss", "lse", "both"])
def test_rows_that_a_shard_ignores_are_left_out(read, strategy):
    """Of forward and backward: nothing of what is in them arrives anywhere."""
    x, weight, bias, target, *rest = in_shard(strategy, label_smoothing=0.1)
    counted = torch.tensor([0, 1, 4, 5])
    of_loss, of_lse = torch.randn(4) * (read != "lse"), torch.randn(4) * (read != "loss")

    def answer(rows, target, counted):
        leaves = [t.detach().requires_grad_() for t in (rows, weight, bias)]
        loss, lse, *_ = linear_cross_entropy(*leaves, target, *rest)
        total = loss[counted] @ of_loss + lse[counted] @ of_lse
        x_grad, *grads = torch.autograd.grad(total, leaves)
        return loss, x_grad, (loss[counted], lse[counted], x_grad[counted], *grads)

    spoilt = x.detach().clone()
    spoilt[2:4] = torch.nan
    loss, x_grad, ours = answer(spoilt, target, counted)
    _, _, alone = answer(x[counted], target[counted], torch.arange(4))
    torch.testing.assert_close(ours, alone)
    assert not loss[2:4].any()
    assert not x_grad[2:4].any()


@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
def test_an_ignored_row_of_a_shard_has_the_largest_lse(strategy):
    """It has to be finite, and its softmax 0: other ranks' shards subtract theirs from it."""
    lse = linear_cross_entropy(*in_shard(strategy))[1]
    assert lse[2:4].tolist() == [torch.finfo(torch.float32).max] * 2
    assert (lse[[0, 1, 4, 5]].abs() < 100).all()


@pytest.mark.parametrize("exist", [False, True])
def test_large_logits_that_exist_are_read(exist):
    """And not computed in the memory of the weight's gradient, as others of this size are."""
    n, d, v = 64, 64, 70000
    x, weight, target = torch.randn(n, d) / d, torch.randn(v, d), torch.arange(n)
    logits = torch.zeros(n, v) if exist else None
    text = Spec("sum", gradients=("x", "weight"), strategy="chunked").text()
    loss, *_ = linear_cross_entropy(x, weight, None, target, None, logits, text)
    read = x @ weight.t() if logits is None else logits
    torch.testing.assert_close(loss, F.cross_entropy(read, target, reduction="sum"))


# ---------------------------------------------------------------- bad input


def bad(**changes):
    spec = changes.pop("spec", Spec())
    names = ("x", "weight", "bias", "target", "class_weight", "logits")
    args = dict(zip(names, arguments(spec, logits=True), strict=False)) | changes
    return lambda: linear_cross_entropy(*args.values(), spec.text())


PROBABILITIES = Spec(target="probabilities")
NO_TARGET = Spec(target="none")
EVERY_ROW = Spec(ignore_index=None)
IN_SHARD = Spec(reduction="none", shard_of=20)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (bad(x=torch.randn(N, D + 1)), ValueError, r"weight \[V, D\], got \[6, 5\] and \[9, 4\]"),
        (bad(x=torch.randn(2, N, D)), ValueError, r"x \[N, D\]"),
        (bad(x=torch.ones(N, D, dtype=torch.int64)), ValueError, "floating-point"),
        (bad(x=torch.randn(N, D).bfloat16()), ValueError, "one floating-point dtype"),
        (bad(bias=torch.randn(V + 1)), ValueError, r"bias \[9\]"),
        (bad(class_weight=torch.randn(1, V)), ValueError, r"class_weight \[9\]"),
        (bad(logits=torch.randn(N, V + 1)), ValueError, r"logits \[6, 9\]"),
        (bad(target=torch.zeros(N + 1).long()), ValueError, r"class indices \[6\]"),
        (bad(target=torch.zeros(N, dtype=torch.int32)), ValueError, "int64 class indices"),
        (bad(target=torch.rand(N), spec=PROBABILITIES), ValueError, r"probabilities \[6, 9\]"),
        (
            bad(target=torch.ones(N, V).long(), spec=PROBABILITIES),
            ValueError,
            "floating-point prob",
        ),
        (bad(target=torch.full((N,), V)), IndexError, "Target 9 is out of bounds"),
        (bad(target=torch.full((N,), -1)), IndexError, "Target -1 is out of bounds"),
        (bad(target=torch.full((N,), -100), spec=EVERY_ROW), IndexError, "Target -100 is out of"),
        (
            bad(target=torch.full((N,), -2), spec=IN_SHARD),
            IndexError,
            "A target is out .* are 20 classes",
        ),
        (bad(target=torch.full((N,), V), spec=IN_SHARD), IndexError, "A target is out of bounds"),
        (bad(target=None), ValueError, "needs a target, and .* got None for target=indices"),
        (bad(target=None, spec=PROBABILITIES), ValueError, "got None for target=probabilities"),
        (bad(target=torch.zeros(N).long(), spec=NO_TARGET), ValueError, r"got \[6\] for .*none"),
        (bad(class_weight=torch.rand(V), spec=NO_TARGET), ValueError, "takes no class_weight"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_no_rows_give_nan_as_in_eager():
    empty = torch.randn(0, D), torch.randn(V, D), None, torch.zeros(0).long(), None, None
    assert linear_cross_entropy(*empty, Spec().text())[0].isnan()
    assert linear_cross_entropy(*empty, Spec("sum").text())[0] == 0
    assert linear_cross_entropy(*empty, Spec("none").text())[0].shape == (0,)
    without = (*empty[:3], None, *empty[4:])
    assert linear_cross_entropy(*without, Spec("mean", "none").text())[0].isnan()
    assert linear_cross_entropy(*without, Spec("sum", "none").text())[0] == 0


@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
def test_backward_of_rows_scales_each_row(strategy):
    spec = Spec("none", gradients=("x",), strategy=strategy)
    args = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments(spec)]
    _, lse, *_, rest = linear_cross_entropy(*args)
    lse = (lse, rest) if strategy == "tiled" else (None, None)
    scale = torch.tensor([0.0, 1.0, 2.0, 0.0, 5.0, 1e-6])
    ones = linear_cross_entropy_backward(torch.ones(N), None, *lse, *args)[0]
    torch.testing.assert_close(
        linear_cross_entropy_backward(scale, None, *lse, *args)[0], ones * scale[:, None]
    )


def test_the_host_keeps_no_books_for_autograd():
    """Version counters and views of the operator's own tensors would cost a fifth of its time."""
    x, weight, target = torch.randn(N, D), torch.randn(V, D, requires_grad=True), torch.arange(N)
    out = compute(Inputs(x, weight, None, target), Spec(gradients=("x", "weight")))
    assert out.weight is not None
    assert out.weight._version == 0
    assert not out.weight.requires_grad
