"""Several devices in one process: the head on another one than the hidden states, or than the
current one.

Without GPUs two things can be shown. Graphs of models on two GPUs are traced with tensors that have
a device and no data. And the kernels' launches are taken down, with the device that was current: of
the driver, only which device that is, is simulated.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxpass import messages
from fxpass.formula.operands import Operands
from fxpass.formula.outputs import Moment
from fxpass.formula.reductions import Reductions
from fxpass.kernels import reductions
from fxpass.lower.formula import formula_of
from fxpass.op import ignored, row_chunks
from fxpass.op.checks import check
from fxpass.plan import plan
from fxpass.region.loop import Loop
from fxpass.region.split import split_loop
from fxpass.rewrite.settled import programs_of_logits, rows_pass, with_matches
from fxpass.rewrite.transform import Outcome, transform
from fxpass.rows.reasons import FusedPart
from fxpass.settings import Settings
from tests.support.gpus import T4, V100
from tests.support.launches import Launches
from tests.support.reduction_cases import case
from tests.support.specs import spec_of
from tests.unit.op.test_rows import FORMULAS, tensors_of

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


SETTINGS = {"fusedce.inner": "eager", "fusedce.min_logits_mb": 0}


def outcome_of(program, devices, gpus) -> tuple[Outcome, list[FusedPart]]:
    """What becomes of the graph of a program, which is traced and not run, and its calls.

    (Without gradients: autograd knows no GPU where torch was built without.)
    """
    gpus.have()  # a machine with one GPU has no second
    x_device, weight_device = devices
    with FakeTensorMode():
        x, weight = torch.randn(N, D, device=x_device), torch.randn(V, D, device=weight_device)
        labels = torch.randint(V, (N,), device=x_device)
    outcomes = []

    def backend(gm, example_inputs):
        (output,) = (node for node in gm.graph.nodes if node.op == "output")
        values = [node.meta["example_value"] for node in output.all_input_nodes]
        settings = Settings.read(SETTINGS)
        outcome = transform(gm, settings, programs_of_logits(settings), example_inputs)
        rows = rows_pass(settings)
        rows.backend()(gm, example_inputs)
        parts = [part for made in rows.made for part in made.parts]
        outcomes.append((with_matches(outcome, rows.made), parts))
        return lambda *inputs: values

    torch.compile(program, backend=backend, fullgraph=True)(x, weight, labels)
    (found,) = outcomes
    return found


@pytest.mark.parametrize("devices", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
@pytest.mark.parametrize(
    "program", [hidden_moved, loss_moved_back, hidden_moved_and_cast, weight_moved]
)
def test_a_head_on_another_device(program, devices, gpus):
    """What the linear reads may be moved: the loss is computed where the linear is."""
    outcome, (part,) = outcome_of(program, devices, gpus)
    assert not outcome.rejections, outcome.rejections
    assert len(outcome.heads) == 1
    assert part.device == devices[program is not weight_moved]


def log_probabilities(x, weight, labels):
    log = F.linear(x.to(weight.device), weight).float().log_softmax(-1)
    entropy = -(log.exp() * log).sum(-1)
    labels = labels.to(weight.device)
    return log.gather(-1, labels.unsqueeze(1)).squeeze(1), entropy, log.argmax(-1) == labels


@pytest.mark.parametrize("devices", [(FIRST, FIRST), *PAIRS], ids=lambda p: f"{p[0]}-{p[1]}")
def test_reductions_of_a_head_on_a_gpu(devices, gpus):
    """They are one call, where the linear is, which has a formula."""
    outcome, (part,) = outcome_of(log_probabilities, devices, gpus)
    assert len(outcome.heads) == 1
    assert not outcome.rejections
    assert part.device == devices[1]
    formula = formula_of(split_loop(Loop.parse(part.text)).function)
    assert set(formula.outputs) == {"pick", Moment(1, 1), "argmax"}


@pytest.mark.parametrize("devices", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
@pytest.mark.parametrize("program", [logits_moved, logits_moved_and_cast, scaled_logits_moved])
def test_logits_that_move(program, devices, gpus):
    """They would have to exist."""
    outcome, parts = outcome_of(program, devices, gpus)
    assert not outcome.heads
    assert not parts
    (rejection,) = outcome.rejections
    x_device, weight_device = devices
    assert (
        messages.DEVICE_OF_LOGITS.format(before=weight_device, after=x_device) in rejection.reason
    )


@pytest.mark.parametrize(("weight_device", "matched"), [(FIRST, 0), (CPU, 1)], ids=str)
def test_logits_on_the_cpu(weight_device, matched, gpus):
    outcome, parts = outcome_of(logits_on_the_cpu, (weight_device, weight_device), gpus)
    assert (len(outcome.heads), len(parts)) == (
        matched,
        matched,
    )  # from the CPU to the CPU is no way
    for rejection in outcome.rejections:
        assert "from cuda:0 to cpu; move the labels to cuda:0 instead" in rejection.reason


def test_the_engine_wants_one_device():
    x, weight = torch.randn(N, D), torch.randn(V, D).as_subclass(OnSecond)
    operands = Operands(x, weight, None, None, None, ())
    with pytest.raises(ValueError, match="x on cpu, weight on cuda:1"):
        check(operands, Reductions(("lse",)))


# ---------------------------------------------------------------- launches


class OnSecond(Tensor):
    """Says that it is on the second GPU, and so does all that is made of it; the data is on the
    CPU. (Tensors without data do not get far where torch was not built for GPUs.)"""

    device: Any = SECOND
    is_cuda: Any = True


def on_second(given: Operands) -> Operands:
    """Operands, some of which are tuples of tensors."""

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(moved, value))
        return value.as_subclass(OnSecond) if isinstance(value, Tensor) else value

    return Operands(*map(moved, given))


def operands(dtype: torch.dtype, total: int = 0) -> Operands:
    found = Operands(
        x=torch.randn(7, D).to(dtype),
        weight=torch.randn(V, D).to(dtype),
        bias=torch.randn(V),
        scale=torch.rand(7),
        picks=torch.randint(V, (7,)),
        given=(torch.randn(V),),
        coef=torch.randn(total, 7) if total else None,
    )
    return on_second(found)


@pytest.fixture
def launches(gpus, monkeypatch):
    """Two GPUs, of which the first is current and runs no kernels; what is launched where."""
    gpus.have(V100, T4)  # (not a newer one: CPUs cannot add bf16 products to f32)
    return Launches(monkeypatch, current=lambda: gpus.current)


def check_launches(launches, gpus) -> None:
    """With the second device current, and its tensors; nothing is asked about the first."""
    assert launches
    for launch in launches:
        assert launch["current"] == 1
        assert {t.device for t in launch.values() if isinstance(t, Tensor)} == {SECOND}
    assert gpus.current == 0
    assert set(gpus.asked) == {1}


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(
    "text",
    [
        "outputs=moment(0,1,0);pick gradients=x,weight,bias",
        "outputs=max;argmax;pick gradients=x,weight,bias detached=max",
        "gradients=x,weight,bias total=moment(0,1,0);pick",
        "outputs=argmax;moment(0,1,0);pick",
    ],
)
def test_everything_happens_on_the_device_of_the_tensors(text, dtype, launches, gpus):
    """Launches with it current, scratch and results, and what is asked of a device."""
    spec = spec_of(text)
    given = operands(dtype, len(spec.total))
    some = plan.plan_head(7, D, V, dtype, SECOND, spec, True, bool(spec.gradients))
    assert some.implementation == "triton"
    out, grads = reductions.forward(given, spec, some)
    if spec.gradients and not spec.total:
        incoming = out.rows.new_ones(len(spec.of_backward.rows), 7)
        grads = reductions.backward(given, spec.of_backward, some, out, incoming)
    assert grads.keys() == set(spec.gradients)
    assert {t.device for t in (*out, *grads.values())} == {SECOND}
    check_launches(launches, gpus)


LOSS = Reductions((), gradients=("x", "weight"), total=("pick",))
ROWS = 7


class MadeThere(TorchFunctionMode):
    """What is made on the second GPU says that it is there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("device") != SECOND:
            return func(*args, **kwargs)
        return func(*args, **kwargs | {"device": "cpu"}).as_subclass(OnSecond)


