"""f32 weights and hidden states under autocast: what their graphs hold, and several passes.

The values of one pass are held by tests/programs/rows/unrounded.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpass.region.loop import Loop
from fxpass.rows.backend import RowsPass
from fxpass.rows.sizes import packet
from tests.programs.catalog import catalog
from tests.support.numerics import assert_close, error

# in float64
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype")
BF16, F32 = torch.bfloat16, torch.float32
ROWS = {row.name: row for row in catalog(kinds=["f32 under autocast"], libraries=False)}


def with_fusedce(program, inner):
    options = {"fusedce.min_logits_mb": 0, "fusedce.inner": inner}
    return torch.compile(program, backend="fusedce", options=options)


def steps(row, inner=None, count=1, retain=False, wide=False):
    """Losses, and the gradients after so many backward passes."""
    tensors, program = row.tensors(wide=wide), row.program(wide)
    program = with_fusedce(program, inner) if inner else program
    losses = []
    for _ in range(count):
        loss = program(*tensors)
        if retain:
            loss.backward(retain_graph=True)
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(t.grad for t in tensors if t.grad is not None)]


def as_accurate(row, inner="aot_eager", **how):
    got = steps(row, inner, **how)
    assert_close(got, steps(row, **how), steps(row, wide=True, **how), BF16)
    assert all(g.dtype == F32 for g in got)
    return got


def fused(program, *tensors):
    """What became of the graphs of a program that have a call."""
    rows = RowsPass()
    torch.compile(program, backend=rows.backend())(*tensors)
    return [one for one in rows.made if one.calls]


def of_weights(made, v, d):
    """The dtypes of the sums of loops that are gradients of a weight ``[v, d]``."""
    loops = [Loop.parse(part.text) for one in made for part in one.parts]
    return [
        loop.dtype(i)
        for loop in loops
        for i in loop.sums
        if sorted(loop.results[i].shape) == sorted((v, d))
    ]


@pytest.mark.parametrize("name", ROWS)
def test_gradients_bypass_the_casts(name):
    row = ROWS[name]
    found = of_weights(fused(row.program(), *row.tensors()), row.sizes.v, row.sizes.d)
    assert set(found) == (set() if name == "frozen" else {F32})


def test_what_the_program_casts_itself_is_unrounded_too():
    """Its cast's gradient has 16 bits in eager; the joint graph does not say who cast."""

    def loss(x, weight, labels):
        return F.cross_entropy(F.linear(x.bfloat16(), weight.bfloat16()).float(), labels)

    x, weight = torch.randn(48, 32, requires_grad=True), torch.randn(97, 32, requires_grad=True)
    made = fused(loss, x, weight, torch.randint(97, (48,)))
    assert of_weights(made, 97, 32) == [F32]


@pytest.mark.parametrize("name", ["no bias", "tied", "rows"])
def test_accumulated_gradients(name):
    as_accurate(ROWS[name], count=3)


@pytest.mark.parametrize("name", ["no bias", "tied", "rows"])
def test_retained_graphs(name):
    with torch._functorch.config.patch(donated_buffer=False):
        got = as_accurate(ROWS[name], retain=True)
    once = as_accurate(ROWS[name])
    for twice, one in zip(got[1:], once[1:], strict=True):
        assert error(twice, 2 * one) < 1e-6


def test_hooks_see_what_eager_gives_them():
    """One gradient of each parameter, in f32, as FSDP and DDP expect."""
    row, seen = ROWS["another linear"], []
    for program in (row.program(), with_fusedce(row.program(), "inductor")):
        found, tensors = [], row.tensors()
        for name, tensor in zip(row.names, tensors, strict=True):
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(
                    lambda p, name=name, found=found: found.append((name, p.grad.dtype, p.shape))
                )
        program(*tensors).backward()
        seen.append(sorted(found))
    assert seen[0] == seen[1]
    assert len(seen[0]) == len(row.gradients)


def test_nothing_has_the_weights_size_but_its_cast_and_its_gradient():
    """No gradient of 16 bits, no pass that casts one, and the loop reads narrow hidden states."""
    row = ROWS["no bias"]
    (made,) = fused(row.program(), *row.tensors())
    of_head = [
        (packet(node), node.meta["val"].dtype)
        for node in made.graph.graph.nodes
        if node.op == "call_function"
        and isinstance(node.meta.get("val"), torch.Tensor)
        and sorted(node.meta["val"].shape) == sorted((row.sizes.v, row.sizes.d))
    ]
    (cast, narrow), *wide = of_head
    assert (cast, narrow) == (torch.ops.prims.convert_element_type, BF16)
    # the gradient of the loop, its product with the incoming gradient, and views of it
    assert {dtype for _, dtype in wide} == {F32}
    assert torch.ops.prims.convert_element_type not in [of for of, _ in wide]
    (part,) = made.parts
    inputs = [given for given in Loop.parse(part.text).inputs if given.shape[-1:] == (row.sizes.d,)]
    assert [given.dtype for given in inputs] == [BF16, BF16]
