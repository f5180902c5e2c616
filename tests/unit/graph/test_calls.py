"""Calls are read by the names of the callee's parameters, in whatever order they are given."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.programs import B, D, S, V, check, head_of, inputs, last, reason_of, report_of

N = B * S

# x [N, D], weight [V, D], labels [N] -> a loss that fuses
FUSED = {
    "matmul, shuffled": lambda x, w, t: F.cross_entropy(torch.matmul(other=w.T, input=x), t),
    "mm, shuffled": lambda x, w, t: F.cross_entropy(torch.mm(mat2=w.t(), input=x), t),
    "method by name": lambda x, w, t: F.cross_entropy(x.matmul(other=w.T), t),
    "linear, shuffled": lambda x, w, t: F.cross_entropy(F.linear(weight=w, input=x), t),
    "addmm, shuffled": lambda x, w, t: F.cross_entropy(
        torch.addmm(mat2=w.t(), input=w.sum(1), mat1=x), t),
    "loss, shuffled": lambda x, w, t: F.cross_entropy(
        target=t, reduction="sum", input=F.linear(x, w)),
    "NumPy's names": lambda x, w, t: -F.linear(x, w).log_softmax(-1).gather(
        axis=-1, index=t[:, None]).mean(),
    "squeezed along an axis": lambda x, w, t: F.cross_entropy(
        F.linear(x, w)[None].squeeze(axis=0), t),
    "swapaxes by name": lambda x, w, t: F.cross_entropy(
        F.linear(x, w).swapaxes(axis1=0, axis0=1).transpose(dim1=0, dim0=1), t),
    "reshape by name": lambda x, w, t: F.cross_entropy(
        torch.reshape(shape=(N, V), input=F.linear(x, w)[None]), t),
    "permute by name": lambda x, w, t: F.cross_entropy(
        torch.permute(dims=(1, 0), input=F.linear(x, w).t()), t),
    "a factor by name": lambda x, w, t: F.cross_entropy(
        torch.mul(other=2.5, input=F.linear(x, w)), t),
    "clamp by name": lambda x, w, t: F.cross_entropy(
        torch.clamp(max=1, input=F.linear(x, w), min=-1), t),
    "lse by name": lambda x, w, t: torch.sub(
        other=F.linear(x, w).gather(-1, t[:, None]), input=torch.logsumexp(
            keepdim=True, dim=-1, input=F.linear(x, w))).sum() * 0 + F.cross_entropy(F.linear(x, w), t),
}  # fmt: skip


@pytest.mark.parametrize("case", FUSED)
def test_fused(case):
    x, weight, labels = inputs()
    x, labels = x.detach().view(N, D).requires_grad_(), labels.view(N)

    def program(x, weight, labels):
        return FUSED[case](x, weight, labels)

    report = report_of(program, x, weight, labels)
    assert report.matches, str(report)
    check(program, labels, x, weight)


NOT_LINEAR = {
    "a diagonal": (lambda x, w: torch.einsum("nn,vn->nv", x[:D], w), D, D),
    "a stretched dimension": (lambda x, w: torch.einsum("nd,vd->nv", x[:, :1], w), N, D),
}


@pytest.mark.parametrize("case", NOT_LINEAR)
def test_an_einsum_that_is_no_linear(case):
    head, rows, _ = NOT_LINEAR[case]
    x, weight, labels = torch.randn(N, D), torch.randn(V, D), torch.randint(V, (rows,))

    def program(x, weight, labels):
        return F.cross_entropy(head(x, weight), labels)

    assert "einsum" in reason_of(program, x, weight, labels)


def test_negative_labels_that_a_mask_removes_later():
    """An index counts from the end; gather and cross_entropy have no such labels."""

    def program(x, weight, labels):
        labels = labels.view(-1)
        picked = last(F.linear(x, weight)).log_softmax(-1)[torch.arange(N), labels]
        mask = labels >= 0
        return -(picked * mask).sum() / mask.sum()

    x, weight, labels = inputs()
    labels[0, 1], labels[1, 2] = -1, -V
    head_of(program, x, weight, labels)
    check(program, labels, x, weight)


@pytest.mark.parametrize("difference", [False, True])
def test_take_along_dim_counts_round_the_classes(difference):
    def program(x, weight, labels):
        z = last(F.linear(x, weight))
        source = z if difference else z.log_softmax(-1)
        picked = torch.take_along_dim(source, labels.view(-1, 1), dim=-1)
        return (z.logsumexp(-1, keepdim=True) - picked if difference else picked).sum()

    x, weight, labels = inputs()
    labels[0, 1], labels[1, 2], labels[1, 3] = -1, -100, V + 2
    head_of(program, x, weight, labels)
    check(program, labels, x, weight)


def test_labels_beyond_the_classes_raise_as_they_do_in_eager():
    def program(x, weight, labels):
        picked = last(F.linear(x, weight)).log_softmax(-1)[torch.arange(N), labels.view(-1)]
        return -picked.mean()

    x, weight, labels = inputs()
    labels[0, 1] = -V - 1
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    with pytest.raises(IndexError):
        program(x, weight, labels)
    with pytest.raises(IndexError):
        fused(x, weight, labels)


def test_float8_on_the_way():
    def program(x, weight, labels):
        return F.cross_entropy(
            last(F.linear(x, weight)).to(torch.float8_e5m2).float(), labels.view(-1)
        )

    x, weight, labels = inputs()
    assert "8 bits" in reason_of(program, x.detach(), weight.detach(), labels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_added_to_up_cast_logits_is_not_rounded(dtype):
    """Log priors in f32, and a constant before another."""

    def program(x, weight, prior, factor, labels):
        z = last(F.linear(x, weight)).to(prior.dtype) + prior
        z = (z + 100.3) - factor * prior
        return F.cross_entropy(z * 0.7, labels.view(-1), reduction="none")

    x, weight = torch.randn(32, 8, 6, dtype=dtype), torch.randn(V, 6, dtype=dtype)
    labels = torch.randint(V, (32, 8))
    prior, factor = torch.randn(V) * 5 - 30, torch.tensor(0.7)
    exact = program(*(t.double() for t in (x, weight, prior, factor)), labels)
    eager = program(x, weight, prior, factor, labels)
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    head_of(program, x, weight, prior, factor, labels)
    got = fused(x, weight, prior, factor, labels)
    assert got.sub(exact).norm() <= 2 * eager.sub(exact).norm()


# ---------------------------------------------------------------- sizes that are symbols


def varying(program, *sizes, **options):
    """Runs a program of x, weight and labels at several sizes (N, D, V), compiled once."""
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"}, **options)
    for n, d, v in sizes:
        x, weight = torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True)
        labels = torch.randint(v, (n,))
        results = []
        for fn in (fused, program):
            loss = fn(x, weight, labels)
            results.append([loss, *torch.autograd.grad(loss, (x, weight))])
        torch.testing.assert_close(*results)


SIZES = (8, 6, 10), (7, 5, 9), (12, 3, 31), (5, 4, 17)


@pytest.mark.parametrize(
    "between",
    [
        lambda z: z,
        lambda z: z[None].transpose(0, 1).reshape(-1, z.shape[-1]) + 1,
        lambda z: (z + 1) * z.new_ones(()) / 3,
        lambda z: z[:, 1:],
        lambda z: z.view(z.shape),
    ],
)
def test_rows_hidden_size_and_classes_may_all_vary(between):
    """A functional weight makes V and D symbols: one graph, fused, for all of them."""
    torch._dynamo.utils.counters.clear()

    def program(x, weight, labels):
        z = between(F.linear(x, weight))
        return F.cross_entropy(z, labels % z.shape[-1])

    varying(program, *SIZES, dynamic=True)
    assert torch._dynamo.utils.counters["fusedce"]["matched"] == 1
    assert torch._dynamo.utils.counters["frames"]["total"] == 1


def test_calls_that_share_the_number_of_classes():
    """It is read where the first of them stands."""

    def program(x, weight, labels):
        log = F.linear(x, weight).log_softmax(1)
        loss = F.nll_loss(log, labels)
        given = torch.arange(weight.shape[0]).expand(log.shape) / 7 + loss.detach()
        cross = (log.exp() * (log - given)).sum(-1)
        p = F.softmax(log, dim=1)
        entropy = -(p * p.log()).sum(1)
        return (loss * torch.ones(())).sum() + cross.sin().sum() + entropy.square().sum()

    varying(program, *SIZES, dynamic=True)


def test_a_view_to_a_whole_size():
    torch._dynamo.utils.counters.clear()

    def program(x, weight, labels):
        z = F.linear(x, weight).view(torch.Size((1,)) + labels.shape + (weight.shape[0],))
        return F.cross_entropy(z.view(-1, weight.shape[0]), labels)

    varying(program, *SIZES)
    assert torch._dynamo.utils.counters["fusedce"]["rejected"] == 0


def test_a_class_slice_of_varying_length():
    """Two graphs: the first length as a number, all later ones as a symbol, which no row knows."""
    torch._dynamo.utils.counters.clear()

    def program(x, weight, labels, k):
        return F.cross_entropy(last(F.linear(x, weight))[:, :k], labels.view(-1) % k)

    x, weight, labels = inputs()
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    for k in (5, 6, 7, 8):
        expected = program(x, weight, labels, k)
        torch.testing.assert_close(fused(x, weight, labels, k), expected)
    assert torch._dynamo.utils.counters["fusedce"]["matched"] == 1


# ---------------------------------------------------------------- stacks of heads


def stacked(x, weight, other, labels, head):
    z = torch.stack([F.linear(x, weight), F.linear(x, other)])[head]
    return F.cross_entropy(last(z), labels.view(-1))


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_head_by_a_number_that_varies(dynamic):
    x, weight, labels = inputs()
    other = torch.randn(V, D, requires_grad=True)
    fused = torch.compile(
        stacked, backend="fusedce", dynamic=dynamic, options={"fusedce.inner": "eager"}
    )
    for head in (0, 1, 0, -1):
        expected = stacked(x, weight, other, labels, head)
        torch.testing.assert_close(fused(x, weight, other, labels, head), expected)


def test_a_head_by_a_tensor():
    x, weight, labels = inputs()
    other = torch.randn(V, D, requires_grad=True)
    fused = torch.compile(stacked, backend="fusedce", options={"fusedce.inner": "eager"})
    args = x, weight, other, labels, torch.tensor(1)
    torch.testing.assert_close(fused(*args), stacked(*args))


def test_one_head_stacked_twice():
    def program(x, weight, labels):
        z = F.linear(x, weight)
        return F.cross_entropy(last(torch.stack([z, z])[1]), labels.view(-1))

    x, weight, labels = inputs()
    head_of(program, x, weight, labels)
    check(program, labels, x, weight)


def test_heads_that_no_loss_reads():
    """Their gradients are zeros, as eager has them, and not None."""
    x, weight, labels = inputs()
    other = torch.randn(V, D, requires_grad=True)
    fused = torch.compile(stacked, backend="fusedce", options={"fusedce.inner": "eager"})
    fused(x, weight, other, labels, 0).backward()
    assert other.grad is not None
    assert not other.grad.any()
