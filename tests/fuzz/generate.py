"""Random programs: a seed in, a :class:`Case` out, or None where the dice found no legal one."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

from torch import Tensor

from . import afterwards, grammar, interrupts
from .case import Case, Statement
from .scope import Scope

DTYPES = ("", "", "", "", "", ".bfloat16()", ".bfloat16()", ".half()", ".double()")
OPTIONS = {
    "fusedce.logits": ("auto", "auto", "defer", "defer", "keep"),
    "fusedce.strategy": ("auto", "chunked", "tiled"),
    "fusedce.memory_mb": (0, 0, 1),
    "fusedce.accumulate": ("auto", "auto", "float32"),
}
INNER = ("eager",) * 3 + ("aot_eager",)
TRIES = 6  # for each statement


def program(seed: str) -> Case | None:
    """One program with its session."""
    rng = random.Random(seed)
    inputs = _inputs(rng)
    dynamic = rng.choice((None,) * 19 + (True,))
    inner = rng.choice(INNER[-2:] if dynamic else INNER)
    options: dict[str, Any] = {"fusedce.inner": inner, "fusedce.min_logits_mb": 0}
    options |= {name: rng.choice(values) for name, values in OPTIONS.items()}
    case = Case(inputs, (), (), (), (), options, dynamic, rng.randrange(1000))
    mode = rng.choice(((),) * 8 + (("torch.no_grad()",),) * 2 + (("torch.inference_mode()",),))
    inside, outside = autocast(rng)
    env = environment(case)
    before = _before(rng, env)
    body = _Body(rng, env, (*outside, *mode))
    body.scope.region = inside
    if not body.write():
        return None
    case = Case(
        *(inputs, tuple(body.statements), tuple(body.returned(rng)), (), ()),
        *(options, dynamic, case.seed),
        small=rng.random() < 0.5,
    )
    return _with_session(case, rng, before, mode, outside).trimmed()


def autocast(rng: random.Random) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The contexts in a function, and around its call: autocast in one of the two, or in none."""
    context = (rng.choice(grammar.AUTOCAST),)
    return rng.choice(((context, ()), ((), context), *[((), ())] * 6))


def _inputs(rng: random.Random) -> tuple[tuple[str, str], ...]:
    dtype = rng.choice(DTYPES)
    bias_dtype = rng.choice((dtype, dtype, dtype, ""))
    grads = rng.choice(("all", "all", "all", "some", "none"))
    out = []
    for name, expression in grammar.INPUTS.items():
        grad = grads == "all" or (grads == "some" and rng.random() < 0.5)
        holes = {"dtype": dtype, "bias_dtype": bias_dtype}
        holes["grad"] = ".requires_grad_()" if grad else ""
        for hole, value in holes.items():
            expression = expression.replace(f"{{{hole}}}", value)
        out.append((name, expression))
    return tuple(out)


def environment(case: Case) -> dict[str, Any]:
    """The arguments of a case by name."""
    env: dict[str, Any] = {}
    exec(case.source(), env)
    names = [name for name, _ in case.inputs]
    return dict(zip(names, env["inputs"](), strict=True))


def _before(rng: random.Random, env: dict[str, Any]) -> list[Statement]:
    """What happens to the arguments before the call: most programs write to non-leaves."""
    out = []
    for name, probability in (("x", 0.6), ("w", 0.15), ("b", 0.3)):
        if rng.random() < probability:
            out.append(Statement(f"{name} = {name} * 1"))
            env[name] = env[name] * 1
    return out


# ---------------------------------------------------------------- what is compiled


