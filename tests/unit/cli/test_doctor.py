"""``fxpass doctor``: what it says of described machines, of this one, and what it exits with."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import expecttest
import pytest
import torch

from fxpass.cli import doctor
from fxpass.cli.doctor import HIDING, Device, Machine, read_machine
from tests.support import gpus as cards
from tests.support.gpus import Card, Gpus

ROOT = Path(__file__).parents[3]
GIB = 2**30

IMPLEMENTATIONS = (("float32, bfloat16", "triton", "kernels"),)
T4 = Device("cuda:0", "Tesla T4", "sm_75", 40, 15 * GIB, IMPLEMENTATIONS)
A100 = Device("cuda:1", "NVIDIA A100", "sm_80", 108, 40 * GIB, IMPLEMENTATIONS)
P40 = Device("cuda:0", "P40", "sm_61", 30, 24 * GIB)
A2 = Device("cuda:1", "A2", "sm_86", 10, 15 * GIB)
RTX_3060 = Device("cuda:0", "RTX 3060", "sm_86", 28, 12 * GIB)
RTX_3090 = Device("cuda:1", "RTX 3090", "sm_86", 82, 24 * GIB)
MI100 = Device("cuda:0", "MI100", "gfx908", 120, 32 * GIB)
MI300 = Device("cuda:1", "MI300X", "gfx942", 304, 192 * GIB)

# no GPU, though torch is built for CUDA
MACHINE = Machine(
    versions={"python": "3.12.1", "torch": "2.13.0+cu126", "cuda": "12.6", "hip": ""},
    compilers={
        "C++ compiler": "g++",
        "C compiler": "/usr/bin/gcc",
        "Python.h": "/usr/include/Python.h",
        "Triton": "importable",
    },
    cpu=Device("cpu", "a processor", "AVX512", implementations=(("float32", "aten", "its own"),)),
    settings=(("FUSEDCE_STRATEGY", "chunked", "environment", "how"),),
)
TWO = replace(MACHINE, devices=(T4, A100))


def lacking(tool: str, machine: Machine = MACHINE) -> Machine:
    return replace(machine, compilers={**machine.compilers, tool: ""})


class TestReport(expecttest.TestCase):
    maxDiff = None

    def test_two_unlike_gpus(self):
        self.assertExpectedInline(
            doctor.text(TWO),
            """\
versions
  python  3.12.1
  torch   2.13.0+cu126
  cuda    12.6
  hip     -

devices
  cuda:0  Tesla T4     sm_75   bf16 emulated  40 processors   15.0 GiB  used
  cuda:1  NVIDIA A100  sm_80   bf16 native    108 processors  40.0 GiB
  cpu     a processor  AVX512

what Inductor needs
  C++ compiler  g++                    for cpu
  Triton        importable             for cuda
  C compiler    /usr/bin/gcc           for cuda
  Python.h      /usr/include/Python.h  for cpu and cuda

fused loss
  cuda:0  float32, bfloat16  triton  kernels
  cuda:1  float32, bfloat16  triton  kernels
  cpu     float32            aten    its own

settings
  FUSEDCE_STRATEGY  chunked  environment  how

warning: cuda:0 (Tesla T4) is the default, and cuda:1 (NVIDIA A100) is stronger: bf16 native, 108 processors, 40.0 GiB against bf16 emulated, 40 processors, 15.0 GiB
  do: call torch.cuda.set_device(1) first, or let CUDA_VISIBLE_DEVICES name it alone; with CUDA_DEVICE_ORDER=PCI_BUS_ID the numbers there are those of nvidia-smi
warning: bf16 is emulated on cuda:0 (Tesla T4), though torch.cuda.is_bf16_supported() is True
  do: train in float16 there, with torch.amp.GradScaler""",
        )

    def test_no_gpu(self):
        report = doctor.text(replace(MACHINE, hiding={"CUDA_VISIBLE_DEVICES": ""}))
        self.assertExpectedInline(
            report[report.index("devices\n") :],
            """\
devices
  cpu  a processor  AVX512  used

devices hidden by
  CUDA_VISIBLE_DEVICES  (empty)

what Inductor needs
  C++ compiler  g++                    for cpu
  Triton        importable             for cuda
  C compiler    /usr/bin/gcc           for cuda
  Python.h      /usr/include/Python.h  for cpu and cuda

fused loss
  cpu  float32  aten  its own

settings
  FUSEDCE_STRATEGY  chunked  environment  how

