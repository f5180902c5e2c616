"""The Triton implementation against float64 autograd and against its oracle, fxpass.aten.common.

Runs on the GPU where there is one, else in Triton's interpreter.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from fxpass.aten import chunked as aten_chunked
from fxpass.kernels import chunked as triton_chunked
from fxpass.kernels import render, row_config
from fxpass.kernels.expression import with_callees
from fxpass.kernels.render import Kernel
from fxpass.spec import expression
from fxpass.spec.operands import Inputs
from fxpass.spec.spec import Spec
from tests.support.implementations import DTYPES, GRADIENTS, TRANSFORMS, check, problem

# Classes: several blocks in a row, and several tiles of a weight of 16 bits.
MANY = 8200


# ---------------------------------------------------------------- the meaning


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("target", ["indices", "probabilities"])
def test_targets(device, target, weighted, smoothing, dtype):
    inputs = problem(device, dtype, v=MANY, target=target, weighted=weighted, row_scaled=True)
    check(inputs, Spec(gradients=GRADIENTS, target=target, label_smoothing=smoothing))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logits", TRANSFORMS)
def test_transforms(device, logits, dtype):
    spec = Spec(gradients=GRADIENTS, transform=expression.parse(logits), label_smoothing=0.1)
    check(problem(device, dtype, v=MANY, size=2.0), spec)


def test_everything_together(device):
    spec = Spec(
        gradients=GRADIENTS,
        label_smoothing=0.3,
        ignore_index=4,
        transform=expression.parse("30*tanh(z/30)"),
    )
    inputs = problem(device, v=MANY, weighted=True, row_scaled=True)
    inputs.target[2] = 4
    check(inputs, spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("target", ["indices", "probabilities"])
def test_loss_and_lse(device, target, weighted, smoothing, dtype):
    """Rows that only the loss, only the lse, both and neither give a gradient; ignored ones too."""
    inputs = problem(
        device,
        dtype,
        n=10,
        v=MANY,
        target=target,
        weighted=weighted,
        row_scaled=True,
        lse_scaled=True,
    )
    inputs.row_scale[[0, 2]] = 0
    inputs.lse_scale[[1, 2]] = 0
    if target == "indices":
        inputs.target[[4, 7]] = 3
    ignore_index = 3 if target == "indices" else -100
    spec = Spec("sum", target, ignore_index, smoothing, gradients=GRADIENTS, lse=True)
    out = check(inputs, spec)
    assert not out.x[2].any()
    if target == "indices":
        assert not out.loss[[4, 7]].any()
        assert out.lse[[4, 7]].all()
        assert out.x[[4, 7]].any(1).all()
    # neither output needs the other one to be there
    without = triton_chunked.run(inputs, dataclasses.replace(spec, lse=False), rows=3)
    assert without.lse is None
    assert all(torch.equal(a, b) for a, b in zip(out[2:5], without[2:5], strict=True))
    forward = triton_chunked.run(inputs, dataclasses.replace(spec, gradients=()), rows=3)
    assert torch.equal(forward.loss, out.loss)
    assert torch.equal(forward.lse, out.lse)
    # the gradient of a loss alone is that of all its rows
    check(inputs._replace(row_scale=None), spec)


WHOLE_ROWS = {
    "smoothing": (Spec(label_smoothing=0.1), False),
    "class weights": (Spec(label_smoothing=0.1), True),
    "sharp class weights": (Spec(), True),
    "probabilities": (Spec(target="probabilities"), False),
    "smooth probabilities": (Spec(target="probabilities", label_smoothing=0.1), True),
    "soft-cap": (Spec(label_smoothing=0.1, transform=expression.parse("30*tanh(z/30)")), True),
    "no target": (Spec(target="none", transform=expression.parse("0.0625*z")), False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_whole_rows(device, name, lse, dtype):
    """One block holds all 37 classes, so that each logit is read once."""
    spec, weighted = WHOLE_ROWS[name]
    kernel = render.row(spec, weighted, whole_row=True)
    assert "for start in" not in kernel.source
    spec = dataclasses.replace(spec, lse=lse, gradients=GRADIENTS)
    inputs = problem(
        device, dtype, target=spec.target, weighted=weighted, row_scaled=True, lse_scaled=lse
    )
    if spec.target == "indices":
        inputs.target[3] = -100
    check(inputs, spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logits", TRANSFORMS)
def test_transforms_with_the_lse(device, logits, dtype):
    spec = Spec(gradients=GRADIENTS, transform=expression.parse(logits), lse=True)
    inputs = problem(device, dtype, v=MANY, size=2.0, row_scaled=True, lse_scaled=True)
    inputs.target[3] = -100
    check(inputs, spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logits", TRANSFORMS)
@pytest.mark.parametrize("row_scaled", [False, True])
def test_no_target(device, row_scaled, logits, dtype):
    inputs = problem(device, dtype, v=MANY, target="none", row_scaled=row_scaled, size=2.0)
    spec = Spec(target="none", gradients=GRADIENTS, transform=expression.parse(logits), lse=True)
    out = check(inputs, spec)
    assert torch.equal(out.loss, out.lse)


@pytest.mark.parametrize("spec", [Spec(target="none"), Spec(ignore_index=None), Spec(lse=True)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 1, 37), (7, 5, 1), (0, 5, 37)])
def test_sizes_of_what_else_there_is(device, shape, spec):
    n, d, v = shape
    spec = dataclasses.replace(spec, gradients=GRADIENTS)
    target, lse = ("none" if spec.target == "none" else "indices"), spec.lse
    inputs = problem(device, n=n, d=d, v=v, target=target, row_scaled=lse, lse_scaled=lse)
    check(inputs, spec, rows=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_more_classes_than_one_block_holds(device, dtype):
    v = row_config.row_options(1 << 20, dtype)["BLOCK_V"] + 5
    check(problem(device, dtype, n=3, v=v), Spec(gradients=GRADIENTS), rows=2)


@pytest.mark.parametrize(
    "gradients", [(), ("x",), ("weight",), ("bias",), ("x", "weight"), GRADIENTS]
)
def test_only_what_is_asked_for(device, gradients):
    check(problem(device), Spec(gradients=gradients))


@pytest.mark.parametrize("shape", [(1, 5, 37), (7, 1, 37), (7, 5, 1), (7, 5, 2), (1, 1, 1)])
@pytest.mark.parametrize("rows", [1, 100])
def test_sizes(device, shape, rows):
    n, d, v = shape
    check(problem(device, n=n, d=d, v=v), Spec(gradients=GRADIENTS), rows=rows)


def test_no_rows(device):
    out = triton_chunked.run(problem(device, n=0), Spec(gradients=GRADIENTS), rows=1)
    assert out.loss.shape == (0,)
    assert [float(grad.abs().sum()) for grad in out[2:5]] == [0.0, 0.0, 0.0]


def test_no_bias(device):
    out = check(problem(device, bias=False), Spec(gradients=("x", "weight")))
    assert out.bias is None


# ---------------------------------------------------------------- class indices


@pytest.mark.parametrize("ignored", [[0], [1, 2, 6], range(7)])
@pytest.mark.parametrize("ignore_index", [-100, 3, 1 << 40])
def test_ignored_rows(device, ignored, ignore_index):
    inputs = problem(device)
    inputs.target[list(ignored)] = ignore_index
    out = check(inputs, Spec(gradients=GRADIENTS, ignore_index=ignore_index))
    assert not out.loss[list(ignored)].any()
    assert not out.x[list(ignored)].any()


@pytest.mark.parametrize("gradients", [(), GRADIENTS])
def test_no_row_is_ignored_without_an_ignore_index(device, gradients):
    inputs = problem(device)
    spec = Spec(gradients=gradients, ignore_index=None)
    ours = check(inputs, spec)
    other = triton_chunked.run(inputs, dataclasses.replace(spec, ignore_index=-100), rows=3)
    assert all(a is b or torch.equal(a, b) for a, b in zip(ours, other, strict=True))


def test_uint8_targets_reach_class_156(device):
    # -100 as uint8 is 156
    inputs = problem(device, v=200)
    inputs.target[:] = torch.tensor([156, 0, 199, 1, 156, 2, 3])
    spec = Spec(gradients=GRADIENTS)
    out = check(inputs._replace(target=inputs.target.to(torch.uint8)), spec)
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


@pytest.mark.parametrize("gradients", [(), GRADIENTS])
@pytest.mark.parametrize("layout", ["contiguous", "padded", "transposed"])
def test_given_logits_are_used(device, layout, gradients):
    inputs = problem(device)
    logits = torch.randn(7, 37, device=device)
    given = {
        "contiguous": logits,
        "padded": F.pad(logits, (3, 4))[:, 3:-4],
        "transposed": logits.t().contiguous().t(),
    }[layout]
    copy = given.clone()
    out = triton_chunked.run(inputs._replace(logits=given), Spec(gradients=gradients), rows=3)
    want = aten_chunked.run(inputs._replace(logits=copy), Spec(gradients=gradients), rows=3)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(given, copy)


# ---------------------------------------------------------------- numbers at the edge


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("target", ["indices", "probabilities"])
def test_huge_logits(device, target, smoothing):
    """A row of logits near 3e4 that differ by ones: the maximum has to go before sums are taken."""
    inputs = problem(device, v=MANY, target=target, bias=False)
    logits = torch.full_like(inputs.x @ inputs.weight.t(), 3e4) + torch.randn(MANY, device=device)
    spec = Spec(target=target, label_smoothing=smoothing)
    want = F.cross_entropy(
        logits.double(),
        inputs.target.double() if target == "probabilities" else inputs.target,
        label_smoothing=smoothing,
        reduction="none",
    )
    out = triton_chunked.run(inputs._replace(logits=logits), spec, rows=3)
    torch.testing.assert_close(out.loss.double(), want, rtol=1e-6, atol=1e-6)


ODD_ROWS = {
    "padded classes": [*range(30), *[-torch.inf] * 7],
    "a whole block masked": [*[-torch.inf] * 16, *range(21)],
    "masked by the lowest number": [*[torch.finfo(torch.float32).min] * 20, *range(17)],
    "masked beside a huge one": [*[torch.finfo(torch.float32).min] * 20, *[3e38] * 17],
    "huge": [*[1e33] * 20, *[9e32] * 17],
    "all masked": [-torch.inf] * 37,
    "infinite": [*range(36), torch.inf],
    "nan": [*range(36), torch.nan],
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("row", ODD_ROWS)
@pytest.mark.parametrize("target", [0, "probabilities"])
def test_odd_rows_that_are_whole(device, row, target):
    odd_row_as_in_aten(device, row, target, 0.1, "z", times=1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("row", ODD_ROWS)
@pytest.mark.parametrize("target", [0, 20, "probabilities", "none"])
@pytest.mark.parametrize(("smoothing", "logits"), [(0.0, "z"), (0.1, "z"), (0.1, "30*tanh(z/30)")])
def test_odd_rows_as_in_aten(device, row, target, smoothing, logits):
    odd_row_as_in_aten(device, row, target, smoothing, logits, times=256)


def odd_row_as_in_aten(device, row, target, smoothing, logits, times):
    """``times`` classes have each logit of the row."""
    index = isinstance(target, int)
    kind = "indices" if index else target
    inputs = problem(device, n=1, v=37 * times, target=kind, lse_scaled=True)
    if index:
        inputs.target[0] = target * times
    row_of_logits = torch.tensor([ODD_ROWS[row]], device=device).repeat_interleave(times, 1)
    inputs = inputs._replace(logits=row_of_logits)
    spec = Spec(
        gradients=GRADIENTS,
        lse=True,
        target=kind,
        label_smoothing=0.0 if target == "none" else smoothing,
        transform=expression.parse(logits),
    )
    ours, want = triton_chunked.run(inputs, spec, 1), aten_chunked.run(inputs, spec, 1)
    torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_same_bits_every_time(device):
    inputs = problem(device, torch.bfloat16, weighted=True, row_scaled=True, lse_scaled=True)
    spec = Spec(gradients=GRADIENTS, label_smoothing=0.1, lse=True)
    first, second = (triton_chunked.run(inputs, spec, rows=3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[:5], second[:5], strict=True))


# ---------------------------------------------------------------- tanh, loading

APPLY_TANH = """

