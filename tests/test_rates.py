"""How fast devices are: the table, what is made of an unknown GPU, and the CPU's file."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fxpass import rates
from fxpass.rates import NOMINAL, device_rates, rates_file, rounded

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CACHED = rates._kept, rates._gpu, rates.properties_of
MEASURED = {"float32": 2.0**37, "float64": 2.0**36, "bandwidth": 2.0**33, "elements": 2.0**28}


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    forget()
    yield
    forget()


def forget() -> None:
    """As a new process."""
    for function in CACHED:
        function.cache_clear()


def has_gpu(monkeypatch, name: str, **properties) -> None:
    monkeypatch.setattr(rates, "properties_of", lambda _: SimpleNamespace(name=name, **properties))
    rates._gpu.cache_clear()


# ---------------------------------------------------------------- GPUs


@pytest.mark.parametrize(
    ("name", "half", "memory"),
    [
        ("NVIDIA H200", 989.4, 4.8),
        ("NVIDIA GH200 480GB", 989.4, 4.8),
        ("NVIDIA H100 80GB HBM3", 989.4, 3.35),
        ("NVIDIA H100 PCIe", 756, 2.0),
        ("NVIDIA H100 NVL", 835, 3.9),
        ("NVIDIA A100-SXM4-40GB", 312, 1.555),
        ("NVIDIA A100-SXM4-80GB", 312, 1.935),
        ("NVIDIA A100 80GB PCIe", 312, 1.935),
        ("NVIDIA B200", 2250, 7.7),
        ("NVIDIA L4", 121, 0.3),
        ("NVIDIA L40S", 362, 0.864),
        ("NVIDIA A10", 125, 0.6),
        ("Tesla T4", 65, 0.32),
        ("NVIDIA GeForce RTX 4090", 165.2, 1.008),
        ("AMD Instinct MI300X", 1307.4, 5.3),
    ],
)
def test_a_gpu_of_the_table(name, half, memory, monkeypatch):
    has_gpu(monkeypatch, name)
    for dtype in (BF16, F16):
        found = device_rates(CUDA, dtype)
        assert found.flops == pytest.approx(half * 1e12 * rates.ATTAINABLE)
        assert found.bandwidth == pytest.approx(memory * 1e12 * rates.ATTAINABLE_MEMORY)
    assert device_rates(CUDA, F64).flops < device_rates(CUDA, F32).flops < found.flops


def test_a_generated_product_on_turing_has_no_tensor_cores(monkeypatch):
    has_gpu(monkeypatch, "Tesla T4")
    assert device_rates(CUDA, F16).share == pytest.approx(8.1 / 65)
    has_gpu(monkeypatch, "NVIDIA L4")
    assert device_rates(CUDA, F16).share == rates.nominal("cuda").share


def test_every_row_of_the_table_is_plausible():
    for gpu in rates.GPUS:
        assert gpu.half >= gpu.tf32 >= gpu.f32 > gpu.memory > 0.2
        assert gpu.half / gpu.memory < 700  # operations per byte: above that, a typing error


def test_tf32_counts_where_it_is_on(monkeypatch):
    has_gpu(monkeypatch, "NVIDIA H200")
    plain = device_rates(CUDA, F32)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        fast, low = device_rates(CUDA, F32), device_rates(CUDA, BF16)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert fast.flops == pytest.approx(plain.flops * 494.7 / 66.9)
    assert low.flops == pytest.approx(plain.flops * 989.4 / 66.9)


@pytest.mark.parametrize(
    ("capability", "half", "f32"),
    [((8, 6), 512, 256), ((9, 0), 4096, 256), ((7, 0), 1024, 128), ((12, 1), 1024, 256)],
)
def test_an_unknown_gpu_from_its_clocks(capability, half, f32, monkeypatch):
    major, minor = capability
    has_gpu(
        monkeypatch,
        "NVIDIA A10G",  # not an A10
        major=major,
        minor=minor,
        multi_processor_count=80,
        clock_rate=1_700_000,
        memory_clock_rate=6_000_000,
        memory_bus_width=384,
    )
    found = device_rates(CUDA, BF16)
    assert found.flops == pytest.approx(80 * 1.7e9 * half * rates.ATTAINABLE)
    assert device_rates(CUDA, F32).flops == pytest.approx(80 * 1.7e9 * f32 * rates.ATTAINABLE)
    assert found.bandwidth == pytest.approx(2 * 6e9 * 48 * rates.ATTAINABLE_MEMORY)


def test_an_unknown_gpu_whose_driver_tells_little(monkeypatch):
    has_gpu(monkeypatch, "X", major=9, minor=0, multi_processor_count=100)
    assert all(0 < rate < math.inf for rate in device_rates(CUDA, BF16))


def test_no_gpu_and_other_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_rates(CUDA, BF16) == NOMINAL["cuda"]
    assert device_rates(torch.device("meta"), BF16) == NOMINAL["cpu"]


# ---------------------------------------------------------------- the CPU


def test_it_is_measured_once_and_kept(monkeypatch):
    found = device_rates(CPU, F32)
    assert json.loads(rates_file().read_text())["float32"] == found.flops
    assert [*rates_file().parent.iterdir()] == [rates_file()]
    forget()
    monkeypatch.setattr(rates, "_measure", lambda: pytest.fail("measured again"))
    assert device_rates(CPU, F32) == found


def test_what_is_measured_is_plausible():
    found = rates._measure()
    assert found.keys() == MEASURED.keys()
    assert all(rate == rounded(rate) for rate in found.values())
    assert 1e8 < found["float32"] < 1e15
    usual = NOMINAL["cpu"]
    for name in ("bandwidth", "elements"):
        off = found[name] / found["float32"] / (getattr(usual, name) / usual.flops)
        assert 1 / rates.UNLIKELY / 1.2 < off < rates.UNLIKELY * 1.2


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "{}", json.dumps({**MEASURED, "float32": 0}), '{"float32": "fast"}']
    + [json.dumps({**MEASURED, name: value}) for name, value in (("elements", "x"), ("a", 1.0))]
    + [json.dumps({**MEASURED, "bandwidth": math.inf}), json.dumps({**MEASURED, "float64": -1.0})],
)
def test_a_damaged_file_is_measured_again(content, monkeypatch):
    rates_file().parent.mkdir(parents=True)
    rates_file().write_text(content)
    monkeypatch.setattr(rates, "_measure", lambda: MEASURED)
    assert device_rates(CPU, F32).flops == MEASURED["float32"]
    assert json.loads(rates_file().read_text()) == MEASURED


@pytest.mark.parametrize("links", [True, False])
def test_of_two_that_measure_at_once_the_first_decides(links, monkeypatch):
    def slowly():
        rates_file().write_text(json.dumps(MEASURED))  # the other process
        return {name: 2 * rate for name, rate in MEASURED.items()}

    def link(*_):
        raise OSError("no links here")

    monkeypatch.setattr(rates, "_measure", slowly)
    if not links:
        monkeypatch.setattr("os.link", link)
    assert device_rates(CPU, F32).flops == MEASURED["float32"] * (1 if links else 2)
    assert [*rates_file().parent.iterdir()] == [rates_file()]


def test_where_nothing_can_be_kept_nothing_is_measured(monkeypatch, tmp_path):
    """Another process would measure something else and might choose another strategy."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "inductor"))
    monkeypatch.setattr(rates, "_measure", lambda: pytest.fail("measured"))
    monkeypatch.setattr(rates, "rates_file", lambda: tmp_path / "file" / "fxpass" / "rates.json")
    assert device_rates(CPU, BF16) == NOMINAL["cpu"]


