"""What a program is: one row of a table, as text.

In: a :class:`Row`. Out: a function of named operands, and the head in front of it::

    >>> row = Row("picked", "z.log_softmax(-1).gather(-1, labels[:, None])", of="DPO trainers")
    >>> row.names
    ('x', 'weight', 'labels')
    >>> row.program()(*row.tensors()).shape
    torch.Size([48, 1])

The text is the body of a function, whose last statement is what it returns. In it stand ``z`` (logits
``[N, V]`` of the head), ``s`` (the same as ``[B, T, V]``), ``biased`` and ``capped`` (``s`` of a head
with a bias, or with a soft-cap), ``q`` (a teacher's ``[N, V]``) and the keys of
:data:`tests.programs.operands.OPERANDS`; the sizes ``B``, ``T``, ``N``, ``D``, ``V``; torch's names;
and whatever the module of the row defines.
"""

from __future__ import annotations

import ast
import functools
import linecache
import math
import operator
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.programs.operands import OPERANDS, SIZES, TRAINED, Sizes, make

Function = Callable[..., Any]
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64

# The ways of a program that runs in f32 and in bf16.
IN_BF16 = ("bf16",)
# Those of what is answered of deferred logits: they are not computed.
OUTSIDE = ("outside", "outside under autocast")
# What a program becomes: calls of a formula (class reductions), of a region (a row function), both;
# nothing that is fused; an error, as in eager.
FORMULA, REGION, BOTH = "formula", "region", "formula and region"
NOTHING, RAISES = "nothing", "raises"

# a name in the text → the operands of the head, and its text
HEADS = {
    "z": ("x weight", "F.linear(x, weight)"),
    "s": ("x weight", "F.linear(x.view(B, T, D), weight)"),
    "biased": ("x weight bias", "F.linear(x.view(B, T, D), weight, bias)"),
    "capped": ("x weight", "3 * torch.tanh(F.linear(x.view(B, T, D), weight) / 3)"),
    "q": ("teacher_x teacher_weight", "F.linear(teacher_x, teacher_weight)"),
}
NAMES = {
    **{"torch": torch, "F": F, "nn": nn, "Tensor": Tensor, "aten": torch.ops.aten},
    **{"math": math, "operator": operator, "checkpoint": checkpoint},
}
# The same program in float64: each cast to a narrower dtype is one to float64.
_WIDE = (
    (r"\.(float|half|bfloat16)\(\)", ".double()"),
    (r"torch\.(float32|bfloat16|float16)\b", "torch.float64"),
)


