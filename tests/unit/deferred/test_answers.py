"""Torch functions of deferred logits, outside of the compiled function that returns them.

They return what eager returns, with its gradients, and the logits are never computed.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch._dynamo.utils import counters

from fxpass.deferred.inputs import StaleLogitsError
from fxpass.deferred.run import Run
from fxpass.rewrite import programs

# Dynamo itself looks at the .grad of logits that enter a graph
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

B, T, D, V = 3, 7, 16, 300
torch.manual_seed(0)
IDS, LABELS = torch.randint(V, (B, T)), torch.randint(V, (B, T))
TARGETS = torch.rand(B, T, V).softmax(-1)
ROWS = torch.rand(B, T, 1) + 0.5
BITS = torch.randint(2**31, (B, T, 10))

REDUCED: dict[str, Callable[[Tensor], Any]] = {
    "cross_entropy": lambda z: F.cross_entropy(z.flatten(0, 1), LABELS.flatten()),
    "classes second": lambda z: F.cross_entropy(z.transpose(1, 2), LABELS),
    "shifted": lambda z: F.cross_entropy(z[:, :-1].reshape(-1, V), LABELS[:, 1:].reshape(-1)),
    "contiguous, smoothed": lambda z: F.cross_entropy(
        z[..., :-1, :].contiguous().view(-1, V).float(),
        LABELS[:, 1:].flatten(),
        label_smoothing=0.1,
    ),
    "module": lambda z: torch.nn.CrossEntropyLoss(reduction="sum")(z.view(-1, V), LABELS.view(-1)),
    "masked rows": lambda z: F.cross_entropy(z[LABELS > 100], LABELS[LABELS > 100]),
    "probabilities": lambda z: F.cross_entropy(z.flatten(0, 1), TARGETS.flatten(0, 1)),
    "log-probabilities": lambda z: z.log_softmax(-1).gather(-1, LABELS[..., None]),
    "of later rows": lambda z: z.log_softmax(-1)[:, :-1].gather(-1, LABELS[:, 1:, None]).sum(),
    "one-hot": lambda z: (z.log_softmax(-1) * F.one_hot(LABELS, V)).sum(-1),
    "for each sequence": lambda z: torch.stack([row.logsumexp(-1) for row in z]),
    "chunks": lambda z: [part.logsumexp(-1) for part in z.chunk(3, 1)],
    "entropy": lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1),
    "Categorical": lambda z: torch.distributions.Categorical(logits=z).entropy(),
    "log_prob": lambda z: torch.distributions.Categorical(logits=z).log_prob(LABELS),
    "argmax": lambda z: z.argmax(-1),
    "max": lambda z: z.max(-1),
    "top-k": lambda z: z.topk(4),
    "accuracy": lambda z: (z.argmax(-1) == LABELS).float().mean(),
    "factors of rows": lambda z: (z * ROWS).logsumexp(-1),
    "masked classes": lambda z: z.masked_fill(torch.arange(V) > 200, -1e4).logsumexp(-1),
    "some classes": lambda z: z[..., :150].logsumexp(-1),
    "two": lambda z: (F.cross_entropy(z.view(-1, V), LABELS.view(-1)), z.logsumexp(-1).mean()),
    "mean": lambda z: z.mean(),
    "binary": lambda z: F.binary_cross_entropy_with_logits(z, TARGETS),
    "einsum": lambda z: torch.einsum("btv,btv->bt", z.softmax(-1), TARGETS),
    "detached": lambda z: z.detach().logsumexp(-1),
    "padded": lambda z: F.cross_entropy(
        F.pad(z, (0, 21), value=-1e4).flatten(0, 1), LABELS.flatten()
    ),
    "packed bits": lambda z: z.masked_fill(
        (BITS[..., torch.arange(V) // 32] >> (torch.arange(V) % 32)) & 1 > 0, -1e4
    ).logsumexp(-1),
    "lerp": lambda z: torch.lerp(z, TARGETS.to(z.dtype), z.new_tensor(0.3)).logsumexp(-1),
    "norm of order 0": lambda z: torch.linalg.vector_norm(z.detach().round(), 0),
    "norms": lambda z: torch.linalg.vector_norm(z, 3, dtype=torch.float64),
    "probabilities of labels": lambda z: F.binary_cross_entropy((z * 99).sigmoid(), TARGETS),
    "distillation": lambda z: F.kl_div(z.log_softmax(-1), TARGETS, reduction="batchmean"),
}


def smoothed(z: Tensor) -> Tensor:
    wanted = torch.zeros_like(z)
    wanted.fill_(0.1 / (V - 1))
    wanted.scatter_(-1, LABELS[..., None], 0.9)
    return -(wanted * z.log_softmax(-1)).sum(-1).mean()


def margins(z: Tensor) -> Tensor:
    hot = torch.zeros_like(z).scatter_(-1, LABELS[..., None], 1)
    return F.cross_entropy((z - 0.3 * hot).flatten(0, 1), LABELS.flatten())


def masked_copy(z: Tensor) -> Tensor:
    copy = torch.clone(input=z)
    copy[..., 150:] = -1e4
    copy[:, :, 3] = float("-inf")
    return copy.logsumexp(-1)


def scaled_copy(z: Tensor) -> Tensor:
    copy = z.clone(memory_format=torch.contiguous_format)
    copy /= 2
    copy.masked_fill_(TARGETS > 0.01, -3).mul_(ROWS)
    return copy.log_softmax(-1).gather(-1, LABELS[..., None])


def filled_with_logits(z: Tensor) -> Tensor:
    return torch.empty_like(z).copy_(z).add_(z.detach()).logsumexp(-1)


def result_of_out(z: Tensor) -> Tensor:
    with torch.no_grad():
        made = torch.zeros_like(z)
        torch.mul(z, 2, out=made)
    return made.argmax(-1)


def written_twice(z: Tensor) -> tuple[Tensor, Tensor]:
    copy = z.clone()
    before = copy.sum(-1)
    copy *= 2
    return before, copy.logsumexp(-1)


# What the program has made of the logits and writes to.
WRITTEN = {f.__name__: f for f in (smoothed, margins, masked_copy, scaled_copy)}
WRITTEN |= {f.__name__: f for f in (filled_with_logits, result_of_out, written_twice)}


def picked(z: Tensor) -> Tensor:
    return z.log_softmax(-1).gather(-1, LABELS[..., None])


# Functions of a number that differs from step to step.
SCHEDULED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "temperature": lambda z, t: F.cross_entropy((z / t).flatten(0, 1), LABELS.flatten()),
    "label smoothing": lambda z, t: F.cross_entropy(
        z.flatten(0, 1), LABELS.flatten(), label_smoothing=t / 9
    ),
    "sum of smoothed": lambda z, t: F.cross_entropy(
        z.transpose(1, 2), LABELS, reduction="sum", label_smoothing=t / 9
    ),
    "growing beta": lambda z, t: (picked(z * t) * t).mean(),
    "distillation": lambda z, t: (
        F.kl_div((z / t).log_softmax(-1), TARGETS, reduction="batchmean") * t * t
    ),
    "two temperatures": lambda z, t: F.kl_div(
        (z / t).log_softmax(-1), (z.detach() / (t + 1)).softmax(-1), reduction="batchmean"
    ),
    "three, of which two are equal": lambda z, t: F.kl_div(
        (z / t).log_softmax(-1) + (z / t).softmax(-1),
        (z.detach() / (t + 1)).softmax(-1),
        reduction="batchmean",
    ),
    "clamp": lambda z, t: z.clamp(-t, t).logsumexp(-1).mean(),
    "power": lambda z, t: z.softmax(-1).pow(1 + t).sum(-1).log().mean(),
    "mask": lambda z, t: z.masked_fill(TARGETS > 0.01, -t).logsumexp(-1).mean(),
    "in place": lambda z, t: z.clone().div_(t).logsumexp(-1).mean(),
    "of classes": lambda z, t: (z.argmax(-1) * t).mean() + z.mean(),
    "margin": lambda z, t: (t - z.gather(-1, LABELS[..., None]) + z).relu().mean(),
    "another way at 0": lambda z, t: F.cross_entropy(
        z.flatten(0, 1), LABELS.flatten(), label_smoothing=0.0 if t > 0.8 else t
    ),
}


class Model(torch.nn.Module):
    """A language model of one layer."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = torch.nn.Embedding(V, D)
        self.layer, self.head = torch.nn.Linear(D, D), torch.nn.Linear(D, V, bias=bias)

    def hidden(self) -> Tensor:
        return self.layer(self.embed(IDS)).tanh()

    def forward(self) -> Tensor:
        return self.head(self.hidden())


