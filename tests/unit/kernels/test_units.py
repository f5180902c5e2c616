"""Class weights and row scales of any magnitude, in gradients that may be stored in fp16.

Runs on the GPU where there is one, else in Triton's interpreter.
"""

import pytest
import torch

from fxpass.kernels import chunked
from fxpass.spec.spec import Spec
from tests.support.implementations import DTYPES, GRADIENTS, check, problem


def test_fp16_keeps_small_probabilities(device):
    """One class takes it all; the others' probabilities, 1e-7, have one bit in fp16."""
    inputs = problem(device, torch.float16, n=4)
    logits = torch.randn(4, 37, device=device, dtype=torch.float16)
    logits[:, 0] = 16
    inputs = inputs._replace(logits=logits, target=torch.zeros_like(inputs.target))
    grad = chunked.run(inputs, Spec(gradients=("bias",)), rows=4).bias
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
    ours, plain = (chunked.run(i, spec, rows=3) for i in (scaled, inputs))
    for grad, of_plain in zip(ours[2:5], plain[2:5], strict=True):
        assert torch.equal(grad, of_plain * 2.0**exponent)
    factor = 2.0**exponent if which == "class_weight" else 1
    assert torch.equal(ours.loss, plain.loss * factor)


LSE = Spec(gradients=GRADIENTS, label_smoothing=0.1, ignore_index=3)


def both_scales(device, dtype):
    """Inputs with an ignored row and a gradient for the loss and the lse of every row."""
    inputs = problem(device, dtype, weighted=True, row_scaled=True, lse_scaled=True)
    inputs.target[1] = 3
    return inputs


def scaled(inputs, exponent, *names):
    return inputs._replace(**{name: getattr(inputs, name) * 2.0**exponent for name in names})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-100, 100])
@pytest.mark.parametrize("which", ["class_weight", "row_scale"])
def test_both_scales_of_any_magnitude(device, which, exponent, dtype):
    inputs = both_scales(device, dtype)
    plain = chunked.run(inputs, LSE, rows=3)
    ours = chunked.run(scaled(inputs, exponent, which, "lse_scale"), LSE, rows=3)
    for grad, of_plain in zip(ours[2:5], plain[2:5], strict=True):
        assert torch.equal(grad, of_plain * 2.0**exponent)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-100, 100])
def test_the_larger_of_two_scales_is_kept_whole(device, exponent, dtype):
    """As if the other were zero, which is what it is beside the larger one."""
    inputs = both_scales(device, dtype)
    small, large = ("row_scale", "lse_scale")[:: 1 if exponent > 0 else -1]
    ours = chunked.run(scaled(inputs, exponent, "lse_scale"), LSE, rows=3)
    zero = inputs._replace(**{small: getattr(inputs, small) * 0})
    alone = chunked.run(scaled(zero, exponent, "lse_scale"), LSE, rows=3)
    assert getattr(zero, large).all()
    for grad, of_alone in zip(ours[2:5], alone[2:5], strict=True):
        assert (grad - of_alone).norm() <= 1e-6 * of_alone.norm()
        assert of_alone.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_usual_z_loss_keeps_its_digits(device, dtype):
    """Ten thousand times smaller than the loss, as a program's gradient of it is."""
    inputs = scaled(both_scales(device, dtype), -13, "lse_scale")
    check(inputs, LSE)
    whole = chunked.run(inputs, LSE, rows=3)
    parts = [
        chunked.run(inputs._replace(**{name: getattr(inputs, name) * 0}), LSE, rows=3)
        for name in ("row_scale", "lse_scale")
    ]
    for grad, of_lse, of_loss in zip(whole[2:5], parts[0][2:5], parts[1][2:5], strict=True):
        rounding = 2 * torch.finfo(dtype).eps * (of_loss.norm() + of_lse.norm())
        assert (grad - of_loss - of_lse).norm() <= rounding


@pytest.mark.parametrize("dtype", DTYPES)
def test_ignored_rows_do_not_choose_the_unit(device, dtype):
    """Their loss has no gradient, however large the one that arrives."""
    inputs = scaled(both_scales(device, dtype), -40, "lse_scale")
    inputs.target.fill_(3)
    check(inputs, LSE)


@pytest.mark.parametrize("lse_scaled", [False, True])
@pytest.mark.parametrize("which", ["class_weight", "row_scale"])
def test_row_coefficients_of_zero(device, which, lse_scaled):
    inputs = problem(device, weighted=True, row_scaled=True, lse_scaled=lse_scaled)
    check(inputs._replace(**{which: getattr(inputs, which) * 0}), Spec(gradients=GRADIENTS))


def test_an_lse_scale_of_zero(device):
    inputs = problem(device, row_scaled=True)
    zeros = inputs._replace(lse_scale=torch.zeros_like(inputs.row_scale))
    ours, want = (chunked.run(i, Spec(gradients=GRADIENTS), 3) for i in (zeros, inputs))
    assert all(torch.equal(a, b) for a, b in zip(ours[2:5], want[2:5], strict=True))


@pytest.mark.parametrize("target", ["indices", "none"])
def test_the_dtype_of_new_tensors_does_not_matter(device, target):
    inputs = problem(device, target=target, row_scaled=True, lse_scaled=True)
    spec = Spec(target=target, gradients=GRADIENTS, lse=True)
    want = chunked.run(inputs, spec, 3)
    torch.set_default_dtype(torch.float16)
    try:
        ours = chunked.run(inputs, spec, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(ours[:5], want[:5], strict=True))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("which", ["row_scale", "lse_scale"])
def test_overflow_of_the_loss_scale_is_seen(device, which, value):
    """GradScaler looks for gradients that are not finite."""
    both = which == "lse_scale"
    inputs = problem(device, torch.float16, row_scaled=True, lse_scaled=both)
    getattr(inputs, which)[3] = value
    out = chunked.run(inputs, Spec(gradients=GRADIENTS), rows=3)
    assert not out.x[3].isfinite().any()
    assert out.x[4].isfinite().all()
    assert not out.weight.isfinite().any()
