"""Several devices in one process: the head on another one than the hidden states, or than the
current one.

Without GPUs two things can be shown. Graphs of models on two GPUs are traced with tensors that have
a device and no data. And the kernels' launches are taken down, with the device that was current: of
the driver, only which device that is, is simulated.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxpass.aten.common import Inputs
from fxpass.kernels import chunked, tiled
from fxpass.op import checks, dispatch, operator
from fxpass.plan import plan
from fxpass.rewrite.transform import Outcome, transform
from fxpass.settings import Settings
from fxpass.spec.spec import Spec
from tests.support.implementations import GRADIENTS, problem

N, D, V = 24, 16, 50
FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32

# ---------------------------------------------------------------- graphs on two devices

# x [N, D] and labels [N] on one device, weight [V, D] on another -> the loss


def hidden_moved(x, weight, labels):
    return F.cross_entropy(F.linear(x.to(weight.device), weight), labels.to(weight.device))


def loss_moved_back(x, weight, labels):
    return hidden_moved(x, weight, labels).to(x.device)


def hidden_moved_and_cast(x, weight, labels):
    logits = F.linear(x.to(weight.device, torch.float32), weight).float()
    return F.cross_entropy(logits, labels.to(logits.device))


def weight_moved(x, weight, labels):
    return F.cross_entropy(F.linear(x, weight.to(x.device)), labels)


def logits_moved(x, weight, labels):
    return F.cross_entropy(F.linear(x.to(weight.device), weight).to(x.device), labels)


def logits_moved_and_cast(x, weight, labels):
    logits = F.linear(x.to(weight.device), weight)
    return F.cross_entropy(logits.to(x.device, torch.float32), labels)


def logits_on_the_cpu(x, weight, labels):
    return F.cross_entropy(F.linear(x.to(weight.device), weight).cpu(), labels.cpu())


def scaled_logits_moved(x, weight, labels):
    return F.cross_entropy((F.linear(x.to(weight), weight) / 2).to(labels.device) * 3, labels)


PAIRS = [(CPU, FIRST), (FIRST, CPU), (FIRST, SECOND)]


def outcome_of(program, devices, monkeypatch) -> Outcome:
    """What becomes of the graph of a program, which is traced and not run.

    (Without gradients: autograd knows no GPU where torch was built without.)
    """
    monkeypatch.setattr("fxpass.plan.devices.properties_of", lambda device: None)
    x_device, weight_device = devices
    with FakeTensorMode():
        x, weight = torch.randn(N, D, device=x_device), torch.randn(V, D, device=weight_device)
        labels = torch.randint(V, (N,), device=x_device)
    outcomes = []

    def backend(gm, example_inputs):
        (output,) = (node for node in gm.graph.nodes if node.op == "output")
        values = [node.meta["example_value"] for node in output.all_input_nodes]
        outcomes.append(transform(gm, Settings.read()))
        return lambda *inputs: values

    torch.compile(program, backend=backend, fullgraph=True)(x, weight, labels)
    (outcome,) = outcomes
    return outcome


@pytest.mark.parametrize("devices", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
@pytest.mark.parametrize(
    "program", [hidden_moved, loss_moved_back, hidden_moved_and_cast, weight_moved]
)
def test_a_head_on_another_device(program, devices, monkeypatch):
    """What the linear reads may be moved: the loss is computed where the linear is."""
    outcome = outcome_of(program, devices, monkeypatch)
    (match,) = outcome.matches
    assert not outcome.rejections
    assert match.choice is not None
    assert match.choice.device == devices[program is not weight_moved]


@pytest.mark.parametrize("devices", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
@pytest.mark.parametrize("program", [logits_moved, logits_moved_and_cast, scaled_logits_moved])
def test_logits_that_move(program, devices, monkeypatch):
    """They would have to exist."""
    outcome = outcome_of(program, devices, monkeypatch)
    assert not outcome.matches
    (rejection,) = outcome.rejections
    x_device, weight_device = devices
    assert f"moves the logits from {weight_device} to {x_device}" in rejection.reason


@pytest.mark.parametrize(("weight_device", "matched"), [(FIRST, 0), (CPU, 1)], ids=str)
def test_logits_on_the_cpu(weight_device, matched, monkeypatch):
    outcome = outcome_of(logits_on_the_cpu, (weight_device, weight_device), monkeypatch)
    assert len(outcome.matches) == matched  # from the CPU to the CPU is no way
    for rejection in outcome.rejections:
        assert "from cuda:0 to cpu; move the labels to cuda:0 instead" in rejection.reason


def test_the_operator_wants_one_device():
    made = problem(CPU, F32, bias=False)
    with pytest.raises(ValueError, match="x on cpu, weight on cuda:1, target on cpu"):
        checks.check_inputs(made._replace(weight=made.weight.as_subclass(OnSecond)), Spec())


# ---------------------------------------------------------------- launches


class Driver:
    """Which device is current, and what is launched meanwhile."""

    def __init__(self, monkeypatch) -> None:
        self.current = 0
        self.launched: list[tuple[int, set[torch.device]]] = []
        monkeypatch.setattr(torch.cuda, "_exchange_device", self.exchange)
        monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", self.exchange)
        load = chunked.load
        for module in (chunked, tiled):
            monkeypatch.setattr(module, "load", lambda kernel: Launched(self, load(kernel)))

    def exchange(self, device: int) -> int:
        before, self.current = self.current, device if device >= 0 else self.current
        return before

    def launch(self, arguments: list[object]) -> None:
        devices = {a.device for a in arguments if isinstance(a, Tensor)}
        self.launched.append((self.current, devices))


class Launched:
    """Stands for a kernel: takes down that it was launched."""

    def __init__(self, driver: Driver, kernel) -> None:
        self.driver, self.arg_names = driver, kernel.arg_names

    def __getitem__(self, grid):
        return lambda **arguments: self.driver.launch(list(arguments.values()))


class OnSecond(Tensor):
    """Says that it is on the second GPU, and so does all that is made of it; the data is on the
    CPU. (Tensors without data do not get far where torch was not built for GPUs.)"""

    device: Any = SECOND
    is_cuda: Any = True


def on_second(inputs: Inputs) -> Inputs:
    moved: Any = (None if t is None else t.as_subclass(OnSecond) for t in inputs)
    return Inputs(*moved)


A100 = SimpleNamespace(
    name="NVIDIA A100", major=8, minor=0, multi_processor_count=108, total_memory=80 << 30
)


def only_the_second(device: object) -> None:
    assert device == SECOND, f"{device} was asked about"


@pytest.fixture
def driver(monkeypatch):
    """The first device is current and old; whoever asks about it is wrong."""

    def capability(device=None):
        only_the_second(device)
        return 8, 0

    def properties(device=None):
        only_the_second(device)
        return A100

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr("fxpass.plan.devices.properties_of", properties)
    monkeypatch.setattr(chunked, "_mixed_gemm", lambda x: False)  # not on CPUs
    return Driver(monkeypatch)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("target", ["indices", "probabilities"])
@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
def test_everything_happens_on_the_device_of_the_tensors(strategy, target, dtype, driver):
    """Launches with it current, scratch and results, and what is asked of a device."""
    inputs = on_second(problem(CPU, dtype, target=target, weighted=True, row_scaled=True))
    if strategy == "tiled":
        out = dispatch.compute(inputs, Spec(target=target, strategy=strategy))
        assert out.lse is not None
        inputs = inputs._replace(lse=out.lse, lse_rest=out.lse_rest)
    spec = Spec(target=target, strategy=strategy, gradients=GRADIENTS)
    out = dispatch.compute(inputs, spec)
    assert {t.device for t in out if t is not None} == {SECOND}
    assert driver.launched
    assert driver.launched == [(1, {SECOND})] * len(driver.launched)
    assert driver.current == 0


def test_it_is_the_stream_of_the_tensors_that_may_be_recorded(driver, monkeypatch):
    """A CUDA graph: nothing is waited for then."""
    asked = []

    def capturing() -> bool:
        asked.append(driver.current)
        return driver.current == 1

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
    inputs = on_second(problem(CPU, F32))
    assert inputs.target is not None
    inputs.target.fill_(-100)  # would be left out
    operator._compute(inputs, Spec())
    assert driver.launched
    assert asked == [1]


def test_the_implementation_is_that_of_the_device(monkeypatch):
    """An old GPU beside a new one: each does what it can."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("fxpass.plan.devices.has_triton", lambda: True)
    cards = {
        FIRST: SimpleNamespace(name="GPU 0", major=7, minor=0),
        SECOND: SimpleNamespace(name="GPU 1", major=9, minor=0),
    }
    monkeypatch.setattr("fxpass.plan.devices.properties_of", cards.get)
    sizes = N, D, V, BF16
    assert plan.plan(*sizes, FIRST, Spec()).implementation == "aten"
    assert plan.plan(*sizes, SECOND, Spec()).implementation == "triton"
    assert "GPU 0 is older than sm_75" in plan.plan(*sizes, FIRST, Spec()).reason
