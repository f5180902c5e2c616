"""Collectives in regions: where heads have the same sizes on all ranks, and only there.

Ranks that do not exist: a fake process group, which exchanges nothing. Values are those of
:mod:`tests.ranks.joint`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxpass import messages
from fxpass.op.row_chunks import prepared
from fxpass.op.rows import describe_call, rows
from fxpass.region.loop import Loop
from fxpass.region.text import Input
from fxpass.region.trace import Fakes, in_own_thread, tidy, traced
from fxpass.region.zeros import zero_rows_of
from fxpass.rows.alike import is_alike, mark_alike, marked_alike
from fxpass.rows.backend import RowsPass
from tests.fuzz.small import small

N, D, V = 12, 8, 80


@contextmanager
def of_two(rank: int = 0) -> Iterator[None]:
    """One of two ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    torch._dynamo.reset()
    _clear_sharding_prop_cache()
    try:
        yield
    finally:
        dist.destroy_process_group()


def placed(v: int = V, placement=None):
    """A weight ``[v, D]`` on a mesh of two."""
    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(torch.randn(v, D), mesh, [placement or Shard(0)]).requires_grad_()


def replicated(x, weight):
    return DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)


# ---------------------------------------------------------------- marks

LINEAR = {
    "even": (lambda x, w: F.linear(replicated(x, w), w), V, Shard(0), True),
    "a matrix product": (lambda x, w: replicated(x, w) @ w.t(), V, Shard(0), True),
    "cast": (lambda x, w: F.linear(replicated(x.double(), w), w.to(torch.float64)), V, Shard(0), 1),
    "its part": (lambda x, w: F.linear(x, w.to_local()), V, Shard(0), True),
    "uneven": (lambda x, w: F.linear(replicated(x, w), w), V + 1, Shard(0), False),
    "its uneven part": (lambda x, w: F.linear(x, w.to_local()), V + 1, Shard(0), False),
    "replicated": (lambda x, w: F.linear(replicated(x, w), w), V, Replicate(), False),
    "some of its part": (lambda x, w: F.linear(x, w.to_local()[:5]), V, Shard(0), False),
    "plain": (lambda x, w: F.linear(x, x[:, :D]), V, Shard(0), False),
}


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_marked(name):
    program, v, placement, marked = LINEAR[name]
    assert marks(program, v, placement) == [bool(marked)]


def test_parts_of_sizes_that_vary_are_not_marked():
    """The first rank's place of its part is 0, which is no symbol; another one's may be."""
    part, whole = (LINEAR[name][0] for name in ("its part", "even"))
    assert marks(part, V, Shard(0), dynamic=True) == [False]
    assert marks(whole, V, Shard(0), dynamic=True) == [True]


def marks(program, v, placement, dynamic=False):
    """Which products of a program are marked."""
    found = []

    def backend(module, inputs):
        mark_alike(module)
        nodes = [n for n in module.graph.nodes if n.op.startswith("call")]
        names = [str(getattr(n.target, "__name__", n.target)) for n in nodes]
        found.extend(is_alike(n) for n, name in zip(nodes, names, strict=True) if name in PRODUCTS)
        return module.forward

    with of_two(), torch.no_grad():
        x, weight = torch.randn(N, D), placed(v, placement)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        torch.compile(program, backend=backend)(x, weight)
    return found


PRODUCTS = ("linear", "matmul")

# ---------------------------------------------------------------- calls


def group() -> Any:
    return dist.group.WORLD


def sharded_loss(x, w, t):
    return F.cross_entropy(F.linear(replicated(x, w), w), t)


def gathered_loss(x, w, t):
    z: Any = F.linear(replicated(x, w), w)
    return F.cross_entropy(z.full_tensor(), t)


def gathered_by_hand(x, w, t):
    return F.cross_entropy(funcol.all_gather_tensor(F.linear(x, w.to_local()), 1, group()), t)


def of_plain_tensors(x, w, t):
    return reduced(F.linear(x, w.to_local().clone()))


def of_marked_plain_tensors(x, w, t):
    with marked_alike():
        z = F.linear(x, w.to_local().clone())
    return reduced(z)


def reduced(z):
    z = z - funcol.all_reduce(z.detach().amax(-1), "max", group()).unsqueeze(-1)
    return funcol.all_reduce(z.exp().sum(-1).detach(), "sum", group()).log().mean() + z.mean()


def texts(program, rank=0, v=V):
    """The texts of the calls that a rank makes of a program, and what is declined."""
    with of_two(rank), small():
        x, w, t = torch.randn(N, D, requires_grad=True), placed(v), torch.randint(v, (N,))
        rows = RowsPass()
        with loss_parallel():
            torch.compile(program, backend=rows.backend())(x, w, t).backward()
    calls = [
        str(node.args[1])
        for one in rows.made
        for node in one.graph.graph.find_nodes(
            op="call_function", target=torch.ops.fxpass.rows.default
        )
    ]
    return calls, [str(why) for one in rows.made for why in one.declined]


WITHIN = {
    sharded_loss: ["all_reduce", "all_reduce"],
    gathered_loss: ["all_gather_into_tensor"],
    of_marked_plain_tensors: ["all_reduce"],
}


@pytest.mark.parametrize("program", WITHIN)
def test_the_first_call_has_the_collectives(program):
    calls, declined = texts(program)
    assert list(map(collectives, calls)) == [WITHIN[program], *[[]] * (len(calls) - 1)]
    assert not declined