class _Body:
    """The function that is compiled, while it is written."""

    def __init__(self, rng: random.Random, env: dict[str, Any], mode: tuple[str, ...]) -> None:
        self.rng = rng
        self.scope = Scope(rng, env)
        self.scope.outside = mode
        self.statements: list[Statement] = []
        self.losses: list[str] = []

    def write(self) -> bool:
        """Writes it; whether there is a loss in it."""
        rng = self.rng
        for _ in range(rng.choice((0, 0, 1, 2))):
            self.hidden() if rng.random() < 0.5 else self.interrupt()
        if not self.head("z"):
            return False
        self.way(rng.choice((0, 1, 1, 2, 2, 3, 4, 5)))
        if not self.loss("loss"):
            return False
        more = rng.random()
        if more < 0.12:
            self.loss("loss2")
        elif more < 0.25 and self.head("y"):
            self.scope.z = "y"
            self.way(rng.choice((0, 1, 2)))
            self.loss("loss2")
            self.scope.z = "z"
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
            self.interrupt()
        return True

    def returned(self, rng: random.Random) -> list[str]:
        """The names that it returns."""
        env = self.scope.env
        more = [n for n in ("z", "y", "lp", "r", "h", "p", "lse", "g") if self._tensor(n)]
        some = [n for n in more if rng.random() < (0.5 if n in "zyr" else 0.2)]
        rng.shuffle(some)
        assert all(isinstance(env[n], Tensor) for n in (*self.losses, *some))
        return [*self.losses, *some]

    def _tensor(self, name: str) -> bool:
        return isinstance(self.scope.env.get(name), Tensor)

    # ---- statements ------------------------------------------------------------------------------

    def add(self, table: tuple[str, ...], name: str = "", within: tuple[str, ...] = ()) -> bool:
        """One statement of a table."""
        for _ in range(TRIES):
            template = self.rng.choice(table)
            old = self.scope.env.get(name)
            self.scope.chosen = {}
            statement = self.scope.attempt(template, name, within)
            self.scope.chosen = None
            if statement is None:
                continue
            if name and not self.accepted(name, table):
                self.scope.env[name] = old
                continue
            self.statements.append(statement)
            return True
        return False

    def accepted(self, name: str, table: tuple[str, ...]) -> bool:
        """Whether a name that was assigned is what is wanted there."""
        scope = self.scope
        if name in ("z", "y"):
            if not scope.sane(name) or scope.env[name].dim() == 0:
                return False
            if table is grammar.HEADS:
                shape = scope.env[name].shape
                scope.classes[name] = 11 if 11 in shape else shape[-1]
            elif table is grammar.CLASS_SLICES:
                scope.classes[name] = scope.env[name].shape[-1]
            return scope.classes[name] > 7 and scope.class_dim(name) is not None
        if name == "h":
            value = scope.env[name]
            return scope.sane(name) and value.dim() in (2, 3) and value.shape[-1] == grammar.D
        return True

    def hidden(self) -> None:
        self.add(grammar.HIDDEN, "h")

    def head(self, name: str) -> bool:
        return self.add(grammar.HEADS, name) or self.add(grammar.HEADS, name)

    def way(self, steps: int) -> None:
        """Steps from the linear on, with other things between them."""
        tables = {
            grammar.MOVES: 30,
            grammar.CASTS: 15,
            ("{pointwise}",): 22,
            grammar.TENSOR_STEPS: 15,
            grammar.CLASS_SLICES: 4,
        }
        for _ in range(steps):
            if self.rng.random() < 0.25:
                self.interrupt()
                continue
            if not self.scope.region and self.rng.random() < 0.08:
                self.scope.region = (self.rng.choice(interrupts.CONTEXTS),)
            elif self.scope.region and self.rng.random() < 0.5:
                self.scope.region = ()
            (table,) = self.rng.choices(list(tables), list(tables.values()))
            self.add(table, self.scope.z)

    def loss(self, name: str) -> bool:
        """A loss of the logits, perhaps in several statements with others between them."""
        for _ in range(TRIES):
            count = len(self.statements)
            chosen: dict[str, str] = {}
            for template in self.rng.choice(grammar.LOSSES):
                self.scope.chosen = chosen
                template = re.sub(r"\bloss\b", name, template)
                statement = self.scope.attempt(template)
                self.scope.chosen = None
                if statement is None:
                    break
                self.statements.append(statement)
                if self.rng.random() < 0.12:
                    self.interrupt()
            else:
                if self._tensor(name):
                    self.losses.append(name)
                    return True
            del self.statements[count:]
        return False

    def interrupt(self) -> None:
        """Something that is not on the way from the head to the loss."""
        kind = self.rng.choices(
            ("write", "integers", "read", "alias", "teacher", "switch", "break"),
            (45, 15, 20, 10, 10, 2, 5),
        )[0]
        within = (self.rng.choice(interrupts.CONTEXTS),) if self.rng.random() < 0.15 else ()
        if kind == "write":
            if self.rng.random() < 0.4:
                within = ("torch.no_grad()",)
            table = interrupts.WRITES
            if self.rng.random() < 0.3:
                table = ("{in_place}",)
            self.add(table, within=within)
        elif kind == "integers":
            self.add(interrupts.INTEGER_WRITES, within=within)
        elif kind == "alias":
            self.add(interrupts.NEW_ALIASES, "g")
        elif kind == "switch":
            self.add(interrupts.SWITCHES)
        elif kind == "break":
            self.add(interrupts.BREAKS)
        elif kind == "teacher":
            self.add(("F.linear({x}, w2).softmax(-1)", "{x} @ wt", "F.linear({x}, e)"), "r", within)
        elif self._tensor(self.scope.z):
            self.add(interrupts.READS, within=within)


