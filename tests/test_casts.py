"""Casts: which dtype, where they are put, and what a user is told where autocast is missing."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import checkpoint

from fxpass.casts import Cast, MixedDtypeError, autocast_dtype, cast, common_dtype
from fxpass.region import Region
from fxpass.report import explain

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
CPU = torch.device("cpu")


def inputs(x: torch.dtype = F32, weight: torch.dtype = F32):
    return (
        torch.randn(4, 8).to(x),
        torch.randn(10, 8).to(weight).requires_grad_(),
        torch.arange(4),
    )


def captured(fn, *args) -> GraphModule:
    """The graph that Dynamo makes of ``fn(*args)``."""
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch.compile(fn, backend=backend)(*args)
    (only,) = graphs
    return only


# ---------------------------------------------------------------- which dtype


@pytest.mark.parametrize(
    ("x", "weight", "expected"),
    [
        (F32, F32, F32),
        (BF16, BF16, BF16),
        (F16, F16, F16),
        (F64, F64, F64),
        (BF16, F32, BF16),
        (F16, F32, F16),
        (F16, F64, F16),
        (F32, F64, F64),
    ],
)
def test_common_dtype(x, weight, expected, caplog):
    assert common_dtype(x, weight) == common_dtype(weight, x) == expected
    assert not caplog.records


@pytest.mark.parametrize("pair", [(F16, BF16), (BF16, F16)])
def test_float16_with_bfloat16_is_computed_in_float32_with_a_warning(pair, caplog):
    assert common_dtype(*pair) == F32
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("fxpass.casts", logging.WARNING)
    assert "float16 meets bfloat16: computed in float32" in record.getMessage()
    assert "check how it was loaded" in record.getMessage()


# ---------------------------------------------------------------- the node


def operand_and_site(dtype: torch.dtype):
    graph = Graph()
    operand, site = graph.placeholder("weight"), graph.placeholder("site")
    operand.meta["example_value"] = torch.ones(3, 2, dtype=dtype)
    site.meta["stack_trace"] = '  File "train.py", line 7, in step\n    loss = model(x)\n'
    return graph, operand, site


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_an_operand_of_the_dtype_is_left_alone(dtype):
    graph, operand, site = operand_and_site(dtype)
    before = list(graph.nodes)
    assert cast(graph, operand, dtype, site) == (operand, None)
    assert list(graph.nodes) == before


@pytest.mark.parametrize(("old", "new"), [(F32, BF16), (BF16, F32), (F16, F64)])
def test_another_operand_gets_a_visible_cast(old, new):
    graph, operand, site = operand_and_site(old)
    node, record = cast(graph, operand, new, site)
    assert (node.op, node.target, node.args) == ("call_method", "to", (operand, new))
    assert node.meta["example_value"].dtype == new
    assert node.meta["example_value"].shape == (3, 2)
    assert node.meta["stack_trace"] == site.meta["stack_trace"]
    assert record == Cast("weight", old, new, "train.py:7 loss = model(x)")


def test_a_cast_in_words():
    shown = str(Cast("l_w_", F32, BF16, "train.py:7 loss = model(x)"))
    assert shown == "cast: %l_w_ float32 -> bfloat16: train.py:7 loss = model(x)"


# ---------------------------------------------------------------- autocast, from real graphs


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
        gm = captured(fn, *inputs()[:2])
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


# ---------------------------------------------------------------- unlike dtypes


def loss(x, w, target):
    return F.cross_entropy(F.linear(x, w), target)


def loss_under_autocast(x, w, target):
    with torch.autocast("cpu", BF16):
        return F.cross_entropy(F.linear(x, w), target)


def loss_in_a_checkpoint(x, w, target):
    with torch.autocast("cpu", BF16):
        return checkpoint(loss, x, w, target, use_reentrant=False)


def strict(fn):
    options = {"fusedce.mixed_dtypes": "error", "fusedce.inner": "eager"}
    return torch.compile(fn, backend="fusedce", options=options)


@pytest.mark.parametrize(("x", "weight"), [(BF16, F32), (F32, F16), (F16, BF16)])
def test_mixed_dtypes_can_be_an_error(x, weight):
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        strict(loss)(*inputs(x, weight))
    error = caught.value.inner_exception
    assert isinstance(error, MixedDtypeError)
    x, weight = str(x).removeprefix("torch."), str(weight).removeprefix("torch.")
    assert f"{x} hidden states and a {weight} weight outside autocast" in str(error)
    number = loss.__code__.co_firstlineno + 1
    assert f"test_casts.py:{number} return F.cross_entropy(F.linear(x, w), target)" in str(error)
    assert "cast one of them, or let fxpass do it with FUSEDCE_MIXED_DTYPES=cast" in str(error)


@pytest.mark.parametrize("fn", [loss_under_autocast, loss_in_a_checkpoint])
def test_mixed_dtypes_under_autocast_are_no_error(fn):
    args = inputs(BF16, F32)
    torch.testing.assert_close(strict(fn)(*args), fn(*args), rtol=2e-2, atol=0)


def test_mixed_dtypes_under_an_autocast_around_the_call_are_no_error():
    args = inputs(BF16, F32)
    with torch.autocast("cpu", BF16):
        torch.testing.assert_close(strict(loss)(*args), loss(*args), rtol=2e-2, atol=0)


def test_one_dtype_is_no_error():
    args = inputs()
    torch.testing.assert_close(strict(loss)(*args), loss(*args))


@pytest.mark.parametrize("autocast", [BF16, F16])
def test_a_checkpointed_region_computes_in_the_dtype_of_its_autocast(autocast):
    def outer(x, w, target):
        with torch.autocast("cpu", autocast):
            return checkpoint(loss, x, w, target, use_reentrant=False)

    casts = explain(outer, *inputs(BF16, F32)).casts
    assert {made.new for made in casts} == {autocast}


@pytest.mark.parametrize(
    ("x", "weight", "new"), [(BF16, F32, {"l_w_": BF16}), (F16, BF16, {"l_x_": F32, "l_w_": F32})]
)
def test_mixed_dtypes_are_cast_otherwise(x, weight, new):
    report = explain(loss, *inputs(x, weight))
    assert {made.operand: made.new for made in report.casts} == new
