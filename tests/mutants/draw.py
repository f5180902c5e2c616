"""The mutants of a tree: one changed line each, drawn from a seed.

In: the sources of the packages of ``PACKAGES``. Out: a list of ``Mutant``, the same for the same
sources, count and seed. What only a reader sees (docstrings, texts of errors and of the log,
annotations, asserts) is not changed.
"""

from __future__ import annotations

import ast
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("capture", "rewrite", "rows", "lower", "region", "op", "aten", "deferred", "plan")
LEAST = 8  # mutants of a package, however short it is

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
CONSTANTS = {"0": "1", "1": "0", "2": "1", "True": "False", "False": "True"}
CASTS = {"to", "float", "double", "half", "bfloat16", "type_as"}
SWAPPED = {ast.Sub: "-", ast.Div: "/", ast.FloorDiv: "//"}
LOGS = {"debug", "info", "warning", "warn", "exception"}
# Keyword arguments that change no value: a tuple that is too short for ``zip`` is an error either way.
NO_MATTER = {"strict", "stacklevel", "frozen", "slots", "eq", "repr", "kw_only", "maxsize"}
TEXTS = {"__repr__", "__str__"}
ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)


@dataclass(frozen=True)
class Mutant:
    file: str  # relative to the tree, with slashes
    line: int
    statement: int  # the line where the innermost statement begins, which has this line
    function: str  # "Class.function", or "" where the module itself runs the line
    kind: str
    old: str  # the line
    new: str

    @property
    def package(self) -> str:
        return self.file.split("/")[1]

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What stays the same when lines move."""
        return self.file, self.function, self.old.strip(), self.new.strip()

    def applied(self, tree: Path) -> str:
        """The source with the changed line."""
        lines = (tree / self.file).read_text().split("\n")
        assert lines[self.line - 1] == self.old
        lines[self.line - 1] = self.new
        return "\n".join(lines)

    def changes(self, tree: Path) -> bool:
        """Whether this is another program, and one that Python compiles."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarning: "is not" with a literal
            try:
                new = ast.parse(self.applied(tree))
                compile(new, self.file, "exec")
            except SyntaxError:
                return False
        return ast.dump(new) != ast.dump(ast.parse((tree / self.file).read_text()))


def enclosed(text: str) -> str:
    """In parentheses, where an operator beside it would take only a part of it."""
    node = ast.parse(f"({text})", mode="eval").body
    return text if isinstance(node, ATOMS) or node.col_offset > 1 else f"({text})"