def collectives(text):
    found = re.findall(r"_c10d_functional\.(\w+)\.default", text)
    return [name for name in found if name != "wait_tensor"]


def test_the_gradient_of_a_gather_is_scattered_in_backward():
    """A sum over ranks of a tangent's gradients is no multiple of this rank's tangent."""
    (forward, backward), declined = texts(gathered_by_hand)
    assert collectives(forward) == ["all_gather_into_tensor"]
    assert collectives(backward) == ["all_gather_into_tensor", "reduce_scatter_tensor"]
    assert not declined


@pytest.mark.parametrize("program", [sharded_loss, gathered_loss])
def test_ranks_run_the_same_but_for_numbers(program):
    of_ranks = [texts(program, rank)[0] for rank in range(2)]
    first, second = ([re.sub(r"\d+", "#", text) for text in some] for some in of_ranks)
    assert first
    assert first == second


def test_unequal_ranks_exchange_between_calls():
    calls, declined = texts(sharded_loss, v=V + 1)
    assert len(calls) == 3
    assert not any(map(collectives, calls))
    assert not declined


def test_plain_tensors_may_be_unequal():
    calls, _ = texts(of_plain_tensors)
    assert calls
    assert not any(map(collectives, calls))


def test_a_gather_of_unequal_parts_is_left_as_it_is():
    calls, declined = texts(gathered_loss, v=V + 1)
    assert not calls
    assert messages.COLLECTIVE_SIZES in declined[0]


# ---------------------------------------------------------------- rows of a chunk

TEXT = """rows rows=0,1 sums= wide= memory_mb=9 compiled=0
%0 = input float32[n, 8]
%1 = input int64[n, 1]
%2 = input float32[8, 4096]
%3 = aten.mm.default(%0, %2)
%4 = aten.amax.default(%3, [1], True)
%5 = _c10d_functional.all_reduce.default(%4, 'max', '0')
%6 = _c10d_functional.wait_tensor.default(%5)
%7 = aten.sub.Tensor(%3, %6)
%8 = aten.exp.default(%7){more}
%9 = aten.sum.dim_IntList(%8, [1], True)
return %9"""


def test_all_ranks_take_as_many_rows():
    """Whatever a rank's numbers let its function share: the classes alone decide."""
    tensors = [torch.zeros(4096, 8), torch.zeros(4096, 1).long(), torch.zeros(8, 4096)]
    lean = TEXT.format(more="")
    rich = lean.replace("%9", "%11").replace(
        "%8 = aten.exp.default(%7)",
        "%8 = aten.exp.default(%7)\n%9 = aten.exp.default(%8)\n%10 = aten.mul.Tensor(%8, %9)",
    )
    rich = rich.replace("dim_IntList(%8", "dim_IntList(%10")
    # sums that no formula has
    lean, rich = (text.replace("aten.exp.", "aten.erf.") for text in (lean, rich))
    rows = {describe_call(tensors, text).plan.rows for text in (lean, rich)}
    assert len(rows) == 1
    assert rows.pop() < 4096
    alone = [re.sub("%5 = .*", "%5 = aten.neg.default(%4)", text) for text in (lean, rich)]
    alone = [re.sub("%6 = .*", "%6 = aten.neg.default(%5)", text) for text in alone]
    assert len({describe_call(tensors, text).plan.rows for text in alone}) == 2


def test_no_row_is_left_out():
    """Which rows count may differ between ranks, as labels of each rank's classes do."""
    masked = TEXT.format(more="").replace("return %9", "%10 = aten.mul.Tensor(%9, %1)\nreturn %10")
    assert zero_rows_of(Loop.parse(masked)) is None
    alone = re.sub("%5 = .*", "%5 = aten.neg.default(%4)", masked)
    alone = re.sub("%6 = .*", "%6 = aten.neg.default(%5)", alone)
    assert zero_rows_of(Loop.parse(alone)) is not None


def test_collectives_run_in_the_order_of_the_text(alone):
    """What is between them is compiled: of one rank, the values are those without them."""
    text = TEXT.format(more="").replace("compiled=0", "compiled=1").replace("'0'", f"'{alone}'")
    function, _ = prepared(text, torch.device("cpu")).function()
    assert [step.compiles for _, step in function.steps] == [True, False, True]
    tensors = [torch.randn(700, 8), torch.zeros(700, 1).long(), torch.randn(8, 4096)]
    (found,) = rows(tensors, text)
    z = tensors[0] @ tensors[2]
    torch.testing.assert_close(found, (z - z.amax(1, True)).exp().sum(1, True))


def test_equal_collectives_stay_apart():
    """What is equal on this rank need not be on another one."""
    fakes = Fakes([Input(torch.float32, ("n", 5))], {"n": 8}, torch.device("cpu"))

    def twice(x):
        one, two = (torch.ops._c10d_functional.all_reduce(x.amax(1), "max", "0") for _ in range(2))
        return [one + two]

    graph = in_own_thread(lambda: tidy(traced(twice, fakes, {})))
    names = [str(node.target) for node in graph.nodes]
    assert names.count("aten.amax.default") == 1
    assert names.count("_c10d_functional.all_reduce.default") == 2
    assert "copy" not in text_of(graph)


def text_of(graph):
    for node in graph.find_nodes(op="placeholder"):
        node.meta["input"] = Input(torch.float32, ("n", 5))
    return Loop((0,), (), graph).text()
