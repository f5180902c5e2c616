"""What is given at a class: masks, factors and margins of classes, targets of all classes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fxpass.spec.expression import text
from tests.support.programs import B, D, S, V, check, head_of, inputs, reason_of, report_of, spec_of

EAGER = {"fusedce.inner": "eager"}
BANNED = torch.arange(V) % 3 == 1
U = torch.rand(V) + 0.5
TARGETS = (torch.rand(B, S, V) < 0.3).float()
HELD = torch.rand(B, S, V) < 0.3
HELD[..., 0] = False  # a row without classes has no softmax
MARGINS = torch.rand(V)


def targets(z):
    return TARGETS.to(torch.promote_types(z.dtype, torch.float32))


def hot(t):
    return F.one_hot(t, V)


def cosine(z):
    return (z / 4).clamp(-1 + 1e-6, 1 - 1e-6)


def arc(z, t):
    sine = (1 - cosine(z).square()).sqrt()
    phi = torch.where(cosine(z) > -0.8, cosine(z) * 0.9 - sine * 0.4, cosine(z) - 0.2)
    at = torch.zeros_like(z).scatter_(-1, t.unsqueeze(-1), 1.0)
    return 16 * (at * phi + (1.0 - at) * cosine(z))


def in_place(z, mask):
    z.masked_fill_(mask, -5)
    return z


def flat(program):
    """A program of logits [N, V] and labels [N]."""
    return lambda z, t: program(z.view(-1, V), t.view(-1)).view(z.shape)


def assigned(index, number):
    def program(z, t):
        z[index] = number
        return z

    return program


def margin(z, t):
    z[torch.arange(len(t)), t] -= 0.5
    return z


def margin_of_a_range(z, t):
    z[range(len(t)), t] -= 0.5
    return z


def arc_at_the_target(z, t):
    rows, z = torch.arange(len(t)), z / 8
    at = z[rows, t]
    sine = torch.sqrt(1.0 - at.square() + 1e-6)
    z = z.clone()
    z[rows, t] = at * 0.75 - sine * 0.5
    return z.mul(8)


def scattered(z, t):
    at = z.gather(1, t[:, None]) - 0.5
    return 2 * z.scatter(1, t[:, None], at)


CHOSEN = torch.tensor([1, V - 1])

# Of logits [B, S, V] and labels [B, S]; the transform.
LOGITS = {
    "masked classes": (lambda z, t: z.masked_fill(BANNED, -5), "where(given0>0,-5,z)"),
    "masked with -inf": (lambda z, t: z.masked_fill(BANNED & (BANNED.sum() > V), -math.inf),
        "where(given0>0,-inf,z)"),
    "masked in place": (lambda z, t: in_place(z, BANNED), "where(given0>0,-5,z)"),
    "masked elements": (lambda z, t: z.masked_fill(HELD, -5), "where(given0>0,-5,z)"),
    "where of a mask": (lambda z, t: torch.where(BANNED, -5.0, z), "where(given0>0,-5,z)"),
    "where of a mask, twice the logits": (
        lambda z, t: torch.where(HELD, torch.tanh(z), 2 * z), "where(given0>0,tanh(z),2*z)"),
    "a shift of some classes": (
        lambda z, t: torch.where(BANNED, z - 0.5, z), "where(given0>0,z-0.5,z)"),
    "two shifts of classes": (
        lambda z, t: 2 * torch.where(BANNED, z + 1, z - 0.25) + MARGINS, ""),
    "a factor of each class": (lambda z, t: z * U, "given0*z"),
    "a temperature of each class": (lambda z, t: z / U[None], "z*given0**(-1)"),
    "a factor and a bias of each class": (lambda z, t: z * U + MARGINS, "given0+given1*z"),
    "a function of a factor": (lambda z, t: torch.tanh(z * U), "tanh(given0*z)"),
    "values of all classes": (lambda z, t: z + TARGETS, "given0+z"),
    "CosFace": (lambda z, t: 16.0 * (z - 0.35 * hot(t)), "-5.6*hit0+16*z"),
    "margins of classes": (lambda z, t: z - hot(t) * MARGINS, "-given0+z"),
    "ArcFace": (lambda z, t: 8.0 * torch.cos(cosine(z).acos() + 0.5 * hot(t).float()), ""),
    "ArcFace by sines": (arc, ""),
    "a margin by scatter_": (
        lambda z, t: z - torch.zeros_like(z).scatter_(-1, t.unsqueeze(-1), 0.5), "-0.5*hit0+z"),
    "a margin by scatter": (
        lambda z, t: z - torch.zeros_like(z).scatter(-1, t.unsqueeze(-1), 0.5), "-0.5*hit0+z"),
    "all but the target": (
        lambda z, t: z.masked_fill(hot(t).bool(), -7), "where(hit0>0,-7,z)"),
    "a margin at another class": (lambda z, t: z + hot((t + 1) % V), "hit1+z"),
    "margins of rows": (lambda z, t: z - hot(t) * MARGINS[t].unsqueeze(-1), "-given0*hit0+z"),
    "margins of rows by where": (
        lambda z, t: torch.where(hot(t).bool(), z - MARGINS[t].unsqueeze(-1), z),
        "where(hit0>0,-given0+z,z)"),
    "a threshold of each row": (
        lambda z, t: torch.where(z > MARGINS[t].unsqueeze(-1), z, 0.1 * z + 0.9 * MARGINS[t].unsqueeze(-1)),
        ""),
    "a shift of each row": (lambda z, t: torch.sigmoid(z - MARGINS[t].unsqueeze(-1)), ""),
    "a mask of rows": (
        lambda z, t: torch.where((t > V // 2).unsqueeze(-1), z, 0.3 * z),
        "where(given0>0,z,0.3*z)"),
    "a margin by a mask of elements": (
        lambda z, t: torch.where(torch.arange(V) == t.unsqueeze(-1), z - 0.5, z),
        "where(given0>0,z-0.5,z)"),
    "assigned classes": (assigned((..., BANNED), -5), "where(given0>0,-5,z)"),
    "assigned classes by index": (assigned((..., CHOSEN), -5), "where(given0>0,-5,z)"),
    "an assigned class": (assigned((..., -1), -5), "where(given0>0,-5,z)"),
    "assigned padding": (
        flat(assigned((slice(None), slice(V - 1, None)), -9)), "where(given0>0,-9,z)"),
    "assigned elements": (assigned(HELD, -5), "where(given0>0,-5,z)"),
    "assigned targets by a mask": (
        lambda z, t: assigned(hot(t).bool(), -5)(z, t), "where(hit0>0,-5,z)"),
    "index_fill": (lambda z, t: z.index_fill(-1, CHOSEN, -5), "where(given0>0,-5,z)"),
    "index_fill_": (lambda z, t: z.index_fill_(-1, CHOSEN, -5), "where(given0>0,-5,z)"),
    "a margin in place": (flat(margin), "where(hit1>0,z-0.5,z)"),
    "a margin in a range of rows": (flat(margin_of_a_range), "where(hit1>0,z-0.5,z)"),
    "ArcFace at the target": (flat(arc_at_the_target), ""),
    "a margin by scatter of the target": (flat(scattered), "2*where(hit0>0,z-0.5,z)"),
    "a margin by scatter_add": (
        flat(lambda z, t: z.scatter_add(1, t[:, None], 0.5 * z.gather(1, t[:, None]))),
        "where(hit0>0,1.5*z,z)"),
    "a number scattered in place": (
        flat(lambda z, t: z.scatter_(1, t[:, None], -5)), "where(hit0>0,-5,z)"),
}  # fmt: skip


def losses(name):
    def program(x, weight, labels):
        logits = LOGITS[name][0](F.linear(x, weight), labels)
        return F.cross_entropy(logits.view(-1, V), labels.view(-1))

    return program


@pytest.mark.parametrize("name", LOGITS)
def test_losses(name):
    x, weight, labels = inputs()
    found = text(spec_of(losses(name), x, weight, labels).transform)
    assert found == LOGITS[name][1] or not LOGITS[name][1]
    check(losses(name), labels, x, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", LOGITS)
def test_losses_in_other_dtypes(name, dtype):
    check(losses(name), *inputs(dtype)[::-1][:1], *inputs(dtype)[:2])


def reductions(name):
    def program(x, weight, labels):
        z = LOGITS[name][0](F.linear(x, weight), labels)
        log = z.log_softmax(-1)
        entropy = -(log.exp() * log).sum(-1)
        picked = log.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return (picked * entropy).square().sum() + (z.argmax(-1) == labels).sum()

    return program


@pytest.mark.parametrize("name", LOGITS)
def test_other_reductions(name):
    x, weight, labels = inputs()
    (head,) = report_of(reductions(name), x, weight, labels).matches
    assert len(head.calls) == 1
    check(reductions(name), labels, x, weight)


# ---------------------------------------------------------------- sums over the classes

SUMS = {
    "bce_with_logits": lambda z, t: F.binary_cross_entropy_with_logits(z, targets(z)),
    "bce_with_logits, sum, by keyword": lambda z, t: F.binary_cross_entropy_with_logits(
        target=targets(z), input=z, reduction="sum"),
    "bce_with_logits, none": lambda z, t: F.binary_cross_entropy_with_logits(
        z, targets(z), reduction="none").sum(-1).square().sum(),
    "bce_with_logits, weights": lambda z, t: F.binary_cross_entropy_with_logits(
        z, targets(z), weight=U.to(targets(z)), pos_weight=MARGINS.to(targets(z))),
    "bce_with_logits of one_hot": lambda z, t: F.binary_cross_entropy_with_logits(z, hot(t).to(targets(z))),
    "softplus": lambda z, t: (F.softplus(z) - targets(z) * z).sum(-1).mean(),
    "logsigmoid": lambda z, t: -(
        targets(z) * F.logsigmoid(z) + (1 - targets(z)) * F.logsigmoid(-z)).sum(-1).mean(),
    "sigmoid focal": lambda z, t: (
        F.binary_cross_entropy_with_logits(z, targets(z), reduction="none")
        * (1 - z.sigmoid() * targets(z) - (1 - z.sigmoid()) * (1 - targets(z))) ** 2).sum(),
    "a function at one_hot": lambda z, t: (hot(t) * z.clamp(-1, 1)).sum(-1).square().sum(),
    "the exponential of one-hot logits": lambda z, t: (
        (z * hot(t)).exp().sum(-1).log().square().sum()),
}  # fmt: skip


def sums(name):
    return lambda x, weight, labels: SUMS[name](F.linear(x, weight), labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_functions(name, dtype):
    x, weight, labels = inputs(dtype)
    (head,) = report_of(sums(name), x, weight, labels).matches
    assert len(head.calls) == 1
    check(sums(name), labels, x, weight)


def test_confident_logits():
    """Where softplus and the target's logit cancel, no digit is lost."""

    def program(x, weight, labels):
        return F.binary_cross_entropy_with_logits(300 * F.linear(x, weight), hot(labels).float())

    x, weight, labels = inputs()
    assert report_of(program, x, weight, labels).matches
    check(program, labels, x, weight)


