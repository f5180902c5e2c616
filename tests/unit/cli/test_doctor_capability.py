"""The tables of what is native, and the order that is made of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fxpass.cli.doctor_capability import RANKS, compared, has_code, native, native_cpu, stronger
from fxpass.cli.doctor_devices import Cpu, Device

GIB = 2**30


def cuda(major: int, minor: int, name: str = "") -> Device:
    return Device("cuda", 0, name, capability=(major, minor))


def hip(arch: str) -> Device:
    return Device("hip", 0, "", arch=arch)


@pytest.mark.parametrize(
    ("device", "bf16", "fp16"),
    [
        (cuda(3, 7), "emulated", "emulated"),
        (cuda(5, 2), "emulated", "emulated"),
        (cuda(5, 3), "emulated", "native"),
        (cuda(6, 0), "emulated", "native"),
        (cuda(6, 1), "emulated", "native but slow"),
        (cuda(6, 2), "emulated", "native"),
        (cuda(7, 0), "emulated", "tensor cores"),
        (cuda(7, 2), "emulated", "tensor cores"),
        (cuda(7, 5, "Tesla T4"), "emulated", "tensor cores"),
        (cuda(7, 5, "NVIDIA GeForce RTX 2060"), "emulated", "tensor cores"),
        (cuda(7, 5, "Quadro RTX 4000"), "emulated", "tensor cores"),
        (cuda(7, 5, "NVIDIA GeForce GTX 1650"), "emulated", "native"),
        (cuda(7, 5, "GeForce GTX 1660 Ti"), "emulated", "native"),
        (cuda(7, 5, "NVIDIA T1000 8GB"), "emulated", "native"),
        (cuda(7, 5, "NVIDIA GeForce MX450"), "emulated", "native"),
        (cuda(8, 0), "tensor cores", "tensor cores"),
        (cuda(8, 6, "NVIDIA GeForce MX570"), "tensor cores", "tensor cores"),
        (cuda(12, 1), "tensor cores", "tensor cores"),
        (hip("gfx906"), "emulated", "native"),
        (hip("gfx908"), "matrix units at half rate", "matrix units"),
        (hip("gfx90a"), "matrix units", "matrix units"),
        (hip("gfx942"), "matrix units", "matrix units"),
        (hip("gfx950"), "matrix units", "matrix units"),
        (hip("gfx1030"), "emulated", "native"),
        (hip("gfx1100"), "matrix units", "matrix units"),
        (hip("gfx1201"), "matrix units", "matrix units"),
        (hip("gfx803"), "emulated", "emulated"),
        (Device("xpu", 0, ""), "emulated", "emulated"),
        (Device("xpu", 0, "", features=("has_fp16",)), "emulated", "native"),
        (
            Device("xpu", 0, "", features=("has_subgroup_matrix_multiply_accumulate",)),
            "matrix units",
            "matrix units",
        ),
        (Device("mps", 0, ""), "unknown", "native"),
        (Device("npu", 0, ""), "unknown", "unknown"),
    ],
)
def test_native(device: Device, bf16: str, fp16: str) -> None:
    assert native(device) == (bf16, fp16)
    assert {bf16, fp16} <= set(RANKS)


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (12, 0)])
def test_bf16_of_cuda_is_what_torch_says(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    supported = torch.cuda.is_bf16_supported(including_emulation=False)
    assert (native(cuda(*capability))[0] != "emulated") == supported


@pytest.mark.parametrize(
    ("bf16", "fp16", "onednn", "words"),
    [
        ("", "", (), ("emulated", "emulated")),
        # without instructions oneDNN takes bf16 all the same, and converts
        ("", "", ("bf16",), ("emulated", "emulated")),
        ("AMX, AVX-512", "", ("bf16",), ("native (AMX, AVX-512)", "emulated")),
        ("AVX-512", "AVX-512", ("bf16", "fp16"), ("native (AVX-512)", "native (AVX-512)")),
        (
            "AVX-512",
            "AVX-512",
            (),
            (
                "emulated (AVX-512 is not used by this torch)",
                "emulated (AVX-512 is not used by this torch)",
            ),
        ),
        # torch's own kernels use what ARM has for fp16
        ("NEON", "NEON", (), ("emulated (NEON is not used by this torch)", "native (NEON)")),
    ],
)
def test_native_cpu(bf16: str, fp16: str, onednn: tuple[str, ...], words: tuple[str, str]) -> None:
    assert native_cpu(Cpu("", "", bf16, fp16, onednn)) == words


def card(name: str, capability: tuple[int, int], gib: int, processors: int) -> Device:
    return Device("cuda", 0, name, gib * GIB, capability=capability, processors=processors)


GTX_1650 = card("GTX 1650", (7, 5), 4, 14)
T4 = card("T4", (7, 5), 16, 40)
V100 = card("V100", (7, 0), 32, 80)
P40 = card("P40", (6, 1), 24, 30)
A2 = card("A2", (8, 6), 16, 10)
RTX_3060 = card("RTX 3060", (8, 6), 12, 28)
RTX_3090 = card("RTX 3090", (8, 6), 24, 82)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (T4, GTX_1650),
        (V100, T4),  # the older one
        (A2, P40),  # it has less memory, and what mixed precision needs
        (A2, V100),
        (RTX_3090, RTX_3060),
        (
            Device("hip", 1, "MI300X", 192 * GIB, arch="gfx942", processors=304),
            Device("hip", 0, "MI100", 32 * GIB, arch="gfx908", processors=120),
        ),
        # with nvidia-smi alone, the processors are not known
        (card("RTX 3090", (8, 6), 24, 0), RTX_3060),
    ],
)
def test_stronger(left: Device, right: Device) -> None:
    assert stronger(left, right)
    assert not stronger(right, left)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (T4, T4),
        (T4, card("T4", (7, 5), 15, 40)),  # of the same name, with less memory left
        (A2, RTX_3060),  # more memory, fewer processors
        (T4, Device("xpu", 0, "Arc")),
        (Device("npu", 0, "one"), Device("npu", 0, "other")),  # nothing is known
    ],
)
def test_neither_is_stronger(left: Device, right: Device) -> None:
    assert not stronger(left, right)
    assert not stronger(right, left)


def test_compared() -> None:
    assert compared(A2, P40) == (
        ["bf16 tensor cores against emulated", "fp16 tensor cores against native but slow"],
        ["10 processors against 30 processors", "16.0 GiB against 24.0 GiB"],
    )
    assert compared(T4, T4) == ([], [])
    assert compared(card("RTX 3090", (8, 6), 0, 82), RTX_3060) == (
        ["82 processors against 28 processors"],
        [],
    )


@pytest.mark.parametrize(
    ("capability", "arch_list", "runs"),
    [
        ((7, 5), "sm_75 sm_80 sm_90", True),
        ((8, 6), "sm_75 sm_80 sm_90", True),
        ((8, 9), "sm_75 sm_80", True),
        ((7, 0), "sm_75 sm_80", False),
        ((12, 0), "sm_75 sm_80 sm_90", False),
        ((12, 0), "sm_75 sm_90 compute_90", True),
        ((9, 0), "sm_90a", True),
        ((9, 1), "sm_90a", False),
        ((10, 3), "sm_100", True),
        ((10, 3), "sm_100a", False),
        ((10, 3), "sm_100f", True),
        ((12, 0), "compute_100f", False),
        ((8, 7), "sm_80 sm_86", False),  # a Jetson
        ((8, 7), "sm_80 compute_80", True),
        ((8, 7), "sm_87", True),
        ((7, 5), "", True),  # torch does not say
        ((7, 5), "sm_nonsense", True),
    ],
)
def test_code_for_cuda(capability: tuple[int, int], arch_list: str, runs: bool) -> None:
    device = Device("cuda", 0, "", capability=capability)
    assert has_code(device, arch_list.split()) == runs


@pytest.mark.parametrize(
    ("arch", "arch_list", "runs"),
    [
        ("gfx942", "gfx90a gfx942", True),
        ("gfx1030", "gfx90a gfx942", False),
        ("gfx1031", "gfx10-3-generic", True),
        ("gfx1030", "", True),
    ],
)
def test_code_for_hip(arch: str, arch_list: str, runs: bool) -> None:
    assert has_code(Device("hip", 0, "", arch=arch), arch_list.split()) == runs


def test_of_other_accelerators_nothing_is_known_about_code() -> None:
    assert has_code(Device("xpu", 0, ""), ["sm_80"])