class Capped(Model):
    def forward(self) -> Tensor:
        return 3 * torch.tanh(self.head(self.hidden()).float() / 3)


class Broken(Model):
    """Its graph ends between head and loss."""

    def forward(self) -> Tensor:
        logits = self.head(self.hidden())
        torch._dynamo.graph_break()
        return logits * 0.5


class Shifted(Model):
    """Its graph ends behind a shift."""

    def forward(self) -> Tensor:
        logits = self.head(self.hidden())
        logits, labels = logits[:, :-1], LABELS[:, 1:]
        torch._dynamo.graph_break()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Views(Model):
    """Its graph returns two views of scaled logits, which share memory."""

    def forward(self) -> Tensor:
        logits = self.head(self.hidden()) * 0.5
        first, later = logits[:, :-1].float(), logits.transpose(1, 2)
        torch._dynamo.graph_break()
        picked = F.cross_entropy(first.reshape(-1, V), LABELS[:, 1:].flatten())
        return picked + F.cross_entropy(later, LABELS)


class Measured(Model):
    """Its graph ends at an accuracy that is printed, before the loss."""

    def forward(self) -> Tensor:
        logits = self.head(self.hidden())
        correct = (logits.argmax(-1) == LABELS).float().mean().item()
        return F.cross_entropy(logits.flatten(0, 1), LABELS.flatten()) + correct


