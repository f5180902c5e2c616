"""Who else reads the logits decides what becomes of them, and nothing changes for the reader."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fxpass
from fxpass.deferred.tensor import DeferredLogits
from tests.support.programs import V, inputs, last, reason_of


def loss_of(z, labels):
    return F.cross_entropy(last(z.float()), labels.view(-1))


# logits, loss -> what the function returns; what becomes of the logits in training
PROGRAMS = {
    "nothing else": (lambda z, loss: loss, "never"),
    "a shape": (lambda z, loss: (loss, z.shape), "never"),
    "zeros like them": (lambda z, loss: (loss, torch.zeros_like(z)), "never"),
    "their dtype": (lambda z, loss: (loss, torch.ones(2, dtype=torch.int64).to(z)), "never"),
    "themselves": (lambda z, loss: (loss, z), "defer"),
    "twice": (lambda z, loss: (z, loss, z), "defer"),
    "in f32": (lambda z, loss: (loss, z.float()), "defer"),
    "scaled": (lambda z, loss: (loss, z / 3), "defer"),
    "some of them": (lambda z, loss: (loss, z[:, -1:], z.half()), "defer"),
    "two views": (lambda z, loss: (loss, z[:, -1:], z.float()), "keep"),
    "other classes": (lambda z, loss: (loss, z[..., :3]), "defer"),
    "running sums": (lambda z, loss: (loss, z.cumsum(-1)), "keep"),
    "them and running sums": (lambda z, loss: (loss, z, z.cumsum(-1)), "keep"),
    "softmax": (lambda z, loss: (loss, z.softmax(-1)), "keep"),
    "a z-loss": (lambda z, loss: (loss + z.logsumexp(-1).square().mean(), z), "defer"),
}


@pytest.mark.parametrize("case", PROGRAMS)
@pytest.mark.parametrize("mode", ["auto", "defer", "keep", "no_grad"])
def test_values_and_gradients(case, mode):
    returned, expected = PROGRAMS[case]

    def program(x, weight, labels):
        z = F.linear(x, weight)
        return returned(z, loss_of(z, labels))

    def run(fn):
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        out = torch.utils._pytree.tree_leaves(fn(*leaves, labels))
        values = [t for t in out if isinstance(t, torch.Tensor) and t.requires_grad]
        if values:
            sum(t.float().square().sum() for t in values).backward()
        return [*out, *(leaf.grad for leaf in leaves)]

    x, weight, labels = inputs()
    setting = "auto" if mode == "no_grad" else mode
    options = {"fusedce.inner": "aot_eager", "fusedce.logits": setting}
    with torch.set_grad_enabled(mode != "no_grad"):
        fused = torch.compile(program, backend="fusedce", options=options)
        for ours, theirs in zip(run(fused), run(program), strict=True):
            torch.testing.assert_close(ours, theirs, check_dtype=True)
        out = torch.utils._pytree.tree_leaves(fused(x, weight, labels))
    lazy = any(isinstance(t, DeferredLogits) for t in out)
    assert lazy == (expected == "defer" and mode in ("auto", "defer"))


@pytest.mark.parametrize("case", PROGRAMS)
def test_what_is_reported(case):
    returned, expected = PROGRAMS[case]

    def program(x, weight, labels):
        z = F.linear(x, weight)
        return returned(z, loss_of(z, labels))

    (match,) = fxpass.explain(program, *inputs()).matches
    assert match.logits_mode == expected


def test_drop():
    def program(x, weight, labels):
        z = F.linear(x, weight)
        return loss_of(z, labels), z

    options = {"fusedce.inner": "eager", "fusedce.logits": "drop"}
    x, weight, labels = inputs()
    loss, z = torch.compile(program, backend="fusedce", options=options)(x, weight, labels)
    torch.testing.assert_close(loss, program(x, weight, labels)[0])
    assert z.shape == (2, 4, V)
    with pytest.raises(RuntimeError, match="FUSEDCE_LOGITS"):
        z.sum()


def test_two_heads_of_which_one_is_read():
    """The logits of one leave lazily, those of the other exist."""

    def program(x, weight, labels):
        a, b = F.linear(x, weight), F.linear(x * 2, weight)
        return loss_of(a, labels) + loss_of(b, labels), a, b.cumsum(-1)

    x, weight, labels = inputs()
    report = fxpass.explain(program, x, weight, labels)
    assert [m.logits_mode for m in report.matches] == ["defer", "keep"]
    out = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})(
        x, weight, labels
    )
    assert isinstance(out[1], DeferredLogits)
    torch.testing.assert_close(list(out), list(program(x, weight, labels)))


def test_an_output_of_two_heads():
    """It is deferred, or neither is."""

    def program(read):
        def run(x, weight, labels):
            a, b = F.linear(x, weight), F.linear(x * 2, weight)
            loss = loss_of(a, labels) + loss_of(b, labels)
            return loss * (b.amax() if read else 1), a + b

        return run

    args = inputs()
    for read in (False, True):
        report = fxpass.explain(program(read), *args)
        assert {m.logits_mode for m in report.matches} == {"keep" if read else "defer"}


def test_logits_of_a_checkpointed_region():
    """The region becomes a part of the graph, where they do not have to exist."""

    def head(x, weight, labels):
        z = F.linear(x, weight)
        return loss_of(z, labels), z

    def program(x, weight, labels):
        loss, z = checkpoint(head, x, weight, labels, use_reentrant=False)
        return loss + z.logsumexp(-1).square().mean()

    x, weight, labels = inputs()
    (match,) = fxpass.explain(program, x, weight, labels).matches
    assert match.logits_mode == "never"
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "aot_eager"})
    torch.testing.assert_close(fused(x, weight, labels), program(x, weight, labels))


@pytest.mark.parametrize("kept", [False, True])
def test_logits_that_are_written_to(kept):
    """Where they are kept, the linear's output does not exist any more."""

    def program(x, weight, bias, labels):
        z = F.linear(x, weight)
        z += bias
        z /= 2
        read = z.cumsum(-1) if kept else z.argmax(-1)
        return F.cross_entropy(30 * torch.tanh(last(z) / 30), labels.view(-1)), read, z

    x, weight, labels = inputs()
    bias = torch.randn(V, requires_grad=True)
    report = fxpass.explain(program, x, weight, bias, labels)
    assert [match.logits_mode for match in report.matches] == ["defer"] * (not kept)
    assert [r.reason for r in report.rejections] == [
        "its logits exist anyway, and a node writes to them"
    ] * kept
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "aot_eager"})
    expected, got = program(x, weight, bias, labels), fused(x, weight, bias, labels)
    torch.testing.assert_close(list(got), list(expected))
    torch.testing.assert_close(
        torch.autograd.grad(got[0], (x, weight, bias)),
        torch.autograd.grad(expected[0], (x, weight, bias)),
    )


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_kept_logits_that_are_written_to_after_the_loss(inner, reduction):
    """Backward does not read them where they have changed."""

    def program(x, weight, labels):
        z = F.linear(x, weight)
        loss = F.cross_entropy(last(z), labels.view(-1), reduction=reduction)
        z /= 2
        return loss.square().sum(), z.softmax(-1)

    x, weight, labels = inputs()
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": inner})
    got, expected = fused(x, weight, labels), program(x, weight, labels)
    torch.testing.assert_close(got, expected)
    got, expected = (
        torch.autograd.grad(loss + p.square().sum(), (x, weight)) for loss, p in (got, expected)
    )
    torch.testing.assert_close(got, expected)


