"""``fxpass doctor``: the report, word for word, and what it exits with."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import expecttest
import pytest
import torch

from fxpass.cli import doctor, doctor_rules
from fxpass.cli.doctor_devices import VARIABLES, Accelerators, Cpu, Device
from fxpass.cli.doctor_probe import Lowering, Machine, Setting, Tools, probe_tools
from fxpass.plan import devices

ROOT = Path(__file__).parents[3]
GIB = 2**30
TOOLS = Tools(cxx="g++", cc="gcc", python_header="/usr/include/Python.h", triton="3.7.1")
CPU = Cpu("a processor", "AVX512", bf16="AMX", fp16="AMX", onednn=("bf16", "fp16"))
MACHINE = Machine(
    versions={"python": "3.12.1", "torch": "2.13.0+cu126", "triton": "", "fxpass": "0.1.0"},
    cpu=CPU,
    tools=TOOLS,
)

T4 = Device("cuda", 0, "Tesla T4", 15 * GIB, 14 * GIB, (7, 5), "", 40, "GPU-t4")
A100 = Device("cuda", 1, "NVIDIA A100", 40 * GIB, 39 * GIB, (8, 0), "", 108, "GPU-a100")
TWO = dataclasses.replace(
    MACHINE,
    versions={"python": "3.12.1", "torch": "2.13.0+cu126", "triton": "3.7.1", "fxpass": "0.1.0"},
    accelerators=Accelerators(
        "cuda",
        ("sm_75", "sm_80"),
        (T4, A100),
        cards=(T4, A100),
        environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    ),
    settings=(Setting("FUSEDCE_STRATEGY", "chunked", True, "how"),),
    lowerings=(
        Lowering("cuda:0", "float32", "triton", "kernels"),
        Lowering("cuda:0", "bfloat16", "triton", "kernels"),
        Lowering("cuda:0", "float64", "aten", "too wide"),
    ),
)


class TestReport(expecttest.TestCase):
    maxDiff = None

    def test_two_unlike_gpus(self):
        self.assertExpectedInline(
            doctor.text(TWO),
            """\
versions
  python  3.12.1
  torch   2.13.0+cu126  fxpass supports 2.11 to 2.15
  triton  3.7.1
  fxpass  0.1.0

devices
  cuda:0  Tesla T4     sm_75   bf16 emulated      fp16 tensor cores  15.0 GiB  14.0 GiB free  nvidia-smi 0  used
  cuda:1  NVIDIA A100  sm_80   bf16 tensor cores  fp16 tensor cores  40.0 GiB  39.0 GiB free  nvidia-smi 1
  cpu     a processor  AVX512  bf16 native (AMX)  fp16 native (AMX)

which devices
  CUDA_VISIBLE_DEVICES  not set
  CUDA_DEVICE_ORDER     PCI_BUS_ID
  LOCAL_RANK            not set

compilers
  C++       g++                    for Inductor's code on the CPU
  C         gcc                    for Triton's kernel launchers, on a GPU
  Python.h  /usr/include/Python.h  for both

fused loss
  cuda:0  triton  float32, bfloat16  kernels
  cuda:0  aten    float64            too wide

settings
  FUSEDCE_STRATEGY  chunked  environment  how

warning: cuda:0 (Tesla T4) is the default, and cuda:1 (NVIDIA A100) is stronger: bf16 tensor cores against emulated, 108 processors against 40 processors, 40.0 GiB against 15.0 GiB
  do: set CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1 before Python starts, or call torch.cuda.set_device(1) first
warning: bf16 is emulated on cuda:0 (Tesla T4), though torch.cuda.is_bf16_supported() is True
  do: train in fp16 there: torch.autocast(dtype=torch.float16) with torch.amp.GradScaler""",
        )

    def test_no_gpu(self):
        self.assertExpectedInline(
            doctor.text(MACHINE),
            """\
versions
  python  3.12.1
  torch   2.13.0+cu126   fxpass supports 2.11 to 2.15
  triton  not installed
  fxpass  0.1.0

devices
  cpu  a processor  AVX512  bf16 native (AMX)  fp16 native (AMX)  used

compilers
  C++       g++                    for Inductor's code on the CPU
  C         gcc                    for Triton's kernel launchers, on a GPU
  Python.h  /usr/include/Python.h  for both

no problems found""",
        )

    def test_a_hidden_gpu_and_no_compiler(self):
        accelerators = Accelerators(
            "cuda", cards=(T4,), environ={"CUDA_VISIBLE_DEVICES": ""}, said=("not used",)
        )
        tools = dataclasses.replace(TOOLS, cxx="")
        machine = dataclasses.replace(MACHINE, accelerators=accelerators, tools=tools)
        self.assertExpectedInline(
            doctor.text(machine),
            """\
versions
  python  3.12.1
  torch   2.13.0+cu126   fxpass supports 2.11 to 2.15
  triton  not installed
  fxpass  0.1.0

devices
  -    Tesla T4     sm_75   bf16 emulated      fp16 tensor cores  15.0 GiB  14.0 GiB free  nvidia-smi 0  not visible
  cpu  a processor  AVX512  bf16 native (AMX)  fp16 native (AMX)                                         used

