"""What writes between a head and its loss, and afterwards: the rewritten program is eager's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from tests.support.programs import B, D, S, V, inputs, last, report_of, spec_of

N = B * S


@torch.library.custom_op("fxpass_tests::double_", mutates_args=("h",))
def double_(h: torch.Tensor) -> None:
    h.mul_(2)


@double_.register_fake
def _(h):
    return None


def packet(z, h, w, b, t):
    torch.ops.fxpass_tests.double_(h)
    return F.cross_entropy(z, t)


def overload(z, h, w, b, t):
    torch.ops.fxpass_tests.double_.default(h)
    return F.cross_entropy(z, t)


def relu_by_position(z, h, w, b, t):
    F.relu(h, True)
    return F.cross_entropy(z, t)


def dropout_by_position(z, h, w, b, t):
    F.dropout(h, 1.0, True, True)
    return F.cross_entropy(z, t)


def hardtanh_of_the_logits(z, h, w, b, t):
    F.hardtanh(z, -1.0, 1.0, True)
    return F.cross_entropy(z, t), z


def renormalised_embedding(z, h, w, b, t):
    return F.cross_entropy(z, t) + F.embedding(t, w, max_norm=0.1).sum()


def renormalised_before_the_loss(z, h, w, b, t):
    found = F.embedding(t, w, None, 0.1)
    return F.cross_entropy(z, t) + found.sum()


def running_statistics(z, h, w, b, t):
    normed = F.batch_norm(torch.ones(3, V), b, torch.ones(V), training=True)
    return F.cross_entropy(z + b, t) + normed.sum()


def statistics_on_the_way(z, h, w, b, t):
    z = z + b
    F.batch_norm(torch.ones(3, V), b, torch.ones(V), None, None, True)
    return F.cross_entropy(z, t)


def out_argument(z, h, w, b, t):
    torch.add(h, 1, out=h)
    return F.cross_entropy(z, t)


def through_data(z, h, w, b, t):
    h.data.mul_(2)
    return F.cross_entropy(z, t)


def through_an_alias(z, h, w, b, t):
    h.view(-1)[:3].zero_()
    return F.cross_entropy(z, t)


def labels_after_they_are_read(z, h, w, b, t):
    picked = z.gather(-1, t[:, None]).squeeze(-1)
    t.zero_()
    return (z.logsumexp(-1) - picked).mean()


def lse_after_it_is_computed(z, h, w, b, t):
    lse = z.logsumexp(-1)
    lse.mul_(2)
    return (lse - z.gather(-1, t[:, None]).squeeze(-1)).mean()


def logits_between_lse_and_gather(z, h, w, b, t):
    lse = z.logsumexp(-1)
    z.mul_(2)
    return (lse - z.gather(-1, t[:, None]).squeeze(-1)).mean()


def rows_that_were_written(z, h, w, b, t):
    rows = torch.arange(N)
    rows[0] = 3
    return -z.log_softmax(-1)[rows, t].mean()


def rows_in_another_order(z, h, w, b, t):
    order = torch.arange(N).flip(0)
    return (z.logsumexp(-1) - z.gather(-1, t[:, None])[order, 0]).square().mean()


def bias_after_it_is_added(z, h, w, b, t):
    z = z + b
    b.mul_(3)
    return F.cross_entropy(z, t)


PROGRAMS = [
    *(packet, overload, relu_by_position, dropout_by_position, hardtanh_of_the_logits),
    *(renormalised_embedding, renormalised_before_the_loss, running_statistics),
    *(statistics_on_the_way, out_argument, through_data, through_an_alias),
    *(labels_after_they_are_read, lse_after_it_is_computed, logits_between_lse_and_gather),
    *(rows_that_were_written, rows_in_another_order, bias_after_it_is_added),
]


@pytest.mark.parametrize("mode", ["auto", "keep"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_computes_what_eager_computes(program, mode):
    """Results and what is written to the inputs, without gradients: eager would refuse most."""

    def run(fn):
        torch.manual_seed(0)
        x, w, b = torch.randn(N, D), torch.randn(V, D), torch.randn(V)
        t = torch.randint(V, (N,))
        return [*torch.utils._pytree.tree_leaves(fn(x, w, b, t)), x, w, b, t]

    def whole(x, w, b, t):
        h = x * 1
        return program(F.linear(h, w), h, w, b, t)

    options = {"fusedce.inner": "eager", "fusedce.logits": mode}
    fused = torch.compile(whole, backend="fusedce", options=options)
    for ours, theirs in zip(run(fused), run(whole), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("program", [F.relu, F.hardtanh, F.elu, F.celu, F.selu, F.silu, F.mish])
def test_in_place_by_position_or_by_name_is_the_same(program):
    """As a part of the way from the head to the loss both are the function, and both fuse."""
    defaults = {F.hardtanh: (-1.0, 1.0), F.elu: (1.0,), F.celu: (1.0,)}.get(program, ())
    x, weight, labels = inputs()
    texts = set()
    for args, kwargs in (((*defaults, True), {}), ((), {"inplace": True}), ((), {})):

        def loss(x, weight, labels, args=args, kwargs=kwargs):
            z = program(F.linear(x, weight), *args, **kwargs)
            return F.cross_entropy(last(z), labels.view(-1))

        texts.add(spec_of(loss, x, weight, labels).text())
    assert len(texts) == 1


def nested(write):
    def body(h, w):
        y = h * 2
        y.add_(1)  # of its own making
        if write:
            h.add_(1)
        return (y @ w.T).sum()

    def program(x, weight, labels):
        h = x * 1
        z = F.linear(h, weight)
        extra = torch.utils.checkpoint.checkpoint(body, h, weight, use_reentrant=False)
        return F.cross_entropy(last(z), labels.view(-1)) + extra

    return program


def test_what_a_checkpoint_between_writes():
    x, weight, labels = inputs()
    fused = report_of(nested(False), x, weight, labels).matches
    assert any(match.named for match in fused)
    fused = report_of(nested(True), x.detach(), weight.detach(), labels).matches
    assert not any(match.named for match in fused)


# ---------------------------------------------------------------- writes after the loss


def logits_afterwards(h, w, b, t, reduction):
    z = F.linear(h, w, b)
    loss = F.cross_entropy(z, t, reduction=reduction)
    z /= 2
    return loss.square().mean(), z.softmax(-1)


def bias_afterwards(h, w, b, t, reduction):
    loss = F.cross_entropy(F.linear(h, w) + b, t, reduction=reduction)
    b.mul_(0.5).add_(F.one_hot(t, V).sum(0))  # a balancing of classes, no parameter
    return loss.square().mean()


def bias_afterwards_by_data(h, w, b, t, reduction):
    loss = F.cross_entropy(F.linear(h, w) + b, t, reduction=reduction)
    b.data.mul_(0.5)
    return loss.square().mean()


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("strategy", ["auto", "tiled"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("program", [logits_afterwards, bias_afterwards, bias_afterwards_by_data])
def test_what_is_written_after_the_loss(program, reduction, strategy, inner):
    """Backward must not read what the graph writes after the loss."""

    def run(fn):
        torch.manual_seed(0)
        x, w = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
        b, t = torch.randn(V), torch.randint(V, (N,))
        loss, *rest = torch.utils._pytree.tree_leaves(fn(x, w, b, t, reduction))
        loss.backward()
        return [loss, *rest, x.grad, w.grad, b]

    options = {"fusedce.inner": inner, "fusedce.strategy": strategy}
    fused = torch.compile(program, backend="fusedce", options=options)
    torch.testing.assert_close(run(fused), run(program))


# ---------------------------------------------------------------- writes between the passes


def returned_logits(h, w, b, t):
    z = F.linear(h, w)
    return F.cross_entropy(z, t, reduction="none").square().mean(), z, z.argmax(-1)


def a_bias(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b), t, reduction="none").square().mean(), b.detach()


def hidden_states_of_a_frozen_head(h, w, b, t):
    h = h * 1
    loss = F.cross_entropy(F.linear(h, w.detach()), t, reduction="none").square().mean()
    return loss, h.detach()


def the_weight_of_frozen_hidden_states(h, w, b, t):
    loss = F.cross_entropy(F.linear(h.detach(), w), t, reduction="none").square().mean()
    return loss, w.detach()


def a_weight_with_z_loss(h, w, b, t):
    z = F.linear(h.detach(), w, b)
    return F.cross_entropy(z, t) + 1e-2 * z.logsumexp(-1).square().mean(), w.detach()


def a_weight_beside_a_trained_bias(h, w, b, t):
    loss = F.cross_entropy(F.linear(h.detach(), w.detach(), b), t, reduction="none")
    return loss.square().mean(), w.detach()


WRITTEN_BETWEEN = [
    returned_logits,
    a_bias,
    hidden_states_of_a_frozen_head,
    the_weight_of_frozen_hidden_states,
    a_weight_with_z_loss,
    a_weight_beside_a_trained_bias,
]


@pytest.mark.parametrize("mode", ["auto", "keep"])
@pytest.mark.parametrize("write", [lambda t: t.mul_(3), lambda t: t.numpy().fill(0.5)])
@pytest.mark.parametrize("program", WRITTEN_BETWEEN)
def test_what_the_user_writes_between_forward_and_backward(program, write, mode):
    """Eager keeps none of it for backward."""

    def run(fn):
        torch.manual_seed(0)
        x, w = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
        b, t = torch.randn(V, requires_grad=True), torch.randint(V, (N,))
        loss, written, *_ = fn(x, w, b, t)
        write(written.detach())
        loss.backward()
        return [loss, x.grad, w.grad, b.grad]

    options = {"fusedce.inner": "eager", "fusedce.logits": mode}
    fused = torch.compile(program, backend="fusedce", options=options)
    for ours, theirs in zip(run(fused), run(program), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("frozen", ["weight", "x", "weight, x"])
def test_inductor_keeps_what_the_user_may_write_to(frozen):
    """Its partitioner would compute copies and scaled operands again in backward."""

    def program(x, w, b, t):
        return F.cross_entropy(F.linear(x * 1, w * 1, b), t, reduction="none").square().mean()

    def run(fn):
        torch.manual_seed(0)
        x, w = torch.randn(N, D, requires_grad="x" not in frozen), torch.randn(V, D)
        w.requires_grad_("weight" not in frozen)
        b, t = torch.randn(V, requires_grad=True), torch.randint(V, (N,))
        loss = fn(x, w, b, t)
        with torch.no_grad():
            for tensor in (
                b,
                *([x] if "weight" in frozen else []),
                *([w] if "x" in frozen else []),
            ):
                tensor.mul_(3)
        loss.backward()
        return [loss, x.grad, w.grad, b.grad]

    fused = run(torch.compile(program, backend="fusedce"))
    for ours, theirs in zip(fused, run(program), strict=True):
        torch.testing.assert_close(ours, theirs)


def classes_masked(x, w, t):
    z = F.linear(x * 1, w)
    with torch.no_grad():
        z.to_local()[:, V - 2 :] = -1e4
    return F.cross_entropy(z, t)


def doubled_without_history(x, w, t):
    z = F.linear(x * 1, w)
    z.detach().to_local().mul_(2)
    return F.cross_entropy(z, t)


def redistributed_to_itself(x, w, t):
    z = F.linear(x * 1, w)
    with torch.no_grad():
        z.redistribute(placements=[Replicate()]).mul_(2)
    return F.cross_entropy(z, t)


def hidden_states_written(x, w, t):
    h = x * 1
    z = F.linear(h, w)
    twice = z * 2
    with torch.no_grad():
        h.to_local().zero_()
    return F.cross_entropy(twice, t) + twice.sum() * 0


def test_writes_to_the_local_tensor_of_a_dtensor(alone):
    """In one process group: with a second one, AOTAutograd itself fails."""
    mesh = init_device_mesh("cpu", (1,))
    x, w, t = torch.randn(N, D), torch.randn(V, D), torch.randint(V - 2, (N,))

    def run(fn):
        given = (DTensor.from_local(one.clone(), mesh, [Replicate()]) for one in (x, w, t))
        x_, w_, t_ = (one.requires_grad_(one.is_floating_point()) for one in given)
        loss = fn(x_, w_, t_)
        loss.backward()
        return [one.full_tensor() for one in (loss, x_.grad, w_.grad)]

    for program in (
        classes_masked,
        doubled_without_history,
        redistributed_to_itself,
        hidden_states_written,
    ):
        options = {"fusedce.inner": "aot_eager"}
        fused = run(torch.compile(program, backend="fusedce", options=options))
        for ours, theirs in zip(fused, run(program), strict=True):
            torch.testing.assert_close(ours, theirs, msg=program.__name__)