def test_kept_logits_that_a_function_writes_to():
    def program(x, weight, labels):
        z = F.linear(x, weight).tanh_()
        return loss_of(z, labels), z.cumsum(-1)

    assert "a node writes to them" in reason_of(program, *inputs())


def test_a_writer_of_logits_that_are_read_before():
    def program(x, weight, labels):
        z = F.linear(x, weight)
        largest = z.detach()
        z.mul_(2)
        return loss_of(z, labels), largest

    assert "writes to %largest" in reason_of(program, *inputs())


@pytest.mark.parametrize("view", [lambda z: z.view(-1, V), lambda z: z.view(size=(-1, V))])
def test_kept_logits_whose_rows_are_viewed_after_a_copy(view):
    """The cast makes what the view is of contiguous; the kept logits are not."""

    def program(x, weight, labels):
        z = F.linear(x, weight)
        shifted = view(z[..., :-1, :].float())
        return F.cross_entropy(shifted, labels[:, 1:].reshape(-1)), z.cumsum(-1)

    x, weight, labels = inputs(torch.bfloat16)
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    for got, expected in zip(fused(x, weight, labels), program(x, weight, labels), strict=True):
        torch.testing.assert_close(got, expected)


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
def test_logits_whose_inputs_the_graph_writes_after_the_loss_are_kept(case, inner):
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
    (match,) = fxpass.explain(program, *args).matches
    assert match.logits_mode == "keep"
    options = {"fusedce.inner": inner, "fusedce.logits": "defer"}
    got = torch.compile(program, backend="fusedce", options=options)(*args)
    torch.testing.assert_close(list(got), list(program(*args)))


