"""Writes one random program, a statement at a time.

In: dice, sizes, and the way in which it will run. Out: a :class:`tests.programs.row.Row`, or None
where the dice found nothing that eager runs. Every statement runs as it is written, on real tensors,
so that the next one is chosen by what is there: a graph of tensors with classes (``z1``, ``z2``, ...),
each of which knows the dimension of its classes and what its rows are of the operands' rows; of rows
(``r1``, ...); and of a loss of these rows. In between stand writes, reads and other contexts.
"""

from __future__ import annotations

import random
import re
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import columns, heads, reductions, steps
from tests.fuzz.scope import SCOPE
from tests.fuzz.spellings import all_pointwise_calls
from tests.fuzz.tensors import NUMBERS, Classes, Tensors
from tests.programs.operands import TRAINED, Sizes, make
from tests.programs.row import NAMES, Row
from tests.support.oracle import Way

TRIES = 8  # for each statement
LARGEST = 1e3  # of a value; beyond, rounding errors are all there is to compare
OPERANDS = (
    *("x", "weight", "bias", "tokens", "mask", "temperature", "temperatures", "soft", "teacher"),
    *("factor", "class_weight", "chosen", "down", "up", "teacher_x", "teacher_weight"),
    *("second_weight", "added_weight", "position_weight", "quantised", "scales"),
)
FORMULAS = {reductions.FUNCTIONS: 1, reductions.PICKS: 2, reductions.LOSSES: 2}
SPELLED = tuple(all_pointwise_calls())  # every function of one logit, however it is written
# Tables and their weights: what is made of a tensor with classes, and has classes too.
STEPS = {
    **{steps.POINTWISE: 28, steps.OPERANDS: 30, steps.SCANS: 16, steps.ORDERED_SCANS: 8},
    **{steps.PAIRS: 12, steps.IN_PLACE: 8, steps.MIXING: 1, SPELLED: 6, columns.STEPS: 8},
}
REDUCTIONS = {
    **{reductions.REDUCTIONS: 22, reductions.SUMS: 14, reductions.ELEMENTS: 5},
    **{reductions.FUNCTIONS: 16, reductions.PICKS: 14, reductions.LOSSES: 14},
    **{reductions.ORDERED: 14, reductions.PAIR_REDUCTIONS: 14},
    **{reductions.WHOLE: 4, reductions.COINCIDING: 4},
    **{columns.REDUCTIONS: 20, columns.ORDERED: 4},
}
ORDERED = (steps.ORDERED_SCANS, reductions.ORDERED)


