"""Casts: where they are put, what they compute, and what is left alone.

The programs are what eager refuses: each test that casts also shows that eager raises.
"""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from numerics import assert_close, error
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint

from fxpass.aot import casting
from fxpass.casts import Cast, cast, cast_aot_graph, cast_lines, cast_region
from fxpass.dtypes import MixedDtypeError
from fxpass.region import Region
from fxpass.report import explain

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
EAGER = {"fusedce.inner": "eager"}


def tensor(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def compiled(fn, **options):
    chosen = EAGER | {f"fusedce.{name}": value for name, value in options.items()}
    return torch.compile(fn, backend="fusedce", options=chosen)


class _CapturedError(Exception):
    """Ends a compilation: what was captured is not to be run."""


def captured(fn, *args) -> GraphModule:
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        raise _CapturedError

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="_CapturedError"):
        torch.compile(fn, backend=backend)(*args)
    return graphs[0]


# ---------------------------------------------------------------- one cast


def operand_and_site(dtype: torch.dtype) -> tuple[Graph, Node, Node]:
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


def test_casts_in_words_are_a_line_for_each_place():
    here, there = "train.py:7 loss = model(x)", "train.py:8 y = x @ w"
    made = [Cast(name, F32, BF16, here) for name in "abcde"]
    made += [Cast("x", F32, BF16, there), Cast("w", F16, F32, there), Cast("v", F32, BF16, there)]
    assert cast_lines(made) == [
        f"cast: %a, %b, %c and 2 more float32 -> bfloat16: {here}",
        f"cast: %x, %v float32 -> bfloat16: {there}",
        f"cast: %w float16 -> float32: {there}",
    ]


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
SAID = r"same dtype|to have the same|scalar type|must have the same"


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
    with pytest.raises(RuntimeError, match=SAID):
        function(*args)
    traced = captured(function, *args).graph.output_node().args[0][0].meta["example_value"].dtype
    torch._dynamo.reset()

    def program(*args):
        return function(*args).float().square().mean()

    out = compiled(program)(*args)
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


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in REFUSED.items()])
def test_dynamo_refuses_it_and_the_pass_would_not(case):
    function, *shapes = case
    args = [a.detach() for a in arguments(shapes, 1, BF16, F32)]
    with pytest.raises(RuntimeError):
        function(*args)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=r"dtype|type"):
        compiled(function)(*args)
    gm = graph_of(function, args)
    made = cast_region(Region(gm), "cast")
    assert [(c.operand, c.old, c.new) for c in made] == [("x1", F32, BF16)]
    torch.testing.assert_close(gm(*args), function(*[a.to(BF16) for a in args]), rtol=0, atol=0)


# ---------------------------------------------------------------- left alone


def same_dtypes(x, w):
    return F.linear(x, w).addmm_(x, w.t()).sum()


def under_autocast(x, w):
    with torch.autocast("cpu", BF16):
        return torch.mm(F.linear(x.bfloat16(), w), w).sum()


def with_float64(x, w):
    return F.linear(x.double(), w).sum()


def promoting(x, w):
    return (x.bfloat16() + w).sum() + F.layer_norm(x.bfloat16(), (8,), w[0], w[1]).sum()


@pytest.mark.parametrize("program", [same_dtypes, under_autocast, with_float64, promoting])
def test_a_graph_without_a_mismatch_is_left_byte_for_byte_alone(program):
    gm = captured(program, torch.randn(8, 8), tensor(8, 8))
    nodes, code = list(gm.graph.nodes), gm.code
    metas = [dict(node.meta) for node in nodes]
    assert cast_region(Region(gm), "error") == []
    assert list(gm.graph.nodes) == nodes
    assert [dict(node.meta) for node in nodes] == metas
    assert gm.code == code


def test_float64_beside_float32_raises_as_in_eager():
    args = torch.randn(8, 8), tensor(8, 8)
    for fn in (with_float64, compiled(with_float64)):
        with pytest.raises(RuntimeError, match="to have the same dtype"):
            fn(*args)


# ---------------------------------------------------------------- who is told what


def mixed(x, w):
    return F.linear(x, w).float().sum()


MIXED = ("l_w_", F32, BF16), __file__, mixed.__code__.co_firstlineno + 1


def test_a_cast_is_visible_and_carries_the_users_line():
    gm = captured(mixed, torch.randn(4, 8).bfloat16(), tensor(6, 8))
    (made,) = cast_region(Region(gm), "cast")
    (name, old, new), _, line = MIXED
    assert (made.operand, made.old, made.new) == (name, old, new)
    assert made.source == f"tests/test_casts.py:{line} return F.linear(x, w).float().sum()"
    (linear,) = gm.graph.find_nodes(op="call_function", target=torch._C._nn.linear)
    to = linear.args[1]
    assert (to.target, to.args[1]) == ("to", BF16)
    assert to.meta["stack_trace"] == linear.meta["stack_trace"]
    assert to.meta["example_value"].dtype == BF16


