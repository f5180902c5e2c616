"""The README is true: its graphs, its settings and its list of modules."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import torch
import torch.nn.functional as F

import fxpass
from fxpass import testing
from fxpass.settings import PREFIX, TABLE

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    return re.split(r"^## ", README.split(f"## {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_the_graphs_before_and_after():
    text = section("What it does to a graph")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    before, after = re.findall(r"```\n(%.*?)\n```", text, re.DOTALL)
    scope = {"torch": torch, "F": F}
    # a file as far as Dynamo can tell, so that it finds the names of the local variables
    linecache.cache["readme.py"] = (len(code), None, code.splitlines(True), "readme.py")
    exec(compile(code, "readme.py", "exec"), scope)
    x = torch.randn(2, 4, 6, requires_grad=True)
    weight = torch.randn(10, 6, requires_grad=True)
    labels = torch.randint(10, (2, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert testing.original(scope["loss"], x, weight, labels) == before
        assert testing.rewritten(scope["loss"], x, weight, labels) == after


def test_every_setting_is_in_the_table():
    rows = re.findall(r"^\| `(FUSEDCE\w*)` \| `([\w.]+)` \|", section("Settings"), re.MULTILINE)
    assert dict(rows) == {row.variable: PREFIX + name for name, row in TABLE.items()}


def test_every_module_has_a_line():
    rows = re.findall(r"^\| (`.*?) \|", section("Reading the code"), re.MULTILINE)
    told = [name for row in rows for name in re.findall(r"`([\w*]+\.py)`", row)]
    assert len(told) == len(set(told))
    modules = {path.name for path in (ROOT / "fxpass").glob("*.py")} - {"__init__.py"}
    named = {m for m in modules if any(Path(m).match(pattern) for pattern in told)}
    assert named == modules
    assert all(list((ROOT / "fxpass").glob(pattern)) for pattern in told)


def test_the_version():
    assert fxpass.__version__ in (ROOT / "pyproject.toml").read_text()
