"""Fills the template of the kernels.

In: the values for the holes of ``templates/reductions.py.jinja``. Out: the text of a Python module.
Two conventions let the template read like the kernels:

- a hole that is alone on its line stands for any number of lines, at its depth;
- unread assignments (which only load and compute), loops of nothing else, parameters and functions
  leave no text, and neither does the comment above them::

    >>> kernel = "@triton.jit\\ndef f(\\n    x,\\n    y,\\n):\\n    a = x\\n    print(y)\\n"
    >>> print(without_unread(kernel), end="")
    @triton.jit
    def f(
        y,
    ):
        print(y)
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from jinja2.ext import Extension


def rendered(**values: Any) -> str:
    """The filled template, :func:`without_unread`."""
    return without_unread(_template().render(values))


def without_unread(module: str) -> str:
    """The module without the functions, parameters and statements whose values its last function,
    the kernel, does not read."""
    *_, kernel = functions = [f for f in ast.parse(module).body if isinstance(f, ast.FunctionDef)]
    unread: list[ast.stmt | ast.arg] = []
    read = _read_before(kernel.body, set(), unread)
    parameters = {p.arg for p in kernel.args.args if p.arg in read}
    unread += [p for p in kernel.args.args if p.arg not in read]
    gone = {i for node in unread for i in range(node.lineno - 1, node.end_lineno or node.lineno)}
    calls = {function.name: _names(function, ast.Load) for function in functions}
    while more := set[str]().union(*(calls[name] for name in read & calls.keys())) - read:
        read |= more
    for function in functions[:-1]:
        if function.name not in read:  # with two empty lines after it
            gone |= set(range(function.lineno - 2, (function.end_lineno or 0) + 2))
    lines = module.splitlines(keepends=True)
    for i in range(len(lines) - 1, 0, -1):
        if i in gone and lines[i - 1].lstrip().startswith("#"):
            gone.add(i - 1)
    left = ["" if i in gone else line for i, line in enumerate(lines)]
    start = kernel.body[0].lineno
    # one empty line in place of several, and none at the end
    body = re.sub(r"^\n+", "\n", "".join(left[start - 1 :]), flags=re.M).rstrip("\n")

    def named(names: re.Match[str]) -> str:
        """A list of names that ``triton.jit`` gets."""
        return str([name for name in re.findall(r"\w+", names[0]) if name in parameters])

    i = kernel.lineno - 2
    left[i] = re.sub(r"\[.*?\]", named, lines[i]).replace("'", '"')
    return f"{''.join(left[: start - 1])}{body}\n"


def _read_before(
    body: list[ast.stmt], after: set[str], unread: list[ast.stmt | ast.arg]
) -> set[str]:
    """The names whose values before some statements are read; ``after``: the names that are read
    after the statements. Adds the statements whose results are unread to ``unread``."""
    read = set(after)
    for statement in reversed(body):
        if isinstance(statement, ast.For | ast.If):
            counter = ast.Tuple([]) if isinstance(statement, ast.If) else statement.target
            own = _names(counter, ast.Store)
            assert read.isdisjoint(own), "a loop's counter is read after it"
            # an iteration of a loop may read the values that the iteration before wrote
            while (more := read | _read_before(statement.body, read, inside := [])) != read:
                read = more
            if all(child in inside for child in statement.body):
                unread.append(statement)
                continue
            unread += inside
            header = statement.iter if isinstance(statement, ast.For) else statement.test
            read = (read - own) | _names(header, ast.Load)
        elif (written := _names(statement, ast.Store)) and read.isdisjoint(written):
            unread.append(statement)
        else:
            if isinstance(statement, ast.Assign):  # += reads the name, too
                read -= written
            read |= _names(statement, ast.Load)
    return read


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """The names that are loaded or stored."""
    names = (child for child in ast.walk(node) if isinstance(child, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, context)}


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