def test_counted_each_time_and_logged_once(caplog):
    caplog.set_level(logging.INFO)
    args = torch.randn(4, 8).bfloat16(), tensor(6, 8)
    for times in (1, 2):
        torch._dynamo.reset()
        compiled(mixed)(*args)
        assert torch._dynamo.utils.counters["fusedce"]["casts"] == times
    (line,) = [r.getMessage() for r in caplog.records if r.name == "fxpass.casts"]
    assert line.startswith("cast: %l_w_ float32 -> bfloat16: ")
    assert "test_casts.py" in line


def test_the_report_has_it():
    report = explain(mixed, torch.randn(4, 8).bfloat16(), tensor(6, 8))
    assert "1 cast\n  cast: %l_w_ float32 -> bfloat16: " in str(report)


def test_float16_with_bfloat16_warns_with_the_line(caplog):
    compiled(mixed)(torch.randn(4, 8).half(), tensor(6, 8, dtype=BF16))
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    line = MIXED[2]
    assert f"in linear, at tests/test_casts.py:{line} return" in record.getMessage()


# ---------------------------------------------------------------- the setting


def loss(x, w, target):
    return F.cross_entropy(F.linear(x, w), target)


def loss_under_autocast(x, w, target):
    with torch.autocast("cpu", BF16):
        return F.cross_entropy(F.linear(x, w), target)


def loss_in_a_checkpoint(x, w, target):
    with torch.autocast("cpu", BF16):
        return checkpoint(loss, x, w, target, use_reentrant=False)


def inputs(x: torch.dtype = F32, weight: torch.dtype = F32):
    return torch.randn(4, 8).to(x), tensor(10, 8, dtype=weight), torch.arange(4)


@pytest.mark.parametrize(("x", "weight"), [(BF16, F32), (F32, F16), (F16, BF16)])
def test_mixed_dtypes_can_be_an_error(x, weight):
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(loss, mixed_dtypes="error")(*inputs(x, weight))
    found = caught.value.inner_exception
    assert isinstance(found, MixedDtypeError)
    names = " and ".join(sorted(str(d).removeprefix("torch.") for d in (x, weight)))
    number = loss.__code__.co_firstlineno + 1
    line = f"test_casts.py:{number} return F.cross_entropy(F.linear(x, w), target)"
    assert f"operands of {names} meet outside autocast in linear, at tests/{line}" in str(found)
    assert "let fxpass cast with FUSEDCE_MIXED_DTYPES=cast" in str(found)


@pytest.mark.parametrize("fn", [loss_under_autocast, loss_in_a_checkpoint])
def test_mixed_dtypes_under_autocast_are_no_error(fn):
    args = inputs(BF16, F32)
    torch.testing.assert_close(
        compiled(fn, mixed_dtypes="error")(*args), fn(*args), rtol=2e-2, atol=0
    )


def test_mixed_dtypes_under_an_autocast_around_the_call_are_no_error():
    args = inputs(BF16, F32)
    with torch.autocast("cpu", BF16):
        got = compiled(loss, mixed_dtypes="error")(*args)
        torch.testing.assert_close(got, loss(*args), rtol=2e-2, atol=0)


@pytest.mark.parametrize("autocast", [BF16, F16])
def test_a_checkpointed_region_computes_in_the_dtype_of_its_autocast(autocast):
    def outer(x, w, target):
        with torch.autocast("cpu", autocast):
            return checkpoint(loss, x, w, target, use_reentrant=False)

    found = explain(outer, *inputs(BF16, F32)).casts
    assert {made.new for made in found} == {autocast}


@pytest.mark.parametrize(
    ("x", "weight", "new"), [(BF16, F32, {"l_w_": BF16}), (F16, BF16, {"l_x_": F32, "l_w_": F32})]
)
def test_a_loss_of_mixed_dtypes_is_cast_and_fused(x, weight, new):
    args = inputs(x, weight)
    report = explain(loss, *args)
    assert {made.operand: made.new for made in report.casts} == new
    assert len(report.matches) == 1
    got = compiled(loss)(*args)
    got.backward()
    same = next(iter(new.values()))
    alike = [a.detach().to(same).requires_grad_() for a in args[:2]]
    exact = [a.detach().double().requires_grad_() for a in args[:2]]
    expected, true = loss(*alike, args[2]), loss(*exact, args[2])
    expected.backward()
    true.backward()
    assert args[1].grad.dtype == weight
    theirs, trues = [expected, alike[1].grad], [true, exact[1].grad]
    assert_close([got, args[1].grad], theirs, trues, weight if weight != F32 else same)


