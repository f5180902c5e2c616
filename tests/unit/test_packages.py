"""The packages of fxpass: their imports, the examples in their docstrings, an installed wheel."""

from __future__ import annotations

import ast
import doctest
import gc
import importlib
import pkgutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

import fxpass
from tests.conftest import FULL, NEEDS

ROOT = Path(fxpass.__file__).parent

# What a package may import. The public modules, which are in none, may import everything but the
# command line; of them, everything may import the settings and the messages.
LAW = {
    "releases": set(),
    "formula": {"releases"},
    "graph": {"releases"},
    "casts": {"graph", "formula"},
    "plan": {"formula"},
    "region": {"formula", "releases"},
    "aten": {"formula", "plan", "region"},
    "kernels": {"formula", "plan"},
    "lower": {"graph", "formula", "region"},
    "op": {"formula", "plan", "aten", "kernels", "region", "lower"},
    "rows": {"graph", "formula", "op", "region", "plan", "kernels"},
    "deferred": {"formula", "op", "graph", "region", "rows", "releases"},
    "rewrite": {
        *("casts", "op", "deferred", "graph", "plan", "formula", "kernels"),
        *("region", "rows", "releases"),
    },
    "cli": {"op", "plan", "releases"},
}
FOR_ALL = {"settings", "messages"}
PUBLIC = {"backend", "distributed", "functional", "report", "testing", *FOR_ALL}
# Two implementations of one interface, the loss on one device and on several, two command lines.
TWICE = {"forward", "backward", "linear_cross_entropy", "main"}


def imported(path: Path) -> Iterator[str]:
    """The modules of fxpass that a file imports, wherever it does, without ``fxpass.``."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (n.removeprefix("fxpass.") for n in names if n.startswith("fxpass."))


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def forbidden(package: str, path: Path) -> list[str]:
    allowed = LAW[package] | {package} | FOR_ALL
    if package == "cli":
        allowed |= PUBLIC | {"__version__"}
    return [name for name in imported(path) if name.partition(".")[0] not in allowed]


@pytest.mark.parametrize("package", LAW)
def test_imports_go_down(package):
    assert files(package), package
    wrong = {str(p.relative_to(ROOT)): w for p in files(package) if (w := forbidden(package, p))}
    assert not wrong


def modules_read() -> dict[str, set[str]]:
    """The modules that each module of fxpass imports, inside functions too."""
    paths = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in ROOT.rglob("*.py")}
    read = dict[str, set[str]]()
    for name, path in paths.items():
        names = {n if n in paths else n.rpartition(".")[0] for n in imported(path)}
        read[name] = names & paths.keys() - {name}
    return read


def test_there_is_no_circle():
    list(TopologicalSorter(LAW).static_order())
    read = modules_read()
    assert "rows.rules" in read["rows.backend"] | read["rows.regions"]
    list(TopologicalSorter(read).static_order())


def test_a_class_name_stands_once():
    names = [
        node.name
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert len(names) > 100
    assert not [name for name, count in Counter(names).items() if count > 1]


def test_a_public_function_of_a_module_has_a_name_of_its_own():
    names = Counter(
        node.name
        for path in ROOT.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    )
    assert len(names) > 200
    assert {name for name, count in names.items() if count > 1} == TWICE


def test_another_direction_is_seen(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("def f():\n    from fxpass.rewrite import transform\n")
    assert forbidden("rows", path) == ["rewrite.transform"]


def test_every_module_is_in_a_package():
    top = {path.stem for path in ROOT.glob("*.py")}
    assert top == PUBLIC | {"__init__", "__main__"}
    assert {p.name for p in ROOT.iterdir() if p.is_dir() and p.name != "__pycache__"} == set(LAW)
    for public in PUBLIC:
        assert not [name for name in imported(ROOT / f"{public}.py") if name.startswith("cli")]


@pytest.mark.parametrize("package", LAW)
def test_charters(package):
    text = importlib.import_module(f"fxpass.{package}").__doc__ or ""
    sentences = [s for s in text.replace("\n", " ").split(". ") if s.strip()]
    assert len(sentences) in (2, 3, 4), sentences


def with_examples() -> list[str]:
    """The modules of fxpass and of the benchmarks that have examples in docstrings."""
    paths = [*ROOT.rglob("*.py"), *(ROOT.parent / "benchmarks").rglob("*.py")]
    found = [p.relative_to(ROOT.parent) for p in paths if ">>>" in p.read_text()]
    return sorted(".".join(path.with_suffix("").parts) for path in found)


@pytest.mark.parametrize("name", with_examples())
def test_the_examples_of_docstrings_run(name, device):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    with device:
        for example in doctest.DocTestFinder().find(importlib.import_module(name), name):
            runner.run(example, clear_globs=False)
    # Dynamo's hooks read the globals of what was compiled when that is collected
    torch._dynamo.reset()
    gc.collect()
    assert runner.tries
    assert not runner.failures


def test_a_module_fits_its_reader():
    lines = {p: len(p.read_text().splitlines()) for p in ROOT.rglob("*.py")}
    assert max(lines.values()) <= 350, max(lines, key=lambda p: lines[p])


def without_device(source: str) -> list[str]:
    """The calls of ``torch.zeros`` and the like that leave the device to the caller's default."""
    factories = {function.__name__ for function in _device_constructors()}
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        ast.unparse(call)
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in factories
        and not any(keyword.arg == "device" for keyword in call.keywords)
    ]


def test_factory_calls_name_their_device():
    """``torch.set_default_device`` of the caller decides nothing."""
    found = {path.name: without_device(path.read_text()) for path in ROOT.rglob("*.py")}
    assert not {name: calls for name, calls in found.items() if calls}
    assert without_device("torch.zeros(3); torch.ones(3, device=x.device)") == ["torch.zeros(3)"]


def test_a_wheel_has_every_module_and_template(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    # a build writes beside its sources
    project = tmp_path / "project"
    project.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (project / name).write_text((ROOT.parent / name).read_text())
    templates = sorted(ROOT.rglob("*.jinja"))
    assert templates
    for path in (*ROOT.rglob("*.py"), *templates):
        copy = project / "fxpass" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    subprocess.run([*command, "--wheel-dir", tmp_path, str(project)], check=True)
    (wheel,) = tmp_path.glob("fxpass-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    modules = {m.name for m in pkgutil.walk_packages([str(ROOT)], "fxpass.")}
    for module in modules:
        path = module.replace(".", "/")
        assert {f"{path}.py", f"{path}/__init__.py"} & inside, module
    assert {template.relative_to(ROOT.parent).as_posix() for template in templates} <= inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)


def test_the_tiers_name_modules_that_exist():
    tests = Path(__file__).parents[1]
    assert not [name for name in (*FULL, *NEEDS) if not (tests / name).exists()]


def test_the_repository_holds_no_large_file():
    """Neither wheels nor outputs: a clone stays below two megabytes."""
    root = ROOT.parent
    if not (root / ".git").exists():
        pytest.skip("an archive of the repository")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    tracked = [root / name for name in listed.stdout.decode().split("\0") if name]
    assert ROOT / "backend.py" in tracked
    large = [path.name for path in tracked if path.exists() and path.stat().st_size > 500_000]
    assert not large
