"""The function of a row-wise program, while it is written; see :mod:`tests.fuzz.rowwise`.

In: dice and the tensors of the program's arguments. Out: statements, each of which was run.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import rowwise_grammar as grammar
from .case import Statement
from .scope import Scope

TRIES = 8  # for each statement
LARGEST = 1e3  # of a value; beyond, rounding errors are all there is to compare
_HOLE = re.compile(r"\{(\w+)\}")
# Tables and their weights: what is made of a tensor with classes, and has classes too.
STEPS = {
    grammar.POINTWISE: 30,
    grammar.OPERANDS: 22,
    grammar.SCANS: 18,
    grammar.ORDERED_SCANS: 9,
    grammar.PAIRS: 14,
    grammar.IN_PLACE: 8,
    grammar.MIXING: 1,
}
REDUCTIONS = {
    grammar.REDUCTIONS: 56,
    grammar.ORDERED: 16,
    grammar.PAIR_REDUCTIONS: 20,
    grammar.COINCIDING: 4,
    grammar.WHOLE: 4,
}
ORDERED = (grammar.ORDERED_SCANS, grammar.ORDERED)


@dataclass(frozen=True)
class _Classes:
    """A tensor with classes.

    Attributes:
        dim: the dimension of the classes.
        rows: a row operand ``{}`` of the shape [n, T], as this tensor's rows are.
    """

    dim: int
    rows: str


class _Unfilled(Exception):  # noqa: N818
    """Nothing fits into a hole."""


class Body:
    """The function that is compiled, while it is written; each statement is run at once."""

    def __init__(
        self,
        rng: random.Random,
        env: dict[str, Any],
        outside: tuple[str, ...],
        inside: tuple[str, ...],
        dynamic: bool,
    ) -> None:
        self.rng, self.inside, self.dynamic = rng, inside, dynamic
        self.scope = Scope(rng, env)
        self.scope.outside = outside
        self.statements: list[Statement] = []
        self.classes: dict[str, _Classes] = {}
        self.rows: list[str] = []
        self.linear = rng.random() < 0.5
        self.count = 0

    def write(self) -> bool:
        """Writes it; whether there is a reduction in it."""
        return self.heads() and self.rest()

    def heads(self) -> bool:
        """Writes the heads; whether there is one."""
        for _ in range(self.rng.choice((1, 1, 1, 2, 2, 3))):
            self.head()
        return bool(self.classes)

    def rest(self) -> bool:
        """Writes what follows the heads; whether there is a reduction in it."""
        rng = self.rng
        for _ in range(rng.choice((1, 2, 3, 4, 5, 7))):
            self.view() if rng.random() < 0.25 else self.step()
        for _ in range(rng.choice((1, 1, 2, 2, 3))):
            self.reduction()
            if rng.random() < 0.3:
                self.step()
            if rng.random() < 0.3:
                self.arithmetic()
        return bool(self.rows) and self.loss()

    def returned(self) -> tuple[str, ...]:
        """The loss, some of the rows, and seldom a tensor with classes."""
        names = [n for n in dict.fromkeys(self.rows) if self.rng.random() < 0.4]
        if self.linear:
            found = []
            for name in names:
                self.add(f"{name}.detach()", f"d{name}")
                found.append(f"d{name}")
            names = found
        if self.rng.random() < 0.08:
            names.append(self.rng.choice(list(self.classes)))
        return "loss", *names

    # ---- statements ------------------------------------------------------------------------------

    def add(self, text: str, name: str = "", within: tuple[str, ...] = ()) -> bool:
        """Runs a statement and writes it down, if that went well."""
        statement = Statement(f"{name} = {text}" if name else text, (*self.inside, *within))
        before = self.scope.env.get(name)
        known = {n: self.scope.env[n] for n in self.classes} if not name else {}
        if not name:  # in place: what is written is a copy until it is known to be sane
            self.scope.env |= {n: t.clone() for n, t in known.items()}
        good = self.scope.run(statement) and (not name or self._tame(name))
        good = good and all(map(self._tame, known))
        if good and not name:
            self.scope.env |= known
            good = self.scope.run(statement)
        if not good:
            self.scope.env |= known or {name: before}
            return False
        self.statements.append(statement)
        return True

    def _tame(self, name: str) -> bool:
        value = self.scope.env.get(name)
        if not isinstance(value, Tensor) or not value.numel():
            return False
        most = value.detach().double().abs().max()
        return bool(most < LARGEST)  # nan is not

    def _contexts(self) -> tuple[str, ...]:
        return ("torch.no_grad()",) * (self.rng.random() < 0.05)

    def _name(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def head(self) -> None:
        """Logits, by one product or several."""
        for _ in range(TRIES):
            text, dim, rows = self.rng.choice(grammar.HEADS)
            x, weight = self.rng.choice(grammar.HIDDEN), self.rng.choice(grammar.WEIGHTS)
            weight = weight.replace("{x}", x)
            name = self._name("z")
            text = text.replace("{x}", x).replace("{w}", weight)
            if self.add(text, name, self._contexts()):
                self.classes[name] = _Classes(dim, rows)
                return

    def view(self) -> None:
        """Rows that are chosen or moved, or the classes at another dimension."""
        for _ in range(TRIES):
            z = self.rng.choice(list(self.classes))
            one = self.classes[z]
            table = grammar.VIEWS.get((self._rank(z), one.dim), ())
            if self.dynamic and self.rng.random() < 0.4:
                # a mask of the rows that lead
                mask = one.rows.format("m")
                if one.dim == self._rank(z) - 1 and one.dim:
                    table = ((f"[{mask}]", 1, f"[{mask}]"),)
            if not table:
                continue
            text, dim, rows = self.rng.choice(table)
            name = self._name("z")
            if self.add(z + text.replace("{v}", str(self._shape(z)[one.dim])), name):
                self.classes[name] = _Classes(dim, one.rows + rows)
                return

    def step(self) -> None:
        """From a tensor with classes to another, or in place."""
        for _ in range(TRIES):
            (table,) = self.rng.choices(list(STEPS), list(STEPS.values()))
            z = self._some()
            if table in ORDERED and not self._distinct(z):
                continue
            text = self._filled(self.rng.choice(table), z)
            if text is None:
                continue
            if table is grammar.IN_PLACE:
                if self.add(text, within=self._contexts()):
                    return
                continue
            before, rows = self.classes[z], self._row_sizes(z, self.classes[z].dim)
            name = z if self.rng.random() < 0.3 else self._name("z")
            old = self.scope.env.get(name)
            if not self.add(text, name, self._contexts()):
                continue
            if self._rank(name) > before.dim and self._row_sizes(name, before.dim) == rows:
                self.classes[name] = before
                return
            self.statements.pop()
            self.scope.env[name] = old

    def reduction(self) -> None:
        """From a tensor with classes to rows."""
        for _ in range(TRIES):
            (table,) = self.rng.choices(list(REDUCTIONS), list(REDUCTIONS.values()))
            z = self._some()
            if table is grammar.ORDERED and not self._distinct(z):
                continue
            text = self._filled(self.rng.choice(table), z)
            name = self._name("r")
            if text is not None and self.add(text, name, self._contexts()):
                self.rows.append(name)
                return

    def arithmetic(self) -> None:
        """Rows of rows."""
        env = self.scope.env
        some = [n for n in self.rows if env[n].is_floating_point()]
        if not some:
            return
        r = self.rng.choice(some)
        q = self.rng.choice([n for n in some if env[n].shape == env[r].shape])
        text = self.rng.choice(grammar.ROWS).replace("{r}", r).replace("{q}", q)
        name = self._name("r")
        if self.add(text.replace("{f}", self._number()), name, self._contexts()):
            self.rows.append(name)

    def loss(self, name: str = "loss") -> bool:
        """One number of some of the rows."""
        terms = []
        table = grammar.LINEAR if self.linear else (*grammar.LINEAR, *grammar.NONLINEAR * 2)
        for r in dict.fromkeys(self.rows):
            if not self.scope.env[r].is_floating_point() or self.rng.random() < 0.2:
                continue
            for _ in range(TRIES):
                operands = self._row_operands(r)
                text = self.rng.choice(table).replace("{r}", r)
                if operands is None and re.search(r"\{[sm]\}", text):
                    continue
                for hole, operand in zip("sm", operands or (), strict=False):
                    text = text.replace(f"{{{hole}}}", operand)
                terms.append(text)
                break
        return bool(terms) and self.add(" + ".join(terms), name)

    def _row_operands(self, r: str) -> tuple[str, str] | None:
        """A factor and a mask of the shape of rows."""
        shape = self.scope.env[r].shape
        for one in self.classes.values():
            found = one.rows.format("s"), one.rows.format("m")
            if getattr(self.scope.value(found[0]), "shape", None) == shape:
                return found
        return None

    # ---- holes -----------------------------------------------------------------------------------

    def _some(self) -> str:
        """A tensor with classes, seldom an old one."""
        names = [n for n in self.classes if self.scope.env[n].is_floating_point()]
        return names[-1] if self.rng.random() < 0.5 else self.rng.choice(names)

    def _shape(self, name: str) -> torch.Size:
        return self.scope.env[name].shape

    def _rank(self, name: str) -> int:
        return self.scope.env[name].dim()

    def _row_sizes(self, name: str, dim: int) -> list[int]:
        return [size for i, size in enumerate(self._shape(name)) if i != dim]

    def _distinct(self, z: str) -> bool:
        """Whether no two classes of a row are equal, or so near that rounding decides."""
        value = self.scope.env[z].detach()
        dim = self.classes[z].dim
        if value.shape[dim] < 2:
            return True
        gaps = value.double().sort(dim).values.diff(dim=dim)
        wide = value.dtype in (torch.float32, torch.float64)
        return bool(gaps.min() > (1e-4 if wide else 0))

    def _number(self) -> str:
        return self.rng.choice(("0.5", "2.0", "1.25", "3", "0.75"))

    def _filled(self, template: str, z: str) -> str | None:
        """A template about a tensor with classes; None where nothing fits."""
        one, rank, v = self.classes[z], self._rank(z), self._shape(z)[self.classes[z].dim]
        d, after = one.dim, rank - 1 - one.dim
        # what stands where the classes are, for a vector of them
        column = "" if not after else f".view(-1{', 1' * after})"
        cut = f"[:{v}]" if v != grammar.V else ""
        values = {
            "z": z,
            "last": f"{z}.movedim({d}, -1)",
            "d": str(d - rank) if self.rng.random() < 0.5 else str(d),
            "e": "0" if d else str(rank - 1),
            "v": str(v),
            "f": self._number(),
            "class1": f"(-1{', 1' * after})",
            "first": z if d == min(1, rank - 1) else f"{z}.movedim({d}, 1)",
            "c": f"c{cut}{column}",
            "cw": f"cw{cut}{column}",
            "order": "order" if v == grammar.V else f"order[order < {v}]",
        }
        rows = {"lab": "t", "row": "s", "mask": "m"}
        for name, operand in rows.items():
            values[name] = one.rows.format(operand)
            values[f"{name}1"] = f"{values[name]}.unsqueeze({d})"

        def fill(match: re.Match[str]) -> str:
            if match[1] == "o":
                return self._other(z)
            if match[1] == "g":
                return self._given(z, cut)
            return values[match[1]]

        try:
            return _HOLE.sub(fill, template)
        except _Unfilled:
            return None

    def _other(self, z: str) -> str:
        """Another tensor with classes of the same shape and, mostly, the same rows."""
        env, one = self.scope.env, self.classes[z]
        names = [
            n
            for n, other in self.classes.items()
            if n != z and env[n].shape == env[z].shape and other.dim == one.dim
        ]
        same = [n for n in names if self.classes[n].rows == one.rows]
        if self.rng.random() < 0.9:
            names = same
        if not names:
            raise _Unfilled
        return self.rng.choice(names)

    def _given(self, z: str, cut: str) -> str:
        """``g`` as the tensor is: its rows chosen alike, its classes at the same place."""
        one = self.classes[z]
        text = one.rows.format("g")
        if cut:
            text = f"{text}[..., {cut[1:]}"
        value = self.scope.value(text)
        if not isinstance(value, Tensor):
            raise _Unfilled
        if one.dim != value.dim() - 1:
            text = f"{text}.movedim(-1, {one.dim})"
        if getattr(self.scope.value(text), "shape", None) != self._shape(z):
            raise _Unfilled
        return text