@triton.jit
def apply(x, out, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tanh(tl.load(x + i, mask=i < N, other=0.0)), mask=i < N)
"""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
def test_tanh(device):
    head = "import triton\nimport triton.language as tl\n\n\n"
    source = head + with_callees(["tanh"])[0] + APPLY_TANH
    apply = triton_chunked.load(Kernel("apply", source))
    positive = torch.cat([torch.logspace(-30, 2, 2000), torch.linspace(0, 12, 2000)])
    x = torch.cat([positive, -positive, torch.tensor([torch.inf, -torch.inf, torch.nan])])
    x = x.to(device)
    out = torch.empty_like(x)
    apply[(1,)](x, out, len(x), BLOCK=1 << 13)
    want = x.double().tanh()
    ulp = torch.nextafter(want.abs().float(), torch.full_like(x, 2)) - want.abs().float()
    assert ((out - want).abs()[:-3] <= 2 * ulp[:-3]).all()
    assert out[-3:].tolist()[:2] == [1.0, -1.0]
    assert out[-1].isnan()


def test_source_is_a_file(device):
    kernel = render.row(Spec(), weighted=False)
    function = triton_chunked.load(kernel)
    with open(function.fn.__code__.co_filename) as file:
        assert file.read().strip() == kernel.source.strip()
    assert triton_chunked.load(render.row(Spec(), weighted=False)) is function
