"""Random programs that reduce the logits of one head over the classes, other than by a loss alone.

In: a seed. Out: a :class:`Case`, or None where the dice found no legal one. Such a program is a head
(:data:`tests.fuzz.grammar.HEADS`), steps from logits to logits, and reductions of
:mod:`tests.fuzz.reductions`: each gives rows ``r0``, ``r1``, ..., which later steps and reductions
may read. One loss joins the rows with random coefficients; some of them are returned too.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import afterwards, generate, grammar, interrupts, reductions
from .case import Case, Statement
from .generate import TRIES, autocast, environment
from .scope import GLOBALS, Scope

DTYPES = ("", "", "", "", "", ".bfloat16()", ".bfloat16()", ".half()")
INNER = ("aot_eager",) * 140 + ("eager",) * 58 + ("inductor",) * 2
OPTIONS = {name: values for name, values in generate.OPTIONS.items() if name != "fusedce.logits"}
# What the user does before backward: writes to rows that were returned, and to arguments.
WRITES = ("{r}.add_(1)", "{r}.zero_()", "{r}.detach().mul_(2)", "{r}[:1] = 0")
_WRITE = re.compile(r"_\(|\] = ")
CHANGES = ("{a}.detach().zero_()", "{a}.detach().add_(1)")


def head(seed: str) -> Case | None:
    """One program with its session."""
    rng = random.Random(seed)
    inputs = _inputs(rng)
    options: dict[str, Any] = {"fusedce.inner": rng.choice(INNER), "fusedce.min_logits_mb": 0}
    options |= {name: rng.choice(values) for name, values in OPTIONS.items()}
    dynamic = rng.choice((None,) * 9 + (True,))
    if dynamic:
        options["fusedce.inner"] = "aot_eager"
    case = Case(inputs, (), (), (), (), options, dynamic, rng.randrange(1000))
    mode = rng.choice(((),) * 12 + (("torch.no_grad()",),) * 2 + (("torch.inference_mode()",),))
    inside, outside = autocast(rng)
    body = _Body(rng, environment(case), (*outside, *mode), inside)
    if not body.write():
        return None
    if any("halved(" in statement.text for statement in body.statements):
        # of a tensor that the graph makes, Inductor itself reads all 2**24 paths
        options["fusedce.inner"] = "aot_eager"
    returned = body.returned()
    made = Statement(f"{case.arguments} = inputs()")
    call = Statement(f"{', '.join(returned)}, = program({case.arguments})", (*outside, *mode))
    session = [made, call]
    rows = [n for n in returned[1:] if n not in body.scope.classes]
    if rows and rng.random() < 0.2:
        within = () if rng.random() < 0.5 else ("torch.no_grad()",)
        session.append(Statement(rng.choice(WRITES).replace("{r}", rng.choice(rows)), within))
    if rng.random() < 0.1 and not body.checkpoints:
        text = rng.choice(CHANGES).replace("{a}", rng.choice(inputs)[0])
        # logits leave a graph where they are returned, and where a number breaks it
        leave = any(n in body.scope.classes for n in returned)
        leave = leave or any(".item()" in statement.text for statement in body.statements)
        session.append(Statement(text, stale=leave))
    if not mode:
        some = ["loss", *(n for n in returned[1:] if rng.random() < 0.5)]
        for again in range(1 + (rng.random() < 0.1)):  # a second call accumulates gradients
            session += [*[call] * again, *map(Statement, afterwards.passes(rng, some))]
    return Case(
        *(inputs, tuple(body.statements), returned, tuple(session), returned),
        *(options, dynamic, case.seed),
        implementation=rng.choice(("",) * 7 + ("triton",)),
        zeros=True,
        small=rng.random() < 0.5,
    ).trimmed()


def _inputs(rng: random.Random) -> tuple[tuple[str, str], ...]:
    dtype = rng.choice(DTYPES)
    frozen = rng.choice((0.0, 0.0, 0.3, 1.0))
    out = []
    for name, expression in reductions.INPUTS.items():
        grad = "" if rng.random() < frozen else ".requires_grad_()"
        other = rng.choice((dtype, dtype, ""))
        for hole, text in (("dtype", dtype), ("other", other), ("grad", grad)):
            expression = expression.replace(f"{{{hole}}}", text)
        out.append((name, expression))
    return tuple(out)


class _Scope(Scope):
    """With the holes of :mod:`tests.fuzz.reductions`."""

    def hole(self, name: str) -> str:
        filled = getattr(self, f"_{name}", None)
        if filled is None:
            return super().hole(name)
        if self.chosen is None or name in ("f", "lab", "lab1", "keep", "y", "row"):
            return filled()
        if name not in self.chosen:
            self.chosen[name] = filled()
        return self.chosen[name]

    def _like(self, wanted: tuple[int, ...], prefixes: str) -> str:
        names = [
            name
            for name, one in self.env.items()
            if isinstance(one, Tensor) and name[0] in prefixes and tuple(one.shape) == wanted
        ]
        return self.named(*names)

    def _y(self) -> str:
        """A tensor with classes in the place of the logits."""
        names = [n for n in self.classes if self.env[n].shape == self.env[self.z].shape]
        return self.named(*names)

    def _kept(self) -> tuple[int, ...]:
        shape = list(self.env[self.z].shape)
        shape[int(self.hole("d"))] = 1
        return tuple(shape)

    def _keep(self) -> str:
        """A row where the classes are."""
        rows = self.rows_of(self.z, int(self.hole("d")))
        if self.maybe(0.4):
            return f"{self._like(tuple(rows), 'r')}.unsqueeze({self.hole('d')})"
        return self._like(self._kept(), "rs")

    def _row(self) -> str:
        return self._like(tuple(self.rows_of(self.z, int(self.hole("d")))), "r")

    def _f(self) -> str:
        return self.one("0.5", "2.0", "-1.5", "1.25", "3")

    def _lab(self) -> str:
        rows = self.rows_of(self.z, int(self.hole("d")))
        if rows == list(self.env["t"].shape) and self.maybe(0.05):
            return "bits.view(torch.int64)"
        return self.labels(rows)

    def _lab1(self) -> str:
        return f"{self._lab()}.unsqueeze({self.hole('d')})"

    def _labk(self) -> str:
        a, b = self._lab1(), self._lab1()
        return f"torch.cat([{a}, {b}], {self.hole('d')})"

    def _given(self) -> str:
        """Values in the place of the logits."""
        shape = tuple(self.env[self.z].shape)
        if shape == tuple(self.env["q"].shape):
            # of another head, or of a near teacher
            other = self.one("F.linear(x, w2)", "F.linear(x, w * 1.02)")
            return f"{other}.softmax(-1)" if self.maybe(0.3) else "q"
        if len(shape) == 2 and shape[0] * shape[1] == self.env["q"].numel():
            return f"q.reshape(-1, {shape[1]})"
        return f"torch.linspace(0.1, 1.3, {self.env[self.z].numel()}).reshape({shape})"


class _Body:
    """The function that is compiled, while it is written."""

    def __init__(
        self,
        rng: random.Random,
        env: dict[str, Any],
        mode: tuple[str, ...],
        inside: tuple[str, ...],
    ) -> None:
        self.rng = rng
        self.scope = _Scope(rng, env)
        self.scope.outside, self.inside = mode, inside
        self.scope.region = inside
        self.statements: list[Statement] = []
        self.rows: list[str] = []
        self.count = 0
        self.linear = rng.random() < 0.4
        # a checkpoint reads its operands in backward again: nothing writes to them then
        self.checkpoints = rng.random() < 0.08

    def write(self) -> bool:
        """Writes it; whether there is a reduction in it."""
        rng, scope = self.rng, self.scope
        heads = reductions.HEADS if rng.random() < 0.8 else grammar.HEADS
        within = ("torch.no_grad()",) * (rng.random() < 0.04)
        if not self.logits("z", heads, within):
            return False
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            self.step(reductions.BEFORE)
        for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
            if rng.random() < 0.3:
                scope.z = rng.choice(list(scope.classes))
            if rng.random() < 0.06:
                scope.region = (*self.inside, rng.choice(("torch.no_grad()", *interrupts.CONTEXTS)))
            if rng.random() < 0.5:
                self.step(reductions.BETWEEN)
            self.reduction()
            scope.region = self.inside
            if rng.random() < 0.25:
                self.arithmetic()
            if rng.random() < 0.03:
                self.unknown()
            if rng.random() < 0.04:
                self.add(rng.choice(reductions.CHANGES))
        return bool(self.rows) and self.loss()

    def returned(self) -> tuple[str, ...]:
        names = [n for n in self.rows if self.rng.random() < 0.4]
        if self.linear:
            for name in names:
                self.add(f"{name}.detach()", f"m{name}")
            names = [f"m{name}" for name in names]
        if self.rng.random() < 0.15:
            names.append(self.rng.choice(list(self.scope.classes)))
        return "loss", *names

    # ---- statements ------------------------------------------------------------------------------

    def add(self, template: str, name: str = "", within: tuple[str, ...] = ()) -> bool:
        """One statement; its holes are chosen anew, unless they are chosen already."""
        if self.checkpoints and _WRITE.search(template):
            return False
        fresh = self.scope.chosen is None
        if fresh:
            self.scope.chosen = {}
        statement = self.scope.attempt(template, name, within)
        if fresh:
            self.scope.chosen = None
        if statement is not None:
            if self.checkpoints and self.rng.random() < 0.4:
                statement = self._checkpointed(statement)
            self.statements.append(statement)
        return statement is not None

    def _checkpointed(self, statement: Statement) -> Statement:
        """A statement that computes rows, in a checkpoint."""
        name, _, value = statement.text.partition(" = ")
        if not re.fullmatch(r"r\d+", name):
            return statement
        known = self.scope.env.keys() - GLOBALS.keys()
        names = ", ".join(n for n in dict.fromkeys(re.findall(r"\w+", value)) if n in known)
        text = f"{name} = checkpoint(lambda {names}: {value}, {names}, use_reentrant=False)"
        made = replace(statement, text=text)
        return made if self.scope.run(made) else statement

    def logits(self, name: str, table: tuple[str, ...], within: tuple[str, ...] = ()) -> bool:
        """Logits that a statement of a table makes, under a name that may be new."""
        scope = self.scope
        for _ in range(TRIES):
            before = scope.env.get(name)
            if not self.add(self.rng.choice(table), name, within):
                continue
            scope.classes[name] = grammar.V
            usable = scope.sane(name) and grammar.V in scope.env[name].shape
            if usable and scope.env[name].dim() < 4:
                scope.z = name
                return True
            self.statements.pop()
            scope.env[name] = before
            if before is None:
                del scope.env[name], scope.classes[name]
        return False

    def step(self, tables: dict[tuple[str, ...], int]) -> None:
        """From logits to logits, under the same name, a new name, or in place."""
        rng = self.rng
        (table,) = rng.choices(list(tables), list(tables.values()))
        if table is reductions.IN_PLACE:
            self.add(rng.choice(table), within=("torch.no_grad()",) * (rng.random() < 0.05))
            return
        self.count += 1
        name = self.scope.z if rng.random() < 0.5 else f"z{self.count}"
        within = ("torch.no_grad()",) if rng.random() < 0.04 else ()
        self.logits(name, table, within)

    def reduction(self) -> None:
        """Rows, in one statement or several."""
        rng, scope = self.rng, self.scope
        within = ("torch.no_grad()",) if rng.random() < 0.12 else ()
        for _ in range(TRIES):
            count, known = len(self.statements), dict(scope.classes)
            (table,) = rng.choices(
                list(reductions.REDUCTIONS), list(reductions.REDUCTIONS.values())
            )
            scope.chosen = {}
            number = str(self.count)
            self.count += 1
            done = all(
                self.add(template.replace("%", number), within=within)
                for template in rng.choice(table)
            )
            scope.chosen = None
            name = f"r{number}"
            if done and self._comparable(name):
                self.rows.append(name)
                for made in (f"p{number}", f"lp{number}"):
                    one = scope.env.get(made)
                    if isinstance(one, Tensor) and grammar.V in one.shape:
                        scope.classes[made] = grammar.V
                return
            del self.statements[count:]
            scope.classes = known
            for made in (f"r{number}", f"p{number}", f"lp{number}"):
                scope.env.pop(made, None)

    def _comparable(self, name: str) -> bool:
        one = self.scope.env.get(name)
        if not isinstance(one, Tensor) or not one.numel():
            return False
        return not one.is_floating_point() or (
            bool(torch.isfinite(one.detach()).all()) and self.scope.sane(name)
        )

    def arithmetic(self) -> None:
        """A row of rows."""
        env = self.scope.env
        if not self.rows:
            return
        a = self.rng.choice(self.rows)
        b = self.rng.choice([n for n in self.rows if env[n].shape == env[a].shape])
        name = f"r{self.count}"
        self.count += 1
        template = self.rng.choice(reductions.ROWS)
        within = ("torch.no_grad()",) * (self.rng.random() < 0.1)
        if not self.add(template.replace("{r}", a).replace("{o}", b), name, within):
            return
        if self._comparable(name):
            self.rows.append(name)
        else:
            self.statements.pop()
            del env[name]

    def unknown(self) -> None:
        """What no reader understands: the head is declined."""
        self.add(self.rng.choice(reductions.UNKNOWN), f"y{self.count}")

    def loss(self) -> bool:
        """One number of some of the rows."""
        rng, env = self.rng, self.scope.env
        terms = []
        for name in self.rows:
            if rng.random() < 0.8:
                table = reductions.LINEAR if self.linear else reductions.TERMS
                form = rng.choice(table).replace("{r}", name)
                terms.append(form.replace("{s}", str(tuple(env[name].shape))))
        return self.add(" + ".join(terms) or f"{self.rows[-1]}.float().sum()", "loss")
