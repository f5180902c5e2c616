"""One generated program as text: what makes its tensors, what is compiled, what its user does.

In: statements. Out: Python source that runs alone::

    def inputs(n=2): ...                  # the same tensors at every call with the same n
    def program(x, w, t): ...             # what torch.compile gets
    def session(program, inputs, seen):   # calls it, and uses what it returns
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

PREAMBLE = """\
import operator

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def halved(t, times):  # over 2**times paths
    for _ in range(times):
        t = (t + t.tanh()) / 2
    return t


def backward(*tensors, by=None, **how):
    parts = [t for t in tensors if t.requires_grad and t.is_floating_point()]
    factors = [torch.linspace(0.5, 1.5, t.numel()).view(t.shape).to(t.dtype) for t in parts]
    factors = factors if by is None else [by for _ in parts]
    if parts:
        sum((t * f).sum().float() for t, f in zip(parts, factors)).backward(**how)


class Capped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, cap):
        y = torch.tanh(z / cap) * cap
        ctx.save_for_backward(y)
        ctx.cap = cap
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - (y / ctx.cap).square()), None


class Clipped(torch.autograd.Function):  # its backward is not linear
    @staticmethod
    def forward(ctx, z):
        return z.clone()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.05, 0.05)


class Picked(torch.autograd.Function):  # log-probabilities, and the largest
    @staticmethod
    def forward(ctx, z, labels, d):
        p = z.log_softmax(d)
        ctx.save_for_backward(p, labels)
        ctx.d = d
        return p.gather(d, labels).squeeze(d), p.amax(d)

    @staticmethod
    def backward(ctx, g, h):
        p, labels = ctx.saved_tensors
        chosen = torch.zeros_like(p).scatter(ctx.d, labels, 1.0)
        return (chosen - p.exp()) * (g + 0.5 * h).unsqueeze(ctx.d), None, None
"""

SIZES_OF_DATA = """\
import torch

torch._dynamo.config.capture_dynamic_output_shape_ops = True
"""

ONE_RANK = """\
def spread(t):
    return t


dealt = gathered = spread
"""

FUSED_NAMES = """\
import fxpass.backend  # watches optimizers, as it does before a program compiles
from fxpass.deferred.tensor import Recipe, defer
from fxpass.spec.expression import parse
from tests.support.losses import fused_loss
"""

RANKS = """\
from tests.fuzz.dealt import over_ranks
"""

TRACED_NAMES = """\
from tests.fuzz.traced import Traced
"""

INTERPRETED = """\
import os

os.environ["TRITON_INTERPRET"] = "1"

from fxpass.plan import plan

plan.implementation_for = lambda device, dtype: ("IMPLEMENTATION", "")
"""

SMALL = """\
from tests.fuzz.small import small

small()
"""

RUN_ALONE = """\
def show(run):
    def seen(value):
        print("   seen", value)

    torch.manual_seed(0)
    made = []

    def kept(n=2):
        made.append(inputs(n))
        return made[-1]

    for value in session(run, kept, seen):
        print("  ", value)
    for value in [v for values in made for v in values]:
        print("   grad", getattr(value, "grad", None))


