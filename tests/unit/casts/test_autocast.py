"""Which autocast is in force at a node of a graph, and what autocast casts at all."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule

from fxpass.graph.autocast import autocast_dtype, covers
from fxpass.graph.region import Region, regions

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CPU = torch.device("cpu")


def inputs():
    return torch.randn(4, 8), torch.randn(10, 8, requires_grad=True)


def captured(fn, *args) -> GraphModule:
    """The graph that Dynamo makes of ``fn(*args)``."""
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch.compile(fn, backend=backend)(*args)
    (only,) = graphs
    return only


def plain(x, w):
    return F.linear(x, w)


def inside(x, w):
    with torch.autocast("cpu", BF16):
        return F.linear(x, w)


def inside_f16(x, w):
    with torch.autocast("cpu", F16):
        return F.linear(x, w)


def inside_default(x, w):
    with torch.autocast("cpu"):
        return F.linear(x, w)


def nested(x, w):
    with torch.autocast("cpu", BF16), torch.autocast("cpu", F16):
        return F.linear(x, w)


def after_nested(x, w):
    with torch.autocast("cpu", BF16):
        with torch.autocast("cpu", F16):
            x = x + 1
        return F.linear(x, w)


def before_nested(x, w):
    with torch.autocast("cpu", BF16):
        y = F.linear(x, w)
        with torch.autocast("cpu", F16):
            return y + 1


def disabled_inside(x, w):
    with torch.autocast("cpu", BF16), torch.autocast("cpu", enabled=False):
        return F.linear(x, w)


def after_disabled(x, w):
    with torch.autocast("cpu", BF16):
        with torch.autocast("cpu", enabled=False):
            x = x + 1
        return F.linear(x, w)


def after_it(x, w):
    with torch.autocast("cpu", BF16):
        x = x + 1
    return F.linear(x, w)


def other_device(x, w):
    with torch.autocast("xpu", F16):
        return F.linear(x, w)


def other_device_inside(x, w):
    with torch.autocast("cpu", BF16), torch.autocast("xpu", F16):
        return F.linear(x, w)


def after_other_device(x, w):
    with torch.autocast("cpu", BF16):
        with torch.autocast("xpu", F16):
            x = x + 1
        return F.linear(x, w)


@pytest.mark.filterwarnings("ignore:.*[Dd]isabling autocast:UserWarning")  # there is no xpu here
@pytest.mark.parametrize("ambient", [None, F16])
@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (plain, "ambient"),
        (inside, BF16),
        (inside_f16, F16),
        (inside_default, "default"),
        (nested, F16),
        (after_nested, BF16),
        (before_nested, BF16),
        (disabled_inside, None),
        (after_disabled, BF16),
        (after_it, "ambient"),
        (other_device, "ambient"),
        (other_device_inside, BF16),
        (after_other_device, BF16),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_autocast_dtype(fn, expected, ambient):
    around = nullcontext() if ambient is None else torch.autocast("cpu", ambient)
    with around:
        gm = captured(fn, *inputs())
        (site,) = gm.graph.find_nodes(op="call_function", target=torch._C._nn.linear)
        got = autocast_dtype(Region(gm), site, CPU)
        default = torch.get_autocast_dtype("cpu")
    assert got == {"ambient": ambient, "default": default}.get(expected, expected)
    # and that is what the linear really computes in
    assert site.meta["example_value"].dtype == (got or F32)


@pytest.mark.parametrize(("kind", "expected"), [("cpu", None), ("cuda", F16)])
def test_autocast_is_that_of_the_operands_device(kind, expected):
    graph = Graph()
    enter = torch.amp.autocast_mode._enter_autocast
    graph.call_function(enter, ("cuda", F16, True, None))
    site = graph.placeholder("site")
    region = Region(GraphModule(torch.nn.Module(), graph))
    assert autocast_dtype(region, site, torch.device(kind)) == expected


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


@pytest.mark.parametrize("where", ["around", "inside"])
def test_autocast_is_off_in_backward(where):
    def program(x, w):
        with torch.autocast("cpu", BF16) if where == "inside" else nullcontext():
            return Times.apply(x, w)

    with torch.autocast("cpu", BF16) if where == "around" else nullcontext():
        _, forward, backward = regions(captured(program, *inputs()))
        found = [
            {autocast_dtype(region, node, CPU) for node in region.module.graph.nodes}
            for region in (forward, backward)
        ]
    assert found == [{BF16}, {None}]


@pytest.mark.parametrize(
    ("operator", "kind", "expected"),
    [
        *[(f"aten::{name}", "cpu", True) for name in ("linear", "mm", "addmm", "matmul", "bmm")],
        *[(f"aten::{name}", "cpu", False) for name in ("addmm_", "mm.out", "matmul.out")],
        ("aten::_transformer_encoder_layer_fwd", "cpu", False),
        ("aten::mv", "cpu", False),
        ("aten::mv", "cuda", True),
        ("aten::linear", "meta", False),  # there is no autocast for it
        ("aten::no_such_operation", "cpu", False),
    ],
)
def test_what_autocast_covers(operator, kind, expected):
    assert covers(operator, torch.device(kind)) is expected
