"""The command line as a user runs it: a process, its output and its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import fxpass

LOSS = """\
    import torch
    import torch.nn.functional as F

    def loss(x, weight, target):
        return F.cross_entropy(F.linear(x, weight), target)

    def loss_inputs():
        return torch.ones(8, 4), torch.ones(16, 4, requires_grad=True), torch.zeros(8).long()

    def bare():
        return loss(*loss_inputs())

    def keywords(x, weight, target):
        return loss(x, weight=weight, target=target)

    def keywords_inputs():
        return dict(zip(("x", "weight", "target"), loss_inputs()))

    def lacking(x, weight, target=None, *more, **named):
        return x @ weight

    def wrong_inputs():
        return 1

    def wrong(x):
        return x

    class Head(torch.nn.Module):
        def forward(self, x):
            return x

    module = Head()
    number = 1

    def raises():
        return loss(*loss_inputs()).missing

    def of_a_wrong_shape():
        return torch.ones(2, 3) @ torch.ones(2, 3)

    def of_a_wrong_shape_after_a_break():
        print("break")
        return torch.ones(2, 3) @ torch.ones(2, 3)
    """


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fxpass", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        timeout=300,
    )


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "losses.py"
    path.write_text(textwrap.dedent(LOSS))
    return str(path)


def test_version() -> None:
    assert run("--version").stdout == f"fxpass {fxpass.__version__}\n"


def test_help_names_the_commands_and_exit_status_and_does_not_import_torch() -> None:
    code = "import sys, fxpass.__main__ as m\ntry: m.main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for word in ("demo", "doctor", "explain", "exit status: 0"):
        assert word in result.stdout


@pytest.mark.parametrize("command", ["demo", "doctor", "explain"])
def test_help_of_a_command(command: str) -> None:
    result = run(command, "--help")
    assert result.returncode == 0
    assert f"fxpass {command}" in result.stdout
    assert "exit status" in result.stdout


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("demo", "--steps", "2"), ("explain",)])
def test_wrong_usage_is_status_2_with_nothing_on_stdout(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "error" in result.stderr


@pytest.mark.parametrize("function", ["loss", "bare", "keywords"])
def test_explain_reports_the_match(
    function: str, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from fxpass.__main__ import main

    assert main(["explain", f"{source}:{function}"]) == 0
    output = capsys.readouterr().out
    assert "1 loss fused" in output
    assert "losses.py:5" in output  # the user's line


@pytest.mark.full  # a compile cache of its own
def test_explain_runs_as_a_process(source: str) -> None:
    result = run("explain", f"{source}:bare", FUSEDCE_MIN_LOGITS_MB="1000")
    assert result.returncode == 0, result.stderr
    assert "1 not fused" in result.stdout
    assert "FUSEDCE_MIN_LOGITS_MB" in result.stdout


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("losses.py", "not of the form FILE:FUNCTION"),
        (":loss", "not of the form FILE:FUNCTION"),
        ("absent.py:loss", "there is no file"),
        ("{source}:absent", "has no function absent"),
        ("{source}:number", "has no function number"),
        ("{source}:lacking", "lacking: missing a required argument: 'x': define lacking_inputs()"),
        ("{source}:module", "module: missing a required argument: 'x': define module_inputs()"),
        ("{source}:wrong", "wrong_inputs() has to return a tuple or a dict, not int"),
    ],
)
def test_explain_errors_are_one_line_and_status_2(
    target: str, message: str, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from fxpass.__main__ import main

    assert main(["explain", target.format(source=source)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fxpass: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("name", "code", "last"),
    [
        ("raises", "return loss(*loss_inputs()).missing", "has no attribute 'missing'"),
        ("of_a_wrong_shape", "return torch.ones(2, 3) @ torch.ones(2, 3)", ""),
        ("of_a_wrong_shape_after_a_break", "return torch.ones(2, 3) @ torch.ones(2, 3)", ""),
    ],
)
def test_a_traceback_starts_in_the_users_file(
    name: str, code: str, last: str, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Frames of fxpass and of Dynamo before it say nothing to a user."""
    from fxpass.__main__ import main

    assert main(["explain", f"{source}:{name}"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "break\n" * name.endswith("break")
    files = [line for line in captured.err.splitlines() if line.lstrip().startswith("File ")]
    assert f'File "{source}"' in files[0]
    assert code in captured.err
    assert last in captured.err
    assert "fxpass/report.py" not in captured.err
    assert "torch/_dynamo/" not in captured.err.partition("Traceback")[2]


@pytest.mark.parametrize("command", [("explain", "a.py:f"), ("demo",)])
def test_a_bad_setting_is_one_line_and_status_2(
    command: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from fxpass.__main__ import main

    monkeypatch.setenv("FUSEDCE_STRATEGY", "nonsense")
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("fxpass: error: FUSEDCE_STRATEGY='nonsense'")
    assert error.count("\n") == 1


def test_a_device_that_does_not_exist_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    from fxpass.__main__ import main

    assert main(["demo", "--device", "cuda:99"]) == 2
    assert "--device cuda:99" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("doctor",), ("explain", "{source}:bare"), ("--help",)])
def test_a_closed_pipe_ends_a_command_without_a_traceback(
    arguments: tuple[str, ...], source: str
) -> None:
    program = [sys.executable, "-m", "fxpass", *(a.format(source=source) for a in arguments)]
    reading, writing = os.pipe()
    os.close(reading)
    environ = {**os.environ, "PYTHONUNBUFFERED": ""}
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(
            program, stdout=closed, stderr=subprocess.PIPE, text=True, env=environ
        )
    assert (done.returncode, done.stderr) == (141, "")
