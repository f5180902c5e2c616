"""The text of a region: round trips, and what is refused."""

from __future__ import annotations

import pytest
import torch

from fxpass.region.loop import Loop
from fxpass.region.text import Input
from tests.unit.region.programs import PROGRAMS, functions

HEAD = "rows rows=0,1 sums= wide= memory_mb=0 compiled=1"
BODY = ["%0 = input float32[n, 97]", "%1 = input int64[n]"]


def text(*lines: str, head: str = HEAD, last: str = "return %2") -> str:
    return "\n".join([head, *BODY, *lines, last])


def test_a_round_trip():
    lines = (
        "%2 = aten.sym_size.int(%0, 0)",
        "%3 = size.mul(%2, 2)",
        "%4 = aten.full.default([%2, 97], -inf, dtype=float32)",
        "%5 = aten.sort.stable(%0, stable=True, dim=-1, descending=False)",
        "%6 = getitem(%5, 1)",
        "%7 = aten.div.Tensor_mode(%0, 1e-05, rounding_mode='floor')",
        "%8 = aten.sum.dim_IntList(%7, [1], dtype=float64)",
    )
    written = text(*lines, last="return %8")
    loop = Loop.parse(written)
    assert loop.text() == written
    assert Loop.parse(written) is loop
    assert loop.inputs == (Input(torch.float32, ("n", 97)), Input(torch.int64, ("n",)))


def test_a_round_trip_of_merges():
    lines = "%2 = aten.amax.default(%0, [0])", "%3 = aten.any.dims(%0, [0])"
    for head in (HEAD, HEAD + " accumulate=float32"):
        written = text(*lines, head=head + " merge=0:amax,2:any", last="return %2, %1, %3")
        assert Loop.parse(written).text() == written
        assert Loop.parse(written).merges == ((0, "amax"), (2, "any"))


def test_a_round_trip_of_collectives():
    """An interpreter may run them on one rank."""
    lines = (
        "%2 = _c10d_functional.all_reduce.default(%0, 'sum', '0')",
        "%3 = _c10d_functional.wait_tensor.default(%2)",
        "%4 = _c10d_functional.all_gather_into_tensor.default(%3, 2, '0')",
        "%5 = _c10d_functional.reduce_scatter_tensor.default(%4, 'avg', 2, '0')",
    )
    written = text(*lines, last="return %5")
    assert Loop.parse(written).text() == written
    assert Loop.parse(written).on_ranks
    assert not Loop.parse(text("%2 = aten.neg.default(%0)")).on_ranks


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_round_trip(name):
    for function in functions(name):
        assert "; ".join(Loop.parse(function.text).text().split("\n")) == function.text
        assert "cpu" not in function.text


REFUSED = {
    "%2 = aten.add_.Tensor(%0, 1)": "writes, is random",
    "%2 = aten.bernoulli.default(%0)": "writes, is random",
    "%2 = aten.rand.default([3])": "writes, is random",
    "%2 = aten.item.default(%0)": "writes, is random",
    "%2 = aten.nonzero.default(%0)": "writes, is random",
    "%2 = aten.from_file.default('passwd')": "writes, is random",
    "%2 = aten.amax(%0)": "no operation of a region",
    "%2 = aten.no_such.default(%0)": "no operation of a region",
    "%2 = prims.exp.default(%0)": "no operation of a region",
    "%2 = fxpass.rows.default(%0)": "no operation of a region",
    "%2 = _c10d_functional.broadcast.default(%0, 0, '0')": "no operation of a region",
    "%2 = _c10d_functional.all_reduce_.default(%0, 'sum', '0')": "no operation of a region",
    "%2 = aten.__class__.default(%0)": "no operation of a region",
    "%2 = os.system('ls')": "no operation of a region",
    "%2 = size.system(%0)": "no operation of a region",
    "%2 = getitem(%0, __import__('os'))": "is no argument",
    "%2 = aten.neg.default(open)": "is no argument",
    "%2 = aten.neg.default(%0.real)": "is no argument",
    "%2 = aten.neg.default(1j)": "is no argument",
    "%2 = aten.neg.default(%0) + f(%0)": "no call|no input or operation",
    "%2 = aten.neg.default(%0); 1": "no input or operation",
    "%2 = aten.neg.default(%0": "no input or operation",
    "%2 = aten.neg.default(%0,,)": "invalid syntax",
    "%2 = aten.neg.default(*%0)": "is no argument",
    "%2 = aten.neg.default(**%0)": "has the arguments",
    "%2 = aten.neg.default(%0, %0)": "has the arguments self",
    "%2 = aten.neg.default(other=%0)": "has the arguments self",
    "%2 = aten.neg.default(%2)": "index out of range",
    "%3 = aten.neg.default(%0)": "no input or operation that gives %2",
    "%2 = input complex64[n]": "a dtype and sizes",
    "%2 = input float32[n, -1]": "a dtype and sizes",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused(line):
    with pytest.raises(ValueError, match=REFUSED[line]):
        Loop.parse(text(line))


HEADS = {
    HEAD.replace("rows=0,1", "rows=1,0"): "is not ascending",
    HEAD.replace("rows=0,1", "rows=0,2"): "is not ascending or not of",
    HEAD.replace("rows=0,1", "rows="): "no input has rows",
    HEAD.replace("sums=", "sums=1"): "is not ascending or not of",
    HEAD.replace("wide=", "wide=0,0"): "is not ascending or not of",
    HEAD.replace("compiled=1", "compiled=2"): "does not say which inputs have rows",
    HEAD.replace("sums= ", ""): "does not say which inputs have rows",
    HEAD + " merge=1:amax": "is not ascending or not of",
    HEAD + " merge=0:amax,0:amin": "is not ascending or not of",
    HEAD.replace("sums=", "sums=0") + " merge=0:amax": "is not ascending or not of",
    HEAD + " merge=0:median": "median is none of the merges amax, amin",
    HEAD + " merge=amax": "does not say which inputs have rows",
    HEAD + " merge=0:": "does not say which inputs have rows",
    HEAD + " merge=0:amax:1": "does not say which inputs have rows",
    HEAD + " merge=0:amax,": "does not say which inputs have rows",
    HEAD + " merge=": "does not say which inputs have rows",
    HEAD + " more=1": "does not say which inputs have rows",
    "": "does not say which inputs have rows",
}


@pytest.mark.parametrize("head", HEADS)
def test_heads_that_are_refused(head):
    with pytest.raises(ValueError, match=HEADS[head]):
        Loop.parse(text("%2 = aten.neg.default(%1)", head=head))


@pytest.mark.parametrize("last", ["return %9", "return f", "return %0 %1", ""])
def test_what_is_returned_is_computed(last):
    with pytest.raises(ValueError, match="return"):
        Loop.parse(text(last=last))
