"""Fills the template of the kernels.

In: what ``templates/reductions.py.jinja`` reads. Out: the text of a Python module. Two conventions
hold:

- a hole that is alone on its line stands for any number of lines, at its depth;
- a parameter that the body does not name is left out.
"""

from __future__ import annotations

import functools
import re
import textwrap
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from jinja2.ext import Extension


def rendered(**values: Any) -> str:
    """The module, without parameters that are not used."""
    return _without_unused(_template().render(values))


def _without_unused(module: str) -> str:
    """The module without the parameters that its kernel's body does not name, in the signature and
    in the lists of names that ``triton.jit`` gets."""
    functions, jit, kernel = module.rpartition("@triton.jit(")
    signature, end, body = kernel.partition("):\n")
    used = set(re.findall(r"\w+", re.sub("#.*", "", body)))

    def named(names: re.Match[str]) -> str:
        kept = [name for name in re.findall(r"\w+", names[0]) if name in used]
        return "[" + ", ".join(f'"{name}"' for name in kept) + "]"

    options, define, *parameters = signature.splitlines(keepends=True)
    parameters = [line for line in parameters if re.findall(r"\w+", line)[0] in used]
    options = re.sub(r"\[.*?\]", named, options)
    return "".join([functions, jit, options, define, *parameters, end, body])


class _WholeLines(Extension):
    """Fills a hole that is alone on its line with whole lines, at the depth of the hole."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        lines = r"{% filter lines('\1') %}{{ \2 }}{% endfilter %}\n"
        return re.sub(r"^( *)\{\{ ([^{}]+) \}\}\n", lines, source, flags=re.M)


def _lines(lines: str, depth: str) -> str:
    return textwrap.indent(lines if not lines or lines.endswith("\n") else f"{lines}\n", depth)


@functools.cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        extensions=[_WholeLines],
        optimized=False,  # a template is compiled in every process, and rendered a few times
    )
    environment.filters["lines"] = _lines
    return environment.get_template("reductions.py.jinja")
