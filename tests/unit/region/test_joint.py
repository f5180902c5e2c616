"""What trace refuses, and what cut saves."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from fxpass.region.joint import cut, trace
from fxpass.region.text import Input, RowRegion
from tests.unit.region.programs import PROGRAMS

CPU = torch.device("cpu")
Z = Input(torch.float32, ("n", 64))


def traced(function, *more, hints=None, trained=None):
    inputs = [Z, *more]
    return trace(function, inputs, {"n": 9} | (hints or {}), trained or [True] * len(inputs), CPU)


ONES = torch.ones(64)


def wrong_shape(z):
    return [z.sum(0)]


REFUSED = {
    "more rows": (lambda z: [z.sum(1) * (1 if z.shape[0] > 5 else 2)], "not for 2 rows"),
    "fixed rows": (lambda z: [z.sum(1) + torch.arange(len(z))], "n can be 9 only"),
    "no rows": (wrong_shape, "does not have the rows first"),
    "two rows each": (lambda z: [z.sum(1).repeat(2)], "has the size"),
    "random": (lambda z: [F.dropout(z).sum(1)], "is random"),
    "values": (lambda z: [z.sum(1) * z.max().item()], "depends on values"),
    "masks": (lambda z: [z[z > 0].sum().expand(z.shape[0])], "depends on values"),
    "a tensor": (lambda z: [(z * ONES).sum(1)], "is no input"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    function, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        text_of(function)


def text_of(function) -> str:
    joint = traced(function)
    return RowRegion((2,), 0, 0, (0, 1), 1, joint.tangents, False, 0, True, joint.graph).text()


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
        return [z.sum(1)]

    traced(function)
    assert not errors


def test_surroundings_change_nothing():
    plain = traced(lambda z: [z.logsumexp(1)]).graph
    fake = torch._subclasses.FakeTensorMode()
    with torch.no_grad(), torch.autocast("cpu"), torch.inference_mode(), fake:
        around = traced(lambda z: [z.logsumexp(1)]).graph
    assert str(plain) == str(around)


def test_softmaxes_are_merged_and_numbers_are_no_tensors():
    """dim=-1 and dim=1 are the same, and a constant of one element is a number."""
    joint = traced(
        lambda z: [
            z.logsumexp(-1) + z.logsumexp(1),
            torch.where(z > 0, z, torch.tensor(2.0)).sum(1),
        ]
    )
    names = [str(node.target) for node in joint.graph.nodes if node.op == "call_function"]
    assert names.count("aten.amax.default") == 1


SAVED = {
    "cross entropy": ["float32[n, 1]"] * 2,
    "entropy and argmax": ["float32[n, 1]"] * 2,
    "max": ["int64[n, 1]", "int64[n]"],  # the largest of tanh is computed again, for its ties
    "mean": ["float32[n, 1]"],
    "gather": ["float32[n, 1]"] * 2,
    "row weights": ["float32[n, 1]"] * 2 + ["float32[n]"],
    "teacher": ["float32[n, 1]"] * 4,
    "symbolic classes": ["float32[n, 1]"] * 2,
    "no gradient": [],
}


@pytest.mark.parametrize("name", SAVED)
def test_what_forward_saves(name):
    parts = cut(PROGRAMS[name].region())
    assert sorted(map(str, parts.saved)) == sorted(SAVED[name])
    assert parts.both is None


def test_a_total_saves_nothing():
    parts = cut(PROGRAMS["cross entropy"].region(total=True))
    assert (parts.saved, parts.backward) == ((), None)
    assert list(map(str, parts.outputs)) == ["float32[n]"]
    assert list(map(str, parts.gradients)) == ["float32[n, 37]"]