print("eager")
show({eager})
print("fused")
show({compiled})
"""


@dataclass(frozen=True)
class Statement:
    """One line of a function.

    Attributes:
        text: the line.
        within: the context managers around it, the outermost first.
        stale: whether deferred logits may be stale afterwards, since it changes an input outside
            every graph.
    """

    text: str
    within: tuple[str, ...] = ()
    stale: bool = False


@dataclass(frozen=True)
class Case:
    """One generated program.

    Attributes:
        inputs: name and expression of each argument; ``n`` is the number of sequences.
        body: the statements of the function that is compiled.
        returned: the names that it returns.
        session: the statements that call it, and what follows.
        kept: the names that the session returns.
        options: for ``torch.compile``.
        dynamic: for ``torch.compile``.
        seed: of the random numbers in the inputs.
        fused: the statements of what stands for the compiled function, where nothing is compiled;
            with :data:`FUSED_NAMES`.
        implementation: ``triton`` where its kernels run, in the interpreter.
        tracer: what makes a graph of the function, which is run in place of it: a key of
            :data:`tests.fuzz.traced.TRACERS`; empty for none.
        zeros: whether a gradient of zeros is as good as none: one operator has several outputs,
            and gives zeros where the program reads some of them only.
        small: whether it is divided as a large program is, with the sizes of
            :mod:`tests.fuzz.small`.
        sharded: whether classes are dealt to ranks, where it is not eager that runs.
        tags: whether the tags of its rows are checked, too: see :mod:`tests.fuzz.tags`.
        fixed: whether ``body`` has to stay as it is, since ``fused`` says the same.
    """

    inputs: tuple[tuple[str, str], ...]
    body: tuple[Statement, ...]
    returned: tuple[str, ...]
    session: tuple[Statement, ...]
    kept: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None
    seed: int = 0
    fused: tuple[Statement, ...] = ()
    implementation: str = ""
    zeros: bool = False
    fixed: bool = False
    tracer: str = ""
    sharded: bool = False
    small: bool = False
    tags: bool = False

    @property
    def may_be_stale(self) -> bool:
        return any(statement.stale for statement in self.session)

    @property
    def arguments(self) -> str:
        return ", ".join(name for name, _ in self.inputs)

    def source(self) -> str:
        """The three functions."""
        made = [f"{name} = {expression}" for name, expression in self.inputs]
        return "\n\n".join(
            (
                PREAMBLE,
                _function(
                    "inputs(n=2)", [f"torch.manual_seed({self.seed})", *made], self._tuple(None)
                ),
                _function(
                    f"program({self.arguments})", lines(self.body), self._tuple(self.returned)
                ),
                _function(
                    "session(program, inputs, seen)", lines(self.session), self._tuple(self.kept)
                ),
                *([ONE_RANK] if self.sharded else []),
                *self._fused(),
            )
        )

    def _fused(self) -> list[str]:
        if not self.fused:
            return []
        head = f"fused({self.arguments})"
        return [FUSED_NAMES, _function(head, lines(self.fused), self._tuple(self.returned))]

    def stand_alone(self) -> str:
        """Source that prints what eager and the fused program give."""
        dynamic = "" if self.dynamic is None else f", dynamic={self.dynamic}"
        keywords = f'backend="fusedce", options={self.options}{dynamic}'
        eager, compiled = "program", f"torch.compile(program, {keywords})"
        if self.fused:
            compiled = "fused"
        if self.tracer:
            eager = f"Traced(program, {self.tracer!r})"
            each = f"lambda graph: torch.compile(graph, {keywords})"
            compiled = f"Traced(program, {self.tracer!r}, {each})"
        if self.sharded:
            compiled = f"over_ranks(globals(), {compiled})"
        parts = [self.source(), RUN_ALONE.format(eager=eager, compiled=compiled)]
        if self.tracer:
            parts.insert(0, TRACED_NAMES)
        if self.sharded:
            parts.insert(0, RANKS)
        if self.dynamic:
            parts.insert(0, SIZES_OF_DATA)
        if self.small:
            parts.insert(0, SMALL)
        if self.implementation:
            parts.insert(0, INTERPRETED.replace("IMPLEMENTATION", self.implementation))
        return "\n\n".join(parts)

    def trimmed(self) -> Case:
        """Without the inputs that nobody names."""
        if self.fused:
            return self
        text = " ".join(s.text for s in (*self.body, *self.session) if not _is_call(s))
        used = set(re.findall(r"[a-z_]\w*", text)) | set(self.returned)
        gone = {name for name, _ in self.inputs} - used
        if not gone:
            return self
        before, after = self.arguments, ", ".join(n for n, _ in self.inputs if n not in gone)
        if not after:
            return self
        session = tuple(replace(s, text=s.text.replace(before, after)) for s in self.session)
        inputs = tuple(pair for pair in self.inputs if pair[0] not in gone)
        kept = tuple(name for name in self.kept if name not in gone)
        return replace(self, inputs=inputs, session=session, kept=kept)

    def _tuple(self, names: Iterable[str] | None) -> str:
        names = [name for name, _ in self.inputs] if names is None else names
        return "return (" + "".join(f"{name}, " for name in names).rstrip() + ")"


def _is_call(statement: Statement) -> bool:
    return "inputs(" in statement.text or "program(" in statement.text


def _function(head: str, body: list[str], last: str) -> str:
    return "\n    ".join([f"def {head}:", *body, last]) + "\n"


def lines(statements: Iterable[Statement]) -> list[str]:
    """The lines of a block; neighbours in the same contexts share their ``with``."""
    out: list[str] = []
    open_contexts: tuple[str, ...] = ()
    for statement in statements:
        if statement.within != open_contexts:
            for depth, context in enumerate(statement.within):
                out.append(f"{'    ' * depth}with {context}:")
            open_contexts = statement.within
        indent = "    " * len(statement.within)
        out += [indent + line for line in statement.text.split("\n")]
    return out
