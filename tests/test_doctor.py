from __future__ import annotations

import dataclasses

import pytest

from fxpass import doctor
from fxpass.doctor import GIB
from fxpass.doctor_probe import Cpu, Device, Lowering, Machine, Setting, Tools, probe_tools

TOOLS = Tools(cxx="g++", cc="gcc", python_header="/usr/include/Python.h", triton="3.7.1")
MACHINE = Machine(
    versions={"python": "3.12.1", "torch": "2.13.0+cu126", "triton": "", "fxpass": "0.1.0"},
    cpu=Cpu("a processor", "AVX2", bf16="", fp16=""),
    tools=TOOLS,
)
SMALL = Device("cuda", 0, "GTX 1650", 4 * GIB, (7, 5), processors=14)
LARGE = Device("cuda", 1, "RTX 3090", 24 * GIB, (8, 6), processors=82)


def at(device: Device, index: int) -> Device:
    return dataclasses.replace(device, index=index)


@pytest.mark.parametrize(
    ("device", "bf16", "fp16"),
    [
        (Device("cuda", 0, "", capability=(5, 2)), "emulated", "emulated"),
        (Device("cuda", 0, "", capability=(5, 3)), "emulated", "native"),
        (Device("cuda", 0, "", capability=(6, 0)), "emulated", "native"),
        (Device("cuda", 0, "", capability=(6, 1)), "emulated", "native but slow"),
        (Device("cuda", 0, "", capability=(7, 0)), "emulated", "tensor cores"),
        (Device("cuda", 0, "", capability=(7, 5)), "emulated", "tensor cores"),
        (Device("cuda", 0, "", capability=(8, 0)), "tensor cores", "tensor cores"),
        (Device("cuda", 0, "", capability=(12, 0)), "tensor cores", "tensor cores"),
        (Device("hip", 0, "", arch="gfx90a"), "matrix units", "matrix units"),
        (Device("hip", 0, "", arch="gfx942"), "matrix units", "matrix units"),
        (Device("hip", 0, "", arch="gfx950"), "matrix units", "matrix units"),
        (Device("hip", 0, "", arch="gfx1030"), "emulated", "emulated"),
        (Device("xpu", 0, ""), "unknown", "unknown"),
    ],
)
def test_native_matrix_dtypes(device: Device, bf16: str, fp16: str) -> None:
    assert doctor.native(device) == (bf16, fp16)


def test_a_weaker_default_is_a_warning_that_says_what_to_do() -> None:
    (finding,) = doctor.device_findings([SMALL, LARGE], 0, {})
    assert finding.level == "warning"
    assert finding.text == (
        "cuda:0 (GTX 1650) is the default, but cuda:1 (RTX 3090) is stronger: set "
        "CUDA_VISIBLE_DEVICES=1 before Python starts, or call torch.cuda.set_device(1) first; "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID makes the numbers those of nvidia-smi"
    )


def test_the_strongest_of_several_is_advised() -> None:
    middle = Device("cuda", 1, "RTX 3060", 12 * GIB, (8, 6), processors=28)
    (finding,) = doctor.device_findings([SMALL, middle, at(LARGE, 2)], 0, {})
    assert "cuda:2 (RTX 3090) is stronger" in finding.text


def test_an_older_but_larger_card_can_be_the_stronger_one() -> None:
    t4 = Device("cuda", 0, "T4", 16 * GIB, (7, 5), processors=40)
    v100 = Device("cuda", 1, "V100", 32 * GIB, (7, 0), processors=80)
    (finding,) = doctor.device_findings([t4, v100], 0, {})
    assert "cuda:1 (V100) is stronger" in finding.text


def test_advice_respects_a_selection_that_is_in_force() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "3,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    (finding,) = doctor.device_findings([SMALL, LARGE], 0, environ)
    assert "set CUDA_VISIBLE_DEVICES=2 before" in finding.text
    assert "torch.cuda.set_device(1)" in finding.text
    assert "nvidia-smi" not in finding.text


def test_advice_for_hip() -> None:
    mi210 = Device("hip", 0, "MI210", 64 * GIB, arch="gfx90a", processors=104)
    mi300 = Device("hip", 1, "MI300X", 192 * GIB, arch="gfx942", processors=304)
    (finding,) = doctor.device_findings([mi210, mi300], 0, {})
    assert "HIP_VISIBLE_DEVICES=1" in finding.text
    assert "CUDA_DEVICE_ORDER" not in finding.text


