"""``fxpass::row_region``: outputs and gradients of regions against the same program in eager."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fxpass.aten import regions as aten
from fxpass.op.row_region import row_region
from fxpass.plan.regions import RegionPlan
from fxpass.region.text import RowRegion
from fxpass.spec.dtypes import compute_dtype
from tests.support.numerics import FLOOR, assert_close, error
from tests.support.pairs import in_pairs
from tests.unit.region.programs import FLOAT, INT, Program, V

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
N = 13
OPERATORS = torch.ops.fxpass


def divergence(one, two, label):
    """Knowledge distillation: a divergence of two heads, the loss of the first, its accuracy."""
    log_p, log_q = (z.to(compute_dtype(z.dtype)).log_softmax(-1) for z in (one, two))
    kl = (log_q.exp() * (log_q - log_p)).sum(-1)
    return [kl, -log_p.gather(1, label[:, None])[:, 0], one.argmax(-1), log_p.amax(-1).to(one)]


def expected(z, prior, temperature, label, values):
    """The expectation of values of classes under a prior of each row; two dimensions of rows."""
    p = (z / (0.5 + temperature.abs()[:, None]) + prior * values[1]).softmax(-1)
    return [p @ values.t(), F.cross_entropy(z, label, reduction="none")]


def squares(z):
    return [z.square().mean(-1)]


PROGRAMS = {
    "a divergence": Program(divergence, (V, V), ((INT,),), (), (True, True), (False, True)),
    "an expectation": Program(
        *(expected, (V,), ((FLOAT, V), (FLOAT,), (INT,)), ((FLOAT, 3, V),)),
        *((True, True, True, False, True), (True,)),
    ),
    "a mean of squares": Program(squares),
}


@functools.lru_cache(None)
def text_of(name: str, dtype=F64, total=False, frozen=(), compiled=False, symbolic=False) -> str:
    """The text of a program's region; ``frozen`` are positions of tensors."""
    program = PROGRAMS[name].symbolic() if symbolic else PROGRAMS[name]
    return program.region(dtype, total, compiled, frozen).text()


def tensors_of(name: str, dtype=F64, n=N, v=V, text: str = "") -> list[Tensor]:
    """Its tensors, of which those trained by ``text`` require gradients."""
    torch.manual_seed(0)
    found = PROGRAMS[name].symbolic().operands(n, dtype, {"v0": v})
    for i in RowRegion.parse(text).trained if text else ():
        found[i].requires_grad_()
    return found