TRAINED = {
    "a factor of each class": lambda z, u, v: z * u,
    "a temperature of each class": lambda z, u, v: z / (u + 0.5),
    "a bias after a function": lambda z, u, v: torch.tanh(z) * 3 + u,
    "vector scaling": lambda z, u, v: z * u + u.square(),
    "an exponent of both": lambda z, u, v: torch.tanh(z * u) * 2 - v,
    "masked values": lambda z, u, v: torch.where(BANNED, z * u, z - v),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRAINED)
def test_what_is_trained(name, dtype):
    def program(x, weight, u, v, labels):
        z = TRAINED[name](F.linear(x, weight), u, v)
        entropy = torch.special.entr(z.softmax(-1)).sum(-1)
        return F.cross_entropy(z.view(-1, V), labels.view(-1)) + entropy.square().mean()

    x, weight, labels = inputs(dtype)
    u, v = U.to(dtype, copy=True).requires_grad_(), TARGETS.to(dtype)
    (call,) = head_of(program, x, weight, u, v, labels).calls
    assert any(name.startswith("given") for name in call.spec.gradients)
    check(program, labels, x, weight, u, v)


def soft(kind):
    """The cross-entropy with a multiple of soft targets, as timm has it."""

    def program(x, weight, target):
        target = target * 1
        with torch.set_grad_enabled(kind != "without gradients"):
            negative = -target
        if kind == "written":
            target.zero_()
        log_probs = F.linear(x, weight).log_softmax(-1)
        return (negative * log_probs).sum(-1).mean()

    return program


