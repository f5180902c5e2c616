"""PEFT, fp16 autocast, GradScaler, and an autograd.Function without custom_fwd and custom_bwd.

Its backward runs outside autocast, with float16 gradients and float32 weights: ``c10::Half !=
float``. Quantised linears of several libraries were written like that. Here one replaces the linears
below real PEFT adapters, in a real Llama.
"""

from __future__ import annotations

import peft
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fxpass.report import explain
from tests.support import tiny

# peft's own, on this transformers
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

STEPS = 5


class Product(torch.autograd.Function):
    """x [..., D], weight [V, D] -> [..., V], with a frozen weight."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, g: Tensor):
        (weight,) = ctx.saved_tensors
        return g @ weight, None


class Decorated(Product):
    """As it should have been written: the reference."""

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g: Tensor):
        (weight,) = ctx.saved_tensors
        return g @ weight.to(g.dtype), None

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        return Product.forward(ctx, x, weight)


class Linear(nn.Linear):
    """A frozen linear that computes through an ``autograd.Function``."""

    function: type[torch.autograd.Function] = Product

    def forward(self, input: Tensor) -> Tensor:
        return self.function.apply(input, self.weight)


def model(function: type[torch.autograd.Function]) -> nn.Module:
    """A Llama with adapters on its attention, whose base linears are ``function``."""
    base = tiny.llama()
    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "o_proj"]
    )
    torch.manual_seed(1)
    made = peft.get_peft_model(base, config)
    for module in made.modules():
        if isinstance(module, peft.tuners.lora.Linear):
            module.base_layer.__class__ = type("L", (Linear,), {"function": function})
            nn.init.normal_(module.lora_B["default"].weight, std=0.02)
    return made


def batch() -> dict[str, Tensor]:
    ids = (torch.arange(12) + torch.arange(4)[:, None] * 7) % tiny.WORDS + len(tiny.SPECIAL)
    return {"input_ids": ids, "labels": ids}


def train(network: nn.Module, inner: str | None) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, and the adapters after the last step."""

    def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return network(input_ids=ids, labels=labels).loss

    if inner is not None:
        options = {"fusedce.inner": inner}
        loss_of = torch.compile(loss_of, backend="fusedce", options=options)
    adapters = {n: p for n, p in network.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(adapters.values(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(*batch().values())
        scaler.scale(loss).backward()
        assert all(p.grad.dtype == torch.float32 for p in adapters.values())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert scaler.get_scale() == 2.0**10  # no step was skipped
    return losses, {n: p.detach() for n, p in adapters.items()}


def test_eager_fails():
    with pytest.raises(RuntimeError, match=r"c10::Half != float"):
        train(model(Product), None)


def test_without_it_the_compiled_model_fails_too(monkeypatch):
    monkeypatch.setenv("FUSEDCE", "0")
    with pytest.raises(RuntimeError, match=r"c10::Half != float"):
        train(model(Product), "aot_eager")


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_it_trains_like_the_decorated_one(inner):
    losses, adapters = train(model(Product), inner)
    assert counters["fusedce"]["matched"] == 1
    expected, theirs = train(model(Decorated), None)
    torch.testing.assert_close(losses, expected, rtol=2**-9, atol=0)
    assert losses[-1] < losses[0]
    start = {n: p for n, p in model(Product).named_parameters() if n in adapters}
    for name, ours in adapters.items():
        moved, true = ours - start[name], theirs[name] - start[name]
        assert (moved - true).norm() < 0.02 * true.norm(), name


def test_the_report_has_the_line_of_its_backward():
    network = model(Product)

    def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return network(input_ids=ids, labels=labels).loss

    report = explain(loss_of, *batch().values())
    number = Product.backward.__code__.co_firstlineno + 3
    line = f"tests/libraries/test_llama_recipes.py:{number} return g @ weight, None"
    assert {(c.old, c.new) for c in report.casts if c.source == line} == {
        (torch.float32, torch.float16)
    }