class WithLoss(Model):
    def forward(self) -> tuple[Tensor, Tensor]:
        logits = self.head(self.hidden())
        return logits, F.cross_entropy(logits.flatten(0, 1), LABELS.flatten())


@contextmanager
def no_logits() -> Iterator[None]:
    """Raises where logits or their gradients are computed."""

    def refuse(self: Run, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("logits are computed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "logits", refuse)
        patch.setattr(Run, "gradients", refuse)
        yield


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    torch._dynamo.reset()
    model.compile(backend="fusedce", options={"fusedce.inner": "aot_eager"})
    return model


def outcome(model: torch.nn.Module, reduce: Callable[[Tensor], Any], dtype: Any) -> list[Any]:
    """Results, whether they have gradients, and the gradients of the model."""
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        out = model()
        logits, *loss = out if isinstance(out, tuple) else (out,)
        made = reduce(logits)
    results = [made] if isinstance(made, Tensor) else list(made)
    needs = [r.requires_grad for r in results]
    total = sum((r.float().square().sum() for r in results if r.requires_grad), sum(loss))
    if isinstance(total, Tensor):
        total.backward()
    return [[r.detach() for r in results], needs, [p.grad for p in model.parameters()]]


def same(model: type[Model], reduce: Callable[[Tensor], Any], dtype: Any = torch.float32) -> None:
    want = outcome(model(), reduce, dtype)
    with no_logits():
        got = outcome(compiled(model()), reduce, dtype)
    assert got[1] == want[1]
    coarse = dtype is torch.bfloat16
    for ours, theirs in zip(got[0] + got[2], want[0] + want[2], strict=True):
        if theirs is None or not theirs.is_floating_point():
            assert ours is None if theirs is None else torch.equal(ours, theirs)
            continue
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        bound = (8e-2 if coarse else 1e-5) * theirs.abs().max().item() + 1e-7
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "autocast"])
@pytest.mark.parametrize("reduce", REDUCED.values(), ids=REDUCED)
def test_what_is_reduced_is_answered(reduce, dtype):
    same(Model, reduce, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "autocast"])
@pytest.mark.parametrize("reduce", WRITTEN.values(), ids=WRITTEN)
def test_what_the_program_has_made_is_written_in_place(reduce, dtype):
    same(Model, reduce, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in SCHEDULED]
    + [(name, torch.bfloat16) for name in ("temperature", "label smoothing", "growing beta")],
)
def test_a_number_that_differs_compiles_nothing(name, dtype):
    """From the fourth step on: one record is that of the first number, two serve all others."""
    reduce = SCHEDULED[name]
    model, eager = compiled(Model()), Model()
    for step in range(7):
        counters.clear()
        number, found = 1.0 - 0.07 * step, []
        for one in (model, eager):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
                loss = reduce(one(), number)
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in one.parameters())])
            one.zero_grad()
        bound = 8e-2 if dtype is torch.bfloat16 else 5e-5  # a divergence cancels
        for ours, theirs in zip(*found, strict=True):
            most = bound * theirs.abs().max().item() + 1e-7
            torch.testing.assert_close(ours, theirs, rtol=0, atol=most)
        assert step < 4 or not counters["fusedce"]["matched"]