# ---------------------------------------------------------------- nested graphs


class Lora(torch.autograd.Function):
    """Undecorated: its backward runs outside autocast, with what autocast left in forward."""

    @staticmethod
    def forward(ctx, x, w, a, b):
        ctx.save_for_backward(x, w, a, b)
        y = x @ w.t()
        return y.addmm_(x @ a.t(), b.t(), alpha=0.5)

    @staticmethod
    def backward(ctx, g):
        x, w, a, b = ctx.saved_tensors
        h = g @ b
        da = torch.zeros_like(a).addmm_(h.t(), x, alpha=0.5)
        db = torch.zeros_like(b).addmm_(g.t(), x @ a.t(), alpha=0.5)
        dx = torch.matmul(g, w, out=torch.empty_like(x))
        return dx.addmm_(h, a, alpha=0.5), None, da, db


def lora(x, w, a, b):
    return Lora.apply(x, w, a, b).float().square().mean()


def lora_tensors():
    return torch.randn(12, 16).bfloat16(), torch.randn(8, 16), tensor(2, 16), tensor(8, 2)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointed", [None, True, False], ids=["plain", "reentrant", "not"])
def test_both_bodies_of_an_autograd_function(inner, autocast, checkpointed):
    x, w, a, b = lora_tensors()
    x.requires_grad_()

    def program(x, a, b):
        with torch.autocast("cpu", BF16, enabled=autocast):
            if checkpointed is None:
                return lora(x, w, a, b)
            return checkpoint(lora, x, w, a, b, use_reentrant=checkpointed)

    with pytest.raises(RuntimeError, match=SAID):
        program(x, a, b).backward()
    for leaf in (x, a, b):
        leaf.grad = None
    compiled(program, inner=inner)(x, a, b).backward()
    exact = [t.detach().double().requires_grad_() for t in (x, a, b)]
    y = exact[0] @ w.double().t() + 0.5 * (exact[0] @ exact[1].t()) @ exact[2].t()
    y.square().mean().backward()
    for got, true in zip((x, a, b), exact, strict=True):
        assert got.grad.dtype == got.dtype
        assert error(got.grad, true.grad) < 2**-6  # a few roundings to bfloat16


def test_the_graph_of_an_autograd_function():
    x, w, a, b = lora_tensors()
    after = explain(lora, x.requires_grad_(), w, a, b).after[0]
    backward = after[after.index("%bwd_body_0 =") : after.index("%autograd_function_apply")]
    casts_there = [line.split("= ")[1] for line in backward.splitlines() if "= to(" in line]
    assert casts_there == [
        "to(%l_b_, torch.bfloat16)",  # g @ b
        "to(%t, torch.float32)",  # into da, an accumulator
        "to(%l_x_, torch.float32)",
        "to(%t_2, torch.bfloat16)",  # x @ a.t()
        "to(%t_1, torch.float32)",  # into db
        "to(%matmul_1, torch.float32)",
        "to(%l_w_, torch.bfloat16)",  # g @ w
        "to(%l_a_, torch.bfloat16)",  # h, a
    ]


def test_the_branches_of_a_cond():
    def program(x, w):
        return torch.cond(x.sum() > 0, lambda x, w: x @ w, lambda x, w: x @ (w + 1), (x, w))

    x, w = torch.ones(4, 8).bfloat16(), torch.randn(8, 6)
    for sign in (1, -1):
        got = compiled(program)(x * sign, w)
        expected = (x * sign) @ (w if sign > 0 else w + 1).bfloat16()
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert len(explain(program, x, w).casts) == 2


# ---------------------------------------------------------------- AOTAutograd's graphs


@torch._dynamo.allow_in_graph
def opaque(x, w):
    return torch.mm(x, w)


def gru(x, w):
    """A composite operation: its matrix products show only in AOTAutograd's graph."""
    return torch.gru_cell(x, x, w, w)


AOT_ONLY = {
    "a function that Dynamo does not look into": (opaque, (4, 8), (8, 6)),
    "a composite operation": (gru, (4, 8), (24, 8)),
}


