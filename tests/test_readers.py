"""Who else reads the logits decides what becomes of them, and nothing changes for the reader."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from programs import V, inputs, last, reason_of
from torch.utils.checkpoint import checkpoint

import fxpass
from fxpass.deferred import DeferredLogits


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
    "some of them": (lambda z, loss: (loss, z[:, -1:], z.float()), "defer"),
    "other classes": (lambda z, loss: (loss, z[..., :3]), "defer"),
    "their largest": (lambda z, loss: (loss, z.argmax(-1)), "keep"),
    "them and their largest": (lambda z, loss: (loss, z, z.argmax(-1)), "keep"),
    "softmax": (lambda z, loss: (loss, z.softmax(-1)), "keep"),
    "a sum": (lambda z, loss: (loss + z.square().mean(), z), "keep"),
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
    assert match.logits == expected


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
        return loss_of(a, labels) + loss_of(b, labels), a, b.amax(-1)

    x, weight, labels = inputs()
    report = fxpass.explain(program, x, weight, labels)
    assert [m.logits for m in report.matches] == ["defer", "keep"]
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
        assert {m.logits for m in report.matches} == {"keep" if read else "defer"}


def test_logits_of_a_checkpointed_region():
    """They go on inside the graph, so they are kept."""

    def head(x, weight, labels):
        z = F.linear(x, weight)
        return loss_of(z, labels), z

    def program(x, weight, labels):
        loss, z = checkpoint(head, x, weight, labels, use_reentrant=False)
        return loss + z.square().mean()

    x, weight, labels = inputs()
    (match,) = fxpass.explain(program, x, weight, labels).matches
    assert match.logits == "keep"
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "aot_eager"})
    torch.testing.assert_close(fused(x, weight, labels), program(x, weight, labels))


def test_kept_logits_that_are_written_to():
    """The loss reads them where nothing writes any more."""

    def program(x, weight, bias, labels):
        z = F.linear(x, weight)
        z += bias
        z /= 2
        return F.cross_entropy(30 * torch.tanh(last(z) / 30), labels.view(-1)), z.argmax(-1), z

    x, weight, labels = inputs()
    bias = torch.randn(V, requires_grad=True)
    (match,) = fxpass.explain(program, x, weight, bias, labels).matches
    assert match.logits == "keep"
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "aot_eager"})
    expected, got = program(x, weight, bias, labels), fused(x, weight, bias, labels)
    torch.testing.assert_close(list(got), list(expected))
    torch.testing.assert_close(
        torch.autograd.grad(got[0], (x, weight, bias)),
        torch.autograd.grad(expected[0], (x, weight, bias)),
    )


def test_kept_logits_that_a_function_writes_to():
    def program(x, weight, labels):
        z = F.linear(x, weight).tanh_()
        return loss_of(z, labels), z.argmax(-1)

    assert "not linear" in reason_of(program, *inputs())


def test_a_writer_of_logits_that_are_read_before():
    def program(x, weight, labels):
        z = F.linear(x, weight)
        largest = z.detach()
        z.mul_(2)
        return loss_of(z, labels), largest

    assert "may change %z in place" in reason_of(program, *inputs())
