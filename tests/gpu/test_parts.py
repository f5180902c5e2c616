"""``python -m tests.gpu``: which tests a part has, and what a machine needs for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu.__main__ import Part, main

ROOT = Path(__file__).parents[2]
# beside torch, triton, sympy, jinja2, numpy, pytest and expecttest
MORE = (
    *("xdist", "execnet", "transformers", "tokenizers", "accelerate", "datasets", "peft", "trl"),
    *("lightning", "deepspeed", "liger_kernel", "torchmetrics", "einops", "safetensors"),
)


@pytest.mark.parametrize("of", [1, 3, 32])
def test_every_test_is_in_one_part(of):
    found = []
    for number in range(1, of + 1):
        items, left_out = [f"test {i}" for i in range(20)], []
        hook = SimpleNamespace(pytest_deselected=lambda items, to=left_out: to.extend(items))
        Part(number, of, 60).pytest_collection_modifyitems(SimpleNamespace(hook=hook), items)
        assert sorted(items + left_out) == sorted(f"test {i}" for i in range(20))
        found += items
    assert sorted(found) == sorted(f"test {i}" for i in range(20))


def test_nothing_starts_when_the_time_is_over():
    item = SimpleNamespace(nodeid="test_late")
    assert Part(1, 1, 60).pytest_runtest_protocol(item) is None
    late, session, lines = Part(1, 1, 0), SimpleNamespace(exitstatus=0), []
    assert late.pytest_runtest_protocol(item) is True
    late.pytest_sessionfinish(session)
    late.pytest_terminal_summary(SimpleNamespace(write_line=lines.append))
    assert session.exitstatus == 1
    assert lines == ["NOT RUN for lack of time: 1 tests from test_late"]


@pytest.mark.parametrize("part", ["0/4", "5/4"])
def test_there_is_no_such_part(part, capsys):
    with pytest.raises(SystemExit):
        main(["--part", part])
    assert "there is no such part" in capsys.readouterr().err


@pytest.mark.full
def test_a_machine_with_torch_and_pytest_alone():
    """Every module is imported that the packages allow."""
    command = f"""
import sys
sys.modules.update(dict.fromkeys({MORE!r}))
from tests.gpu.__main__ import main
sys.exit(main(["--jobs", "1", "--collect-only", "-p", "no:cacheprovider"]))
"""
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for module in ("test_chunked", "test_reductions", "test_scaling", "test_losses"):
        assert f"{module}.py::" in done.stdout
    assert "aten]" not in done.stdout  # an implementation that launches nothing
