"""The READMEs are true: graphs, settings, lists of modules, links."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fxpass
from fxpass import testing
from fxpass.settings import PREFIX, TABLE

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PACKAGES = sorted((ROOT / "fxpass").glob("*/README.md"))
OTHERS = sorted((ROOT / "fxpass").glob("*.md"))
CONTRIB = sorted((ROOT / "contrib").glob("*.md"))
PAGES = [ROOT / "README.md", *OTHERS, *PACKAGES, *CONTRIB, ROOT / "benchmarks" / "README.md"]


def section(title: str) -> str:
    return re.split(r"^## ", README.split(f"## {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)


def links(text: str) -> list[tuple[str, str]]:
    """Every relative link as a path and an anchor, each of which may be empty."""
    text = re.sub(r"`[^`\n]*`", "`code`", without_code(text))
    targets = re.findall(r"\]\(([^()\s]+)\)", text)
    return [(t.partition("#")[0], t.partition("#")[2]) for t in targets if "://" not in t]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", without_code(text), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = 0
        while (anchor := f"{name}-{count}" if count else name) in found:
            count += 1
        found.add(anchor)
    return found


def test_the_graph():
    text = section("What it does to a graph")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (after,) = re.findall(r"```\n(%.*?)\n```", text, re.DOTALL)
    scope = {"torch": torch, "F": F}
    # a file as far as Dynamo can tell, so that it finds the names of the local variables
    linecache.cache["readme.py"] = (len(code), None, code.splitlines(True), "readme.py")
    exec(compile(code, "readme.py", "exec"), scope)
    x = torch.randn(8, 6, requires_grad=True)
    weight = torch.randn(10, 6, requires_grad=True)
    labels = torch.randint(10, (8,))
    assert after in testing.rewritten(scope["loss"], x, weight, labels)


def test_every_setting_is_in_the_table():
    rows = re.findall(r"^\| `(FUSEDCE\w*)` \| `([\w.]+)` \|", section("Settings"), re.MULTILINE)
    assert dict(rows) == {row.variable: PREFIX + name for name, row in TABLE.items()}


def test_the_map_links_every_package_and_public_module():
    targets = [target for target, _ in links(section("Reading the code"))]
    assert len(targets) == len(set(targets))
    packages = {path.parent.name for path in (ROOT / "fxpass").glob("*/__init__.py")}
    modules = {path.name for path in (ROOT / "fxpass").glob("*.py")} - {"__init__.py"}
    expected = {f"fxpass/{p}/README.md" for p in packages} | {f"fxpass/{m}" for m in modules}
    assert expected <= set(targets)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.parent.name)
def test_every_module_and_template_of_a_package_has_a_row(package):
    rows = re.findall(r"^\| \[`(\w+\.py[\w.]*)`\]\((.*?)\) \|", package.read_text(), re.MULTILINE)
    assert all(name == Path(target).name for name, target in rows)
    templates = package.parent.glob("templates/*")
    modules = {path.name for path in package.parent.glob("*.py")} - {"__init__.py"}
    assert sorted(name for name, _ in rows) == sorted(
        [*modules, *(path.name for path in templates)]
    )


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 220


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_table_fits_its_reader(page):
    rows = [line for line in without_code(page.read_text()).splitlines() if line.startswith("|")]
    shown = (re.sub(r"\]\([^)]*\)", "]", row.strip("|")) for row in rows)  # without addresses
    assert not [cell for row in shown for cell in re.split(r" \| ", row) if len(cell.strip()) > 120]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_resolves(page):
    assert page.read_text().count("```") % 2 == 0
    for target, anchor in links(page.read_text()):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text()), f"{target}#{anchor}"


def test_an_anchor_is_a_heading_as_github_spells_it():
    text = "# FSDP2 and DDP\n```\n# a comment\n```\n## `a, b` c\n## Limits\n## Limits\n"
    assert anchors(text) == {"fsdp2-and-ddp", "a-b-c", "limits", "limits-1"}


def test_the_version():
    assert fxpass.__version__ in (ROOT / "pyproject.toml").read_text()