@pytest.mark.parametrize(
    ("devices", "default"),
    [
        ([], 0),
        ([SMALL], 0),
        ([SMALL, LARGE], 1),  # the stronger one is the default already
        ([at(LARGE, 0), at(SMALL, 1)], 0),
        # one of two cards of a kind has less memory left
        ([dataclasses.replace(LARGE, index=0, memory_bytes=23 * GIB), LARGE], 0),
        # each is better in something
        (
            [
                Device("cuda", 0, "P40", 24 * GIB, (6, 1), processors=30),
                Device("cuda", 1, "A2", 16 * GIB, (8, 6), processors=10),
            ],
            0,
        ),
    ],
)
def test_no_warning(devices: list[Device], default: int) -> None:
    assert doctor.device_findings(devices, default, {}) == []


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("2.10.1", False),
        ("2.11.0", True),
        ("2.15.1+cu130", True),
        ("2.16.0a0+git1234", False),
        ("3.11.0", False),
        ("nonsense", False),
    ],
)
def test_supported_torch(version: str, supported: bool) -> None:
    machine = dataclasses.replace(MACHINE, versions={"torch": version})
    problems = [f for f in doctor.findings(machine) if f.level == "problem"]
    assert (problems == []) == supported


@pytest.mark.parametrize(
    ("missing", "device_type", "words"),
    [
        ("cxx", "cpu", "Install g++"),
        ("cc", "cuda", "Install gcc"),
        ("triton", "cuda", "pip install triton"),
        ("python_header", "cpu", "Python.h"),
        ("python_header", "cuda", "Python.h"),
    ],
)
def test_what_inductor_lacks(missing: str, device_type: str, words: str) -> None:
    assert doctor.inductor_problem(TOOLS, device_type) == ""
    tools = dataclasses.replace(TOOLS, **{missing: ""})
    assert words in doctor.inductor_problem(tools, device_type)


def test_a_missing_compiler_is_a_warning_because_aot_eager_remains() -> None:
    machine = dataclasses.replace(MACHINE, tools=dataclasses.replace(TOOLS, cxx=""))
    (finding,) = doctor.findings(machine)
    assert finding.level == "warning"
    assert "FUSEDCE_INNER=aot_eager" in finding.text


def test_the_compiler_is_the_one_that_inductor_would_use() -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("fxpass-no-such-compiler",)}):
        assert probe_tools().cxx == ""


def test_text_of_two_unlike_devices() -> None:
    machine = dataclasses.replace(
        MACHINE,
        devices=(SMALL, LARGE),
        settings=(Setting("FUSEDCE_STRATEGY", "chunked", True, "how"),),
        lowerings=(
            Lowering("cuda:0", "float32", "triton", "kernels"),
            Lowering("cuda:0", "bfloat16", "triton", "kernels"),
            Lowering("cuda:0", "float64", "aten", "too wide"),
        ),
    )
    lines = [" ".join(line.split()) for line in doctor.text(machine).splitlines()]
    assert "cuda:0 GTX 1650 sm_75 bf16 emulated fp16 tensor cores 4.0 GiB default" in lines
    assert "cuda:1 RTX 3090 sm_86 bf16 tensor cores fp16 tensor cores 24.0 GiB" in lines
    assert "torch 2.13.0+cu126 fxpass supports 2.11 to 2.15" in lines
    assert "triton not installed" in lines
    assert "FUSEDCE_STRATEGY chunked environment how" in lines
    assert "cuda:0 triton float32, bfloat16 kernels" in lines
    assert "cuda:0 aten float64 too wide" in lines
    assert lines[-1].startswith("warning: cuda:0")


def test_doctor_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run() == 0
    output = capsys.readouterr().out
    for word in ("python", "torch", "FUSEDCE_MIXED_DTYPES", "cpu", "bf16"):
        assert word in output
    assert "problem:" not in output


def test_a_bad_setting_is_a_problem_and_not_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSEDCE_LOGITS", "nonsense")
    assert doctor.run() == 1
    assert "problem: FUSEDCE_LOGITS='nonsense' is not allowed" in capsys.readouterr().out
