"""The table of operations whose operands have to be of one dtype."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from fxpass.casts.rules import OPERATIONS, rule_of

aten = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16


def call(target, *args, op="call_function", **kwargs) -> Node:
    """A call whose tensors are the strings among the arguments: ``"x"`` is a float32 input."""
    graph = Graph()

    def node(argument):
        if not isinstance(argument, str):
            return argument
        made = graph.placeholder(argument)
        dtype = torch.int64 if argument == "index" else F32
        made.meta["example_value"] = torch.ones(2, 2, dtype=dtype)
        return made

    args = tuple(map(node, args))
    kwargs = {name: node(value) for name, value in kwargs.items()}
    return graph.create_node(op, target, args, kwargs)


def slots(node: Node) -> dict[int | str, str]:
    rule = rule_of(node)
    assert rule is not None
    found = rule.operands(node, "example_value")
    return {slot: operand.name for slot, operand in found.items()}


LINEARS = (F.linear, aten.linear.default)
MATMULS = (torch.matmul, operator.matmul, operator.imatmul, aten.matmul.default)
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d)


@pytest.mark.parametrize("target", [*LINEARS, *CONVOLUTIONS, aten.convolution.default])
def test_input_weight_and_bias(target):
    assert slots(call(target, "x", "w", "b")) == {0: "x", 1: "w", 2: "b"}
    assert slots(call(target, "x", weight="w")) == {0: "x", "weight": "w"}
    assert slots(call(target, input="x", weight="w")) == {"input": "x", "weight": "w"}


@pytest.mark.parametrize("target", [*MATMULS, torch.mm, torch.bmm, torch.mv, aten.mm.default])
def test_two_operands(target):
    assert slots(call(target, "x", "w")) == {0: "x", 1: "w"}


@pytest.mark.parametrize("name", ["matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv"])
def test_two_operands_of_a_method(name):
    assert slots(call(name, "x", "w", op="call_method")) == {0: "x", 1: "w"}


@pytest.mark.parametrize("name", ["addmm", "baddbmm", "addbmm", "addmv"])
def test_three_operands(name):
    expected = {0: "x", 1: "a", 2: "b"}
    for target in (getattr(torch, name), getattr(aten, name).default):
        assert slots(call(target, "x", "a", "b", beta=2)) == expected
    for method in (name, name + "_"):
        assert slots(call(method, "x", "a", "b", op="call_method")) == expected


def test_the_mask_of_an_attention_is_no_operand():
    node = call(F.scaled_dot_product_attention, "q", "k", "v", "mask")
    assert slots(node) == {0: "q", 1: "k", 2: "v"}
    node = call(F.scaled_dot_product_attention, "q", "k", "v", attn_mask="mask")
    assert slots(node) == {0: "q", 1: "k", 2: "v"}


def test_all_parameters_of_an_encoder_layer_are():
    given = [f"p{i}" for i in range(12)]
    norms, linears = given[4:8], given[8:]
    node = call(
        *(torch._transformer_encoder_layer_fwd, "src", 8, 2, *given[:4], True, False, 1e-5),
        *(*norms, *linears, "mask", 1),
    )
    assert list(slots(node).values()) == ["src", *given]


def test_integers_are_none():
    assert slots(call(torch.mm, "index", "w")) == {1: "w"}


def test_who_is_written():
    written = {
        call("addmm_", "x", "a", "b", op="call_method"): "x",
        call(torch.mm, "a", "b", out="x"): "x",
        call(torch.mm, "a", "b"): None,
    }
    for node, expected in written.items():
        rule = rule_of(node)
        assert rule is not None
        found = rule.written(node)
        assert (found and found.name) == expected


def test_the_overload_that_autocast_is_asked_about():
    for node, expected in (
        (call(torch.mm, "a", "b"), "aten::mm"),
        (call(torch.mm, "a", "b", out="x"), "aten::mm.out"),
        (call("addmm_", "x", "a", "b", op="call_method"), "aten::addmm_"),
        (call(F.conv_transpose2d, "x", "w"), "aten::conv_transpose2d.input"),
    ):
        rule = rule_of(node)
        assert rule is not None
        assert rule.overload(node) == expected
        assert torch._C._dispatch_has_kernel(expected)


@pytest.mark.parametrize(
    "node",
    [
        call(torch.add, "a", "b"),
        call(F.layer_norm, "a", (2,), "w", "b"),
        call("mm", op="placeholder"),
        call(torch.mm, "a", "b", out_dtype=F32),  # meant to be of several dtypes
        call(torch.mm, "a", "b", F32),
    ],
    ids=str,
)
def test_other_nodes_have_no_rule(node):
    assert rule_of(node) is None


OVERLOADS = [(name, o) for name in sorted(OPERATIONS) for o in getattr(aten, name).overloads()]


@pytest.mark.parametrize(("name", "overload"), OVERLOADS)
def test_the_operands_of_every_row_are_tensors_of_its_schema(name, overload):
    rule = rule_of(call(getattr(getattr(aten, name), overload), "x", "w"))
    if rule is None:
        assert "out" in overload or overload.startswith("dtype")
        return
    name, _, overload = rule.name.removeprefix("aten::").partition(".")
    arguments = getattr(getattr(aten, name), overload or "default")._schema.arguments
    assert len(rule.slots) >= 2
    for position, slot in rule.slots.items():
        assert arguments[position].name == slot
        assert "Tensor" in str(arguments[position].type)