def margin_of_many_labels(z: Tensor) -> Any:
    """ATen's decomposition is another function where a list of labels ends early."""
    labels = torch.full((B * T, V), -1)
    labels[:, 0], labels[:, 1] = LABELS.flatten(), (LABELS.flatten() + 1) % V
    return F.multilabel_margin_loss(z.flatten(0, 1), labels), z.argmax(-1)


def bits(z: Tensor) -> Any:
    return (z.detach().view(torch.int32) > 1065353216).sum(-1), z.logsumexp(-1)


def seen_by_a_view(z: Tensor) -> Any:
    copy = z.clone()
    row = copy[0]
    copy[:, 3] = 0.0
    return row.sum(-1), copy.logsumexp(-1)


def seen_by_an_alias(z: Tensor) -> Any:
    copy = torch.zeros_like(z)
    alias = copy.detach()
    copy += 1
    return alias.sum(-1), (copy * z).sum(-1)


def to_a_view(z: Tensor) -> Any:
    copy = z.clone()
    copy[0].zero_()
    return copy.logsumexp(-1)


def to_a_view_of_a_copy(z: Tensor) -> Any:
    copy = torch.empty_like(z)
    copy.copy_(z)
    flat = copy.view(-1, V)
    flat[:, 0] = 5.0
    return flat.logsumexp(-1), copy.sum(-1)


def to_the_logits(z: Tensor) -> Any:
    z[..., 3] = -2.0
    return z.logsumexp(-1), z[0].sum()


def without_gradients(z: Tensor) -> Any:
    copy = z.clone()
    with torch.no_grad():
        copy *= 2
    return copy.logsumexp(-1)


def to_another_shape(z: Tensor) -> Any:
    copy = z.clone()
    copy.unsqueeze_(0)
    copy.squeeze_(0).transpose_(1, 2)
    return copy.logsumexp(1)


def to_an_operand(z: Tensor) -> Any:
    given = torch.zeros(B, T, V)
    given.copy_(z)
    return given.logsumexp(-1)


def to_a_snapshot(z: Tensor) -> Any:
    copy = z.detach().clone()
    assert type(copy) is Tensor
    copy.resize_(B * T, V)
    return copy.sum(-1), z.logsumexp(-1)


OTHERS = (
    margin_of_many_labels,
    bits,
    seen_by_a_view,
    seen_by_an_alias,
    to_a_view,
    to_a_view_of_a_copy,
    to_the_logits,
    without_gradients,
)
OTHERS += (to_another_shape, to_an_operand, to_a_snapshot)


@pytest.mark.parametrize("reduce", OTHERS, ids=[f.__name__ for f in OTHERS])
@pytest.mark.parametrize("name", ["Model", "Capped"])
def test_other_functions(reduce, name):
    """Writes are seen by all views; what is not answered has the values of the logits."""
    model = {"Model": Model, "Capped": Capped}[name]
    want = outcome(model(), reduce, torch.float32)
    got = outcome(compiled(model()), reduce, torch.float32)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["cross_entropy", "entropy", "masked rows", "two", "argmax"])
@pytest.mark.parametrize("model", [Capped, Broken, WithLoss, lambda: Model(bias=True)])
def test_heads(model, name):
    same(model, REDUCED[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "autocast"])
@pytest.mark.parametrize("model", [Shifted, Views, Measured])
def test_a_break_behind_views_and_metrics(model, dtype):
    same(model, lambda loss: loss, dtype)


@pytest.mark.parametrize("name", ["cross_entropy", "shifted", "entropy", "max"])
@pytest.mark.parametrize("model", [Model, Broken])
def test_the_next_compiled_function_is_answered(model, name):
    def reduce(logits: Tensor) -> Any:
        function = REDUCED[name]
        if type(logits) is Tensor:
            return function(logits)
        return torch.compile(function, backend="fusedce")(logits)

    same(model, reduce)


