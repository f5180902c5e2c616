"""The operator calls of a vocabulary shard."""

from __future__ import annotations

import pytest

from fxpass.spec.expression import parse
from fxpass.spec.functions import ABOVE
from fxpass.spec.outputs import Moment, Sum
from fxpass.spec.reductions import REVISION, Reductions
from fxpass.spec.shards import known_rows, of_backward, of_forward, of_second_pass


@pytest.mark.parametrize(
    ("whole", "forward", "backward"),
    [
        ("pick", "lse;at", "lse;at"),
        ("at;lse;pick", "lse;at", "lse;at"),
        ("at", "lse;at", "at"),
        ("sum(z)", "lse;sum(z)", "sum(z)"),
        ("moment(1,1)", "lse;moment(1,1)", "moment(1,1)"),
        (
            "moment(0,2,1);moment(1,1,0)",
            "lse;moment(0,0,1);moment(0,1,1);moment(0,2,1);moment(1,0,0);moment(1,1,0)",
            "moment(0,2,1);moment(1,1,0)",
        ),
        ("amax", "lse;amax", "amax"),
        ("argmax;pick", "lse;at;amax;argmax", "lse;at;argmax"),
        ("max", "lse;amax;argmax", "max"),
        ("peak;amax", "lse;amax;argmax", "lse;max;amax"),
    ],
)
def test_the_calls_of_a_shard(whole, forward, backward):
    common = "transform=3*tanh(z/3)"
    some = f"{common} gradients=x,given0"
    spec = Reductions.parse(f"{REVISION} outputs={whole} {some} memory_mb=9 shard=1")
    assert of_forward(spec).text() == f"{REVISION} outputs={forward} {common} memory_mb=9 shard=1"
    assert of_backward(spec).text() == f"{REVISION} outputs={backward} {some} memory_mb=9 shard=1"


LOG, PLAIN = "log_softmax(z,given1,given2)", "difference(z,given1,given2)"


@pytest.mark.parametrize(
    ("late", "forward", "second", "backward", "rows"),
    [
        (
            "where(z>at1,1,0)",
            "lse;at",
            "sum(where(given1<z,1,0))",
            "sum(where(given1<z,1,0))",
            [("at", 1)],
        ),
        (
            "given0*exp(l)",
            "lse",
            f"sum(given0*exp({LOG}))",
            f"lse;sum(given0*exp({LOG}))",
            [("lse", 0), ("rest", 0)],
        ),
        (
            "maximum(1-at0+z,0)",
            "lse;at",
            f"sum(maximum(-given1+z+1,0));sum(where(-given1+z+1{ABOVE}0,-1,0))",
            "at;sum(maximum(-given1+z+1,0))",
            [("at", 0)],
        ),
        (
            "l*pick0",
            "lse;at",
            f"sum(given3*{PLAIN});sum(given3);sum({PLAIN})",
            f"lse;at;sum(given3*{PLAIN})",
            [("lse", 0), ("rest", 0), ("pick", 0)],
        ),
    ],
)
def test_the_calls_of_a_second_pass(late, forward, second, backward, rows):
    spec = Reductions((Sum(parse(late)), Moment(1, 0, 0)), gradients=("x",), shard=True)
    assert of_forward(spec).text() == f"{REVISION} outputs={forward};moment(1,0,0) shard=1"
    assert of_second_pass(spec).text() == f"{REVISION} outputs={second} shard=1"
    text = f"{REVISION} outputs={backward};moment(1,0,0) gradients=x shard=1"
    assert of_backward(spec).text() == text
    assert known_rows(spec) == tuple(rows)


def test_without_gradients_nobody_asks_for_the_first_class():
    spec = Reductions(("max", "peak"))
    assert of_forward(spec).outputs == ("lse", "amax")
    late = Reductions((Sum(parse("l*pick0")),), shard=True)
    assert of_forward(late).outputs == ("lse", "at")
    assert (
        of_second_pass(late).text()
        == f"{REVISION} outputs=sum(given2*difference(z,given0,given1)) shard=1"
    )