def assert_equal(program, *tensors):
    """Eager's gradients, and none where it has none."""
    trained = [t for t in tensors if t.requires_grad]
    torch._dynamo.reset()
    fused = torch.compile(program, backend="fusedce")
    losses = [program(*tensors), fused(*tensors)]
    pairs = (torch.autograd.grad(loss, trained, allow_unused=True) for loss in losses)
    for eager, one in zip(*pairs, strict=True):
        assert (eager is None) == (one is None)
        torch.testing.assert_close(eager, one)


@pytest.mark.parametrize("kind", ["plain", "trained", "without gradients", "written"])
def test_multiples_of_soft_targets(kind):
    x, weight, _ = inputs()
    target = (TARGETS / 3).requires_grad_(kind in ("trained", "without gradients"))
    (call,) = head_of(soft(kind), x, weight, target).calls
    read = "given_l_target" if kind in ("plain", "trained") else "given_negative"
    assert [symbol.name.rstrip("_0123456789") for symbol in call.given] == [read]
    assert_equal(soft(kind), x, weight, target)


@pytest.mark.parametrize("what", ["logits", "labels"])
def test_a_target_that_changes_before_it_is_assigned(what):
    def program(x, weight, labels):
        z, t = F.linear(x, weight).view(-1, V), labels.view(-1).clone()
        rows = torch.arange(len(t))
        at = z[rows, t]
        if what == "logits":
            at.mul_(2)
        else:
            t.copy_((t + 1) % V)
        z[rows, t] = at - 0.5
        return F.cross_entropy(z, labels.view(-1))

    tensors = inputs()
    if what == "logits":
        assert_equal(program, *tensors)
    with torch.no_grad():  # backward of the pick needs the labels
        fused = torch.compile(program, backend="fusedce")
        torch.testing.assert_close(fused(*tensors), program(*tensors))