@pytest.mark.parametrize("operand", ["x", "weight", "bias"])
def test_logits_whose_graph_inputs_are_written_after_the_loss_are_kept(operand):
    def program(x, weight, bias, labels):
        z = F.linear(x, weight, bias)
        loss = loss_of(z, labels)
        with torch.no_grad():
            {"x": x, "weight": weight, "bias": bias}[operand].mul_(2)
        return loss, z

    x, weight, labels = inputs()
    given = [x.detach(), weight.detach(), torch.randn(V)]
    mine, theirs = ([*map(torch.clone, given[:2]), given[2].clone().requires_grad_()] for _ in "ab")
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "aot_eager"})
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
    args = x, weight, torch.randn(V), labels
    (match,) = fxpass.explain(program, x, weight, args[2].clone(), labels).matches
    assert match.logits_mode == "defer"
    options = {"fusedce.inner": "aot_eager"}
    expected = program(x, weight, args[2].clone(), labels)
    _, got = torch.compile(program, backend="fusedce", options=options)(*args)
    assert isinstance(got, DeferredLogits)
    torch.testing.assert_close(got * 1, expected[1])


def test_logits_that_get_no_gradient_get_none_when_they_are_deferred():
    def program(switched_off):
        def run(x, weight, labels):
            with torch.set_grad_enabled(not switched_off):
                z = F.linear(x, weight)
            return loss_of(F.linear(x * 2, weight), labels) + loss_of(z, labels).detach(), z

        return run

    x, weight, labels = inputs()
    for switched_off in (False, True):
        options = {"fusedce.inner": "aot_eager", "fusedce.logits": "defer"}
        fused = torch.compile(program(switched_off), backend="fusedce", options=options)
        got, want = fused(x, weight, labels)[1], program(switched_off)(x, weight, labels)[1]
        assert got.requires_grad == want.requires_grad == (not switched_off)
        torch.testing.assert_close(got * 1, want)


def test_logits_of_a_shape_that_is_read_from_them():
    """A shape is no result of a graph, so these logits are computed."""

    def program(x, weight, labels):
        z = F.linear(x, weight)
        z = z.expand(z.shape)
        return loss_of(z, labels), z

    x, weight, labels = inputs()
    fused = torch.compile(program, backend="fusedce", dynamic=True)
    for got, want in zip(fused(x, weight, labels), program(x, weight, labels), strict=True):
        torch.testing.assert_close(got, want)


def test_outputs_that_share_memory_still_do():
    def program(x, weight, labels):
        z = F.linear(x, weight)
        return loss_of(z, labels), z, z[:, -1]

    x, weight, labels = inputs()
    for fn in (program, torch.compile(program, backend="fusedce")):
        _, z, row = fn(x, weight, labels)
        with torch.no_grad():
            z.zero_()
        assert not row.any()


def test_a_write_without_gradients_is_not_deferred():
    """Eager's gradient of the returned logits is the linear's: the sine is not differentiated."""

    def program(x, weight, labels):
        z = F.linear(x, weight)
        with torch.no_grad():
            z.sin_()
        return F.cross_entropy(F.linear(x, weight).view(-1, V), labels.view(-1)), z

    options = {"fusedce.inner": "eager", "fusedce.logits": "defer"}
    fused = torch.compile(program, backend="fusedce", options=options)
    x, weight, labels = inputs()
    found = []
    for function in (program, fused):
        loss, z = function(x, weight, labels)
        found.append(torch.autograd.grad(loss + z.sum(), (x, weight)))
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)


def test_a_logit_that_is_compared_with_kept_logits():
    """The rank of the target: no logit is larger than itself."""

    def program(x, weight, labels):
        z = F.hardsigmoid(last(F.linear(x, weight)))
        rank = (z > z.gather(1, labels.view(-1, 1))).sum(1)
        return F.cross_entropy(z, labels.view(-1)), rank

    x, weight, labels = inputs()
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    (loss, rank), (expected, counted) = (f(x, weight, labels) for f in (fused, program))
    assert torch.equal(rank, counted)
    torch.testing.assert_close(loss, expected)


def test_a_narrow_temperature_of_wide_logits():
    """An f32 tensor is promoted before the division."""
    x, weight, labels = (t.detach() for t in inputs(torch.float64))
    temperature = torch.tensor(0.7)

    def program(x, weight, labels):
        return F.cross_entropy(last(F.linear(x, weight)) / temperature, labels.view(-1))

    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    got, expected = fused(x, weight, labels), program(x, weight, labels)
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=0)
