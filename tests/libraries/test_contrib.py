"""The patches in ``contrib``: what each request shows fails without its patch, and runs with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fxpass
from tests.libraries import with_patch
from tests.libraries.with_patch import apply_patch

ROOT = Path(fxpass.__file__).parents[1]
CONTRIB = ROOT / "contrib"
# The errors without the patches.
ERRORS = {
    "accelerate-registered-backends": "'MY_BACKEND' is not a valid DynamoBackend",
    "torch-list-of-one": "Segmentation fault",
    "torch-lookup-race": "duplicate name: slow",
}
TRAINER = """
from pathlib import Path

from torch._dynamo.utils import counters

from tests.libraries.test_trainers import logged, trainer
from tests.support import tiny

losses = []
for backend in ("fusedce", None):
    run = trainer(
        tiny.llama(),
        Path("out"),
        torch_compile_backend=backend,
        max_steps=2,
        gradient_accumulation_steps=1,
        save_strategy="no",
    )
    run.train()
    losses.append(logged(run, "loss"))
assert counters["fusedce"]["matched"] == counters["stats"]["unique_graphs"] >= 1
assert counters["fusedce"]["rejected"] == 0
fused, eager = losses
assert len(fused) == 2
assert max(abs(a - b) / b for a, b in zip(fused, eager)) < 2e-6, losses
"""


def stderr_of(script: str, folder: Path) -> str:
    """What a script says that runs with the modules in a folder, if it fails."""
    path = folder / "script.py"
    path.write_text(script)
    environ = os.environ | {
        "FUSEDCE_INNER": "aot_eager",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": str(ROOT),
        # Inductor's key of compiled code does not read the patched files
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    command = [sys.executable, with_patch.__file__, str(folder), str(path)]
    result = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    return (result.stderr or f"ended with {result.returncode}") if result.returncode else ""


def example(name: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (CONTRIB / f"{name}.md").read_text(), re.DOTALL)
    return code


def test_every_patch_has_a_request_and_a_row():
    readme = (CONTRIB / "README.md").read_text()
    assert sorted(path.stem for path in CONTRIB.glob("*.patch")) == sorted(ERRORS)
    for name in ERRORS:
        assert f"({name}.patch) ([request]({name}.md))" in readme


@pytest.mark.parametrize("name", ERRORS)
def test_the_example_fails_without_the_patch(name, tmp_path):
    assert ERRORS[name] in stderr_of(example(name), tmp_path)


@pytest.mark.parametrize("name", ERRORS)
def test_the_example_runs_with_the_patch(name, tmp_path):
    apply_patch(CONTRIB / f"{name}.patch", tmp_path)
    assert stderr_of(example(name), tmp_path) == ""


def test_a_patch_of_another_release_does_not_fit(tmp_path):
    """git says so, also in a folder of a repository."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    text = (CONTRIB / "torch-lookup-race.patch").read_text()
    older = tmp_path / "older.patch"
    older.write_text(text.replace("-                register_backend", "-                register"))
    folder = tmp_path / "patched"
    folder.mkdir()
    with pytest.raises(AssertionError, match=r"older\.patch does not fit what is installed"):
        apply_patch(older, folder)


def test_a_trainer_takes_the_backend_by_its_name(tmp_path):
    apply_patch(CONTRIB / "accelerate-registered-backends.patch", tmp_path)
    assert stderr_of(TRAINER, tmp_path) == ""