warning: torch is built for GPUs and sees none: CUDA_VISIBLE_DEVICES=
  do: unset the variables that hide devices, or install a torch for the driver""",
        )


def test_the_readme_shows_the_report_of_two_unlike_gpus() -> None:
    report = doctor.text(TWO)
    devices = report[report.index("devices\n") : report.index("\n\nwhat Inductor")]
    findings = report[report.rindex("\n\n") + 2 :]
    assert f"```\n{devices}\n\n{findings}\n```\n" in (ROOT / "fxpass/cli/README.md").read_text()


# ---------------------------------------------------------------- described machines

STRONGER = "bf16 native, 108 processors, 40.0 GiB against bf16 emulated, 40 processors, 15.0 GiB"
TOLD = "though torch.cuda.is_bf16_supported() is True"

# (a machine, how bad and what is the first that is wrong with it, what to do begins with)
WRONG: list[tuple[Machine, str, str]] = [
    (
        replace(MACHINE, settings_error="FUSEDCE_LOGITS='x' is not allowed"),
        "problem: FUSEDCE_LOGITS='x' is not allowed",
        "correct or unset the variable",
    ),
    (
        replace(MACHINE, error="RuntimeError: CUDA unknown error"),
        "problem: torch cannot start the accelerator: RuntimeError: CUDA unknown error",
        "repair its driver",
    ),
    (
        replace(MACHINE, hiding={"CUDA_VISIBLE_DEVICES": "7"}),
        "warning: torch is built for GPUs and sees none: CUDA_VISIBLE_DEVICES=7",
        "unset the variables that hide devices",
    ),
    (
        replace(MACHINE, said=("The NVIDIA driver on your system is too old",)),
        "warning: torch is built for GPUs and sees none: The NVIDIA driver on your system is too "
        "old",
        "unset the variables that hide devices, or install a torch for the driver",
    ),
    (  # as torch does of a GPU for which it has no code
        replace(
            MACHINE, devices=(A100,), said=("Found GPU0 P40 which is of cuda capability 6.1.",)
        ),
        "warning: torch warns: Found GPU0 P40 which is of cuda capability 6.1.",
        "install a torch for this machine",
    ),
    (
        lacking("C++ compiler"),
        "warning: Inductor cannot compile for cpu: C++ compiler not found: install g++ or clang, or "
        "name yours in CXX",
        "install what is missing, or set FUSEDCE_INNER=aot_eager",
    ),
    (
        lacking("Triton", replace(MACHINE, devices=(A100,))),
        "warning: Inductor cannot compile for cuda: Triton not found: pip install triton",
        "install what is missing, or set FUSEDCE_INNER=aot_eager",
    ),
    (
        TWO,
        f"warning: cuda:0 (Tesla T4) is the default, and cuda:1 (NVIDIA A100) is stronger: {STRONGER}",
        "call torch.cuda.set_device(1) first",
    ),
    (  # the best of several
        replace(
            MACHINE, devices=(RTX_3060, RTX_3090, replace(MI300, label="cuda:2", arch="sm_80"))
        ),
        "warning: cuda:0 (RTX 3060) is the default, and cuda:2 (MI300X) is stronger: bf16 native, "
        "304 processors, 192.0 GiB against bf16 native, 28 processors, 12.0 GiB",
        "call torch.cuda.set_device(2) first",
    ),
    (
        replace(TWO, default_index=1),
        f"warning: bf16 is emulated on cuda:0 (Tesla T4), {TOLD}",
        "train in float16 there, with torch.amp.GradScaler",
    ),
    (
        replace(MACHINE, devices=(P40,)),
        f"warning: bf16 is emulated on cuda:0 (P40), {TOLD}",
        "stay with float32 there, and set FUSEDCE_INNER=aot_eager: Inductor needs sm_70",
    ),
]

# machines about which there is nothing to say
SOUND: list[Machine] = [
    MACHINE,
    replace(MACHINE, devices=(A100,), hiding={"CUDA_VISIBLE_DEVICES": "1"}),
    replace(MACHINE, devices=(RTX_3090, RTX_3060)),
    replace(MACHINE, devices=(RTX_3060, RTX_3090), default_index=1),
    replace(MACHINE, devices=(MI300, MI100)),
    replace(MACHINE, devices=(Device("mps:0", "mps"),)),
    lacking("Triton"),  # a CPU needs none
    lacking("C compiler"),
    replace(  # a torch for the CPU, where that variable means nothing
        MACHINE,
        versions={**MACHINE.versions, "cuda": ""},
        hiding={"CUDA_VISIBLE_DEVICES": "0"},
    ),
]


@pytest.mark.parametrize(("machine", "text", "advice"), WRONG)
def test_what_is_wrong(machine: Machine, text: str, advice: str) -> None:
    found = doctor.findings(machine)[0]
    assert f"{found.level}: {found.text}" == text
    assert found.advice.startswith(advice)
    assert f"{text}\n  do: {advice}" in doctor.text(machine)


@pytest.mark.parametrize("machine", SOUND)
def test_nothing_is_wrong(machine: Machine) -> None:
    assert doctor.findings(machine) == []
    assert doctor.text(machine).endswith("\n\nno problems found")


def test_problems_come_first() -> None:
    machine = replace(lacking("C++ compiler", TWO), settings_error="a variable")
    levels = [finding.level for finding in doctor.findings(machine)]
    assert levels == ["problem", "warning", "warning", "warning"]


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
    machine = replace(MACHINE, versions={**MACHINE.versions, "torch": version})
    assert (doctor.findings(machine) == []) == supported


def test_gpus_that_want_unlike_dtypes_are_told_apart() -> None:
    v100 = Device("cuda:2", "V100", "sm_70", 80, 32 * GIB)
    machine = replace(MACHINE, devices=(A100, T4, v100, P40))
    assert [finding.text for finding in doctor.findings(machine)] == [
        f"bf16 is emulated on cuda:0 (Tesla T4), cuda:2 (V100), {TOLD}",
        f"bf16 is emulated on cuda:0 (P40), {TOLD}",
    ]


@pytest.mark.parametrize(
    ("left", "right", "is_stronger"),
    [
        (A100, T4, True),
        (A2, P40, True),  # less memory, and what mixed precision needs
        (RTX_3090, RTX_3060, True),
        (MI300, MI100, True),
        (A2, RTX_3060, False),  # more memory, fewer processors
        (T4, replace(T4, memory_bytes=14 * GIB), False),  # one name
        (Device("npu:0", "one"), Device("npu:1", "other"), False),  # nothing is known
    ],
)
def test_stronger(left: Device, right: Device, is_stronger: bool) -> None:
    assert doctor.stronger(left, right) == is_stronger
    assert not doctor.stronger(right, left)


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (12, 0)])
def test_bf16_is_what_torch_says(capability: tuple[int, int], gpus: Gpus) -> None:
    gpus.have(Card("a card", *capability))
    native = doctor.bf16(read_machine().devices[0])[0] == "native"
    assert native == torch.cuda.is_bf16_supported(including_emulation=False)


# ---------------------------------------------------------------- reading a machine


def test_cuda_devices(gpus: Gpus) -> None:
    gpus.have(cards.T4, Card("a card", 12, 0))
    gpus.current = 1
    read = read_machine()
    assert read.error == ""
    first, second = (replace(device, implementations=()) for device in read.devices)
    assert first == replace(T4, implementations=())
    assert (second.label, second.capability) == ("cuda:1", (12, 0))
    assert read.used == read.devices[1]


def test_a_hip_device(gpus: Gpus) -> None:
    gpus.have(cards.MI300, hip="6.4")
    read = read_machine()
    assert (read.used.arch, read.used.capability, read.versions["hip"]) == ("gfx942", None, "6.4")


def test_a_driver_that_fails_or_warns_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(check_available: bool) -> None:
        warnings.warn("The NVIDIA driver on your system is too old\n  more", stacklevel=1)
        raise RuntimeError("CUDA unknown error\n  much more of it")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", broken)
    read = read_machine()
    assert read.error == "RuntimeError: CUDA unknown error"
    assert read.said == ("The NVIDIA driver on your system is too old",)
    assert read.devices == ()


def test_the_cpp_compiler_is_the_one_that_inductor_would_use() -> None:
    from torch._inductor import config

    assert doctor.inductor_problem("cpu") == ""
    with config.patch({"cpp.cxx": ("fxpass-no-such-compiler",)}):
        assert doctor.inductor_problem("cpu").startswith("C++ compiler not found: install g++")
        assert "C++" not in doctor.inductor_problem("cuda")


def test_a_bad_setting_is_status_1_and_not_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSEDCE_LOGITS", "nonsense")
    assert doctor.run() == 1
    assert "problem: FUSEDCE_LOGITS='nonsense' is not allowed" in capsys.readouterr().out


@pytest.mark.full  # a process of its own
def test_doctor_as_a_user_runs_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "fxpass", "doctor"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in HIDING},
        timeout=300,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert f"torch   {torch.__version__}\n" in ran.stdout
    assert "FUSEDCE_MIXED_DTYPES" in ran.stdout
    (used,) = (line for line in ran.stdout.splitlines() if line.endswith("  used"))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert used.split()[0] == (f"{accelerator}:0" if accelerator else "cpu")
