"""The parts of a loop."""

from __future__ import annotations

import expecttest

from fxpass.region.broadcast import broadcastable, with_broadcasts
from fxpass.region.loop import Loop
from fxpass.region.split import split_loop
from fxpass.region.text import lines_of
from tests.unit.op.test_rows import TEXTS


def test_the_parts_of_a_low_rank_head():
    """Of a text in which rows are multiplied twice, and what is multiplied is made."""
    found = split_loop(Loop.parse(TEXTS["low rank"]))
    expecttest.assert_expected_inline(
        "\n".join(lines_of(found.function)),
        """\
%0 = input float32[n, 11]
%1 = input float32[n, 4]
%2 = input float64[n]
%3 = input float32[11, 4]
%4 = input float32[4, 11]
%5 = aten.mm.default(%1, %4)
%6 = aten.add.Tensor(%0, %5)
%7 = aten.tanh.default(%6)
%8 = aten.mm.default(%7, %3)
return %2, %7, %8, %1""",
    )
    expecttest.assert_expected_inline(
        "\n".join(map(str, [*found.heads, *found.groups])),
        """\
HeadOperands(x=0, weight=0, bias=None, logits=Input(dtype=torch.float32, shape=('n', 11)), hidden=5)
HeadOperands(x=0, weight=1, bias=None, logits=Input(dtype=torch.float32, shape=('n', 4)), hidden=5)
Group(output=1, gradient=Input(dtype=torch.float32, shape=('n', 11)), tails=(Tail(result=1, weight=2, operand=None, output=None, transposed=False), Tail(result=2, weight=None, operand=0, output=None, transposed=False), Tail(result=3, weight=None, operand=None, output=3, transposed=False)))
Group(output=2, gradient=Input(dtype=torch.float32, shape=('n', 4)), tails=(Tail(result=4, weight=None, operand=0, output=None, transposed=False),))""",
    )


def test_invariants_are_computed_once():
    text = """rows rows=0 sums= wide= memory_mb=0 compiled=0
%0 = input float32[n, 5]
%1 = input float32[5]
%2 = aten.full.default([], 3.0)
%3 = aten.mul.Tensor(%1, %2)
%4 = aten.exp.default(%3)
%5 = aten.mul.Tensor(%0, %4)
%6 = aten.mul.Tensor(%5, %2)
return %6"""
    found = split_loop(Loop.parse(text))
    assert lines_of(found.before)[-1] == "return %3"
    assert "aten.exp" not in "".join(lines_of(found.function))
    assert "aten.full" in "".join(lines_of(found.function))  # a constant fuses


def test_a_product_that_is_read_elsewhere_stays():
    text = """rows rows=0 sums=0 wide= memory_mb=0 compiled=0
%0 = input float32[n, 5]
%1 = input float32[5, 9]
%2 = aten.mm.default(%0, %1)
%3 = aten.exp.default(%2)
%4 = aten.t.default(%3)
%5 = aten.mm.default(%4, %0)
%6 = aten.neg.default(%5)
return %6"""
    found = split_loop(Loop.parse(text))
    assert found.heads
    assert not found.groups


def test_expanded_inputs_are_read_once_a_row():
    text = """rows rows=0,1 sums= wide= memory_mb=0 compiled=0
%0 = input float32[n, v]
%1 = input float32[n, v]
%2 = input float32[v]
%3 = aten.add.Tensor(%0, %1)
%4 = aten.add.Tensor(%3, %2)
return %4"""
    function = split_loop(Loop.parse(text)).function
    assert broadcastable(function, (0, 1)) == (0, 1)
    assert (
        broadcastable(split_loop(Loop.parse(text.replace("32[v]", "32[1]"))).function, (0, 1)) == ()
    )
    expecttest.assert_expected_inline(
        "\n".join(lines_of(with_broadcasts(function, (1,)))),
        """\
%0 = input float32[n, v]
%1 = input float32[n, 1]
%2 = input float32[v]
%3 = aten.sym_size.int(%2, 0)
%4 = aten.expand.default(%1, [-1, %3])
%5 = aten.add.Tensor(%0, %4)
%6 = aten.add.Tensor(%5, %2)
return %6""",
    )
