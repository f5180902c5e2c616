"""Casts, operation by operation: what they compute, wherever the operation shows.

The programs are what eager refuses; for each operation a test also shows that eager raises.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule

from fxpass.casts.casts import cast_region
from fxpass.graph.region import Region
from tests.support.mixed_dtypes import BF16, F16, F32, SAID, captured, compiled, tensor

# ---------------------------------------------------------------- every operation that arrives


def out_of(function):
    return lambda *args: function(*args, out=torch.empty(4, 6, dtype=args[0].dtype))


def in_place(name):
    """The method on a copy of its first operand, which autograd would not let be written."""
    return lambda x, *args: getattr(x.clone(), name)(*args, beta=0.5, alpha=2)


OUT_OF_PLACE = {
    "linear": (F.linear, (4, 8), (6, 8)),
    "linear with bias": (F.linear, (4, 8), (6, 8), (6,)),
    "@": (lambda x, w: x @ w, (4, 8), (8, 6)),
    "@ of three dimensions": (lambda x, w: x @ w, (2, 4, 8), (8, 6)),
    "matmul": (torch.matmul, (4, 8), (8, 6)),
    "method matmul": (lambda x, w: x.matmul(w), (4, 8), (8, 6)),
    "mm": (torch.mm, (4, 8), (8, 6)),
    "method mm": (lambda x, w: x.mm(w), (4, 8), (8, 6)),
    "mv": (torch.mv, (4, 8), (8,)),
    "addmm": (lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2), (6,), (4, 8), (8, 6)),
    "addbmm": (torch.addbmm, (4, 6), (3, 4, 8), (3, 8, 6)),
}
WRITING = {
    "addmm_": (in_place("addmm_"), (4, 6), (4, 8), (8, 6)),
    "addbmm_": (in_place("addbmm_"), (4, 6), (3, 4, 8), (3, 8, 6)),
}
OUT = {
    "mm(out=)": (out_of(torch.mm), (4, 8), (8, 6)),
    "matmul(out=)": (out_of(torch.matmul), (4, 8), (8, 6)),
}


def arguments(shapes, mixed: int, first: torch.dtype, second: torch.dtype):
    """Operands in ``first``, but for that at position ``mixed``, which is in ``second``."""
    return [tensor(*shape, dtype=second if i == mixed else first) for i, shape in enumerate(shapes)]


def each_operand(table):
    return [
        pytest.param(case, position, id=f"{name}-{position}")
        for name, case in table.items()
        for position in range(len(case) - 1)
    ]


@pytest.mark.parametrize("dtypes", [(BF16, F32), (F32, F16), (F16, BF16)])
@pytest.mark.parametrize(("case", "mixed"), each_operand(OUT_OF_PLACE))
def test_an_operation_computes_what_it_does_in_one_dtype(case, mixed, dtypes):
    function, *shapes = case
    args = arguments(shapes, mixed, *dtypes)
    low = F32 if set(dtypes) == {F16, BF16} else next(d for d in dtypes if d != F32)
    added = {F.linear: 2}.get(function, 0 if len(shapes) == 3 else None)
    if dtypes[0] == F32 and mixed == added:
        low = F32  # what is added does not lower the precision of a product
    with pytest.raises(RuntimeError, match=SAID):
        function(*args)
    traced = captured(function, *args).graph.output_node().args[0][0].meta["example_value"].dtype
    torch._dynamo.reset()

    def program(*args):
        return function(*args).float().square().mean()

    out = compiled(program, min_logits_mb=64)(*args)  # no product becomes a loop
    out.backward()
    same = [a.detach().to(low).requires_grad_() for a in args]
    function(*same).to(traced).float().square().mean().backward()
    # the same numbers, and gradients in the dtype of each operand
    for ours, theirs in zip(args, same, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad.to(ours.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("first", [BF16, F16])
@pytest.mark.parametrize(("case", "mixed"), each_operand(WRITING))
def test_an_in_place_form_computes_in_the_dtype_that_it_writes(case, mixed, first):
    function, *shapes = case
    args = arguments(shapes, mixed, first, F32)
    with pytest.raises(RuntimeError, match=SAID):
        function(*args)
    got = compiled(function)(*args)
    written = args[0].dtype  # float32 where the first is the odd one: an accumulator
    assert got.dtype == written
    torch.testing.assert_close(got, function(*[a.to(written) for a in args]), rtol=0, atol=0)


@pytest.mark.parametrize(("case", "mixed"), each_operand(WRITING))
@pytest.mark.parametrize("dtypes", [(F16, BF16), (BF16, F16)])
def test_an_in_place_form_of_float16_and_bfloat16_is_computed_in_float32(case, mixed, dtypes):
    function, *shapes = case
    args = arguments(shapes, mixed, *dtypes)
    with pytest.raises(RuntimeError, match=SAID):
        function(*args)
    got = compiled(function)(*args)
    assert got.dtype == args[0].dtype
    expected = function(*[a.float() for a in args]).to(got.dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtypes", [(BF16, F32), (F16, F32), (F32, BF16), (F16, BF16)])
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in OUT.items()])
def test_an_out_form_too(case, dtypes):
    function, *shapes = case
    args = [a.detach() for a in arguments(shapes, 1, *dtypes)]
    with pytest.raises(RuntimeError, match=SAID):
        function(*args)
    got = compiled(function)(*args)
    assert got.dtype == args[0].dtype
    low = F32 if args[0].dtype == F32 or set(dtypes) == {F16, BF16} else args[0].dtype
    expected = (args[0].to(low) @ args[1].to(low)).to(got.dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_what_is_written_is_written():
    """The tensor itself and its views change, as in eager, when a copy is what writes to it."""

    def program(x, a, b):
        x = x.clone()
        view = x[1:]
        y = x.addmm_(a, b)
        return x, view, y

    args = [t.detach() for t in (tensor(4, 6, dtype=F16), tensor(4, 8, dtype=BF16), tensor(8, 6))]
    x, view, y = compiled(program)(*args)
    expected = torch.addmm(args[0].float(), args[1].float(), args[2]).half()
    for got, want in ((x, expected), (view, expected[1:]), (y, expected)):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


# ---------------------------------------------------------------- what Dynamo refuses first


REFUSED = {
    "bmm": (torch.bmm, (2, 4, 8), (2, 8, 6)),
    "baddbmm": (torch.baddbmm, (2, 4, 6), (2, 4, 8), (2, 8, 6)),
    "conv1d": (F.conv1d, (1, 3, 8), (4, 3, 3)),
    "conv2d": (F.conv2d, (1, 3, 8, 8), (4, 3, 3, 3)),
    "conv3d": (F.conv3d, (1, 3, 8, 8, 8), (4, 3, 3, 3, 3)),
    "conv_transpose1d": (F.conv_transpose1d, (1, 3, 8), (3, 4, 3)),
    "conv_transpose2d": (F.conv_transpose2d, (1, 3, 8, 8), (3, 4, 3, 3)),
    "conv_transpose3d": (F.conv_transpose3d, (1, 3, 8, 8, 8), (3, 4, 3, 3, 3)),
    "attention": (F.scaled_dot_product_attention, (1, 2, 4, 8), (1, 2, 5, 8), (1, 2, 5, 8)),
}


def graph_of(function, args) -> GraphModule:
    """The graph of one call, as it would arrive if nobody had refused it."""
    graph = Graph()
    given = [graph.placeholder(f"x{i}") for i in range(len(args))]
    for node, value in zip(given, args, strict=True):
        node.meta["example_value"] = value.detach()
    node = graph.call_function(function, tuple(given))
    alike = [a.detach().to(args[0].dtype) for a in args]
    node.meta["example_value"] = function(*alike)
    graph.output(node)
    return GraphModule(torch.nn.Module(), graph)


def traced_dtype(function, args) -> torch.dtype | None:
    """Of the result, as Dynamo has it; None where Dynamo refuses the call."""
    try:
        gm = captured(function, *args)
    except torch._dynamo.exc.TorchRuntimeError:
        return None
    return gm.graph.output_node().args[0][0].meta["example_value"].dtype


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in REFUSED.items()])
def test_dynamo_refuses_it_and_the_pass_would_not(case):
    """Dynamo of torch 2.11 does not refuse all of it: then it is cast."""
    function, *shapes = case
    args = [a.detach() for a in arguments(shapes, 1, BF16, F32)]
    with pytest.raises(RuntimeError):
        function(*args)
    expected = function(*[a.to(BF16) for a in args])
    traced = traced_dtype(function, args)
    torch._dynamo.reset()
    if traced is None:
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=r"dtype|type"):
            compiled(function)(*args)
    else:
        got = compiled(function)(*args)
        torch.testing.assert_close(got, expected.to(traced), rtol=0, atol=0)
    gm = graph_of(function, args)
    made = cast_region(Region(gm), "cast")
    assert [(c.operand, c.old, c.new) for c in made] == [("x1", F32, BF16)]
    torch.testing.assert_close(gm(*args), expected, rtol=0, atol=0)
