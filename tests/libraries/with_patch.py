"""Runs a script with patched modules of installed packages: ``with_patch.py FOLDER SCRIPT``.

FOLDER has the patched files at their paths in site-packages.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType


class Patched(MetaPathFinder):
    """Finds the modules whose files are in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.folder / f"{name.replace('.', '/')}.py"
        return spec_from_file_location(name, file) if file.exists() else None


def apply_patch(patch: Path, folder: Path) -> None:
    """Writes the files that a patch changes to a folder, patched; ``AssertionError`` if the patch
    does not fit the installed release."""
    changed = [line[6:] for line in patch.read_text().splitlines() if line.startswith("--- a/")]
    for name in changed:
        spec = PathFinder.find_spec(name.partition("/")[0])
        assert spec is not None
        assert spec.origin is not None
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text((Path(spec.origin).parents[1] / name).read_text())
    # outside of any repository: in one, git would leave out files that are not below its root
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environ["GIT_CEILING_DIRECTORIES"] = str(folder.parent.resolve())
    applied = subprocess.run(
        ["git", "apply", str(patch)], cwd=folder, env=environ, capture_output=True, text=True
    )
    assert not applied.returncode, f"{patch.name} does not fit what is installed: {applied.stderr}"


if __name__ == "__main__":
    _, folder, script = sys.argv
    sys.meta_path.insert(0, Patched(Path(folder)))
    runpy.run_path(script, run_name="__main__")
