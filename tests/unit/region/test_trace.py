"""Graphs of functions of fake rows: what is refused, and what is the same however it is traced."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from fxpass.region.loop import Loop
from fxpass.region.run import Fakes, in_own_thread
from fxpass.region.text import Input, lines_of
from fxpass.region.trace import tidy, traced

INPUT = Input(torch.float32, ("n", 64))
ONES = torch.ones(64)


def text_of(function) -> str:
    fakes = Fakes([INPUT], {"n": 9}, torch.device("cpu"))
    graph = in_own_thread(lambda: tidy(traced(lambda z: [function(z)], fakes, {})))
    fakes.check()
    [place] = graph.find_nodes(op="placeholder")
    place.meta["input"] = INPUT
    loop = Loop((0,), (), graph)
    assert loop.results
    return "\n".join(lines_of(graph))


REFUSED = {
    "more rows": (lambda z: z.sum(1) * (1 if z.shape[0] > 5 else 2), "not for 2 rows"),
    "fixed rows": (lambda z: z.sum(1) + torch.arange(len(z)), "n can be 9 only"),
    "two rows each": (lambda z: z.sum(1).repeat(2), "has the size"),
    "random": (lambda z: F.dropout(z).sum(1), "is random"),
    "a tensor": (lambda z: (z * ONES).sum(1), "is no input"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    function, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        text_of(function)


def test_another_thread_calls_a_compiled_function_meanwhile():
    doubled = torch.compile(lambda t: t * 2, backend="eager")
    doubled(torch.ones(2))
    errors = []

    def call() -> None:
        try:
            doubled(torch.ones(2))
        except RuntimeError as error:
            errors.append(error)

    def function(z):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return z.sum(1)

    text_of(function)
    assert not errors


def test_surroundings_change_nothing():
    plain = text_of(lambda z: z.logsumexp(1))
    fake = torch._subclasses.FakeTensorMode()
    with torch.no_grad(), torch.autocast("cpu"), torch.inference_mode(), fake:
        around = text_of(lambda z: z.logsumexp(1))
    assert plain == around


def test_equal_reductions_are_merged_and_numbers_are_no_tensors():
    """dim=-1 and dim=1 are the same, and a constant of one element is a number."""
    text = text_of(
        lambda z: z.amax(-1) + z.detach().amax(1) + (z > torch.tensor(2.0)).sum(1).float()
    )
    assert text.count("aten.amax") == 1
    assert "aten.full.default([], 2.0, dtype=float32)" in text
    assert "aten._to_copy.default" in text
