"""The text of a graph: stable, complete, nested graphs indented."""

from __future__ import annotations

import operator

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

from fxpass.graph.text import graph_text
from fxpass.op.rows import NAME


def captured(fn, *args) -> str:
    """The text of the one graph that Dynamo makes of ``fn(*args)``."""
    texts = []

    def backend(gm, example_inputs):
        texts.append(graph_text(gm))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend)(*args)
    (only,) = texts
    return only


def shift(h, weight, labels):
    logits = F.linear(h, weight)[..., :-1, :]
    rows = logits[1:, ::2].float().contiguous()
    return F.cross_entropy(rows.flatten(0, 1), labels, ignore_index=-1)


def block(x):
    return torch.tanh(x) + x


def checkpointed(x):
    return checkpoint(block, x, use_reentrant=False).sum() * 2


SHIFT = (torch.ones(3, 5, 4, dtype=torch.bfloat16), torch.ones(7, 4, dtype=torch.bfloat16))
LABELS = torch.zeros(4, dtype=torch.int64)


class TestGraphText(expecttest.TestCase):
    def test_slices_and_types(self):
        self.assertExpectedInline(
            captured(shift, *SHIFT, LABELS),
            """\
%l_h_: bf16[3, 5, 4] = input
%l_weight_: bf16[7, 4] = input
%l_labels_: i64[4] = input
%linear: bf16[3, 5, 7] = linear(%l_h_, %l_weight_)
%logits: bf16[3, 4, 7] = operator.getitem(%linear, (..., :-1, :))
%getitem_1: bf16[2, 2, 7] = operator.getitem(%logits, (1:, ::2))
%float_1: f32[2, 2, 7] = float(%getitem_1)
%rows: f32[2, 2, 7] = contiguous(%float_1)
%flatten: f32[4, 7] = flatten(%rows, 0, 1)
%cross_entropy: f32[] = cross_entropy(%flatten, %l_labels_, ignore_index=-1)
return (%cross_entropy,)""",
        )

    def test_nested(self):
        self.assertExpectedInline(
            captured(checkpointed, torch.ones(2, 3)),
            """\
%l_x_: f32[2, 3] = input
%wrap_body_0 = wrap_body_0
    %l_x_: f32[2, 3] = input
    %tanh: f32[2, 3] = tanh(%l_x_)
    %add: f32[2, 3] = operator.add(%tanh, %l_x_)
    return (%add,)
%tag_activation_checkpoint = tag_activation_checkpoint(%wrap_body_0, %l_x_, use_reentrant=False)
%getitem: f32[2, 3] = operator.getitem(%tag_activation_checkpoint, 0)
%sum_1: f32[] = sum(%getitem)
%mul: f32[] = operator.mul(%sum_1, 2)
return (%mul,)""",
        )


def test_two_captures_give_one_text():
    assert captured(checkpointed, torch.ones(2, 3)) == captured(checkpointed, torch.ones(2, 3))


class Token:
    """Shown by Python with its address."""


TOKEN = Token()


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        (slice(None), ":"),
        (slice(1, None), "1:"),
        (slice(None, -1), ":-1"),
        (slice(0, 6, 2), "0:6:2"),
        (slice(None, None, 2), "::2"),
        (..., "..."),
        ((..., 0), "(..., 0)"),
        ((1,), "(1,)"),
        ((), "()"),
        ([1, [2, None]], "(1, (2, None))"),
        ({"a": slice(2), "b": (1.5,)}, "{a: :2, b: (1.5,)}"),
        ("mean", "'mean'"),
        (torch.float16, "torch.float16"),
        (True, "True"),
        (TOKEN, f"<{__name__}.Token object>"),
        (len, "<built-in function len>"),
        (captured, "<function captured>"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_arguments(argument, shown):
    gm = GraphModule(torch.nn.Module(), Graph())
    gm.graph.output(()).args = (argument,)
    assert graph_text(gm) == f"return {shown}"


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        (operator.getitem, "operator.getitem"),
        (operator.add, "operator.add"),
        (torch.add, "add"),
        (torch._C._nn.linear, "linear"),
        (torch.ops.aten.mm.default, "aten.mm"),
        ("view", "view"),
    ],
)
def test_targets(target, shown):
    graph = Graph()
    node = graph.placeholder("x")
    call = graph.call_method if isinstance(target, str) else graph.call_function
    call(target, (node, 2), {"out": node})
    (_, line) = graph_text(GraphModule(torch.nn.Module(), graph)).split("\n")
    assert line.endswith(f" = {shown}(%x, 2, out=%x)")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (torch.ones(2, 3, dtype=torch.float64), ": f64[2, 3]"),
        (torch.ones((), dtype=torch.bool), ": b8[]"),
        (torch.ones(0, dtype=torch.complex64), ": c64[0]"),
        (3, ""),
        (None, ""),
    ],
)
def test_types(value, shown):
    gm = GraphModule(torch.nn.Module(), Graph())
    gm.graph.placeholder("x").meta["example_value"] = value
    assert graph_text(gm) == f"%x{shown} = input"


def test_operands_of_an_operator_have_their_names():
    """ATen's are known; of an operator of a library one has to look them up. A loop is a text."""
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.fxpass.rows.default, ([x, x], "rows; %0 = input f32"))
    graph.call_function(torch.ops.aten.add.Tensor, (x, 1))
    lines = graph_text(GraphModule({}, graph)).splitlines()
    assert lines[1:] == [
        f"%rows_default = {NAME.replace('::', '.')}(tensors=(%x, %x))",
        "    rows",
        "    %0 = input f32",
        "%add_tensor = aten.add(%x, 1)",
    ]