class Candidates(ast.NodeVisitor):
    """All mutants of one file."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.lines = [line.encode() for line in text.split("\n")]  # columns of ast count bytes
        self.found: list[Mutant] = []
        self.scope: list[str] = []
        self.inside = False  # a function
        self.statement = 0
        self.last: ast.stmt | None = None  # of the function
        self.visit(ast.parse(text))

    # ------------------------------------------------------------ where we are

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Assert, ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
            return
        outer = self.statement
        if isinstance(node, ast.stmt):
            self.statement = node.lineno
        if (edits := EDITS.get(type(node))) is not None:
            for edit in edits(self, node):
                self.add(*edit)
        super().visit(node)
        self.statement = outer

    def add(self, kind: str, line: int, start: int, end: int, text: str) -> None:
        old = self.lines[line - 1]
        new = old[:start] + text.encode() + old[end:]
        function = ".".join(self.scope) if self.inside else ""
        self.found.append(
            Mutant(self.file, line, self.statement, function, kind, old.decode(), new.decode())
        )

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in TEXTS:
            return
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        outer = self.inside, self.last
        self.scope.append(node.name)
        self.inside, self.last = True, node.body[-1]
        for statement in node.body:
            self.visit(statement)
        self.scope.pop()
        self.inside, self.last = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.append(node.name)
        outer, self.inside = self.inside, False
        for statement in node.body:
            self.visit(statement)
        self.scope.pop()
        self.inside = outer

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.dump(node.test):
            self.generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        outer = self.inside, self.statement
        self.scope.append("<lambda>")
        self.inside, self.statement = True, node.body.lineno
        self.visit(node.body)
        self.scope.pop()
        self.inside, self.statement = outer

    def visit_Call(self, node: ast.Call) -> None:
        if not (isinstance(node.func, ast.Attribute) and node.func.attr in LOGS):
            self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in NO_MATTER:
            self.visit(node.value)

    # ------------------------------------------------------------ what is changed

    def text(self, line: int, start: int, end: int) -> str:
        return self.lines[line - 1][start:end].decode()

    def of_compare(self, node: ast.Compare) -> Iterator[tuple]:
        left, right, op = node.left, node.comparators[0], type(node.ops[0])
        if left.end_lineno == right.lineno:
            yield from self.token("comparison", left, right, *COMPARISONS[op])

    def token(
        self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str
    ) -> Iterator[tuple]:
        """The operator between two operands of one line."""
        start, end = left.end_col_offset or 0, right.col_offset
        between = self.text(right.lineno, start, end)
        yield kind, right.lineno, start, end, between.replace(old, new, 1)

    def of_constant(self, node: ast.Constant) -> Iterator[tuple]:
        text = self.text(node.lineno, node.col_offset, node.end_col_offset or 0)
        if type(node.value) in (int, bool) and text in CONSTANTS:
            yield "constant", node.lineno, node.col_offset, node.end_col_offset, CONSTANTS[text]

    def of_bool_op(self, node: ast.BoolOp) -> Iterator[tuple]:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        left, right = node.values[:2]
        if len(node.values) == 2 and left.end_lineno == right.lineno:
            yield from self.token("and/or", left, right, old, new)
        for value in node.values:
            if value.lineno == value.end_lineno:
                without = str(old == "and")
                yield "condition", value.lineno, value.col_offset, value.end_col_offset, without

    def of_call(self, node: ast.Call) -> Iterator[tuple]:
        func = node.func
        if not isinstance(func, ast.Attribute) or func.attr not in CASTS:
            return
        dot = (func.end_col_offset or 0) - len(func.attr) - 1
        if node.lineno == node.end_lineno and self.text(node.lineno, dot, dot + 1) == ".":
            value = self.text(node.lineno, node.col_offset, dot)
            yield "cast", node.lineno, node.col_offset, node.end_col_offset, value

    def of_bin_op(self, node: ast.BinOp) -> Iterator[tuple]:
        if node.lineno != node.end_lineno:
            return
        if isinstance(node.op, ast.Mult):
            token = "*"
        elif not (token := SWAPPED.get(type(node.op))):
            return
        start, end = node.left.end_col_offset or 0, node.right.col_offset
        at = start + self.text(node.lineno, start, end).index(token)
        left = self.text(node.lineno, node.col_offset, at).rstrip()
        right = self.text(node.lineno, at + len(token), node.end_col_offset or 0).lstrip()
        if token == "*":
            yield "factor", node.lineno, node.col_offset, node.end_col_offset, left
            return
        swapped = f"{enclosed(right)} {token} {enclosed(left)}"
        yield "operands", node.lineno, node.col_offset, node.end_col_offset, swapped

    def of_branch(self, node: ast.If) -> Iterator[tuple]:
        test = node.test
        if test.lineno != test.end_lineno or "TYPE_CHECKING" in ast.dump(test):
            return
        text = self.text(test.lineno, test.col_offset, test.end_col_offset or 0)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            text = text.removeprefix("not ")
        else:
            text = f"not {enclosed(text)}"
        yield "if", test.lineno, test.col_offset, test.end_col_offset, text

    def of_exit(self, node: ast.Return) -> Iterator[tuple]:
        if node is not self.last and node.lineno == node.end_lineno:
            yield "exit", node.lineno, node.col_offset, node.end_col_offset, "pass"

    def of_in_place(self, node: ast.AugAssign) -> Iterator[tuple]:
        counts = isinstance(node.value, ast.Constant)  # without which a loop never ends
        if not counts and node.lineno == node.end_lineno:
            yield "sum", node.lineno, node.col_offset, node.end_col_offset, "pass"

    def of_statement(self, node: ast.Expr) -> Iterator[tuple]:
        """A part that is not added: ``out.add_(part)``, ``parts.append(part)``."""
        func = node.value.func if isinstance(node.value, ast.Call) else None
        if not isinstance(func, ast.Attribute) or node.lineno != node.end_lineno:
            return
        if re.fullmatch(r"\w*add\w*_|append|extend", func.attr):
            yield "sum", node.lineno, node.col_offset, node.end_col_offset, "pass"


EDITS: dict[type[ast.AST], Callable[..., Iterator[tuple]]] = {
    ast.Compare: Candidates.of_compare,
    ast.Constant: Candidates.of_constant,
    ast.BoolOp: Candidates.of_bool_op,
    ast.Call: Candidates.of_call,
    ast.BinOp: Candidates.of_bin_op,
    ast.If: Candidates.of_branch,
    ast.Return: Candidates.of_exit,
    ast.AugAssign: Candidates.of_in_place,
    ast.Expr: Candidates.of_statement,
}


def candidates(tree: Path, package: str) -> list[Mutant]:
    paths = sorted((tree / "fxpass" / package).rglob("*.py"))
    names = [path.relative_to(tree).as_posix() for path in paths]
    return [m for name in names for m in Candidates(name, (tree / name).read_text()).found]


def shares(tree: Path, count: int) -> dict[str, int]:
    """Mutants for each package: in proportion to its lines, but no fewer than ``LEAST``."""
    lines = {
        package: sum(
            len(path.read_text().splitlines()) for path in (tree / "fxpass" / package).rglob("*.py")
        )
        for package in PACKAGES
    }
    least = min(LEAST, count // len(PACKAGES))
    found: dict[str, int] = dict.fromkeys(PACKAGES, least)
    while sum(found.values()) < count:
        found[max(PACKAGES, key=lambda p: lines[p] / (found[p] + 1))] += 1
    return found


def draw(tree: Path, count: int, seed: int) -> list[Mutant]:
    """A kind is drawn first, then a line: there are ten times as many constants as sums. At most one
    mutant a line. The order is drawn, too: the first 50 of 100 are spread as all of them."""
    drawn = []
    for package, wanted in shares(tree, count).items():
        rng = random.Random(f"{seed} {package}")
        left: dict[str, list[Mutant]] = {}
        for mutant in candidates(tree, package):
            left.setdefault(mutant.kind, []).append(mutant)
        taken: list[Mutant] = []
        while len(taken) < wanted and left:
            kind = rng.choice(sorted(left))
            mutant = left[kind].pop(rng.randrange(len(left[kind])))
            if not left[kind]:
                del left[kind]
            other = all((m.file, m.line) != (mutant.file, mutant.line) for m in taken)
            if other and mutant.changes(tree):
                taken.append(mutant)
        drawn += taken
    random.Random(seed).shuffle(drawn)
    return drawn
