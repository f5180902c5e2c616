"""The Triton lowering against float64 autograd and against its oracle, fxpass.aten.

Runs on the GPU where there is one, else in Triton's interpreter.
"""

import pytest
import sympy
import torch
import torch.nn.functional as F
from numerics import assert_close

from fxpass import aten, expression, triton_chunked, triton_expression, triton_source
from fxpass.aten import Inputs
from fxpass.spec import Spec

GRADIENTS = ("x", "weight", "bias")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

TRANSFORMS = {
    "z": lambda z: z,
    "0.0625*z": lambda z: 0.0625 * z,
    "30*tanh(z/30)": lambda z: 30 * torch.tanh(z / 30),
    "2*tanh(z)": lambda z: 2 * torch.tanh(z),
    "-0.0625*z**2+0.25*z": lambda z: z / 4 - z * z / 16,
}


def problem(
    device,
    dtype=torch.float32,
    n=7,
    d=5,
    v=37,
    bias=True,
    probabilities=False,
    weighted=False,
    row_scaled=False,
    size=1.0,
):
    """Inputs of a fused loss; logits are of the given size."""
    generator = torch.Generator().manual_seed(n * d + v)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    target = torch.randint(0, v, (n,), generator=generator)
    inputs = Inputs(
        x=(size * randn(n, d)).to(dtype),
        weight=randn(v, d).to(dtype),
        bias=randn(v).to(dtype) if bias else None,
        target=randn(n, v).softmax(1) if probabilities else target,
        class_weight=randn(v).exp() if weighted else None,
        row_scale=randn(n) if row_scaled else None,
    )
    return Inputs(*(None if t is None else t.to(device) for t in inputs))


def autograd(inputs, spec, dtype):
    """Row losses and gradients by PyTorch in ``dtype``; the loss itself at least in f32."""
    operands = [
        None if t is None else t.detach().to(dtype).requires_grad_()
        for t in (inputs.x, inputs.weight, inputs.bias)
    ]
    at_least_f32 = torch.promote_types(dtype, torch.float32)
    z = TRANSFORMS[expression.text(spec.logits)](F.linear(*operands).to(at_least_f32))
    probabilities = inputs.target.is_floating_point()
    loss = F.cross_entropy(
        z,
        inputs.target.to(at_least_f32) if probabilities else inputs.target,
        None if inputs.class_weight is None else inputs.class_weight.to(at_least_f32),
        ignore_index=spec.ignore_index,
        label_smoothing=spec.label_smoothing,
        reduction="none",
    )
    total = loss.sum() if inputs.row_scale is None else loss @ inputs.row_scale.to(at_least_f32)
    total.backward()
    return loss.detach(), *(None if t is None else t.grad for t in operands)


