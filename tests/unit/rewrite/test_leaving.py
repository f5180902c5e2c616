"""Logits that leave: who reads them decides what becomes of them, and the reader sees no difference.

Logits that are returned are computed when they are read (``defer``), if the graph can compute them
again, and else the head stays as it is.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fxpass.deferred.tensor import DeferredLogits
from tests.support.programs import V, answer, compiled, inputs, last, report_of, same


def loss_of(z, labels):
    return F.cross_entropy(last(z.float()), labels.view(-1))


def modes_of(program, *args):
    """What becomes of the logits of each match; nothing for logits that stay."""
    return [match.logits_mode for match in report_of(program, *args).matches]


# logits, loss -> what the function returns; what becomes of the logits in training
PROGRAMS = {
    "nothing else": (lambda z, loss: loss, ["never"]),
    "a shape": (lambda z, loss: (loss, z.shape), ["never"]),
    "zeros like them": (lambda z, loss: (loss, torch.zeros_like(z)), ["keep"]),
    "their dtype": (lambda z, loss: (loss, torch.ones(2, dtype=torch.int64).to(z)), ["never"]),
    "their largest": (lambda z, loss: (loss, z.argmax(-1)), ["never"]),
    "themselves": (lambda z, loss: (loss, z), ["defer"]),
    "twice": (lambda z, loss: (z, loss, z), ["defer"]),
    "in f32": (lambda z, loss: (loss, z.float()), ["defer"]),
    "scaled": (lambda z, loss: (loss, z / 3), ["defer"]),
    "some of them": (lambda z, loss: (loss, z[:, -1:], z.half()), ["defer"]),
    "two views": (lambda z, loss: (loss, z[:, -1:], z.float()), ["keep"]),
    "other classes": (lambda z, loss: (loss, z[..., :3]), ["defer"]),
    "running sums": (lambda z, loss: (loss, z.cumsum(-1)), ["keep"]),
    "them and running sums": (lambda z, loss: (loss, z, z.cumsum(-1)), ["keep"]),
    "softmax": (lambda z, loss: (loss, z.softmax(-1)), ["keep"]),
    "a z-loss": (lambda z, loss: (loss + z.logsumexp(-1).square().mean(), z), ["defer"]),
}


def returning(case):
    def program(x, weight, labels):
        z = F.linear(x, weight)
        return PROGRAMS[case][0](z, loss_of(z, labels))

    return program


@pytest.mark.parametrize("case", PROGRAMS)
@pytest.mark.parametrize("mode", ["auto", "defer", "keep", "no_grad"])
def test_values_and_gradients(case, mode):
    program, args = returning(case), inputs()
    setting = "auto" if mode == "no_grad" else mode
    with torch.set_grad_enabled(mode != "no_grad"):
        fused = compiled(program, inner="aot_eager", logits=setting)
        torch.testing.assert_close(answer(fused, args), answer(program, args))
        out = pytree.tree_leaves(fused(*args))
    if mode == "auto":
        assert modes_of(program, *args) == PROGRAMS[case][1]
    lazy = any(isinstance(t, DeferredLogits) for t in out)
    assert lazy == (PROGRAMS[case][1] == ["defer"] and mode in ("auto", "defer"))


def test_drop():
    program, args = returning("themselves"), inputs()
    loss, z = compiled(program, logits="drop")(*args)
    torch.testing.assert_close(loss, program(*args)[0])
    assert z.shape == (2, 4, V)
    with pytest.raises(RuntimeError, match="FUSEDCE_LOGITS"):
        z.sum()


def two_heads(x, weight, labels):
    a, b = F.linear(x, weight), F.linear(x * 2, weight)
    return loss_of(a, labels) + loss_of(b, labels), a, b


def read_of_two(x, weight, labels):
    loss, a, b = two_heads(x, weight, labels)
    return loss, a, b.cumsum(-1)


def sum_of_two(x, weight, labels):
    loss, a, b = two_heads(x, weight, labels)
    return loss, a + b


def largest_of_two(x, weight, labels):
    loss, a, b = two_heads(x, weight, labels)
    return loss * b.amax(), a + b


def checkpointed(x, weight, labels):
    def head(x, weight, labels):
        z = F.linear(x, weight)
        return loss_of(z, labels), z

    loss, z = checkpoint(head, x, weight, labels, use_reentrant=False)
    return loss + z.logsumexp(-1).square().mean()


def written(x, weight, labels):
    z = F.linear(x, weight)
    z += weight.mean(-1)
    z /= 2
    return F.cross_entropy(30 * torch.tanh(last(z) / 30), labels.view(-1)), z.argmax(-1), z


def written_and_kept(x, weight, labels):
    loss, _, z = written(x, weight, labels)
    return loss, z.cumsum(-1), z


def written_by_a_function(x, weight, labels):
    z = F.linear(x, weight).tanh_()
    return loss_of(z, labels), z.cumsum(-1)


def written_after_the_loss(x, weight, labels):
    """Backward does not read them where they have changed."""
    z = F.linear(x, weight)
    loss = F.cross_entropy(last(z), labels.view(-1), reduction="none")
    z /= 2
    return loss, z.softmax(-1)


def written_without_gradients(x, weight, labels):
    """Eager's gradient of the returned logits is the linear's: the sine is not differentiated."""
    z = F.linear(x, weight)
    with torch.no_grad():
        z.sin_()
    return loss_of(F.linear(x, weight), labels), z


def sharing_memory(x, weight, labels):
    z = F.linear(x, weight)
    return loss_of(z, labels), z, z[:, -1]


def viewed_after_a_copy(x, weight, labels):
    """The cast makes what the view is of contiguous; the kept logits are not."""
    z = F.linear(x, weight)
    shifted = z[..., :-1, :].double().view(size=(-1, V))
    return F.cross_entropy(shifted, labels[:, 1:].reshape(-1)), z.cumsum(-1)


def shape_of_them(x, weight, labels):
    """A shape is no result of a graph."""
    z = F.linear(x, weight)
    z = z.expand(z.shape)
    return loss_of(z, labels), z


def without_gradients(x, weight, labels):
    with torch.no_grad():
        z = F.linear(x, weight)
    return loss_of(F.linear(x * 2, weight), labels) + loss_of(z, labels).detach(), z


# a program, and what becomes of the logits of its matches
OTHERS = {
    two_heads: ["defer", "defer"],
    read_of_two: ["defer", "keep"],
    sum_of_two: ["defer", "defer"],
    largest_of_two: ["defer", "defer"],
    checkpointed: ["never"],
    written: ["defer"],
    written_and_kept: [],
    written_by_a_function: [],
    written_after_the_loss: [],
    written_without_gradients: ["never"],
    sharing_memory: ["defer"],
    viewed_after_a_copy: [],
    shape_of_them: ["defer"],
    without_gradients: ["keep", "never"],
}


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", OTHERS, ids=lambda program: program.__name__)
def test_other_programs(program, inner):
    args = inputs()
    assert modes_of(program, *args) == OTHERS[program]
    for logits in ("auto", "defer"):
        same(program, *args, inner=inner, logits=logits, rtol=1e-5, atol=1e-5)


def test_outputs_that_share_memory_still_do():
    for fn in (sharing_memory, compiled(sharing_memory)):
        _, z, row = fn(*inputs())
        with torch.no_grad():
            z.zero_()
        assert not row.any()


# What a graph does to the inputs of the logits that it returns; x, weight, bias, z, loss -> outputs
WRITES = {
    "hidden states": lambda x, weight, bias, z, loss: (x.add_(1), loss, z),
    "augmented": lambda x, weight, bias, z, loss: (x.__iadd__(1).mean(), loss, z),
    "weight": lambda x, weight, bias, z, loss: (weight.mul_(2), loss, z / 3),
    "bias": lambda x, weight, bias, z, loss: (bias.zero_().sum(), loss, z.float()),
    "an alias": lambda x, weight, bias, z, loss: (x.view(-1)[3:5].fill_(7).sum(), loss, z),
    "data": lambda x, weight, bias, z, loss: (x.data.mul_(3).sum(), loss, z),
    "detached": lambda x, weight, bias, z, loss: (weight.detach().neg_().sum(), loss, z[:, 1:]),
    "out": lambda x, weight, bias, z, loss: (torch.mul(bias, 2, out=bias).sum(), loss, z),
    "a list": lambda x, weight, bias, z, loss: (torch._foreach_mul_([weight], 2), loss, z)[1:],
    "themselves": lambda x, weight, bias, z, loss: (z.mul_(2).sum(), loss, z),
    "an item": lambda x, weight, bias, z, loss: (z[0].fill_(2).sum(), loss, z),
}


@pytest.mark.parametrize("case", WRITES)
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_logits_whose_inputs_the_graph_writes_after_the_loss_exist(case, inner):
    if case == "detached" and torch.__version__ < "2.12":
        pytest.skip("AOTAutograd refuses the program")

    def program(x, weight, bias, factor, labels):
        hidden, head, shift = x * factor, weight * factor, bias * factor
        z = F.linear(hidden, head, shift)
        loss = loss_of(z, labels)
        with torch.no_grad():
            return WRITES[case](hidden, head, shift, z, loss)

    x, weight, labels = inputs()  # eager saves neither of them for the gradient of the bias
    bias = torch.randn(V, requires_grad=True)
    args = (x.detach(), weight.detach(), bias, torch.ones(()), labels)
    assert set(modes_of(program, *args)) <= {"keep"}
    got = compiled(program, inner=inner, logits="defer")(*args)
    torch.testing.assert_close(list(got), list(program(*args)))


@pytest.mark.parametrize("operand", ["x", "weight", "bias"])
def test_logits_whose_graph_inputs_are_written_after_the_loss_exist(operand):
    def program(x, weight, bias, labels):
        z = F.linear(x, weight, bias)
        loss = loss_of(z, labels)
        with torch.no_grad():
            {"x": x, "weight": weight, "bias": bias}[operand].mul_(2)
        return loss, z

    x, weight, labels = inputs()
    given = [x.detach(), weight.detach(), torch.randn(V)]
    mine, theirs = ([*map(torch.clone, given[:2]), given[2].clone().requires_grad_()] for _ in "ab")
    fused = compiled(program, inner="aot_eager")
    torch.testing.assert_close(fused(*mine, labels), program(*theirs, labels))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("written", ["result", "source", "nothing"])
def test_a_cast_bias_that_the_graph_writes(written):
    """The cast is not done again from a bias without the mask, or with another one."""

    def program(x, weight, bias, labels):
        b = bias.bfloat16()
        if written == "result":
            b[0] = -1e4
        z = F.linear(x, weight, b)
        if written == "source":
            bias[0] = -1e4
        return loss_of(z, labels), z

    x, weight, labels = inputs(torch.bfloat16)
    bias = torch.randn(V)
    assert modes_of(program, x, weight, bias.clone(), labels) == ["defer"]
    expected = program(x, weight, bias.clone(), labels)
    _, got = compiled(program, inner="aot_eager")(x, weight, bias, labels)
    assert isinstance(got, DeferredLogits)
    torch.testing.assert_close(got * 1, expected[1])


def test_logits_of_a_size_that_depends_on_data_are_not_deferred():
    """A deferred tensor has a shape before its values are known."""

    def program(x, weight, labels):
        rows, mask = F.linear(x, weight), labels > 2
        return F.cross_entropy(rows[mask], labels[mask]), rows[mask]

    args = inputs()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        loss, rows = compiled(program)(*args)
    assert type(rows) is torch.Tensor
    torch.testing.assert_close((loss, rows), program(*args))


def test_logits_that_exist_with_their_classes_before_rows(caplog):
    """The operator reads logits whose classes are last."""

    def program(x, weight, labels):
        z = torch.einsum("nsd,vd->nvs", x, weight)
        return F.cross_entropy(z, labels), z

    x, weight, labels = inputs()
    args = x.detach(), weight.detach(), labels
    assert modes_of(program, *args) == []
    assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]
    torch.testing.assert_close(compiled(program)(*args), program(*args))


def test_what_leaves_beside_a_head_is_made_of_logits_that_exist():
    """A concatenation is no head, whose inputs would have to be saved for what is made of it."""

    def program(x, weight, labels):
        exist = torch.cat([F.linear(x, part) for part in weight.chunk(3)], -1)
        z, rows = F.linear(x, weight), exist.square()
        mixed = torch.logaddexp(rows.log_softmax(-1), z.log_softmax(-1))
        return mixed.mean(-1).sum(), loss_of(z, labels), rows

    same(program, *inputs(), inner="eager", logits="auto", rtol=1e-5, atol=1e-5)