@pytest.mark.parametrize(
    ("case", "inner"),
    [
        pytest.param(AOT_ONLY["a function that Dynamo does not look into"], "aot_eager"),
        pytest.param(AOT_ONLY["a composite operation"], "aot_eager"),
        pytest.param(AOT_ONLY["a composite operation"], "inductor"),
    ],
)
def test_what_only_aot_shows(case, inner):
    function, *shapes = case
    x, w = tensor(*shapes[0], dtype=BF16), tensor(*shapes[1])
    with pytest.raises(RuntimeError, match=SAID):
        function(x, w)

    def program(x, w):
        return function(x, w).float().square().mean()

    compiled(program, inner=inner)(x, w).backward()
    assert torch._dynamo.utils.counters["fusedce"]["casts"] > 0
    alike = [t.detach().bfloat16().requires_grad_() for t in (x, w)]
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    program(*alike).backward()
    program(*exact).backward()
    assert (x.grad.dtype, w.grad.dtype) == (BF16, F32)
    assert_close(*([t.grad for t in ts] for ts in ((x, w), alike, exact)), BF16)


def test_inductor_gets_casts_without_gradients_too():
    x, w = torch.randn(4, 8).bfloat16(), torch.randn(24, 8)
    with torch.no_grad():
        got = compiled(gru, inner="inductor")(x, w)
    expected, exact = gru(x, w.bfloat16()), gru(x.double(), w.double())
    assert_close([got], [expected], [exact], BF16)


@pytest.mark.parametrize("gradients", [True, False])
def test_the_report_has_what_only_aot_shows(gradients):
    x, w = torch.randn(4, 8).bfloat16(), torch.randn(24, 8, requires_grad=gradients)
    found = explain(gru, x, w).casts
    assert {(made.old, made.new) for made in found} == {(F32, BF16)}
    assert all("torch.gru_cell(x, x, w, w)" in made.source for made in found)


def test_the_error_is_raised_for_what_only_aot_shows():
    x, w = torch.randn(4, 8).bfloat16(), tensor(24, 8)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="meet outside autocast"):
        compiled(gru, inner="aot_eager", mixed_dtypes="error")(x, w)


def test_an_aot_graph_without_a_mismatch_is_left_alone():
    seen = []

    def look(joint: GraphModule, inputs):
        nodes, code = list(joint.graph.nodes), joint.code
        assert cast_aot_graph(joint.graph, "error") == []
        seen.append((list(joint.graph.nodes) == nodes, joint.code == code))
        return joint

    x, w = torch.randn(4, 8), tensor(24, 8)
    with torch._functorch.config.patch(joint_custom_pass=look):
        torch.compile(gru, backend="aot_eager")(x, w)
    assert seen == [(True, True)]


def test_the_users_own_joint_passes_still_run():
    called = []
    x, w = torch.randn(4, 8).bfloat16(), tensor(24, 8)
    options = {"joint_custom_pre_pass": lambda graph: called.append("inductor")}
    torch.compile(gru, backend="fusedce", options=options)(x, w)
    torch._dynamo.reset()
    theirs = lambda joint, inputs: called.append("aot") or joint  # noqa: E731
    with torch._functorch.config.patch(joint_custom_pass=theirs):
        compiled(gru, inner="aot_eager")(x, w)
    assert called == ["inductor", "aot"]


class Times(torch.autograd.Function):
    """Its forward casts for itself, its backward does not."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), (x.t() @ g).to(w.dtype)


@torch._dynamo.allow_in_graph
def times(x, w):
    return Times.apply(x, w)


def test_a_cast_for_backward_is_in_the_backward_graph():
    counts, found = [], []

    def count(graph: GraphModule, inputs):
        target = torch.ops.prims.convert_element_type.default
        counts.append(len(graph.graph.find_nodes(op="call_function", target=target)))
        return make_boxed_func(graph.forward)

    x, w = tensor(4, 8, dtype=BF16), tensor(8, 6)
    with pytest.raises(RuntimeError, match=SAID):
        times(x, w).sum().backward()
    with casting("cast", found.extend):
        inner = aot_autograd(fw_compiler=count, bw_compiler=count)
        torch.compile(times, backend=inner)(x, w).sum().backward()
    assert [(made.old, made.new) for made in found] == [(F32, BF16)]
    assert counts == [0, 1]
    torch.testing.assert_close(x.grad, torch.ones(4, 6).bfloat16() @ w.bfloat16().t())


# ---------------------------------------------------------------- an encoder layer


def encoder() -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    ).eval()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_evaluation_of_an_encoder_under_autocast(inner):
    model, x = encoder(), torch.randn(2, 5, 64)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        with pytest.raises(RuntimeError, match=SAID):
            torch.compile(model, backend=inner)(x)
        torch._dynamo.reset()
        got = compiled(model, inner=inner)(x)
        expected = model(x)
    exact = model.double()(x.double())
    assert_close([got], [expected], [exact], BF16)
