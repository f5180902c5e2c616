"""fp16 with a real GradScaler: the fused loss is as accurate as eager's, and overflows like it."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from benchmarks.accuracy.cases import SCALE, Problem, Row, Setting, compare, rounded, step
from benchmarks.accuracy.schemes import liger_scheme
from benchmarks.loss.providers import plain
from tests.support.numerics import FLOOR, assert_close, error

# Dynamo asks every input for its gradient, and the operands are cast before the compiled function.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

F16, F32 = torch.float16, torch.float32
FP16, AUTOCAST = Setting(F16, scaled=True), Setting(F16, autocast=True, scaled=True)
OPERANDS = pytest.mark.parametrize("setting", [FP16, AUTOCAST], ids=["fp16", "autocast"])


def fused(fn=plain, inner: str = "eager"):
    return torch.compile(fn, backend="fusedce", options={"fusedce.inner": inner})


def gradient(leaf: torch.Tensor) -> torch.Tensor:
    """It has one."""
    assert leaf.grad is not None
    return leaf.grad


# ---------------------------------------------------------------- accuracy, at a real model's size


def eager_step(problem: Problem, rows: int = 128) -> dict[str, torch.Tensor]:
    """What eager rounds in fp16 with a scaler, where it does, with products in f32.

    CPUs take twenty seconds for eager itself at this size.
    """
    x, weight, target = problem.x.float(), problem.weight.float(), problem.target
    n = len(x)
    loss, dx, dw = torch.zeros(()), torch.empty_like(x), torch.zeros_like(weight)
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        logits = (x[part] @ weight.t()).half().float()
        loss += F.cross_entropy(logits, target[part], reduction="sum")
        g = logits.softmax(1)
        g.scatter_add_(1, target[part].unsqueeze(1), torch.full((len(g), 1), -1.0))
        g = g.mul_(SCALE / n).half().float()
        dx[part] = g @ weight
        dw.addmm_(g.t(), x[part])
    return {"loss": loss / n, "dx": dx.half().float() / SCALE, "dw": dw.half().float() / SCALE}


def test_what_eager_rounds():
    """... is what was written above."""
    problem = Problem(64, 8, 500, F16)
    real = step(plain, Setting(F16, scaled=True), problem)
    for what, ours in eager_step(problem, rows=16).items():
        assert error(ours, real[what]) < 5e-5  # nearly every element is the same fp16


class Big:
    """N=8192, V=32000: p/N is 4e-9, of which fp16 holds nothing. D does not matter, and is small."""

    def __init__(self) -> None:
        self.problem = Problem(8192, 8, 32000, F16)
        self.eager = compare(eager_step(self.problem), self.problem.exact)


@pytest.fixture(scope="module")
def big() -> Big:
    return Big()


def lost(row: Row, eager: Row) -> list[str]:
    """What is worse than eager's by more than luck; the loss is f32, whose last digit is that."""
    found = [k for k, e in row.errors.items() if not e <= 1.05 * eager.errors[k] + 2**-23]
    return found + [f"zeros in {k}" for k, share in row.zeros.items() if share > eager.zeros[k]]


@OPERANDS
def test_as_accurate_as_eager(big, setting):
    row = compare(step(fused(), setting, big.problem), big.problem.exact)
    assert counters["fusedce"]["matched"] == 1
    assert not lost(row, big.eager), (row, big.eager)
    # as near as any fp16 gradient can be
    least = rounded(setting, big.problem)
    assert row.errors["dx"] <= 1.01 * least.errors["dx"]
    assert row.errors["dw"] <= 1.01 * least.errors["dw"]


def test_a_gradient_that_is_divided_before_it_is_rounded_is_lost(big):
    """Liger's scheme: what the test above is there to find."""
    row = compare(step(liger_scheme, FP16, big.problem), big.problem.exact)
    assert lost(row, big.eager) == ["dx", "dw", "zeros in dx", "zeros in dw"]
    assert row.errors["dx"] > 100 * big.eager.errors["dx"]
    assert row.errors["dw"] > 100 * big.eager.errors["dw"]


# ---------------------------------------------------------------- the scaler is not read


def test_the_gradient_is_linear_in_its_scale():
    """Compiled and first run before there is a scaler; a power of two changes no digit."""
    x, weight, target = torch.randn(48, 8), torch.randn(500, 8), torch.randint(500, (48,))
    loss_of = fused()

    def run(scaler: torch.amp.GradScaler | None) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        with torch.autocast("cpu", F16):
            loss = loss_of(*leaves, target)
        (loss if scaler is None else scaler.scale(loss)).backward()
        return [loss.detach(), *map(gradient, leaves)]

    loss, dx, dw = run(None)
    # No element is so small that fp16 has fewer digits for it without the scale.
    few = [dx.abs() > 2**-14, dw.abs() > 2**-14]
    assert all(part.double().mean() > 0.2 for part in few)
    for scale in (1.0, SCALE):
        scaled = run(torch.amp.GradScaler("cpu", init_scale=scale))
        assert scaled[0].equal(loss)
        for got, unscaled, part in zip(scaled[1:], (dx, dw), few, strict=True):
            assert (got[part] / scale).equal(unscaled[part])
    assert counters["stats"]["unique_graphs"] == 1  # nothing that a scaler changes is guarded


class Unreadable(torch.amp.GradScaler):
    """Gives its scale to whoever scales a loss, and to nobody else while a step runs."""

    locked = False

    def __getattribute__(self, name: str):
        if name != "locked" and self.locked:
            raise AssertionError(f"the scaler's {name} was read")
        return super().__getattribute__(name)


