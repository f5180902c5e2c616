"""Answers torch functions of deferred logits without computing them.

In: a torch function and its arguments, some of them deferred logits. Out: what it returns. Results
with classes are deferred, too; rows and numbers are computed from the hidden states, by the
programs that compiled code would have::

    logp = logits.float().log_softmax(-1)          deferred
    logp.gather(-1, labels[..., None])             computed, a program of hidden states and labels

NOTE: what is computed together. Each function whose results have no classes is one program: results
of one function share a pass over the logits, and two functions take two.

Autograd links such results to the logits. The gradient of the logits is not computed either, but
deferred (:class:`GradientOfLogits`): it knows the gradients of the hidden states and of the weight,
and the backward of the logits takes them from it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

from fxpass.capture.values import Stop, Value
from fxpass.deferred.dynamo import hidden
from fxpass.deferred.history import once
from fxpass.deferred.inputs import quiet
from fxpass.deferred.jobs import Given, Job, Operand, Record
from fxpass.deferred.recording import LOCK, Recorded
from fxpass.deferred.rows import prepare, reduced
from fxpass.deferred.run import Run
from fxpass.deferred.values import Buffer, Gradient, Part

log = logging.getLogger(__name__)


class Later:
    """What computes deferred logits that a function made of others, or a gradient of logits; in the
    place of a :class:`Run`."""

    def __init__(self, job: Job, like: Tensor, device: torch.device) -> None:
        self.job, self.like, self.device = job, like, device
        self.lock = threading.RLock()
        self.recipe = job.recipe
        self.inputs: list[Any] | None = list(job.inputs())

    @property
    def roots(self) -> list[Run]:
        """The runs of the logits that these are made of."""
        return [logits.run for logits in self.job.logits.values()]

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """All values."""
        return self.job.whole()

    def gradients(self, needed: Sequence[bool], grad: Tensor) -> list[Tensor | None]:
        """The gradients of what autograd links it to."""
        found = _of_links(self.job, self.job.gradients([grad], self.job.exact))
        return [g if needs else None for g, needs in zip(found, needed, strict=True)]


class GradientOfLogits(Later):
    """What computes a gradient of logits, if a program reads one.

    Attributes:
        terms: functions of logits, and the gradients of their results.
    """

    def __init__(
        self, of: Value, terms: Sequence[tuple[Job, Sequence[Any]]], like: Tensor, device: Any
    ) -> None:
        super().__init__(terms[0][0], like, device)
        self.of, self.terms = of, terms
        self.recipe = replace(self.recipe, requires_grad=False)
        self.inputs = [i for job, _ in terms for i in job.inputs()]

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """The gradient."""
        found = [job.gradients(grads)[self.of] for job, grads in self.terms]
        total = torch.zeros(self.like.shape, dtype=self.like.dtype, device=self.device)
        for gradient in found:
            if gradient is not None:
                total += gradient
        return total


def later(value: Value, given: Given, arguments: tuple[Value, ...]) -> Part:
    """Deferred logits that a function made of others. A large operand must not change after it."""
    with quiet(), LOCK:
        fake, device = value.fake, value.fake.device
        size = fake.numel() * fake.itemsize
        like = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
        kept = {v: g.kept(size) if isinstance(g, Operand) else g for v, g in given.items()}
    run: Any = Later(Job([value], kept, arguments), like, device)
    part = Part(Buffer(run, run.device, like), like)
    part.record = Record(value, kept)
    return part


def answer(found: Recorded, given: Given, arguments: Mapping[Value, Tensor]) -> list[Tensor]:
    """The results of a function, none of which has classes.

    Args:
        found: the function.
        given: what its results are made of.
        arguments: those of the function that have a gradient.

    Raises:
        Stop: there is no program for it.
    """
    job = Job(found.values, given, tuple(arguments))
    tracked = job.tracked if torch.is_grad_enabled() else {}
    with torch._C._DisableAutocast():
        runs = {v: (logits.run, logits.run.checked()) for v, logits in job.logits.items()}
        try:
            with LOCK, _unseen():
                prepare(found, runs)
        except Stop:
            raise
        except Exception as error:  # an unforeseen program runs on the logits
            log.debug("a program of deferred logits failed", exc_info=True)
            text = " ".join(str(error).split())[:120]
            raise Stop(f"fails a chunk at a time ({type(error).__name__}: {text})") from None
        if tracked and any(value.trained for value in found.values):
            links = [{**arguments, **tracked}[value] for value in job.linked]
            return list(_Answer.apply(found, job, runs, *links))
        with torch.no_grad():
            return reduced(found, runs, job.operands())


def _unseen() -> AbstractContextManager[Any]:
    """As in compiled code: the program's hooks do not see what a graph is made with."""
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    if not autograd._saved_tensors_hooks_is_enabled():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


