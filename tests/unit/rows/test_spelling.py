"""What decompositions have taken apart is put together again, and nothing else is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from fxpass.rows.softmaxes import restore_softmaxes
from fxpass.rows.spelling import spell
from fxpass.rows.stacks import unstack

Z = torch.randn(6, 5)
# what a program computes, and the calls that are left of it, but for views
ONE = {
    "log_softmax": (lambda z: z.log_softmax(-1), "_log_softmax"),
    "softmax": (lambda z: z.softmax(1), "_softmax"),
    "logsumexp": (lambda z: z.logsumexp(-1), "logsumexp"),
    "logsumexp, kept": (lambda z: z.logsumexp(-1, keepdim=True), "logsumexp"),
    "along rows": (lambda z: z.log_softmax(0), "_log_softmax"),
    "the largest": (lambda z: z.max(), "amax amax"),
    "the smallest": (lambda z: z.min(), "amin amin"),
    "a stack": (lambda z: torch.stack([z, 2 * z]), "mul unsqueeze unsqueeze cat"),
    "a batch of one": (lambda z: torch.bmm(z[None], z.t()[None]), "permute mm"),
}
# a shift, a sum or a dimension is another one
OTHER = {
    "another shift": lambda z: (
        (z - z.amax(0, True)).exp() / (z - z.amax(1, True)).exp().sum(1, True)
    ),
    "another sum": lambda z: (z - z.amax(1, True)).exp() / (z - z.amax(1, True)).exp().sum(0, True),
    "half of it": lambda z: (
        (z - z.amax(1, True)) - 0.5 * (z - z.amax(1, True)).exp().sum(1, True).log()
    ),
}
VIEWS = ("view", "squeeze", "unsqueeze", "expand")

STACKS = {
    "the logarithm of a sum": (lambda a, b: torch.stack([a, b]).logsumexp(0), "logaddexp"),
    "a sum, kept": (lambda a, b: torch.stack([a, b]).exp().sum(0, True), "exp exp add"),
    "the largest of three": (
        lambda a, b: torch.stack([a, b, a * b]).amax(0),
        "mul maximum maximum",
    ),
    "how many are positive": (
        lambda a, b: (torch.stack([a, b]) > 0).sum(0),
        "cat gt sum",
    ),
    "one part": (lambda a, b: (torch.stack([a, b]) * b)[1], "mul"),
    "with another stack": (
        lambda a, b: (torch.stack([a, b]) - torch.stack([b, a])).tanh().sum(0),
        "sub sub tanh tanh add",
    ),
    "rows of both": (lambda a, b: torch.stack([a, b]).sum(1), "cat sum"),
    "other classes": (lambda a, b: torch.stack([a[:, :3], b[:, :3]]).sum(0), "cat sum"),
}


def _spelled(program):
    module = make_fx(program, select_decomp_table(), tracing_mode="fake")(Z)
    for node in module.graph.nodes:
        assert node.op == "output" or "val" in node.meta
    spell(module.graph)
    restore_softmaxes(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def calls(module):
    nodes = module.graph.nodes
    return [n.target.overloadpacket.__name__ for n in nodes if n.op == "call_function"]


@pytest.mark.parametrize("name", ONE)
def test_one_spelling(name):
    program, wanted = ONE[name]
    module = _spelled(program)
    left = [call for call in calls(module) if call not in VIEWS or call in wanted.split()]
    assert left == wanted.split()
    torch.testing.assert_close(module(Z), program(Z))


@pytest.mark.parametrize("name", OTHER)
def test_what_is_no_softmax(name):
    module = _spelled(OTHER[name])
    assert not {"_softmax", "_log_softmax", "logsumexp"} & set(calls(module))
    torch.testing.assert_close(module(Z), OTHER[name](Z))


def test_infinite_rows():
    """As the decomposition has them: a row of -inf has the sum 0."""
    z = torch.full((2, 3), -torch.inf)
    module = _spelled(lambda z: z.logsumexp(-1))
    assert torch.equal(module(z), torch.logsumexp(z, -1))


def test_a_cross_entropy_reads_a_log_softmax():
    module = _spelled(lambda z: F.cross_entropy(z, torch.tensor([1, 2, 3, 4, 0, 1])))
    assert "_log_softmax" in calls(module)


@pytest.mark.parametrize("name", STACKS)
def test_stacks(name):
    program, wanted = STACKS[name]
    given = Z, torch.randn(6, 5)
    module = make_fx(program, select_decomp_table(), tracing_mode="fake")(*given)
    spell(module.graph)
    restore_softmaxes(module.graph)
    unstack(module.graph, module.graph.find_nodes(op="placeholder"))
    module.graph.lint()
    module.recompile()
    left = [call for call in calls(module) if call not in (*VIEWS, "slice")]
    assert sorted(left) == sorted(wanted.split())
    torch.testing.assert_close(module(*given), program(*given))
