"""Runs tests on mutants, each in a fork of a process that has imported what tests import.

In: a copy of a tree, in which one line may have changed, and the tests to run there. Out: how each
test ended, until the first that failed; or, of the tree as it is (``record``), how long each test
takes and which mutants' lines it runs.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from importlib.machinery import SourceFileLoader
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.mutants.draw import PACKAGES, Mutant

COPIED = ("fxpass", "tests", "benchmarks", "pyproject.toml", "README.md")
# What tests/conftest.py sets before it imports torch, and one thread: processor time is compared.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
# Seven of the eight seconds that pytest takes to start here.
IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp",
    "torch.distributed.tensor",
    "torch.export",
    "torch.testing",
    "triton.runtime.interpreter",
    "transformers.models.llama.modeling_llama",
    "expecttest",
    "pytest",
)
OURS = ("fxpass", "tests", "benchmarks")  # never of the tree that this tool stands in
POLL = 0.2  # seconds
HANGS = 60  # seconds that a test may take, and twenty times what it took


def prepare() -> None:
    """This process is the one that is forked."""
    os.environ.update(ENVIRONMENT)
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def copy(tree: Path, folder: Path) -> Path:
    for name in COPIED:
        if (tree / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(tree / name, folder / name, ignore=ignored)
        else:
            shutil.copy(tree / name, folder / name)
    return folder


def spent() -> float:
    """Processor seconds of this process and of those that it waited for."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