which devices
  CUDA_VISIBLE_DEVICES  (empty)
  CUDA_DEVICE_ORDER     not set
  LOCAL_RANK            not set

compilers
  C++       not found              for Inductor's code on the CPU
  C         gcc                    for Triton's kernel launchers, on a GPU
  Python.h  /usr/include/Python.h  for both

warning: Inductor cannot compile for cpu: there is no C++ compiler
  do: install g++ or clang (for example apt-get install g++), or name yours in CXX; or set FUSEDCE_INNER=aot_eager, which needs none
warning: CUDA_VISIBLE_DEVICES= hides every device: 1 device (Tesla T4)
  do: unset CUDA_VISIBLE_DEVICES, or set it to indices or UUIDs that nvidia-smi -L lists""",
        )


def test_without_nvidia_smi_the_report_says_what_is_unknown() -> None:
    devices = tuple(dataclasses.replace(device, free_bytes=None) for device in (T4, A100))
    accelerators = Accelerators("cuda", devices=devices, cards_error="not found")
    report = doctor.text(dataclasses.replace(MACHINE, accelerators=accelerators))
    assert "  nvidia-smi            not found; its numbers are unknown\n" in report
    assert "free" not in report
    assert "nvidia-smi 0" not in report


def test_the_readme_shows_the_report_of_two_unlike_gpus() -> None:
    report = doctor.text(TWO)
    devices = report[report.index("devices\n") : report.index("\n\ncompilers")]
    findings = report[report.rindex("\n\n") + 2 :]
    assert f"```\n{devices}\n\n{findings}\n```\n" in (ROOT / "fxpass/cli/README.md").read_text()


def test_the_worst_comes_first() -> None:
    machine = dataclasses.replace(TWO, versions={"torch": "2.0"}, cpu=CPU)
    order = Accelerators("cuda", devices=(A100, T4), environ={"CUDA_VISIBLE_DEVICES": "1,0"})
    machine = dataclasses.replace(machine, accelerators=order)
    levels = [finding.level for finding in doctor.findings(machine)]
    assert levels == ["problem", "warning", "warning", "warning", "note"]


# ---------------------------------------------------------------- other rules


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
        ("cxx", "cpu", "install g++"),
        ("cc", "cuda", "install gcc"),
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
    assert "FUSEDCE_INNER=aot_eager" in finding.advice


def test_what_a_gpu_needs_is_asked_for_where_there_is_one() -> None:
    tools = dataclasses.replace(TOOLS, triton="")
    machine = dataclasses.replace(MACHINE, tools=tools)
    assert doctor.findings(machine) == []
    machine = dataclasses.replace(machine, accelerators=Accelerators("cuda", devices=(A100,)))
    assert [finding.advice for finding in doctor.findings(machine)] == ["pip install triton"]


def test_the_compiler_is_the_one_that_inductor_would_use() -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("fxpass-no-such-compiler",)}):
        assert probe_tools().cxx == ""


# ---------------------------------------------------------------- what the rules say of other code


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 2), (7, 5), (8, 0), (12, 0)])
def test_devices_without_kernels_are_those_of_the_lowerings(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "has_triton", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    card = SimpleNamespace(name="a card", major=capability[0], minor=capability[1])
    monkeypatch.setattr(devices, "properties_of", lambda device: card)
    lowering, _ = devices.lowering_for(torch.device("cuda:0"), torch.bfloat16)
    device = Device("cuda", 0, "a card", capability=capability)
    found = list(doctor_rules.old(Accelerators("cuda", devices=(device,)), CPU))
    assert bool(found) == (lowering == "aten")


@pytest.mark.parametrize("capability", [(6, 1), (7, 0)])
def test_devices_without_inductor_are_those_of_inductor(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo import device_interface

    properties = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    of_worker = device_interface.caching_worker_device_properties  # which torch 2.15 asks
    monkeypatch.setitem(of_worker, "cuda", [properties])
    device = Device("cuda", 0, "a card", capability=capability)
    (finding,) = doctor_rules.old(Accelerators("cuda", devices=(device,)), CPU)
    capable = device_interface.CudaInterface.is_triton_capable(torch.device("cuda:0"))
    assert ("Inductor" in finding.text) == (not capable)


# ---------------------------------------------------------------- this machine


@pytest.mark.full  # a compile cache of its own
def test_doctor_as_a_user_runs_it() -> None:
    environ = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    ran = subprocess.run(
        [sys.executable, "-m", "fxpass", "doctor"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environ,
        timeout=300,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "problem:" not in ran.stdout
    assert f"torch   {torch.__version__}" in ran.stdout
    assert "FUSEDCE_MIXED_DTYPES" in ran.stdout
    (used,) = (line for line in ran.stdout.splitlines() if line.endswith("  used"))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert used.split()[0] == (f"{accelerator}:0" if accelerator else "cpu")


def test_a_bad_setting_is_a_problem_and_not_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSEDCE_LOGITS", "nonsense")
    assert doctor.run() == 1
    assert "problem: FUSEDCE_LOGITS='nonsense' is not allowed" in capsys.readouterr().out
