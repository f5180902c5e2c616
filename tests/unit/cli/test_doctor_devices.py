"""What doctor reads: from this machine, and from a torch and an nvidia-smi that are given."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxpass.cli import doctor_devices
from fxpass.cli.doctor_devices import VARIABLES, Accelerators, Device, read_accelerators, read_cpu

GIB = 2**30
UUID_T4 = "11111111-2222-3333-4444-555555555555"
UUID_A100 = "66666666-7777-8888-9999-000000000000"
T4 = SimpleNamespace(
    name="Tesla T4",
    major=7,
    minor=5,
    total_memory=15 * GIB,
    multi_processor_count=40,
    uuid=UUID_T4,
    gcnArchName="Tesla T4",
)
A100 = SimpleNamespace(
    name="NVIDIA A100-SXM4-40GB",
    major=8,
    minor=0,
    total_memory=40 * GIB,
    multi_processor_count=108,
    uuid=UUID_A100,
    gcnArchName="NVIDIA A100-SXM4-40GB",
)
SMI = f"""\
0, GPU-{UUID_T4}, 7.5, 15360, 15104, Tesla T4
1, GPU-{UUID_A100}, 8.0, 40960, [N/A], NVIDIA A100-SXM4-40GB
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def give_smi(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Puts a program of the name nvidia-smi on PATH, and nothing else."""
    path = folder / "nvidia-smi"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def table(text: str) -> str:
    return "".join(f"echo '{line}'\n" for line in text.splitlines())


def give_torch(
    monkeypatch: pytest.MonkeyPatch, kind: str, *properties: Any, build: str = "", current: int = 0
) -> None:
    """Torch says that it has these devices."""
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, "1.0" if name == build else None, raising=False)
    accelerator = torch.accelerator
    device = torch.device(kind)
    monkeypatch.setattr(accelerator, "current_accelerator", lambda check_available: device)
    monkeypatch.setattr(accelerator, "device_count", lambda: len(properties))
    monkeypatch.setattr(accelerator, "current_device_index", lambda: current)
    module = torch.get_device_module(kind)
    monkeypatch.setattr(module, "get_device_properties", properties.__getitem__, raising=False)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])


# ---------------------------------------------------------------- this machine


def test_this_machine_is_what_torch_says() -> None:
    read = read_accelerators()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert read.error == ""
    assert len(read.devices) == (torch.accelerator.device_count() if accelerator else 0)
    for index, device in enumerate(read.devices):
        assert device.index == index
        assert torch.device(device.label).type == accelerator.type
        assert device.name
        assert device.memory_bytes > 0
    if accelerator is not None and accelerator.type == "cuda":
        names = [torch.cuda.get_device_name(index) for index in range(len(read.devices))]
        assert [device.name for device in read.devices] == names
        used = torch.cuda.current_device()
        assert read.used == read.devices[used]


def test_this_machines_cpu_is_what_torch_says() -> None:
    cpu = read_cpu()
    assert cpu.name
    assert cpu.vectors == torch.backends.cpu.get_cpu_capability()
    assert ("AVX-512" in cpu.bf16) == torch.cpu._is_avx512_bf16_supported()
    assert ("AMX" in cpu.fp16) == torch.cpu._is_amx_fp16_supported()
    assert ("bf16" in cpu.onednn) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert ("fp16" in cpu.onednn) == torch.ops.mkldnn._is_mkldnn_fp16_supported()


def test_flags_of_another_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"cpu_name": "a Xeon", "amx_bf16": True, "avx512_bf16": True, "avx512_fp16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    cpu = read_cpu()
    assert (cpu.name, cpu.bf16, cpu.fp16, cpu.onednn) == ("a Xeon", "AMX, AVX-512", "", ())


# ---------------------------------------------------------------- devices from torch


def test_two_cuda_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    give_torch(monkeypatch, "cuda", A100, T4, build="cuda", current=1)
    give_smi(monkeypatch, tmp_path, table(SMI))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    read = read_accelerators()
    a100 = Device(
        "cuda", 0, A100.name, 40 * GIB, None, (8, 0), processors=108, uuid=f"GPU-{UUID_A100}"
    )
    t4 = Device(
        "cuda", 1, T4.name, 15 * GIB, 15104 * 2**20, (7, 5), processors=40, uuid=f"GPU-{UUID_T4}"
    )
    assert read.devices == (a100, t4)
    assert read.build == "cuda"
    assert read.arch_list == ("sm_75", "sm_80")
    assert read.default_index == 1
    assert read.used == t4
    assert read.environ == {"CUDA_VISIBLE_DEVICES": ""}
    assert [read.card(device).index for device in read.devices] == [1, 0]
    assert read.cards[0] == Device(
        "cuda", 0, T4.name, 15 * GIB, 15104 * 2**20, (7, 5), uuid=f"GPU-{UUID_T4}"
    )


def test_a_hip_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    properties = SimpleNamespace(
        name="AMD Instinct MI300X",
        total_memory=192 * GIB,
        multi_processor_count=304,
        gcnArchName="gfx942:sramecc+:xnack-",
    )
    give_torch(monkeypatch, "cuda", properties, build="hip")
    monkeypatch.setenv("PATH", str(tmp_path))
    read = read_accelerators()
    assert read.devices == (
        Device("hip", 0, properties.name, 192 * GIB, arch="gfx942", processors=304),
    )
    assert read.devices[0].label == "cuda:0"
    assert read.cards_error == "not found"


def test_an_xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="Arc A770", total_memory=16 * GIB, has_fp16=True)
    give_torch(monkeypatch, "xpu", properties, build="xpu")
    read = read_accelerators()
    assert read.devices == (Device("xpu", 0, "Arc A770", 16 * GIB, features=("has_fp16",)),)


def test_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    give_torch(monkeypatch, "mps", None)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * GIB)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M2")
    assert read_accelerators().devices == (Device("mps", 0, "Apple M2", 12 * GIB),)


def test_a_broken_driver_is_a_fact_and_not_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(check_available: bool) -> None:
        raise RuntimeError("CUDA unknown error\n  much more of it")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", broken)
    read = read_accelerators()
    assert read.error == "RuntimeError: CUDA unknown error"
    assert read.devices == ()


def test_torchs_warnings_are_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(check_available: bool) -> None:
        warnings.warn("The NVIDIA driver on your system is too old", stacklevel=1)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", old)
    assert read_accelerators().said == ("The NVIDIA driver on your system is too old",)


# ---------------------------------------------------------------- nvidia-smi


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo Failed to initialize NVML; exit 9", "Failed to initialize NVML"),
        ("echo 'No devices were found'", "No devices were found"),
        ("echo 'a, b, c, d, e, f'", "a, b, c, d, e, f"),
        ("exit 3", "exit status 3"),
    ],
)
def test_nvidia_smi_that_fails(
    script: str, error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    give_smi(monkeypatch, tmp_path, script)
    assert doctor_devices.read_cards() == ((), error)


def test_nvidia_smi_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    give_smi(monkeypatch, tmp_path, "while :; do :; done")
    monkeypatch.setattr(doctor_devices, "_SMI_SECONDS", 0.1)
    cards, error = doctor_devices.read_cards()
    assert cards == ()
    assert "timed out" in error


def test_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor_devices.read_cards() == ((), "not found")


def test_nvidia_smi_is_asked_for_what_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    give_smi(monkeypatch, tmp_path, f'echo "$@" > "{tmp_path}/asked"\n' + table(SMI))
    cards, error = doctor_devices.read_cards()
    assert error == ""
    assert [(c.index, c.name, c.capability) for c in cards] == [
        (0, T4.name, (7, 5)),
        (1, A100.name, (8, 0)),
    ]
    assert (tmp_path / "asked").read_text() == (
        "--query-gpu=index,uuid,compute_cap,memory.total,memory.free,name "
        "--format=csv,noheader,nounits\n"
    )


# ---------------------------------------------------------------- which one is used

TWO = (Device("cuda", 0, "one"), Device("cuda", 1, "other"))


@pytest.mark.parametrize(
    ("environ", "default", "used"),
    [
        ({}, 0, 0),
        ({}, 1, 1),
        ({"LOCAL_RANK": "1"}, 0, 1),
        ({"LOCAL_RANK": "2"}, 0, 0),  # there is none; rank_without_device warns
        ({"LOCAL_RANK": ""}, 1, 1),
        ({"LOCAL_RANK": "-1"}, 1, 1),  # old launchers' word for none
    ],
)
def test_used(environ: dict[str, str], default: int, used: int) -> None:
    read = Accelerators(devices=TWO, default_index=default, environ=environ)
    assert read.used == TWO[used]


def test_without_devices_the_cpu_is_used() -> None:
    assert Accelerators(environ={"LOCAL_RANK": "0"}).used is None


@pytest.mark.parametrize(
    ("build", "environ", "selection"),
    [
        ("cuda", {}, ("CUDA_VISIBLE_DEVICES", None)),
        ("cuda", {"CUDA_VISIBLE_DEVICES": ""}, ("CUDA_VISIBLE_DEVICES", "")),
        ("cuda", {"HIP_VISIBLE_DEVICES": "1"}, ("CUDA_VISIBLE_DEVICES", None)),
        ("hip", {}, ("HIP_VISIBLE_DEVICES", None)),
        ("hip", {"CUDA_VISIBLE_DEVICES": "1"}, ("CUDA_VISIBLE_DEVICES", "1")),
        (
            "hip",
            {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"},
            ("HIP_VISIBLE_DEVICES", "0"),
        ),
        ("xpu", {"ZE_AFFINITY_MASK": "0"}, ("ZE_AFFINITY_MASK", "0")),
    ],
)
def test_selection(build: str, environ: dict[str, str], selection: tuple[str, str | None]) -> None:
    assert Accelerators(build=build, environ=environ).selection == selection


def test_the_variables_are_read_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    for number, variable in enumerate(VARIABLES):
        monkeypatch.setenv(variable, str(number))
    assert list(read_accelerators().environ.items()) == [
        ("CUDA_VISIBLE_DEVICES", "0"),
        ("HIP_VISIBLE_DEVICES", "1"),
        ("ROCR_VISIBLE_DEVICES", "2"),
        ("ZE_AFFINITY_MASK", "3"),
        ("CUDA_DEVICE_ORDER", "4"),
        ("LOCAL_RANK", "5"),
    ]
