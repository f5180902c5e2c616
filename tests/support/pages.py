"""The code of a page of documentation."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import fxpass

EXTENDING = Path(fxpass.__file__).with_name("EXTENDING.md")


def code_under(page: Path, heading: str) -> list[str]:
    """The Python blocks of a section."""
    section = page.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def as_module(code: str, path: Path) -> ModuleType:
    """A module of a file, as Triton needs one."""
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