def test_no_state_of_the_scaler_is_read():
    problem = Problem(16, 8, 50, F16)
    x, weight = problem.leaves(F32)
    scaler = Unreadable("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))  # makes its state
    scaler.locked = True
    with pytest.raises(AssertionError, match="get_scale was read"):
        scaler.get_scale()
    with torch.autocast("cpu", F16):
        loss = fused()(x, weight, problem.target)
    scaler.locked = False
    scaled = scaler.scale(loss)
    scaler.locked = True
    scaled.backward()
    assert error(gradient(weight) / SCALE, problem.exact["dw"]) < FLOOR[F16]


# ---------------------------------------------------------------- overflow


class Model(nn.Module):
    """A head over a small body, in fp16 under autocast; plain PyTorch."""

    def __init__(self, v: int = 40, d: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(v, d)
        self.body = nn.Sequential(nn.Linear(d, d), nn.Tanh())
        self.head = nn.Linear(d, v, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of guessing each of ``tokens`` [N] from the one before."""
        logits = self.head(self.body(self.embed(tokens[:-1])))
        return F.cross_entropy(logits.float(), tokens[1:])


def train(
    loss_of, model: Model, batches: list[torch.Tensor], scaler: torch.amp.GradScaler
) -> tuple[list[float], list[float], list[bool]]:
    """Each step's loss, the scale after it, and whether the step was skipped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, scales, skipped = [], [], []
    for tokens in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", F16, enabled=scaler.is_enabled()):
            loss = loss_of(tokens)
        scaler.scale(loss).backward()
        before = model.head.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
        scales.append(scaler.get_scale())
        skipped.append(before.equal(model.head.weight))
    return losses, scales, skipped


def counting(steps: int, n: int = 17, v: int = 40) -> list[torch.Tensor]:
    """Token ids that count upward, from some number."""
    return [(torch.arange(n) + int(torch.randint(v, ()))) % v for _ in range(steps)]


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_overflow_skips_the_steps_that_eager_skips(inner):
    """From 2**19 down to what 16 rows bear, and up again after three steps that were taken. The
    weight gets its gradient in f32; what is handed on to another fp16 product overflows."""

    def run(compile_it: bool):
        torch.manual_seed(1)
        model = Model()
        with torch.no_grad():
            model.head.weight.mul_(8)  # so that it is dX which overflows first, in eager too
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=3)
        loss_of = fused(model, inner) if compile_it else model
        return train(loss_of, model, counting(10), scaler)

    losses, scales, skipped = run(compile_it=True)
    eager_losses, eager_scales, eager_skipped = run(compile_it=False)
    assert counters["fusedce"]["matched"] == 1
    assert skipped == eager_skipped
    assert scales == eager_scales
    assert losses == pytest.approx(eager_losses, rel=FLOOR[F16])
    assert all(skipped[:2])
    assert not all(skipped)
    assert any(after > before for before, after in itertools.pairwise(scales))


def test_an_overflow_reaches_both_leaves():
    problem = Problem(16, 8, 50, F16)
    for loss_of in (plain, fused()):
        x, weight = problem.leaves(F16)
        (loss_of(x, weight, problem.target) * 2.0**30).backward()
        assert not gradient(x).isfinite().all()
        assert not gradient(weight).isfinite().all()


# ---------------------------------------------------------------- as trainers do it


@OPERANDS
def test_gradients_accumulate(setting):
    """Three batches of unlike sizes, each divided as a Trainer divides it, one unscale."""
    parts = [Problem(n, 8, 300, F16, seed=n) for n in (5, 16, 32)]
    total = sum(len(part.x) for part in parts)

    def run(loss_of, dtype: torch.dtype = F32) -> list[torch.Tensor]:
        weight = parts[0].weight.to(dtype, copy=True).requires_grad_()
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=dtype == F32)
        for part in parts:
            operands = part.x.to(dtype), weight
            if dtype == F32 and not setting.autocast:
                operands = tuple(t.half() for t in operands)
            with torch.autocast("cpu", F16, enabled=setting.autocast and dtype == F32):
                loss = loss_of(*operands, part.target) * (len(part.x) / total)
            scaler.scale(loss).backward()
        optimizer = torch.optim.SGD([weight])
        scaler.unscale_(optimizer)
        return [gradient(weight)]

    def wide(x, weight, target):
        return F.cross_entropy(F.linear(x, weight), target)

    assert_close(run(fused()), run(plain), run(wide, torch.float64), F16)


def test_twenty_steps_go_the_way_of_eager():
    """fp16 autocast with a scaler that grows, against the same course in f32."""

    def run(compile_it: bool = False, half: bool = True) -> tuple[torch.Tensor, list[float]]:
        torch.manual_seed(2)
        model = Model()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5, enabled=half)
        loss_of = fused(model) if compile_it else model
        losses, scales, skipped = train(loss_of, model, counting(20), scaler)
        assert not any(skipped)
        return torch.tensor(losses), scales

    losses, scales = run(compile_it=True)
    assert counters["fusedce"]["matched"] == 1
    eager, eager_scales = run()
    exact, _ = run(half=False)
    assert scales == eager_scales
    assert scales[-1] == 2.0**14
    assert eager[-1] < 0.8 * eager[0], "nothing was learned, so nothing was compared"
    assert error(losses, exact) <= 2 * error(eager, exact) + 1e-4