def test_where_nothing_can_be_measured(monkeypatch):
    def fails():
        raise RuntimeError("no")

    monkeypatch.setattr(rates, "_measure", fails)
    assert device_rates(CPU, BF16) == NOMINAL["cpu"]
    assert not [*rates_file().parent.iterdir()]


def test_low_precision_is_multiplied_in_f32(monkeypatch):
    monkeypatch.setattr(rates, "_measure", lambda: MEASURED)
    assert device_rates(CPU, BF16) == device_rates(CPU, F16) == device_rates(CPU, F32)
    assert device_rates(CPU, F64).flops == MEASURED["float64"]
    assert device_rates(CPU, F64).elements == device_rates(CPU, F32).elements / 2


def test_the_file_is_of_this_cpu_this_torch_and_these_threads(monkeypatch):
    names = {rates_file().name}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    names.add(rates_file().name)
    monkeypatch.setattr(torch, "__version__", "9.9")
    names.add(rates_file().name)
    monkeypatch.setattr(rates, "_cpu_model", lambda: "another")
    names.add(rates_file().name)
    assert len(names) == 4


def test_measuring_disturbs_nothing_and_is_disturbed_by_nothing():
    state = torch.get_rng_state()
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    calls = []

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), torch.autocast("cpu", BF16), torch.device("meta"), Counting():
        found = rates._measure()
    assert all(0 < rate < math.inf for rate in found.values())
    assert torch.equal(torch.get_rng_state(), state)
    assert (torch.is_grad_enabled(), torch.get_num_threads()) == (grad, threads)
    assert not calls


@pytest.mark.parametrize("rate", [1.0, 1.1e11, 0.9e11, 3e-7])
def test_noise_is_rounded_away(rate):
    found = rounded(rate)
    assert found == rounded(found)
    assert 2 * math.log2(found) == pytest.approx(round(2 * math.log2(found)))
    assert found / rate * (1 + 1e-12) >= 2**-0.25
    assert found / rate <= 2**0.25 * (1 + 1e-12)
