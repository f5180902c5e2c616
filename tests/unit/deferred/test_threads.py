"""Deferred logits that two threads use.

One thread stops before each line of fxpass.deferred in turn, while another thread does all of its
work: every order in which one thread interrupts another once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fxpass.deferred import values
from fxpass.deferred.tensor import defer
from tests.support.deferred_pairs import Pair, pair, recipe_of, same

PACKAGE = str(Path(values.__file__).parent)
Work = Callable[[Pair], Any]


class Interrupted:
    """Calls ``work``; when it reaches line number ``at`` of the package, another thread calls
    ``other``, unless the thread of ``work`` holds a lock there.

    Attributes:
        results: of ``work`` and ``other``; None for ``other`` if it was not called.
        ended: whether ``work`` has fewer lines.
    """

    def __init__(
        self, at: int, locks: list[Any], work: Callable[[], Any], other: Callable[[], Any]
    ) -> None:
        self.at, self.locks, self.other = at, locks, other
        self.seen: set[tuple[Any, int]] = set()
        self.results: list[Any] = [None, None]
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            self.results[0] = work()
        finally:
            sys.settrace(before)
        self.ended = len(self.seen) <= at

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        place = (frame.f_code, frame.f_lineno)
        if event == "line" and place not in self.seen:
            self.seen.add(place)
            if len(self.seen) == self.at and not any(lock._is_owned() for lock in self.locks):
                self._interrupt()
        return self._trace

    def _interrupt(self) -> None:
        errors: list[BaseException] = []

        def run() -> None:
            try:
                self.results[1] = (self.other(),)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "the other thread waits for a lock"
        if errors:
            raise errors[0]


def interrupt_everywhere(seq: int, work: Work, other: Work, check: Callable[..., None]) -> None:
    at, count, ended = 0, 0, False
    while not ended:
        at += 1
        p = with_gradients(seq)
        locks = [values._parts_lock, p.logits._part.run.lock]
        done = Interrupted(at, locks, lambda p=p: work(p), lambda p=p: other(p))
        first, second = done.results
        if second is not None:
            count += 1
            check(p, first, *second)
        ended = done.ended
    assert count > 5


def with_gradients(seq: int) -> Pair:
    p = pair(seq=seq)
    for t in p.lazy_inputs:
        t.grad = torch.ones_like(t)
    return p


def step(p: Pair) -> None:
    torch.optim.SGD(p.lazy_inputs, lr=1.0).step()


USES: dict[str, Callable[[Any], Any]] = {
    "cast": lambda t: t.detach().double(),
    "numpy": lambda t: torch.as_tensor(t.detach().numpy()),
    "row": lambda t: t.detach()[0, 0],
    "rows": lambda t: t[:, -1].detach().exp(),
    "alias": lambda t: torch.ops.aten._unsafe_view(t.detach()[0, 0], [-1]),
    "sum": lambda t: t.sum(),
    "gradient": lambda t: torch.autograd.grad(t.sum(), t)[0],
}


@pytest.mark.parametrize("other", ["numpy", "row"])
@pytest.mark.parametrize("work", USES)
def test_two_uses(work, other):
    def check(p, *results):
        for name, result in zip((work, other), results, strict=True):
            same(result * 1, USES[name](p.eager), bits=False)
        if work == "alias":  # of the memory of all views, or a copy
            results[0].zero_()
            same(p.logits.detach()[0, 0] * 1, p.logits.detach().double().float()[0, 0])
        else:
            same(p.logits * 1, p.eager, bits=False)

    of = [lambda p, name=name: USES[name](p.logits) for name in (work, other)]
    interrupt_everywhere(3, *of, check)


# a step computes small logits, and clones the weights of large ones
@pytest.mark.parametrize(("use", "seq"), [("cast", 1), ("cast", 40), ("rows", 40)])
def test_a_use_and_an_optimizer_step(use, seq):
    def check(p, result, _):
        same(result * 1, USES[use](p.eager), bits=False)
        same(p.logits * 1, p.eager, bits=False)

    interrupt_everywhere(seq, lambda p: USES[use](p.logits), step, check)


def test_steps_of_two_optimizers():
    """Each clones the weights of both models; the other one's step may change them meanwhile."""
    meanwhile = []

    class Weight(torch.Tensor):
        def clone(self):
            if meanwhile:
                thread = threading.Thread(target=meanwhile.pop())
                thread.start()
                thread.join(60)
            return super().clone().as_subclass(torch.Tensor)

    first, second = with_gradients(40), with_gradients(40)
    second.logits = None
    x, weight, bias = (t.detach() for t in second.lazy_inputs)
    recipe, _ = recipe_of()
    logits = defer(recipe, (x.clone(), weight.as_subclass(Weight), bias))
    meanwhile.append(lambda: step(second))
    step(first)
    assert not meanwhile
    same(logits * 1, second.eager.detach(), bits=False)