class _Answer(torch.autograd.Function):
    """From logits and operands to results without classes."""

    @staticmethod
    def forward(ctx: Any, found: Recorded, job: Job, runs: Any, *links: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        made = _made(found, job, runs)
        ctx.made = job, made
        # copies: the program may write to them
        out = [result.detach().clone() for result in made.results]
        kept = [result.requires_grad for result in made.results]
        ctx.mark_non_differentiable(*(t for t, needs in zip(out, kept, strict=True) if not needs))
        return tuple(out)

    @staticmethod
    @hidden
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore
        job, made = once(ctx, "made")
        with torch.no_grad():
            # eager's backward may not have read a weight that was changed
            if job.exact or made.is_stale():
                by_value = job.gradients(grads, job.exact)
            else:
                leaves = made.gradients(grads)
                by_value = {v: _gradient(job, v, leaves, grads) for v in job.tracked}
        found = _of_links(job, by_value)
        if torch.is_grad_enabled():  # create_graph=True: their own backward raises
            found = [None if g is None else _raising(g.detach().requires_grad_()) for g in found]
        return None, None, None, *found


def _of_links(job: Job, found: Mapping[Value, Tensor | None]) -> list[Tensor | None]:
    """Gradients of what autograd links a job to; none of what is on the other way. Compiled
    autograd adds up what eager finds undefined, and gets zeros."""
    if not compiled_autograd.in_compiled_autograd_region:
        return [found.get(value) for value in job.linked]
    return [_zeros(value) if found.get(value) is None else found[value] for value in job.linked]


def _zeros(value: Value) -> Tensor:
    with LOCK:
        like = value.fake
        return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)


_raising: Any = torch._C._functions.DelayedError(  # pyright: ignore[reportAttributeAccessIssue]
    "what is computed of deferred logits has no second derivative "
    "(FUSEDCE_LOGITS=keep computes the logits)",
    1,
)


@dataclass(eq=False)
class _Made:
    """Results without classes, with autograd's graph between them and the inputs.

    Attributes:
        results: with gradients, where they have some.
        leaves: the tensors that get a gradient: an operand, or the input of a run at a position.
        versions: of the inputs of runs, then of operands.
    """

    results: list[Tensor]
    leaves: dict[tuple[Value, int | None], Tensor]
    versions: tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]]

    def is_stale(self) -> bool:
        """Whether a weight was changed, and nothing else."""
        changed = [any(t._version != v for t, v in some) for some in self.versions]
        return changed == [True, False]

    def gradients(self, grads: Sequence[Tensor | None]) -> dict[Any, Tensor | None]:
        """The gradients of the leaves."""
        pairs = zip(self.results, grads, strict=True)
        known = [(r, g) for r, g in pairs if g is not None and r.requires_grad]
        if not known:
            return dict.fromkeys(self.leaves)
        outs, of_outs = zip(*known, strict=True)
        leaves = [*self.leaves.values()]
        # a call with retain_graph=True may come again; else this goes with its only reader
        found = torch.autograd.grad(outs, leaves, of_outs, allow_unused=True, retain_graph=True)
        return dict(zip(self.leaves, found, strict=True))


def _saved(a: Any) -> Any:
    """What autograd can save: no tensor of inference mode, as are a teacher's hidden states."""
    return a.clone() if isinstance(a, Tensor) and a.is_inference() else a


def _made(found: Recorded, job: Job, runs: Mapping[Value, tuple[Run, Sequence[Any]]]) -> _Made:
    leaves: dict[tuple[Value, int | None], Tensor] = {}

    def leaf(tensor: Tensor, value: Value, place: int | None = None) -> Tensor:
        return leaves.setdefault((value, place), tensor.detach().requires_grad_())

    tracked = job.tracked
    operands = {value: _saved(t) for value, t in job.operands().items()}
    inputs = {value: (run, [_saved(a) for a in given]) for value, (run, given) in runs.items()}
    of_runs = [a for _, given in runs.values() for a in given if isinstance(a, Tensor)]
    of_operands = [*operands.values()]
    for value in tracked:
        if value in operands:
            operands[value] = leaf(operands[value], value)
            continue
        run, given = inputs[value]
        needs = enumerate(zip(given, run.trained, strict=True))
        inputs[value] = run, [leaf(a, value, i) if needed else a for i, (a, needed) in needs]
    with torch.enable_grad():
        results = reduced(found, inputs, operands)
    versions = [(t, t._version) for t in of_runs if not t.is_inference()]
    others = [(t, t._version) for t in of_operands if not t.is_inference()]
    return _Made(results, leaves, (versions, others))


def _gradient(job: Job, value: Value, made: Mapping[Any, Any], grads: Sequence[Any]) -> Any:
    """The gradient of an operand, or that of logits, deferred."""
    if (value, None) in made:
        return made[value, None]
    logits = job.logits[value]
    found = {i: g for (of, i), g in made.items() if of is value and g is not None}
    return deferred_gradient(logits.run, value, found, [(job, grads)], logits.tensor)


def deferred_gradient(
    run: Run, value: Value, found: Mapping[int, Tensor], terms: Any, tensor: Tensor
) -> Tensor:
    """A gradient of logits, by the gradients of their inputs."""
    like = run.like
    made: Any = GradientOfLogits(value, terms, like, run.device)
    buffer = Buffer(made, run.device, like)
    buffer.gradient = Gradient(run, found)
    cls: Any = type(tensor)
    return cls(Part(buffer, like))


def added(one: Part, other: Part) -> Part | None:
    """The sum of two gradients of the same logits; None if they are others."""
    a, b = one.gradient, other.gradient
    first, second = one.buffer.run, other.buffer.run
    if a is None or b is None or a.run is not b.run:
        return None
    if not isinstance(first, GradientOfLogits) or not isinstance(second, GradientOfLogits):
        return None  # one of them was computed
    total = dict(a.of_inputs)
    for i, gradient in b.of_inputs.items():
        total[i] = total[i] + gradient if i in total else gradient
    run: Any = GradientOfLogits(first.of, [*first.terms, *second.terms], first.like, first.device)
    buffer = Buffer(run, first.device, first.like)
    buffer.gradient = Gradient(a.run, total)
    return Part(buffer, first.like)