class Writer:
    """One program, while it is written.

    Args:
        rng: the dice.
        sizes: of the operands.
        way: in which it will run.
        outside: whether the rest of the program is outside of the compiled function.
        ranks: whether the classes of its heads are dealt to ranks.
    """

    def __init__(
        self, rng: random.Random, sizes: Sizes, way: Way, outside: bool, ranks: bool = False
    ) -> None:
        self.rng, self.sizes, self.way, self.outside, self.ranks = rng, sizes, way, outside, ranks
        frozen = rng.choice((0.0, 0.2, 0.2, 0.5, 1.0))
        self.trained = tuple(n for n in sorted(TRAINED & {*OPERANDS}) if rng.random() >= frozen)
        letters = {letter.upper(): getattr(sizes, letter) for letter in "btdvn"}
        self.env: dict[str, Any] = {**NAMES, **SCOPE, **letters}
        for name in OPERANDS:
            made = make(name, way.dtype or torch.float32, sizes)
            self.env[name] = made.requires_grad_(name in self.trained)
        self.statements: list[str] = []
        self.classes: dict[str, Classes] = {}
        self.rows: list[str] = []
        self.tensors = Tensors(rng, sizes, self.env, self.classes, self.rows)
        self.linear = rng.random() < 0.5
        self.count = 0

    def write(self, name: str) -> Row | None:
        """The program; None if there is no reduction in it."""
        rng = self.rng
        if not self.outside:
            self.add("x.view(B, T, D)" + " * 1" * (rng.random() < 0.5), "h")
        few = self.ranks  # of a sharded head, all readers have formulas, or none is fused
        for _ in range(1 if few else rng.choice((1, 1, 1, 2, 2, 3))):
            self.head()
        if not self.classes:
            return None
        for _ in range(rng.choice((0, 0, 0, 1) if few else (1, 2, 3, 4, 5, 7))):
            self.view() if rng.random() < 0.25 else self.step()
        for _ in range(1 if few else rng.choice((1, 1, 2, 2, 3))):
            self.reduction()
            if rng.random() < 0.3 and not few:
                self.step()
            if rng.random() < 0.3:
                self.arithmetic()
            if rng.random() < (0.4 if self.outside else 0.15):
                self.aside()
        if not self.rows or not self.loss():
            return None
        text = "\n".join([*self.statements, f"({', '.join(self.returned())},)"])
        return Row(
            name,
            text,
            trained=self.trained,
            sizes=self.sizes,
            drawn=re.search(r"rand|dropout", text) is not None,
            scope=SCOPE,
        )

    def returned(self) -> tuple[str, ...]:
        """The loss, some of the rows, and seldom a tensor with classes."""
        names = [n for n in dict.fromkeys(self.rows) if self.rng.random() < 0.4]
        if self.linear:
            names = [f"{name}.detach()" for name in names]
        if self.rng.random() < 0.08:
            names.append(self.rng.choice(list(self.classes)))
        return "loss", *names

    # ---- statements ------------------------------------------------------------------------------

    def add(self, text: str, name: str = "", context: str = "") -> bool:
        """Runs a statement and writes it down, if that went well."""
        statement = f"{name} = {text}" if name else text
        if context:
            statement = f"with {context}:\n    {statement}"
        before, known = self.env.get(name), {n: self.env[n] for n in self.classes}
        if not name:  # in place: what is written is a copy until it is known to be sane
            self.env |= {n: t.clone() for n, t in known.items()}
        good = self._runs(statement) and all(map(self._tame, [name] if name else known))
        if good and not name:
            self.env |= known
            good = self._runs(statement)
        if not good:
            self.env |= known
            if name and before is None:
                self.env.pop(name, None)
            elif name:
                self.env[name] = before
            return False
        self.statements.append(statement)
        return True

    def _runs(self, statement: str) -> bool:
        try:
            with self.way.around():
                exec(statement, self.env)
        except Exception:
            return False
        return True

    def _tame(self, name: str) -> bool:
        value = self.env.get(name)
        if not isinstance(value, Tensor) or not value.numel():
            return False
        return bool(value.detach().double().abs().max() < LARGEST)  # nan is not

    def _context(self) -> str:
        return self.rng.choice(heads.CONTEXTS) if self.rng.random() < 0.06 else ""

    def _name(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def head(self) -> None:
        """Logits, by one product or several."""
        given = {"s": (2, "{}"), "z": (1, "{}.reshape(-1)"), "q": (1, "{}.reshape(-1)")}
        for _ in range(TRIES):
            if self.outside:
                name = self.rng.choice([*given])
                self.env[name] = eval(heads.GIVEN[name], self.env)
                self.classes[name] = Classes(*given[name])
                return
            text, dim, rows = self.rng.choice(heads.HEADS)
            x, weight = self.rng.choice(heads.HIDDEN), self.rng.choice(heads.WEIGHTS)
            if self.ranks:
                text, dim, rows = "gathered(F.linear(spread({x}), dealt({w})))", 2, "{}"
            name = self._name("z")
            text = text.replace("{w}", weight).replace("{x}", x)
            if self.add(text, name, self._context()):
                self.classes[name] = Classes(dim, rows)
                return

    def view(self) -> None:
        """Rows that are chosen or moved, or the classes at another dimension."""
        for _ in range(TRIES):
            z = self.rng.choice(list(self.classes))
            one, table = self.classes[z], []
            table = heads.VIEWS.get((self.tensors.rank(z), one.dim), [])
            if (
                self.way.dynamic
                and self.rng.random() < 0.4
                and one.dim == self.tensors.rank(z) - 1 > 0
            ):
                mask = one.rows.format("mask")  # of the rows that lead
                table = [(f"[{mask}]", 1, f"[{mask}]")]
            if not table:
                continue
            text, dim, rows = self.rng.choice(table)
            name = self._name("z")
            if self.add(z + text.replace("{v}", str(self.tensors.shape(z)[one.dim])), name):
                self.classes[name] = Classes(dim, one.rows + rows)
                return

    def step(self) -> None:
        """From a tensor with classes to another, or in place."""
        for _ in range(TRIES):
            (table,) = self.rng.choices(list(STEPS), list(STEPS.values()))
            z = self.tensors.some()
            if table in ORDERED and not self.tensors.distinct(z):
                continue
            text = self.tensors.filled(self.rng.choice(table), z)
            if text is None:
                continue
            if table is steps.IN_PLACE:
                if self.add(text, context=self._context()):
                    return
                continue
            before, rows = self.classes[z], self.tensors.row_sizes(z, self.classes[z].dim)
            name = z if self.rng.random() < 0.3 else self._name("z")
            old = self.env.get(name)
            if not self.add(text, name, self._context()):
                continue
            if (
                self.tensors.rank(name) > before.dim
                and self.tensors.row_sizes(name, before.dim) == rows
            ):
                self.classes[name] = before
                return
            self.statements.pop()
            self.env[name] = old

    def reduction(self) -> None:
        """From a tensor with classes to rows, in one statement or several."""
        for _ in range(TRIES):
            tables = FORMULAS if self.ranks else REDUCTIONS
            (table,) = self.rng.choices(list(tables), list(tables.values()))
            z = self.tensors.some()
            if table is reductions.ORDERED and not self.tensors.distinct(z):
                continue
            if table is columns.ORDERED and not self.tensors.distinct(z, of_columns=True):
                continue
            template, number = self.rng.choice(table), self._name("")
            text = self.tensors.filled(template.replace("%", number), z)
            if text is None:
                continue
            name, context, count = f"r{number}", self._context(), len(self.statements)
            parts = text.split("; ") if "%" in template else [f"{name} = {text}"]
            if all(self.add(part, context=context) for part in parts) and self._tame(name):
                self.rows.append(name)
                return
            del self.statements[count:]

    def arithmetic(self) -> None:
        """Rows of rows."""
        some = [n for n in self.rows if self.env[n].is_floating_point()]
        if not some:
            return
        r = self.rng.choice(some)
        p = self.rng.choice([n for n in some if self.env[n].shape == self.env[r].shape])
        text = self.rng.choice(reductions.ROWS).replace("{r}", r).replace("{p}", p)
        name = self._name("r")
        if self.add(text.replace("{f}", self.rng.choice(NUMBERS)), name, self._context()):
            self.rows.append(name)

    def aside(self) -> None:
        """A write, a read, or what a user does, which is not on the way to the loss."""
        kinds = (heads.WRITES, heads.INTEGER_WRITES, heads.READS, heads.USES)
        table = self.rng.choices(kinds, (3, 1, 2, 8 if self.outside else 0))[0]
        for _ in range(TRIES):
            text = self.rng.choice(table).replace("{z}", self.tensors.some())
            text = text.replace("{f}", self.rng.choice(NUMBERS))
            written = self.rng.choice(
                [n for n in (*heads.WRITABLE, *self.classes) if n in self.env]
            )
            if self.outside and written in self.classes and "{a}.data" in text:
                continue  # eager's gradients read what backward cannot see was written
            text = text.replace("{a}", written)
            name = self._name("y") if table is heads.READS else ""
            if all(self.add(part, name, self._context()) for part in text.split("; ")):
                return

    def loss(self) -> bool:
        """One number of some of the rows."""
        terms = []
        table = reductions.LINEAR if self.linear else reductions.LINEAR + reductions.NONLINEAR * 2
        for r in dict.fromkeys(self.rows):
            if not self.env[r].is_floating_point() or self.rng.random() < 0.2:
                continue
            for _ in range(TRIES):
                text = self.rng.choice(table).replace("{r}", r)
                operands = self._row_operands(r)
                if operands is None and re.search(r"\{(row|mask)\}", text):
                    continue
                for hole, operand in zip(("row", "mask"), operands or (), strict=False):
                    text = text.replace(f"{{{hole}}}", operand)
                terms.append(text)
                break
        return bool(terms) and self.add(" + ".join(terms), "loss")

    def _row_operands(self, r: str) -> tuple[str, str] | None:
        """A factor and a mask of the shape of rows."""
        shape = self.env[r].shape
        for one in self.classes.values():
            found = one.rows.format("temperatures.view(B, T)"), one.rows.format("mask")
            if getattr(self.tensors.value(found[0]), "shape", None) == shape:
                return found
        return None
