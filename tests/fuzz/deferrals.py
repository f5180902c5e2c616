"""Random uses of deferred logits: views, casts, reads, writes, optimizers' steps.

In: a seed. Out: a :class:`Case` whose fused function defers what its body computes.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from . import afterwards, grammar
from .case import Case, Statement
from .generate import afterwards_of, optimizer_step
from .scope import Scope

# The gradients of w and b read x alone.
LINEARS = ("F.linear(x, w)", "F.linear(x, w, b)", "F.linear(x, w).float()", "x @ w.t()")
HEADS = (
    *LINEARS,
    "30 * torch.tanh(F.linear(x, w) / 30)",
    "F.linear(x, w, b) * 0.5",
    "torch.tanh(x @ w.t() + b)",
)
DTYPES = ("", "", "", ".bfloat16()", ".double()")
CLOSURES = ("torch.optim.SGD([w], lr=0.1)", "torch.optim.AdamW([b, w], lr=0.1)")
# Aliases and casts of what was returned, which live as long as each other.
RELATIVES = (
    "g = {o}.double()",
    "g = {o}[..., {o}.shape[-1]:]",
    "h = {o}.to(torch.bfloat16)",
    "h = g.double()",
    "h = g[-1:]",
    "h = {o}.transpose(0, 1)[1:]",
    "seen(h)",
    "seen(h[0])",
    "seen(h * 1)",
)
USES = afterwards.USES + RELATIVES * 2
INPUTS = ("x", "w", "b", "t")
WEIGHTS = (
    *[grammar.INPUTS["w"]] * 4,
    f"torch.randn({grammar.V}, {grammar.D} + 1){{dtype}}[:, 1:]{{grad}}",
    f"torch.randn({grammar.V} * {grammar.D} + 1){{dtype}}[1:].view({grammar.V}, {grammar.D}){{grad}}",
)


def deferral(seed: str) -> Case | None:
    """One use of deferred logits."""
    rng = random.Random(seed)
    dtype, trains = rng.choice(DTYPES), rng.random() < 0.8
    grad = ".requires_grad_()" if trains else ""
    holes = {"dtype": dtype, "bias_dtype": dtype, "grad": grad}
    made_by, head = grammar.INPUTS | {"w": rng.choice(WEIGHTS)}, rng.choice(HEADS)
    if head in LINEARS and rng.random() < 0.4:  # a linear probe
        made_by |= {"x": made_by["x"].replace("{grad}", "")}
    inputs = tuple((name, _filled(made_by[name], holes)) for name in INPUTS)
    rows = rng.choice(((0,), (0,), ()))
    graph = "torch.fx.symbolic_trace(lambda x, w, b: program(x, w, b, None)[0])"
    parts = f"{graph}, {rows}, 'z = self.lm_head(x)', True, {(0,) * (head in LINEARS)}"
    fused = (
        Statement(f"recipe = Recipe({parts})"),
        Statement("z = defer(recipe, (x, w, b))"),
    )
    body = (Statement(f"z = {head}"),)
    arguments = ", ".join(INPUTS)
    made = [f"{arguments} = inputs()"]
    if rng.random() < 0.6:
        made.append("x = x * 1")
    if rng.random() < 0.1:
        made.append("w = w * 1")
    mode = (
        () if rng.random() < 0.85 else (rng.choice(("torch.no_grad()", "torch.inference_mode()")),)
    )
    call = [Statement(f"z, = program({arguments})", mode)]
    if trains and rng.random() < 0.15:  # in the closure of an optimizer's step
        step = f"{rng.choice(CLOSURES)}.step(lambda: made.append(program({arguments})))"
        call = [*map(Statement, ("w.grad = torch.ones_like(w)", "made = []", step, "z, = made[0]"))]
    session = [*map(Statement, made), *call]
    case = Case(inputs, body, ("z",), tuple(session), INPUTS, seed=rng.randrange(1000), fused=fused)
    env: dict[str, Any] = {}
    exec(case.source(), env)
    scope = Scope(rng, env | {"seen": lambda value: None, "returned": ["z"]})
    if not all(map(scope.run, session)):
        return None
    backward = False
    for _ in range(rng.randint(2, 9)):
        if trains and not backward and rng.random() < 0.2:
            statement = scope.attempt(
                rng.choice(("backward(z)", "backward(z)", "backward(z.sum(-1))"))
            )
            backward = statement is not None
            session += [statement] if statement else []
        elif trains and rng.random() < 0.2:
            given = [] if backward else [scope.attempt("w.grad = torch.ones_like(w)")]
            session += [s for s in given if s is not None]
            session += optimizer_step(scope, rng)
        else:
            session += afterwards_of(scope, rng, ["x", "w", "b"], USES)
    if mode == ("torch.inference_mode()",) and any("lambda v, u" in s.text for s in session):
        return None  # AOTAutograd refuses writes to some aliases of inference tensors
    kept = tuple(n for n in (*INPUTS, "z", "g", "h") if n in scope.env)
    return replace(case, session=tuple(session), kept=kept)


def _filled(expression: str, holes: dict[str, str]) -> str:
    for hole, value in holes.items():
        expression = expression.replace(f"{{{hole}}}", value)
    return expression