class Tests:
    """A pytest plugin: runs tests in this order, or, without one, all of them, whether they fail or
    not, and writes down how each one ended."""

    def __init__(self, path: Path, order: dict[str, float] | None, reached: set[int]) -> None:
        self.path, self.order, self.reached = path, order, reached
        self.failed = False
        self.began = 0.0

    def write(self, **said: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(said) + "\n")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.order is not None:
            place = {name: i for i, name in enumerate(self.order)}
            items[:] = sorted(
                (item for item in items if item.nodeid in place), key=lambda i: place[i.nodeid]
            )

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.write(test=f"{report.nodeid} (collection)", failed=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.failed, self.began = False, spent()
        self.reached.clear()
        if self.order is not None:
            self.write(test=nodeid)
            signal.setitimer(signal.ITIMER_PROF, HANGS + 20 * self.order[nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed |= report.failed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        took = round(spent() - self.began, 2)
        if self.order is None:
            reached = sorted(self.reached)
            self.write(test=nodeid, failed=self.failed, seconds=took, reached=reached)
        elif self.failed:
            self.write(test=nodeid, failed=True)


class Marks(ast.NodeTransformer):
    """Every function says that its module is run (``module``), and statements of ``numbers``, which
    begin at its keys, say their numbers."""

    def __init__(self, module: int, numbers: dict[int, list[int]]) -> None:
        self.module, self.numbers = module, numbers
        self.inside = False

    def marked(self, numbers: Iterable[int], like: ast.AST) -> list[ast.stmt]:
        text = ";".join(f"__reached__({i})" for i in numbers)
        made = ast.parse(text).body
        for statement in made:
            for node in ast.walk(statement):
                ast.copy_location(node, like)
        return made

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, self.inside = self.inside, True
        self.generic_visit(node)
        self.inside = outer
        at = 1 if ast.get_docstring(node, clean=False) is not None else 0
        node.body[at:at] = self.marked([self.module], node.body[0])
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        outer, self.inside = self.inside, False
        self.generic_visit(node)
        self.inside = outer
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        numbers = [self.module, *self.numbers.get(node.body.lineno, ())]
        self.generic_visit(node)
        said = [s.value for s in self.marked(numbers, node.body) if isinstance(s, ast.Expr)]
        node.body = ast.copy_location(ast.BoolOp(ast.Or(), [*said, node.body]), node.body)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if not self.inside or not isinstance(body, list):
                continue
            made: list[ast.stmt] = []
            for statement in body:
                made += self.marked(self.numbers.get(statement.lineno, ()), statement)
                made.append(statement)
            setattr(node, field, made)
        return node


def modules(tree: Path) -> list[str]:
    """The files that are changed; a test that runs the i-th reaches the number −1 − i."""
    paths = [p for package in PACKAGES for p in (tree / "fxpass" / package).rglob("*.py")]
    return sorted(path.relative_to(tree).as_posix() for path in paths)


def mark(tree: Path, mutants: Sequence[Mutant]) -> set[int]:
    """Makes this process import fxpass with marks (the files stay as they are); returns the set
    that holds what has been reached."""
    reached: set[int] = set()
    builtins.__dict__["__reached__"] = reached.add
    plain = SourceFileLoader.source_to_code
    numbers = {(tree / name).as_posix(): -1 - i for i, name in enumerate(modules(tree))}

    def source_to_code(self: Any, data: Any, path: Any) -> Any:
        if (module := numbers.get(str(path))) is not None:
            lines: dict[int, list[int]] = {}
            for i, mutant in enumerate(mutants):
                if (tree / mutant.file).as_posix() == str(path):
                    lines.setdefault(mutant.statement, []).append(i)
            data = Marks(module, lines).visit(ast.parse(data))
        return plain(self, data, path)

    SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]
    sys.dont_write_bytecode = True
    return reached


def run_pytest(
    tree: Path,
    files: Sequence[str],
    order: dict[str, float] | None,
    mutants: Sequence[Mutant] | None,
    said: Path,
) -> None:
    """In a fork: as ``cd tree && pytest files`` in a new process; ``said`` tells how tests ended."""
    os.setsid()  # with all that the tests start
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(tree)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(log, "w")
    tempfile.tempdir = str(tree / "tmp")
    os.environ.update(PYTHONPATH=str(tree), TMPDIR=tempfile.tempdir)
    there = os.path.realpath(Path(__file__).parents[2])
    sys.path[:] = [str(tree), *(p for p in sys.path if p and os.path.realpath(p) != there)]
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    reached: set[int] = set() if mutants is None else mark(tree, mutants)
    import pytest

    # anyio, which is imported already, is a plugin of pytest, too: it would warn
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)  # options of the run that this one is in
    options = ["-q", "-p", "xdist", "-n", "0", "-p", "no:cacheprovider"]
    if order is not None:
        options.append("-x")
    plugin = Tests(said, order, reached)
    code = pytest.main([*options, *files], plugins=[plugin])
    imported = [str(tree)] if "fxpass" not in sys.modules else [*sys.modules["fxpass"].__path__]
    assert all(path.startswith(str(tree)) for path in imported), imported
    plugin.write(code=int(code))


def forked(*args: Any) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=run_pytest, args=args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Python 3.12 on: this process may have threads
        process.start()
    return process


def stop(process: BaseProcess) -> None:
    """Ends a fork and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()  # if it has no group yet
    process.join()


def record(tree: Path, files: Sequence[str], mutants: Sequence[Mutant], said: Path) -> None:
    """Appends to ``said`` how long each test of ``files`` takes, and what it reaches."""
    (tree / "tmp").mkdir()
    process = forked(tree, files, None, mutants, said)
    try:
        process.join()
    finally:
        stop(process)


class Fork:
    """A run of tests in ``tree``, in the order of ``order``; ``ended()`` is None until it has ended."""

    def __init__(self, tree: Path, order: dict[str, float], limit: float) -> None:
        self.tree, self.order, self.limit, self.began = tree, order, limit, time.monotonic()
        self.polled = 0
        shutil.rmtree(tree / "tmp", ignore_errors=True)
        (tree / "tmp").mkdir()
        self.said = tree / "said.jsonl"
        self.said.write_text("")
        files = list(dict.fromkeys(name.partition("::")[0] for name in order))
        self.process = forked(tree, files, order, None, self.said)

    def seconds(self) -> float:
        return round(time.monotonic() - self.began, 1)

    def ended(self) -> tuple[str, str, int] | None:
        """The outcome, the test that the outcome is of, and how many tests were begun."""
        late = self.polled * POLL > self.limit  # while this process was stopped, so was the fork
        if self.process.is_alive() and not late:
            self.polled += 1
            return None
        stop(self.process)
        shutil.rmtree(self.tree / "tmp", ignore_errors=True)
        said = [json.loads(line) for line in self.said.read_text().splitlines()]
        begun = len({line["test"] for line in said if "test" in line})
        failed = [line["test"] for line in said if line.get("failed")]
        last = next((line["test"] for line in reversed(said) if "test" in line), "")
        if failed:
            return "killed", failed[0], begun
        if said and "code" in said[-1]:
            return ("survives" if said[-1]["code"] in (0, 5) else "killed"), "", begun
        timed = late or self.process.exitcode == -signal.SIGPROF
        return ("hangs" if timed else "crashes"), last, begun