def test_in_one_graph_it_gets_values():
    with torch.no_grad():
        want = Model()().logsumexp(-1)
    logits = compiled(Model())()
    for options in ({"backend": "fusedce", "fullgraph": True}, {"backend": "aot_eager"}):
        function = torch.compile(lambda z: z.logsumexp(-1), **options)
        torch.testing.assert_close(function(logits), want)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    with mode():
        want = [Model()().log_softmax(-1).gather(-1, LABELS[..., None]), Model()().argmax(-1)]
        with no_logits():
            logits = compiled(Model())()
            got = [logits.log_softmax(-1).gather(-1, LABELS[..., None]), logits.argmax(-1)]
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.is_inference() == theirs.is_inference()


def test_views_without_gradients_of_logits_with_gradients():
    found = []
    for model in both():
        logits = model()
        loss = of_labels(logits)
        with torch.no_grad():
            view = logits[:, :-1]
            found.append([view.argmax(-1), view.flatten(0, 1).float().logsumexp(-1)])
        loss.backward()
        found[-1].append(model.head.weight.grad)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "read",
    [
        lambda z: z[:, -1].softmax(-1).cumsum(0),
        lambda z: torch.tensor(z.log_softmax(-1)[:, -1].tolist()),
        lambda z: (z / 2).softmax(-1)[0, 3].clone(),
    ],
)
def test_a_few_rows_of_what_is_deferred_are_computed_alone(read, monkeypatch):
    """As in sampling."""
    with torch.no_grad():
        want = read(Model()())
        logits = compiled(Model())()
        run, of_rows = logits._part.run, []
        forward = run.recipe.graph.forward
        monkeypatch.setattr(
            run.recipe.graph, "forward", lambda x, *a: of_rows.append(x.shape) or forward(x, *a)
        )
        torch.testing.assert_close(read(logits), want)
    assert [shape[:-1].numel() for shape in of_rows] in ([B], [1])


def test_a_head_with_a_product_beside_it_keeps_its_logits():
    class WithLora(Model):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(D, 4), torch.nn.Linear(4, V)

        def forward(self) -> Tensor:
            x = self.hidden()
            return self.head(x) + self.b(self.a(x)) * 2

    model = compiled(WithLora())
    logits = model()
    assert type(logits) is Tensor
    of_labels(logits).backward()
    eager = WithLora()
    of_labels(eager()).backward()
    torch.testing.assert_close(model.head.weight.grad, eager.head.weight.grad)


# ---------------------------------------------------------------- gradients of logits


def of_labels(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), LABELS.flatten())


def both(**how: bool) -> Iterator[Model]:
    yield Model(**how)
    yield compiled(Model(**how))


def test_the_gradient_of_the_logits_can_be_read():
    found = []
    for model in both():
        logits = model()
        loss = of_labels(logits) + logits.logsumexp(-1).square().mean()
        (gradient,) = torch.autograd.grad(loss, logits)
        found.append(gradient.clone())
    torch.testing.assert_close(*found)