@pytest.mark.parametrize("kind", ["plain", "written", "without gradients"])
def test_margins_of_rows_that_change(kind):
    def program(x, weight, labels, margins):
        rows = margins[labels].unsqueeze(-1)
        with torch.set_grad_enabled(kind != "without gradients"):
            made = hot(labels) * rows
        if kind == "written":
            rows.zero_()
        z = F.linear(x, weight) - made
        return F.cross_entropy(z.view(-1, V), labels.view(-1))

    x, weight, labels = inputs()
    margins = MARGINS.clone().requires_grad_(kind == "without gradients")
    assert_equal(program, x, weight, labels, margins)


# ---------------------------------------------------------------- what is left alone


def written(t):
    made = hot(t).float()
    made[..., 0] = 0.5
    return made


def test_other_logits_that_are_trained():
    """They, and their gradients, take as much memory as the logits."""

    def program(x, weight, others, labels):
        return F.cross_entropy((F.linear(x, weight) + others).view(-1, V), labels.view(-1))

    x, weight, labels = inputs()
    others = TARGETS.clone().requires_grad_()
    assert "which needs a gradient" in reason_of(program, x, weight, others, labels)
    check(program, labels, x, weight, others)


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("values", [True, False])
def test_some_rows_after_a_margin(softmax, values):
    """What is given has the rows from before."""

    def program(x, weight, labels):
        z = F.linear(x, weight) - (TARGETS if values else 0.4 * hot(labels))
        z = z.log_softmax(-1) if softmax else z
        return F.cross_entropy(z[1:].flatten(0, 1), labels[1:].flatten())

    x, weight, labels = inputs()
    assert "fxpass failed" not in str(report_of(program, x, weight, labels))
    check(program, labels, x, weight)