def run_loop(counted: int) -> list[Tensor]:
    """The results of a loop with a formula, the mean loss of rows and its gradients, on the second
    GPU, where so many rows count."""
    text = FORMULAS["a loss"]
    of = copy.copy(row_chunks.prepared(text, CPU))
    assert of.formula is not None
    of.device = SECOND
    tensors = tensors_of(text, ROWS)
    tensors[0] = (torch.arange(ROWS) < counted).unsqueeze(1)
    tensors[1] = torch.where(tensors[0], tensors[1], torch.nan)
    given = [t.as_subclass(OnSecond) for t in tensors]
    with MadeThere():
        return row_chunks.run_loop(of, given, {"n": ROWS})


@pytest.mark.parametrize("what", ["a CUDA graph", "little work"])
def test_when_nothing_is_waited_for(what, launches, gpus, monkeypatch):
    """So that no row is left out. It is the stream of the tensors that may be recorded."""
    if what == "a CUDA graph":
        gpus.capturing = 1
        for module in (ignored, row_chunks):
            monkeypatch.setattr(module, "WORTH_A_WAIT", 0)
    monkeypatch.setattr(ignored._Earlier, "left_out", lambda *_: 1.0)
    run_loop(0)  # all rows would be left out
    check_launches(launches, gpus)
    assert [len(launch["logits"]) for launch in launches] == [ROWS]


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for tensors on a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal")
        self.count += waits and not getattr(args[0], "pinned", False)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch):
    """The waits of calls, all of which are large enough for one; no call was made before."""

    def pinned():
        number = torch.zeros((), dtype=torch.int64)
        number.pinned = True  # type: ignore[attr-defined]
        return number

    for module in (ignored, row_chunks):
        monkeypatch.setattr(module, "WORTH_A_WAIT", 0)
    # not every build of torch pins memory
    monkeypatch.setattr(ignored, "_pinned", pinned)
    monkeypatch.setattr(ignored, "_EARLIER", ignored._Earlier())
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield Waits()
    torch.use_deterministic_algorithms(before)


