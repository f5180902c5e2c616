"""The state of a program that is being written: its names with their values, and the holes.

Every statement is run as it is written, on real tensors, so that the next one can be chosen by what
is there: shapes, dtypes, where the classes are. What raises is not written.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import grammar, interrupts
from .case import PREAMBLE, Statement, lines
from .spellings import all_pointwise_calls

POINTWISE_CALLS = all_pointwise_calls()
IN_PLACE_CALLS = [c for c in POINTWISE_CALLS if re.search(r"_\(|inplace=True|, True\)", c)]
GLOBALS: dict[str, Any] = {}
exec(PREAMBLE, GLOBALS)
_HOLE = re.compile(r"\{(\w+)\}")
_MOST = 1e6  # beyond, rounding errors are all there is to compare

# The labels of some rows; which of them fit is seen by their shapes.
LABELS = (
    *("t", "t.view(-1)", "t.reshape(-1)", "t.flatten()", "t.T", "t.T.reshape(-1)", "t[:, 1:]"),
    *("t[:, :-1]", "t[:, 1:].reshape(-1)", "t[:, 1:].contiguous().view(-1)", "t[0]", "t[:, 0]"),
    *("t[:, -1]", "t[1:]", "t[::2]", "t.unsqueeze(0)", "t.unsqueeze(1)", "t[m]", "t.t()"),
    "t[:, m[0]]",
    *("t[:, :-1].flatten()", "t[0, :1]", "t[:1]", "t[1]"),
)


class Scope:
    """Names and values while a program is written.

    Attributes:
        env: what the statements see.
        classes: of each tensor of logits, how many classes it has.
        region: contexts around every statement that is written.
        outside: contexts in which the function is called.
        z: the name of the logits that the next statements are about.
    """

    def __init__(self, rng: random.Random, env: dict[str, Any]) -> None:
        self.rng, self.env = rng, GLOBALS | env
        self.classes: dict[str, int] = {}
        self.region: tuple[str, ...] = ()
        self.outside: tuple[str, ...] = ()
        self.z = "z"
        self.chosen: dict[str, str] | None = None
        self.target = ""

    # ---- writing ---------------------------------------------------------------------------------

    def attempt(
        self, template: str, name: str = "", within: Sequence[str] = (), stale: bool = False
    ) -> Statement | None:
        """The statement that a template gives, with its value assigned to ``name``; None if it
        cannot be run here."""
        try:
            text = self.fill(template)
        except _NoChoice:
            return None
        within = (*self.region, *within)
        statement = Statement(f"{name} = {text}" if name else text, within, stale)
        return statement if self.run(statement) else None

    def run(self, statement: Statement) -> bool:
        """Runs a statement; whether that went well."""
        around = Statement(statement.text, (*self.outside, *statement.within))
        try:
            exec("\n".join(lines([around])), self.env)
        except Exception:
            return False
        return True

    def value(self, expression: str) -> Any:
        """What an expression is, without a trace; None if it raises."""
        try:
            with torch.no_grad():
                return eval(expression, self.env)
        except Exception:
            return None

    def sane(self, name: str) -> bool:
        """Whether a name holds floating-point numbers that can be compared."""
        value = self.env.get(name)
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            return False
        finite = value.detach().float().nan_to_num(0.0, 0.0, 0.0)
        return float(finite.abs().max()) < _MOST

    def class_dim(self, name: str) -> int | None:
        """Where the classes of a tensor of logits are."""
        shape = self.env[name].shape
        places = [i for i, size in enumerate(shape) if size == self.classes[name]]
        return places[-1] if places else None

    # ---- holes -----------------------------------------------------------------------------------

    def fill(self, template: str) -> str:
        """The template with every hole filled."""
        while _HOLE.search(template):
            template = _HOLE.sub(lambda match: self.hole(match[1]), template)
        return template

    def hole(self, name: str) -> str:
        if self.chosen is None or name in _FRESH:
            return HOLES[name](self)
        if name not in self.chosen:
            self.chosen[name] = HOLES[name](self)
        return self.chosen[name]

    def one(self, *options: str) -> str:
        return self.rng.choice(options)

    def maybe(self, probability: float) -> bool:
        return self.rng.random() < probability

    def named(self, *names: str) -> str:
        """One of the names that exist."""
        there = [n for n in names if isinstance(self.env.get(n), Tensor)]
        if not there:
            raise _NoChoice
        return self.rng.choice(there)

    # ---- what a loss takes -----------------------------------------------------------------------

    def logits_of_loss(self) -> str:
        """The logits with their classes where ``F.cross_entropy`` has them."""
        z, dim, v = self.z, self.class_dim(self.z), self.classes[self.z]
        rank = self.env[z].dim()
        if dim is None:
            raise _NoChoice
        forms = []
        if dim == min(1, rank - 1):
            forms += [z] * 3
        if dim == rank - 1 and rank > 1:
            forms += [f"{z}.reshape(-1, {v})"] * 3 + [f"{z}.view(-1, {v})", f"{z}.flatten(0, -2)"]
            forms += [f"{z}.transpose(1, -1)", f"{z}[..., :-1, :].reshape(-1, {v})"]
        if dim != 1 and rank > 1:
            forms += [f"{z}.movedim({dim}, 1)"]
        return self.rng.choice(forms)

    def labels(self, shape: Sequence[int]) -> str:
        """Labels of rows of this shape."""
        fitting = [e for e in LABELS if getattr(self.value(e), "shape", None) == torch.Size(shape)]
        if fitting:
            return self.rng.choice(fitting)
        rows = 1
        for size in shape:
            rows *= size
        return f"(torch.arange({rows}) % 7).reshape({tuple(shape)})"

    def shape(self, expression: str) -> torch.Size:
        value = self.value(expression)
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise _NoChoice
        return value.shape

    def rows_of(self, expression: str, dim: int) -> list[int]:
        shape = self.shape(expression)
        return [size for i, size in enumerate(shape) if i != dim % len(shape)]


class _NoChoice(Exception):  # noqa: N818
    """A hole has nothing to be filled with."""


_FRESH = {"f", "p", "j", "true"}  # anew at each place


def _x(s: Scope) -> str:
    return s.named("h") if s.maybe(0.6) and isinstance(s.env.get("h"), Tensor) else s.named("x")


def _x2(s: Scope) -> str:
    x = s.hole("x")
    forms = [f"{x}.reshape(-1, 4)"] * 2 + [f"{x}.flatten(0, 1)", f"{x}[0]", f"{x}[:, 0]"]
    return x if s.env[x].dim() == 2 else s.rng.choice(forms)


def _w(s: Scope) -> str:
    x = s.hole("x") if s.chosen is not None else "x"
    w = s.one("w", "w", "w", "w2")
    return s.one(w, w, w, w, f"{w}.to({x}.dtype)", f"{w}.bfloat16()", f"{w}.detach()")


def _writable(s: Scope) -> str:
    return s.named(*interrupts.WRITABLE)


def _alias(s: Scope) -> str:
    a = s.hole("a")
    return s.rng.choice(interrupts.ALIASES).replace("{a}", a)


def _arguments(s: Scope) -> str:
    out = ""
    for name, values in s.rng.sample(grammar.ARGUMENTS, len(grammar.ARGUMENTS)):
        if s.maybe(0.35):
            out += f", {name}={s.rng.choice(values)}"
    return out


def _nll(s: Scope) -> str:
    reduction = s.one("", ", reduction='sum'", ", reduction='none'", ", ignore_index=2")
    return reduction + s.one("", "", ", weight=cw[:{V}].to({c}.dtype)")


def _two_dimensional(s: Scope) -> str:
    dim, rank = s.class_dim(s.z), s.env[s.z].dim()
    if dim is None or dim != rank - 1 or rank < 2:
        raise _NoChoice
    return s.z if rank == 2 else f"{s.z}.reshape(-1, {s.classes[s.z]})"


def _probabilities(s: Scope) -> str:
    c, v = s.hole("c"), s.classes[s.z]
    forms = [f"torch.rand_like({c}, dtype=torch.float).to({c}.dtype).softmax({s.hole('cd')})"]
    if len(s.shape(c)) == 2 and s.shape(c).numel() == s.env["q"].numel():
        forms += [f"q.reshape(-1, {v})"] * 3
    if len(s.shape(c)) == 2:
        one = f"F.one_hot({s.hole('l')}, {v})"
        forms += [f"{one}.to({c}.dtype)", f"({one} - {one}.flip(0)).to({c}.dtype)"]
    return s.rng.choice(forms)


def _mask_of_labels(s: Scope) -> str:
    mask = re.sub(r"\bt\b", "m", s.hole("l"))
    return f"{mask}" if "arange" not in mask else f"({mask} > 0)"


def _class_dim(s: Scope) -> str:
    dim = s.class_dim(s.z)
    if dim is None:
        raise _NoChoice
    return s.one(str(dim), str(dim - s.env[s.z].dim()))


def _bias(s: Scope) -> str:
    """Of x's dtype: for another, eager's result depends on the strides of x (see the package)."""
    plain = "b" if s.env["b"].dtype == s.env["x"].dtype else "b.to({x}.dtype)"
    return s.one(*[plain] * 3, *["b.to({x}.dtype)"] * 3)


def _in_place(s: Scope) -> str:
    return s.rng.choice(IN_PLACE_CALLS).replace("{z}", s.hole("A"))


HOLES: dict[str, Callable[[Scope], str]] = {
    # numbers
    "f": lambda s: s.one("0.5", "2.0", "-1.5", "1.25", "3", "tau"),
    "p": lambda s: s.one("0.7", "2.0", "4", "1.0", "tau"),
    "j": lambda s: s.one("0", "1", "-1"),
    "true": lambda s: s.one("True", "True", "True", "False"),
    # tensors
    "x": _x,
    "x2": _x2,
    "w": _w,
    "b": lambda s: s.one("b", "b", "b", "b.to({x}.dtype)", "b.bfloat16()", "b.float()"),
    "bias": _bias,
    "z": lambda s: s.z,
    "V": lambda s: str(s.classes[s.z]),
    "a": _writable,
    "A": _alias,
    "o": lambda s: s.named(*s.env["returned"]),
    # losses
    "c": Scope.logits_of_loss,
    "cd": lambda s: s.one("1", "1", "-1") if len(s.shape(s.hole("c"))) == 2 else "1",
    "l": lambda s: s.labels(s.rows_of(s.hole("c"), min(1, len(s.shape(s.hole("c"))) - 1))),
    "d": _class_dim,
    "u": lambda s: f"{s.labels(s.rows_of(s.z, int(s.hole('d'))))}.unsqueeze({s.hole('d')})",
    "z2": _two_dimensional,
    "l2": lambda s: s.labels(s.rows_of(s.hole("z2"), 1)),
    "N": lambda s: s.one(
        str(s.shape(s.hole("z2"))[0]), "{z2}.shape[0]", "{l2}.shape[0]", "{l2}.numel()"
    ),
    "neg": lambda s: s.one("-1", "-1", "-2", "-11"),
    "q": _probabilities,
    "qz": lambda s: (
        f"torch.rand_like({s.z}, dtype=torch.float).to({s.z}.dtype).softmax({s.hole('d')})"
    ),
    "lm": _mask_of_labels,
    "args": _arguments,
    "nll": _nll,
    "ii": lambda s: s.one("-100", "0", "2"),
    "ls": lambda s: s.one("0.0", "0.1", "0.5"),
    "reduction": lambda s: s.one("'none'", "'mean'", "'sum'"),
    "in_place": _in_place,
    "pointwise": lambda s: s.rng.choice(POINTWISE_CALLS),
}