@pytest.mark.parametrize("margin", [True, False])
@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("copied", [True, False])
def test_labels_that_change_after_a_one_hot_tensor(margin, scattered, copied):
    def program(x, weight, labels):
        t, z = labels.clone(), F.linear(x, weight)
        if copied:  # the view of a transposed tensor is a copy
            hot_of = t.t().reshape(-1)
            z = z.transpose(0, 1).reshape(-1, V)
            z = z - 0.5 * F.one_hot(hot_of, V)
            t.copy_((t + 1) % V)
            return F.cross_entropy(z, labels.t().reshape(-1))
        at = hot(t)
        if scattered:
            at = torch.zeros_like(z).scatter_(-1, t.unsqueeze(-1), 1.0)
        z = z - 0.5 * at if margin else z
        t.copy_((t + 1) % V)
        loss = F.cross_entropy(z.view(-1, V), labels.view(-1))
        return loss if margin else loss + (at * z.log_softmax(-1)).sum(-1).mean()

    x, weight, labels = inputs()
    check(program, labels, x, weight)


def test_a_one_hot_tensor_that_is_written_to():
    def program(x, weight, labels):
        return F.cross_entropy((F.linear(x, weight) * written(labels)).view(-1, V), labels.view(-1))

    x, weight, labels = inputs()
    assert text(spec_of(program, x, weight, labels).transform) == "given0*z"
    check(program, labels, x, weight)


@pytest.mark.parametrize("dim", [0, 1])
def test_comparisons_are_not_counted(dim):
    """How many logits are large is a count; where they are, a branch."""

    def program(x, weight, labels):
        z = F.linear(x, weight)
        return F.cross_entropy(z.view(-1, V), labels.view(-1)), (z > 0).sum(dim - 2)

    x, weight, labels = inputs()
    loss, count = torch.compile(program, backend="fusedce")(x, weight, labels)
    assert torch.equal(count, program(x, weight, labels)[1])
    assert loss.isfinite()


def test_a_number_that_eager_refuses():
    def program(x, weight, labels):
        z = F.linear(x, weight).masked_fill(BANNED, torch.finfo(torch.float32).min)
        return F.cross_entropy(z.view(-1, V), labels.view(-1))

    tensors = inputs(torch.bfloat16)
    with pytest.raises(RuntimeError, match="without overflow"):
        torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})(*tensors)


def test_ignored_labels_have_no_margin():
    """A label that is ignored is no class, and no element of a mask."""

    def program(x, weight, labels):
        z = F.linear(x, weight)
        z = torch.where(torch.arange(V) == labels.unsqueeze(-1), z - 0.5, z)
        loss = F.cross_entropy(z.view(-1, V), labels.view(-1))
        return loss + z.logsumexp(-1).square().mean()

    x, weight, labels = inputs()
    labels[0, 1] = -100
    assert report_of(program, x, weight, labels).matches
    check(program, labels, x, weight)


def test_hidden_values_are_no_classes():
    """A regression is a sum of functions of outputs too, but none is a class."""

    def program(x, weight):
        return (
            F.mse_loss(F.linear(x, weight), TARGETS)
            + (F.linear(x, weight) - TARGETS).square().sum()
        )

    x, weight, _ = inputs()
    report = report_of(program, x, weight)
    assert not report.matches
    assert not report.rejections


@pytest.mark.parametrize("kept", ["keep", "defer"])
def test_returned_logits(kept):
    def program(x, weight, labels):
        z = F.linear(x, weight)
        shown = z.masked_fill(BANNED, -5) * U
        return F.cross_entropy(shown.view(-1, V), labels.view(-1)), z

    x, weight, labels = inputs()
    chosen = {"fusedce.logits": kept, "fusedce.inner": "eager"}
    torch._dynamo.reset()
    loss, z = torch.compile(program, backend="fusedce", options=chosen)(x, weight, labels)
    theirs = program(x, weight, labels)
    torch.testing.assert_close((loss, z * 1), theirs)
    assert x.shape[-1] == D