def in_f64(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def eager(name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(PROGRAMS[name].eager(tensors))


def cotangents(outputs: Sequence[Tensor], text: str) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    some = (outputs[k] for k in RowRegion.parse(text).tangents)
    return [torch.randn(o.shape, generator=random).to(o.dtype) for o in some]


def fused(name: str, tensors, text: str, scale=1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of a region, whose cotangents are the coefficients of a total."""
    region = RowRegion.parse(text)
    coefs = [c * scale for c in cotangents(eager(name, tensors), text)]
    leaves = [tensors[i] for i in region.trained]
    if region.total:
        outputs = row_region([*tensors, *coefs], text)
        found = torch.autograd.grad(outputs[region.outputs], leaves)
        some = (outputs[k].double() for k in region.tangents)
        exact = sum((o * c.double()).sum() for o, c in zip(some, coefs, strict=True))
        got = outputs[region.outputs]
        torch.testing.assert_close(got, exact, check_dtype=False, rtol=1e-5, atol=1e-5)
        return outputs[: region.outputs], list(found)
    outputs = row_region(tensors, text)[: region.outputs]
    some = [outputs[k] for k in region.tangents]
    return outputs, list(torch.autograd.grad(some, leaves, coefs)) if leaves else []


def program_itself(name: str, tensors, text: str, scale=1.0) -> tuple[list[Tensor], list[Tensor]]:
    region, outputs = RowRegion.parse(text), eager(name, tensors)
    leaves = [tensors[i] for i in region.trained]
    some = [outputs[k] for k in region.tangents]
    coefs = [c * scale for c in cotangents(outputs, text)]
    return outputs, list(torch.autograd.grad(some, leaves, coefs)) if leaves else []


def assert_as_in_eager(name: str, tensors, text: str) -> None:
    torch.testing.assert_close(fused(name, tensors, text), program_itself(name, tensors, text))


@pytest.fixture(params=["one chunk", "chunks"])
def chunks(request):
    if request.param == "chunks":
        request.getfixturevalue("small_regions")


names = pytest.mark.parametrize("name", PROGRAMS)
totals = pytest.mark.parametrize("total", [False, True])


# ---------------------------------------------------------------- values


@pytest.mark.usefixtures("chunks")
@names
@totals
def test_values_are_those_of_eager(name, total):
    """With any number of rows, and of classes where their number is symbolic."""
    for n, v, symbolic in (
        (0, V, False),
        (1, V, False),
        (4, V, True),
        (N, 40, True),
        (N, V, False),
    ):
        text = text_of(name, total=total, symbolic=symbolic)
        assert_as_in_eager(name, tensors_of(name, n=n, text=text, v=v), text)


@pytest.mark.usefixtures("small_regions")
@totals
@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        *(("a divergence", some) for some in ((0,), (1,), (2, 3, 4), (0, 1, 2, 3, 4))),
        *(("an expectation", some) for some in ((3, 4, 6), (0, 1, 2), (0, 1, 2, 4))),
    ],
)
def test_frozen_operands(name, frozen, total):
    text = text_of(name, total=total, frozen=frozen)
    assert_as_in_eager(name, tensors_of(name, text=text), text)


@in_pairs(
    name=PROGRAMS,
    total=(False, True),
    dtype=(F32, BF16, F16),
    wide=(False, True),
    parts=("one chunk", "chunks"),
)
def test_rounding_is_that_of_eager(name, total, dtype, wide, parts, request, monkeypatch):
    if parts == "chunks":
        request.getfixturevalue("small_regions")
    if wide:  # as a CPU without products in bf16
        monkeypatch.setattr(aten, "multiplied_in", lambda dtype, _: compute_dtype(dtype))
    text = text_of(name, dtype, total)
    tensors = tensors_of(name, dtype, text=text)
    exact = [in_f64(t) for t in tensors]
    wanted = program_itself(name, exact, text_of(name, F64, total))
    got, theirs = fused(name, tensors, text), program_itself(name, tensors, text)
    for mine, other in zip(got, theirs, strict=True):
        assert [(t.dtype, t.shape) for t in mine] == [(t.dtype, t.shape) for t in other]

    def floating(found):
        return [t for some in found for t in some if t.is_floating_point()]

    assert_close(floating(got), floating(theirs), floating(wanted), dtype)


@pytest.mark.parametrize("scale", [2.0**-22, 1.0, 2.0**9])
def test_small_and_large_cotangents_of_fp16(scale):
    """The gradient of a logit may be below the least number of fp16, or above the largest."""
    name = "a divergence"
    text = text_of(name, F16, total=True)
    tensors = tensors_of(name, F16, text=text)
    coefs = [c.float() * scale for c in cotangents(eager(name, tensors), text)]
    coefs[2] = torch.zeros(N, dtype=F16)  # of an output in fp16
    exact = [in_f64(t) for t in tensors]
    outputs = eager(name, exact)
    seeds = [c.double() for c in coefs[:2]]
    wanted = torch.autograd.grad(outputs[:2], exact[:5], seeds)
    for got, true in zip(row_region([*tensors, *coefs], text)[5:], wanted, strict=True):
        assert got.dtype == F32
        assert error(got, true) < FLOOR[F16]


def test_the_factor_of_fp16_is_exact():
    call = aten.Call(
        (torch.zeros(3, 2, dtype=F16),), ((0, 0, None),), (), (), (), RegionPlan(3, (1,), 0, 0)
    )
    for values in ([1e-8, 3e-30], [0.0, 0.0], [float("inf"), 1.0], [float("nan"), 1.0], [3e8, 1.0]):
        grad = torch.tensor(values)
        (scaled,), inverse = aten._scaled(call, [grad])
        assert inverse is not None
        assert torch.frexp(inverse).mantissa == 0.5
        torch.testing.assert_close(scaled * inverse, grad, rtol=0, atol=0, equal_nan=True)
        finite = grad.isfinite().all() and grad.any()
        assert not finite or 0.5 <= scaled.abs().max() < 1


@pytest.mark.usefixtures("small_regions")
@names
@totals
def test_layouts_of_operands(name, total):
    text = text_of(name, total=total)
    plain = tensors_of(name, text=text)
    views = [t.detach().t().contiguous().t() if t.dim() == 2 else t.detach() for t in plain]
    views = [torch.stack([t, t], -1)[..., 0] if t.dim() == 1 else t for t in views]
    for view, t in zip(views, plain, strict=True):
        view.requires_grad_(t.requires_grad)
    torch.testing.assert_close(fused(name, views, text), fused(name, plain, text))


def test_heads_that_share_tensors():
    """As in R-Drop: two passes of one head."""
    name = "a divergence"
    text = text_of(name, frozen=(4,))
    x, weight, _, _, bias, label = tensors_of(name)
    tensors = [x.requires_grad_(), weight.requires_grad_(), x, weight, bias, label]
    outputs, theirs = row_region(tensors, text)[:4], eager(name, tensors)
    for found in (outputs, theirs):
        (found[0] + found[1]).sum().backward()
        grads = x.grad, weight.grad
        x.grad = weight.grad = None
        if found is outputs:
            ours = grads
    torch.testing.assert_close(ours, grads)


@pytest.mark.usefixtures("small_regions")
@names
@totals
def test_results_are_deterministic_and_operands_are_not_written(name, total):
    text = text_of(name, F32, total)
    tensors = tensors_of(name, F32, text=text)
    before = [t.detach().clone() for t in tensors]
    first, second = fused(name, tensors, text), fused(name, tensors, text)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert all(map(torch.equal, tensors, before))
    results = [*tensors, *first[0], *first[1]]
    assert len({t.untyped_storage().data_ptr() for t in results}) == len(results)


def test_coefficients_of_zero_add_nothing():
    name = "a mean of squares"
    text = text_of(name, total=True)
    x, weight = tensors_of(name, text=text)
    with torch.no_grad():
        x[0] = float("inf")
    coef = torch.ones(N, dtype=F64)
    coef[0] = 0
    total = row_region([x, weight, coef], text)[1]
    torch.testing.assert_close(total, squares(x[1:] @ weight.t())[0].sum())


# ---------------------------------------------------------------- autograd


def test_one_output_has_a_gradient():
    name = "a divergence"
    text = text_of(name)
    tensors = tensors_of(name, text=text)
    leaves = [tensors[i] for i in RowRegion.parse(text).trained]
    for k in (0, 1, 3):
        got = torch.autograd.grad(row_region(tensors, text)[k].sum(), leaves)
        wanted = torch.autograd.grad(
            eager(name, tensors)[k].sum(), leaves, allow_unused=True, materialize_grads=True
        )
        torch.testing.assert_close(got, wanted)


@totals
def test_backward_twice(total):
    name = "a divergence"
    text = text_of(name, total=total)
    tensors = tensors_of(name, text=text)
    leaves = [tensors[i] for i in RowRegion.parse(text).trained]
    coefs = [torch.ones(N, dtype=o.dtype) for o in cotangents(eager(name, tensors), text)]
    found = row_region([*tensors, *coefs] if total else tensors, text)
    loss = found[4] if total else sum(found[k].sum() for k in (0, 1, 3))
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves, torch.tensor(2.0).to(loss))
    torch.testing.assert_close([2 * t for t in first], list(again))


def test_checkpoints():
    name = "a divergence"
    text = text_of(name)
    tensors = tensors_of(name, text=text)
    leaves = [tensors[i] for i in RowRegion.parse(text).trained]

    def loss(*tensors):
        return row_region(tensors, text)[0].sum()

    got = torch.autograd.grad(checkpoint(loss, *tensors, use_reentrant=False), leaves)
    torch.testing.assert_close(got, torch.autograd.grad(loss(*tensors), leaves))


@pytest.mark.parametrize("mapped", [False, True])
def test_a_batch_of_gradients(mapped):
    name = "a divergence"
    text = text_of(name)
    tensors = tensors_of(name, text=text)
    leaves = tensors[:2]
    seeds = torch.eye(N)

    def jacobian(outputs):
        if mapped:
            grad = functools.partial(torch.autograd.grad, outputs[1], leaves, retain_graph=True)
            return torch.vmap(lambda seed: grad(seed))(seeds)
        return torch.autograd.grad(outputs[1], leaves, seeds, is_grads_batched=True)

    torch.testing.assert_close(
        jacobian(row_region(tensors, text)), jacobian(eager(name, tensors)), rtol=1e-5, atol=1e-5
    )


@totals
def test_what_is_refused_of_autograd(total):
    name = "a mean of squares"
    text = text_of(name, total=total)
    tensors = tensors_of(name, text=text)
    coefs = [torch.ones(N, dtype=F64)] * total
    found = row_region([*tensors, *coefs], text)
    loss = found[1] if total else found[0].sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, tensors, create_graph=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensors[0].detach(), torch.ones(N, 5, dtype=F64))
        with pytest.raises(NotImplementedError, match="no forward-mode"):
            row_region([dual, tensors[1], *coefs], text)
    frozen = text_of(name, frozen=(1,))
    with pytest.raises(RuntimeError, match="weight of head 0 requires a gradient that the region"):
        row_region(tensors, frozen)
    with torch.no_grad():
        assert not row_region(tensors, frozen)[0].requires_grad


def test_outputs_without_a_gradient():
    name = "a divergence"
    text = text_of(name)
    found = row_region(tensors_of(name, text=text), text)
    assert [t.requires_grad for t in found[:4]] == [True, True, False, True]
    assert len(found) > 4  # lse, for example
    assert not any(t.requires_grad for t in found[4:])


def test_inference_tensors_and_autocast():
    name = "an expectation"
    text = text_of(name, F32)
    plain = tensors_of(name, F32)
    with torch.inference_mode():
        inference = row_region([t.clone() for t in plain], text)
    with torch.autocast("cpu", torch.bfloat16):
        cast = row_region(plain, text)
    torch.testing.assert_close(inference, row_region(plain, text), rtol=0, atol=0)
    torch.testing.assert_close(cast, row_region(plain, text), rtol=0, atol=0)
