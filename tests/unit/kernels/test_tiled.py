"""The tiled Triton implementation against float64 autograd, forward and backward.

Runs on the GPU where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from fxpass.aten import chunked
from fxpass.kernels import call, tile_config, tiled
from fxpass.kernels.call import Operands
from fxpass.plan import devices
from fxpass.spec import expression
from fxpass.spec.operands import Inputs
from fxpass.spec.spec import Spec
from tests.support.implementations import DTYPES, GRADIENTS, TRANSFORMS, autograd, problem
from tests.support.numerics import FLOOR, error
from tests.support.tiled_runs import both, check, small_blocks


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    small_blocks(monkeypatch)


# ---------------------------------------------------------------- the meaning


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("target", ["indices", "probabilities"])
def test_targets(device, target, weighted, smoothing, dtype):
    """Rows that only the loss, only the lse, both and neither give a gradient; ignored ones too."""
    inputs = problem(
        device, dtype, n=10, target=target, weighted=weighted, row_scaled=True, lse_scaled=True
    )
    inputs.row_scale[[0, 2]] = 0
    inputs.lse_scale[[1, 2]] = 0
    if target == "indices":
        inputs.target[[4, 7]] = 3
    spec = Spec("sum", target, 3 if target == "indices" else -100, smoothing, gradients=GRADIENTS)
    out = check(inputs, spec)
    assert not out.x[2].any()
    if target == "indices":
        assert not out.loss[[4, 7]].any()
        assert out.lse[[4, 7]].all()
        assert out.x[[4, 7]].any(1).all()
    if dtype == torch.float32:  # no scale is one
        check(inputs._replace(row_scale=None), spec)
        without = check(inputs._replace(row_scale=None, lse_scale=None), spec)
        assert target == "probabilities" or not without.x[[4, 7]].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logits", TRANSFORMS)
def test_transforms(device, logits, dtype):
    spec = Spec(gradients=GRADIENTS, transform=expression.parse(logits), label_smoothing=0.1)
    inputs = problem(device, dtype, size=2.0, row_scaled=True, lse_scaled=True)
    inputs.target[3] = -100
    check(inputs, spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_scaled", [False, True])
def test_no_target(device, row_scaled, dtype):
    inputs = problem(device, dtype, target="none", row_scaled=row_scaled, size=2.0)
    for logits in ("z", "30*tanh(z/30)"):
        spec = Spec(target="none", gradients=GRADIENTS, transform=expression.parse(logits))
        out = check(inputs, spec)
        assert torch.equal(out.loss, out.lse)


@pytest.mark.parametrize("gradients", [("x",), ("weight",), ("bias",), ("x", "weight")])
def test_only_what_is_asked_for(device, gradients):
    check(problem(device), Spec(gradients=gradients))


@pytest.mark.parametrize("classes", [1, 16, 1 << 20])
@pytest.mark.parametrize("shape", [(1, 5, 37), (7, 1, 37), (7, 5, 1), (9, 8, 16), (17, 9, 50)])
def test_sizes(device, shape, classes):
    n, d, v = shape
    check(problem(device, n=n, d=d, v=v, row_scaled=True), Spec(gradients=GRADIENTS), classes)


def test_no_rows(device):
    out = both(problem(device, n=0), Spec(gradients=GRADIENTS))
    assert out.loss.shape == out.lse.shape == (0,)
    assert [float(grad.abs().sum()) for grad in out[2:]] == [0.0, 0.0, 0.0]
    assert [len(grad) for grad in out[2:]] == [0, 37, 37]


def test_no_bias(device):
    assert check(problem(device, bias=False), Spec(gradients=("x", "weight"))).bias is None


# ---------------------------------------------------------------- class indices


@pytest.mark.parametrize("ignored", [[0], [1, 2, 6], range(7)])
@pytest.mark.parametrize("ignore_index", [-100, 3, 1 << 40])
def test_ignored_rows(device, ignored, ignore_index):
    inputs = problem(device, row_scaled=True)
    inputs.target[list(ignored)] = ignore_index
    out = check(inputs, Spec(gradients=GRADIENTS, ignore_index=ignore_index))
    assert not out.loss[list(ignored)].any()
    assert not out.x[list(ignored)].any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
def test_what_an_ignored_row_holds_does_not_matter(device):
    inputs = problem(device)
    spec = Spec(gradients=("x", "bias"))
    inputs.target[4] = -100
    want = both(inputs, spec)
    inputs.x[4] = torch.nan
    out = both(inputs, spec)
    assert torch.equal(out.loss, want.loss)
    assert torch.equal(out.x, want.x)
    assert torch.equal(out.bias, want.bias)


def test_no_row_is_ignored_without_an_ignore_index(device):
    inputs = problem(device)
    for row_scaled in (False, True):
        inputs = inputs._replace(row_scale=torch.ones(7, device=device) if row_scaled else None)
        spec = Spec(gradients=GRADIENTS, ignore_index=None)
        ours, other = check(inputs, spec), both(inputs, dataclasses.replace(spec, ignore_index=-1))
        assert all(torch.equal(a, b) for a, b in zip(ours, other, strict=True))


def test_uint8_targets_reach_class_156(device):
    # -100 as uint8 is 156
    inputs = problem(device, v=200)
    inputs.target[:] = torch.tensor([156, 0, 199, 1, 156, 2, 3])
    out = check(inputs._replace(target=inputs.target.to(torch.uint8)), Spec(gradients=GRADIENTS))
    assert out.loss.all()


# ---------------------------------------------------------------- layouts


def test_non_contiguous(device):
    inputs = problem(device, n=14, d=10, v=74, weighted=True, row_scaled=True)
    strided = Inputs(
        x=inputs.x.t().contiguous().t()[::2, ::2],
        weight=inputs.weight[::2, ::2],
        bias=inputs.bias[::2],
        target=(inputs.target // 2)[::2],
        class_weight=inputs.class_weight[::2],
        row_scale=inputs.row_scale[::2],
    )
    check(strided, Spec(gradients=GRADIENTS, label_smoothing=0.1))
    check(strided._replace(row_scale=inputs.row_scale[:1].expand(7)), Spec(gradients=GRADIENTS))
    rows = strided._replace(x=inputs.x[::2, :5], weight=inputs.weight[::2, 5:])
    check(rows, Spec(gradients=GRADIENTS))


@pytest.mark.parametrize("layout", ["rows", "columns", "expanded"])
def test_non_contiguous_probabilities(device, layout):
    inputs = problem(device, target="probabilities")
    p = inputs.target
    strided = {
        "rows": torch.cat([p, p], 1)[:, :37],
        "columns": p.t().contiguous().t(),
        "expanded": p[:1].expand(7, 37),
    }[layout]
    check(inputs._replace(target=strided), Spec(gradients=GRADIENTS, target="probabilities"))


def test_given_logits_are_not_read(device):
    inputs = problem(device)
    logits = torch.full((7, 37), 1e9, device=device)
    check(inputs._replace(logits=logits), Spec(gradients=GRADIENTS))


# ---------------------------------------------------------------- numbers at the edge


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("target", ["indices", "probabilities"])
def test_huge_logits(device, target, smoothing):
    """A row of logits near 3e4 that differ by ones: the maximum has to go before sums are taken.

    A softmax taken from an lse in f32 alone would be off by up to half f32's spacing, 1e-3 here.
    """
    inputs = problem(device, target=target)
    inputs = inputs._replace(bias=inputs.bias + 3e4)
    spec = Spec(target=target, label_smoothing=smoothing, gradients=GRADIENTS)
    check(inputs, spec)


ODD_ROWS = {
    "padded classes": [*range(30), *[-torch.inf] * 7],
    "a whole split masked": [*[-torch.inf] * 24, *range(13)],
    "masked by the lowest number": [*[torch.finfo(torch.float32).min] * 20, *range(17)],
    "masked beside a huge one": [*[torch.finfo(torch.float32).min] * 20, *[3e38] * 17],
    "all masked": [-torch.inf] * 37,
    "infinite": [*range(36), torch.inf],
    "nan": [*range(36), torch.nan],
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("row", ODD_ROWS)
@pytest.mark.parametrize("target", [0, 20, "probabilities", "none"])
def test_odd_rows_as_in_aten(device, row, target):
    """Logits that a bias makes: x is 0, so the gradients of x and the weight are no test."""
    index = isinstance(target, int)
    inputs = problem(device, n=1, target="indices" if index else target, lse_scaled=True)
    if index:
        inputs.target[0] = target
    bias = torch.tensor(ODD_ROWS[row], device=device)
    inputs = inputs._replace(x=torch.zeros_like(inputs.x), bias=bias)
    spec = Spec(
        gradients=("bias",),
        lse=True,
        target="indices" if index else target,
        label_smoothing=0.0 if target in (0, "none") else 0.1,
    )
    ours, want = both(inputs, spec), chunked.run(inputs, spec, 1)[:5]
    torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("scale", [65536.0, 2.0**-20])
def test_scales_of_fp16(device, scale):
    """What a gradient scaler sends, divided by the rows: nothing over- or underflows."""
    inputs = problem(device, torch.float16, n=12, weighted=True)
    scales = torch.full((12,), scale / 12, device=device)
    spec = Spec(gradients=GRADIENTS, label_smoothing=0.1)
    for weights in (None, inputs.class_weight, inputs.class_weight * 2.0**12):
        scaled = inputs._replace(row_scale=scales, class_weight=weights)
        out, exact = both(scaled, spec), autograd(scaled, spec, torch.float64)
        for got, true in zip(out[2:], exact[2:], strict=True):
            rounded = true.half()  # infinite where the answer is: the scaler then looks for less
            assert torch.equal(got.isinf(), rounded.isinf())
            finite, small = rounded.isfinite(), 2.0**-24 * true.numel() ** 0.5
            off = (got.double() - true)[finite].norm()
            assert off <= FLOOR[torch.float16] * true[finite].norm() + small


@pytest.mark.parametrize(("v", "added"), [(37, [False]), (200, [False, True, True])])
def test_the_first_tile_overwrites_the_gradient_of_x(device, v, added, monkeypatch):
    """An addmm of one row may read an f32 sum as 16 bits; all its classes are one tile."""
    adds, product = [], tiled.product
    monkeypatch.setattr(tiled, "product", lambda *args: (adds.append(args[-1]), product(*args))[1])
    inputs = problem(device, torch.bfloat16, n=1, d=8, v=v)
    check(inputs, Spec(gradients=("x",)), classes=80)
    assert adds == added


def test_gradients_are_rounded_once_however_many_tiles_there_are(device):
    inputs = problem(device, torch.bfloat16, n=24, d=16, v=90, row_scaled=True)
    many, one = (both(inputs, Spec(gradients=GRADIENTS), classes) for classes in (16, 1 << 20))
    assert torch.equal(many.weight, one.weight)
    assert torch.equal(many.bias, one.bias)
    # in f32 the order of a sum hardly shows behind one rounding; six roundings are off by 2e-3
    assert error(many.x, one.x) < 2e-4


def test_same_bits_every_time(device):
    inputs = problem(device, torch.bfloat16, weighted=True, row_scaled=True, lse_scaled=True)
    spec = Spec(gradients=GRADIENTS, label_smoothing=0.1)
    first, second = (both(inputs, spec) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_loss_as_in_cross_entropy(device):
    inputs = problem(device)
    want = F.cross_entropy(F.linear(*inputs[:3]), inputs.target, reduction="none")
    torch.testing.assert_close(both(inputs, Spec()).loss, want)


# ---------------------------------------------------------------- tensor descriptors


@pytest.fixture
def described(monkeypatch, device):
    """As on GPUs whose hardware reads tiles; the interpreter does it too."""
    if device.type == "cpu":
        monkeypatch.setattr(tile_config, "has_descriptors", lambda target: True)
    elif not tile_config.has_descriptors(devices.target_of(device)):
        pytest.skip("this GPU has no tensor descriptors")


def described_of(inputs):
    (forward, _) = call.for_call(
        Spec(strategy="tiled"), Operands.of(inputs), call.gpu_of(inputs.x.device)
    )
    return forward.described


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize("shape", [(17, 20, 37), (1, 8, 16)])
def test_descriptors(device, shape):
    n, d, v = shape
    inputs = problem(device, n=n, d=d, v=v, row_scaled=True, lse_scaled=True)
    assert described_of(inputs)
    check(inputs, Spec(gradients=GRADIENTS, label_smoothing=0.1))


@pytest.mark.usefixtures("described")
def test_rows_of_x_are_copied_where_they_are_not_aligned(device):
    """As they are where ignored rows are left out: the same kernels run with all rows."""
    aligned = problem(device, n=6, d=20, v=37)
    for x in (
        aligned.x[:, 1:17],  # starts at 4 bytes
        aligned.x[:1].expand(6, 20),  # one row, many times
        aligned.x.t().contiguous().t(),
        aligned.x[:1, :16].t().contiguous().t(),  # one row, with any stride
    ):
        n, d = x.shape
        inputs = aligned._replace(x=x, weight=aligned.weight[:, :d], target=aligned.target[:n])
        inputs = inputs._replace(weight=inputs.weight.contiguous())
        assert described_of(inputs)
        check(inputs, Spec(gradients=GRADIENTS))


@pytest.mark.usefixtures("described")
def test_pointers_where_rows_of_the_weight_are_not_aligned(device):
    aligned = problem(device, n=6, d=20, v=37)
    for weight in (
        aligned.weight[:, 1:17],  # starts at 4 bytes
        aligned.weight[:1].expand(37, 20),  # one row, many times
        aligned.weight[:, :19].contiguous(),  # 76 bytes a row
    ):
        inputs = aligned._replace(weight=weight, x=aligned.x[:, : weight.shape[1]])
        assert not described_of(inputs)
        check(inputs, Spec(gradients=GRADIENTS))