def steps(counted: list[int], waits: Waits, launches) -> list:
    """The rows of the last launch of each step, of which so many count, and the waits."""
    found = []
    for count in counted:
        with waits:
            before = waits.count
            results = run_loop(count)
        if not count:
            assert not any(t.any() for t in results)
        found.append((len(launches[-1]["logits"]), waits.count - before))
    return found


def test_steps_whose_rows_all_count_never_wait(launches, gpus, waits):
    assert steps([7, 7, 7, 7], waits, launches) == [(7, 0)] * 4
    check_launches(launches, gpus)


def test_ignored_rows_are_left_out_from_the_second_step_on(launches, gpus, waits):
    """A step waits for the indices of rows if the step before it left enough rows out."""
    found = steps([3, 3, 2, 7, 7, 3, 3], waits, launches)
    assert found == [(7, 0), (3, 1), (2, 1), (7, 1), (7, 0), (7, 0), (3, 1)]
    check_launches(launches, gpus)


def test_an_earlier_step_does_not_decide_how_deterministic_algorithms_round(launches, gpus, waits):
    torch.use_deterministic_algorithms(True)
    assert steps([3, 3], waits, launches) == [(7, 0)] * 2


def test_a_batch_without_counted_rows_launches_nothing(launches, gpus, waits):
    """The first step, of all rows, has loaded what a CUDA graph launches that is captured next.
    Whatever the rows hold, the results are zeros."""
    assert steps([1], waits, launches) == [(7, 0)]
    launched = len(launches)
    steps([0], waits, launches)
    assert len(launches) == launched
    assert steps([1], waits, launches) == [(1, 1)]
    check_launches(launches, gpus)


def test_the_implementation_is_that_of_the_device(gpus):
    """An old GPU beside a new one: each does what it can."""
    gpus.have(V100, T4)

    def of(device: torch.device) -> plan.Plan:
        return plan.plan_head(N, D, V, BF16, device, LOSS, False, True)

    assert of(FIRST).implementation == "aten"
    assert of(SECOND).implementation == "triton"
    assert "Tesla V100 is older than sm_75" in of(FIRST).reason


# ---------------------------------------------------------------- another default device


@pytest.fixture
def default_of_meta():
    """Whatever a factory call makes without naming a device has no data."""
    yield lambda: torch.set_default_device("meta")
    torch.set_default_device(None)


READ = ("pick", Moment(0, 1, 1))


@pytest.mark.parametrize("transform", ["z", "3*tanh(z/3)"])
@pytest.mark.parametrize("read", [{"outputs": READ}, {"outputs": (), "total": READ}], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32, torch.float16], ids=str)
def test_the_engine_ignores_the_default_device(dtype, read, transform, default_of_meta):
    call = case(dtype=dtype, transform=transform, bias=dtype, **read)
    leaves = [t.requires_grad_() for t in call.all]
    results = []
    for change in (lambda: None, default_of_meta):
        change()
        found = call.fused(*leaves)
        gradients = torch.autograd.grad(found.sum(), leaves, allow_unused=True)
        results.append([found, *(g for g in gradients if g is not None)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def capped(x, weight, labels):
    logits = 30 * torch.tanh(F.linear(x, weight) / 30)
    return F.cross_entropy(logits, labels, label_smoothing=0.1), logits


def softplus(x, weight, labels):
    logits = F.softplus(F.linear(x, weight)).clamp(0.1, 2)
    return F.cross_entropy(logits, labels, reduction="none").sum(), logits


def shifted(x, weight, labels):
    logits = F.linear(x, weight).float()
    return F.cross_entropy(logits[:-1], labels[1:], ignore_index=3), logits


@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
@pytest.mark.parametrize("program", [capped, softplus, shifted])
def test_a_compiled_program_ignores_the_default_device(program, strategy, default_of_meta):
    """Deferred logits too: whole, rows, casts, gradients, and after an optimizer's step."""
    options = {"fusedce.inner": "eager", "fusedce.strategy": strategy}
    compiled = torch.compile(program, backend="fusedce", options=options)
    x, weight = torch.randn(N, D), torch.randn(V, D)
    labels = torch.randint(V, (N,))
    results = []
    for run, change in ((program, lambda: None), (compiled, default_of_meta)):
        change()
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        loss, logits = run(*leaves, labels)
        loss.backward()
        some, row = logits.double()[:, 2:5].detach(), logits[2].clone().detach()
        torch.optim.SGD(leaves[1:], lr=0.1).step()
        rows = logits[1:].double().sum(-1).detach()
        results.append([loss.detach(), *(t.grad for t in leaves), some * 1, row, rows])
    torch.set_default_device(None)
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
