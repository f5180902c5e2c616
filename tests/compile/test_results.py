"""What the user may write to after a fused forward: results, and operands that eager does not save."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

V = 11


def inputs():
    torch.manual_seed(6)
    x, weight, bias = torch.randn(6, 4), torch.randn(V, 4), torch.randn(V)
    for operand in (x, weight, bias):
        operand.requires_grad_()
    return x, weight, bias, torch.randint(V, (6,)), torch.randn(6, 1), torch.randn(6, V)


def fused(program, inner="eager"):
    options = {"fusedce.inner": inner, "fusedce.min_logits_mb": 0}
    return torch.compile(program, backend="fusedce", options=options)


def equal_rows(x, weight, *_):
    z = F.linear(x, weight)
    return z.logsumexp(-1), z.logsumexp(-1), z.argmax(-1)


def several_rows(x, weight, *_):
    z = F.linear(x, weight)
    return z.logsumexp(-1), z.max(-1).values, z.topk(2).values


def a_detached_view(x, weight, bias, labels, *_):
    z = F.linear(x, weight, bias).view(2, 3, V)
    picked = z.log_softmax(-1).gather(-1, labels.view(2, 3, 1))
    return picked, picked.detach(), z.logsumexp(-1)


def written_in_the_graph(x, weight, *_):
    z = F.linear(x, weight)
    first, second = z.logsumexp(-1), z.logsumexp(-1)
    first.add_(1)
    return first, second, z.amax(-1)


RESULTS = [equal_rows, several_rows, a_detached_view, written_in_the_graph]


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("program", RESULTS)
def test_a_write_to_one_result_leaves_the_others(program, inner):
    got, want = fused(program, inner)(*inputs()), program(*inputs())
    with torch.no_grad():
        for results in (got, want):
            results[0].add_(1)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("rows", [0, 5])
def test_a_mean_over_no_rows(rows, inner):
    """nan, and gradients of 0. Inductor knows that 0 * x is 0, which it is not for an infinity."""

    def program(x, weight, labels):
        return F.cross_entropy(F.linear(x, weight), labels)

    x, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    loss = fused(program, inner)(x, weight, torch.full((rows,), -100))
    assert loss.isnan()
    assert not any(grad.any() for grad in torch.autograd.grad(loss, (x, weight)))


# Programs, and the operands that eager does not save for backward.
UNSAVED = {
    "a vector of classes": (lambda z, b, t, r, q: (z.clamp(max=0.5) - b).logsumexp(1).sin(), "b"),
    "a number of a row": (lambda z, b, t, r, q: F.softplus(z - r).sum(-1), "r"),
    "values of each class": (lambda z, b, t, r, q: (z - q).relu().sum(-1).sin(), "q"),
    "values before a softmax": (lambda z, b, t, r, q: (z - q).logsumexp(-1).sin(), "q"),
    "compared values": (lambda z, b, t, r, q: torch.where(z > q, z, -z).sum(-1).sin(), "q"),
    "chosen values": (lambda z, b, t, r, q: torch.where(z > 0, z, q).sum(-1).sin(), "q"),
    "classes of compared logits": (
        lambda z, b, t, r, q: torch.where(z > z.gather(1, t[:, None]), z, -z).sum(-1).sin(),
        "t",
    ),
    "classes": (lambda z, b, t, r, q: (z - 0.3 * F.one_hot(t, V)).logsumexp(1).sin(), "t"),
}


@pytest.mark.parametrize("case", UNSAVED)
def test_an_operand_that_is_written_to_before_backward(case):
    value, name = UNSAVED[case]

    def program(x, weight, *others):
        return value(F.linear(x, weight), *others)

    found = []
    for fn in (fused(program), program):
        operands = inputs()
        rows = fn(*operands)
        operands[2 + "btrq".index(name)].detach().zero_()
        rows.sum().backward()
        found.append([operand.grad for operand in operands[:2]])
    torch.testing.assert_close(found[0], found[1])


def test_a_result_that_is_written_to_before_backward():
    """Autograd saves the exponential of a log-probability, and not what is returned."""

    def program(x, weight, _, labels, *others):
        return F.linear(x, weight).softmax(-1).gather(-1, labels[:, None]).squeeze(-1)

    found = []
    for fn in (fused(program), program):
        operands = inputs()
        rows = fn(*operands)
        total = rows.sum()
        rows.detach().zero_()
        total.backward()
        found.append([operand.grad for operand in operands[:2]])
    torch.testing.assert_close(found[0], found[1])


def test_a_target_that_two_reductions_read_of_which_one_has_no_gradients():
    def program(x, weight, _b, _t, _r, q):
        targets = q.softmax(-1)
        log_probs = F.linear(x, weight).log_softmax(-1)
        with torch.no_grad():
            metric = F.kl_div(log_probs, targets, reduction="none").sum(-1)
        return (metric + F.kl_div(log_probs, targets, reduction="none").sum(-1)).sin().sum()

    found = []
    for fn in (fused(program), program):
        operands = inputs()
        operands[-1].requires_grad_()
        fn(*operands).backward()
        found.append([operands[i].grad for i in (0, 1, -1)])
    torch.testing.assert_close(found[0], found[1])


def total(x, weight, bias, labels, *_):
    return F.cross_entropy(F.linear(x, weight), labels)


def one_trained(x, weight, bias, labels, *_):
    return F.cross_entropy(F.linear(x, weight.detach()), labels, reduction="none").exp().sum()


@pytest.mark.full  # compiles C++
@pytest.mark.parametrize("program", [total, one_trained])
def test_code_of_the_cpp_wrapper(program):
    """It crashes at an operator that returns a list of one tensor."""
    options = {"fusedce.min_logits_mb": 0, "cpp_wrapper": True}
    compiled = torch.compile(program, backend="fusedce", options=options)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs()), program(*inputs()))
    given = inputs()
    got, want = (torch.autograd.grad(run(*given), given[0]) for run in (compiled, program))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("ignored", [1, 3])
def test_an_ignored_row_does_not_show_what_it_holds(ignored):
    """PyTorch's gradients would be nan: it multiplies the row by 0."""

    def masked(x, weight, bias, labels, *_):
        return (F.linear(x, weight, bias).logsumexp(-1) * (labels >= 0)).sum()

    def with_labels(x, weight, bias, labels, *_):
        return F.cross_entropy(F.linear(x, weight, bias), labels)

    for program in (masked, with_labels):
        found = []
        for value in (0.5, float("nan")):
            torch._dynamo.reset()
            x, weight, bias, labels, *_ = inputs()
            labels[:ignored] = -100
            with torch.no_grad():
                x[:ignored] = value
            loss = fused(program, "aot_eager")(x, weight, bias, labels)
            loss.backward()
            found.append((loss, x.grad, bias.grad, weight.grad))
        finite, hidden = found
        torch.testing.assert_close(hidden[:2], finite[:2])
        assert not hidden[1][:ignored].any()
        if ignored == 3:  # half of the rows are left out of the products
            torch.testing.assert_close(hidden, finite)