def test_a_margin_at_a_class_that_the_loss_ignores():
    """The loss reads class 0 in its ignored rows, and the margin the label."""

    def program(x, weight, labels):
        z = F.linear(x, weight).view(-1, V)
        z = z - 0.3 * hot(labels.view(-1))
        smooth = (z.log_softmax(-1) * U).sum(-1)
        return F.cross_entropy(z, labels.view(-1), ignore_index=2) + smooth.sin().mean()

    x, weight, labels = inputs()
    labels[0, :2] = 2
    (call,) = head_of(program, x, weight, labels).calls
    assert len(call.picks) == 2
    check(program, labels, x, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rank_of_a_class_by_a_function_of_its_logit_and_softmax(dtype):
    """The class itself is not larger than itself."""

    def program(x, weight, labels):
        z = F.linear(x, weight)
        score = z.softmax(-1) + z
        larger = score > score.gather(-1, labels.unsqueeze(-1))
        return larger.sum(-1), (z.softmax(-1) ** 2).sum(-1)

    x, weight, labels = inputs(dtype)
    spec = spec_of(program, x, weight, labels)
    assert "sum(where(at0+exp(pick0)<z+exp(l),1,0))" in spec.text()
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    for _ in range(20):
        x, weight, labels = inputs(dtype)
        assert torch.equal(fused(x, weight, labels)[0], program(x, weight, labels)[0])


@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
def test_a_row_that_is_masked_wholly(strategy):
    """Its log-sum-exp is -inf; no gradient passes through the mask, as in eager."""
    mask = torch.rand(2, S, V) < 0.3
    mask[0, 1] = True

    def program(x, weight):
        z = F.linear(x, weight).masked_fill(mask, -math.inf)
        return z.logsumexp(-1).sum()

    found = []
    for backend in ("eager", "fusedce"):
        torch.manual_seed(0)
        x, weight = torch.randn(2, S, D).requires_grad_(), torch.randn(V, D).requires_grad_()
        options = {"fusedce.inner": "eager", "fusedce.strategy": strategy}
        options = {"options": options} if backend == "fusedce" else {}
        torch.compile(program, backend=backend, **options)(x, weight).backward()
        found.append((x.grad, weight.grad))
    assert all(g.isfinite().all() for g in found[0])
    assert all(map(torch.allclose, *found))


def test_a_mask_of_rows_before_a_function():
    keep = torch.rand(B, S, 1) > 0.4

    def program(x, weight, labels):
        z = torch.where(keep, F.linear(x, weight), 2.0)
        z = F.silu(z, inplace=True)
        return z.gather(-1, labels[..., None]).square().sum() + z.logsumexp(-1).sum()

    x, weight, labels = inputs()
    assert report_of(program, x, weight, labels).matches
    check(program, labels, x, weight)


def test_a_function_of_assigned_classes_at_a_class():
    def program(x, weight, labels):
        z = F.linear(x, weight).index_fill(-1, torch.tensor([0, V - 1]), -6.0)
        of_row = (z * F.logsigmoid(z)).sum(-1)
        return of_row.square().sum() + (hot(labels) * F.logsigmoid(z).tanh()).sum(-1).sin().sum()

    x, weight, labels = inputs()
    assert report_of(program, x, weight, labels).matches
    check(program, labels, x, weight)


def test_a_square_of_logits_of_a_masked_row():
    """Of moments, whose terms cancel, it would be 8e-6 for the 0 of a masked row."""

    def program(x, weight, rows):
        z = F.linear(x, weight).masked_fill(rows > 0.5, 0.0).tanh()
        lse = z.exp().sum(-1).log()
        squares = (z * z).sum(-1)
        return lse.square().mean() + squares.mean(), squares

    x, rows = inputs()[0], torch.rand(B, S, 1) + 0.5
    weight = torch.randn(11, D, requires_grad=True)
    assert head_of(program, x, weight, rows).logits_mode == "never"
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    assert not fused(x, weight, rows)[1].any()


REINTERPRETED = {
    "a scattered number": lambda z, t: z.scatter(1, t[:, None], 0.5).logsumexp(-1),
    "one_hot": lambda z, t: (z * hot(t)).sum(-1),
    "a loss": lambda z, t: F.cross_entropy(z, t, reduction="none"),
}


@pytest.mark.parametrize("case", REINTERPRETED)
def test_labels_in_the_memory_of_another_dtype(case):
    """They are not those that the memory has in its own dtype."""
    program = REINTERPRETED[case]
    x, weight, labels = inputs()
    found = [
        fn(lambda x, w, t: program(F.linear(x.flatten(0, 1), w), t.view(torch.int64)))
        for fn in (lambda f: f, lambda f: torch.compile(f, backend="fusedce", options=EAGER))
    ]
    eager, fused = (fn(x, weight, labels.flatten().view(torch.float64)) for fn in found)
    torch.testing.assert_close(fused, eager)


def test_a_logit_in_the_bits_of_another_dtype():
    def program(x, weight, labels):
        z = F.linear(x, weight)
        at = z.gather(1, labels).view(torch.float16).to(torch.bfloat16)
        return z.scatter(1, labels, at).logsumexp(-1)

    x, weight, labels = inputs()
    operands = x.detach().flatten(0, 1).bfloat16(), weight.detach().bfloat16(), labels.view(-1, 1)
    fused = torch.compile(program, backend="fusedce", options=EAGER)
    torch.testing.assert_close(fused(*operands), program(*operands))


OF_DETACHED_LOGITS = {
    "weight": lambda z, y: F.binary_cross_entropy_with_logits(
        z, y, weight=(z.sigmoid().detach() - y) ** 2, reduction="sum"
    ),
    "pos_weight": lambda z, y: F.binary_cross_entropy_with_logits(
        z, y, pos_weight=z.sigmoid().detach()
    ),
    "huber_loss": lambda z, y: F.huber_loss(z, y, weight=z.sigmoid().detach()),
}


@pytest.mark.parametrize("case", OF_DETACHED_LOGITS)
def test_weights_of_detached_logits(case):
    """Of a focal loss, for example: no gradient flows through them."""
    check(lambda x, w, t: OF_DETACHED_LOGITS[case](F.linear(x, w), targets(x @ w.T)), *in_order())


def in_order():
    x, weight, labels = inputs()
    return labels, x, weight


OF_K_CLASSES = {
    "where": lambda lp, m: torch.where(m, lp, 0.0),
    "masked_fill": lambda lp, m: lp.masked_fill(m, -3.0),
    "a row": lambda lp, m: torch.where((lp.exp() * lp).sum(-1, True) > -2.0, lp, 2 * lp),
}


@pytest.mark.parametrize("k", [2, B * S])
@pytest.mark.parametrize("case", OF_K_CLASSES)
def test_a_condition_of_rows_beside_several_classes(case, k):
    """Also of as many classes as there are rows."""
    index = torch.randint(V, (B * S, k))

    def program(x, weight, labels):
        lp = F.linear(x.flatten(0, 1), weight).log_softmax(-1)
        return OF_K_CLASSES[case](lp, labels.view(-1, 1) > 3).gather(-1, index).square().sum()

    labels, x, weight = in_order()
    assert report_of(program, x, weight, labels).matches
    check(program, labels, x, weight)


@pytest.mark.parametrize("shape", [(), (1, 1)])
def test_a_number_that_absorbs_the_logits(shape):
    """The same for one row as for several."""
    program = lambda x, w, n: F.cross_entropy(F.linear(x, w) + n, torch.tensor([1]))  # noqa: E731
    operands = torch.randn(1, D), torch.randn(V, D), torch.full(shape, -1e9)
    fused = torch.compile(program, backend="fusedce", options=EAGER)
    torch.testing.assert_close(fused(*operands), program(*operands))