# ---------------------------------------------------------------- what its user does


def _with_session(
    case: Case,
    rng: random.Random,
    before: list[Statement],
    mode: tuple[str, ...],
    outside: tuple[str, ...],
) -> Case:
    made = Statement(f"{case.arguments} = inputs()")
    outputs = ", ".join(case.returned)
    call = Statement(
        f"{outputs}{',' * (len(case.returned) == 1)} = program({case.arguments})",
        (*outside, *mode),
    )
    env: dict[str, Any] = {}
    exec(case.source(), env)
    scope = Scope(rng, env | {"seen": lambda value: None})
    session = [made, *before, call]
    if not all(map(scope.run, session)):
        return case
    scope.env["returned"] = [n for n in case.returned if not n.startswith("loss")] or case.returned
    names = [n for n, _ in case.inputs if n in ("x", "w", "b", "wt", "w2")]
    for part in range(2):
        for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
            session += afterwards_of(scope, rng, names)
        if part == 0 and not mode:
            some = [n for n in case.returned if n.startswith("loss") or rng.random() < 0.5]
            for again in range(1 + (rng.random() < 0.1)):  # a second call accumulates gradients
                if all(map(scope.run, [call] * again)):
                    back = map(Statement, afterwards.passes(rng, some))
                    session += [*[call] * again, *(one for one in back if scope.run(one))]
            if rng.random() < 0.35:
                session += optimizer_step(scope, rng)
    if rng.random() < 0.06:
        again = [Statement(f"{case.arguments} = inputs(3)"), *before]
        again += [call]
        back = () if mode else (Statement("backward(loss)"),)
        if all(map(scope.run, again)):
            session += [*again, *(b for b in back if scope.run(b))]
    all_names = dict.fromkeys((*(name for name, _ in case.inputs), *case.returned, "g"))
    kept = tuple(n for n in all_names if isinstance(scope.env.get(n), Tensor))
    return replace(case, session=tuple(session), kept=kept)


def afterwards_of(
    scope: Scope, rng: random.Random, inputs: list[str], uses: tuple[str, ...] = afterwards.USES
) -> list[Statement]:
    """One thing that the user does with what was returned, or with the inputs ``inputs``."""
    kind = rng.choices(("use", "write", "change"), (60, 25, 8))[0]
    if not any(isinstance(scope.env.get(n), Tensor) for n in scope.env["returned"]):
        return []
    for _ in range(TRIES):
        scope.chosen = {}
        name = rng.choice(inputs)
        if kind == "use":
            found = scope.attempt(rng.choice(uses))
        elif kind == "write":
            alias = rng.choice(afterwards.RETURNED_ALIASES)
            template = rng.choice(afterwards.WRITES).replace("{O}", alias)
            stale = not _is_logits(scope, "g" if template.startswith("g") else scope.hole("o"))
            found = scope.attempt(
                template, "", ("torch.no_grad()",) * (rng.random() < 0.3), stale=stale
            )
        else:
            template = rng.choice(afterwards.CHANGES).replace("{a}", name)
            found = scope.attempt(template, stale=True)
        scope.chosen = None
        if found is not None:
            return [found]
    return []


def _is_logits(scope: Scope, name: str) -> bool:
    """Whether a write to ``name`` reaches logits, and so nothing that logits are computed from."""
    written = scope.env.get(name)
    logits = [scope.env.get(n) for n in ("z", "y")]
    return isinstance(written, Tensor) and any(
        t.untyped_storage()._cdata == written.untyped_storage()._cdata
        for t in logits
        if isinstance(t, Tensor)
    )


def optimizer_step(scope: Scope, rng: random.Random) -> list[Statement]:
    """A step on some of the parameters."""
    leaves = [
        n
        for n in ("x", "w", "b", "wt", "w2")
        if isinstance(t := scope.env.get(n), Tensor) and t.is_leaf and t.requires_grad
    ]
    if not leaves:
        return []
    some = rng.sample(leaves, rng.randint(1, len(leaves)))
    template = rng.choice(afterwards.OPTIMIZERS).replace("{p}", ", ".join(some))
    found = scope.attempt(template)
    return [found] if found is not None else []
