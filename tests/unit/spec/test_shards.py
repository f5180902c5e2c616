"""The operator calls of a vocabulary shard."""

from __future__ import annotations

import pytest

from fxpass.spec.reductions import REVISION, Reductions
from fxpass.spec.shards import of_backward, of_forward


@pytest.mark.parametrize(
    ("whole", "forward", "backward"),
    [
        ("pick", "lse;at", "lse;at"),
        ("at;lse;pick", "lse;at", "lse;at"),
        ("at", "lse;at", "at"),
        ("moment(1,1)", "lse;moment(1,1)", "moment(1,1)"),
        (
            "moment(0,2,1);moment(1,1,0)",
            "lse;moment(0,0,1);moment(0,1,1);moment(0,2,1);moment(1,0,0);moment(1,1,0)",
            "moment(0,2,1);moment(1,1,0)",
        ),
        ("argmax;pick", "lse;at;max;argmax", "lse;at;argmax"),
        ("max", "lse;max;argmax", "max"),
    ],
)
def test_the_calls_of_a_shard(whole, forward, backward):
    common = "transform=3*tanh(z/3)"
    some = f"{common} gradients=x,given0"
    spec = Reductions.parse(f"{REVISION} outputs={whole} {some} memory_mb=9 shard=1")
    assert of_forward(spec).text() == f"{REVISION} outputs={forward} {common} memory_mb=9 shard=1"
    assert of_backward(spec).text() == f"{REVISION} outputs={backward} {some} memory_mb=9 shard=1"


def test_without_gradients_nobody_asks_for_the_first_class():
    assert of_forward(Reductions(("max",))).outputs == ("lse", "max")
