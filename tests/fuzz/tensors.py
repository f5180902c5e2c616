"""The tensors of a random program while it is written, and the holes of templates about them.

In: names with their values, and which of them have classes. Out: templates of
:mod:`tests.fuzz.steps` and :mod:`tests.fuzz.reductions` with every hole filled::

    Tensors(rng, sizes, env, {"z1": Classes(2, "{}")}).filled("{z}.gather({d}, {lab1})", "z1")
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import columns, reductions
from tests.programs.operands import Sizes

NUMBERS = ("0.5", "2.0", "1.25", "3", "0.75", "-1.5")
_HOLE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Classes:
    """A tensor with classes: their dimension, and its rows as a format of an operand ``[B, T]``."""

    dim: int
    rows: str


class _Unfilled(Exception):  # noqa: N818
    """Nothing fits into a hole."""


@dataclass
class Tensors:
    """The names of a program with their values, those that have classes, and its results."""

    rng: random.Random
    sizes: Sizes
    env: dict[str, Any]
    classes: dict[str, Classes]
    results: list[str] = field(default_factory=list)

    def value(self, text: str) -> Any:
        try:
            with torch.no_grad():
                return eval(text, self.env)
        except Exception:
            return None

    def some(self) -> str:
        """A tensor with classes, seldom an old one."""
        names = [n for n in self.classes if self.env[n].is_floating_point()]
        return names[-1] if self.rng.random() < 0.5 else self.rng.choice(names)

    def shape(self, name: str) -> torch.Size:
        return self.env[name].shape

    def rank(self, name: str) -> int:
        return self.env[name].dim()

    def row_sizes(self, name: str, dim: int) -> list[int]:
        return [size for i, size in enumerate(self.shape(name)) if i != dim]

    def distinct(self, z: str, of_columns: bool = False) -> bool:
        """Whether no two classes of a row, or no two rows of a class, are equal, or so near that
        rounding decides."""
        value, dim = self.env[z].detach(), self.classes[z].dim
        if of_columns:
            value, dim = value.movedim(dim, 0).flatten(1), 1
        if value.shape[dim] < 2:
            return True
        gaps = value.double().sort(dim).values.diff(dim=dim)
        wide = value.dtype in (torch.float32, torch.float64)
        return bool(gaps.min() > (1e-4 if wide else 0))

    def filled(self, template: str, z: str) -> str | None:
        """A template about a tensor with classes; None where nothing fits."""
        one, rank, v = self.classes[z], self.rank(z), self.shape(z)[self.classes[z].dim]
        d, after = one.dim, rank - 1 - one.dim
        # what stands where the classes are, for a vector of them
        column = "" if not after else f".view(-1{', 1' * after})"
        cut = f"[:{v}]" if v != self.sizes.v else ""
        flat = f"{z}.movedim({d}, -1).reshape(-1, {v})"
        values = {
            **{"z": z, "v": str(v), "e": "0" if d else str(rank - 1)},
            "d": str(d - rank) if self.rng.random() < 0.5 else str(d),
            "f": self.rng.choice(NUMBERS),
            "last": f"{z}.movedim({d}, -1)" if after else z,
            "first": z if d == min(1, rank - 1) else f"{z}.movedim({d}, 1)",
            "flat": z if (rank, d) == (2, 1) else flat,
            "n": self.rng.choice((f"{self.env[z].numel() // v}", f"len({flat})")),
            "class1": f"(-1{', 1' * after})",
            "c": f"factor{cut}{column}",
            "cw": f"class_weight{cut}{column}",
            "rows": str([i for i in range(rank) if i != d]),
            "m": self.rng.choice(columns.MATRICES),
            "t": self.rng.choice(columns.TRANSPOSES),
            "col": self.rng.choice(columns.ROWS),
            "order": "chosen" if not cut else f"chosen[chosen < {v}]",
            "args": self._arguments(v),
            "reduction": self.rng.choice(reductions.ARGUMENTS["reduction"]),
        }
        operands = {"lab": "(tokens % 7)", "row": "temperatures.view(B, T)", "mask": "mask"}
        for name, operand in operands.items():
            values[name] = one.rows.format(operand)
            values[f"{name}1"] = f"{values[name]}.unsqueeze({d})"
        values["labk"] = f"torch.cat([{values['lab1']}, {values['lab1']} // 2], {d})"
        if re.search(r"\{(flat|m|t)\}", template):
            values["lab"] += ".reshape(-1)"

        def fill(match: re.Match[str]) -> str:
            if match[1] == "o":
                return self._other(z)
            if match[1] == "k":
                return self._column(v)
            if match[1] in "gq":
                return self._given("teacher" if match[1] == "g" else "soft", z, cut)
            return values[match[1]]

        try:
            while _HOLE.search(template):
                template = _HOLE.sub(fill, template)
        except _Unfilled:
            return None
        return template

    def _arguments(self, v: int) -> str:
        return "".join(
            f", {name}={self.rng.choice(values).replace('{v}', str(v))}"
            for name, values in reductions.ARGUMENTS.items()
            if self.rng.random() < 0.35
        )

    def _other(self, z: str) -> str:
        """Another tensor with classes of the same shape and, mostly, the same rows."""
        one = self.classes[z]
        names = [
            n
            for n, other in self.classes.items()
            if n != z and self.shape(n) == self.shape(z) and other.dim == one.dim
        ]
        if self.rng.random() < 0.9:
            names = [n for n in names if self.classes[n].rows == one.rows]
        if not names:
            raise _Unfilled
        return self.rng.choice(names)

    def _column(self, v: int) -> str:
        """A result with a value for each class."""
        names = [n for n in self.results if self.env[n].shape in ((v,), (1, v))]
        if not names:
            raise _Unfilled
        return self.rng.choice(names)

    def _given(self, name: str, z: str, cut: str) -> str:
        """Given values as the tensor is: its rows chosen alike, its classes at the same place."""
        one = self.classes[z]
        text = one.rows.format(f"{name}.view(B, T, -1)")
        text = f"{text}[..., {cut[1:]}" if cut else text
        value = self.value(text)
        if not isinstance(value, Tensor):
            raise _Unfilled
        if one.dim != value.dim() - 1:
            text = f"{text}.movedim(-1, {one.dim})"
        if getattr(self.value(text), "shape", None) != self.shape(z):
            raise _Unfilled
        return text