def check(inputs, spec, rows=3):
    """Loss and gradients against float64, nothing that was not asked for, operands unharmed."""
    before = [None if t is None else t.clone() for t in inputs]
    out = triton_chunked.run(inputs, spec, rows)
    for tensor, copy in zip(inputs, before, strict=True):
        assert tensor is None or torch.equal(tensor, copy)
    exact, eager = autograd(inputs, spec, torch.float64), autograd(inputs, spec, inputs.x.dtype)
    asked_for = [0, *(1 + GRADIENTS.index(name) for name in spec.gradients)]
    assert [i for i, tensor in enumerate(out) if tensor is not None] == asked_for
    assert all(out[i].dtype == torch.float32 for i in asked_for)
    assert_close(*([some[i] for i in asked_for] for some in (out, eager, exact)), inputs.x.dtype)
    return out


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks in a row of a few classes, and several tiles of the weight."""
    options = {"BLOCK_V": 16, "num_warps": 1}
    monkeypatch.setattr(triton_chunked, "_launch_options", lambda v, dtype: options)
    monkeypatch.setattr(triton_chunked, "_CLASSES_PER_TILE", 16)


# ---------------------------------------------------------------- the meaning


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("target", ["indices", "probabilities"])
def test_targets(device, target, weighted, smoothing, dtype):
    probabilities = target == "probabilities"
    inputs = problem(device, dtype, probabilities=probabilities, weighted=weighted, row_scaled=True)
    check(inputs, Spec(gradients=GRADIENTS, target=target, label_smoothing=smoothing))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logits", TRANSFORMS)
def test_transforms(device, logits, dtype):
    spec = Spec(gradients=GRADIENTS, logits=expression.parse(logits), label_smoothing=0.1)
    check(problem(device, dtype, size=2.0), spec)


@pytest.mark.usefixtures("small_blocks")
def test_everything_together(device):
    spec = Spec(
        gradients=GRADIENTS,
        label_smoothing=0.3,
        ignore_index=4,
        logits=expression.parse("30*tanh(z/30)"),
    )
    inputs = problem(device, weighted=True, row_scaled=True)
    inputs.target[2] = 4
    check(inputs, spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_more_classes_than_one_block_holds(device, dtype):
    v = triton_chunked._launch_options(1 << 20, dtype)["BLOCK_V"] + 5
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
    assert [float(grad.abs().sum()) for grad in out[1:]] == [0.0, 0.0, 0.0]


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
    inputs = problem(device, probabilities=True)
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
    want = aten.run(inputs._replace(logits=copy), Spec(gradients=gradients), rows=3)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(given, copy)


# ---------------------------------------------------------------- numbers at the edge


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("target", ["indices", "probabilities"])
def test_huge_logits(device, target, smoothing):
    """A row of logits near 3e4 that differ by ones: the maximum has to go before sums are taken."""
    inputs = problem(device, probabilities=target == "probabilities", bias=False)
    logits = torch.full_like(inputs.x @ inputs.weight.t(), 3e4) + torch.randn(37, device=device)
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


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("row", ODD_ROWS)
@pytest.mark.parametrize("target", [0, 20, "probabilities"])
@pytest.mark.parametrize(("smoothing", "logits"), [(0.0, "z"), (0.1, "z"), (0.1, "30*tanh(z/30)")])
def test_odd_rows_as_in_aten(device, row, target, smoothing, logits):
    inputs = problem(device, n=1, probabilities=target == "probabilities")
    if target != "probabilities":
        inputs.target[0] = target
    inputs = inputs._replace(logits=torch.tensor([ODD_ROWS[row]], device=device))
    spec = Spec(
        gradients=GRADIENTS,
        target="indices" if target != "probabilities" else target,
        label_smoothing=smoothing,
        logits=expression.parse(logits),
    )
    ours, want = triton_chunked.run(inputs, spec, 1), aten.run(inputs, spec, 1)
    torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_fp16_keeps_small_probabilities(device):
    """One class takes it all; the others' probabilities, 1e-7, have one bit in fp16."""
    inputs = problem(device, torch.float16, n=4)
    logits = torch.randn(4, 37, device=device, dtype=torch.float16)
    logits[:, 0] = 16
    inputs = inputs._replace(logits=logits, target=torch.zeros_like(inputs.target))
    grad = triton_chunked.run(inputs, Spec(gradients=("bias",)), rows=4).bias
    want = logits.double().softmax(1).sum(0)
    assert ((grad - want)[1:].abs() <= 2**-11 * want[1:]).all()  # half a unit in fp16's last place


def test_many_rows_of_one_class_do_not_overflow_fp16(device):
    inputs = problem(device, torch.float16, n=80, v=5, size=0.1)
    inputs.target.zero_()  # 80 gradients of nearly -1, times the gain, are beyond 65504
    check(inputs, Spec(gradients=GRADIENTS), rows=80)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-100, 100])
@pytest.mark.parametrize("which", ["class_weight", "row_scale"])
def test_row_coefficients_of_any_magnitude(device, which, exponent, dtype):
    inputs = problem(device, dtype, weighted=True, row_scaled=True)
    scaled = inputs._replace(**{which: getattr(inputs, which) * 2.0**exponent})
    spec = Spec(gradients=GRADIENTS, label_smoothing=0.1)
    ours, plain = (triton_chunked.run(i, spec, rows=3) for i in (scaled, inputs))
    for grad, of_plain in zip(ours[1:], plain[1:], strict=True):
        assert torch.equal(grad, of_plain * 2.0**exponent)
    factor = 2.0**exponent if which == "class_weight" else 1
    assert torch.equal(ours.loss, plain.loss * factor)


@pytest.mark.parametrize("which", ["class_weight", "row_scale"])
def test_row_coefficients_of_zero(device, which):
    inputs = problem(device, weighted=True, row_scaled=True)
    check(inputs._replace(**{which: getattr(inputs, which) * 0}), Spec(gradients=GRADIENTS))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_overflow_of_the_loss_scale_is_seen(device, value):
    """GradScaler looks for gradients that are not finite."""
    inputs = problem(device, torch.float16, row_scaled=True)
    inputs.row_scale[3] = value
    out = triton_chunked.run(inputs, Spec(gradients=GRADIENTS), rows=3)
    assert not out.x[3].isfinite().any()
    assert out.x[4].isfinite().all()
    assert not out.weight.isfinite().any()


def test_same_bits_every_time(device):
    inputs = problem(device, torch.bfloat16, weighted=True, row_scaled=True)
    spec = Spec(gradients=GRADIENTS, label_smoothing=0.1)
    first, second = (triton_chunked.run(inputs, spec, rows=3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


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
    source = head + triton_expression.FUNCTIONS[sympy.tanh] + APPLY_TANH
    apply = triton_chunked.load(triton_source.Kernel("apply", source))
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
    kernel = triton_source.generate(Spec(), weighted=False)
    function = triton_chunked.load(kernel)
    with open(function.fn.__code__.co_filename) as file:
        assert file.read().strip() == kernel.source.strip()
    assert triton_chunked.load(triton_source.generate(Spec(), weighted=False)) is function