@dataclass(frozen=True)
class Row:
    """One program, and what is expected of it.

    Attributes:
        name: unique in its file.
        text: the body of a function.
        becomes: what it is fused as: ``FORMULA``, ``REGION``, ``BOTH``, ``NOTHING`` or ``RAISES``.
        reason: part of the reason why something is not fused.
        left: the functions that make tensors of the logits' size outside of the operator.
        of: the library or paper whose computation it is.
        trained: the operands that need gradients, all of ``TRAINED`` by default; none for an
            evaluation, which runs under ``no_grad``.
        dtype: of the floating-point operands.
        sizes: of the operands.
        ways: the ways of :mod:`tests.support.oracle` in which it runs beside the first.
        computes: the ways in which deferred logits are computed.
        why: part of the reason why they are.
        never: the ways in which it cannot run, such as a text that reads a number of rows.
        dynamo: settings of ``torch._dynamo.config``.
        drawn: it draws random numbers: eager's answer is the exact one.
        kind: of its module.
        scope: the names of its module.
    """

    name: str
    text: str
    becomes: str = FORMULA
    reason: str = ""
    left: str = ""
    of: str = ""
    trained: tuple[str, ...] | None = None
    dtype: torch.dtype = F32
    sizes: Sizes = SIZES
    ways: tuple[str, ...] = ()
    computes: tuple[str, ...] = ()
    why: str = ""
    never: tuple[str, ...] = ()
    dynamo: Mapping[str, Any] = field(default_factory=dict)
    drawn: bool = False
    kind: str = ""
    scope: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @functools.cached_property
    def _given(self) -> tuple[str, ...]:
        reader = _Reader()
        reader.visit(ast.parse(self.text))
        return tuple(reader.given)

    @property
    def heads(self) -> tuple[str, ...]:
        """The keys of ``HEADS`` in the text."""
        return tuple(name for name in self._given if name in HEADS)

    @property
    def names(self) -> tuple[str, ...]:
        """Keys of ``OPERANDS``, those of the heads first."""
        of_heads = [operand for head in self.heads for operand in HEADS[head][0].split()]
        first = [name for name in ("x", "weight") if name in (*of_heads, *self._given)]
        others = [name for name in self._given if name in OPERANDS]
        return tuple(dict.fromkeys([*first, *of_heads, *others]))

    @property
    def gradients(self) -> tuple[str, ...]:
        """The names of the operands that need gradients."""
        wanted = TRAINED if self.trained is None else self.trained
        return tuple(name for name in self.names if name in wanted)

    def tensors(self, dtype: torch.dtype | None = None, wide: bool = False) -> list[Tensor]:
        """The same tensors at every call.

        Args:
            dtype: of those that hold floating-point numbers; that of the row by default.
            wide: in float64, after they were rounded to ``dtype``.
        """
        made = [make(name, dtype or self.dtype, self.sizes) for name in self.names]
        if wide:
            made = [t.double() if t.is_floating_point() else t for t in made]
        return [
            t.requires_grad_(name in self.gradients and t.is_floating_point())
            for name, t in zip(self.names, made, strict=True)
        ]

    def program(self, wide: bool = False) -> Function:
        """The function of its operands."""
        head, rest = self.head(), self.rest(wide)
        if not self.heads:
            return rest

        def program(*tensors: Tensor) -> Any:
            return rest(*head(*tensors), *tensors)

        return program

    def head(self) -> Function:
        """The function of its operands that returns the logits, a tuple."""
        texts = "".join(f"{HEADS[name][1]}, " for name in self.heads)
        return self._function(self.names, f"return ({texts})", "head")

    def rest(self, wide: bool = False) -> Function:
        """What is behind the heads: a function of the logits and the operands."""
        text = self.text
        for pattern, replacement in _WIDE if wide else ():
            text = re.sub(pattern, replacement, text)
        tree = ast.parse(text)
        last = tree.body[-1]
        if isinstance(last, ast.Expr):
            tree.body[-1] = ast.Return(last.value)
        return self._function((*self.heads, *self.names), ast.unparse(tree), "program")

    def _function(self, names: tuple[str, ...], body: str, called: str) -> Function:
        lines = [f"def {called}({', '.join(names)}):", *body.splitlines()]
        source = "\n    ".join(lines) + "\n"
        file = f"<{self.name}: {called} {zlib.crc32(source.encode())}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        sizes = {letter.upper(): getattr(self.sizes, letter) for letter in "btdvn"}
        own = {name: value for name, value in self.scope.items() if not name.startswith("__")}
        scope = {**NAMES, **own, **sizes}
        exec(compile(source, file, "exec"), scope)
        return scope[called]


class _Reader(ast.NodeVisitor):
    """``given``: the names that a text reads before it assigns to them."""

    def __init__(self) -> None:
        self.given: list[str] = []
        self.own: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.own.add(node.id)
        elif node.id not in (*self.own, *self.given):
            self.given.append(node.id)

    def visit_arg(self, node: ast.arg) -> None:
        self.own.add(node.arg)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._in_turn(node.value, *node.targets)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._in_turn(
            node.value,
            *[ast.Name(n.id, ast.Load()) for n in ast.walk(node.target) if isinstance(n, ast.Name)],
        )

    def visit_For(self, node: ast.For) -> None:
        self._in_turn(node.iter, node.target, *node.body, *node.orelse)

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> None:
        for one in node.generators:
            self._in_turn(one.iter, one.target, *one.ifs)
        self.visit(node.elt)

    visit_GeneratorExp = visit_SetComp = visit_ListComp  # noqa: N815

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.own.add(node.name)
        outer = set(self.own)
        self.visit(node.args)
        for statement in node.body:
            self.visit(statement)
        self.own = outer  # its own names are not those of the text

    def visit_Lambda(self, node: ast.Lambda) -> None:
        outer = set(self.own)
        self._in_turn(node.args, node.body)
        self.own = outer

    def _in_turn(self, *nodes: ast.AST) -> None:
        for node in nodes:
            self.visit(node)


def becoming(rows: Sequence[Row], others: Mapping[str, Sequence[str]]) -> tuple[Row, ...]:
    """Rows of which some are fused in another way than the rest of their family: the names of
    ``others``, by what they become."""
    found = {name: becomes for becomes, names in others.items() for name in names}
    assert found.keys() <= {row.name for row in rows}, found
    return tuple(replace(row, becomes=found.get(row.name, row.becomes)) for row in rows)
