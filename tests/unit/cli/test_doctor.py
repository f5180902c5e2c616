"""``fxpass doctor``: what it says of described machines, of this one, and what it exits with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fxpass.cli import doctor
from tests.support.gpus import A100, MI300, T4, Card, Gpus

ROOT = Path(__file__).parents[3]
TOOLS = {
    "C++ compiler": "g++",
    "C compiler": "/usr/bin/gcc",
    "Python.h": "/usr/include/Python.h",
    "Triton": "importable",
}


@pytest.fixture(autouse=True)
def _sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with all tools, and nothing in its environment."""
    monkeypatch.setattr(doctor, "read_compilers", lambda: TOOLS)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.delenv("FUSEDCE_INNER", raising=False)


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]):
    """Runs the doctor; the report, and its findings alone."""

    def run() -> tuple[str, str]:
        status = doctor.print_report()
        text = capsys.readouterr().out
        assert status == int("\nproblem: " in text)
        return text, text[text.rindex("\n\n") + 2 : -1]

    return run


# ---------------------------------------------------------------- described machines


def test_two_unlike_gpus(gpus: Gpus, report) -> None:
    gpus.have(T4, A100)
    text, findings = report()
    devices = text[text.index("devices\n") : text.index("  cpu  ", text.index("devices\n"))]
    assert devices == "devices\n  cuda:0  Tesla T4     sm_75\n  cuda:1  NVIDIA A100  sm_80\n"
    assert "  cuda:1  bfloat16  triton  generated Triton kernels\n" in text
    assert "  C++ compiler  g++                    for cpu\n" in text
    assert findings == "no problems found"


def test_a_hip_device(gpus: Gpus, report) -> None:
    gpus.have(MI300, hip="6.4")
    text, findings = report()
    assert re.search(r"cuda:0 +MI300X +gfx942", text)
    assert findings == "no problems found"


def test_a_driver_that_fails(report, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(check_available: bool) -> None:
        raise RuntimeError("CUDA unknown error\n  much more of it")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", broken)
    monkeypatch.setenv("FUSEDCE_LOGITS", "nonsense")
    _, findings = report()
    assert findings.splitlines()[::2] == [
        "problem: torch cannot start the accelerator: RuntimeError: CUDA unknown error",
        "problem: FUSEDCE_LOGITS='nonsense' is not allowed; use auto, defer, keep, drop",
    ]


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
def test_supported_torch(
    version: str, supported: bool, report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    problem = f"problem: torch {version} is not supported\n  do: install 2.11 to 2.15"
    assert (problem in report()[1]) != supported


# ---------------------------------------------------------------- compilers


@pytest.mark.parametrize(
    ("tool", "cards", "found"),
    [
        ("C++ compiler", (), "for cpu: C++ compiler not found: install g++ or clang"),
        ("Triton", (A100,), "for cuda: Triton not found: pip install triton"),
        ("Triton", (), ""),  # a CPU needs none
        ("C compiler", (), ""),
    ],
)
def test_missing_tools(
    tool: str, cards: tuple[Card, ...], found: str, gpus: Gpus, report, monkeypatch
) -> None:
    gpus.have(*cards)
    monkeypatch.setattr(doctor, "read_compilers", lambda: {**TOOLS, tool: ""})
    _, findings = report()
    start = f"warning: Inductor cannot compile {found}" if found else "no problems found"
    assert findings.startswith(start)
    assert ("do: install what is missing, or set FUSEDCE_INNER=aot_eager" in findings) == bool(
        found
    )


def test_the_cpp_compiler_is_the_one_that_inductor_would_use(monkeypatch) -> None:
    from torch._inductor import config

    monkeypatch.undo()
    assert doctor.inductor_problem("cpu") == ""
    with config.patch({"cpp.cxx": ("fxpass-no-such-compiler",)}):
        assert doctor.inductor_problem("cpu").startswith("C++ compiler not found: install g++")
        assert "C++" not in doctor.inductor_problem("cuda")


@pytest.mark.full  # a process of its own
def test_a_folder_with_a_space(tmp_path) -> None:
    """Where torch does not quote it, Inductor cannot link."""
    folder = tmp_path / "a space"
    folder.mkdir()
    (folder / "torch").symlink_to(Path(torch.__file__).parent)
    code = "from fxpass.cli.doctor import inductor_problem as p; print(p('cpu')); print(p('cuda'))"
    environ = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}
    said = subprocess.check_output([sys.executable, "-c", code], env=environ, text=True)
    quoted = torch.__version__ >= "2.14"
    assert ("no folder's name has a space" in said.splitlines()[0]) != quoted
    assert "space" not in said.splitlines()[1]


@pytest.mark.full  # a process of its own
def test_doctor_as_a_user_runs_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "fxpass", "doctor"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert f"torch   {torch.__version__}\n" in ran.stdout
    assert "FUSEDCE_MIXED_DTYPES" in ran.stdout