def test_a_hook_on_the_logits_sees_and_changes_their_gradient():
    found = []
    for model in both():
        logits, seen = model(), []
        logits.register_hook(lambda grad, seen=seen: seen.append(grad.clone()) or grad * 2)
        logits.retain_grad()
        of_labels(logits).backward()
        found.append([seen[0], logits.grad.clone(), model.head.weight.grad, model.layer.bias.grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def _late_hook(z: Tensor) -> tuple[Tensor, list[Tensor]]:
    view, seen = z[:, :-1].float(), []
    loss = F.cross_entropy(view.flatten(0, 1), LABELS[:, 1:].flatten())
    view.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
    view.argmax(-1)
    return loss, seen


def _early_hook(z: Tensor) -> tuple[Tensor, list[Tensor]]:
    view, seen = z[:, :-1], []
    view.argmax(-1)
    view.register_hook(lambda grad: seen.append(grad.clone()))
    p = view.softmax(-1)
    loss = F.cross_entropy(view.flatten(0, 1), LABELS[:, 1:].flatten()) + (p * p.log()).sum()
    p.register_hook(lambda grad: seen.append(grad.clone()) or grad * 3)
    return loss, seen


def _gradients(z: Tensor) -> tuple[Tensor, list[Tensor]]:
    weights = torch.linspace(0.5, 2, B * T).view(B, T, 1).requires_grad_()
    p = F.softplus(z)
    scaled = p * weights
    loss = scaled.logsumexp(-1).sum() + (scaled[:, 1:].softmax(-1) * weights[:, 1:]).square().sum()
    found = torch.autograd.grad(loss, [scaled, z, p, weights], retain_graph=True)
    return loss, [*found, *torch.autograd.grad(loss, inputs=weights, retain_graph=True)]


@pytest.mark.parametrize("use", [_late_hook, _early_hook, _gradients])
def test_what_is_made_of_logits_has_a_gradient(use):
    """Wherever a program sees it; backward of what is linked to the logits passes it then."""
    found = []
    for model in both():
        loss, seen = use(model())
        loss.backward()
        assert seen
        found.append([*seen, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_parameters_stay_deferred_after_those_of_a_view():
    model = compiled(Model())
    view = model()[:, 1:]
    loss = F.cross_entropy(view.flatten(0, 1), LABELS[:, 1:].flatten())
    torch.autograd.grad(loss, view, retain_graph=True)
    with no_logits():
        loss.backward()


def test_a_hook_on_logits_without_a_gradient_is_not_called():
    found = []
    for model in both():
        logits, weights = model(), torch.ones(B, T, 1, requires_grad=True)
        logits.register_hook(lambda grad: pytest.fail(str(grad)))
        (logits.detach() * weights).logsumexp(-1).sum().backward()
        found.append(weights.grad)
    torch.testing.assert_close(*found)


def test_backward_twice():
    found = []
    for model in both():
        loss = of_labels(model())
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(model.head.weight.grad)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    torch.testing.assert_close(*found)


def test_trained_operands_have_gradients():
    found = []
    for model in both():
        temperature = torch.tensor(1.5, requires_grad=True)
        factors = ROWS.clone().requires_grad_()
        logits = model() / temperature
        loss = of_labels(logits) + (logits * factors).logsumexp(-1).mean()
        loss.backward()
        found.append([temperature.grad, factors.grad, model.head.weight.grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "distance",
    [
        lambda p, q: F.kl_div(p, q, reduction="batchmean", log_target=True),
        lambda p, q: F.cosine_similarity(p, q.square(), -1).mean(),
    ],
)
def test_two_models(distance, mode):
    """A student's logits and a teacher's, compiled apart."""
    found = []
    for student in both():
        teacher = Capped()
        if type(student()) is not Tensor:
            teacher.compile(backend="fusedce", options={"fusedce.inner": "aot_eager"})
        with mode():
            target = teacher()
        loss = distance(student().log_softmax(-1), target.log_softmax(-1))
        loss.backward()
        found.append([loss.detach(), student.head.weight.grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_two_calls_of_one_model():
    found = []
    for model in both():
        first, second = model(), model()
        loss = F.kl_div(first.log_softmax(-1), second.softmax(-1).detach() * 0.5, reduction="sum")
        loss.backward()
        found.append([loss.detach(), model.head.weight.grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


class Reversed(torch.autograd.Function):
    """Returns what it is given; its gradient is the negative."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def test_a_custom_function_of_the_logits_has_its_own_backward():
    found = []
    for model in both():
        of_labels(Reversed.apply(model())).backward()
        found.append(model.head.weight.grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("of", ["weight", "logits"])
def test_a_second_derivative_raises(of):
    model = compiled(Model())
    logits = model()
    given = logits if of == "logits" else model.head.weight
    (gradient,) = torch.autograd.grad(of_labels(logits), given, create_graph=True)
    assert gradient.requires_grad
    with pytest.raises(RuntimeError, match=r"second derivative|differentiate twice"):
        gradient.square().sum().backward()


def test_in_a_checkpoint():
    """Making the program saves nothing for the backward of the checkpoint."""
    found = []
    for model in both():
        torch.utils.checkpoint.checkpoint(of_labels, model(), use_reentrant=False).backward()
        found.append(model.head.weight.grad)
    torch.testing.assert_close(*found)


def test_where_hooks_of_saved_tensors_are_disabled():
    found = []
    for model in both():
        logits = model()
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            loss = of_labels(logits)
        loss.backward()
        found.append((loss, model.head.weight.grad))
    torch.testing.assert_close(*found)


def test_a_program_that_cannot_be_made_computes_the_logits(monkeypatch):
    """No program is known that fails now: padding did."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(programs, "_graph", fails)
    found = []
    for model in both():
        loss = F.pad(model(), (0, 21), value=-1e4).logsumexp(-1).sum()
        loss.backward()
        found.append((loss, model.head.weight.grad))
    torch.testing.assert_close(*found)


# ---------------------------------------------------------------- what changes in between


def test_an_operand_that_is_written_to():
    """A small one is copied; one as large as the logits raises."""
    found = []
    for model in both():
        scale = torch.full((), 2.0)
        scaled = model() * scale
        scale.add_(1)
        found.append(scaled.logsumexp(-1))
    torch.testing.assert_close(*found)
    targets = TARGETS.clone()
    scaled = model() * targets
    targets.add_(1)
    with pytest.raises(StaleLogitsError, match="changed in place"):
        scaled.logsumexp(-1)


@pytest.mark.parametrize("write", [False, True])
def test_a_frozen_weight_that_changes_before_backward(write):
    """Eager's backward does not read it, but the logits, which the program may write to."""
    found = []
    for model in both(bias=True):
        for frozen in model.parameters():
            frozen.requires_grad_(frozen is model.head.bias)
        logits = model()
        loss = (logits * ROWS).exp().sum()
        logits.data_ptr()
        with torch.no_grad():
            model.head.weight.add_(1)
            _ = logits.add_(1) if write and type(logits) is not Tensor else None
        if write:
            continue
        loss.backward()
        found.append(model.head.bias.grad)
    if write:
        with pytest.raises(StaleLogitsError):
            loss.backward()
    else:
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("write", [lambda z: z.mul_(2), lambda z: z.detach_()])
def test_a_write_after_a_function_does_not_concern_it(write):
    found = []
    for model in both():
        logits = model() * 1 if type(model()) is Tensor else model()
        scored = logits.log_softmax(-1)
        write(logits)
        scored.gather(-1, LABELS[..., None]).sum().backward()
        found.append(model.head.weight.grad)
    torch.testing.assert_close(*found)


def test_a_write_to_the_logits_computes_them():
    found = []
    for model in both():
        logits = model()
        older = logits.log_softmax(-1)
        before = logits.logsumexp(-1)
        with torch.no_grad():
            logits.zero_()
        found.append([before, older.exp().sum(-1), logits.logsumexp(-1), older * 1])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("read", ["before", "after"])
def test_a_step_in_between(read):
    """Logits have the values of before the step."""
    found = []
    for model in both():
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        logits = model()
        of_labels(logits).backward(retain_graph=True)
        if read == "before":
            scored = logits.log_softmax(-1)
        optimizer.step()
        if read == "after":
            scored = logits.log_softmax(-1)
        with torch.no_grad():
            found.append(scored.gather(-1, LABELS[..., None]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("loss_of", [of_labels, lambda z: of_labels(z.log_softmax(-1) * 2)])
def test_hidden_states_are_released_after_backward(loss_of):
    """Also where the loss is alive."""
    model, kept = compiled(Model()), []
    model.layer.register_forward_hook(lambda *a: kept.append(weakref.ref(a[-1])))
    with no_logits():
        logits = model()
        run = weakref.ref(logits._part.run)
        loss = loss_of(logits)
        del logits
        loss.backward()
    gc.collect()
    assert run() is None
    assert loss.isfinite()


def test_logits_that_are_computed_are_released():
    """What is known of a function that is not answered refers to no tensor."""
    logits = compiled(Model())()
    part = weakref.ref(logits._part)
    logits.cumsum(0)
    del logits
    gc.collect()
    assert part() is None


def test_a_program_is_made_once(monkeypatch):
    """For other numbers of rows, and for the next step."""
    made = []
    text = programs._text
    monkeypatch.setattr(programs, "_text", lambda graph: made.append(text(graph)) or made[-1])
    model = compiled(Model())
    for rows in (6, 6, 5, 3):
        logits = model()[:, :rows]
        F.cross_entropy(logits.flatten(0, 1), LABELS[:, :rows].flatten()).backward()
    assert made
    assert len({*made}) == 1


def test_threads():
    model, found, errors = compiled(Model()), {}, []
    model()  # compiled once
    want = of_labels(Model()()).item()

    def work(number: int) -> None:
        try:
            loss = of_labels(model())
            loss.backward()
            found[number] = loss.item()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [*found.values()] == pytest.approx([want] * 4, rel=1e-6)
